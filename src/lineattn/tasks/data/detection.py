"""The data module of detection: images of any size with boxes, classes and perhaps masks of their objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from lineattn.errors import InputError, unknown
from lineattn.tasks.data import coco, det_digits
from lineattn.tasks.data.base import VisualData
from lineattn.tasks.data.dataset import OnError, Samples
from lineattn.tasks.data.folder import DEFAULTS
from lineattn.tasks.data.objects import DetSource, DetSplits, Target
from lineattn.tasks.data.source import held_out
from lineattn.tasks.ranges import require

_SHORT, _LONG = 800, 1333  # torchvision's sides, and the papers'
_LEAST = 32  # side of a scene of digits that leaves pixels to tell them by


class DetectionData(VisualData):
    """Images with boxes, and masks where there are some.

    Images come as they are, in 0..1; the network resizes and normalises them, by the sides, mean and std that it is
    told here.

    Args:
        name: `coco`, annotations of COCO's format in COCO's own folders, plain ones or Roboflow's; or `digits`, scenes
            of the bundled digits. By default `coco` where there is a root, else `digits`.
        root: Where the data set is; `digits` needs none.
        batch_size: Samples a step and process.
        num_workers: Processes that read images; by default up to 4, none where there is little to do.
        image_size: Side of a scene of `digits`; by default 96.
        min_size: What an image's shorter side is resized to; of several, one is drawn for each image in training, and
            the last is used elsewhere. By default 800, or the scene's side for `digits`.
        max_size: What its longer side may not pass; by default 1333, or `min_size` for `digits`.
        flip: Probability that an image is mirrored in training; by default 0.5, or 0 for `digits`.
        masks: Whether masks are read; by default where every object has one.
        drop_empty: Leave images without objects out of training.
        channels: 1 or 3; images are converted. By default 1 for `digits`, else 3.
        mean: Mean of a channel in 0..1, to be subtracted; by default ImageNet's, or 0.5 for `digits`.
        std: Standard deviation of a channel; by default ImageNet's, or 0.25 for `digits`.
        val_fraction: Part of the training images held out for validation where there is no validation split; by
            default 0.2 without validation and test, else none.
        on_error: What to do at an unreadable file: `stop`, or `skip` it and say so.

    Attributes:
        image_size: The shorter side in evaluation.
    """

    resolved = ("name", "min_size", "max_size", "flip", "channels", "mean", "std")
    of_model = ("classes", "in_chans", "min_size", "max_size", "mean", "std")

    def __init__(
        self,
        name: str | None = None,
        root: str | None = None,
        batch_size: int = 2,
        num_workers: int | None = None,
        image_size: int | None = None,
        min_size: int | list[int] | None = None,
        max_size: int | None = None,
        flip: float | None = None,
        masks: bool | None = None,
        drop_empty: bool = False,
        channels: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        val_fraction: float | None = None,
        on_error: OnError = "stop",
        *,
        seed: int = 0,
    ) -> None:
        chosen = name or ("digits" if root is None else "coco")
        super().__init__(chosen, root, batch_size, num_workers, on_error, seed)
        if chosen not in ("coco", "digits"):
            raise unknown("data set", chosen, ["coco", "digits"])
        digits = chosen == "digits"
        if image_size is not None and not digits:
            raise InputError("--data.image_size is for digits: use --data.min_size and --data.max_size")
        self.scene: int = det_digits.SIDE if image_size is None else image_size
        require(self.scene >= _LEAST, "data.image_size", self.scene, f"{_LEAST} or more")
        sides = (self.scene if digits else _SHORT) if min_size is None else min_size
        self.min_size: list[int] = [sides] if isinstance(sides, int) else list(sides)
        require(min(self.min_size, default=0) >= 1, "data.min_size", min_size, "1 or more")
        usual_max = max(self.min_size) if digits else max(_LONG, *self.min_size)
        self.max_size: int = usual_max if max_size is None else max_size
        self.image_size = self.min_size[-1]
        self.flip: float = (0.0 if digits else 0.5) if flip is None else flip
        self.masks, self.drop_empty, self.val_fraction = masks, drop_empty, val_fraction
        self.channels = (1 if digits else 3) if channels is None else channels
        require(self.channels in (1, 3), "data.channels", self.channels, "1 or 3")
        usual = ([0.5], [0.25]) if digits else (DEFAULTS.mean, DEFAULTS.std)
        self.mean, self.std = (
            self.per_channel(what, values or default)
            for what, values, default in zip(("mean", "std"), (mean, std), usual, strict=True)
        )
        self._check_ranges()

    def _check_ranges(self) -> None:
        require(self.max_size >= max(self.min_size), "data.max_size", self.max_size, "at least data.min_size")
        require(0 <= self.flip <= 1, "data.flip", self.flip, "from 0 to 1")
        require(all(value > 0 for value in self.std), "data.std", self.std, "above 0")
        require(0 <= (self.val_fraction or 0) < 1, "data.val_fraction", self.val_fraction, "0 or more and below 1")

    @property
    def facts(self) -> dict[str, Any]:
        """The data set's own id of each class."""
        splits = self.splits
        assert isinstance(splits, DetSplits)
        return {"category_ids": splits.category_ids}

    def load(self) -> DetSplits:
        if self.name == "digits":
            found = det_digits.load(image_size=self.scene, channels=self.channels, masks=self.masks)
        else:
            found = coco.load(self.root, channels=self.channels, masks=self.masks)
        usual = 0.2 if found.test is None else 0.0
        found = held_out(found, usual if self.val_fraction is None else self.val_fraction)
        return self._without_empty(found) if self.drop_empty else found

    def _without_empty(self, splits: DetSplits) -> DetSplits:
        kept = [index for index in range(len(splits.train)) if not splits.train.empty(index)]
        if not kept:
            raise InputError("--data.drop_empty leaves no image to train on: leave it out")
        left = len(splits.train) - len(kept)
        notices = [*splits.notices, f"left {left:,} training images without objects out"] if left else splits.notices
        return replace(splits, train=splits.train.subset(kept), notices=notices)

    def samples(self, source: DetSource, *, training: bool) -> Objects:
        return Objects(
            source, flip=self.flip if training else 0.0, grouped=training, seed=self.seed, on_error=self.on_error
        )


