"""Class names and probabilities for images that need no data set around them."""

from __future__ import annotations

import csv
import glob
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lineattn.errors import InputError
from lineattn.tasks import console
from lineattn.tasks.data.reading import EXTENSIONS

_SHOWN = 20


@dataclass(frozen=True)
class Prediction:
    """The probabilities of one image, in the order of the classes."""

    path: Path
    probabilities: list[float]

    def top(self, classes: Sequence[str], count: int) -> list[tuple[str, float]]:
        """The most probable classes."""
        return sorted(zip(classes, self.probabilities, strict=True), key=lambda pair: -pair[1])[:count]


def find_images(pattern: str) -> list[Path]:
    """The images that a file name, a folder or a glob stands for, in order.

    Raises:
        InputError: There are none.
    """
    place = Path(pattern)
    if place.is_file():
        return [place]
    found = place.rglob("*") if place.is_dir() else map(Path, glob.glob(pattern, recursive=True))
    images = sorted(path for path in found if path.is_file() and path.suffix.lower() in EXTENSIONS)
    if not images:
        raise InputError(f"no images at --input {pattern}: name a file, a folder or a glob in quotes")
    return images


def gather(paths: Sequence[Path], batches: Sequence[tuple[Tensor, Tensor]]) -> list[Prediction]:
    """What the network said, by file; files that could not be read are missing."""
    return [
        Prediction(paths[int(place)], values)
        for index, probabilities in batches
        for place, values in zip(index, probabilities.tolist(), strict=True)
    ]


def show(predictions: Sequence[Prediction], classes: Sequence[str], top: int) -> None:
    """Prints the most probable classes of the first images."""
    rows = [
        [str(one.path), ", ".join(f"{name} {value:.3f}" for name, value in one.top(classes, top))]
        for one in predictions[:_SHOWN]
    ]
    more = f" (first {_SHOWN} of {len(predictions)})" if len(predictions) > _SHOWN else ""
    console.table(f"Predictions{more}", ["image", "class and probability"], rows)


def as_csv(predictions: Sequence[Prediction], classes: Sequence[str]) -> str:
    """One row an image: the class, its probability, and those of all classes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "class", "probability", *(f"p({name})" for name in classes)])
    for one in predictions:
        name, value = one.top(classes, 1)[0]
        writer.writerow([one.path, name, f"{value:.6f}", *(f"{p:.6f}" for p in one.probabilities)])
    return text.getvalue()
