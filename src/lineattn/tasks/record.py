"""The record of a run: one row an epoch, what ran where, and a summary at the end."""

from __future__ import annotations

import csv
import io
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lineattn.files import write_text, write_whole
from lineattn.tasks import console
from lineattn.tasks.base import Task


class Record(Callback):
    """Writes `metrics.csv` as the run goes on. Its rows are in the checkpoint, so a resumed run continues them.

    Args:
        folder: The run folder.
        task: Whose metrics are recorded.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder = folder
        self.metric, self.names = task.metric, task.names
        self.columns = ["epoch", "step", "lr", *task.columns, "seconds"]
        self.rows: list[dict[str, float]] = []
        self.start: dict[str, float] | None = None  # validation before the first step, where a trunk was given
        self.peak_mib: float | None = None
        self._began = 0.0
        self._spent = 0.0

    def state_dict(self) -> dict[str, Any]:
        spent = self._spent + self._running()
        return {"rows": self.rows, "start": self.start, "spent": spent, "peak_mib": self.peak_mib}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self._spent = state_dict["rows"], state_dict["spent"]
        self.start = state_dict["start"]
        self.peak_mib = state_dict["peak_mib"]

    def _running(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Task)
        if pl_module.device.type == "cuda":
            self.peak_mib = max(self.peak_mib or 0.0, torch.cuda.max_memory_allocated() / 2**20)
        elif self.peak_mib is None and pl_module.step_bytes is not None:
            self.peak_mib = pl_module.step_bytes / 2**20

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        row: dict[str, float] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "lr": max(group["lr"] for group in trainer.optimizers[0].param_groups),  # layer decay lowers the others
        }
        row |= pl_module.train_meter.compute("train", pl_module.device)
        row |= pl_module.results
        row["seconds"] = round(self._spent + self._running(), 3)
        self._began, self._spent = time.monotonic(), 0.0
        self.rows.append({key: row[key] for key in self.columns if key in row})
        if trainer.is_global_zero:
            write_text(self.folder / "metrics.csv", self.csv())
            console.say(self._line(trainer, row))

    def _line(self, trainer: Trainer, row: dict[str, float]) -> str:
        shown = [f"{key} {row[key]:.4g}" for key in self.columns[2:-1] if key in row]
        return f"epoch {row['epoch'] + 1}/{trainer.max_epochs}  " + "  ".join(shown) + f"  {row['seconds']:.1f} s"

    def csv(self) -> str:
        """The rows so far, as the text of a CSV file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def last_val(self) -> dict[str, float]:
        """The validation metrics of the last epoch."""
        return {key: value for key, value in (self.rows or [{}])[-1].items() if key.startswith("val/")}

    def seconds_per_epoch(self) -> float | None:
        """Median over the epochs."""
        return statistics.median(row["seconds"] for row in self.rows) if self.rows else None

    def plot(self) -> None:
        """Writes `curves.png`: loss and the task's metric over the epochs."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5))
        figure.subplots_adjust(left=0.08, right=0.98, bottom=0.15, top=0.96)
        canvas = FigureCanvasAgg(figure)
        rows = [{"epoch": -1} | (self.start or {}), *self.rows]
        epochs = [row["epoch"] + 1 for row in rows]
        for axes, label in zip(figure.subplots(1, 2), ("loss", self.metric), strict=True):
            for split in ("train", "val"):
                values = [row.get(f"{split}/{label}") for row in rows]
                if any(value is not None for value in values):
                    axes.plot(epochs, [float("nan") if value is None else value for value in values], label=split)
            axes.set(xlabel="epoch", ylabel=self.names[label])
            axes.grid(alpha=0.3)
            axes.legend()
        write_whole(self.folder / "curves.png", lambda file: canvas.print_png(file))
