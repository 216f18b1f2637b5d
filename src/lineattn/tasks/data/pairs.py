"""Images with masks by index: as files or in memory, in up to three splits; and which mask belongs to which image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.tasks.data.faults import Fault, OnFault, stop
from lineattn.tasks.data.folder import find_images
from lineattn.tasks.data.legend import Colour
from lineattn.tasks.data.masks import MaskRule, read_mask
from lineattn.tasks.data.reading import open_image, read_image
from lineattn.tasks.data.source import Splits

_SUFFIXES = ("_segmentation", "_mask", "_seg", "_label")  # what a mask's name may have after the image's
_ORIENTATION = 0x0112
# The orientations that swap height and width.
_TURNS = {
    5: lambda mask: mask.T,
    6: lambda mask: np.rot90(mask, -1),
    7: lambda mask: np.rot90(mask.T, 2),
    8: np.rot90,
}


FilePairs = list[tuple[Path, Path]]  # images with their masks


class PairSource(Protocol):
    """Images with masks by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """One image, (C, H, W), uint8, and the class of each pixel, (H, W), uint8, where 255 is ignored."""
        ...

    def subset(self, indices: Sequence[int]) -> PairSource:
        """The pairs at `indices`."""
        ...


@dataclass(frozen=True)
class Pairs:
    """Images and masks on disk, read when asked for.

    Args:
        images: The files of the images.
        masks: The files of their masks.
        rule: How what the masks hold becomes classes.
        channels: 1 or 3; images are converted.
    """

    images: Sequence[Path]
    masks: Sequence[Path]
    rule: MaskRule
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """One image and the class of each of its pixels, both as the camera was held.

        A mask that says nothing of how the camera was held is turned with its image where it fits it only then.

        Shape:
            Output: (C, H, W), uint8; (H, W), uint8, where 255 is ignored.

        Raises:
            UnreadableImage: One of the files is missing, no image, or broken.
            InputError: The mask is of another size, or holds what is no class.
        """
        file, mask_file = self.images[index], self.masks[index]
        image = read_image(file, self.channels)
        mask = self.rule.classes(read_mask(mask_file), mask_file)
        return image, torch.from_numpy(fitted(mask, image.shape[1:], mask_file, file).copy())

    def subset(self, indices: Sequence[int]) -> Pairs:
        return Pairs([self.images[i] for i in indices], [self.masks[i] for i in indices], self.rule, self.channels)


@dataclass(frozen=True)
class PixelPairs:
    """Images (N, C, H, W) and masks (N, H, W) in memory, uint8."""

    images: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.masks[index]

    def subset(self, indices: Sequence[int]) -> PixelPairs:
        chosen = torch.tensor(indices, dtype=torch.long)
        return PixelPairs(self.images[chosen], self.masks[chosen])


@dataclass(frozen=True)
class SegSplits(Splits[PairSource]):
    """The splits of a data set for segmentation; classes are in the order of the numbers in masks.

    Attributes:
        palette: The colour of each class, or ``None``.
    """

    palette: list[Colour] | None = None


def fitted(mask: np.ndarray, size: Sequence[int], mask_file: Path, file: Path) -> np.ndarray:
    """A mask as its image stands, turned where it fits only then.

    Args:
        mask: Classes, (H, W).
        size: Height and width of the image, upright.
        mask_file: Where the mask is from.
        file: Where the image is from.

    Raises:
        InputError: It is of another size; both files are named.
    """
    size = tuple(size)
    if mask.shape != size and mask.shape == size[::-1]:
        mask = _turned_like(file, mask)
    if mask.shape != size:
        raise InputError(
            f"the mask {mask_file} ({_size(mask.shape)}) is not of the size of its image {file} ({_size(size)}): "
            "store it in the image's size"
        )
    return mask


def by_name(folder: Path, ending: str = "", *, on_fault: OnFault = stop) -> dict[str, Path]:
    """The images of a folder, at any depth, by their names without what comes last: the `ending` and the format.

    Hidden files are left out, and those without the ending; of two images of one name, which are a fault, the second.
    """
    found: dict[str, Path] = {}
    twins: list[str] = []
    for file in find_images(folder)[0]:
        name = file.relative_to(folder).with_suffix("").as_posix()
        if not name.endswith(ending):
            continue
        name = name.removesuffix(ending)
        if name in found:
            twins.append(f"{found[name]} and {file}")
        found.setdefault(name, file)
    if twins:
        on_fault(Fault("same_name", "", twins, "pair", " have one name: rename or remove one of them"))
    return found


def match(
    images: Mapping[str, Path],
    masks: Mapping[str, Path],
    listed: Sequence[str] | None = None,
    *,
    place: Path,
    on_fault: OnFault = stop,
) -> FilePairs:
    """Each image with its mask: that of the same name, or with _segmentation, _mask, _seg or _label after it.

    It is a fault if an image or a mask is missing, if an image has two masks, or if there are no images.

    Args:
        images: Files by name.
        masks: Files by name.
        listed: The names to take, in this order; by default all, and then no mask may be left over.
        place: What the names are from, for errors.
        on_fault: What to do with a fault. Where it doesn't stop, only what is whole becomes a pair.
    """
    found: dict[str, list[Path]] = {}
    for name, file in masks.items():
        found.setdefault(_image_of(name, images), []).append(file)
    wanted = list(images) if listed is None else listed
    if absent := [name for name in wanted if name not in images]:
        on_fault(Fault("no_file", "", absent, "name", f" of {place} without an image: add it, or take the name out"))
    there = [name for name in wanted if name in images]
    if bare := [str(images[name]) for name in there if name not in found]:
        on_fault(Fault("no_mask", "no mask for ", bare, "image", ": add one of the same name, or remove the image"))
    whole = [name for name in there if name in found]
    if several := [f"{images[name]} ({', '.join(map(str, found[name]))})" for name in whole if len(found[name]) > 1]:
        on_fault(Fault("several_masks", "more than one mask for ", several, "image", ": keep one"))
    if listed is None and (alone := [str(file) for name in found if name not in images for file in found[name]]):
        on_fault(Fault("no_image", "no image for ", alone, "mask", ": add one of the same name, or remove the mask"))
    if not wanted:
        on_fault(InputError(f"no images in {place}: add some, or remove it"))
    return [(images[name], found[name][0]) for name in whole]


def of_files(splits: Mapping[str, FilePairs], rule: MaskRule, *, channels: int, notices: list[str]) -> SegSplits:
    """The splits of a data set on disk: train, and perhaps val and test."""
    parts = {
        split: Pairs([image for image, _ in pairs], [mask for _, mask in pairs], rule, channels)
        for split, pairs in splits.items()
    }
    legend = rule.legend
    return SegSplits(
        legend.classes, parts["train"], parts.get("val"), parts.get("test"), notices, palette=legend.palette
    )


def _image_of(mask: str, images: Mapping[str, Path]) -> str:
    """The name of the image that a mask of this name is for; its own where there is none."""
    if mask in images:
        return mask
    found = (mask[: -len(suffix)] for suffix in _SUFFIXES if mask.lower().endswith(suffix))
    return next((name for name in found if name in images), mask)


def _turned_like(file: Path, mask: np.ndarray) -> np.ndarray:
    with open_image(file) as image:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    return mask if turn is None else turn(mask)


def _size(shape: Sequence[int]) -> str:
    return f"{shape[1]}x{shape[0]}"
