"""What is printed is what was meant, whatever files and classes are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from lineattn.cli.progress import bars
from lineattn.tasks import console
from lineattn.tasks.predict import Prediction, show

NAME = "img[final]:cat:[/].jpg"


def _predictions():
    show([Prediction(Path(NAME), [0.25, 0.75])], ["dog", NAME], 1)


@pytest.mark.parametrize(
    "tell",
    [
        lambda: console.note(NAME),
        lambda: console.say(NAME),
        lambda: console.facts({"run folder": NAME}),
        lambda: console.table(NAME, ["a"], [["b"]]),
        lambda: console.table("a", [NAME], [["b"]]),
        _predictions,
    ],
    ids=["note", "say", "facts", "title", "column", "predictions"],
)
def test_brackets_are_no_markup(tell, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    tell()
    assert NAME in capsys.readouterr().out


def test_names_of_bars_neither(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plain = console.plain_console(force_terminal=True, color_system=None)
    progress = bars(plain)
    progress.add_task(NAME, note=NAME)
    with plain.capture() as shown:
        plain.print(progress.get_renderable())
    assert shown.get().count(NAME) == 2


def test_a_plain_console_prints_tables_as_they_are(capsys):
    table = Table(NAME)
    table.add_row(NAME)
    console.plain_console(width=80).print(table)
    assert capsys.readouterr().out.count(NAME) == 2