class Objects(Samples):
    """Images with objects: a batch is a list of images in 0..1 and a list of targets, as torchvision's detectors take.

    Args:
        source: Images with objects.
        flip: Probability that an image is mirrored.
        grouped: Whether batches are to be of wide images or of tall ones alone, which wastes no room between them.
        seed: Seed of the run.
        on_error: What to do at an unreadable file.
    """

    def __init__(self, source: DetSource, *, flip: float, grouped: bool, seed: int, on_error: OnError) -> None:
        super().__init__(source, seed=seed, on_error=on_error)
        self.light = isinstance(source, det_digits.DigitScenes)
        self.groups = [int(source.aspect(index) >= 1) for index in range(len(source))] if grouped else None
        self._flip = v2.RandomHorizontalFlip(flip) if flip else None

    def prepared(self, sample: tuple[Tensor, Target]) -> tuple[Tensor, Target]:
        image, target = sample
        if self._flip is not None:
            image, target = self._flip(tv_tensors.Image(image), _typed(target, image))
            image = image.as_subclass(Tensor)
            target = {key: value.as_subclass(Tensor) for key, value in target.items()}
        return v2.functional.to_dtype(image, torch.float32, scale=True), target

    def stacked(self, samples: list[tuple[Tensor, Target]], kept: list[int]) -> tuple[list[Tensor], list[Target]]:
        return [image for image, _ in samples], [target for _, target in samples]


def _typed(target: Target, image: Tensor) -> Target:
    """The types by which torchvision tells boxes and masks from other tensors."""
    size = (image.shape[-2], image.shape[-1])
    boxes = tv_tensors.BoundingBoxes(  # pyright: ignore[reportCallIssue] - torchvision's overloads lack it
        target["boxes"], format=tv_tensors.BoundingBoxFormat.XYXY, canvas_size=size
    )
    typed = {**target, "boxes": boxes}
    return {**typed, "masks": tv_tensors.Mask(target["masks"])} if "masks" in target else typed
