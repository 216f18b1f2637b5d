"""Other attention in the place of a network's own: the modules are exchanged, everything else stays."""

from __future__ import annotations

import copy
import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lineattn import registry
from lineattn.errors import InputError, unknown
from lineattn.hosts.called import Called, InSwin, InTimm, InTorch, called
from lineattn.hosts.probe import images_of
from lineattn.hosts.step import loaded
from lineattn.nn.sample.base import SampleAttention
from lineattn.nn.sample.self_attention import self_attention_macs

_FAR = 2**24  # positions; a method that is dearer there is dearer everywhere


@dataclass(frozen=True)
class Swapped:
    """One exchange.

    Attributes:
        path: The module's name in the network.
        was: What stood there.
        params: Parameters before and behind.
        at: Positions that an image is attended at, as text; empty where not known.
        macs: Multiply-accumulates for one image before and behind, ``None`` where the positions are not known.
        even: Positions from which on the new one is no dearer, ``None`` where it always or never is.
        hint: What would make it cheaper.
    """

    path: str
    was: str
    params: tuple[int, int]
    at: str = ""
    macs: tuple[int, int] | None = None
    even: int | None = None
    hint: str = ""


@dataclass(frozen=True)
class SwapReport:
    """What `swap` has exchanged; as text, one line an exchange and their sums."""

    method: str
    swapped: tuple[Swapped, ...]

    def __str__(self) -> str:
        lines = [f"{self.method} in the place of {len(self.swapped)} modules"]
        for one in self.swapped:
            before, behind = one.params
            line = f"  {one.path} ({one.was}): {before:,} -> {behind:,} parameters"
            if one.macs is not None:
                line += f", {one.macs[0] / 1e6:,.1f} -> {one.macs[1] / 1e6:,.1f} MMACs at {one.at} positions"
            lines.append(line)
        before, behind = (sum(one.params[i] for one in self.swapped) for i in (0, 1))
        total = f"in all {before:,} -> {behind:,} parameters"
        costs = [one.macs for one in self.swapped if one.macs is not None]
        if costs:
            total += f", {sum(a for a, _ in costs) / 1e6:,.1f} -> {sum(b for _, b in costs) / 1e6:,.1f} MMACs an image"
        lines.append(total if costs else f"{total}; for MACs give example=, an input of the network")
        dear = next((one for one in self.swapped if one.macs and one.macs[1] > one.macs[0]), None)
        if dear is not None:
            until = f"below {dear.even:,} positions" if dear.even else "at any number of positions"
            lines.append(f"{self.method} is the dearer one {until} (as in {dear.path}){dear.hint}")
        return "\n".join(lines)


def swap(net: nn.Module, pattern: str, method: str, *, example: Tensor | None = None, **method_args: Any) -> SwapReport:
    """Puts a method of the sample axis in the place of a network's attention.

    Takes the attention of timm's vision transformers (``blocks.*.attn``), of its Swin (``layers.*.attn``; windows stay,
    and what a shifted window separates stays separate), `torch.nn.MultiheadAttention` as torchvision's transformers and
    `torch.nn.TransformerEncoderLayer` use it, and methods of the sample axis themselves. What stands in a transformer
    gets no residual of its own: ``external`` is its core there.

    The new modules start untrained; the other weights of the network stay as they are.

    Args:
        net: The network; changed in place.
        pattern: Names of its modules, with ``*`` and ``?``, as `torch.nn.Module.named_modules` has them.
        method: Registry name of a method of the sample axis.
        example: An input of the network, one image, to know the positions from. By default an image of the size that
            the network says it is for.
        method_args: Arguments of the method; heads are those of what is replaced unless given.

    Returns:
        What was exchanged, and what that costs; print it.

    Raises:
        InputError: Nothing fits the pattern, or what does is no attention that can be replaced.

    Example:
        >>> import timm
        >>> net = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=1)
        >>> print(swap(net, "blocks.*.attn", "external_multihead", coef=1, slots=64))
        external_multihead in the place of 1 modules
          blocks.0.attn (Attention): 148,224 -> 82,432 parameters, 44.0 -> 19.4 MMACs at 197 positions
        in all 148,224 -> 82,432 parameters, 44.0 -> 19.4 MMACs an image
    """
    cls = registry.get(method, axis="sample").cls
    known = inspect.signature(cls).parameters
    for key in method_args:
        if key not in known or key == "channels":
            raise unknown(f"argument of {method}", key, known.keys() - {"channels"})
    places = _places(net, pattern)
    calls = _calls(net, [place.path for place in places], example)
    new, swapped = [], []
    for place in places:  # all are built before the first is exchanged
        arguments = _arguments(cls, place, method_args)
        attention = cls(place.channels, **arguments)
        attention.added = True
        if attention.residual != place.residual:
            has, what = ("a residual", "has one already") if attention.residual else ("no residual", "needs one")
            raise InputError(f"{method} has {has} of its own, and the place of {place.path!r} {what}")
        like = next(place.module.parameters(), next(net.parameters()))
        new.append(place.adapter(attention).to(device=like.device, dtype=like.dtype).train(place.module.training))
        params = _count(place.module), _count(new[-1])
        report = Swapped(place.path, type(called(place.module)).__name__, params)
        if place.path in calls:
            report = _with_cost(report, cls, arguments, place, calls[place.path])
        swapped.append(report)
    for place, module in zip(places, new, strict=True):
        for name in place.names:
            net.set_submodule(name, module)
    for module in net.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # a short cut around its layers, with weights that it takes from them
    return SwapReport(method, tuple(swapped))


