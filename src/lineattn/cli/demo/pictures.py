"""The curves of a demo."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lineattn.cli.demo.result import Method, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From Okabe and Ito's palette, told apart by every kind of colour vision; dashes tell them apart in grey too.
_LIGHT = {"none": "#6b6b6b", "mrla_light": "#d55e00", "kcla": "#0072b2", "ink": "#222222", "paper": "#ffffff"}
_DARK = {"none": "#b5b5b5", "mrla_light": "#e69f00", "kcla": "#56b4e9", "ink": "#e6e6e6", "paper": "#17191c"}
_DASHES = {"none": (0, (1, 1)), "mrla_light": (0, (5, 2)), "kcla": "solid"}


def draw(results: Results, path: Path, *, dark: bool) -> None:
    """Writes loss and validation metric over the epochs (mean, band from lowest to highest seed), and the tests."""
    colours = _DARK if dark else _LIGHT
    figure = Figure(figsize=(11, 3.7), layout="constrained", facecolor=colours["paper"])
    canvas = FigureCanvasAgg(figure)
    loss, metric, test = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for method in results.methods:
        _curve(loss, method, "train/loss", colours)
        _curve(metric, method, f"val/{results.demo.metric}", colours)
    loss.set_title("training loss")
    loss.set_ylim(bottom=0)
    metric.set_title(f"validation {results.demo.metric_name}, %")
    metric.set_ylim(0, 101)
    for name, floor in results.floors.items():
        metric.axhline(floor, color=colours["ink"], linewidth=0.8, alpha=0.5)
        # At the right, where the curves are far above.
        across = metric.get_yaxis_transform()
        metric.text(1, floor + 1, name, transform=across, ha="right", color=colours["ink"], fontsize=8)
    for axes in (loss, metric):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _tests(test, results, colours)
    loss.legend(frameon=False, labelcolor=colours["ink"])
    for axes in (loss, metric, test):
        _dress(axes, colours)
    canvas.print_png(path)


def _curve(axes: Axes, method: Method, key: str, colours: dict[str, str]) -> None:
    epochs = [row["epoch"] + 1 for row in method.curves[0]]
    values = [[run[place][key] for run in method.curves] for place in range(len(epochs))]
    style: dict[str, Any] = {"color": colours[method.name], "linestyle": _DASHES[method.name]}
    axes.plot(epochs, [fmean(column) for column in values], label=method.title, linewidth=2, **style)
    lows, highs = [min(column) for column in values], [max(column) for column in values]
    axes.fill_between(epochs, lows, highs, color=colours[method.name], alpha=0.15, linewidth=0)


def _tests(axes: Axes, results: Results, colours: dict[str, str]) -> None:
    """A dot a run and a bar at their mean."""
    for place, method in enumerate(results.methods):
        colour = colours[method.name]
        spread = [place + 0.12 * (number - (len(method.scores) - 1) / 2) for number in range(len(method.scores))]
        axes.scatter(spread, method.scores, color=colour, s=36, zorder=3)
        mean = fmean(method.scores)
        axes.plot([place - 0.3, place + 0.3], [mean, mean], color=colour, linewidth=2)
        axes.annotate(f"{mean:.1f}", (place + 0.32, mean), color=colours["ink"], va="center", fontsize=9)
    axes.set_xticks(range(len(results.methods)), [method.title for method in results.methods])
    axes.set_xlim(-0.5, len(results.methods) - 0.3)
    axes.set_title(f"test {results.demo.metric_name} of each run, %")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter("{x:.1f}")


def _dress(axes: Axes, colours: dict[str, str]) -> None:
    axes.set_facecolor(colours["paper"])
    axes.tick_params(colors=colours["ink"])
    axes.title.set_color(colours["ink"])
    axes.xaxis.label.set_color(colours["ink"])
    axes.grid(axis="y", color=colours["ink"], alpha=0.15)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours["ink"])
