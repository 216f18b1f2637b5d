"""Other attention in the place of a network's own: the modules are exchanged, everything else stays."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from lineattn import registry
from lineattn.errors import InputError, unknown
from lineattn.hosts.probe import evaluating
from lineattn.hosts.step import loaded
from lineattn.nn.sample.base import SampleAttention
from lineattn.nn.sample.self_attention import SelfAttention

_FAR = 2**24  # positions; a method that is dearer there is dearer everywhere


@dataclass(frozen=True)
class Swapped:
    """One exchange.

    Attributes:
        path: The module's name in the network.
        was: What stood there.
        params: Parameters before and behind.
        windows: Windows of an image, or 1; ``None`` where not known.
        positions: Positions of each, ``None`` where not known.
        macs: Multiply-accumulates for one image before and behind, ``None`` where the positions are not known.
        even: Positions from which on the new one is no dearer, ``None`` where it always or never is.
        hint: What would make it cheaper.
    """

    path: str
    was: str
    params: tuple[int, int]
    windows: int | None = None
    positions: int | None = None
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
                of = f"{one.windows} x {one.positions}" if one.windows != 1 else f"{one.positions}"
                line += f", {one.macs[0] / 1e6:,.1f} -> {one.macs[1] / 1e6:,.1f} MMACs at {of} positions"
            lines.append(line)
        before, behind = (sum(one.params[i] for one in self.swapped) for i in (0, 1))
        total = f"in all {before:,} -> {behind:,} parameters"
        costs = [one.macs for one in self.swapped if one.macs is not None]
        if costs:
            total += f", {sum(a for a, _ in costs) / 1e6:,.1f} -> {sum(b for _, b in costs) / 1e6:,.1f} MMACs an image"
        lines.append(total)
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
        >>> print(swap(net, "blocks.*.attn", "external_multihead", coef=1))
        external_multihead in the place of 1 modules
          blocks.0.attn (Attention): 148,224 -> 107,264 parameters, 44.1 -> 33.9 MMACs at 197 positions
        in all 148,224 -> 107,264 parameters, 44.1 -> 33.9 MMACs an image
    """
    card = registry.get(method, axis="sample")
    known = inspect.signature(card.cls).parameters
    for key in method_args:
        if key not in known or key == "channels":
            raise unknown(f"argument of {method}", key, known.keys() - {"channels"})
    places = list(_places(net, pattern))
    seen = _positions(net, [path for path, _ in places], example)
    swapped = []
    for path, place in places:
        build = _builder(card.cls, place, method_args)
        old, new = net.get_submodule(path), build(**method_args)
        like = next(net.parameters())
        module = place.wrap(new).to(device=like.device, dtype=like.dtype).train(old.training)
        net.set_submodule(path, module)
        report = Swapped(path, type(old).__name__, (_count(old), _count(module)))
        swapped.append(_with_cost(report, place, new, build, method_args, *seen[path]) if path in seen else report)
    return SwapReport(method, tuple(swapped))


class _Place(NamedTuple):
    """What has to be known of a module to replace it: its width and heads, its cost, and how it is called."""

    channels: int
    heads: int | None
    residual: bool
    macs: Callable[[int], int]
    wrap: Callable[[SampleAttention], nn.Module]


def _places(net: nn.Module, pattern: str) -> Iterator[tuple[str, _Place]]:
    names = [name for name, _ in net.named_modules() if name and fnmatch.fnmatchcase(name, pattern)]
    attentions = [name for name, module in net.named_modules() if name and _place(module) is not None]
    if not names:
        has = f"; its attention: {', '.join(attentions[:6])}" if attentions else "; none of its modules is an attention"
        raise InputError(f"{type(net).__name__} has no module {pattern!r}{has}")
    found: list[str] = []
    for name in names:
        if any(name.startswith(f"{outer}.") for outer in found):
            continue  # a part of what is replaced
        module = net.get_submodule(name)
        place = _place(module)
        if place is None:
            has = f"this network has {', '.join(attentions[:6])}" if attentions else "this network has none"
            raise InputError(
                f"{name!r} is a {type(module).__qualname__}, no attention that can be replaced (those of timm's vision "
                f"transformers and Swin, torch.nn.MultiheadAttention, our own); {has}"
            )
        found.append(name)
        yield name, place


def _place(module: nn.Module) -> _Place | None:
    if isinstance(module, SampleAttention):
        heads = getattr(module, "heads", None)
        return _Place(module.channels, heads, module.residual, module.macs, lambda new: new)
    for kind, adapter in (
        (loaded("timm.layers.attention", "Attention"), _InTimm),
        (loaded("timm.models.swin_transformer", "WindowAttention"), _InSwin),
        ((nn.MultiheadAttention,), _InTorch),
    ):
        if isinstance(module, kind):
            channels, heads = _width(module)
            return _Place(channels, heads, False, SelfAttention(channels, 1).macs, adapter)
    return None


def _width(module: Any) -> tuple[int, int]:
    """Channels and heads of a self-attention that is as wide at its end as at its beginning."""
    if isinstance(module, nn.MultiheadAttention):
        if not module.batch_first or module.kdim != module.embed_dim or module.vdim != module.embed_dim:
            raise InputError(
                "a torch.nn.MultiheadAttention is replaced where it is a self-attention with batch_first=True"
            )
        return module.embed_dim, module.num_heads
    channels, out = module.qkv.in_features, module.proj.out_features
    if channels != out:
        raise InputError(f"an attention from {channels} to {out} channels can't be replaced: it is no self-attention")
    return channels, module.num_heads


