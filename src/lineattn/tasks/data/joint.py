"""What happens to an image and its mask together, by torchvision's v2 transforms (they draw from torch).

A mask is never interpolated, and pixels that were not in the image are of a class that is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from lineattn.tasks.data.legend import IGNORE

Joint = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def joint(
    *,
    size: int | None = None,
    flips: Sequence[str] = (),
    rotate: float = 0.0,
    scale: tuple[float, float] | None = None,
    jitter: float = 0.0,
    colour: Sequence[float] = (0.0,),
    outside: int = IGNORE,
) -> Joint:
    """The transform of a uint8 image and its mask; without arguments, both stay as they are.

    Args:
        size: Both are resized to a square of this side; with `scale`, the square is cut out of them instead.
        flips: ``horizontal``, ``vertical`` or both, each for half the samples.
        rotate: Half the samples are turned by an angle up to this one, in degrees and either way, each by its own.
        scale: Bounds of a random factor for both sides, as in 0.5 to 2.
        jitter: Strength of random brightness, contrast and saturation; of hue a quarter of it.
        colour: Colour of the pixels that turning and cutting bring in, in 0..1, for each channel or for all.
        outside: Their class. The code of the layer attention papers turns masks as it turns images, so that these
            pixels count as background: 0.

    Shape:
        Input: (C, H, W) and (H, W), uint8. Output: the same, or (C, size, size) and (size, size).

    Example:
        >>> image, mask = torch.zeros(3, 40, 60, dtype=torch.uint8), torch.zeros(40, 60, dtype=torch.uint8)
        >>> image, mask = joint(size=32, flips=["horizontal"], scale=(0.5, 2))(image, mask)
        >>> tuple(image.shape), tuple(mask.shape)
        ((3, 32, 32), (32, 32))
    """
    assert scale is None or size is not None
    # torchvision's annotation knows one value only.
    fill: Any = {tv_tensors.Image: [round(255 * value) for value in colour], tv_tensors.Mask: outside}
    steps: list[nn.Module] = []
    if scale is None and size is not None:
        steps.append(_Square(size))  # first: of what is smaller, all else is cheaper
    if "horizontal" in flips:
        steps.append(v2.RandomHorizontalFlip())
    if "vertical" in flips:
        steps.append(v2.RandomVerticalFlip())
    if rotate:
        turn = v2.RandomRotation((-rotate, rotate), interpolation=InterpolationMode.BILINEAR, fill=fill)
        steps.append(v2.RandomApply([turn]))
    if scale is not None and size is not None:
        steps += [_RandomScale(*scale), v2.RandomCrop(size, pad_if_needed=True, fill=fill)]
    if jitter:
        steps.append(v2.ColorJitter(jitter, jitter, jitter, min(jitter / 4, 0.5)))
    return _Joint(v2.Compose(steps) if steps else None)


class _Joint:
    """Gives an image and its mask the types by which torchvision tells them apart, and takes them off again."""

    def __init__(self, steps: nn.Module | None) -> None:
        self.steps = steps

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.steps is None:
            return image, mask
        image, mask = self.steps(tv_tensors.Image(image), tv_tensors.Mask(mask))
        return image.as_subclass(Tensor), mask.as_subclass(Tensor)


class _Resized(v2.Transform):
    """Resizes both without a shift between them, as torchvision's "nearest" for masks would bring one."""

    def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
        if not isinstance(inpt, tv_tensors.Mask):
            return v2.functional.resize(inpt, params["size"], antialias=True)
        exact = v2.functional.resize_image(inpt[None].as_subclass(Tensor), params["size"], _NEAREST)[0]
        return tv_tensors.Mask(exact)


_NEAREST = InterpolationMode.NEAREST_EXACT


class _Square(_Resized):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = [size, size]

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"size": self.size}


class _RandomScale(_Resized):
    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        factor = self.low + (self.high - self.low) * torch.rand(()).item()
        height, width = v2.functional.get_size(flat_inputs[0])
        return {"size": [max(1, round(factor * height)), max(1, round(factor * width))]}
