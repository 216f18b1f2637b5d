"""Runs a small study, and collects what its runs have found: results/study_NAME.json, docs/study_NAME.png.

Usage: python tools/study.py depth|sample|kvasir|mqar|metala OUT [--images FOLDER] [--jobs 2] [--collect]

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from study_masks import baselines, draw_overlays
from study_recall import best_rates, draw_recall

from lineattn.files import write_json, write_whole

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cell:
    """One row of a study: a name for the table, options of `lineattn fit`, and how many seeds."""

    name: str
    options: dict[str, str]
    seeds: int = 3


@dataclass(frozen=True)
class Study:
    """Cells by the name of their folder; the first is the one that others are compared with.

    Attributes:
        metric: What is shown of a run, and `what` it is called.
        weights: Which it is of: the `last`, or the `best` on the validation split.
        images: Whether it is of a folder of images.
    """

    recipe: str
    title: str
    cells: dict[str, Cell]
    task: str = "cls"
    metric: str = "test/acc1"
    what: str = "test accuracy, %"
    weights: Literal["last", "best"] = "last"
    images: bool = True


def depth(name: str, attn: str, arguments: str = "", seeds: int = 3, **model: str) -> Cell:
    """Paper's start, and no drop path, if not said."""
    options = {"model.attn": attn} | {f"model.{key}": value for key, value in model.items()}
    if attn != "none":
        options["model.attn_args"] = f"{{head_dim: 16, {arguments or 'drop_path: 0.0'}}}"
    return Cell(name, options, seeds)


def sample(name: str, attn: str, arguments: str = "{}") -> Cell:
    """In the place of the network's own attention."""
    return Cell(name, {"model.attn": attn, "model.swap": "blocks.*.attn", "model.attn_args": arguments})


def recall() -> dict[str, Cell]:
    """Each method at four rates, with heads so narrow that pairs outnumber keys; and once each with wider ones."""
    cells = {}
    for heads, seeds in ((16, 3), (4, 1)):
        wide = f"{{heads: {heads}, key_width: 32}}"
        mixers = {
            "metala": ("MetaLA", f"{{heads: {heads}, key_width: 32, conv: 2}}"),
            "gla": ("GLA", wide),
            "retention": ("RetNet's retention", f"{{heads: {heads}, value_width: 32}}"),
            "linear_attention": ("linear attention", f"{{heads: {heads}}}"),
        }
        for attn, (title, arguments) in mixers.items():
            for rate in RATES:
                options = {"model.attn": attn, "model.attn_args": arguments, "optim.lr": rate}
                cells[f"{attn}_{32 // heads}_{rate}"] = Cell(f"{title}, keys of {32 // heads}", options, seeds)
    for rate in RATES:
        options = {"model.attn": "softmax_attention", "model.attn_args": "{heads: 1}", "optim.lr": rate}
        cells[f"softmax_attention_{rate}"] = Cell("softmax attention, 1 head", options)
    return cells


RATES = ("0.001", "0.00215", "0.00464", "0.01")
STUDIES = {
    "mqar": Study(
        "mqar.yaml",
        "4 pairs in 16 tokens, two blocks of width 32, 1,000 steps",
        recall(),
        task="mqar",
        metric="test/acc",
        what="test accuracy over what is asked, %",
        images=False,
    ),
    "metala": Study(
        "pydoc_metala.yaml",
        "three blocks of width 128, Python's help texts, 300 steps",
        {
            "metala": Cell("MetaLA", {}),
            "key": Cell("with a key", {"model.attn_args": "{heads: 4, key: true}"}),
            "no_conv": Cell("without short convolution", {"model.attn_args": "{heads: 4, conv: 0}"}),
            "no_augmentation": Cell("without self-augmentation", {"model.attn_args": "{heads: 4, augmentation: none}"}),
        },
        task="lm",
        metric="test/bpb",
        what="test, bits a byte",
        images=False,
    ),
    "depth": Study(
        "cifar10_resnet20.yaml",
        "ResNet-20, 5,000 re-encoded CIFAR-10 images, 4 epochs",
        {
            "none": depth("plain", "none", seeds=5),
            "mrla_light": depth("MRLA-light", "mrla_light", seeds=5),
            "kcla": depth("KCLA", "kcla", seeds=5),
            "layer_softmax": depth("standard layer attention", "layer_softmax"),
            "dla_light": depth("DLA-light", "dla_light", "drop_path: 0.0, reduction: 4"),
            "kcla_identity": depth("KCLA, `init='identity'`", "kcla", init="identity"),
            "kcla_temperature": depth("KCLA, learned temperatures", "kcla_temperature"),
            "kcla_drop_path": depth("KCLA, drop path 0.2", "kcla", "drop_path: 0.2"),
            "kcla_no_gate": depth("KCLA without gate", "kcla_no_gate"),
            "kcla_equal_temperatures": depth("KCLA, all temperatures 1", "kcla", "drop_path: 0.0, p: 1.0"),
        },
    ),
    "kvasir": Study(
        "kvasir_resunet.yaml",
        "ResNet-UNet of half width, 240 images of Kvasir-SEG at 128 pixels, 36 epochs",
        {
            "none": Cell("plain", {"model.attn": "none"}),
            "mrla_light": Cell("MRLA-light", {"model.attn": "mrla_light", "model.attn_args": "{drop_path: 0.0}"}),
            "kcla": Cell("KCLA", {"model.attn": "kcla", "model.attn_args": "{head_dim: 16, drop_path: 0.0}"}),
        },
        task="seg",
        metric="test/iou_fg",
        what="test foreground IoU, pooled over all pixels, %",
        weights="best",
    ),
    "sample": Study(
        "cifar10_vit.yaml",
        "a small vision transformer, 5,000 re-encoded CIFAR-10 images, 6 epochs",
        {
            "none": Cell("self-attention", {"model.attn": "none"}),
            "external_multihead": sample("multi-head EA, as published", "external_multihead"),
            "coef_1": sample("multi-head EA, as many heads (`coef=1`)", "external_multihead", "{coef: 1, slots: 64}"),
            "external": sample("EA, one head", "external"),
            "slots_16": sample("EA, 16 slots", "external", "{slots: 16}"),
            "slots_256": sample("EA, 256 slots", "external", "{slots: 256}"),
            "independent": sample("EA, memories start apart", "external", "{start: independent}"),
            "tied": sample("EA, one memory", "external", "{start: tied}"),
            "softmax": sample("EA, softmax over slots alone", "external", "{norm: slots}"),
        },
    ),
}


