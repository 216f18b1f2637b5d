"""Batches as lists of keys (epoch, index): the order of a run, known in advance and the same for any worker count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.utils.data import Sampler

from lineattn.tasks.seeding import permutation

Key = tuple[int, int]


class TrainBatches(Sampler[list[Key]]):
    """Shuffled training batches that can start in the middle of an epoch.

    The order is a function of (seed, epoch). Batch `k` of the run is split over the processes, so two processes with
    half the batch size see the same samples as one. In the last batch the first samples of the epoch fill up so that
    all processes have equally many.

    Args:
        size: Number of samples.
        batch_size: Samples a process and step.
        seed: Seed of the run.
        groups: The group of each sample, as wide and tall images are: a batch is of one, but for what the groups leave
            over, which comes last.
        position: Returns the epoch and the number of its batches that are already done; asked at each start.
        rank: This process.
        world: Number of processes.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        position: Callable[[], tuple[int, int]],
        groups: Sequence[int] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.size, self.batch_size, self.seed, self.position = size, batch_size, seed, position
        self.groups, self.rank, self.world = groups, rank, world

    def __len__(self) -> int:
        return -(-self.size // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[Key]]:
        # Not a generator: the position must be read now, not when the first batch is asked for.
        epoch, done = self.position()
        order = permutation(self.size, self.seed, epoch)
        step = self.batch_size * self.world
        if self.groups is not None:
            order = _together(order, self.groups, step)
        order += order[: -len(order) % self.world]
        return iter(
            [
                [(epoch, index) for index in order[start : start + step][self.rank :: self.world]]
                for start in range(done * step, self.size, step)
            ]
        )


class EvalBatches(Sampler[list[Key]]):
    """Batches in order, each sample exactly once over all processes.

    Every process yields equally many batches, because collectives may run in each; the last ones can be empty.

    Args:
        size: Number of samples.
        batch_size: Samples a process and step.
        rank: This process.
        world: Number of processes.
    """

    def __init__(self, size: int, batch_size: int, *, rank: int = 0, world: int = 1) -> None:
        self.size, self.batch_size, self.rank, self.world = size, batch_size, rank, world

    def __len__(self) -> int:
        return -(-self.size // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[Key]]:
        step = self.batch_size * self.world
        for start in range(0, self.size, step):
            indices = range(start, min(start + step, self.size))
            yield [(0, index) for index in indices[self.rank :: self.world]]


def _together(order: Sequence[int], groups: Sequence[int], step: int) -> list[int]:
    """The same samples so that each `step` of them are of one group, as far as the groups go; the rest comes last."""
    waiting: dict[int, list[int]] = {}
    found: list[int] = []
    for index in order:
        group = waiting.setdefault(groups[index], [])
        group.append(index)
        if len(group) == step:
            found += group
            group.clear()
    return found + [index for _, group in sorted(waiting.items()) for index in group]
