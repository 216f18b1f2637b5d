"""Masks, overlays and areas for images that need no data set around them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms import v2

from lineattn.files import write_whole
from lineattn.tasks import console
from lineattn.tasks.data.legend import colour_map, has_background
from lineattn.tasks.data.reading import UnreadableImage, read_image
from lineattn.tasks.data.scenes import Flip, SceneData
from lineattn.tasks.data.transforms import normalise
from lineattn.tasks.seg_loss import probabilities

_SHOWN = 20
_OPACITY = 0.5
_LINE = 16  # pixels of a line of the legend
_AXES: dict[Flip, int] = {"horizontal": -1, "vertical": -2}


@dataclass(frozen=True)
class Segmented:
    """What was found in one image: its file, the mask's, and the pixels of each class."""

    path: Path
    mask: Path
    pixels: list[int]


@torch.no_grad()
def class_probabilities(
    net: Callable[[Tensor], Tensor],
    image: Tensor,
    data: SceneData,
    *,
    flips: Sequence[Flip] = (),
    scales: Sequence[float] = (1.0,),
) -> Tensor:
    """Probabilities of the classes at each pixel of an image of any size, as the network was trained to see it.

    With flips and scales it is the mean over all of them, of probabilities, each brought back into the image's frame:
    at every scale the image as it is and mirrored, and where it is mirrored in both ways, in both at once too.

    It holds one such map beside a view's logits, and beside a view's probabilities where there is more than one view: 8
    to 12 bytes a pixel and class.

    Args:
        net: From images to logits: a network, or a `lineattn.tasks.tiles.Tiled`, whose tiles then are of the views.
        image: (C, H, W), uint8.
        data: The data module that it was trained with. Where that resizes to a square, scales are of its side.
        flips: Ways to mirror the image.
        scales: Factors of its size.

    Shape:
        Output: (classes, H, W), in the size of the image.
    """
    image = data.rescaled(image)
    views = list(product(scales, _mirrors(flips)))
    total: Tensor | None = None
    for scale, axes in views:
        found = probabilities(_logits(net, image, data, scale, axes))[0]
        total = found if total is None else total.add_(found)
    assert total is not None
    return total.div_(len(views))


def _mirrors(flips: Sequence[Flip]) -> list[tuple[int, ...]]:
    """The axes of all ways to mirror an image or not."""
    axes = [_AXES[flip] for flip in dict.fromkeys(flips)]
    return [some for count in range(len(axes) + 1) for some in combinations(axes, count)]


def _logits(
    net: Callable[[Tensor], Tensor], image: Tensor, data: SceneData, scale: float, axes: tuple[int, ...]
) -> Tensor:
    """Those of a view, in the frame of the image."""
    size = list(image.shape[1:])
    square = [data.image_size] * 2 if data.fit == "resize" else size
    seen = [max(1, round(scale * side)) for side in square]
    if seen != size:
        image = v2.functional.resize(image, seen, antialias=True)
    logits = net(normalise(_mirrored(image, axes)[None], data.mean, data.std)).float()
    if list(logits.shape[2:]) != size:
        logits = v2.functional.resize(logits, size)
    return _mirrored(logits, axes)


def _mirrored(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.flip(axes) if axes else x


def segment(
    net: Callable[[Tensor], Tensor],
    paths: Sequence[Path],
    data: SceneData,
    classes: Sequence[str],
    palette: Sequence[Sequence[int]] | None,
    out: Path,
    *,
    keep_probabilities: bool,
    skip: Callable[[str], None],
    flips: Sequence[Flip] = (),
    scales: Sequence[float] = (1.0,),
) -> list[Segmented]:
    """Writes for each image ``masks/NAME.png``, in its size, and ``overlays/NAME.png``; where asked for, the
    probabilities too, as ``probabilities/NAME.npy``. For `flips` and `scales` see `class_probabilities`.

    `skip` gets what is wrong with an image that can't be read, where the data module's policy is to go on.

    Raises:
        InputError: An image can't be read.
    """
    colours = [tuple(colour) for colour in palette or colour_map(len(classes))]
    place = Path(os.path.commonpath([path.parent for path in paths]))
    names = _names(paths, place)
    found = []
    for path, name in zip(paths, names, strict=True):
        try:
            image = read_image(path, data.channels)
        except UnreadableImage as error:
            if data.on_error == "stop":
                raise
            skip(error.fault)
            continue
        scores = class_probabilities(net, image, data, flips=flips, scales=scales)
        mask = scores.argmax(0).to(torch.uint8).cpu()
        target = out / "masks" / f"{name}.png"
        painted = Image.fromarray(mask.numpy(), "P")
        painted.putpalette([value for colour in colours for value in colour])
        overlay = _overlay(image, mask, classes, colours)
        write_whole(target, lambda file, painted=painted: painted.save(file, "PNG"))
        write_whole(out / "overlays" / f"{name}.png", lambda file, overlay=overlay: overlay.save(file, "PNG"))
        if keep_probabilities:
            kept = scores.half().cpu().numpy()
            write_whole(out / "probabilities" / f"{name}.npy", lambda file, kept=kept: np.save(file, kept))
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
    """The image with all classes but a background in their colours, and below it what these are and how much there
    is."""
    first = int(has_background(classes))
    pixels = image.expand(3, -1, -1).permute(1, 2, 0).numpy().astype(np.float32)
    paint = np.array(colours, dtype=np.float32)[mask.numpy()]
    shown = np.where(mask.numpy()[..., None] >= first, (1 - _OPACITY) * pixels + _OPACITY * paint, pixels)
    present = [k for k in mask.unique().tolist() if k >= first]
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
