r"""EANet: semantic segmentation by external attention on a dilated ResNet.

"Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (Guo, Liu, Mu, Hu; 2021), arXiv
2105.02358.

.. math::
    y = W\,f_2(\mathrm{EA}(f_1(\mathrm{ResNet}(x)))), \qquad f_i = \mathrm{ReLU} \circ \mathrm{BN} \circ \mathrm{Conv}

with 3x3 convolutions. The trunk is timm's ``resnet50s`` or ``resnet101s`` (three convolutions of 64, 64 and 128
channels as the stem), whose weights load by name. Cost O(N), N pixels.
"""

from __future__ import annotations

import math
from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.models.segmentation import SegmentationNetwork, framed
from lineattn.nn.sample.external import ExternalAttention, MemoryNorm

_GRID = (1, 2, 4)  # times the dilation of the last stage, in its three blocks


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.normal_(conv.weight, std=math.sqrt(2 / (9 * outputs)))
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class EANet(SegmentationNetwork):
    """The head of EANet on a trunk.

    Args:
        encoder: A network of timm, or a host, whose ``forward_features`` gives a map ``(B, num_features, H, W)``, as
            the convolutional ones do; built with ``num_classes=0``, since its classifier is not called.
        num_classes: Classes.
        width: Channels of the external attention; half as many behind it.
        slots: Slots of its memory.
        norm: See `lineattn.nn.sample.external.ExternalMemory`; ``official`` is as published.
        drop_rate: Probability of dropping a channel in front of the classifier in training.

    Shape:
        - Input: ``(B, in_chans, H, W)``, of any size; one image of few pixels has too few for batch norms in training.
        - Output: ``(B, num_classes, H, W)``.

    Note:
        The encoder's positions lie ``s`` pixels apart (its stride), and the logits between them are interpolated from
        corner to corner. So that nothing is stretched, images are filled up with zeros to ``s * k + 1`` pixels at the
        right and below, as the published code does in testing, and the logits are cut to the image.

    Example:
        >>> net = EANet(dilated_resnet(50), num_classes=21)
        >>> sum(p.numel() for p in net.parameters())
        34846933

    Reference:
        "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (2021), arXiv 2105.02358,
        and its published code.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        num_classes: int = 21,
        width: int = 512,
        slots: int = 64,
        norm: MemoryNorm = "log",
        drop_rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.encoder: Any = encoder
        self.stride: int = self.encoder.feature_info[-1]["reduction"]
        self.before = _layer(self.encoder.num_features, width)
        self.attention = ExternalAttention(width, slots=slots, norm=norm)
        self.behind = _layer(width, width // 2)
        self.drop = nn.Dropout2d(drop_rate)
        self.head = nn.Conv2d(width // 2, num_classes, 1)
        nn.init.normal_(self.head.weight, std=math.sqrt(2 / num_classes))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        size = (height + (1 - height) % self.stride, width + (1 - width) % self.stride)
        x = framed(x, *size)
        x = self.behind(self.attention(self.before(self.encoder.forward_features(x))))
        x = F.interpolate(self.head(self.drop(x)), size, mode="bilinear", align_corners=True)
        return framed(x, height, width)


def dilated_resnet(depth: int, *, output_stride: int = 8, in_chans: int = 3) -> nn.Module:
    """timm's ``resnet50s`` or ``resnet101s`` with dilation in the place of the last strides, and without a classifier.

    At a stride of 8 the 3x3 convolutions of the third stage have dilations 1, 2, 2, ... and those of the last one 2, 8,
    16 (the multi-grid 1, 2, 4, times 4, and half of it in a stage's first block); at 16 the last ones 1, 4, 8.

    Args:
        depth: 50, 101 or 152.
        output_stride: 8 or 16.
        in_chans: Channels of the image.

    Raises:
        InputError: Another depth or stride.
    """
    if depth not in (50, 101, 152):
        raise InputError(f"depth is {depth}; it must be 50, 101 or 152")
    if output_stride not in (8, 16):
        raise InputError(f"output_stride is {output_stride}; it must be 8 or 16")
    net: Any = timm.create_model(f"resnet{depth}s", num_classes=0, in_chans=in_chans, output_stride=output_stride)
    for block, factor in zip(net.layer4, _GRID, strict=True):
        dilation = factor * block.conv2.dilation[0]
        block.conv2.dilation = block.conv2.padding = (dilation, dilation)
    return net
