"""What the data modules of all tasks share: splits, and loaders whose order a resumed run goes on with."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lineattn.errors import InputError
from lineattn.tasks.data.dataset import Batch, OnError, Samples
from lineattn.tasks.data.sampler import EvalBatches, TrainBatches
from lineattn.tasks.data.source import Splits
from lineattn.tasks.ranges import require

_FEW = 1000  # below that many samples, starting workers costs more than they save


class TaskData(LightningDataModule, ABC):
    """Samples in up to three splits.

    Args:
        name: Which data set.
        root: Where it is.
        batch_size: Samples a step and process.
        num_workers: Processes that read; by default up to 4, none where there is little to do.
        on_error: What to do at an unreadable file: `stop`, or `skip` it and say so.
        seed: Seed of the run.
    """

    resolved: ClassVar[tuple[str, ...]]
    """Options with a default that depends on others, under the names of the attributes that hold what it came to."""
    of_model: ClassVar[tuple[str, ...]]
    """What the module is told of the data: attributes, or ``classes``, how many there are."""
    free: ClassVar[tuple[str, ...]] = ("root", "num_workers", "on_error")
    """Options that a run may go on with other values of."""

    unit: ClassVar[str] = "images"
    """What the samples are called."""

    def __init__(
        self, name: str, root: str | None, batch_size: int, num_workers: int | None, on_error: OnError, seed: int
    ) -> None:
        super().__init__()
        self.name: str = name
        self.root, self.seed = root, seed
        self.batch_size, self.num_workers = batch_size, num_workers
        self.on_error: OnError = on_error
        require(batch_size >= 1, "data.batch_size", batch_size, "1 or more")
        require((num_workers or 0) >= 0, "data.num_workers", num_workers, "0 or more")
        self._splits: Splits[Any] | None = None

    @property
    def splits(self) -> Splits[Any]:
        """The data set, read or listed at the first question."""
        if self._splits is None:
            self._splits = self.load()
        return self._splits

    @property
    def classes(self) -> list[str]:
        return self.splits.classes

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data set beside the names of its classes."""
        return {}

    def for_model(self, classes: Sequence[str]) -> dict[str, Any]:
        """Arguments of the task's module, given the names of the classes."""
        values = {"classes": len(classes)}
        return {key: values[key] if key in values else getattr(self, key) for key in self.of_model}

    @abstractmethod
    def example(self) -> Tensor:
        """What the network gets for one sample, of zeros."""

    @abstractmethod
    def load(self) -> Splits[Any]:
        """Reads or lists the data set.

        Raises:
            InputError: It is missing, or not what it should be.
        """

    @abstractmethod
    def samples(self, source: Any, *, training: bool) -> Samples:
        """A split as the loader sees it."""

    def train_dataloader(self) -> DataLoader[Batch]:
        rank, world = self._place()
        samples = self.samples(self.splits.train, training=True)
        sampler = TrainBatches(
            len(samples),
            self.batch_size,
            seed=self.seed,
            position=self._position,
            groups=samples.groups,
            rank=rank,
            world=world,
        )
        return self._loader(samples, sampler)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self.eval_loader(self.splits.val) if self.splits.val is not None else []

    def test_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self.eval_loader(self.splits.test) if self.splits.test is not None else []

    def eval_loader(self, source: Any) -> DataLoader[Batch]:
        """Each sample once, in order, without augmentation."""
        rank, world = self._place()
        samples = self.samples(source, training=False)
        return self._loader(samples, EvalBatches(len(samples), self.batch_size, rank=rank, world=world))

    def _loader(self, samples: Samples, sampler: TrainBatches | EvalBatches) -> DataLoader[Batch]:
        workers = self.num_workers
        if workers is None:
            idle = samples.light or len(samples) < _FEW
            workers = 0 if idle else max(0, min(4, (os.cpu_count() or 1) - 1))
        return DataLoader(
            samples,
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


class VisualData(TaskData, ABC):
    """Images in up to three splits."""

    of_model = ("classes", "in_chans")

    channels: int
    image_size: int
    mean: list[float]
    std: list[float]

    @property
    def in_chans(self) -> int:
        """The channels, by the name that networks have for them."""
        return self.channels

    def per_channel(self, what: str, values: Sequence[float]) -> list[float]:
        """An option with a value a channel; one value, or the mean for grey, stands for all."""
        if len(values) == self.channels:
            return list(values)
        if len(values) == 1 or (values and self.channels == 1):
            return [sum(values) / len(values)] * self.channels
        raise InputError(f"--data.{what} has {len(values)} values for {self.channels} channels")

    def example(self) -> Tensor:
        return torch.zeros(1, self.channels, self.image_size, self.image_size)


def _as_is(batch: Batch) -> Batch:
    return batch


def _ignore_interrupt(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the main one decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
