r"""Where a tile of an image lies, and what a network that sees the tile alone has to be told of the whole.

Two operators look beyond a neighbourhood, and are exact over tiles all the same once they are told:

.. math::
    \ell_j = \log \sum_i e^{L_{ij}}, \qquad y_i = x\Big(i\, \frac{n - 1}{m - 1}\Big)

the log-normalisers of external attention, one number a slot, over the positions of the whole image; and interpolation
from corner to corner, of ``n`` rows to ``m``, whose places depend on how many there are. Both are known by their order
in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lineattn.nn.sample.base import SampleAttention
from lineattn.nn.sample.external import ExternalMemory

Size = tuple[int, int]
_Resize = Callable[[Tensor, Size], Tensor]
_Attend = Callable[[ExternalMemory, Tensor, Size], Tensor | None]


@dataclass(frozen=True)
class Span:
    """A tile along one side of an image, in pixels: it sees ``start`` to ``stop``, and ``first`` to ``last`` is kept of
    what is found there; ``length`` is the image's."""

    start: int
    stop: int
    first: int
    last: int
    length: int

    @property
    def seen(self) -> slice:
        """What the network sees of the image."""
        return slice(self.start, self.stop)

    @property
    def kept(self) -> slice:
        """The tile's own pixels, in the image."""
        return slice(self.first, self.last)

    @property
    def inside(self) -> slice:
        """Its own pixels, in the tile."""
        return slice(self.first - self.start, self.last - self.start)


def spans(length: int, tile: int, overlap: int) -> list[Span]:
    """Tiles side by side: each pixel belongs to one of them, which sees ``overlap`` more on either side.

    Args:
        length: Side of the image.
        tile: What a tile sees, at most; more than twice the overlap.
        overlap: What it sees beyond its own pixels, but for the image's borders.

    Example:
        >>> [(span.seen, span.kept) for span in spans(20, 12, 4)]
        [(slice(0, 12, None), slice(0, 8, None)), (slice(4, 16, None), slice(8, 12, None)), \
(slice(8, 20, None), slice(12, 20, None))]
        >>> len(spans(12, 12, 4))
        1
    """
    found: list[Span] = []
    first = 0
    while first < length:
        start = max(first - overlap, 0)
        stop = min(start + tile, length)
        last = length if stop == length else stop - overlap
        found.append(Span(start, stop, first, last, length))
        first = last
    return found


@dataclass(frozen=True)
class Part:
    """A tile of an image: its rows and its columns."""

    rows: Span
    columns: Span

    def seen(self, image: Tensor) -> Tensor:
        """What the network sees of an image ``(..., H, W)``, a view."""
        return image[..., self.rows.seen, self.columns.seen]

    def kept(self, image: Tensor) -> Tensor:
        """The tile's own pixels of an image ``(..., H, W)``, a view."""
        return image[..., self.rows.kept, self.columns.kept]

    def inside(self, tile: Tensor) -> Tensor:
        """The same pixels of what the network found in the tile."""
        return tile[..., self.rows.inside, self.columns.inside]


def parts(height: int, width: int, tile: int, overlap: int) -> list[Part]:
    """The tiles of an image, row by row; see `spans`."""
    return [Part(*found) for found in product(spans(height, tile, overlap), spans(width, tile, overlap))]


@dataclass(frozen=True)
class Map:
    """A map of the whole image: its size, and how many pixels its positions lie apart, 0 where it does not grow with
    the image."""

    size: Size
    apart: Size


