"""What every image data set provides: labelled images, in memory or as files, in up to three splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torchvision.transforms import v2

from lineattn.errors import InputError
from lineattn.tasks.data.reading import read_image
from lineattn.tasks.data.transforms import Augment
from lineattn.tasks.seeding import permutation


class Source(Protocol):
    """Labelled images by index."""

    @property
    def labels(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Tensor:
        """One image, (C, H, W), uint8."""
        ...

    def subset(self, indices: Sequence[int]) -> Source:
        """The images at `indices`."""
        ...


@dataclass(frozen=True)
class Pixels:
    """Images in memory, (N, C, H, W), uint8, all of the network's size."""

    images: Tensor
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Tensor:
        return self.images[index]

    def subset(self, indices: Sequence[int]) -> Pixels:
        return Pixels(self.images[torch.tensor(indices, dtype=torch.long)], [self.labels[i] for i in indices])

    def resized(self, size: int) -> Pixels:
        if self.images.shape[-1] == size:
            return self
        return Pixels(v2.functional.resize(self.images, [size, size], antialias=True), self.labels)

    def with_channels(self, channels: int) -> Pixels:
        if self.images.shape[1] == channels:
            return self
        grey = self.images if self.images.shape[1] == 1 else v2.functional.rgb_to_grayscale(self.images)
        return Pixels(grey.expand(-1, channels, -1, -1).contiguous(), self.labels)


@dataclass(frozen=True)
class Files:
    """Images on disk, read when asked for."""

    paths: Sequence[Path]
    labels: Sequence[int]
    channels: int

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Tensor:
        return read_image(self.paths[index], self.channels)

    def subset(self, indices: Sequence[int]) -> Files:
        return Files([self.paths[i] for i in indices], [self.labels[i] for i in indices], self.channels)


_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Splits(Generic[_Kind]):
    """The splits of a data set; `val` and `test` may be missing. `notices` are for the user to read, once."""

    classes: list[str]
    train: _Kind
    val: _Kind | None = None
    test: _Kind | None = None
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Defaults:
    """What a data set uses where the user says nothing."""

    image_size: int
    channels: int
    augment: Augment
    mean: tuple[float, ...]
    std: tuple[float, ...]


_Parts = TypeVar("_Parts", bound=Splits[Any])


def held_out(splits: _Parts, fraction: float) -> _Parts:
    """Splits with a part of the training samples for validation, where there is none; the same part for all seeds.

    Raises:
        InputError: Nothing would be left of one of the two.
    """
    train = splits.train
    if splits.val is not None or fraction <= 0:
        return splits
    order = permutation(len(train), 0)
    count = round(fraction * len(order))
    if not 0 < count < len(order):
        raise InputError(f"--data.val_fraction {fraction} of {len(order)} images leaves a split empty")
    return replace(splits, train=train.subset(sorted(order[count:])), val=train.subset(sorted(order[:count])))


def stratified(labels: Sequence[int], fractions: Sequence[float]) -> list[list[int]]:
    """Splits indices so that each part has its fraction of every class; the rest is the last part.

    The split is fixed: it depends on the labels alone, so that runs with other seeds share it.

    Example:
        >>> [len(part) for part in stratified([0] * 10 + [1] * 20, [0.2])]
        [6, 24]
    """
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for label, indices in sorted(members.items()):
        shuffled = [indices[i] for i in permutation(len(indices), 0, label)]
        for part, fraction in enumerate(fractions):
            count = round(fraction * len(indices))
            parts[part] += shuffled[:count]
            shuffled = shuffled[count:]
        parts[-1] += shuffled
    return [sorted(part) for part in parts]
