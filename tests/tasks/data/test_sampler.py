"""Orders that depend on seed and epoch alone, and evaluation that sees each sample once."""

from __future__ import annotations

import pytest

from lineattn.tasks.data.sampler import EvalBatches, TrainBatches


def train(size, batch_size, *, epoch=0, done=0, rank=0, world=1, seed=1, groups=None):
    position = lambda: (epoch, done)  # noqa: E731
    return TrainBatches(size, batch_size, seed=seed, position=position, groups=groups, rank=rank, world=world)


def test_an_epoch_holds_each_sample_once_and_epochs_differ():
    first, second = (list(train(23, 5, epoch=epoch)) for epoch in (0, 1))
    assert len(first) == len(train(23, 5)) == 5
    assert sorted(index for batch in first for _, index in batch) == list(range(23))
    assert [[index for _, index in batch] for batch in first] != [[index for _, index in batch] for batch in second]
    assert {epoch for batch in second for epoch, _ in batch} == {1}


@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_starting_late_skips_what_is_done_and_nothing_else(done):
    assert list(train(23, 5, done=done)) == list(train(23, 5))[done:]


def test_the_position_is_asked_when_the_iteration_starts_not_at_the_first_batch():
    position = [(0, 2)]
    sampler = TrainBatches(20, 5, seed=0, position=lambda: position[0])
    iterator = iter(sampler)
    position[0] = (0, 0)
    assert len(list(iterator)) == 2


@pytest.mark.parametrize("size", [24, 23])
def test_processes_share_the_batches_of_one(size):
    alone = list(train(size, 6))
    ranks = [list(train(size, 3, rank=rank, world=2)) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == len(alone)
    for batch, mine, yours in zip(alone, *ranks, strict=True):
        assert len(mine) == len(yours)
        assert set(batch) <= set(mine) | set(yours)
    assert sum(map(len, ranks[0])) + sum(map(len, ranks[1])) == size + size % 2


@pytest.mark.parametrize(("size", "world"), [(21, 2), (5, 4), (16, 2), (3, 4)])
def test_evaluation_counts_each_sample_once_over_processes(size, world):
    samplers = [EvalBatches(size, 2, rank=rank, world=world) for rank in range(world)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(mine) for mine in batches} == {len(samplers[0])}  # collectives in a step need this
    assert sorted(index for mine in batches for batch in mine for _, index in batch) == list(range(size))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("size", [24, 23, 41])
def test_batches_are_of_one_group_but_for_what_is_left_over(size, world):
    groups = [int(index % 3 == 0) for index in range(size)]
    step = 4
    ranks = [list(train(size, step // world, rank=rank, world=world, groups=groups)) for rank in range(world)]
    assert {len(mine) for mine in ranks} == {len(train(size, step // world, world=world, groups=groups))}
    together = [[index for mine in batches for _, index in mine] for batches in zip(*ranks, strict=True)]
    whole = sum(groups.count(group) // step for group in (0, 1))
    assert all(len({groups[index] for index in batch}) == 1 for batch in together[:whole])
    assert len(together) - whole <= 2
    everything = [index for batch in together for index in batch]
    assert set(everything) == set(range(size)) and len(everything) == size + size % world


def test_groups_are_mixed_within_an_epoch_start_late_and_differ_between_epochs():
    groups = [index // 20 for index in range(40)]
    batches = list(train(40, 4, groups=groups))
    kinds = [groups[batch[0][1]] for batch in batches]
    assert kinds != sorted(kinds) and kinds != sorted(kinds, reverse=True)
    assert list(train(40, 4, groups=groups, done=3)) == batches[3:]
    others = [[index for _, index in batch] for batch in train(40, 4, groups=groups, epoch=1)]
    assert [[index for _, index in batch] for batch in batches] != others
    assert list(train(40, 4, groups=[1] * 40)) == list(train(40, 4))
