"""ConvNeXt of timm (V2 too) and of torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lineattn.hosts.step import Act, Plan, Step, last_of_classifier, loaded, same, through_classifier, timm_head


def matches_timm(net: nn.Module) -> bool:
    return isinstance(net, loaded("timm.models.convnext", "ConvNeXt"))


def split_timm(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    branch = block.conv_dw(x)
    if block.use_conv_mlp:
        branch = block.mlp(block.norm(branch))
    else:
        branch = block.mlp(block.norm(branch.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    if block.gamma is not None:
        branch = branch.mul(block.gamma.reshape(1, -1, 1, 1))
    return block.drop_path(branch), block.shortcut(x), same


def steps_timm(net: Any) -> Iterator[Step]:
    yield Step("stem", net.stem)
    for s, stage in enumerate(net.stages):
        yield Step(f"stages.{s}.downsample", stage.downsample)
        for i, block in enumerate(stage.blocks):
            yield Step(f"stages.{s}.blocks.{i}", block, True, i == len(stage.blocks) - 1, split_timm)
    yield Step("norm_pre", net.norm_pre)


def matches_torchvision(net: nn.Module) -> bool:
    return isinstance(net, loaded("torchvision.models.convnext", "ConvNeXt"))


def split_torchvision(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    return block.stochastic_depth(block.layer_scale * block.block(x)), x, same


def steps_torchvision(net: Any) -> Iterator[Step]:
    residuals = loaded("torchvision.models.convnext", "CNBlock")
    for s, stage in enumerate(net.features):
        if not isinstance(stage[0], residuals):
            yield Step(f"features.{s}", stage)
            continue
        for i, block in enumerate(stage):
            yield Step(f"features.{s}.{i}", block, True, i == len(stage) - 1, split_torchvision)


def head_torchvision(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    return through_classifier(net, net.avgpool(x), pre_logits)


TIMM = Plan("timm ConvNeXt", matches_timm, steps_timm, timm_head, "head.fc", head_dim=32, probe_size=64, norm="layer")
TORCHVISION = Plan(
    "torchvision ConvNeXt", matches_torchvision, steps_torchvision, head_torchvision, last_of_classifier,
    head_dim=32, probe_size=64, norm="layer",
)  # fmt: skip
