"""Scenes of handwritten digits with masks, made from the digits that scikit-learn bundles: segmentation offline."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms import v2

from lineattn.tasks.data import digits
from lineattn.tasks.data.legend import Colour
from lineattn.tasks.data.pairs import PixelPairs, SegSplits
from lineattn.tasks.data.source import Pixels, Source
from lineattn.tasks.seeding import mix

CLASSES = ["background", "even", "odd"]
PALETTE: list[Colour] = [(0, 0, 0), (230, 159, 0), (86, 180, 233)]
_SCENES = {"train": 480, "val": 80, "test": 160}
INK = 0.4  # of the darkest; from there on a pixel is of the digit


def load(*, image_size: int, channels: int) -> SegSplits:
    """Up to four digits on an uneven ground: each pixel of ink is even or odd, as its digit is.

    Ink against ground would be a matter of brightness, and ten digits one of many hours; even or odd needs the shape
    of the whole digit, which a small network learns in minutes. No digit is in the scenes of two splits.

    Args:
        image_size: Side of a scene, an even number.
        channels: 1 or 3.
    """
    shapes = digits.load(image_size=8, channels=1)
    sources = {"train": shapes.train, "val": shapes.val, "test": shapes.test}
    parts = {
        split: _scenes(source, _SCENES[split], place, image_size, channels)
        for place, (split, source) in enumerate(sources.items())
        if source is not None
    }
    return SegSplits(CLASSES, parts["train"], parts["val"], parts["test"], palette=PALETTE)


def _scenes(shapes: Source, count: int, split: int, side: int, channels: int) -> PixelPairs:
    assert isinstance(shapes, Pixels)
    scenes = [
        _scene(shapes, side, channels, torch.Generator().manual_seed(mix(split, index))) for index in range(count)
    ]
    return PixelPairs(torch.stack([image for image, _ in scenes]), torch.stack([mask for _, mask in scenes]))


def _scene(shapes: Pixels, side: int, channels: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """One scene: a quarter holds a digit or nothing, so that digits don't touch."""

    image = ground(draw, channels, side)
    mask = torch.zeros(side, side, dtype=torch.uint8)
    half = side // 2
    for quarter in range(4):
        if torch.rand((), generator=draw) < 0.2:
            continue
        chosen = int(torch.randint(len(shapes), (), generator=draw))
        size = int(torch.randint(half * 5 // 8, half + 1, (), generator=draw))
        top, left = (int(torch.randint(half - size + 1, (), generator=draw)) for _ in range(2))
        ink = scaled(shapes.images[chosen].float() / 255, size)
        rows = slice(half * (quarter // 2) + top, half * (quarter // 2) + top + size)
        columns = slice(half * (quarter % 2) + left, half * (quarter % 2) + left + size)
        image[:, rows, columns] = image[:, rows, columns] * (1 - ink) + uniform(draw, 0.7, 1.0, channels, 1, 1) * ink
        mask[rows, columns] = torch.where(ink[0] >= INK, 1 + shapes.labels[chosen] % 2, 0).to(torch.uint8)
    return image.clamp(0, 1).mul(255).round().to(torch.uint8), mask


def ground(draw: torch.Generator, channels: int, side: int) -> Tensor:
    """An uneven and noisy ground, darker than ink."""
    coarse = uniform(draw, 0.1, 0.6, channels, 5, 5)
    return scaled(coarse, side) + uniform(draw, -0.06, 0.06, channels, side, side)


def uniform(draw: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    """Numbers between two bounds."""
    return low + (high - low) * torch.rand(*shape, generator=draw)


def scaled(pixels: Tensor, side: int) -> Tensor:
    """Pixels as a square of another side."""
    return v2.functional.resize(pixels, [side, side], antialias=True)
