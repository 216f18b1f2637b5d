"""Language modelling: the next token of a text, from all that came before in its document."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.tasks.data.dataset import Batch
from lineattn.tasks.data.text import IGNORE, Next
from lineattn.tasks.meter import Sums
from lineattn.tasks.sequence import SequenceTask

_NAMES = {
    "loss": "cross-entropy, nats a token",
    "ppl": "perplexity a token",
    "byte_ppl": "perplexity a byte",
    "bpb": "bits a byte",
}


class LanguageModelling(SequenceTask):
    """Trains and evaluates a model of the next token.

    Args:
        separator: The token that stands before each document: what comes before it is not seen from behind it.
        arguments: Those of `lineattn.tasks.sequence.SequenceTask`.
    """

    metric = "bpb"
    falls = True
    names = _NAMES
    columns = ("train/loss", "train/bpb", "val/loss", "val/ppl", "val/bpb")
    counted = "tokens"

    def __init__(self, *, separator: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.separator = separator
        self.train_meter, self.eval_meter = TextMeter(), TextMeter()

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V); each document is by itself."""
        net = self.net if self.training else self.evaluated_net
        starts = tokens == self.separator
        if not starts[:, 1:].any():
            return net(tokens)[0]
        # One row of documents: each begins with a separator, or with its block.
        starts[:, 0] = True
        begins = starts.flatten().nonzero().flatten()
        ends = begins.new_tensor([tokens.numel()])
        logits, _ = net(tokens.reshape(1, -1), cu_seqlens=torch.cat([begins, ends]))
        return logits.view(*tokens.shape, -1)

    def loss(self, inputs: Tensor, target: Next) -> tuple[Tensor, Tensor]:
        logits = self(inputs).float()
        smoothing = self.optim.label_smoothing if self.training else 0.0
        loss = F.cross_entropy(
            logits.flatten(0, 1), target.tokens.flatten(), ignore_index=IGNORE, label_smoothing=smoothing
        )
        return loss, logits

    def note(self, meter: Any, loss: Tensor, outputs: Tensor, target: Next) -> None:
        meter.update(loss, target)

    def evaluate(self, batch: Batch) -> None:
        loss, logits = self.loss(batch.inputs, batch.targets)
        self.note(self.eval_meter, loss, logits, batch.targets)


class TextMeter(Sums):
    """Sums of the cross-entropy in nats, of tokens, and of the bytes of the text that they stand for."""

    def __init__(self) -> None:
        super().__init__(3)

    @torch.no_grad()
    def update(self, loss: Tensor, target: Next) -> None:
        """Adds a batch.

        Args:
            loss: Its mean loss a token.
            target: What there was to predict.
        """
        tokens = (target.tokens != IGNORE).sum()
        self.add(torch.stack([loss.detach() * tokens, tokens, target.size.sum()]))

    def compute(self, prefix: str, device: torch.device) -> dict[str, float]:
        """The mean loss, and what follows from it, as `prefix/loss`, `prefix/ppl`, `prefix/byte_ppl`, `prefix/bpb`."""
        nats, tokens, size = self.total(device).tolist()
        if not tokens:
            return {}
        bits = nats / size / math.log(2)
        return {
            f"{prefix}/loss": nats / tokens,
            f"{prefix}/ppl": _exp(nats / tokens),
            f"{prefix}/byte_ppl": _exp(nats / size),
            f"{prefix}/bpb": bits,
        }

    def count(self, device: torch.device) -> int:
        return int(self.total(device)[1])


def _exp(nats: float) -> float:
    """Infinite where a number has no room for it."""
    return math.exp(nats) if nats < 700 else math.inf
