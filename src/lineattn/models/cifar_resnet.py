"""ResNets for 32x32 images.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (2016), arXiv 1512.03385, section 4.2: a 3x3 stem,
three stages of ``n`` blocks at 32, 16 and 8 pixels with ``w, 2w, 4w`` planes, global average pooling. Depth is
``6n + 2`` with basic blocks and ``9n + 2`` with bottlenecks (four times as wide at their outputs), which are the ones
of the layer attention papers. Any size of image works.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lineattn.errors import InputError


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions.

    Args:
        inputs: Channels of the input.
        planes: Channels of the output.
        stride: Stride of the first convolution.
    """

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, planes, 3, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution.

    Args:
        inputs: Channels of the input.
        planes: Channels inside; the output has four times as many.
        stride: Stride of the 3x3 convolution.
    """

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        outputs = self.expansion * planes
        self.conv1 = _conv(inputs, planes, 1)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = _conv(planes, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class CifarResNet(nn.Module):
    """ResNet of three stages for small images.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depth: Layers with weights, ``6n + 2`` or ``9n + 2``.
        num_classes: Outputs of the classifier.
        in_chans: Channels of the image.
        width: Planes of the first stage.

    Shape:
        - Input: ``(B, in_chans, H, W)``.
        - Output: ``(B, num_classes)``.

    Raises:
        InputError: No network of these blocks has that depth, or the width is under 8 (2 for bottlenecks).

    Example:
        >>> net = CifarResNet(Bottleneck, 20, num_classes=100)
        >>> net(torch.randn(2, 3, 32, 32)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([2, 100]), 243508)
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depth: int,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        width: int = 16,
    ) -> None:
        super().__init__()
        # The gradient of a strided 1x1 convolution of fewer than 8 channels in channels_last writes outside its buffer
        # in PyTorch's CPU library (seen with 2.14.1 on one thread); the shortcuts of narrow basic blocks are such.
        if width * block.expansion < 8:
            raise InputError(
                f"width={width} is too narrow for a {block.__name__}; it must be at least {8 // block.expansion}"
            )
        layers = 2 if block is BasicBlock else 3
        blocks, rest = divmod(depth - 2, 3 * layers)
        if rest or blocks < 1:
            raise InputError(
                f"no {block.__name__} CIFAR ResNet has depth {depth}: it must be {3 * layers}n + 2, "
                f"as {3 * layers + 2}, {6 * layers + 2}, {9 * layers + 2}"
            )
        self.conv1 = _conv(in_chans, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        stages, inputs = [], width
        for planes, first in ((width, 1), (2 * width, 2), (4 * width, 2)):
            stage = []
            for i in range(blocks):
                stage.append(block(inputs, planes, first if i == 0 else 1))
                inputs = planes * block.expansion
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.stages(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))