class _Place(NamedTuple):
    """An attention of the network, and what has to be known to replace it."""

    names: list[str]
    module: nn.Module
    channels: int
    heads: int | None
    residual: bool
    macs: Callable[[int], int]
    adapter: Callable[[SampleAttention], nn.Module]

    @property
    def path(self) -> str:
        return self.names[0]


def _places(net: nn.Module, pattern: str) -> list[_Place]:
    """The attention modules that fit, each once, with all its names."""
    everything = [(name, module) for name, module in net.named_modules(remove_duplicate=False) if name]
    attentions = list(dict.fromkeys(name for name, module in everything if _is_attention(module)))
    has = f"its attention: {', '.join(attentions[:6])}" if attentions else "none of its modules is an attention"
    names: dict[nn.Module, list[str]] = {}
    found: list[str] = []
    for name, module in everything:
        if not fnmatch.fnmatchcase(name, pattern) or any(name.startswith(f"{outer}.") for outer in found):
            continue  # another, or a part of what is replaced
        if not _is_attention(module):
            raise InputError(
                f"{name!r} is a {type(module).__qualname__}, no attention that can be replaced (timm's Attention and "
                f"WindowAttention, torch.nn.MultiheadAttention, our own); of this network, {has}"
            )
        found.append(name)
        names.setdefault(module, []).append(name)
    if not names:
        raise InputError(f"{type(net).__name__} has no module {pattern!r}; {has}")
    return [_place(held, module) for module, held in names.items()]


def _adapter(module: nn.Module) -> type[nn.Module] | None:
    """What stands between a network's way to call its attention and ours."""
    if isinstance(module, loaded("timm.layers.attention", "Attention")):
        return InTimm
    if isinstance(module, loaded("timm.models.swin_transformer", "WindowAttention")):
        return InSwin
    return InTorch if isinstance(module, nn.MultiheadAttention) else None


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, SampleAttention | Called) or _adapter(module) is not None


def _place(names: list[str], module: Any) -> _Place:
    """Raises InputError where the module is no self-attention of one width."""
    ours = called(module)
    if isinstance(ours, SampleAttention):
        adapter = (lambda new: new) if ours is module else type(module)
        return _Place(names, module, ours.channels, getattr(ours, "heads", None), ours.residual, ours.macs, adapter)
    if isinstance(module, nn.MultiheadAttention):
        if not module.batch_first or module.kdim != module.embed_dim or module.vdim != module.embed_dim:
            raise InputError(
                f"{names[0]!r}: a torch.nn.MultiheadAttention is replaced where it is a self-attention with "
                "batch_first=True"
            )
        channels, heads = module.embed_dim, module.num_heads
    else:
        channels, heads = module.qkv.in_features, module.num_heads
        if channels != module.proj.out_features:
            raise InputError(
                f"{names[0]!r}: an attention from {channels} to {module.proj.out_features} channels can't be replaced"
            )
    adapter = _adapter(module)
    assert adapter is not None
    return _Place(names, module, channels, heads, False, partial(self_attention_macs, channels), adapter)


