"""Pictures of the analyses: each shows the rows that stand in the CSV beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lineattn.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

# Of Okabe and Ito's palette, and dashes for grey.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_DASHES_OF_MANY = [dash for dash in _DASHES for _ in _COLOURS]  # with the colours, a style each for sixteen
_LEAST = 1e-9  # below it a logarithmic axis shows nothing more
_MEASURES = ("share", "decay", "decay and norm", "influence")
_LABELS = {
    "share": "share of attention",
    "decay": "product of decays",
    "decay and norm": "product of decays and norms",
    "influence": "influence, by perturbation",
}


def draw_similarity(rows: Sequence[Row], histogram: Sequence[Row], title: str, path: Path) -> None:
    """Writes heat maps of the cosines by stage (mean over heads), their histogram, and the mean of each head."""
    stages = _stages(rows)
    figure, canvas = _figure(title, 5.6)
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.15, 1))[:, 0]
    axes = _row(top, len(stages))
    image = None
    for place, stage in zip(axes, stages, strict=True):
        own = [row for row in rows if row["stage"] == stage]
        size = max(row["layer"] for row in own)
        grid = np.eye(size)
        for layer in range(2, size + 1):
            for other in range(1, layer):
                value = fmean(row["cosine"] for row in own if (row["layer"], row["other"]) == (layer, other))
                grid[layer - 1, other - 1] = grid[other - 1, layer - 1] = value
        image = _heat(place, grid, vmin=-1, vmax=1, cmap="RdBu_r")
        place.set(title=f"stage {stage}", xlabel="layer", ylabel="layer")
        _annotate(place, grid)
    assert image is not None
    top.colorbar(image, ax=list(axes), label="cosine of keys, mean over heads")
    spread, heads = bottom.subplots(1, 2)
    for stage, colour, dash in zip(stages, _cycle(_COLOURS), _cycle(_DASHES), strict=False):
        own = [row for row in histogram if row["stage"] == stage]
        edges = [row["from"] for row in own] + [own[-1]["to"]]
        spread.stairs([row["fraction"] for row in own], edges, label=f"stage {stage}", color=colour, linestyle=dash)
    spread.set(title="all images, heads and pairs", xlabel="cosine of keys", ylabel="fraction", xlim=(-1.02, 1.02))
    spread.legend(frameon=False)
    for stage, colour in zip(stages, _cycle(_COLOURS), strict=False):
        own = [row for row in rows if row["stage"] == stage]
        numbers = sorted({row["head"] for row in own})
        means = [fmean(row["cosine"] for row in own if row["head"] == head) for head in numbers]
        heads.plot(numbers, means, "o", color=colour, label=f"stage {stage}", markersize=4)
    heads.set(title="each head, mean over pairs", xlabel="head", ylabel="cosine of keys", ylim=(-1.05, 1.05))
    heads.xaxis.set_major_locator(MaxNLocator(integer=True))
    for place in (spread, heads):
        place.grid(alpha=0.3)
    _write(canvas, path)


def draw_decay(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes what is left of a layer against the distance, on a logarithmic axis: the median pair and all pairs."""
    stages = _stages(rows)
    figure, canvas = _figure(title, 3.9)
    axes = _row(figure, len(stages), sharey=True)
    for place, stage in zip(axes, stages, strict=True):
        for name, colour, dash in zip(_MEASURES, _COLOURS, _DASHES, strict=True):
            own = [row for row in rows if row["stage"] == stage and row["measure"] == name and row["mean"] > 0]
            if not own:
                continue
            distances = sorted({row["distance"] for row in own})
            values = [[row["mean"] for row in own if row["distance"] == distance] for distance in distances]
            style = {"color": colour, "linestyle": dash, "label": _LABELS[name], "marker": "o", "markersize": 3}
            place.plot(distances, [median(column) for column in values], **style)
            lows, highs = [min(column) for column in values], [max(column) for column in values]
            place.fill_between(distances, lows, highs, color=colour, alpha=0.12, linewidth=0)
        place.set_yscale("log")
        place.set(title=f"stage {stage}", xlabel="distance, layers")
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        place.grid(alpha=0.3)
    axes[0].set_ylabel("left of a layer (median pair, range of pairs)")
    handles = {
        label: handle for place in axes for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    _write(canvas, path)


def draw_map(rows: Sequence[Row], heads: Sequence[Row], title: str, path: Path) -> None:
    """Writes the map from sources to layers of each stage and, below, the gates of its heads."""
    stages = _stages(rows)
    figure, canvas = _figure(title, 5.8 if heads else 3.4)
    top, *bottom = figure.subfigures(1 + bool(heads), 1, squeeze=False)[:, 0]
    axes = _row(top, len(stages))
    influence = rows[0]["measure"] == "influence"
    positive = [row["mean"] for row in rows if row["mean"] > 0] or [1.0]
    scale: dict[str, Any] = {"vmin": min(0.0, *(row["mean"] for row in rows)), "vmax": max(row["mean"] for row in rows)}
    if influence:
        scale = {"norm": LogNorm(max(min(positive), max(positive) * 1e-6), max(positive) * 1.0001)}
    image = None
    for place, stage in zip(axes, stages, strict=True):
        own = [row for row in rows if row["stage"] == stage]
        sources, layers = list(dict.fromkeys(row["source"] for row in own)), sorted({row["layer"] for row in own})
        grid = np.full((len(layers), len(sources)), np.nan)
        for row in own:
            grid[row["layer"] - 1, sources.index(row["source"])] = row["mean"]
        image = _heat(
            place, grid, cmap="viridis", names=["<" if name == "earlier" else name for name in sources], **scale
        )
        earlier = " (<: all before)" if "earlier" in sources else ""
        place.set(title=f"stage {stage}", xlabel=f"attended to{earlier}", ylabel="layer")
        if not influence:
            _annotate(place, grid)
    assert image is not None
    label = "influence (log scale)" if influence else "share, mean over heads"
    top.colorbar(image, ax=list(axes), label=label)
    if bottom:
        _gates(bottom[0], heads, stages)
    _write(canvas, path)


def draw_conditions(rows: Sequence[Row], path: Path) -> None:
    """Writes how small decays become with the size of a token, and how far maps are from softmax attention's."""
    from lineattn.analysis.conditions import ENOUGH, SIZES

    figure, canvas = _figure("What methods along tokens can do", 4.6)
    decays, maps = _row(figure, 2)
    for row, colour, dash, mark in zip(rows, _cycle(_COLOURS), _DASHES_OF_MANY, _cycle("osv^DP*X<>"), strict=False):
        style = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4, "label": row["method"]}
        if row["least_decays"]:
            small = [max(value, _LEAST) for value in row["least_decays"]]
            decays.plot(SIZES, small, **style)
        maps.plot(list(row["fits"]), [max(error, _LEAST) for error in row["fits"].values()], **style)
    maps.axhline(ENOUGH, color="0.6", linewidth=0.8)
    decays.set(xlabel="size of tokens (root mean square)", ylabel="smallest decay, random weights", ylim=(_LEAST, 2))
    maps.set(xlabel="tokens, as many as key channels", ylabel="largest error of a softmax map", ylim=(_LEAST, 2))
    decays.set_xscale("log")
    for place in (decays, maps):
        place.set_yscale("log")
        place.grid(alpha=0.3)
    maps.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = maps.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=9, frameon=False)
    _write(canvas, path)


