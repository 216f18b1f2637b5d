"""Multi-query associative recall: how many pairs a method of the token axis keeps in mind."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.models.language import LanguageModel
from lineattn.tasks.data.dataset import Batch
from lineattn.tasks.data.text import IGNORE
from lineattn.tasks.meter import Sums
from lineattn.tasks.sequence import SequenceTask


class AssociativeRecall(SequenceTask):
    """Trains and evaluates a model that answers keys by their values.

    Args:
        arguments: Those of `lineattn.tasks.sequence.SequenceTask`.
    """

    metric = "acc"
    names = {"loss": "cross-entropy", "acc": "accuracy over what is asked, %"}  # noqa: RUF012
    columns = ("train/loss", "train/acc", "val/loss", "val/acc")
    counted = "questions"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.train_meter, self.eval_meter = RecallMeter(), RecallMeter()

    def loss(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        net = self.net if self.training else self.evaluated_net
        assert isinstance(net, LanguageModel)
        asked = target != IGNORE
        logits = net.logits(net.features(inputs)[0][asked]).float()  # of a large vocabulary, where they are needed
        smoothing = self.optim.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits, target[asked], label_smoothing=smoothing), logits

    def note(self, meter: Any, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        meter.update(loss, outputs, target[target != IGNORE])

    def evaluate(self, batch: Batch) -> None:
        loss, logits = self.loss(batch.inputs, batch.targets)
        self.note(self.eval_meter, loss, logits, batch.targets)


class RecallMeter(Sums):
    """Sums of the loss, of right answers, and of questions."""

    def __init__(self) -> None:
        super().__init__(3)

    @torch.no_grad()
    def update(self, loss: Tensor, logits: Tensor, answers: Tensor) -> None:
        """Adds a batch's questions: their mean loss, logits ``(N, V)`` and answers ``(N,)``."""
        right, count = (logits.argmax(1) == answers).sum(), len(answers)
        self.add(torch.stack([loss.detach() * count, right, loss.new_tensor(count)]))

    def compute(self, prefix: str, device: torch.device) -> dict[str, float]:
        """Mean loss and accuracy in percent, as `prefix/loss` and `prefix/acc`."""
        loss, right, count = self.total(device).tolist()
        return {f"{prefix}/loss": loss / count, f"{prefix}/acc": 100 * right / count} if count else {}

    def count(self, device: torch.device) -> int:
        return int(self.total(device)[2])