def _arguments(cls: type[SampleAttention], place: _Place, given: dict[str, Any]) -> dict[str, Any]:
    """With the heads of the place; where there is a residual already, a block that has a core is that."""
    known = inspect.signature(cls).parameters
    more: dict[str, Any] = {}
    if "heads" in known and place.heads:
        more["heads"] = place.heads
    if "block" in known and not place.residual:
        more["block"] = False
    return more | given


def _with_cost(
    report: Swapped, cls: type[SampleAttention], arguments: dict[str, Any], place: _Place, calls: list[_Call]
) -> Swapped:
    def build(**other: Any) -> SampleAttention:
        with torch.device("meta"):  # draws no random numbers
            return cls(place.channels, **(arguments | other))

    def total(attention: SampleAttention) -> int:
        return sum(call.windows * call.passes * attention.macs(call.positions) for call in calls)

    new, passes = build(), calls[0].passes
    macs = (sum(call.windows * place.macs(call.positions) for call in calls), total(new))
    even, hint = None, ""
    if macs[1] > macs[0]:
        if passes * new.macs(_FAR) <= place.macs(_FAR):
            even = _first(lambda n: passes * new.macs(n) <= place.macs(n))
        if "coef" in inspect.signature(cls).parameters:
            slots = arguments.get("slots", 64)
            cheaper = total(build(coef=1, slots=slots))
            if cheaper < macs[1]:
                hint = f"; with coef=1, slots={slots} there would be {cheaper / 1e6:,.1f} MMACs"
        folded = total(new.fuse())
        if folded < macs[1]:
            hint += f"; fused for evaluation it has {folded / 1e6:,.1f} MMACs"
    at = ", ".join(dict.fromkeys(call.text for call in calls))
    return Swapped(report.path, report.was, report.params, at, macs, even, hint)


def _first(holds: Callable[[int], bool]) -> int:
    """The least number from which on something holds, by halving."""
    low, high = 0, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class _Call(NamedTuple):
    """One call of an attention for one image: how many windows, how many positions in each, and how often each is
    gone through by a method without keys."""

    windows: int
    positions: int
    passes: int

    @property
    def text(self) -> str:
        return f"{self.positions}" if self.windows == 1 else f"{self.windows} x {self.positions}"


def _calls(net: nn.Module, paths: list[str], example: Tensor | None) -> dict[str, list[_Call]]:
    """What the modules are called with for one image; of a copy of the network, which computes nothing."""
    found: dict[str, list[_Call]] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["query"]
            windowed = isinstance(module, InSwin) or _adapter(module) is InSwin
            passes = InSwin.parts if windowed and kwargs.get("mask") is not None else 1
            positions = x.shape[1] if x.ndim == 3 else x.shape[2] * x.shape[3]
            found.setdefault(path, []).append(_Call(x.shape[0], positions, passes))

        return hook

    if example is None:
        images = images_of(net)
        if images is None:
            return {}
        channels, like = images
        example = torch.empty(1, channels, *_size(net), dtype=like.dtype, device="meta")
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in net.buffers()}
    memo |= {id(parameter): nn.Parameter(parameter.to("meta")) for parameter in net.parameters()}
    twin = copy.deepcopy(net, memo).eval()
    for path in paths:
        twin.get_submodule(path).register_forward_pre_hook(note(path), with_kwargs=True)
    try:
        with torch.no_grad(), torch.device("meta"):
            twin(example[:1].to("meta"))
    except (
        Exception
    ):  # anybody's code, on an image of a size that is guessed: the costs are left out, as the report says
        return {}
    return found


def _size(net: Any) -> tuple[int, int]:
    config = getattr(net, "pretrained_cfg", None) or {}
    side = getattr(net, "image_size", 224)
    told = getattr(getattr(net, "patch_embed", net), "img_size", None)
    return told if isinstance(told, tuple) else tuple(config.get("input_size", (3, side, side))[1:])


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
