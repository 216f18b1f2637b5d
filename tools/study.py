"""Runs the small study of depth attention, and collects what its runs have found: results/study.json, docs/study.png.

Usage: python tools/study.py FOLDER_OF_IMAGES OUT [--jobs 2] [--collect]

Every cell is a `lineattn sweep`; the command goes on where it was stopped. Cells run beside each other with one thread
each: networks this small keep one core busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lineattn.files import write_json, write_whole

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "study" / "cifar10_resnet20.yaml"
HEADS = "head_dim: 16, drop_path: 0.0"
# Cells by name: attention options of `lineattn fit`, and how many seeds. Paper's start, no drop path, if not said.
CELLS: dict[str, tuple[dict[str, str], int]] = {
    "none": ({"model.attn": "none"}, 5),
    "mrla_light": ({"model.attn": "mrla_light", "model.attn_args": f"{{{HEADS}}}"}, 5),
    "kcla": ({"model.attn": "kcla", "model.attn_args": f"{{{HEADS}}}"}, 5),
    "layer_softmax": ({"model.attn": "layer_softmax", "model.attn_args": f"{{{HEADS}}}"}, 3),
    "dla_light": ({"model.attn": "dla_light", "model.attn_args": f"{{{HEADS}, reduction: 4}}"}, 3),
    "kcla_identity": ({"model.attn": "kcla", "model.init": "identity", "model.attn_args": f"{{{HEADS}}}"}, 3),
    "kcla_temperature": ({"model.attn": "kcla_temperature", "model.attn_args": f"{{{HEADS}}}"}, 3),
    "kcla_drop_path": ({"model.attn": "kcla", "model.attn_args": "{head_dim: 16, drop_path: 0.2}"}, 3),
    "kcla_no_gate": ({"model.attn": "kcla_no_gate", "model.attn_args": f"{{{HEADS}}}"}, 3),
    "kcla_equal_temperatures": ({"model.attn": "kcla", "model.attn_args": f"{{{HEADS}, p: 1.0}}"}, 3),
}
NAMES = {
    "none": "plain",
    "mrla_light": "MRLA-light",
    "kcla": "KCLA",
    "layer_softmax": "standard layer attention",
    "dla_light": "DLA-light",
    "kcla_identity": "KCLA, `init='identity'`",
    "kcla_temperature": "KCLA, learned temperatures",
    "kcla_drop_path": "KCLA, drop path 0.2",
    "kcla_no_gate": "KCLA without gate",
    "kcla_equal_temperatures": "KCLA, all temperatures 1",
}


def train(images: Path, out: Path, jobs: int) -> int:
    """Trains what is missing, a process a run, the first seeds of all cells first; returns how many runs failed."""
    runs = [(seed, name) for name, (_, seeds) in CELLS.items() for seed in range(1, seeds + 1)]
    with ThreadPoolExecutor(jobs) as pool:
        codes = pool.map(lambda run: _train(images, out, run[1], run[0]), sorted(runs, key=lambda run: run[0]))
        return sum(code != 0 for code in codes)


def _train(images: Path, out: Path, name: str, seed: int) -> int:
    options = [part for key, value in CELLS[name][0].items() for part in (f"--{key}", value)]
    command = [sys.executable, "-m", "lineattn", "sweep", "--config", str(RECIPE), "--data.root", str(images)]
    command += [*options, "--data.num_workers", "0", "--seeds", str(seed), "--out", str(out / name)]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def collect(out: Path) -> dict[str, Any]:
    """Test accuracy of every finished run by cell, with its settings, and where they were made."""
    cells = []
    for name, (settings, seeds) in CELLS.items():
        found = [_summary(out / name / str(seed)) for seed in range(1, seeds + 1)]
        runs = [{"seed": one["seed"]} | one["last"] for one in found if one]
        first = next((one for one in found if one), {})
        costs = {key: first.get(key) for key in ("params", "macs")}
        cells.append({"cell": name, "name": NAMES[name], "settings": settings, "wanted": seeds, "runs": runs} | costs)
    environments = [json.loads(path.read_text()) for path in sorted(out.glob("*/*/env.json"))]
    if not environments:
        raise SystemExit(f"{out}: no run here yet; run `make study`")
    commits = sorted({str(one["git"]) for one in environments})
    return {"cells": cells, "commits": commits, "environment": environments[0]}


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("status") == "done" else None


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Test accuracy: a dot a seed, a line at their mean, a row a cell."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    cells = [cell for cell in cells if cell["runs"]]
    for i, cell in enumerate(cells):
        values = [run["test/acc1"] for run in cell["runs"]]
        colour = "0.4" if cell["cell"] == "none" else "tab:orange" if cell["cell"].startswith("kcla") else "tab:blue"
        axes.plot(values, [i] * len(values), "o", color=colour, alpha=0.6, markersize=6)
        axes.plot([statistics.mean(values)] * 2, [i - 0.35, i + 0.35], color=colour, linewidth=2.5)
        if cell["cell"] == "none":
            axes.axvline(statistics.mean(values), color=colour, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(cells)), [f"{cell['name'].replace('`', '')} ({len(cell['runs'])})" for cell in cells])
    axes.invert_yaxis()
    axes.set(xlabel="test top-1 accuracy, %", title="ResNet-20, 5,000 re-encoded CIFAR-10 images, 4 epochs (seeds)")
    axes.grid(axis="x", alpha=0.3)
    write_whole(path, lambda file: canvas.print_png(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    options = parser.parse_args()
    failed = 0 if options.collect else train(options.images, options.out, options.jobs)
    found = collect(options.out)
    write_json(ROOT / "results" / "study.json", found)
    draw(found["cells"], ROOT / "docs" / "study.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
