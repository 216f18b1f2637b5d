"""What happens to an image between the disk and the network, by torchvision's v2 transforms (they draw from torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

Augment = Literal["none", "pad_crop", "resized_crop"]


def geometry(
    size: int,
    *,
    augment: Augment = "none",
    crop: float = 1.0,
    resized: bool = False,
    rand_augment: bool = False,
    erasing: float = 0.0,
    mean: Sequence[float] = (0.0,),
) -> Callable[[Tensor], Tensor]:
    """The transform of one uint8 image to a square of `size`.

    Args:
        size: Side of the result.
        augment: ``none``: resize and centre crop; ``pad_crop``: pad by an eighth, random crop, flip (CIFAR);
            ``resized_crop``: random resized crop, flip (ImageNet).
        crop: The part of the resized image's side that the centre crop keeps.
        resized: The images are squares of `size` already.
        rand_augment: Add RandAugment with torchvision's defaults.
        erasing: Probability of erasing a random rectangle.
        mean: What is erased becomes this colour, in 0..1.
    """
    steps: list[nn.Module] = []
    if augment == "resized_crop":
        steps += [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    elif not resized:
        steps += [v2.Resize(round(size / crop), antialias=True), v2.CenterCrop(size)]
    if augment == "pad_crop":
        steps += [v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()]
    if rand_augment:
        steps.append(v2.RandAugment())
    if erasing > 0:
        colour: Any = [round(255 * m) for m in mean]  # torchvision's annotation knows one value only
        steps.append(v2.RandomErasing(p=erasing, value=colour))
    return v2.Compose(steps)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """A uint8 batch as float, with the mean and standard deviation of the data set taken out.

    Shape:
        Input: (B, C, H, W), uint8. Output: the same, float32.
    """
    images = v2.functional.to_dtype(images, torch.float32, scale=True)
    return v2.functional.normalize(images, list(mean), list(std), inplace=True)


def spread(image: Tensor) -> Tensor:
    """An image from its own darkest to its own brightest value, of all channels; one of a single value turns black.

    Shape:
        Input: (C, H, W), uint8. Output: the same, with 0 and 255 in it.

    Example:
        >>> spread(torch.tensor([[[10, 20, 30]]], dtype=torch.uint8)).tolist()
        [[[0, 128, 255]]]
    """
    low, high = (int(value) for value in image.aminmax())
    return ((image.float() - low) * (255 / max(high - low, 1))).round().to(torch.uint8)


def batch_mixing(mixup: float, cutmix: float, classes: int) -> nn.Module | None:
    """MixUp, CutMix, or one of the two at random for each batch; ``None`` where both strengths are 0."""
    kinds: list[nn.Module] = []
    if mixup > 0:
        kinds.append(v2.MixUp(alpha=mixup, num_classes=classes))
    if cutmix > 0:
        kinds.append(v2.CutMix(alpha=cutmix, num_classes=classes))
    return v2.RandomChoice(kinds) if len(kinds) > 1 else (kinds[0] if kinds else None)
