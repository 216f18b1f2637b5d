"""Attaching a method to a network, with the proof that the network is still the same."""

from __future__ import annotations

import copy as copying
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from lineattn import registry
from lineattn.errors import InputError, unknown
from lineattn.hosts import plans
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.insert import insert
from lineattn.hosts.probe import evaluating, make_probe, same_draws
from lineattn.hosts.site import StateScope, derive
from lineattn.hosts.step import Plan, Step, run_split
from lineattn.nn.depth.base import DepthAttention, Init, Site
from lineattn.nn.sample.base import SampleAttention
from lineattn.nn.token.base import TokenMixer


@overload
def attach(
    net: nn.Module,
    method: str | type[DepthAttention],
    *,
    at: None = None,
    init: Init = "identity",
    scope: str | StateScope | None = None,
    copy: bool = False,
    **method_args: Any,
) -> DepthHost: ...
@overload
def attach(
    net: nn.Module,
    method: str | type[SampleAttention],
    *,
    at: str,
    init: Init = "identity",
    copy: bool = False,
    **method_args: Any,
) -> nn.Module: ...
def attach(
    net: nn.Module,
    method: str | type[DepthAttention] | type[SampleAttention],
    *,
    at: str | None = None,
    init: Init = "identity",
    scope: str | StateScope | None = None,
    copy: bool = False,
    **method_args: Any,
) -> nn.Module:
    """Puts attention over depth behind every block of a network, or a block of the sample axis behind one module.

    The network is run once on a small random input, by itself and step by step as the host will: where the two differ
    (a subclass with a forward of its own, something between two steps) the first step that does is named. On the meta
    device only shapes can be compared.

    A block of the sample axis becomes a child of the module that it stands behind: the network stays the same object,
    of its own class, and its parameters keep their names.

    Args:
        net: A network of a family that has a plan, see `lineattn.hosts.plans`. Its modules are shared.
        method: Registry name of the method, or its class.
        at: For a block of the sample axis (``external``, ``sagan``, ``double_attention``): the module's name, such as
            ``layer4``. A network without a plan also needs ``example``, an input to run it on.
        init: ``identity`` leaves the network's outputs as they are until it is trained; ``paper`` starts as published.
        scope: Reach of the state: ``carry`` through the network, ``per_stage``, ``every=k`` blocks of a stage, or
            ``anchors=i,j``. By default ``carry`` where the method can, else ``per_stage``.
        copy: Work on a copy of the network.
        method_args: Arguments of the method; ``head_dim`` is the family's unless given.

    Returns:
        The host, on the device of the network and of its type of numbers; for the sample axis the network itself.

    Raises:
        InputError: No plan fits, no such method, module or argument, or the network would not compute what it did.

    Example:
        >>> import lineattn
        >>> host = lineattn.attach(lineattn.create_model("resnet20_cifar").eval(), "kcla")
        >>> x = torch.randn(2, 3, 32, 32)
        >>> torch.equal(host(x), host.backbone(x))
        True
        >>> net = lineattn.attach(lineattn.create_model("resnet20_cifar").eval(), "external", at="stages.2", slots=16)
        >>> net.stages[2].external.memory
        ExternalMemory((16, 64), norm='log', start='equal')
    """
    cls = registry.get(method).cls if isinstance(method, str) else method
    name = (
        method
        if isinstance(method, str)
        else next(
            (card.name for card in map(registry.get, registry.list_methods()) if card.cls is method), method.__name__
        )
    )
    if not isinstance(net, nn.Module):
        raise InputError(
            f"the network is a {type(net).__name__}; give a torch.nn.Module, or use create_model for names"
        )
    if issubclass(cls, TokenMixer):
        raise InputError(
            f"{name} is of the token axis and can't be attached; it is a layer: {cls.__module__}.{cls.__qualname__}"
        )
    if issubclass(cls, SampleAttention):
        if at is None or scope is not None:
            raise InputError(f"{name} stands behind one module: give its name as at=, such as 'layer4', and no scope")
        return insert(net, cls, name, at, init=init, copy=copy, **method_args)
    if at is not None:
        raise InputError(f"at={at!r}: {name} stands behind every block; give scope= for where it looks back to")
    if any(isinstance(module, DepthHost) for module in net.modules()):
        raise InputError(
            f"the network already has attention over depth ({name} can't be attached a second time); attach to its "
            "backbone, host.backbone, for another method"
        )
    plan = plans.find(net)
    reach = StateScope.parse(scope, carries=cls.carries)
    _refuse_unknown(cls, name, method_args)
    if copy:
        net = copying.deepcopy(net)

    probe = make_probe(net, plan.probe_side(net))
    proof = prove(net, plan, probe, split=False)
    modules = {}
    for path, site in derive(proof.walked, reach, carries=cls.carries, norm=plan.norm).items():
        modules[path] = make_method(cls, site, plan, init, method_args)
    host = _host(net, plan, modules, proof)
    if host.needs_split:
        try:
            prove(net, plan, probe, split=True)
        except Unsplittable as error:
            raise InputError(f"{error}, which {name} needs; methods that don't: {', '.join(_unsplit())}") from error
    like = next(net.parameters())
    host.sites.to(device=like.device, dtype=like.dtype).train(net.training)
    host.training = net.training
    return host


