"""What every data set for detection provides: images with the objects in them, in up to three splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lineattn.tasks.data.source import Splits

Target = dict[str, Tensor]  # as torchvision's detectors take it: boxes, labels, perhaps masks; and image_id


class DetSource(Protocol):
    """Images with objects by index."""

    @property
    def with_masks(self) -> bool:
        """Whether targets hold masks."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, Target]:
        """One image, (C, H, W), uint8, and its objects without crowds."""
        ...

    def subset(self, indices: Sequence[int]) -> DetSource:
        """The images at `indices`."""
        ...

    def aspect(self, index: int) -> float:
        """Width over height, without reading the image."""
        ...

    def empty(self, index: int) -> bool:
        """Whether there is no object in the image, without reading it."""
        ...

    def truth(self) -> dict[str, Any]:
        """All that is in the images, crowds too, as COCO writes it and under the data set's own ids."""
        ...


@dataclass(frozen=True)
class DetSplits(Splits[DetSource]):
    """The splits of a data set for detection.

    Attributes:
        category_ids: The data set's own id of each class.
    """

    category_ids: list[int] = field(default_factory=list)


def target(
    image_id: int, boxes: Sequence[Sequence[float]], labels: Sequence[int], masks: Tensor | None = None
) -> Target:
    """The objects of an image as torchvision's detectors take them; there may be none.

    Args:
        image_id: The data set's own id of the image.
        boxes: x1, y1, x2, y2 of each object in pixels.
        labels: The class of each, from 1; 0 would be the background.
        masks: Their masks, (n, H, W), uint8.

    Example:
        >>> {key: tuple(value.shape) for key, value in target(7, [], []).items()}
        {'boxes': (0, 4), 'labels': (0,), 'image_id': ()}
    """
    found = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.long),
        "image_id": torch.tensor(image_id),
    }
    return found if masks is None else {**found, "masks": masks}


def coco_dict(
    images: list[dict[str, Any]], annotations: list[dict[str, Any]], ids: Sequence[int], names: Sequence[str]
) -> dict[str, Any]:
    """Ground truth as COCO writes it; annotations are numbered from 1, as COCO's evaluator takes an id of 0 for none.

    Args:
        images: What there is of each image: id, file_name, width, height.
        annotations: What there is of each object but an id.
        ids: The id of each category.
        names: The name of each category.
    """
    return {
        "info": {},
        "images": images,
        "annotations": [{"id": number, **annotation} for number, annotation in enumerate(annotations, start=1)],
        "categories": [{"id": own, "name": name} for own, name in zip(ids, names, strict=True)],
    }
