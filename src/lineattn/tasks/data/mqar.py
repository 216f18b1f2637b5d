"""Multi-query associative recall: pairs of keys and values, then the keys again, each to be answered by its value.

"Zoology: Measuring and Improving Recall in Efficient Language Models" (Arora et al.; ICLR 2024), arXiv 2312.04927.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.tasks.data.base import TaskData
from lineattn.tasks.data.dataset import Samples
from lineattn.tasks.data.source import Splits
from lineattn.tasks.data.text import IGNORE
from lineattn.tasks.ranges import require
from lineattn.tasks.seeding import mix

_AT_ONCE = 1024  # examples drawn together


@dataclass(frozen=True)
class Recall:
    """Examples: inputs ``(N, T)``, and targets ``(N, T)``, `IGNORE` where nothing is asked."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class RecallSamples(Samples):
    """Examples by (epoch, index)."""

    light = True

    def prepared(self, sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return sample

    def stacked(self, samples: list[tuple[Tensor, Tensor]], kept: list[int]) -> tuple[Tensor, Tensor]:
        if not samples:
            empty = self.source.inputs[:0]
            return empty.long(), empty.long()
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs).long(), torch.stack(targets).long()


def examples(
    count: int, *, length: int, pairs: int, vocabulary: int, power: float = 0.01, fillers: bool = False, seed: int = 0
) -> Recall:
    r"""Draws examples.

    Of a vocabulary of V numbers, keys are from 1 to V/2 - 1, values from V/2 on, both without repetition in an example.
    It begins with the pairs, ``k1 v1 k2 v2 ...``. Behind them every second place may ask: places are drawn one after
    another, in proportion to :math:`i^{a - 1}` for the i-th, and go to the keys in their order. There the key stands
    again and its value is the target, at the same place. What is left is 0, or random numbers.

    Args:
        count: How many.
        length: Tokens ``T``, an even number.
        pairs: Pairs ``K``; at most a quarter of the tokens.
        vocabulary: Numbers ``V`` that there are.
        power: :math:`a`; the smaller it is, the more is asked soon.
        fillers: Fill what is left with random numbers.
        seed: Seed of the draws; the first examples are the same whatever the count.

    Raises:
        InputError: The pairs have no place, or there are too few keys.

    Example:
        >>> drawn = examples(2, length=16, pairs=2, vocabulary=20)
        >>> asked = drawn.targets[0] != -100
        >>> keys, values = drawn.inputs[0, :4:2], drawn.inputs[0, 1:4:2]
        >>> [values[keys == key].item() for key in drawn.inputs[0, asked]] == drawn.targets[0, asked].tolist()
        True

    Reference:
        "Zoology" (2024), arXiv 2312.04927, appendix E.
    """
    if length % 2 or 4 * pairs > length or pairs < 1:
        raise InputError(
            f"{pairs} pairs in {length} tokens: an even number of tokens, at least four for each of one or more pairs"
        )
    if vocabulary // 2 - 1 < pairs:
        raise InputError(f"{pairs} pairs of a vocabulary of {vocabulary}: there are {vocabulary // 2 - 1} keys")
    inputs = torch.zeros(count, length, dtype=torch.int32)
    targets = torch.full((count, length), IGNORE, dtype=torch.int32)
    slots = (length - 2 * pairs) // 2
    near = (torch.arange(1, slots + 1, dtype=torch.float64).log() * (power - 1)).float()
    for number, start in enumerate(range(0, count, _AT_ONCE)):
        draws = torch.Generator().manual_seed(mix(seed, number))
        rows = slice(start, min(start + _AT_ONCE, count))
        size = rows.stop - rows.start
        keys = 1 + _distinct(pairs, torch.zeros(vocabulary // 2 - 1), draws)[:size]
        values = vocabulary // 2 + _distinct(pairs, torch.zeros(vocabulary - vocabulary // 2), draws)[:size]
        places = 2 * pairs + 2 * _distinct(pairs, near, draws)[:size]
        part, asked = inputs[rows], targets[rows]
        if fillers:
            part.copy_(torch.randint(vocabulary, (_AT_ONCE, length), generator=draws)[:size])
        part[:, 0 : 2 * pairs : 2], part[:, 1 : 2 * pairs : 2] = keys.int(), values.int()
        part.scatter_(1, places, keys.int())
        asked.scatter_(1, places, values.int())
    return Recall(inputs, targets)


def _distinct(count: int, log_weights: Tensor, draws: torch.Generator) -> Tensor:
    """So many places of the weights for each row, in the order of drawing one after another: Gumbel's trick."""
    uniform = torch.rand(_AT_ONCE, len(log_weights), generator=draws)
    noise = -(-uniform.clamp(min=1e-20).log()).log()
    return (noise + log_weights).topk(count, dim=1).indices


class RecallData(TaskData):
    """Multi-query associative recall, drawn at the start; training examples by the run's seed, the others always the
    same.

    Args:
        length: Tokens of an example.
        pairs: Pairs of keys and values to keep in mind.
        vocabulary: Numbers that there are, half of them keys.
        power: The smaller, the sooner keys are asked for.
        fillers: Fill what is left with random numbers instead of zeros.
        train_examples: Examples to train on.
        examples: Examples of the validation split, and of the test split.
        batch_size: Examples a step and process.
        num_workers: Processes that read; by default none, as there is little to do.
        seed: Seed of the run.
    """

    resolved = ()
    of_model = ("vocabulary",)
    free = ("num_workers",)
    unit = "examples"

    def __init__(
        self,
        length: int = 256,
        pairs: int = 16,
        vocabulary: int = 8192,
        power: float = 0.01,
        fillers: bool = False,
        train_examples: int = 100_000,
        examples: int = 3000,
        batch_size: int = 256,
        num_workers: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__("mqar", None, batch_size, num_workers, "stop", seed)
        for name, number in (("train_examples", train_examples), ("examples", examples)):
            require(number >= 1, f"data.{name}", number, "1 or more")
        require(vocabulary >= 4, "data.vocabulary", vocabulary, "4 or more")
        self.length, self.pairs, self.vocabulary = length, pairs, vocabulary
        self.power, self.fillers = power, fillers
        self.train_examples, self.examples = train_examples, examples

    def load(self) -> Splits[Recall]:
        return Splits(
            [],
            self._draw(self.train_examples, 0, self.seed),
            self._draw(self.examples, 1),
            self._draw(self.examples, 2),
        )

    def _draw(self, count: int, *seed: int) -> Recall:
        return examples(
            count,
            length=self.length,
            pairs=self.pairs,
            vocabulary=self.vocabulary,
            power=self.power,
            fillers=self.fillers,
            seed=mix(*seed),
        )

    def samples(self, source: Recall, *, training: bool) -> RecallSamples:
        return RecallSamples(source, seed=self.seed, on_error=self.on_error)

    def example(self) -> Tensor:
        return torch.zeros(1, self.length, dtype=torch.long)
