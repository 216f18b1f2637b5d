"""The picture of `lineattn profile`: what attention adds to the plain network, against depth."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lineattn.bench.profile import overhead
from lineattn.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of Okabe and Ito's palette; dashes and markers tell methods apart in grey. Those of the demo look as there.
_KNOWN: dict[str, tuple[str, Any, str]] = {
    "kcla": ("#0072b2", "solid", "o"),
    "mrla_light": ("#d55e00", (0, (5, 2)), "s"),
    "mrla_base": ("#e69f00", (0, (5, 1, 1, 1)), "^"),
    "layer_softmax": ("#009e73", (0, (1, 1)), "v"),
    "dla_light": ("#cc79a7", (0, (3, 1, 1, 1, 1, 1)), "D"),
}
_OTHERS: tuple[tuple[str, Any, str], ...] = (
    ("#56b4e9", (0, (8, 2)), "P"),
    ("#222222", (0, (2, 2)), "X"),
    ("#6b6b6b", "solid", "*"),
)
_INK = "#222222"

PANELS = {
    "params": ("parameters", "thousands", 1e-3),
    "mmac": ("MACs of an image", "MMAC", 1),
    "mixing_mmac": ("mixing, of an image", "MMAC", 1),
    "evaluation_ms": ("evaluation", "ms", 1),
    "training_ms": ("training step", "ms", 1),
    "memory_mb": ("memory of a step", "MB", 1),
    "saved_mb": ("saved for the backward", "MB", 1),
    "saved_published_mb": ("saved, published forms", "MB", 1),
}
"""By column: title, unit, and factor to the unit."""


def lines(rows: Sequence[dict[str, Any]], column: str) -> dict[str, tuple[list[int], list[float]]]:
    """By method, the depths and what it adds to the plain network, in the panel's unit."""
    depth_of = {row["blocks"]: row["depth"] for row in rows}
    factor, found = PANELS[column][2], {}
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "none"):
        pairs = overhead(rows, method, column)
        if pairs:
            found[method] = ([depth_of[blocks] for blocks, _ in pairs], [value * factor for _, value in pairs])
    return found


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Writes the panels as PNG."""
    canvas, image = FigureCanvasAgg(panels(rows, title)), io.BytesIO()
    canvas.print_png(image)
    write_whole(path, lambda file: file.write(image.getvalue()))


def panels(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """A panel a figure that was measured, and the legend in a place of its own."""
    columns = [column for column in PANELS if lines(rows, column)]
    count = -(-(len(columns) + 1) // 3)
    figure = Figure(figsize=(9, 0.5 + 2.35 * count), layout="constrained", facecolor="white")
    places = list(figure.subplots(count, 3, squeeze=False).flat)
    looks = _looks(rows)
    for axes, column in zip(places, columns, strict=False):
        for method, (depths, values) in lines(rows, column).items():
            axes.plot(depths, values, **looks[method])
        _dress(axes, rows, column)
    left, *_ = free = places[len(columns) :]
    for axes in free:
        axes.set_axis_off()
    for method, look in looks.items():
        left.plot([], [], label=method, **look)
    left.legend(loc="center", frameon=False, fontsize=11, labelcolor=_INK, handlelength=3.2)
    figure.suptitle(title, fontsize=12, color=_INK)
    return figure


def _looks(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "none"))
    others = [method for method in methods if method not in _KNOWN]
    looks = {}
    for method in methods:
        known = method in _KNOWN
        colour, dash, marker = _KNOWN[method] if known else _OTHERS[others.index(method) % len(_OTHERS)]
        looks[method] = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 2}
    return looks


def _dress(axes: Axes, rows: Sequence[dict[str, Any]], column: str) -> None:
    name, unit, factor = PANELS[column]
    deepest = [row for row in rows if row["method"] == "none"][-1]
    plain = deepest[column] * factor
    axes.set_title(name, fontsize=11, color=_INK)
    axes.set_ylabel(f"added, {unit}", color=_INK)
    axes.set_xlabel("depth, layers", color=_INK)
    if plain:
        text = f"plain at {deepest['depth']}: {plain:,.4g} {unit}"
        axes.annotate(text, (0.04, 0.95), xycoords="axes fraction", va="top", fontsize=9, color=_INK)
    axes.margins(y=0.2)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0, axes.dataLim.y0))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color=_INK, alpha=0.15)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
