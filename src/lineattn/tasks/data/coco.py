"""Data sets of COCO's format: photographs with boxes, polygons or run lengths, and crowds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.tasks.data import rle
from lineattn.tasks.data.coco_json import Annotations, CocoImage, CocoObject, read_annotations
from lineattn.tasks.data.coco_layouts import agreed, find_splits, images_folder
from lineattn.tasks.data.faults import some
from lineattn.tasks.data.objects import DetSplits, Target, coco_dict, target
from lineattn.tasks.data.reading import read_image


@dataclass(frozen=True)
class CocoImages:
    """Images on disk with the objects that a file of annotations has for them, read when asked for.

    Args:
        folder: Where the images are.
        entries: The images.
        categories: The names of the categories by id, in the order of the labels.
        channels: 1 or 3; images are converted.
        with_masks: Whether masks are decoded.
    """

    folder: Path
    entries: Sequence[CocoImage]
    categories: dict[int, str]
    channels: int
    with_masks: bool

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> tuple[Tensor, Target]:
        """One image and its objects; crowds are none.

        Shape:
            Output: (C, H, W), uint8; boxes (n, 4), labels (n,), masks (n, H, W).

        Raises:
            UnreadableImage: The file is missing, no image, or broken.
            InputError: It is of another size than the annotations say, or a mask is broken.
        """
        entry = self.entries[index]
        image = stored_image(self.folder / entry.file_name, entry, self.channels)
        objects = [found for found in entry.objects if not found.crowd]
        corners = [(x, y, x + width, y + height) for x, y, width, height in (found.box for found in objects)]
        masks = torch.from_numpy(self._masks(entry, objects)) if self.with_masks else None
        return image, target(entry.id, corners, [found.label for found in objects], masks)

    def subset(self, indices: Sequence[int]) -> CocoImages:
        entries = [self.entries[index] for index in indices]
        return CocoImages(self.folder, entries, self.categories, self.channels, self.with_masks)

    def aspect(self, index: int) -> float:
        return self.entries[index].width / self.entries[index].height

    def empty(self, index: int) -> bool:
        return all(found.crowd for found in self.entries[index].objects)

    def truth(self) -> dict[str, Any]:
        ids = list(self.categories)
        images = [
            {"id": entry.id, "file_name": entry.file_name, "width": entry.width, "height": entry.height}
            for entry in self.entries
        ]
        annotations = [
            {
                "image_id": entry.id,
                "category_id": ids[found.label - 1],
                "bbox": list(found.box),
                "area": found.area,
                "iscrowd": int(found.crowd),
                **({} if found.segmentation is None else {"segmentation": found.segmentation}),
            }
            for entry in self.entries
            for found in entry.objects
        ]
        return coco_dict(images, annotations, ids, list(self.categories.values()))

    def _masks(self, entry: CocoImage, objects: Sequence[CocoObject]) -> np.ndarray:
        masks = np.zeros((len(objects), entry.height, entry.width), dtype=np.uint8)
        for mask, found in zip(masks, objects, strict=True):
            mask[:] = object_mask(entry, found)
        return masks


def load(root: str | None, *, channels: int, masks: bool | None) -> DetSplits:
    """Reads the annotations; no image is opened.

    Args:
        root: The folder, in one of the layouts of `lineattn.tasks.data.coco_layouts`.
        channels: 1 or 3.
        masks: Whether masks are read; by default where every object has one.

    Raises:
        InputError: It is no such data set, splits differ in categories, or objects lack the masks that are asked for.
    """
    places, notices = find_splits(root)
    files = {split: read_annotations(place.annotations) for split, place in places.items()}
    categories = agreed(files)
    notices += [notice for file in files.values() for notice in file.notices]
    if not any(not found.crowd for image in files["train"].images for found in image.objects):
        raise InputError(f"{files['train'].path} has no objects to learn: add annotations")
    with_masks = _all_have_masks(files, masks, notices)
    parts = {
        split: CocoImages(images_folder(places[split], file), file.images, categories, channels, with_masks)
        for split, file in files.items()
    }
    return DetSplits(
        list(categories.values()),
        parts["train"],
        parts.get("val"),
        parts.get("test"),
        notices,
        category_ids=list(categories),
    )


def stored_image(path: Path, entry: CocoImage, channels: int) -> Tensor:
    """An image in the frame of its annotations: as the camera was held, or as stored where only that fits.

    Shape:
        Output: (channels, H, W), uint8.

    Raises:
        UnreadableImage: The file is missing, no image, or broken.
        InputError: It fits in neither way.
    """
    image = read_image(path, channels)
    height, width = image.shape[1:]
    if (width, height) == (entry.height, entry.width) and width != height:
        image = read_image(path, channels, upright=False)
    if image.shape[1:] != (entry.height, entry.width):
        raise InputError(
            f"the image {path} is {width}x{height}, but its annotations say {entry.width}x{entry.height}: "
            "mend width and height, or replace the image"
        )
    return image


def object_mask(entry: CocoImage, found: CocoObject) -> np.ndarray:
    """The mask of an object that has one.

    Shape:
        Output: (H, W), uint8, 0 or 1.

    Raises:
        InputError: It is broken.
    """
    assert found.segmentation is not None
    try:
        return rle.decode(found.segmentation, entry.height, entry.width)
    except rle.BrokenMask as error:
        raise InputError(f"annotation {found.id} of {entry.file_name} has {error}: mend or remove it") from error


def bare(file: Annotations) -> list[str]:
    """The objects without a mask."""
    return [
        f"annotation {found.id} of {image.file_name}"
        for image in file.images
        for found in image.objects
        if found.segmentation is None and not found.crowd
    ]


def _all_have_masks(files: dict[str, Annotations], masks: bool | None, notices: list[str]) -> bool:
    if masks is False:
        return False
    for file in files.values():
        objects = sum(not found.crowd for image in file.images for found in image.objects)
        if without := bare(file):
            text = f"{file.path}: {len(without):,} of {objects:,} objects have no mask ({some(without)})"
            if masks:
                raise InputError(f"{text}: add masks, or pass --data.masks false")
            if len(without) < objects:
                notices.append(f"{text}: masks are left out")
            return False
    return True
