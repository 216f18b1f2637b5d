"""Progress bars of commands that train several networks: how far each is, and its accuracy so far."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lineattn.tasks.console import plain_console


def bars(console: Console | None = None) -> Progress:
    """An empty board of bars; where there is no terminal, nothing is shown."""
    console = console or plain_console()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=5,
    )


def show(progress: Progress, task: TaskID, fraction: float, accuracy: float | None) -> None:
    """Moves a bar to what a run told."""
    note = "" if accuracy is None else f"validation {accuracy:.1f} %"
    progress.update(task, completed=fraction, note=note)
