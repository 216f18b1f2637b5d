"""Scenes of handwritten digits with boxes and masks, from the digits that scikit-learn bundles: detection offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lineattn.tasks.data import digits, rle
from lineattn.tasks.data.objects import DetSplits, Target, coco_dict, target
from lineattn.tasks.data.seg_digits import INK, ground, scaled, uniform
from lineattn.tasks.data.source import Pixels
from lineattn.tasks.seeding import mix

SIDE = 96  # of a scene, by default
_SCENES = {"train": 2000, "val": 100, "test": 500}
_DIGITS = (3, 8)
_BASE = 1 / 6  # side of a digit in that of its scene
_SCALES = (0.7, 2.0)
_OVERLAP = 0.3  # largest intersection over union of two boxes
_VISIBLE = 0.5  # least part of a digit's ink that others leave to see
_TRIES = 8  # places that are tried for a digit before it is left out
_KEY = 8  # keeps the draws apart from those of other scenes


@dataclass(frozen=True)
class DigitScenes:
    """Scenes of one split, painted when asked for.

    Args:
        shapes: The digits that are in them.
        split: The number of the split.
        indices: The numbers of the scenes, which say all that is drawn.
        side: Side of a scene.
        channels: 1 or 3.
        with_masks: Whether targets hold masks.
    """

    shapes: Pixels
    split: int
    indices: Sequence[int]
    side: int
    channels: int
    with_masks: bool

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Tensor, Target]:
        """One scene and its digits.

        Shape:
            Output: (C, side, side), uint8; boxes (n, 4), labels (n,), masks (n, side, side), of what can be seen.
        """
        image, owner, labels = self._painted(index)
        masks = torch.from_numpy(owner == _numbers(labels)).to(torch.uint8) if self.with_masks else None
        return image, target(self.indices[index], _boxes(owner, len(labels)), [label + 1 for label in labels], masks)

    def subset(self, indices: Sequence[int]) -> DigitScenes:
        chosen = [self.indices[index] for index in indices]
        return DigitScenes(self.shapes, self.split, chosen, self.side, self.channels, self.with_masks)

    def aspect(self, index: int) -> float:
        return 1.0

    def empty(self, index: int) -> bool:
        return False

    def truth(self) -> dict[str, Any]:
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index, own in enumerate(self.indices):
            images.append({"id": own, "file_name": f"scene {own}", "width": self.side, "height": self.side})
            _, owner, labels = self._painted(index)
            masks = (owner == _numbers(labels)).astype(np.uint8)
            for mask, (left, top, right, bottom), label in zip(masks, _boxes(owner, len(labels)), labels, strict=True):
                annotations.append(
                    {
                        "image_id": own,
                        "category_id": label,
                        "bbox": [left, top, right - left, bottom - top],
                        "area": int(mask.sum()),
                        "iscrowd": 0,
                        "segmentation": rle.encode(mask),
                    }
                )
        return coco_dict(images, annotations, range(10), [str(digit) for digit in range(10)])

    def _painted(self, index: int) -> tuple[Tensor, np.ndarray, list[int]]:
        """A scene; the number of the digit that is seen at each pixel, from 1, or 0; and which digits they are."""
        draw = torch.Generator().manual_seed(mix(_KEY, self.split, self.indices[index]))
        image = ground(draw, self.channels, self.side)
        owner = np.zeros((self.side, self.side), dtype=np.uint8)
        inked: list[int] = []  # pixels of each digit, were it alone
        labels: list[int] = []
        for _ in range(int(torch.randint(_DIGITS[0], _DIGITS[1] + 1, (), generator=draw))):
            chosen = int(torch.randint(len(self.shapes), (), generator=draw))
            size = round(self.side * _BASE * float(uniform(draw, *_SCALES, 1)))
            ink = scaled(self.shapes.images[chosen].float() / 255, size)
            mask = ink[0].numpy() >= INK
            places = torch.randint(self.side - size + 1, (_TRIES, 2), generator=draw).tolist()
            colour = uniform(draw, 0.7, 1.0, self.channels, 1, 1)
            for top, left in places:
                window = (slice(top, top + size), slice(left, left + size))
                tried = owner.copy()
                tried[window][mask] = len(labels) + 1
                if _fit(tried, [*inked, int(mask.sum())]):
                    owner = tried
                    image[:, *window] = image[:, *window] * (1 - ink) + colour * ink
                    inked.append(int(mask.sum()))
                    labels.append(self.shapes.labels[chosen])
                    break
        return image.clamp(0, 1).mul(255).round().to(torch.uint8), owner, labels


def load(*, image_size: int, channels: int, masks: bool | None) -> DetSplits:
    """Three to eight digits on an uneven ground, of sizes that differ, some in front of others.

    Boxes and masks are of what can be seen, to the pixel. No digit is in the scenes of two splits.

    Args:
        image_size: Side of a scene.
        channels: 1 or 3.
        masks: Whether targets hold masks; by default they do.
    """
    shapes = digits.load(image_size=8, channels=1)
    train, val, test = (
        _scenes(getattr(shapes, split), place, image_size, channels, masks is not False)
        for place, split in enumerate(_SCENES)
    )
    return DetSplits(shapes.classes, train, val, test, category_ids=list(range(10)))


def _scenes(shapes: Any, place: int, side: int, channels: int, with_masks: bool) -> DigitScenes:
    assert isinstance(shapes, Pixels)
    return DigitScenes(shapes, place, range(list(_SCENES.values())[place]), side, channels, with_masks)


def _fit(owner: np.ndarray, inked: Sequence[int]) -> bool:
    """Whether enough of each digit can be seen, and no two boxes share too much."""
    seen = np.bincount(owner.ravel(), minlength=len(inked) + 1)[1:].tolist()
    if any(pixels < max(_VISIBLE * alone, 1) for pixels, alone in zip(seen, inked, strict=True)):
        return False
    return all(_shared(*pair) <= _OVERLAP for pair in combinations(_boxes(owner, len(inked)), 2))


def _shared(one: Sequence[int], other: Sequence[int]) -> float:
    """Intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    areas = sum((right - left) * (bottom - top) for left, top, right, bottom in (one, other))
    return common / (areas - common)


def _boxes(owner: np.ndarray, count: int) -> list[list[int]]:
    """The boxes of digits 1 to `count`, to the outer edges of their pixels."""
    boxes: list[list[int]] = []
    for number in range(1, count + 1):
        mask = owner == number
        rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
        boxes.append([int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1])
    return boxes


def _numbers(labels: Sequence[int]) -> np.ndarray:
    return np.arange(1, len(labels) + 1, dtype=np.uint8)[:, None, None]
