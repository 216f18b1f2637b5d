"""The ResNet-UNet of the KCLA paper: a small residual encoder at four resolutions, and the decoder of a U-Net.

"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, section on segmentation;
the decoder is that of "U-Net" (Ronneberger, Fischer, Brox; 2015), arXiv 1505.04597, with bilinear upsampling and norms.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.models.cifar_resnet import BasicBlock
from lineattn.models.segmentation import SegmentationNetwork, framed


class ResUNetEncoder(nn.Module):
    """A 7x7 stem and four stages of two basic blocks, without pooling: strides 1, then 2, 2, 2, 1.

    Args:
        in_chans: Channels of the image.
        width: Channels of the stem; the stages have 2, 4, 8 and 8 times as many.

    Shape:
        - Input: ``(B, in_chans, H, W)``.
        - Output: ``(B, 8 * width, H / 8, W / 8)``, rounded up.

    Raises:
        InputError: The width is under 8.
    """

    def __init__(self, *, in_chans: int = 3, width: int = 16) -> None:
        super().__init__()
        if width < 8:  # see `lineattn.models.cifar_resnet.CifarResNet`
            raise InputError(f"width={width} is too narrow for a ResUNet; it must be at least 8")
        self.conv1 = nn.Conv2d(in_chans, width, 7, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        stages, inputs = [], width
        for planes, stride in ((2 * width, 2), (4 * width, 2), (8 * width, 2), (8 * width, 1)):
            stages.append(nn.Sequential(BasicBlock(inputs, planes, stride), BasicBlock(planes, planes)))
            inputs = planes
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)[-1]

    def features(self, x: Tensor) -> list[Tensor]:
        """The stem's map and those of the stages, of 1, 1/2, 1/4, 1/8 and 1/8 of the input's size."""
        maps = [self.relu(self.bn1(self.conv1(x)))]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return maps


class Up(nn.Module):
    """A map brought to the size of an earlier one, side by side with that, and two convolutions.

    Args:
        inputs: Channels of both maps together.
        outputs: Channels of the result.
        factor: How many times the earlier map is larger, 1 or 2.
        centred: Cut or fill a map of another size around its centre, as published; else cut it at the right and below.

    Shape:
        - Inputs: ``(B, C, H, W)`` and ``(B, D, H', W')``, ``C + D = inputs``.
        - Output: ``(B, outputs, H', W')``.
    """

    def __init__(self, inputs: int, outputs: int, *, factor: int, centred: bool) -> None:
        super().__init__()
        self.factor, self.centred = factor, centred
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        height, width = earlier.shape[2:]
        if self.factor > 1:
            size = (self.factor * x.shape[2], self.factor * x.shape[3])
            x = F.interpolate(x, size, mode="bilinear", align_corners=True)
        if self.centred:
            below, right = height - x.shape[2], width - x.shape[3]
            x = F.pad(x, (right // 2, right - right // 2, below // 2, below - below // 2))
        else:  # a stride of 2 takes the first pixel of two, and of an odd row the last one too
            x = framed(x, height, width)
        return self.conv(torch.cat((earlier, x), 1))


class ResUNet(SegmentationNetwork):
    """ResNet-UNet of the KCLA paper.

    Args:
        num_classes: Channels of the output; 1 for a foreground.
        in_chans: Channels of the image.
        width: Channels of the stem; see `ResUNetEncoder`.
        legacy_crop: As in the published code, see the note.

    Shape:
        - Input: ``(B, in_chans, H, W)``, of any size; one image of few pixels has too few for batch norms in training.
        - Output: ``(B, num_classes, H, W)``.

    Raises:
        InputError: The width is under 8.

    Note:
        The last stage has a stride of 1, so its map is as large as the one that it is put beside. The published decoder
        doubles it all the same and cuts out the middle: of the deepest map only about the central quarter is used, and
        it lies twice as large beside the whole other one. Here it is put there as it is; ``legacy_crop=True`` is the
        published form, with its cutting around the centre at other sizes too.

        The published network counts 1 534 241 parameters, of which 1 024 are a batch norm's that it never calls. How it
        is initialised is not known; all convolutions here start from a normal distribution by their fan-out. The biases
        in front of the decoder's norms are the published ones; the norms cancel them in training.

    Example:
        >>> net = ResUNet()
        >>> sum(p.numel() for p in net.parameters())
        1533217
        >>> net.eval()(torch.randn(1, 3, 33, 50)).shape
        torch.Size([1, 1, 33, 50])
    """

    def __init__(self, *, num_classes: int = 1, in_chans: int = 3, width: int = 16, legacy_crop: bool = False) -> None:
        super().__init__()
        self.num_classes, self.stride = num_classes, 8
        self.encoder: nn.Module = ResUNetEncoder(in_chans=in_chans, width=width)
        sizes = ((16, 4, 2 if legacy_crop else 1), (8, 2, 2), (4, 1, 2), (2, 1, 2))
        self.decoder = nn.ModuleList(
            Up(inputs * width, outputs * width, factor=factor, centred=legacy_crop) for inputs, outputs, factor in sizes
        )
        self.head = nn.Conv2d(width, num_classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        encoder: Any = self.encoder
        x, *earlier = reversed(encoder.features(x))
        for up, skip in zip(self.decoder, earlier, strict=True):
            x = up(x, skip)
        return self.head(x)