def as_host(net: nn.Module) -> DepthHost:
    """A network as a host without attention, for its maps; a host as it is.

    Raises:
        InputError: No plan fits, or the network would not compute what it does.

    Example:
        >>> import lineattn
        >>> host = as_host(lineattn.create_model("resnet20_cifar"))
        >>> [tuple(maps.shape) for maps in host.features(torch.zeros(1, 3, 32, 32))]
        [(1, 16, 32, 32), (1, 32, 16, 16), (1, 64, 8, 8)]
    """
    if isinstance(net, DepthHost):
        return net
    plan = plans.find(net)
    return _host(net, plan, {}, prove(net, plan, make_probe(net, plan.probe_side(net)), split=False))


def make_method(
    cls: type[DepthAttention], site: Site, plan: Plan, init: Init, given: Mapping[str, Any]
) -> DepthAttention:
    """The method at a site of a family, whose width of heads it has unless another is given."""
    defaults = {"head_dim": math.gcd(plan.head_dim, site.channels)} if "head_dim" in _arguments(cls) else {}
    return cls(site, init=init, **(defaults | dict(given)))


@dataclass(frozen=True)
class Proof:
    """What is known of a network that its plan was compared with.

    Attributes:
        walked: The steps that are modules, and the shapes of their outputs, as maps.
        head_width: Channels that its classifier reads.
        side: Pixels of a side of the images that it was compared on.
    """

    walked: list[tuple[Step, torch.Size]]
    head_width: int
    side: int

    @property
    def num_features(self) -> int:
        return self.walked[-1][1][1]


def prove(net: nn.Module, plan: Plan, probe: Tensor, *, split: bool) -> Proof:
    """Compares a network with its plan, step by step.

    Args:
        net: The network; left as it was found, its training flags and the random state too.
        plan: How the host would walk it.
        probe: An input.
        split: Whether to walk the blocks in two halves, branch and shortcut.

    Raises:
        InputError: The first step whose output isn't the network's own, or that can't be split.
    """
    walked: list[tuple[Step, torch.Size]] = []
    with evaluating(net), torch.no_grad():
        steps, size = list(plan.steps(net)), (probe.shape[2], probe.shape[3])
        logits, outputs, ran = _run_plain(net, steps, probe)
        with _recording(net) as ran_walked, same_draws(probe):
            x = probe
            for step in steps:
                x = _walk_step(step, x, split)
                if split and step.site:
                    ran_walked.add(step.path)  # a block may have parameters of its own, which its halves read
                if not isinstance(step.module, nn.Module):
                    continue
                if step.path not in outputs:
                    raise InputError(f"{_name(net)}: its forward never calls {step.path!r}, which a {plan.family} does")
                _compare(x, outputs[step.path], f"{_name(net)}: {step.path!r} is the first step that puts out", plan)
                walked.append((step, step.show(x, size).shape))
            features = plan.head(net, x.clone(), True).shape  # copied: a head may work in place
            head_width = getattr(net, "head_hidden_size", None) or features[1 if len(features) == 4 else -1]
            _compare(plan.head(net, x, False), logits, f"{_name(net)}: after the last step, the head puts out", plan)
    homes = {name.rpartition(".")[0] for name in plan.stem}  # read, but not called
    if extra := sorted(ran - ran_walked - homes):
        raise InputError(f"{_name(net)}: its forward calls {extra[0]!r}, which a {plan.family} has not; write a plan")
    return Proof(walked, head_width, probe.shape[2])


