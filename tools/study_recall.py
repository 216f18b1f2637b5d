"""The study of associative recall: the best rate of each method, and accuracy against the size of the state."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lineattn.files import write_whole


def best_rates(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the cells that differ in the rate alone, the one that is best on validation, in the mean over the seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if len(cell["runs"]) == cell["wanted"]:
            groups.setdefault(cell["name"], []).append(cell)
    best = [
        max(group, key=lambda cell: statistics.mean(run["val/acc"] for run in cell["runs"]))
        for group in groups.values()
    ]
    return [{**cell, "rates": len(groups[cell["name"]])} for cell in best]


def draw_recall(best: list[dict[str, Any]], title: str, path: Path) -> None:
    """A dot a seed and a line through the means: accuracy against the numbers that are kept of a sequence."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    methods: dict[str, list[dict[str, Any]]] = {}
    for cell in best:
        methods.setdefault(cell["settings"]["model.attn"], []).append(cell)
    styles = ("o-", "s--", "^:", "D-.", "v-")
    for (attn, own), style in zip(methods.items(), styles, strict=False):
        own = sorted(own, key=lambda cell: cell["state_numbers"])
        colour = {"metala": "tab:orange", "retention": "tab:purple", "softmax_attention": "0.4"}.get(attn)
        sizes = [cell["state_numbers"] for cell in own]
        means = [statistics.mean(run["test/acc"] for run in cell["runs"]) for cell in own]
        (line,) = axes.plot(sizes, means, style, color=colour, label=own[0]["name"].partition(",")[0])
        for cell in own:
            values = [run["test/acc"] for run in cell["runs"]]
            axes.plot([cell["state_numbers"]] * len(values), values, style[0], color=line.get_color(), alpha=0.35)
    axes.set(xscale="log", xlabel="numbers kept of a sequence", ylabel="test accuracy, %", ylim=(0, 103))
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write_whole(path, lambda file: canvas.print_png(file))
