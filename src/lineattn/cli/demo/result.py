"""What the runs of a demo found, and the one sentence that the numbers carry."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineattn.analysis.runs import mean_std, paired_interval, verdict
from lineattn.cli.demo.base import SEEDS, Demo
from lineattn.files import write_json

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Method:
    """One method over its seeds: its summaries, and a list of epochs (rows of ``metrics.csv``) a run."""

    demo: Demo
    name: str
    summaries: list[dict[str, Any]]
    curves: list[list[dict[str, float]]]

    @property
    def title(self) -> str:
        return self.demo.methods[self.name]

    @property
    def scores(self) -> list[float]:
        """The metric on the test images in percent, one a seed, of the last weights: nothing was selected."""
        return [summary["last"][f"test/{self.demo.metric}"] for summary in self.summaries]

    def row(self) -> dict[str, Any]:
        """The method's line in the table."""
        mean, std = mean_std(self.scores)
        first = self.summaries[0]
        seconds = sorted(summary["seconds_per_epoch"] for summary in self.summaries)[len(self.summaries) // 2]
        return {
            "method": self.title,
            _column(self.demo): f"{mean:.2f} ± {std:.2f}",
            "runs": len(self.summaries),
            "parameters": f"{first['params']:,}",
            "MMACs": f"{first['macs'] / 1e6:.2f}",
            "s/epoch": f"{seconds:.2f}",
        }


@dataclass(frozen=True)
class Results:
    """The methods, plain first, what takes no training, the environment of the runs, and how long all took."""

    demo: Demo
    methods: list[Method]
    floors: dict[str, float]
    environment: dict[str, Any]
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """The table, with what takes no training as its last lines."""
        rows = [method.row() for method in self.methods]
        empty = dict.fromkeys(rows[0], "")
        floors = [empty | {"method": name, _column(self.demo): f"{value:.0f}"} for name, value in self.floors.items()]
        return [*rows, *floors]

    def sentence(self) -> str:
        """What can be said of the differences: no more than their paired t-intervals hold."""
        plain, *others = self.methods
        parts = []
        for method in others:
            centre, low, high = paired_interval(method.scores, plain.scores)
            interval = f"95 % interval {low:+.2f} to {high:+.2f}"
            parts.append(f"{method.title} {centre:+.2f} points ({interval}), {verdict(low, high)}")
        against = f"Test {self.demo.metric_name} against {plain.title}, paired over {len(SEEDS)} seeds"
        return f"{against}: {'; '.join(parts)}."

    def write(self, path: Path) -> None:
        """Writes the numbers as JSON."""
        content = {
            "sentence": self.sentence(),
            **self.floors,
            "seconds": round(self.seconds, 1),
            "environment": self.environment,
            "methods": [
                {
                    "name": method.name,
                    "title": method.title,
                    f"test/{self.demo.metric}": method.scores,
                    "runs": method.summaries,
                }
                for method in self.methods
            ],
        }
        write_json(path, content)


def _column(demo: Demo) -> str:
    return f"test {demo.metric_name}, %"


def read_results(demo: Demo, out: Path, *, floors: dict[str, float], seconds: float) -> Results:
    """Reads the run folders of a finished demo."""
    methods = []
    for attn in demo.methods:
        folders = [demo.folder(out, attn, seed) for seed in SEEDS]
        summaries = [json.loads((place / "summary.json").read_text()) for place in folders]
        methods.append(Method(demo, attn, summaries, [read_curve(place / "metrics.csv") for place in folders]))
    environment = json.loads((demo.folder(out, "none", SEEDS[0]) / "env.json").read_text())
    return Results(demo, methods, floors, environment, seconds)


def read_curve(path: Path) -> list[dict[str, float]]:
    """The epochs of a run, from its ``metrics.csv``."""
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def show_table(results: Results, console: Console) -> None:
    """Prints the table."""
    from rich.table import Table

    rows = results.rows()
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()), style="dim" if row["method"] in results.floors else None)
    console.print(table)
