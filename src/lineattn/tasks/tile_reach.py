"""How far the pixels of an image reach in a network, and whether a tile has what the whole image has.

Both are measured, on a strip of an image, on the CPU. Reach: what turns into NaN by a pixel that is NaN depends on that
pixel, whatever the weights are. Sameness: the middle of a tile beside that of the strip, in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lineattn.models.segmentation import SegmentationNetwork
from lineattn.tasks.tile_frame import Frame, Part, Span, gather, run

_STRIPS = (16, 64, 128, 256)  # lengths, in strides of the network; most reach no further than a few
_LONG = 64  # what leaves nothing of so many strides at once sees everything
_BEYOND = 12  # strides by which a strip for the comparison is longer than twice the margin
_SAME = 1e-7  # of the largest output


@dataclass(frozen=True)
class Reach:
    """How far a pixel reaches.

    Attributes:
        margin: Pixels from a cut to where the network no longer feels it, a multiple of its stride; ``None`` if there
            is no such place.
        why: Why a tile has not what the whole image has, in words; ``None`` if it has.
    """

    margin: int | None
    why: str | None = None


@torch.no_grad()
def measure(net: SegmentationNetwork, channels: int) -> Reach:
    """How far pixels reach in a network, with the log-normalisers of external attention shared by the tiles, and the
    places of interpolations from corner to corner those of the whole image.

    Args:
        net: The network; it is copied.
        channels: Channels of the image.

    Example:
        >>> from lineattn.models.resunet import ResUNet
        >>> measure(ResUNet(width=8), 3)
        Reach(margin=144, why=None)
    """
    probe = _Probe(copy.deepcopy(net).cpu().float().eval(), channels)
    margin = 0
    for axis in (2, 3):
        found = probe.along(axis)
        if found.margin is None:
            return found
        margin = max(margin, found.margin)
    probe.net.double()
    why = probe.compare(2, margin) or probe.compare(3, margin)
    return Reach(margin, why)


@dataclass
class _Call:
    """A module's call: its name, and what was noted of the maps that came in and went out."""

    name: str
    inputs: list[Any]
    outputs: list[Any]


@dataclass
class _Probe:
    net: SegmentationNetwork
    channels: int
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def along(self, axis: int) -> Reach:
        """The reach along one side."""
        stride = self.net.stride
        for strides in _STRIPS:
            length = strides * stride
            x = self._strip(length, axis)
            frame, part = self._frame(x), self._part(axis, Span(0, length, 0, length, length))
            log_sums = self._log_sums(x, frame, part)
            middle = length // 2
            # As long as a stride, so that it is felt wherever anything on its other side would be.
            x.narrow(axis, middle - stride, stride).fill_(torch.nan)
            with _noting(self.net, lambda values: _clean(values, axis).double().mean().item()) as calls:
                clean = _clean(run(self.net, x, frame, part, log_sums), axis)
            reached = (~clean).nonzero().flatten().tolist() or [middle - 1]
            if reached[0] > 0 and reached[-1] < length - 1:
                margin = max(middle - stride - reached[0], reached[-1] + 1 - middle)
                # An interpolation from corner to corner moves a position by less than one, by where the tile lies.
                margin += sum(before.apart[axis - 2] for before, _ in frame.resized)
                return Reach(margin + -margin % stride)
            # Modules within others end before them, so the first that leaves nothing is the one, unless many have added
            # up to it.
            last = next((c for c in calls if c.inputs and c.outputs and min(c.inputs) > 0 == min(c.outputs)), None)
            if strides >= _LONG and last is not None and min(last.inputs) > 0.5:
                return Reach(None, f"{last.name} sees the whole image")
        return Reach(None, f"the receptive field is larger than {_STRIPS[-1] * self.net.stride} pixels")

    def compare(self, axis: int, margin: int) -> str | None:
        """What makes a tile differ from the whole further than the margin from a cut, if anything does."""
        stride = self.net.stride
        length = 2 * margin + _BEYOND * stride
        x = self._strip(length, axis)
        frame, whole = self._frame(x), self._part(axis, Span(0, length, 0, length, length))
        # Cut by odd numbers of strides, so that what repeats at a multiple shows; more at one end, so that its middle
        # is not that of the whole.
        cut = Span(5 * stride, length - stride, 5 * stride + margin, length - stride - margin, length)
        part = self._part(axis, cut)
        log_sums = self._log_sums(x, frame, whole)

        def outputs() -> tuple[Tensor, Tensor]:
            return run(self.net, x, frame, whole, log_sums), run(self.net, part.seen(x), frame, part, log_sums)

        expected, found = outputs()
        if _same(part.kept(expected), part.inside(found)):
            return None
        with _noting(self.net, Tensor.clone) as calls:
            outputs()
        half = len(calls) // 2
        for all_of_it, in_part in zip(calls[:half], calls[half:], strict=True):
            if _agree(all_of_it.inputs, in_part.inputs, axis, cut) and not _agree(
                all_of_it.outputs, in_part.outputs, axis, cut
            ):
                return f"{in_part.name} depends on where in the image a tile lies"
        return "the network depends on where in the image a tile lies"

    def _strip(self, length: int, axis: int) -> Tensor:
        size = [1, self.channels, self.net.stride, self.net.stride]
        size[axis] = length
        return torch.randn(size, generator=self.random).to(next(self.net.parameters()))

    def _part(self, axis: int, along: Span) -> Part:
        stride = self.net.stride
        across = Span(0, stride, 0, stride, stride)
        return Part(along, across) if axis == 2 else Part(across, along)

    def _frame(self, x: Tensor) -> Frame:
        return Frame.of(self.net, self.channels, x.shape[2], x.shape[3], self.net.stride)

    def _log_sums(self, x: Tensor, frame: Frame, whole: Part) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for _ in frame.attended:
            found.append(gather(self.net, x, frame, whole, found))
        return found


@contextmanager
def _noting(net: nn.Module, note: Callable[[Tensor], Any]) -> Iterator[list[_Call]]:
    """Inside, what is noted of the maps of each call of a module, in the order in which they end."""
    calls: list[_Call] = []

    def noted(values: object) -> list[Any]:
        return [note(value) for value in tree_leaves(values) if isinstance(value, Tensor) and value.ndim == 4]

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            kind = type(module).__name__
            calls.append(_Call(f"{name} ({kind})" if name else kind, noted(args), noted(output)))

        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in net.named_modules()]
    try:
        yield calls
    finally:
        for one in hooks:
            one.remove()


def _clean(values: Tensor, axis: int) -> Tensor:
    """Where along a side all values are numbers."""
    return ~values.isnan().movedim(axis, 0).flatten(1).any(1)


def _same(expected: Tensor, found: Tensor) -> bool:
    return bool((expected - found).abs().max() <= _SAME * expected.abs().max())


def _agree(whole: list[Tensor], tile: list[Tensor], axis: int, cut: Span) -> bool:
    """Whether maps of the whole and of a tile are the same where the tile's own pixels are; a map that has no such
    place is not asked."""
    for expected, found in zip(whole, tile, strict=True):
        length = expected.shape[axis]
        shift, first, last = (at * length // cut.length for at in (cut.start, cut.first, cut.last))
        if length > 1 and first < last and last - shift <= found.shape[axis]:
            count = last - first
            if not _same(expected.narrow(axis, first, count), found.narrow(axis, first - shift, count)):
                return False
    return True
