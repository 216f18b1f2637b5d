"""A block of the sample axis behind a module of a network, under the names that the network has."""

from __future__ import annotations

import copy as copying
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.errors import InputError, unknown
from lineattn.hosts import plans
from lineattn.hosts.probe import evaluating, make_probe, same_draws
from lineattn.hosts.step import NHWC
from lineattn.nn.depth.base import Init
from lineattn.nn.sample.base import SampleAttention


def insert(
    net: nn.Module,
    cls: type[SampleAttention],
    name: str,
    at: str,
    *,
    init: Init = "identity",
    copy: bool = False,
    example: Tensor | None = None,
    **method_args: Any,
) -> nn.Module:
    """Puts a block behind the module ``at``; `lineattn.attach` calls it for methods of the sample axis.

    The block becomes the module's child called ``name``, so that all other parameters keep their names and weights of
    the network load as before. The network is run on a small input without and with it: where its output changes, or
    the module isn't called, it is left as it was.

    Raises:
        InputError: See `lineattn.attach`.
    """
    if not cls.residual:
        raise InputError(
            f"{name} has no residual, so it can't stand behind a module; lineattn.swap puts it in one's place"
        )
    modules = dict(net.named_modules())
    if at not in modules or not at:
        raise unknown(f"module of {type(net).__name__}", at, [path for path in modules if path.count(".") < 2 and path])
    if isinstance(getattr(modules[at], name, None), SampleAttention):
        raise InputError(f"{at!r} has {name} behind it already")
    if copy:
        net = copying.deepcopy(net)
    place: Any = net.get_submodule(at)
    plan = next((plan for plan in plans.PLANS if plan.matches(net)), None)
    if example is not None:
        probe = example
    elif plan is not None:
        probe = make_probe(net, plan.probe_side(net))
    else:
        raise InputError(f"no plan knows a {type(net).__name__}; give example=, an input, for {name} to be proved on")
    before, out = _run(net, place, probe)
    last = plan is not None and any(
        step.maps is NHWC and f"{step.path}.".startswith(f"{at}.") for step in plan.steps(net)
    )
    if not isinstance(out, Tensor) or out.ndim not in (3, 4) or (last and out.ndim == 4):
        kind = (
            f"a {type(out).__name__}" if not isinstance(out, Tensor) else "(B, H, W, C)" if last else tuple(out.shape)
        )
        raise InputError(f"{at!r} puts out {kind}; a block stands behind (B, C, H, W) or (B, N, C)")
    known = inspect.signature(cls).parameters.keys() - {"channels", "init"}
    for key in method_args:
        if key not in known:
            raise unknown(f"argument of {name}", key, known)
    given: dict[str, Any] = {"init": init, **method_args}
    block = cls(out.shape[1] if out.ndim == 4 else out.shape[2], **given)
    block.to(device=out.device, dtype=next(net.parameters()).dtype).train(place.training)
    with _undone_if_refused(place, name):
        place.add_module(name, block)
        if not isinstance(place, nn.Sequential):  # which calls its children one behind the other
            place.register_forward_hook(_Behind(name))
        behind, _ = _run(net, block, probe)
        if init == "identity" and not _same(before, behind):
            act = "; there are negative numbers, so leave out its ReLU with act=False" if bool((out < 0).any()) else ""
            raise InputError(f"{name} behind {at!r} changes what {type(net).__name__} puts out{act}")
    return net


class _Behind:
    """A forward hook that calls a child on what the module puts out; copies and saved networks keep it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, _args: object, out: Tensor) -> Tensor:
        return module.get_submodule(self.name)(out)


@contextmanager
def _undone_if_refused(place: nn.Module, name: str) -> Iterator[None]:
    hooks = dict(place._forward_hooks)
    try:
        yield
    except InputError:
        delattr(place, name)
        for key in place._forward_hooks.keys() - hooks.keys():
            del place._forward_hooks[key]
        raise


def _run(net: nn.Module, module: nn.Module, probe: Tensor) -> tuple[Any, Any]:
    """What the network and one of its modules put out."""
    outs: list[Any] = []
    hook = module.register_forward_hook(lambda _module, _args, out: outs.append(out))
    try:
        with evaluating(net), torch.no_grad(), same_draws(probe):
            logits = net(probe)
    finally:
        hook.remove()
    if not outs:
        path = next(path for path, other in net.named_modules() if other is module)
        raise InputError(f"{type(net).__name__} never calls {path!r}; give a module that its forward calls")
    return logits, outs[0]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return all(map(_same, a, b))
    return not isinstance(a, Tensor) or torch.equal(a, b)
