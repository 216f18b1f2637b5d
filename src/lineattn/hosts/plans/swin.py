"""Swin Transformers, V1 and V2, of timm and of torchvision; their maps are channels-last, ``(B, H, W, C)``.

As in `lineattn.hosts.plans.vit`, a method sees a block's last residual add: the branch is that of the MLP, the shortcut
the stream behind the attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lineattn.hosts.plans.vit import side_timm
from lineattn.hosts.step import NHWC, Act, Plan, Step, loaded, same, timm_head


def matches_timm(net: nn.Module) -> bool:
    first = loaded("timm.models.swin_transformer", "SwinTransformer")
    return isinstance(net, first + loaded("timm.models.swin_transformer_v2", "SwinTransformerV2"))


def split_timm(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.drop_path1(block._attn(block.norm1(x)))
    branch = block.drop_path2(block.mlp(block.norm2(x.flatten(1, 2))))
    return branch.reshape(x.shape), x, same


def split_timm_v2(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.drop_path1(block.norm1(block._attn(x)))
    branch = block.drop_path2(block.norm2(block.mlp(x.flatten(1, 2))))
    return branch.reshape(x.shape), x, same


def steps_timm(net: Any) -> Iterator[Step]:
    splits = {"SwinTransformerBlock": split_timm, "SwinTransformerV2Block": split_timm_v2}
    yield Step("patch_embed", net.patch_embed)
    for s, stage in enumerate(net.layers):
        yield Step(f"layers.{s}.downsample", stage.downsample)
        for i, block in enumerate(stage.blocks):
            halves = splits.get(type(block).__name__)
            yield Step(f"layers.{s}.blocks.{i}", block, True, i == len(stage.blocks) - 1, halves, NHWC)
    yield Step("norm", net.norm, maps=NHWC)


def matches_torchvision(net: nn.Module) -> bool:
    return isinstance(net, loaded("torchvision.models.swin_transformer", "SwinTransformer"))


def split_torchvision(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.stochastic_depth(block.attn(block.norm1(x)))
    return block.stochastic_depth(block.mlp(block.norm2(x))), x, same


def split_torchvision_v2(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.stochastic_depth(block.norm1(block.attn(x)))
    return block.stochastic_depth(block.norm2(block.mlp(x))), x, same


def steps_torchvision(net: Any) -> Iterator[Step]:
    splits = {"SwinTransformerBlock": split_torchvision, "SwinTransformerBlockV2": split_torchvision_v2}
    for s, stage in enumerate(net.features):
        if s % 2 == 0:  # patches, and their merging between the stages
            yield Step(f"features.{s}", stage)
            continue
        for i, block in enumerate(stage):
            halves = splits.get(type(block).__name__)
            yield Step(f"features.{s}.{i}", block, True, i == len(stage) - 1, halves, NHWC)
    yield Step("norm", net.norm, maps=NHWC)


def head_torchvision(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    x = net.flatten(net.avgpool(net.permute(x)))
    return x if pre_logits else net.head(x)


TIMM = Plan(
    "timm Swin", matches_timm, steps_timm, timm_head, "head.fc", head_dim=32, probe_size=side_timm, norm="layer"
)
TORCHVISION = Plan(
    "torchvision Swin", matches_torchvision, steps_torchvision, head_torchvision, "head", head_dim=32, probe_size=64,
    norm="layer",
)  # fmt: skip
