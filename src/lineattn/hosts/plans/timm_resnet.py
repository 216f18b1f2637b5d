"""The ResNets of timm: ResNeXt, wide, SE and ECA, deep stems, anti-aliased, dilated (``output_stride``).

Blocks of other files that stand in the same network (SK, ResNeSt, Res2Net) have a site and no split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lineattn.hosts.step import Act, Plan, Step, loaded, timm_head

_HOME = "timm.models.resnet"


def matches(net: nn.Module) -> bool:
    return isinstance(net, loaded(_HOME, "ResNet"))


def split(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    """Basic blocks (two convolutions) and bottlenecks (three), in the order in which they compute and draw."""
    if hasattr(block, "conv3"):
        branch = block.bn2(block.conv2(block.act1(block.bn1(block.conv1(x)))))
        branch = block.aa(block.act2(block.drop_block(branch)))
        branch, act = block.bn3(block.conv3(branch)), block.act3
    else:
        branch = block.aa(block.act1(block.drop_block(block.bn1(block.conv1(x)))))
        branch, act = block.bn2(block.conv2(branch)), block.act2
    if block.se is not None:
        branch = block.se(branch)
    if block.drop_path is not None:
        branch = block.drop_path(branch)
    return branch, x if block.downsample is None else block.downsample(x), act


def steps(net: Any) -> Iterator[Step]:
    divisible = loaded(_HOME, "BasicBlock", "Bottleneck")
    for path in ("conv1", "bn1", "act1", "maxpool"):
        yield Step(path, getattr(net, path), feature=path == "act1")
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        blocks = getattr(net, stage)
        for i, block in enumerate(blocks):
            halves = split if isinstance(block, divisible) else None
            yield Step(f"{stage}.{i}", block, True, i == len(blocks) - 1, halves)


PLAN = Plan("timm ResNet", matches, steps, timm_head, classifier="fc", head_dim=32, probe_size=64)
