"""What networks for segmentation have in common: an encoder, and what makes a class of each pixel from its maps."""

from __future__ import annotations

from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor

from lineattn.models.encoder import EncoderNetwork


class SegmentationNetwork(EncoderNetwork):
    """Base of the networks for segmentation.

    The encoder is a network of its own: `lineattn.attach` makes a host of it, which takes its place.

    Shape:
        - Input: ``(B, in_chans, H, W)``, of any size.
        - Output: ``(B, num_classes, H, W)``, logits.
    """

    num_classes: int
    stride: int
    """Pixels between the positions of the deepest map: what is moved by them, or a multiple, has the same maps."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Logits of each pixel."""


def framed(x: Tensor, height: int, width: int) -> Tensor:
    """A map in another size: rows below and columns at the right are filled with zeros, or cut off.

    Example:
        >>> import torch
        >>> framed(torch.ones(1, 1, 2, 2), 1, 3)
        tensor([[[[1., 1., 0.]]]])
    """
    # Cut by padding too: of a slice, an exported graph asks whether it is the whole, and is for such sizes only.
    return F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2]))
