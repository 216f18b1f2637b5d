"""Tells how far a run is; apart from the bars, so that who only draws them need not import Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer

Tell: TypeAlias = Callable[[float, float | None], None]
"""Is told how far a run is, from 0 to 1, and the task's metric on the validation set, if there is one yet."""


class Follow(Callback):
    """Follows a run: tells after each step how far it is.

    Args:
        tell: Is told.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.steps = 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps = float(trainer.estimated_stepping_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer, pl_module)

    def _tell(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(f"val/{pl_module.metric}")
        self.tell(trainer.global_step / self.steps, None if value is None else float(value))
