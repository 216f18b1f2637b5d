"""Images from disk as uint8 tensors, and one line for each that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lineattn.errors import InputError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
_SIXTEEN_BIT = frozenset({"I", "I;16", "I;16B", "I;16L"})


class UnreadableImage(InputError):
    """A file that is no image, or a broken one."""

    @property
    def fault(self) -> str:
        """What is wrong with it, without what can be done."""
        return str(self).split(": repair", 1)[0]


def read_image(path: Path, channels: int, *, upright: bool = True) -> Tensor:
    """Decodes an image and gives it the channels of the network.

    Grey, palette, alpha and CMYK images become RGB (or grey, for one channel); 16-bit ones are scaled to 8 bits.

    Args:
        path: The file.
        channels: 1 or 3.
        upright: Turn it as the camera was held, where the file says so.

    Shape:
        Output: (channels, H, W), uint8.

    Raises:
        UnreadableImage: The file is missing, no image, or broken.
    """
    with open_image(path) as image:
        image.load()  # a TIFF is turned here
        if upright:
            ImageOps.exif_transpose(image, in_place=True)  # cameras store how they were held
        array = np.asarray(_convert(image, "L" if channels == 1 else "RGB"))
    return torch.from_numpy(array.copy()).reshape(*array.shape[:2], channels).permute(2, 0, 1)


def read_header(path: Path) -> tuple[str, tuple[int, int]]:
    """Pillow's name for the mode, and (width, height), without decoding the image.

    Raises:
        UnreadableImage: The file is missing, or no image by its first bytes.
    """
    with open_image(path) as image:
        return image.mode, image.size


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """An image of Pillow's while it is decoded; whatever fails inside is a file that cannot be read.

    Raises:
        UnreadableImage: The file is missing, no image, or broken.
    """
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "no image" if path.stat().st_size else "an empty file"
        raise UnreadableImage(
            f"cannot read the image {path} ({reason}): repair or remove it, or pass --data.on_error skip"
        ) from error


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode in _SIXTEEN_BIT:
        # Pillow clips at 255 where it should scale.
        image = Image.fromarray(np.clip(np.asarray(image) / 257, 0, 255).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparency, which Pillow warns about otherwise
    return image.convert(mode)
