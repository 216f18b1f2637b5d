"""Masks, overlays and areas for images that need no data set around them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms import v2

from lineattn.files import write_whole
from lineattn.tasks import console
from lineattn.tasks.data.legend import colour_map
from lineattn.tasks.data.reading import read_image
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.data.transforms import normalise
from lineattn.tasks.seg_loss import probabilities

_SHOWN = 20
_OPACITY = 0.5
_LINE = 16  # pixels of a line of the legend


@dataclass(frozen=True)
class Segmented:
    """What was found in one image: its file, the mask's, and the pixels of each class."""

    path: Path
    mask: Path
    pixels: list[int]


@torch.no_grad()
def class_probabilities(net: Callable[[Tensor], Tensor], image: Tensor, data: SceneData) -> Tensor:
    """Probabilities of the classes at each pixel of an image of any size, as the network was trained to see it.

    Args:
        net: From images to logits.
        image: (C, H, W), uint8.
        data: The data module that it was trained with.

    Shape:
        Output: (classes, H, W), in the size of the image.
    """
    height, width = image.shape[1:]
    if data.fit == "resize":
        image = v2.functional.resize(image, [data.image_size, data.image_size], antialias=True)
    logits = net(normalise(image[None], data.mean, data.std)).float()
    if logits.shape[2:] != (height, width):
        logits = v2.functional.resize(logits, [height, width])
    return probabilities(logits)[0]


def segment(
    net: Callable[[Tensor], Tensor],
    paths: Sequence[Path],
    data: SceneData,
    classes: Sequence[str],
    palette: Sequence[Sequence[int]] | None,
    out: Path,
    *,
    keep_probabilities: bool,
) -> list[Segmented]:
    """Writes for each image its mask, in its size, and an overlay; where asked for, the probabilities too.

    Raises:
        InputError: An image can't be read.
    """
    colours = [tuple(colour) for colour in palette or colour_map(len(classes))]
    place = Path(os.path.commonpath([path.parent for path in paths]))
    names = _names(paths, place)
    found = []
    for path, name in zip(paths, names, strict=True):
        image = read_image(path, data.channels)
        scores = class_probabilities(net, image, data)
        mask = scores.argmax(0).to(torch.uint8).cpu()
        target = out / f"{name}.png"
        painted = Image.fromarray(mask.numpy(), "P")
        painted.putpalette([value for colour in colours for value in colour])
        overlay = _overlay(image, mask, classes, colours)
        write_whole(target, lambda file, painted=painted: painted.save(file, "PNG"))
        write_whole(out / f"{name}_overlay.png", lambda file, overlay=overlay: overlay.save(file, "PNG"))
        if keep_probabilities:
            kept = scores.half().cpu().numpy()
            write_whole(out / f"{name}_probabilities.npy", lambda file, kept=kept: np.save(file, kept))
        found.append(Segmented(path, target, torch.bincount(mask.flatten(), minlength=len(classes)).tolist()))
    return found


def _names(paths: Sequence[Path], place: Path) -> list[str]:
    """Names of the results: those of the images without their formats, where these alone don't tell two apart."""
    bare = [path.relative_to(place).with_suffix("").as_posix() for path in paths]
    return [
        name if bare.count(name) == 1 else path.relative_to(place).as_posix()
        for path, name in zip(paths, bare, strict=True)
    ]


def _overlay(image: Tensor, mask: Tensor, classes: Sequence[str], colours: Sequence[tuple[int, ...]]) -> Image.Image:
    """The image with all classes but the first in their colours, and below it what these are and how much there is."""
    pixels = image.expand(3, -1, -1).permute(1, 2, 0).numpy().astype(np.float32)
    paint = np.array(colours, dtype=np.float32)[mask.numpy()]
    shown = np.where(mask.numpy()[..., None] > 0, (1 - _OPACITY) * pixels + _OPACITY * paint, pixels)
    present = [k for k in mask.unique().tolist() if k > 0]
    height, width = mask.shape
    canvas = Image.new("RGB", (max(width, 160), height + _LINE * max(1, len(present)) + 4), "white")
    canvas.paste(Image.fromarray(shown.astype(np.uint8)))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=11)
    lines = [(colours[k], f"{classes[k]} {(mask == k).float().mean().item():.1%}") for k in present]
    for row, (colour, text) in enumerate(lines or [((255, 255, 255), f"{classes[0]} 100.0%")]):
        top = height + 2 + row * _LINE
        draw.rectangle((4, top + 2, 14, top + 12), fill=colour, outline="black")
        draw.text((20, top + 1), text, fill="black", font=font)
    return canvas


def show(found: Sequence[Segmented], classes: Sequence[str]) -> None:
    """Prints the areas of the classes in the first images."""
    rows = [[str(one.path), _areas(one, classes)] for one in found[:_SHOWN]]
    more = f" (first {_SHOWN} of {len(found)})" if len(found) > _SHOWN else ""
    console.table(f"Masks{more}", ["image", "part of its pixels"], rows)


def _areas(one: Segmented, classes: Sequence[str]) -> str:
    total = sum(one.pixels)
    parts = sorted(zip(one.pixels, classes, strict=True), reverse=True)
    return ", ".join(f"{name} {count / total:.1%}" for count, name in parts[:5] if count)


def as_csv(found: Sequence[Segmented], classes: Sequence[str]) -> str:
    """One row an image: the files, and the pixels of each class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "mask", *(f"pixels({name})" for name in classes)])
    writer.writerows([one.path, one.mask, *one.pixels] for one in found)
    return text.getvalue()