def _builder(cls: type[SampleAttention], place: _Place, given: dict[str, Any]) -> Callable[..., SampleAttention]:
    """The method's constructor for a place; a method that is a block has its core where there is a residual already."""
    known = inspect.signature(cls).parameters
    more: dict[str, Any] = {"heads": place.heads} if "heads" in known and place.heads and "heads" not in given else {}
    if cls.residual and not place.residual:
        if "block" not in known:
            raise InputError(f"{cls.__name__} is a residual block, and a transformer's attention has no residual")
        more["block"] = False
    if place.residual and not cls.residual:
        raise InputError(f"{cls.__name__} has no residual, and what it would replace is a residual block")
    return lambda **arguments: cls(place.channels, **(more | arguments))


def _with_cost(
    report: Swapped,
    place: _Place,
    new: SampleAttention,
    build: Callable[..., SampleAttention],
    given: dict[str, Any],
    windows: int,
    positions: int,
    passes: int,
) -> Swapped:
    times = windows * passes
    macs = (windows * place.macs(positions), times * new.macs(positions))
    even, hint = None, ""
    if macs[1] > macs[0]:
        if new.macs(_FAR) <= place.macs(_FAR):
            even = _first(lambda n: new.macs(n) <= place.macs(n))
        if given.get("coef", 4) != 1 and "coef" in inspect.signature(type(new)).parameters:
            cheaper = times * build(**(given | {"coef": 1, "slots": given.get("slots", 64)})).macs(positions)
            hint = f"; with coef=1, slots={given.get('slots', 64)} there would be {cheaper / 1e6:,.1f} MMACs"
        hint += f"; fused for evaluation it has {times * new.fuse().macs(positions) / 1e6:,.1f} MMACs"
    return Swapped(report.path, report.was, report.params, windows, positions, macs, even, hint)


def _first(holds: Callable[[int], bool]) -> int:
    """The least number from which on something holds, by halving."""
    low, high = 0, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _positions(net: nn.Module, paths: list[str], example: Tensor | None) -> dict[str, tuple[int, int, int]]:
    """Windows, positions in each, and how often each is attended, for one image; nothing is computed."""
    found: dict[str, tuple[int, int, int]] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["query"]
            passes = 1 if kwargs.get("mask") is None else _InSwin.parts
            found[path] = x.shape[0], x.shape[1] if x.ndim == 3 else x.shape[2] * x.shape[3], passes

        return hook

    hooks = [net.get_submodule(path).register_forward_pre_hook(note(path), with_kwargs=True) for path in paths]
    shape = (1, 3, *_size(net)) if example is None else (1, *example.shape[1:])
    try:
        with FakeTensorMode(), torch.no_grad(), evaluating(net):
            tensors = {
                n: torch.empty(t.shape, dtype=t.dtype) for n, t in (*net.named_parameters(), *net.named_buffers())
            }
            dtype = next(net.parameters()).dtype if example is None else example.dtype
            functional_call(net, tensors, (torch.empty(shape, dtype=dtype),))
    except Exception:  # anybody's code, on an image of a size that is guessed: the costs are left out
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _size(net: Any) -> tuple[int, int]:
    config = getattr(net, "pretrained_cfg", None) or {}
    side = getattr(net, "image_size", 224)
    grid = getattr(getattr(net, "patch_embed", None), "img_size", None)
    return grid or tuple(config.get("input_size", (3, side, side))[1:])


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _InTimm(nn.Module):
    """As timm's blocks call their attention."""

    def __init__(self, attention: SampleAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _refuse_causal(self.attention, is_causal)
        if attn_mask is not None:
            # Of positions that exist, as timm makes it for images of many sizes: the same for each query.
            if attn_mask.dtype != torch.bool or attn_mask.ndim != 4 or attn_mask.shape[1:3] != (1, 1):
                raise _no_pairs(self.attention, attn_mask)
            attn_mask = attn_mask[:, 0, 0]
        return self.attention(x, attn_mask)


class _InSwin(nn.Module):
    """As timm's Swin calls the attention of its windows. A shifted window has parts that do not see each other."""

    parts = 4  # of a window that is shifted over the edges of both rows and columns

    def __init__(self, attention: SampleAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attention(x)
        same = mask == 0  # (windows, N, N): pairs of one part
        first = same.to(torch.uint8).argmax(-1)  # a part's first position is its name
        leads = first == torch.arange(mask.shape[-1], device=mask.device)
        part = (leads.cumsum(-1) - 1).gather(-1, first).repeat(x.shape[0] // mask.shape[0], 1)
        out = torch.zeros_like(x)
        for i in range(self.parts):
            here = part == i
            out = torch.where(here[..., None], self.attention(x, here), out)
        return out


class _InTorch(nn.Module):
    """As `torch.nn.MultiheadAttention` is called for self-attention."""

    batch_first = True
    in_proj_bias = None  # torch.nn.TransformerEncoderLayer looks here whether it may leave out the call

    def __init__(self, attention: SampleAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        _refuse_causal(self.attention, is_causal)
        if attn_mask is not None:
            raise _no_pairs(self.attention, attn_mask)
        if key is not query or value is not query:
            raise InputError(
                f"{type(self.attention).__name__} has memories in the place of keys and values; none fit in"
            )
        if key_padding_mask is not None:
            absent = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask < 0
            return self.attention(query, ~absent), None
        return self.attention(query), None


def _refuse_causal(attention: nn.Module, is_causal: bool) -> None:
    if is_causal:
        raise InputError(
            f"is_causal=True: {type(attention).__name__} normalises over all positions together, later ones too; use a "
            "method of the token axis"
        )


def _no_pairs(attention: nn.Module, mask: Tensor) -> InputError:
    return InputError(
        f"a mask {tuple(mask.shape)} of {mask.dtype} says which positions see which; {type(attention).__name__} takes "
        "one of positions that exist, (B, 1, 1, N) of torch.bool"
    )
