"""The data module of image classification: any image data set, any of its splits, read the same way."""

from __future__ import annotations

import math

from lineattn.errors import InputError, unknown
from lineattn.tasks.data import cifar, digits, folder
from lineattn.tasks.data.base import VisualData
from lineattn.tasks.data.dataset import Images, OnError
from lineattn.tasks.data.source import Defaults, Pixels, Source, Splits, stratified
from lineattn.tasks.data.transforms import Augment, geometry
from lineattn.tasks.ranges import require

NAMES: dict[str, Defaults] = {
    "folder": folder.DEFAULTS,
    "cifar10": cifar.DEFAULTS,
    "cifar100": cifar.DEFAULTS,
    "digits": digits.DEFAULTS,
}


class ImageData(VisualData):
    """Images for classification.

    Args:
        name: `folder`, `cifar10`, `cifar100` or `digits`; by default `folder` where there is a root, else `digits`.
        root: Where the images are; `digits` needs none.
        batch_size: Samples a step and process.
        num_workers: Processes that read images; by default up to 4, none where there is little to do.
        image_size: Side of the network's input; by default 224 for `folder`, 32 for CIFAR, 16 for `digits`.
        channels: 1 or 3; images are converted. By default 1 for `digits`, else 3.
        augment: `none`, `pad_crop` (CIFAR) or `resized_crop` (ImageNet); by default what suits the data set.
        rand_augment: Add RandAugment.
        erasing: Probability of erasing a random rectangle.
        mixup: Strength of mixup; 0 is off.
        cutmix: Strength of cutmix; 0 is off. With both, one of them at random for each batch.
        mean: Mean of a channel in 0..1, to be subtracted; by default the data set's.
        std: Standard deviation of a channel; by default the data set's.
        crop: In evaluation, the part of the resized image's side that is kept; by default 0.875 from 96 pixels, else 1.
        val_fraction: Part of the training images held out for validation where there is no validation split; by
            default 0.2 for a folder without val/ and test/, else none.
        on_error: What to do at an unreadable image: `stop`, or `skip` it and say so.
        download: Fetch CIFAR where it is missing.
    """

    resolved = ("name", "image_size", "channels", "augment", "mean", "std", "crop")
    of_model = (*VisualData.of_model, "mixup", "cutmix")
    free = (*VisualData.free, "download", "crop")

    def __init__(
        self,
        name: str | None = None,
        root: str | None = None,
        batch_size: int = 128,
        num_workers: int | None = None,
        image_size: int | None = None,
        channels: int | None = None,
        augment: Augment | None = None,
        rand_augment: bool = False,
        erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        crop: float | None = None,
        val_fraction: float | None = None,
        on_error: OnError = "stop",
        download: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        chosen: str = name or ("folder" if root else "digits")
        if chosen not in NAMES:
            raise unknown("data set", chosen, NAMES)
        super().__init__(chosen, root, batch_size, num_workers, on_error, seed)
        usual, self.download = NAMES[chosen], download
        self.image_size = usual.image_size if image_size is None else image_size
        self.channels = usual.channels if channels is None else channels
        require(self.channels in (1, 3), "data.channels", self.channels, "1 or 3")
        large = self.image_size >= 96
        small_folder = self.name == "folder" and not large
        self.augment: Augment = augment or ("pad_crop" if small_folder else usual.augment)
        self.rand_augment, self.erasing, self.mixup, self.cutmix = rand_augment, erasing, mixup, cutmix
        self.mean = self.per_channel("mean", usual.mean if mean is None else mean)
        self.std = self.per_channel("std", usual.std if std is None else std)
        self.crop = (0.875 if large else 1.0) if crop is None else crop
        self.val_fraction = val_fraction
        self._check_ranges()

    def _check_ranges(self) -> None:
        require(self.image_size >= 1, "data.image_size", self.image_size, "1 or more")
        require(0 < self.crop <= 1, "data.crop", self.crop, "above 0 and at most 1")
        require(0 <= self.erasing <= 1, "data.erasing", self.erasing, "from 0 to 1")
        require(0 <= self.mixup < math.inf, "data.mixup", self.mixup, "0 or more")
        require(0 <= self.cutmix < math.inf, "data.cutmix", self.cutmix, "0 or more")
        require(all(value > 0 for value in self.std), "data.std", self.std, "above 0")
        require(0 <= (self.val_fraction or 0) < 1, "data.val_fraction", self.val_fraction, "0 or more and below 1")

    def load(self) -> Splits[Source]:
        return self._hold_out(self._load())

    def _load(self) -> Splits[Source]:
        if self.name == "folder":
            return folder.load(self.root, channels=self.channels)
        if self.name == "digits":
            return digits.load(image_size=self.image_size, channels=self.channels)
        return cifar.load(
            self.root,
            classes=int(self.name.removeprefix("cifar")),
            image_size=self.image_size,
            channels=self.channels,
            download=self.download,
        )

    def _hold_out(self, splits: Splits[Source]) -> Splits[Source]:
        fraction = self.val_fraction
        if fraction is None:
            fraction = 0.2 if self.name == "folder" and splits.test is None else 0.0
        if splits.val is not None or fraction <= 0:
            return splits
        val, train = stratified(splits.train.labels, [fraction])
        if not val or not train:
            raise InputError(f"--data.val_fraction {fraction} of {len(splits.train)} images leaves a split empty")
        return Splits(splits.classes, splits.train.subset(train), splits.train.subset(val), splits.test, splits.notices)

    def samples(self, source: Source, *, training: bool) -> Images:
        plain = self.augment == "none" and not self.rand_augment and not self.erasing
        resized = isinstance(source, Pixels)
        transform = None
        if not resized or (training and not plain):
            transform = geometry(
                self.image_size,
                augment=self.augment if training else "none",
                crop=1.0 if training else self.crop,
                resized=resized,
                rand_augment=training and self.rand_augment,
                erasing=self.erasing if training else 0.0,
                mean=self.mean,
            )
        return Images(
            source,
            transform=transform,
            shape=(self.channels, self.image_size, self.image_size),
            mean=self.mean,
            std=self.std,
            seed=self.seed,
            on_error=self.on_error,
        )
