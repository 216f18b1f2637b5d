"""Collects the runs of `make finetune` into results/finetune.json, and draws their curves.

A trunk is trained without attention; KCLA is attached to it, at the identity and at the paper's start, and training
goes on, three seeds each. What is compared is the validation set before the first step, and after each epoch.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lineattn.files import write_json, write_whole

ROOT = Path(__file__).parents[1]
STARTS = ("identity", "paper")


def collect(folder: Path) -> dict[str, Any]:
    """The trunk's evaluation, and start and epochs of every run.

    Raises:
        SystemExit: A run is missing, or one from the identity doesn't begin at the trunk's evaluation.
    """
    trunk = {key: value for key, value in _read(folder / "trunk" / "val.json").items() if key.startswith("val/")}
    runs = []
    for path in sorted(folder.glob("starts/*/summary.json")):
        summary = _read(path)
        with (path.parent / "metrics.csv").open() as file:
            curve = [float(row["val/acc1"]) for row in csv.DictReader(file)]
        runs.append({"init": _init(path.parent), "seed": summary["seed"], "start": summary["start"], "val/acc1": curve})
    for init in STARTS:
        if sum(run["init"] == init for run in runs) < 3:
            raise SystemExit(f"{folder}: fewer than three runs of init={init}; run `make finetune`")
    for run in runs:
        if run["init"] == "identity" and run["start"] != trunk:
            raise SystemExit(f"seed {run['seed']} begins at {run['start']}, the trunk is at {trunk}")
    return {"trunk": trunk, "runs": runs, "environment": _read(folder / "trunk" / "env.json")}


def _init(folder: Path) -> str:
    return yaml.safe_load((folder / "config.yaml").read_text())["model"]["init"]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def draw(found: dict[str, Any], path: Path) -> None:
    """Validation accuracy from before the first step on: a thin line a run, a thick one their mean."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(found["trunk"]["val/acc1"], color="0.6", linestyle="--", label="trunk, no attention")
    for init, colour in zip(STARTS, ("tab:blue", "tab:orange"), strict=True):
        curves = [[run["start"]["val/acc1"], *run["val/acc1"]] for run in found["runs"] if run["init"] == init]
        for curve in curves:
            axes.plot(curve, color=colour, linewidth=0.7, alpha=0.6)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(mean, color=colour, linewidth=2, label=f"KCLA, init={init!r}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="epoch of fine-tuning", ylabel="validation top-1 accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda file: canvas.print_png(file))


def main(args: list[str]) -> int:
    found = collect(Path(args[0]))
    write_json(ROOT / "results" / "finetune.json", found)
    draw(found, ROOT / "docs" / "finetune.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
