"""The runs of a demo, as many at a time as there are cores.

A network this small keeps one core busy, not two: a run has one thread, and the runs share the cores.
"""

from __future__ import annotations

import os
import queue
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING

from lineattn.cli.demo.base import SEEDS, Demo, Seen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_MOST_PROCESSES = 4  # each holds PyTorch, half a gigabyte


def train_all(demo: Demo, out: Path, console: Console) -> Seen:
    """Trains every method with every seed under ``out``, with a bar each; returns what they say of the test images."""
    from lineattn.cli.progress import bars, show

    runs = [(attn, seed) for attn in demo.methods for seed in SEEDS]
    titles = [f"{demo.methods[attn]}, seed {seed}" for attn, seed in runs]
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
                options = demo.options(attn, seed, out)
                jobs[pool.submit(_train, demo.task, options, f"val/{demo.metric}", number, messages)] = number
            while jobs:
                with suppress(queue.Empty):
                    number, fraction, value = messages.get(timeout=0.2)
                    if number not in lines:
                        lines[number] = board.add_task(titles[number], total=1, note="")
                        board.update(everything, note="")
                    show(board, lines[number], fraction, value)
                for job in [job for job in jobs if job.done()]:
                    value, number = job.result(), jobs.pop(job)
                    board.advance(everything)
                    if not console.is_terminal:  # where bars can't move, a line says that something happens
                        console.print(f"{titles[number]}: validation {value:.1f} %")
            return pool.submit(demo.look, out).result()
        except BaseException:
            # The pool would let a run that has begun go on to its end.
            for process in set(active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _train(
    task: str, options: list[str], metric: str, number: int, messages: queue.Queue[tuple[int, float, float | None]]
) -> float:
    import torch

    from lineattn.cli.follow import Follow
    from lineattn.cli.task import run

    torch.set_num_threads(1)
    follow = Follow(lambda fraction, value: messages.put((number, fraction, value)))
    return run("fit", task, options, quiet=True, callbacks=[follow])["last"][metric]
