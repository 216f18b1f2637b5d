"""A split as the data loader sees it: a list of keys in, a whole batch out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lineattn.errors import InputError
from lineattn.tasks import console
from lineattn.tasks.data.reading import UnreadableImage
from lineattn.tasks.data.sampler import Key
from lineattn.tasks.data.source import Source
from lineattn.tasks.data.transforms import normalise
from lineattn.tasks.seeding import seeded

OnError = Literal["stop", "skip"]
_SHOWN = 10  # unreadable images that are named one by one


class Batch(NamedTuple):
    """Samples, what is asked of them, and their places in the data set; what could not be read is a message."""

    inputs: Any
    targets: Any
    index: Tensor
    skipped: list[str]
    error: str | None = None


class Samples(Dataset[Batch], ABC):
    """A split: batches of its samples by (epoch, index).

    An unreadable file comes back as a message in the batch, not as an exception: one that crosses from a worker arrives
    as a traceback. So does what else is wrong with a sample, whatever the policy for unreadable files.

    Args:
        source: The samples as they are on disk or in memory.
        seed: Seed of the run; what is drawn for a sample follows from it, the epoch and the sample's place.
        on_error: What to do at an unreadable file.
    """

    light: bool = False
    """Whether a sample costs so little that a process of its own would not pay."""

    groups: Sequence[int] | None = None
    """The group of each sample, where a batch in training is to be of one."""

    def __init__(self, source: Any, *, seed: int, on_error: OnError) -> None:
        self.source, self.seed, self.on_error = source, seed, on_error

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Batch:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[Key]) -> Batch:
        samples: list[Any] = []
        kept: list[int] = []
        skipped: list[str] = []
        for epoch, index in keys:
            try:
                sample = self.source.read(index)
            except UnreadableImage as error:
                if self.on_error == "stop":
                    return self._batch([], [], [], str(error))
                skipped.append(error.fault)
                continue
            except InputError as error:  # what skipping would hide, such as a mask of another size
                return self._batch([], [], [], str(error))
            with seeded(self.seed, epoch, index):
                samples.append(self.prepared(sample))
            kept.append(index)
        return self._batch(samples, kept, skipped)

    def _batch(self, samples: list[Any], kept: list[int], skipped: list[str], error: str | None = None) -> Batch:
        inputs, targets = self.stacked(samples, kept)
        return Batch(inputs, targets, torch.tensor(kept, dtype=torch.long), skipped, error)

    @abstractmethod
    def prepared(self, sample: Any) -> Any:
        """A sample as the network gets it, augmented in training."""

    @abstractmethod
    def stacked(self, samples: list[Any], kept: list[int]) -> tuple[Any, Any]:
        """Inputs and targets of a batch; there may be none."""


class Images(Samples):
    """Images with a class each, all of one size."""

    def __init__(
        self,
        source: Source,
        *,
        transform: Callable[[Tensor], Tensor] | None,
        shape: tuple[int, int, int],
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        on_error: OnError,
    ) -> None:
        super().__init__(source, seed=seed, on_error=on_error)
        self.transform, self.shape, self.mean, self.std = transform, shape, mean, std
        self.light = transform is None

    def prepared(self, sample: Tensor) -> Tensor:
        return sample if self.transform is None else self.transform(sample)

    def stacked(self, samples: list[Tensor], kept: list[int]) -> tuple[Tensor, Tensor]:
        pixels = torch.stack(samples) if samples else torch.empty(0, *self.shape, dtype=torch.uint8)
        labels = torch.tensor([self.source.labels[index] for index in kept], dtype=torch.long)
        return normalise(pixels, self.mean, self.std), labels


class Unreadable:
    """What could not be read in a run; each file is named once, the first ten at once."""

    def __init__(self) -> None:
        self.messages: set[str] = set()

    def admit(self, batch: Batch) -> Batch:
        """The batch, after noting what it lacks.

        Raises:
            InputError: A file could not be read and the policy is to stop.
        """
        if batch.error is not None:
            raise InputError(batch.error)
        for message in batch.skipped:
            self.note(message)
        return batch

    def note(self, message: str) -> None:
        """Says that a file is skipped."""
        if message not in self.messages:
            self.messages.add(message)
            if len(self.messages) <= _SHOWN:
                console.note(f"skipped: {message}")
