"""RegNet of timm (X, Y, Z) and of torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.hosts.step import Act, Plan, Step, loaded, same, timm_head


def matches_timm(net: nn.Module) -> bool:
    return isinstance(net, loaded("timm.models.regnet", "RegNet"))


def split_timm(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    if hasattr(block, "norm1"):  # norms before convolutions; the shortcut is what the first norm puts out
        x = block.norm1(x)
        branch = block.norm3(block.se(block.conv2(block.norm2(block.conv1(x)))))
        branch, act = block.conv3(branch), same
    else:
        branch, act = block.conv3(block.se(block.conv2(block.conv1(x)))), block.act3
    return block.drop_path(branch), block.downsample(x), act


def steps_timm(net: Any) -> Iterator[Step]:
    yield Step("stem", net.stem, feature=True)
    for stage in ("s1", "s2", "s3", "s4"):
        blocks = dict(getattr(net, stage).named_children())
        for i, (name, block) in enumerate(blocks.items()):
            residual = block.downsample is not None
            end = i == len(blocks) - 1
            yield Step(f"{stage}.{name}", block, residual, end, split_timm if residual else None)
    yield Step("final_conv", net.final_conv)


def matches_torchvision(net: nn.Module) -> bool:
    return isinstance(net, loaded("torchvision.models.regnet", "RegNet"))


def split_torchvision(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    return block.f(x), x if block.proj is None else block.proj(x), block.activation


def steps_torchvision(net: Any) -> Iterator[Step]:
    yield Step("stem", net.stem)
    for stage, blocks in net.trunk_output.named_children():
        for i, (name, block) in enumerate(blocks.named_children()):
            yield Step(f"trunk_output.{stage}.{name}", block, True, i == len(blocks) - 1, split_torchvision)


def head_torchvision(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    x = torch.flatten(net.avgpool(x), 1)
    return x if pre_logits else net.fc(x)


TIMM = Plan("timm RegNet", matches_timm, steps_timm, timm_head, "head.fc", head_dim=32, probe_size=64)
TORCHVISION = Plan(
    "torchvision RegNet", matches_torchvision, steps_torchvision, head_torchvision, "fc", head_dim=32, probe_size=64
)
