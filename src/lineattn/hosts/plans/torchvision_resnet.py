"""ResNet, ResNeXt and Wide ResNet of torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.hosts.step import Act, Plan, Step, loaded

_HOME = "torchvision.models.resnet"


def matches(net: nn.Module) -> bool:
    return isinstance(net, loaded(_HOME, "ResNet"))


def split(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    """Basic blocks (two convolutions) and bottlenecks (three), in the order in which they compute."""
    branch = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    if hasattr(block, "conv3"):
        branch = block.bn3(block.conv3(block.relu(branch)))
    return branch, x if block.downsample is None else block.downsample(x), block.relu


def steps(net: Any) -> Iterator[Step]:
    residuals = loaded(_HOME, "BasicBlock", "Bottleneck")
    for path in ("conv1", "bn1", "relu", "maxpool"):
        yield Step(path, getattr(net, path))
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        blocks = getattr(net, stage)
        for i, block in enumerate(blocks):
            residual = isinstance(block, residuals)
            yield Step(f"{stage}.{i}", block, residual, i == len(blocks) - 1, split if residual else None)


def head(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    x = torch.flatten(net.avgpool(x), 1)
    return x if pre_logits else net.fc(x)


PLAN = Plan("torchvision ResNet", matches, steps, head, classifier="fc", head_dim=32, probe_size=64)