def train(study: Study, images: Path | None, out: Path, jobs: int) -> int:
    """Trains what is missing, a process a run, the first seeds of all cells first; returns how many runs failed."""
    runs = [(seed, name) for name, cell in study.cells.items() for seed in range(1, cell.seeds + 1)]
    with ThreadPoolExecutor(jobs) as pool:
        codes = pool.map(lambda run: _train(study, images, out, run[1], run[0]), sorted(runs, key=lambda run: run[0]))
        return sum(code != 0 for code in codes)


def _train(study: Study, images: Path | None, out: Path, name: str, seed: int) -> int:
    options = [part for key, value in study.cells[name].options.items() for part in (f"--{key}", value)]
    recipe = ROOT / "recipes" / "study" / study.recipe
    command = [sys.executable, "-m", "lineattn", "sweep", study.task, "--config", str(recipe)]
    command += [] if images is None else ["--data.root", str(images)]
    command += [*options, "--data.num_workers", "0", "--seeds", str(seed), "--out", str(out / name)]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def collect(study: Study, out: Path) -> dict[str, Any]:
    """What every finished run has found, by cell, with its settings, and where they were made."""
    cells = []
    for name, cell in study.cells.items():
        found = [_summary(out / name / str(seed)) for seed in range(1, cell.seeds + 1)]
        runs = [{"seed": one["seed"]} | one[study.weights] for one in found if one]
        first = next((one for one in found if one), {})
        costs = {key: first[key] for key in ("params", "macs", "state_numbers") if key in first}
        row = {"cell": name, "name": cell.name, "settings": cell.options, "wanted": cell.seeds, "runs": runs}
        cells.append(row | costs)
    environments = [json.loads(path.read_text()) for path in sorted(out.glob("*/*/env.json"))]
    if not environments:
        raise SystemExit(f"{out}: no run here yet; run `make study`")
    commits = sorted({str(one["git"]) for one in environments})
    about = {"metric": study.metric, "what": study.what, "weights": study.weights}
    return about | {"cells": cells, "commits": commits, "environment": environments[0]}


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("status") == "done" else None


def draw(study: Study, cells: list[dict[str, Any]], path: Path) -> None:
    """The metric: a dot a seed, a line at their mean, a row a cell; a dashed line at the mean of the first."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    cells = [cell for cell in cells if cell["runs"]]
    for i, cell in enumerate(cells):
        values = [run[study.metric] for run in cell["runs"]]
        ours = cell["cell"].startswith(("kcla", "metala"))
        colour = "0.4" if cell["cell"] == "none" else "tab:orange" if ours else "tab:blue"
        axes.plot(values, [i] * len(values), "o", color=colour, alpha=0.6, markersize=6)
        axes.plot([statistics.mean(values)] * 2, [i - 0.35, i + 0.35], color=colour, linewidth=2.5)
        if cell["cell"] == "none":
            axes.axvline(statistics.mean(values), color=colour, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(cells)), [f"{cell['name'].replace('`', '')} ({len(cell['runs'])})" for cell in cells])
    axes.invert_yaxis()
    axes.set(xlabel=study.what)
    figure.suptitle(f"{study.title} (seeds)", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    write_whole(path, lambda file: canvas.print_png(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    options = parser.parse_args()
    study = STUDIES[options.study]
    if study.images != (options.images is not None):
        parser.error(f"--images is {'missing' if study.images else 'for other studies'}")
    failed = 0 if options.collect else train(study, options.images, options.out, options.jobs)
    found = collect(study, options.out)
    if study.task == "seg":
        found["baselines"] = baselines(ROOT / "recipes" / "study" / study.recipe, options.images)
    if study.task == "mqar":
        found["best"] = best_rates(found["cells"])
    write_json(ROOT / "results" / f"study_{options.study}.json", found)
    if study.task == "seg":
        first = {cell.name: options.out / name / "1" for name, cell in study.cells.items()}
        draw_overlays(first, ROOT / "docs" / f"study_{options.study}_overlays.png")
    if study.task == "mqar":
        draw_recall(found["best"], study.title, ROOT / "docs" / "study_mqar.png")
        return 1 if failed else 0
    draw(study, found["cells"], ROOT / "docs" / f"study_{options.study}.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
