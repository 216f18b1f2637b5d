"""What the tasks on sequences of tokens share: a language model of any method of the token axis."""

from __future__ import annotations

from abc import ABC
from typing import Any

from lineattn.models.language import LanguageModel, Norm
from lineattn.tasks.base import Task
from lineattn.tasks.optim import Optim
from lineattn.tasks.seeding import seeded


class SequenceTask(Task, ABC):
    """Trains and evaluates a language model.

    Args:
        attn: A method of the token axis, see `lineattn models`.
        attn_args: Its arguments beside the width, such as `heads`.
        width: Width of a token.
        depth: Blocks.
        hidden: Width inside the MLPs; 0 for none. By default 8/3 of the width, rounded up to a multiple of 64.
        norm: `simple_rms`, without weights; `rms` or `layer`.
        tied: Use the embedding for the logits too.
        dropout: Probability of dropping a number of the embedded tokens, in training.
        init_std: Standard deviation of the weights at the start.
        vocabulary: Number of tokens that there are.
        optim: How it is trained.
        seed: Seed of the run.
    """

    net: LanguageModel

    def __init__(
        self,
        attn: str = "metala",
        attn_args: dict[str, Any] | None = None,
        width: int = 256,
        depth: int = 4,
        hidden: int | None = None,
        norm: Norm = "simple_rms",
        tied: bool = True,
        dropout: float = 0.0,
        init_std: float = 0.02,
        *,
        vocabulary: int,
        optim: Optim | None = None,
        seed: int = 0,
    ) -> None:
        arguments: dict[str, Any] = {
            "vocabulary": vocabulary,
            "channels": width,
            "depth": depth,
            "mixer": attn,
            "mixer_args": attn_args or {},
            "hidden": hidden,
            "norm": norm,
            "tied": tied,
            "dropout": dropout,
            "init_std": init_std,
        }
        with seeded(seed):
            net = LanguageModel(**arguments)
        super().__init__(net, optim=optim or Optim(), seed=seed)
        self.arguments = arguments
