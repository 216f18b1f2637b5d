"""What belongs to the study of segmentation alone: what can be had without a network, and overlays to look at.

Used by tools/study.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from lineattn.cli.restore import restore
from lineattn.files import write_whole
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.seg_loss import predict
from lineattn.tasks.seg_meter import SegMeter

_SHOWN = 3  # best and worst cases, each
_THRESHOLDS = [step / 50 for step in range(1, 50)]
_FOUND, _TRUE = "#e69f00", "#56b4e9"


def baselines(recipe: Path, images: Path) -> list[dict[str, Any]]:
    """Scores on the test split of all foreground, and of the mean training mask above a threshold.

    Of the thresholds, the one is taken that suits the test split best, which is more than a network is given.
    """
    data = SceneData(root=str(images), **yaml.safe_load(recipe.read_text())["data"])
    train, test = _masks(data, "train"), _masks(data, "test")
    mean = train.float().mean(0)
    guesses = {threshold: (mean > threshold).long() for threshold in _THRESHOLDS}
    scores = {threshold: _score(guess.expand_as(test), test) for threshold, guess in guesses.items()}
    best = max(scores, key=lambda threshold: scores[threshold]["test/iou_fg"])
    return [
        {"name": "no network: all foreground"} | _score(torch.ones_like(test), test),
        {"name": f"no network: mean training mask above {best:.2f}, the best threshold on the test set"} | scores[best],
    ]


def _masks(data: SceneData, split: str) -> Tensor:
    source = getattr(data.splits, split)
    samples = data.samples(source, training=False)
    return torch.stack([samples[0, index].labels[0] for index in range(len(source))])


def _score(found: Tensor, true: Tensor) -> dict[str, float]:
    meter = SegMeter(2, boundary=False)
    meter.update(torch.tensor(0.0), found, true)
    results = meter.compute("test", torch.device("cpu"))
    return {key: value for key, value in results.items() if key != "test/loss"}


@torch.no_grad()
def draw_overlays(folders: dict[str, Path], path: Path) -> None:
    """The test images that all networks together do best and worst, as each network sees them.

    Args:
        folders: The run folder of each network, by its name; the weights that were best on the validation split.
        path: The picture.
    """
    nets = {name: restore(folder / "checkpoints" / "best.ckpt") for name, folder in folders.items()}
    data = next(iter(nets.values())).data
    assert isinstance(data, SceneData)
    source = data.splits.test
    assert source is not None
    samples = data.samples(source, training=False)
    rows = []
    for index in range(len(source)):
        batch = samples[0, index]
        found = {name: predict(trained.net(batch.inputs))[0] for name, trained in nets.items()}
        ious = {name: _score(mask[None], batch.labels)["test/iou_fg"] for name, mask in found.items()}
        rows.append((sum(ious.values()) / len(ious), index, batch, found, ious))
    rows.sort(key=lambda row: -row[0])
    chosen = [*rows[:_SHOWN], *rows[-_SHOWN:]]
    figure = Figure(figsize=(2.1 * (1 + len(nets)), 2.15 * len(chosen) + 0.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(len(chosen), 1 + len(nets), squeeze=False)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    for line, (_, index, batch, found, ious) in zip(grid, chosen, strict=True):
        picture = (batch.inputs[0] * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
        titles = [f"test image {index}", *(f"{name}: IoU {ious[name]:.0f} %" for name in nets)]
        for axes, title, mask in zip(line, titles, [None, *found.values()], strict=True):
            axes.imshow(picture)
            axes.contour(batch.labels[0].numpy(), [0.5], colors=_TRUE, linewidths=1.2)
            if mask is not None and mask.any():
                axes.contour(mask.numpy(), [0.5], colors=_FOUND, linewidths=1.6)
            axes.set_title(title, fontsize=8.5)
            axes.set_axis_off()
    figure.suptitle(
        f"The {_SHOWN} test images with the best and the {_SHOWN} with the worst mean IoU of the networks\n"
        "blue: the true outline, orange: the network's",
        fontsize=9.5,
    )
    write_whole(path, lambda file: canvas.print_png(file))