def _gates(figure: Any, heads: Sequence[Row], stages: list[str]) -> None:
    axes = _row(figure, len(stages))
    image = None
    for place, stage in zip(axes, stages, strict=True):
        own = [row for row in heads if row["stage"] == stage]
        if not own:
            place.set_axis_off()
            continue
        grid = np.full((max(row["layer"] for row in own), max(row["head"] for row in own)), np.nan)
        for row in own:
            grid[row["layer"] - 1, row["head"] - 1] = row["gate"]
        image = _heat(place, grid, vmin=0, vmax=1, cmap="cividis")
        place.set(title=f"stage {stage}", xlabel="head", ylabel="layer")
        _annotate(place, grid)
    if image is not None:
        figure.colorbar(image, ax=list(axes), label="gate, mean over images")


def _figure(title: str, height: float) -> tuple[Figure, FigureCanvasAgg]:
    figure = Figure(figsize=(8, height), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, FigureCanvasAgg(figure)


def _row(figure: Any, count: int, **options: Any) -> Sequence[Axes]:
    return figure.subplots(1, count, squeeze=False, **options)[0]


def _heat(axes: Axes, grid: np.ndarray, names: Sequence[str] | None = None, **options: Any) -> Any:
    image = axes.imshow(grid, aspect="auto" if names is None or len(names) > 12 else "equal", **options)
    for axis, count in ((axes.xaxis, grid.shape[1]), (axes.yaxis, grid.shape[0])):
        places = range(0, count, max(1, -(-count // 10)))
        labels = [str(i + 1) for i in places]
        if names is not None and axis is axes.xaxis:
            labels = [names[i] for i in places]
        axis.set_ticks(list(places), labels)
    return image


def _annotate(axes: Axes, grid: np.ndarray) -> None:
    """Numbers in the fields, where there is room."""
    if max(grid.shape) > 6:
        return
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            label = f"{value:.2f}".replace("0.", ".") if abs(value) < 1 else f"{value:.1f}"
            text = axes.text(j, i, label, ha="center", va="center", fontsize=7)
            text.set_bbox({"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 0.6})


def _stages(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["stage"] for row in rows))


def _cycle(values: Sequence[Any]) -> list[Any]:
    return list(values) * 8


def _write(canvas: FigureCanvasAgg, path: Path) -> None:
    write_whole(path, lambda file: canvas.print_png(file))
