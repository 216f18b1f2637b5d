"""Checkpoints: written whole or not at all, read without running code, and made so that a run goes on exactly."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lineattn.errors import InputError
from lineattn.files import load_torch, write_whole
from lineattn.tasks import console
from lineattn.tasks.base import Task

KEY = "lineattn"  # where our own entries stand in a checkpoint


class Interrupted(Exception):
    """The user pressed Ctrl-C. No KeyboardInterrupt: Lightning turns one into an exit of its own."""


def load(path: str | Path) -> dict[str, Any]:
    """A checkpoint of this library, read with `weights_only=True` on the CPU.

    Raises:
        InputError: It is missing, damaged, holds code, or is no checkpoint of a run.
    """
    if not Path(path).exists():
        raise InputError(f"no checkpoint at {path}: a run's are in its checkpoints/ folder")
    found = load_torch(path)
    if not isinstance(found, dict) or "state_dict" not in found or not _is_ours(found.get(KEY)):
        raise InputError(f"{path} is no checkpoint of a run; weights alone are given with --model.trunk")
    found[KEY].setdefault("task", "cls")  # runs from before there were others
    return found


def _is_ours(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and isinstance(content.get("config"), dict)
        and isinstance(content.get("classes"), list)
    )


class CheckpointIO(TorchCheckpointIO):
    """How Lightning writes and reads checkpoints here."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write_whole(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return load(path)


class Checkpoints(Checkpoint):
    """Keeps `last.ckpt` and, by the task's metric on the validation set, `best.ckpt`; stops cleanly at Ctrl-C.

    A checkpoint is written after a step, not inside one, or at the end of an epoch after validation, so that a
    resumed run does what the run would have done.

    Args:
        folder: Where they are written.
        every: Steps between two writes of `last.ckpt`, beside those at the ends of epochs; 0 is none.
        content: What this library adds to each: configuration, class names.
    """

    def __init__(self, folder: Path, *, every: int, content: dict[str, Any]) -> None:
        self.folder, self.every, self.content = folder, every, content
        self.best: dict[str, float] | None = None
        self.interrupted = False
        self._handler: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = self.content

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Only rank 0 chose the name of the run folder for certain.
        self.folder = trainer.strategy.broadcast(self.folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise Interrupted(f"stopped at once; go on from the last checkpoint with {self._hint()}")
        self.interrupted = True
        console.say("stopping after this step (or after validation, if that is running); Ctrl-C again: at once")

    def _hint(self) -> str:
        return f"--ckpt_path last --out {self.folder.parent}"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stop = _any_process(trainer, self.interrupted)
        # After the last batch come validation and the end of the epoch, where it is written anyway.
        if epoch_is_done(trainer):
            self.interrupted = stop
            return
        due = self.every > 0 and trainer.global_step % self.every == 0
        if (stop or due or trainer.should_stop) and not trainer.fit_loop._should_accumulate():
            self._save(trainer, pl_module, "last")
            if stop:
                raise Interrupted(f"stopped at step {trainer.global_step}; go on with {self._hint()}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not epoch_is_done(trainer):
            return  # the run ends inside an epoch: written after its last step, from where it can go on exactly
        assert isinstance(pl_module, Task)
        key = f"val/{pl_module.metric}"
        value = pl_module.results.get(key)
        if value is not None and (self.best is None or _better(value, self.best[key], falls=pl_module.falls)):
            self.best = {key: value, "epoch": trainer.current_epoch}
            self._save(trainer, pl_module, "best")
        self._save(trainer, pl_module, "last")
        if _any_process(trainer, self.interrupted):
            raise Interrupted(f"stopped after epoch {trainer.current_epoch}; go on with {self._hint()}")

    def _save(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        assert isinstance(pl_module, Task)
        pl_module.refuse_bad(weights=True)
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")


def _better(value: float, best: float, *, falls: bool) -> bool:
    return value < best if falls else value > best


def epoch_is_done(trainer: Trainer) -> bool:
    """Whether the last training epoch got to its end."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def _any_process(trainer: Trainer, flag: bool) -> bool:
    return trainer.strategy.reduce_boolean_decision(flag, all=False) if trainer.world_size > 1 else flag
