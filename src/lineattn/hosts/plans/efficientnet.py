"""EfficientNet, MobileNetV2 and MobileNetV3 of timm (and what else it builds of the same parts) and of torchvision.

A block that changes width or resolution has no shortcut: it is a step without a site. A stage is such a block and those
behind it, so some stages have no site at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.hosts.step import Act, Plan, Step, last_of_classifier, loaded, same, through_classifier, timm_head

# What the blocks of timm call one after the other, by class; a class that isn't here can't be split.
_BRANCHES = {
    "ConvBnAct": ("conv", "bn1", "aa"),
    "DepthwiseSeparableConv": ("conv_dw", "bn1", "aa", "se", "conv_pw", "bn2"),
    "InvertedResidual": ("conv_pw", "bn1", "conv_dw", "bn2", "aa", "se", "conv_pwl", "bn3"),
    "EdgeResidual": ("conv_exp", "bn1", "aa", "se", "conv_pwl", "bn2"),
    "UniversalInvertedResidual": ("dw_start", "pw_exp", "dw_mid", "se", "pw_proj", "dw_end", "layer_scale"),
}


def matches_timm(net: nn.Module) -> bool:
    classes = loaded("timm.models.efficientnet", "EfficientNet") + loaded("timm.models.mobilenetv3", "MobileNetV3")
    return isinstance(net, classes)


def split_timm(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    branch = x
    for name in _BRANCHES[type(block).__name__]:
        branch = getattr(block, name)(branch)
    if type(block).__name__ == "ConvBnAct" or getattr(block, "has_pw_act", False):
        branch = branch.clone()  # the branch ends in an activation, which may need its output for the backward pass
    return block.drop_path(branch), x, same


def steps_timm(net: Any) -> Iterator[Step]:
    yield Step("conv_stem", net.conv_stem)
    yield Step("bn1", net.bn1, feature=0 in net.stage_ends)
    for s, stage in enumerate(net.blocks):
        for i, block in enumerate(stage):
            halves = split_timm if block.has_skip and type(block).__name__ in _BRANCHES else None
            end = i == len(stage) - 1
            feature = end and s + 1 in net.stage_ends
            yield Step(f"blocks.{s}.{i}", block, block.has_skip, end, halves, feature=feature)
    if isinstance(net, loaded("timm.models.efficientnet", "EfficientNet")):
        yield Step("conv_head", net.conv_head)
        yield Step("bn2", net.bn2)


def matches_torchvision(net: nn.Module) -> bool:
    homes = {"efficientnet": "EfficientNet", "mobilenetv2": "MobileNetV2", "mobilenetv3": "MobileNetV3"}
    return any(isinstance(net, loaded(f"torchvision.models.{home}", name)) for home, name in homes.items())


def split_torchvision(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    branch = block.conv(x) if hasattr(block, "conv") else block.block(x)
    return block.stochastic_depth(branch) if hasattr(block, "stochastic_depth") else branch, x, same


def steps_torchvision(net: Any) -> Iterator[Step]:
    parts = [*_parts(net), ("", None)]
    for (path, part), (_, after) in pairwise(parts):
        is_block, residual = hasattr(part, "use_res_connect"), getattr(part, "use_res_connect", False)
        end = not getattr(after, "use_res_connect", False)
        feature = end and after is not None and (not hasattr(after, "use_res_connect") or _strides(after))
        halves = split_torchvision if residual else None
        yield Step(path, part, residual, end and is_block, halves, feature=feature)


def _parts(net: Any) -> Iterator[tuple[str, nn.Module]]:
    """What stands in ``features``, with the stages opened."""
    for i, part in enumerate(net.features):
        if type(part) is nn.Sequential:
            yield from ((f"features.{i}.{j}", block) for j, block in enumerate(part))
        else:
            yield f"features.{i}", part


def _strides(block: Any) -> bool:
    """Whether a block changes the resolution."""
    layers = block.conv if hasattr(block, "conv") else block.block
    return any(layer[0].stride != (1, 1) for layer in layers if isinstance(layer, nn.Sequential))


def head_torchvision(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    return through_classifier(net, torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1), pre_logits)


TIMM = Plan(
    "timm EfficientNet/MobileNet", matches_timm, steps_timm, timm_head, "classifier", head_dim=32, probe_size=64
)
TORCHVISION = Plan(
    "torchvision EfficientNet/MobileNet", matches_torchvision, steps_torchvision, head_torchvision, last_of_classifier,
    head_dim=32, probe_size=64,
)  # fmt: skip
