"""The data module of image classification: any image data set, any of its splits, read the same way."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lineattn.errors import InputError, unknown
from lineattn.tasks.data import cifar, digits, folder
from lineattn.tasks.data.dataset import Batch, Images, OnError
from lineattn.tasks.data.sampler import EvalBatches, TrainBatches
from lineattn.tasks.data.source import Defaults, Pixels, Source, Splits, stratified
from lineattn.tasks.data.transforms import Augment, geometry
from lineattn.tasks.ranges import require

NAMES: dict[str, Defaults] = {
    "folder": folder.DEFAULTS,
    "cifar10": cifar.DEFAULTS,
    "cifar100": cifar.DEFAULTS,
    "digits": digits.DEFAULTS,
}
_FEW = 1000  # below that many samples, starting workers costs more than they save


class ImageData(LightningDataModule):
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
        super().__init__()
        self.name: str = name or ("folder" if root else "digits")
        if self.name not in NAMES:
            raise unknown("data set", self.name, NAMES)
        usual = NAMES[self.name]
        self.root, self.download = root, download
        self.batch_size, self.num_workers = batch_size, num_workers
        self.on_error: OnError = on_error
        self.image_size = usual.image_size if image_size is None else image_size
        self.channels = usual.channels if channels is None else channels
        require(self.channels in (1, 3), "data.channels", self.channels, "1 or 3")
        large = self.image_size >= 96
        small_folder = self.name == "folder" and not large
        self.augment: Augment = augment or ("pad_crop" if small_folder else usual.augment)
        self.rand_augment, self.erasing, self.mixup, self.cutmix = rand_augment, erasing, mixup, cutmix
        self.mean = self._per_channel("mean", usual.mean if mean is None else mean)
        self.std = self._per_channel("std", usual.std if std is None else std)
        self.crop = (0.875 if large else 1.0) if crop is None else crop
        self.val_fraction = val_fraction
        self._check_ranges()
        self.seed = seed
        self._splits: Splits | None = None

    def _check_ranges(self) -> None:
        require(self.batch_size >= 1, "data.batch_size", self.batch_size, "1 or more")
        require((self.num_workers or 0) >= 0, "data.num_workers", self.num_workers, "0 or more")
        require(self.image_size >= 1, "data.image_size", self.image_size, "1 or more")
        require(0 < self.crop <= 1, "data.crop", self.crop, "above 0 and at most 1")
        require(0 <= self.erasing <= 1, "data.erasing", self.erasing, "from 0 to 1")
        require(0 <= self.mixup < math.inf, "data.mixup", self.mixup, "0 or more")
        require(0 <= self.cutmix < math.inf, "data.cutmix", self.cutmix, "0 or more")
        require(all(value > 0 for value in self.std), "data.std", self.std, "above 0")
        require(0 <= (self.val_fraction or 0) < 1, "data.val_fraction", self.val_fraction, "0 or more and below 1")

    def _per_channel(self, what: str, values: Sequence[float]) -> list[float]:
        if len(values) == self.channels:
            return list(values)
        if len(values) == 1 or (values and self.channels == 1):
            return [sum(values) / len(values)] * self.channels
        raise InputError(f"--data.{what} has {len(values)} values for {self.channels} channels")

    @property
    def splits(self) -> Splits:
        """The data set, read or listed at the first question."""
        if self._splits is None:
            self._splits = self._hold_out(self._load())
        return self._splits

    def _load(self) -> Splits:
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

    def _hold_out(self, splits: Splits) -> Splits:
        fraction = self.val_fraction
        if fraction is None:
            fraction = 0.2 if self.name == "folder" and splits.test is None else 0.0
        if splits.val is not None or fraction <= 0:
            return splits
        val, train = stratified(splits.train.labels, [fraction])
        if not val or not train:
            raise InputError(f"--data.val_fraction {fraction} of {len(splits.train)} images leaves a split empty")
        return Splits(splits.classes, splits.train.subset(train), splits.train.subset(val), splits.test, splits.notices)

    @property
    def classes(self) -> list[str]:
        return self.splits.classes

    def train_dataloader(self) -> DataLoader[Batch]:
        rank, world = self._place()
        images = self._images(self.splits.train, training=True)
        sampler = TrainBatches(
            len(images), self.batch_size, seed=self.seed, position=self._position, rank=rank, world=world
        )
        return self._loader(images, sampler)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self.eval_loader(self.splits.val) if self.splits.val is not None else []

    def test_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self.eval_loader(self.splits.test) if self.splits.test is not None else []

    def eval_loader(self, source: Source) -> DataLoader[Batch]:
        """Each image once, in order, without augmentation."""
        rank, world = self._place()
        images = self._images(source, training=False)
        return self._loader(images, EvalBatches(len(images), self.batch_size, rank=rank, world=world))

    def _images(self, source: Source, *, training: bool) -> Images:
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

    def _loader(self, images: Images, sampler: TrainBatches | EvalBatches) -> DataLoader[Batch]:
        workers = self.num_workers
        if workers is None:
            idle = images.transform is None or len(images) < _FEW
            workers = 0 if idle else max(0, min(4, (os.cpu_count() or 1) - 1))
        return DataLoader(
            images,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_as_is,  # pyright: ignore[reportArgumentType] - a batch comes whole
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=_ignore_interrupt,
            # Its own generator: a loader would otherwise draw from the global one at each start.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _position(self) -> tuple[int, int]:
        """The epoch and how many of its batches are done, as the fit loop counts them, restored ones included."""
        if self.trainer is None:
            return 0, 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.ready
        return self.trainer.fit_loop.epoch_progress.current.processed, done  # pyright: ignore[reportAttributeAccessIssue]


def _as_is(batch: Batch) -> Batch:
    return batch


def _ignore_interrupt(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the main one decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
