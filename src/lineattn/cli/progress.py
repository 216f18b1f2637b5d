"""Progress bars of commands that train several networks: how far each is, and its accuracy so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Tell: TypeAlias = Callable[[float, float | None], None]
"""Is told how far a run is, from 0 to 1, and its latest top-1 accuracy on the validation set, if there is one yet."""


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
        self._tell(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    def _tell(self, trainer: Trainer) -> None:
        accuracy = trainer.callback_metrics.get("val/acc1")
        self.tell(trainer.global_step / self.steps, None if accuracy is None else float(accuracy))


def bars(console: Console | None = None) -> Progress:
    """An empty board of bars; where there is no terminal, nothing is shown."""
    console = console or Console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=5,
    )


def show(progress: Progress, task: TaskID, fraction: float, accuracy: float | None) -> None:
    """Moves a bar to what a run told."""
    note = "" if accuracy is None else f"validation {accuracy:.1f} %"
    progress.update(task, completed=fraction, note=note)
