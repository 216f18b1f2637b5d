"""The generator of associative recall against one that draws row by row, in plain Python."""

from __future__ import annotations

import pytest
import torch

from lineattn.errors import InputError
from lineattn.tasks.data.mqar import RecallData, examples

IGNORE = -100


def check(inputs: list[int], targets: list[int], *, pairs: int, vocabulary: int, fillers: bool) -> list[int]:
    """The rules of one example, token by token; returns where it asks."""
    keys, values = inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs
    assert all(1 <= key < vocabulary // 2 for key in keys)
    assert all(vocabulary // 2 <= value < vocabulary for value in values)
    memory = dict(zip(keys, values, strict=True))
    asked = [place for place, target in enumerate(targets) if target != IGNORE]
    assert len(asked) == pairs and min(asked) >= 2 * pairs and all(place % 2 == 0 for place in asked)
    assert all(memory[inputs[place]] == targets[place] for place in asked)
    rest = [token for place, token in enumerate(inputs) if place >= 2 * pairs and place not in asked]
    assert any(rest) if fillers else not any(rest)
    return [asked.index(next(p for p in asked if inputs[p] == key)) for key in keys]


@pytest.mark.parametrize("fillers", [False, True])
@pytest.mark.parametrize(("length", "pairs", "vocabulary"), [(16, 4, 20), (64, 4, 8192), (32, 2, 9)])
def test_examples_follow_the_rules(length: int, pairs: int, vocabulary: int, fillers: bool):
    drawn = examples(50, length=length, pairs=pairs, vocabulary=vocabulary, fillers=fillers)
    for inputs, targets in zip(drawn.inputs.tolist(), drawn.targets.tolist(), strict=True):
        check(inputs, targets, pairs=pairs, vocabulary=vocabulary, fillers=fillers)


def test_early_keys_are_asked_early_and_mostly_soon():
    """Places are drawn one after another in proportion to i^(a-1): the first key's is the nearest with probability
    p_1 = 1 / sum i^(a-1), which only a draw in order gives."""
    drawn = examples(20_000, length=40, pairs=4, vocabulary=64)
    slots, power = 16, 0.01
    weights = torch.arange(1, slots + 1, dtype=torch.float64) ** (power - 1)
    first = drawn.inputs[:, 8] == drawn.inputs[:, 0]
    assert abs(first.double().mean() - weights[0] / weights.sum()) < 0.01
    second = first.logical_not() & (drawn.inputs[:, 8] == drawn.inputs[:, 2])
    p = weights / weights.sum()
    expected = sum(p[i] * weights[0] / (weights.sum() - weights[i]) for i in range(1, slots))
    assert abs(second.double().mean() - expected) < 0.01


def test_more_examples_begin_with_the_same():
    few, more = (examples(count, length=16, pairs=2, vocabulary=20, seed=3) for count in (5, 1500))
    assert torch.equal(more.inputs[:5], few.inputs) and torch.equal(more.targets[:5], few.targets)
    assert not torch.equal(more.inputs[1024:1029], few.inputs)


def test_splits_differ_and_only_training_follows_the_seed():
    one, two = (RecallData(16, 2, 20, train_examples=8, examples=8, seed=seed).splits for seed in (1, 2))
    assert one.val is not None and two.val is not None and one.test is not None
    assert torch.equal(one.val.inputs, two.val.inputs)
    assert not torch.equal(one.train.inputs, two.train.inputs)
    assert not torch.equal(one.val.inputs, one.test.inputs) and not torch.equal(one.train.inputs, one.val.inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 17}, "an even number of tokens"),
        ({"pairs": 5}, "at least four for each"),
        ({"pairs": 0}, "one or more pairs"),
        ({"vocabulary": 6}, "there are 2 keys"),
    ],
)
def test_pairs_without_room(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        examples(1, **{"length": 16, "pairs": 4, "vocabulary": 20, **options})
