"""A split as the data loader sees it: a list of keys in, a whole batch out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

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
    """Images with labels and their places in the data set; what could not be read is a message instead."""

    images: Tensor
    labels: Tensor
    index: Tensor
    skipped: list[str]
    error: str | None = None


class Images(Dataset[Batch]):
    """A split: batches of its images by (epoch, index).

    An unreadable image comes back as a message in the batch, not as an exception: one that crosses from a worker
    arrives as a traceback.
    """

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
        self.source, self.transform, self.shape = source, transform, shape
        self.mean, self.std, self.seed, self.on_error = mean, std, seed, on_error

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Batch:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[Key]) -> Batch:
        images: list[Tensor] = []
        kept: list[int] = []
        skipped: list[str] = []
        for epoch, index in keys:
            try:
                image = self.source.read(index)
            except UnreadableImage as error:
                if self.on_error == "stop":
                    return self._batch([], [], [], str(error))
                skipped.append(str(error).split(": repair", 1)[0])
                continue
            if self.transform is not None:
                with seeded(self.seed, epoch, index):
                    image = self.transform(image)
            images.append(image)
            kept.append(index)
        return self._batch(images, kept, skipped)

    def _batch(self, images: list[Tensor], kept: list[int], skipped: list[str], error: str | None = None) -> Batch:
        pixels = torch.stack(images) if images else torch.empty(0, *self.shape, dtype=torch.uint8)
        labels = torch.tensor([self.source.labels[index] for index in kept], dtype=torch.long)
        place = torch.tensor(kept, dtype=torch.long)
        return Batch(normalise(pixels, self.mean, self.std), labels, place, skipped, error)


class Unreadable:
    """What could not be read in a run; each file is named once, the first ten at once."""

    def __init__(self) -> None:
        self.messages: set[str] = set()

    def admit(self, batch: Batch) -> Batch:
        """The batch, after noting what it lacks.

        Raises:
            InputError: An image could not be read and the policy is to stop.
        """
        if batch.error is not None:
            raise InputError(batch.error)
        for message in batch.skipped:
            if message not in self.messages:
                self.messages.add(message)
                if len(self.messages) <= _SHOWN:
                    console.note(f"skipped: {message}")
        return batch
