"""Experimental: a plan for a network that no other knows, derived by tracing it with `torch.fx`.

Sites are behind the modules whose class repeats in a ``Sequential`` or ``ModuleList`` and whose output is a map; where
only single layers do, as in VGG, behind the convolutions with their norm and activation. From the input to the last
site the network has to be a chain: each step reads what the one before it put out and nothing else. What comes
behind the last site is the head, of any form. Blocks are not split, so only methods that read a block's output fit.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm

from lineattn.errors import InputError
from lineattn.hosts.probe import evaluating, make_probe
from lineattn.hosts.step import Plan, Step

_FOLLOWS = tuple(f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "normalization"))


class ExperimentalPlan(UserWarning):
    """A network is walked by a plan that was traced, not written for its family."""


@dataclass(frozen=True)
class _Ref:
    """The value of a call, by its name; plans hold no part of a network, so that they can be copied with one."""

    name: str


@dataclass(frozen=True)
class _Call:
    """A node of the traced graph as plain data."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any

    def run(self, net: nn.Module, values: Mapping[str, Any]) -> Any:
        if self.op == "get_attr":
            return reduce(getattr, self.target.split("."), net)
        args, kwargs = _fill(self.args, values), _fill(self.kwargs, values)
        if self.op == "call_module":
            return net.get_submodule(self.target)(*args, **kwargs)
        if self.op == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def step(self, net: nn.Module, before: str, x: Tensor) -> Tensor:
        return self.run(net, {before: x})


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """``value`` with the calls that it refers to."""
    if isinstance(value, _Ref):
        return values[value.name]
    if isinstance(value, (tuple, list)):
        return type(value)(_fill(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _fill(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_fill(value.start, values), _fill(value.stop, values), _fill(value.step, values))
    return value


@dataclass(frozen=True)
class _Trace:
    """The chain up to the last site, and the head."""

    first: str
    chain: tuple[_Call, ...]
    sites: frozenset[str]
    ends: frozenset[str]
    tail: tuple[_Call, ...]
    output: str
    classifier: str

    def matches(self, net: nn.Module) -> bool:
        names = {name for name, _ in net.named_modules()}
        return all(call.target in names for call in self.chain if call.op == "call_module")

    def steps(self, net: nn.Module) -> Iterator[Step]:
        before = self.first
        seen: set[str] = set()
        for call in self.chain:
            if call.op == "call_module" and call.target not in seen:
                path = call.target
                seen.add(path)
                yield Step(path, net.get_submodule(path), path in self.sites, path in self.ends)
            else:
                yield Step(call.name, partial(call.step, net, before))
            before = call.name

    def head(self, net: nn.Module, x: Tensor, pre_logits: bool) -> Tensor:
        values: dict[str, Any] = {self.chain[-1].name: x}
        for call in self.tail:
            if pre_logits and call.target == self.classifier:
                return _fill(call.args[0], values)
            values[call.name] = call.run(net, values)
        return values[self.output]


class _Tracer(fx.Tracer):
    """Goes into ``Sequential`` and into modules that hold blocks, and into no block."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = {id(block) for block in blocks}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self.blocks or not (
            type(m) is nn.Sequential or any(id(inner) in self.blocks for inner in m.modules())
        )


def derive(net: nn.Module) -> Plan:
    """A plan for any network that is a chain of blocks, with a warning that it is experimental.

    Blocks may hold blocks (stages, or a block that is a list of layers): the finest level that is a chain is taken.

    Raises:
        InputError: The network is no such chain, or can't be traced; the message completes "no plan for X: ".
    """
    *finer, coarsest = _levels(net)
    for blocks in finer:
        try:
            trace, probe_size = _derive(net, blocks)
            break
        except InputError:
            continue
    else:
        blocks = coarsest
        trace, probe_size = _derive(net, blocks)
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
    warnings.warn(
        f"no plan knows {type(net).__qualname__}; one was derived by tracing, which is experimental: sites behind "
        f"{len(trace.sites)} blocks ({kinds}), for methods that read only a block's output",
        ExperimentalPlan,
        stacklevel=4,  # the caller of `attach`
    )
    layered = any(isinstance(m, nn.LayerNorm) for m in net.modules())
    batched = any(isinstance(m, _BatchNorm) for m in net.modules())
    return Plan(
        f"traced {type(net).__qualname__}", trace.matches, trace.steps, trace.head, trace.classifier, head_dim=32,
        probe_size=probe_size, norm="layer" if layered and not batched else "batch",
    )  # fmt: skip


def _derive(net: nn.Module, blocks: Sequence[nn.Module]) -> tuple[_Trace, int]:
    """The chain of these blocks, and the side of an input that it takes."""
    modules = dict(net.named_modules())
    first, *nodes, last = _trace(net, blocks).nodes
    nodes = [node for node in nodes if node.op != "placeholder" or node.users]
    output = last.args[0]
    if not isinstance(output, fx.Node):
        raise InputError("it returns more than one tensor")
    marked = {node: modules[str(node.target)] for node in nodes if node.op == "call_module"}
    found = [node for node, module in marked.items() if any(module is block for block in blocks)]
    places = list(dict.fromkeys(_behind(node, marked) for node in found))
    probe_size, shapes = _shapes(net, [str(node.target) for node in places])
    places = [node for node in places if len(shapes.get(str(node.target), ())) == 4]
    if not places:
        raise InputError("none of its repeated blocks puts out a map (B, C, H, W)")
    chain = nodes[: nodes.index(places[-1]) + 1]
    tail = nodes[len(chain) :]
    _check_chain(first, chain, tail, marked)
    paths = [str(node.target) for node in places]
    ends = [a for a, b in pairwise(paths) if shapes[a][1:] != shapes[b][1:]]
    trace = _Trace(
        first.name, tuple(map(_call, chain)), frozenset(paths), frozenset([*ends, paths[-1]]),
        tuple(map(_call, tail)), output.name, _classifier(tail, marked),
    )  # fmt: skip
    return trace, probe_size


def _levels(net: nn.Module) -> Iterator[list[nn.Module]]:
    """What stands in a list and repeats, innermost first: modules of modules, or else convolutions."""
    lists = [m for m in net.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
    items = [item for held in lists for item in held if type(item) not in (nn.Sequential, nn.ModuleList)]
    count = Counter(map(type, items))
    repeated = list(dict.fromkeys(item for item in items if count[type(item)] > 1))
    blocks = [item for item in repeated if any(True for _ in item.children())]
    blocks = blocks or [item for item in repeated if isinstance(item, nn.Conv2d)]
    if not blocks:
        raise InputError("no class of block repeats in a Sequential or ModuleList of it")
    known = set(blocks)
    inside = {block: known.intersection(block.modules()) - {block} for block in blocks}
    depth = Counter(inner for held in inside.values() for inner in held)
    for level in range(max(depth.values(), default=0), -1, -1):
        yield [block for block in blocks if depth[block] == level or (depth[block] < level and not inside[block])]


def _trace(net: nn.Module, blocks: Sequence[nn.Module]) -> fx.Graph:
    """The graph, which has to be the same in training: a flag that was read would be fixed in it."""
    with evaluating(net):
        try:
            graph = _Tracer(blocks).trace(net)
            net.train()
            training = _Tracer(blocks).trace(net)
        except Exception as error:  # its forward is anybody's code
            raise InputError(f"torch.fx can't trace it ({str(error).splitlines()[0]})") from error
    if str(graph) != str(training):
        raise InputError("its forward is another one in training (use modules, such as nn.Dropout, for what differs)")
    return graph


def _shapes(net: nn.Module, paths: Sequence[str]) -> tuple[int, dict[str, torch.Size]]:
    """The shapes that modules put out, and the side of the input, one that the network takes."""
    for side in (64, 224):
        shapes: dict[str, torch.Size] = {}

        def keep(path: str, _module: nn.Module, _args: object, out: Any, shapes: dict = shapes) -> None:
            shapes[path] = out.shape if isinstance(out, Tensor) else torch.Size()

        hooks = [net.get_submodule(path).register_forward_hook(partial(keep, path)) for path in paths]
        try:
            with evaluating(net), torch.no_grad():
                net(make_probe(net, side))
            return side, shapes
        except (RuntimeError, AssertionError):
            continue
        except TypeError as error:
            raise InputError(f"it doesn't run on a batch of images alone ({error})") from error
        finally:
            for hook in hooks:
                hook.remove()
    raise InputError("it runs on images neither of 64x64 nor of 224x224 pixels")


def _behind(node: fx.Node, marked: Mapping[fx.Node, nn.Module]) -> fx.Node:
    """The block, or the last of the norms and activations behind it: one that works in place would change its map."""
    while len(node.users) == 1:
        (after,) = node.users
        if after not in marked or type(marked[after]).__module__ not in _FOLLOWS:
            break
        node = after
    return node


def _check_chain(
    first: fx.Node, chain: Sequence[fx.Node], tail: Sequence[fx.Node], marked: Mapping[fx.Node, nn.Module]
) -> None:
    before, seen = first, set()
    for node in chain:
        if node.all_input_nodes != [before]:
            read = " and ".join(repr(other.name) for other in node.all_input_nodes) or "nothing"
            raise InputError(
                f"it is no chain of blocks: {node.name!r} reads {read}, not just {before.name!r} before it"
            )
        if node in marked:
            parametric = next(marked[node].parameters(), None) is not None
            if node.target in seen and parametric:
                raise InputError(f"its forward calls {node.target!r} twice")
            if node.args != (before,) or node.kwargs:
                raise InputError(f"its forward gives {node.target!r} more than the map")
            seen.add(node.target)
        before = node
    for node in tail:
        if outside := set(node.all_input_nodes) & {first, *chain[:-1]}:
            raise InputError(f"it is no chain of blocks: {node.name!r} of the head reads {outside.pop().name!r}")


def _call(node: fx.Node) -> _Call:
    def ref(other: fx.Node) -> Any:
        return _Ref(other.name)

    args, kwargs = map_arg(node.args, ref), map_arg(node.kwargs, ref)
    return _Call(node.name, node.op, node.target, _thaw(args), _thaw(kwargs))


def _thaw(value: Any) -> Any:
    """fx's own lists and dictionaries as Python's."""
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(_thaw(item) for item in value)
    return {key: _thaw(item) for key, item in value.items()} if isinstance(value, dict) else value


def _classifier(tail: Sequence[fx.Node], marked: Mapping[fx.Node, nn.Module]) -> str:
    """The last linear layer, or the last that has weights."""
    layers = [node for node in tail if node in marked and next(marked[node].parameters(), None) is not None]
    linear = [node for node in layers if isinstance(marked[node], nn.Linear)] or layers
    if not linear:
        raise InputError("there is no classifier behind its last block")
    return str(linear[-1].target)
