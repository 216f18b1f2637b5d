"""The nine runs of the demo, as many at a time as there are cores.

A network this small keeps one core busy, not two: a run has one thread, and the runs share the cores.
"""

from __future__ import annotations

import os
import queue
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

SEEDS = (1, 2, 3)
METHODS = {"none": "plain", "mrla_light": "MRLA-light", "kcla": "KCLA"}
# Depth 14: six blocks in three stages. The attention starts at zero gain, as by default: from the papers' start, KCLA
# ends anywhere between 76 and 96 % in so few steps at this rate. The papers' drop path of 0.2 is off, since it costs
# more in a run this short than the attention gives.
RECIPE = {
    "model.name": "resnet14_cifar",
    "model.width": "8",
    "data.name": "digits",
    "data.batch_size": "64",
    "data.num_workers": "0",
    "optim.lr": "0.1",
    "optim.warmup_epochs": "1",
    "optim.per_step": "true",
    "trainer.max_epochs": "4",
}
ATTENTION = {"model.attn_args": "{drop_path: 0.0}"}
_MOST_PROCESSES = 4  # each holds PyTorch, half a gigabyte


class Digit(NamedTuple):
    """A test image, and what a network says of it: pixels row by row, classes, probability of the predicted one."""

    pixels: bytes
    side: int
    label: int
    predicted: int
    probability: float


def options(attn: str, seed: int, out: Path) -> list[str]:
    """The command-line options of one run."""
    settings = {**RECIPE, **(ATTENTION | {"model.attn": attn} if attn != "none" else {})}
    settings |= {"seed_everything": str(seed), "out": str(folder(out, attn, seed))}
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


def folder(out: Path, attn: str, seed: int) -> Path:
    """The run folder of one run."""
    return out / f"{attn}-{seed}"


def train_all(out: Path, console: Console) -> list[Digit]:
    """Trains every method with every seed under ``out``, with a bar each; returns the test images as KCLA sees them."""
    from lineattn.cli.progress import bars, show

    runs = [(attn, seed) for attn in METHODS for seed in SEEDS]
    context = get_context("spawn")
    with context.Manager() as manager, bars(console) as board:
        messages = manager.Queue()
        everything = board.add_task("all runs", total=len(runs), note="loading PyTorch")
        lines: dict[int, TaskID] = {}
        others = set(active_children())
        pool = ProcessPoolExecutor(min(os.cpu_count() or 1, _MOST_PROCESSES), mp_context=context)
        try:
            jobs: dict[Future[float], int] = {}
            for number, (attn, seed) in enumerate(runs):
                jobs[pool.submit(_train, options(attn, seed, out), number, messages)] = number
            while jobs:
                with suppress(queue.Empty):
                    number, fraction, accuracy = messages.get(timeout=0.2)
                    if number not in lines:
                        lines[number] = board.add_task(_title(*runs[number]), total=1, note="")
                        board.update(everything, note="")
                    show(board, lines[number], fraction, accuracy)
                for job in [job for job in jobs if job.done()]:
                    accuracy, number = job.result(), jobs.pop(job)
                    board.advance(everything)
                    if not console.is_terminal:  # where bars can't move, a line says that something happens
                        console.print(f"{_title(*runs[number])}: validation {accuracy:.1f} %")
            return pool.submit(_look, folder(out, "kcla", SEEDS[0]) / "checkpoints" / "last.ckpt").result()
        except BaseException:
            # The pool would let a run that has begun go on to its end.
            for process in set(active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _title(attn: str, seed: int) -> str:
    return f"{METHODS[attn]}, seed {seed}"


def _train(options: list[str], number: int, messages: queue.Queue[tuple[int, float, float | None]]) -> float:
    import torch

    from lineattn.cli.follow import Follow
    from lineattn.cli.task import run

    torch.set_num_threads(1)
    follow = Follow(lambda fraction, accuracy: messages.put((number, fraction, accuracy)))
    return run("fit", "cls", options, quiet=True, callbacks=[follow])["last"]["val/acc1"]


def _look(checkpoint: Path) -> list[Digit]:
    import torch

    from lineattn.cli.restore import restore

    trained = restore(checkpoint)
    test = trained.data.splits.test
    assert test is not None
    found = []
    with torch.no_grad():
        for batch in trained.data.eval_loader(test):
            probability, predicted = trained.net(batch.images).softmax(1).max(1)
            for place, p, name in zip(batch.index.tolist(), probability.tolist(), predicted.tolist(), strict=True):
                image = test.read(place)[0]
                found.append(Digit(image.numpy().tobytes(), len(image), test.labels[place], name, p))
    return found
