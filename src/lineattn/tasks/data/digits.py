"""Handwritten digits: the 1,797 8x8 images that scikit-learn bundles (UCI, Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import torch

from lineattn.errors import InputError
from lineattn.tasks.data.source import Defaults, Pixels, Splits, stratified

DEFAULTS = Defaults(image_size=16, channels=1, augment="none", mean=(0.305,), std=(0.332,))
_VAL, _TEST = 0.15, 0.25


def load(*, image_size: int, channels: int) -> Splits:
    """The images scaled up, in a fixed stratified split: 60 % train, 15 % validation, 25 % test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise InputError("--data.name digits needs scikit-learn: pip install 'lineattn[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    grey = torch.from_numpy(images).reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
    pixels = Pixels(grey, labels.tolist()).resized(image_size).with_channels(channels)
    val, test, train = stratified(pixels.labels, [_VAL, _TEST])
    return Splits([str(digit) for digit in range(10)], pixels.subset(train), pixels.subset(val), pixels.subset(test))