@dataclass(frozen=True)
class Frame:
    """The maps of a whole image that a network has to be told of, in the order of its forward.

    Attributes:
        resized: Those before and behind interpolations from corner to corner.
        attended: Those that external attention is over.
    """

    resized: list[tuple[Map, Map]]
    attended: list[Map]

    @classmethod
    def of(cls, net: nn.Module, channels: int, height: int, width: int, stride: int) -> Frame:
        """The frame of an image, from two small ones: maps grow by the same with every ``stride`` more of the image.

        Args:
            net: The network.
            channels: Channels of the image.
            height: Its height.
            width: Its width.
            stride: See `lineattn.models.segmentation.SegmentationNetwork`.
        """
        small = stride + height % stride, stride + width % stride
        resized, attended = _sizes(net, channels, *small)
        resized_more, attended_more = _sizes(net, channels, small[0] + stride, small[1] + stride)
        strides = (height - small[0]) // stride, (width - small[1]) // stride

        def grown(size: Size, more: Size) -> Map:
            growth = more[0] - size[0], more[1] - size[1]
            whole = size[0] + strides[0] * growth[0], size[1] + strides[1] * growth[1]
            return Map(whole, (stride // growth[0] if growth[0] else 0, stride // growth[1] if growth[1] else 0))

        maps = [grown(*sizes) for sizes in zip(resized, resized_more, strict=True)]
        return cls(
            list(zip(maps[::2], maps[1::2], strict=True)),
            [grown(*sizes) for sizes in zip(attended, attended_more, strict=True)],
        )


@torch.no_grad()
def _sizes(net: nn.Module, channels: int, height: int, width: int) -> tuple[list[Size], list[Size]]:
    """The maps before and behind interpolations in turn, and those that external attention is over."""
    resized: list[Size] = []
    attended: list[Size] = []

    def resize(x: Tensor, size: Size) -> Tensor:
        resized.extend([cast(Size, tuple(x.shape[2:])), size])
        return _corner_to_corner(x, size)

    with listening(net, resize, lambda memory, query, size: attended.append(size)):
        net(next(net.parameters()).new_zeros(1, channels, height, width))
    return resized, attended


def shared(net: nn.Module) -> list[SampleAttention]:
    """The modules of external attention over maps, whose log-normalisers tiles can share."""
    found = [module for module in net.modules() if isinstance(module, SampleAttention)]
    return [module for module in found if isinstance(m := _memory(module), ExternalMemory) and m.norm != "slots"]


def _memory(module: SampleAttention) -> Any:
    return getattr(module, "memory", None)


@contextmanager
def listening(net: nn.Module, resize: _Resize, attend: _Attend) -> Iterator[None]:
    """Inside, a network asks at each point where it looks beyond a neighbourhood, in the order of its forward.

    Args:
        net: The network.
        resize: What stands in the place of bilinear interpolation from corner to corner, of a map to a size.
        attend: What gives external attention its log-normalisers, by its memory, queries and the size of their map;
            ``None`` leaves it to those of the map. Attention to tokens, whose places nobody knows, does not ask.
    """
    size: dict[nn.Module, Size | None] = {}

    def enter(module: SampleAttention, args: tuple[Any, ...]) -> None:
        x = args[0]
        alone = x.ndim == 4 and all(arg is None for arg in args[1:])  # of masked positions, some are nowhere
        size[_memory(module)] = tuple(x.shape[2:]) if alone else None

    def ask(memory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        here = size[memory]
        found = None if here is None else attend(memory, args[0], here)
        return None if found is None else (args, {**kwargs, "log_sums": found})

    hooks = []
    for module in shared(net):
        hooks.append(module.register_forward_pre_hook(cast(Any, enter)))
        hooks.append(_memory(module).register_forward_pre_hook(ask, with_kwargs=True))
    try:
        with _Interpolation(resize):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Interpolation(TorchFunctionMode):
    """Inside, bilinear interpolation from corner to corner is another function's."""

    def __init__(self, resize: _Resize) -> None:
        super().__init__()
        self.resize = resize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.interpolate and kwargs.get("align_corners") and kwargs.get("mode") == "bilinear":
            x, size, factor = args[0], kwargs.get("size"), kwargs.get("scale_factor")
            if size is None:
                factors = factor if isinstance(factor, Sequence) else (factor, factor)
                size = [int(side * by) for side, by in zip(x.shape[2:], factors, strict=True)]
            return self.resize(x, (size, size) if isinstance(size, int) else (int(size[0]), int(size[1])))
        return func(*args, **kwargs)


def _corner_to_corner(x: Tensor, size: Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=True)


class _Placed:
    """Tells the network, at each point of one forward, where a tile lies."""

    def __init__(self, frame: Frame, part: Part, log_sums: Sequence[Tensor | None], *, gather: bool = False) -> None:
        self.part, self.log_sums, self.gather = part, log_sums, gather
        self.resized, self.attended = iter(frame.resized), iter(enumerate(frame.attended))

    def resize(self, x: Tensor, size: Size) -> Tensor:
        before, behind = next(self.resized)
        if not all((*before.apart, *behind.apart)):
            return _corner_to_corner(x, size)
        for dim, span in enumerate((self.part.rows, self.part.columns)):
            # As PyTorch does it, in the same precision: a place far down differs by more than its rounding else.
            dtype = torch.promote_types(x.dtype, torch.float32)
            step = torch.tensor(before.size[dim] - 1, dtype=dtype) / max(behind.size[dim] - 1, 1)
            index = torch.arange(size[dim], dtype=dtype) + span.start // behind.apart[dim]
            places = (step * index - span.start // before.apart[dim]).clamp(0, x.shape[2 + dim] - 1)
            lower = places.long()
            share = (places - lower).to(x).unflatten(0, (-1, *(1,) * (1 - dim)))
            lower = lower.to(x.device)
            upper = (lower + 1).clamp(max=x.shape[2 + dim] - 1)
            x = torch.lerp(x.index_select(2 + dim, lower), x.index_select(2 + dim, upper), share)
        return x

    def attend(self, memory: ExternalMemory, query: Tensor, size: Size) -> Tensor | None:
        index, whole = next(self.attended)
        if index < len(self.log_sums) or not self.gather:
            return self.log_sums[index] if index < len(self.log_sums) else None
        if not all(whole.apart):
            raise _Gathered(None)
        rows, columns = (
            _own(span, apart, length)
            for span, apart, length in zip((self.part.rows, self.part.columns), whole.apart, size, strict=True)
        )
        raise _Gathered(memory.log_sums(query.unflatten(1, size)[:, rows, columns].flatten(1, 2)))


class _Gathered(Exception):
    """Ends a forward that has come as far as was asked, with what it was to find."""

    def __init__(self, log_sums: Tensor | None) -> None:
        super().__init__()
        self.log_sums = log_sums


def _own(span: Span, apart: int, length: int) -> slice:
    """The rows of a tile's map that are the tile's own; at the image's end all that are left, as a network may have one
    more there."""
    last = length if span.last == span.length else span.inside.stop // apart
    return slice(span.inside.start // apart, last)


def run(net: nn.Module, tile: Tensor, frame: Frame, part: Part, log_sums: Sequence[Tensor | None]) -> Tensor:
    """What a network finds in a tile, told where it lies.

    Args:
        net: The network.
        tile: What it sees of the image, ``(1, C, h, w)``.
        frame: That of the image.
        part: Where the tile lies, at multiples of the network's stride.
        log_sums: What the modules of external attention share, in their order.
    """
    placed = _Placed(frame, part, log_sums)
    with listening(net, placed.resize, placed.attend):
        return net(tile)


def gather(net: nn.Module, tile: Tensor, frame: Frame, part: Part, log_sums: Sequence[Tensor | None]) -> Tensor | None:
    """What a tile's own positions add to the log-normalisers of the next module of external attention.

    Args:
        net: The network, which is left behind that module.
        tile: What it sees of the image, ``(1, C, h, w)``.
        frame: That of the image.
        part: Where the tile lies.
        log_sums: Those of the modules before it.

    Returns:
        See `lineattn.ops.memory.slot_log_sums`; ``None`` for a map that does not grow with the image.
    """
    placed = _Placed(frame, part, log_sums, gather=True)
    try:
        with listening(net, placed.resize, placed.attend):
            net(tile)
    except _Gathered as found:
        return found.log_sums
    raise AssertionError("the network has fewer modules of external attention for a tile than for the image")
