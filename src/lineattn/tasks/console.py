"""What a task tells its user: notes, facts and tables, through rich; and what it keeps quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table


def plain_console(**options: Any) -> Console:
    """A console of rich that prints text as it is: in paths and names of classes, brackets and colons mean nothing."""
    return Console(markup=False, emoji=False, highlight=False, **options)


_console = plain_console(soft_wrap=True)


def note(text: str) -> None:
    """One line that the user should know."""
    _console.print(f"note: {text}")


def say(text: str, *, end: str = "\n") -> None:
    """One line of progress, or a part of one."""
    _console.print(text, end=end)


def plain(text: str) -> str:
    """A text that nobody has checked, without what a terminal would obey.

    Example:
        >>> plain("a\x1b[2Jb")
        'a\ufffd[2Jb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def facts(rows: dict[str, str]) -> None:
    """Names and values in two columns."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(name, value)
    _console.print(grid)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table with a title."""
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    _console.print(shown)


@contextmanager
def muted(active: bool = True) -> Iterator[None]:
    """Inside, nothing is printed."""
    before, _console.quiet = _console.quiet, active or _console.quiet
    try:
        yield
    finally:
        _console.quiet = before


@contextmanager
def hush_libraries() -> Iterator[None]:
    """Inside, Lightning's tips and other libraries' deprecations are not shown: none is the user's to mend."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for module in ("lightning", "jsonargparse", "torch.utils._pytree"):
                warnings.filterwarnings("ignore", module=module.replace(".", r"\."))
            warnings.filterwarnings("ignore", message=".*(LeafSpec|skip_none|instantiate_classes).*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
