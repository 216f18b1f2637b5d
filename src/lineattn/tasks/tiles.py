r"""A network's logits of an image that does not fit, in tiles.

Tiles overlap, and of each only its own pixels are kept, so that seams lie where the network has seen both sides. They
start at multiples of the network's stride, touch the image's borders where they reach them, and external attention
takes its log-normalisers from the own positions of all tiles, each counted once:

.. math:: \ell_j = \log \sum_t e^{\ell_j^{(t)}}

which is one more pass over the tiles for each of its modules, as far as that module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.models.segmentation import SegmentationNetwork
from lineattn.tasks.ranges import require
from lineattn.tasks.tile_frame import Frame, Part, gather, parts, run, shared
from lineattn.tasks.tile_reach import measure


class Tiled:
    """A network for segmentation that sees an image in tiles.

    With an overlap of its receptive field's margin and more, the logits are those of the whole image; with less, they
    are so further than the margin from where a tile ends. `notice` says which, or why they aren't.

    On the device there is one tile at a time; on the CPU the logits of the whole image, in single precision: 4 bytes a
    pixel and channel of the output.

    Args:
        net: The network, in evaluation mode.
        tile: Side of what it sees at once, in pixels; rounded down to its stride.
        overlap: What a tile sees beyond its own pixels, on each side; rounded up to the stride. By default the margin,
            but no more than a quarter of the tile, with which an image costs about four times what it costs whole.
        channels: Channels of the image.

    Raises:
        InputError: The tile is smaller than the stride, or has no pixels of its own within the overlap.

    Example:
        >>> from lineattn.models.resunet import ResUNet
        >>> net, x = ResUNet(width=8).eval(), torch.randn(1, 3, 100, 550)
        >>> tiled = Tiled(net, 320, overlap=144)
        >>> tiled.notice
        'tiles of 320 pixels, overlapping by 144: the same as of the whole image (receptive-field margin 144 pixels)'
        >>> with torch.no_grad():
        ...     whole, found = net(x), tiled(x)
        >>> bool((found - whole).abs().max() < 1e-5 * whole.abs().max())
        True
    """

    def __init__(self, net: SegmentationNetwork, tile: int, overlap: int | None = None, *, channels: int = 3) -> None:
        stride = net.stride
        require(tile >= stride, "tile", tile, f"at least {stride}, the network's stride, or 0 for the whole image")
        require(overlap is None or overlap >= 0, "overlap", overlap, "0 or more")
        self.net, self.tile = net, tile - tile % stride
        if overlap is not None and self.tile <= 2 * (overlap + -overlap % stride):
            raise InputError(
                f"--overlap {overlap} on both sides leaves nothing of --tile {tile} (the network's stride is {stride}):"
                " choose less overlap or larger tiles"
            )
        self.reach = measure(net, channels)
        quarter = self.tile // 4
        if overlap is None:
            overlap = quarter if self.reach.margin is None else min(self.reach.margin, quarter)
            self.overlap = overlap - overlap % stride
        else:
            self.overlap = overlap + -overlap % stride
        self._gathering = self._overlap_of_gathering()

    def _overlap_of_gathering(self) -> int:
        """All positions count in the log-normalisers: none of them may feel a cut, even where `overlap` is less."""
        enough = max(self.overlap, self.reach.margin or 0)
        return enough if 2 * enough < self.tile else self.overlap

    @property
    def exact(self) -> bool:
        """Whether the logits are those of the whole image, at least further than the margin from where tiles end."""
        margin = self.reach.margin
        if margin is None or self.reach.why is not None:
            return False
        return not shared(self.net) or self._gathering >= margin

    @property
    def notice(self) -> str:
        """One line on how what tiles give differs from what the whole image gives."""
        margin = self.reach.margin
        tiles = f"tiles of {self.tile} pixels, overlapping by {self.overlap}"
        if self.reach.why is not None or margin is None:
            return f"{tiles}: approximate, {self.reach.why}"
        feels = f"receptive-field margin {margin} pixels"
        if not self.exact:
            return (
                f"{tiles}: approximate, external attention needs its normalisers from tiles of more than "
                f"{2 * margin} pixels ({feels})"
            )
        if self.tile <= 2 * margin:
            return (
                f"{tiles}: approximate, all of a tile is nearer to its ends than the {feels}; tiles of more than "
                f"{2 * margin} pixels have something exact"
            )
        if self.overlap >= margin:
            return f"{tiles}: the same as of the whole image ({feels})"
        return (
            f"{tiles}: the same as of the whole image but within {margin - self.overlap} pixels of a seam ({feels}; "
            f"--overlap {margin} is exact everywhere, in tiles of more than {2 * margin})"
        )

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """``(1, C, H, W) -> (1, K, H, W)``, on the CPU where there is more than one tile."""
        height, width = x.shape[2:]
        places = parts(height, width, self.tile, self.overlap)
        if len(places) == 1:
            return self.net(self._there(x))
        frame = Frame.of(self.net, x.shape[1], height, width, self.net.stride)
        log_sums = self._log_sums(x, frame)
        out: Tensor | None = None
        for part in places:
            logits = part.inside(run(self.net, self._there(part.seen(x)), frame, part, log_sums))
            if out is None:
                out = torch.empty(1, logits.shape[1], height, width)
            part.kept(out).copy_(logits)
        assert out is not None
        return out

    def _log_sums(self, x: Tensor, frame: Frame) -> list[Tensor | None]:
        places = parts(x.shape[2], x.shape[3], self.tile, self._gathering)
        found: list[Tensor | None] = []
        for _ in frame.attended:
            found.append(self._log_sums_of_next(x, frame, places, found))
        return found

    def _log_sums_of_next(
        self, x: Tensor, frame: Frame, places: list[Part], before: list[Tensor | None]
    ) -> Tensor | None:
        total: Tensor | None = None
        for part in places:
            more = gather(self.net, self._there(part.seen(x)), frame, part, before)
            if more is None:
                return None
            total = more if total is None else torch.logaddexp(total, more)
        return total

    def _there(self, tile: Tensor) -> Tensor:
        """On the network's device; in one piece, as the whole image would come."""
        return tile.to(next(self.net.parameters()).device).contiguous()
