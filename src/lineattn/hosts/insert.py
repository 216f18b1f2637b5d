"""A block of the sample axis behind a module of a network, under the names that the network has."""

from __future__ import annotations

import copy as copying
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.errors import InputError, unknown
from lineattn.hosts import plans
from lineattn.hosts.probe import evaluating, make_probe, same_draws
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
    the module isn't called just once, it is left as it was.

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
    if hasattr(modules[at], name):
        raise InputError(f"{at!r} has something called {name!r} already; give another module")
    known = inspect.signature(cls).parameters.keys() - {"channels", "init"}
    for key in method_args:
        if key not in known:
            raise unknown(f"argument of {name}", key, known)
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
    _refuse_odd(out, at, probe)
    given: dict[str, Any] = {"init": init, **method_args}
    block = cls(out.shape[1] if out.ndim == 4 else out.shape[2], **given)
    block.added = True
    if not block.residual:
        raise InputError(f"{name} behind {at!r} has to be a block; leave out block=False")
    block.to(device=out.device, dtype=out.dtype).train(place.training)
    with _undone_if_refused(place, name):
        place.add_module(name, block)
        if not isinstance(place, nn.Sequential):  # which calls its children one behind the other
            _Behind(name).register(place)
        behind, _ = _run(net, block, probe)
        if init == "identity" and not _same(before, behind):
            act = "; there are negative numbers, so leave out its ReLU with act=False" if bool((out < 0).any()) else ""
            raise InputError(f"{name} behind {at!r} changes what {type(net).__name__} puts out{act}")
    return net


class _Behind:
    """A forward hook that calls a child on what the module puts out; copies and saved networks keep it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def register(self, module: nn.Module) -> None:
        # Held, since a handle that is loaded keeps its number from being given to another hook.
        self.handle = module.register_forward_hook(self)

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
    if len(outs) != 1:
        path = next(path for path, other in net.named_modules() if other is module)
        times = "never" if not outs else f"{len(outs)} times"
        raise InputError(f"{type(net).__name__} calls {path!r} {times}; give a module that its forward calls once")
    return logits, outs[0]


def _refuse_odd(out: Any, at: str, probe: Tensor) -> None:
    """What is no map and no tokens; a map with its channels last is seen by its rows and columns, which are the
    input's in another size."""
    kind = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
    if isinstance(out, Tensor) and out.ndim == 4 and probe.ndim == 4:
        (_, a, b, c), (rows, columns) = out.shape, probe.shape[2:]
        if a * columns == b * rows and b * columns != c * rows:
            kind, out = f"(B, H, W, C), {kind}", None
    if not isinstance(out, Tensor) or out.ndim not in (3, 4):
        raise InputError(f"{at!r} puts out {kind}; a block stands behind (B, C, H, W) or (B, N, C)")


def _same(a: Any, b: Any) -> bool:
    """Whether two outputs of a network are the same, number for number.

    Raises:
        InputError: They are of a kind that can't be compared.
    """
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(_same, a, b))
    if a is None or isinstance(a, str | int | float):
        return a == b
    raise InputError(f"the network puts out a {type(a).__name__}, which can't be compared; give init='paper'")