def _walk_step(step: Step, x: Tensor, split: bool) -> Tensor:
    if not (split and step.site):
        return step.module(x)
    if step.split is None:
        raise Unsplittable(f"{step.path!r} can't be split into branch and shortcut")
    return run_split(step.split, step.module, x)[0]


def _run_plain(net: nn.Module, steps: list[Step], probe: Tensor) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """The network's own outputs, those of its steps, and the names of the layers that ran."""
    outputs: dict[str, Tensor] = {}

    def keep(path: str, _module: nn.Module, _args: object, out: Tensor) -> None:
        # A copy: the next step may work in place. The first call counts, as a step is walked once.
        outputs.setdefault(path, out.clone())

    with ExitStack() as stack:
        for step in steps:
            if isinstance(step.module, nn.Module):
                stack.callback(step.module.register_forward_hook(partial(keep, step.path)).remove)
        ran = stack.enter_context(_recording(net))
        stack.enter_context(same_draws(probe))
        return net(probe), outputs, ran


@contextmanager
def _recording(net: nn.Module) -> Iterator[set[str]]:
    """Names of the layers with parameters that are called meanwhile: one behind a zero gain shows only here."""
    ran: set[str] = set()
    with ExitStack() as stack:
        for name, module in net.named_modules():
            if next(module.parameters(recurse=False), None) is not None and name:
                hook = module.register_forward_hook(lambda _module, _args, _out, name=name: ran.add(name))
                stack.callback(hook.remove)
        yield ran


def _compare(ours: Tensor, theirs: Tensor, what: str, plan: Plan) -> None:
    if ours.shape == theirs.shape and (ours.is_meta or torch.equal(ours, theirs)):
        return
    if ours.shape != theirs.shape:
        difference = f"shape {tuple(theirs.shape)}, not {tuple(ours.shape)}"
    else:
        worst = (ours - theirs).abs().max().item()
        if worst <= 8 * torch.finfo(ours.dtype).eps * theirs.abs().max().item():
            return  # an accelerator may choose another kernel for the same step
        difference = f"other numbers (by up to {worst:.2g})"
    raise InputError(
        f"{what} {difference} than a {plan.family} would: the network's forward does more than its plan says; "
        "attach to the original class, or write a plan for this one"
    )


def _name(net: nn.Module) -> str:
    return type(net).__qualname__


def _host(net: nn.Module, plan: Plan, sites: Mapping[str, DepthAttention], proof: Proof) -> DepthHost:
    info = [
        {"num_chs": shape[1], "reduction": proof.side // shape[2], "module": f"backbone.{step.path}"}
        for step, shape in proof.walked
        if step.is_feature
    ]
    return DepthHost(net, plan, sites, info, proof.num_features, proof.head_width)


class Unsplittable(InputError):
    """A method needs a block's branch, and the family's blocks can't be split."""


def _unsplit() -> list[str]:
    """Methods that stand behind any block, whatever is in it."""
    cards = map(registry.get, registry.list_methods("depth"))
    return [card.name for card in cards if card.cls.position == "after" and not card.cls.needs_shortcut]


def _refuse_unknown(cls: type[DepthAttention], name: str, given: Mapping[str, Any]) -> None:
    known = _arguments(cls)
    for key in given:
        if key not in known:
            raise unknown(f"argument of {name}", key, known)


def _arguments(cls: type[DepthAttention]) -> set[str]:
    """Names of the method's own arguments."""
    return inspect.signature(cls).parameters.keys() - {"site", "init"}
