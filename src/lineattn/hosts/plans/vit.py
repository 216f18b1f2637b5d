"""Vision transformers of timm (ViT, DeiT with or without distillation, registers) and of torchvision.

All blocks are one stage, and each is a level of `DepthHost.features`, as in timm. A block's last residual add is the
one that a method sees: the branch is that of the MLP, the shortcut the stream behind the attention. Methods see the
patches' tokens as maps; the tokens before them (class, distillation, registers) are passed through. Where the head
reads nothing but those, no method stands at the last block: it would have no effect and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.hosts.step import Act, Maps, Plan, Step, laid_out_as, loaded, same, timm_head

_TIMM = "timm.models.vision_transformer"


def tokens(prefix: int, grid: Callable[[tuple[int, int]], tuple[int, int]]) -> Maps:
    """Tokens ``(B, prefix + H W, C)`` as maps ``(B, C, H, W)``; ``grid`` gives H and W from the size of the input."""

    def of(x: Tensor, size: tuple[int, int]) -> Tensor:
        return x[:, prefix:].transpose(1, 2).unflatten(2, grid(size))

    def back(x: Tensor, maps: Tensor) -> Tensor:
        patches = maps.flatten(2).transpose(1, 2)
        return torch.cat((x[:, :prefix], patches), 1) if prefix else laid_out_as(x, patches)

    return Maps(of, back)


def matches_timm(net: nn.Module) -> bool:
    return isinstance(net, loaded(_TIMM, "VisionTransformer"))


def split_pre_norm(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
    branch = block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return laid_out_as(x, branch), x, same  # without a class token timm's stream is transposed, and stays so


def split_post_norm(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.drop_path1(block.norm1(block.attn(x)))
    return laid_out_as(x, block.drop_path2(block.norm2(block.mlp(x)))), x, same


def steps_timm(net: Any) -> Iterator[Step]:
    if not isinstance(net.patch_drop, nn.Identity):
        raise InputError("patch_drop_rate leaves out tokens in training, and the others are no map; build it with 0")
    maps = tokens(net.num_prefix_tokens, net.patch_embed.dynamic_feat_size)
    yield Step("patch_embed", net.patch_embed)
    yield Step("embed positions", net._pos_embed)
    yield Step("norm_pre", net.norm_pre)
    splits = {"Block": split_pre_norm, "ResPostBlock": split_post_norm}
    for i, block in enumerate(net.blocks):
        halves, end = splits.get(type(block).__name__), i == len(net.blocks) - 1
        # Behind the last block a head that reads the class token sees nothing of what a method does to the patches.
        yield Step(f"blocks.{i}", block, not end or net.global_pool != "token", end, halves, maps, feature=True)
    yield Step("norm", net.norm, maps=maps)


def classifiers_timm(net: nn.Module) -> tuple[str, ...]:
    return ("head", "head_dist") if hasattr(net, "head_dist") else ("head",)


def side_timm(net: Any) -> int:
    height, width = net.patch_embed.img_size
    if height != width:
        raise InputError(f"the network was built for images of {height}x{width}; build it with a square img_size")
    return height


def matches_torchvision(net: nn.Module) -> bool:
    return isinstance(net, loaded("torchvision.models.vision_transformer", "VisionTransformer"))


def split_torchvision(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    y = block.ln_1(x)
    x = block.dropout(block.self_attention(y, y, y, need_weights=False)[0]) + x
    return block.mlp(block.ln_2(x)), x, same


def embed_torchvision(net: Any, patches: Tensor) -> Tensor:
    side = net.image_size // net.patch_size
    if patches.shape[2] != side or patches.shape[3] != side:
        raise InputError(f"the network takes images of {net.image_size}x{net.image_size}; resize, or build it anew")
    x = patches.flatten(2).permute(0, 2, 1)
    # Not len(x), which a graph for any batch can not hold.
    return torch.cat((net.class_token.expand(x.shape[0], -1, -1), x), 1) + net.encoder.pos_embedding


def steps_torchvision(net: Any) -> Iterator[Step]:
    patch = net.patch_size
    maps = tokens(1, lambda size: (size[0] // patch, size[1] // patch))
    yield Step("conv_proj", net.conv_proj)
    yield Step("embed positions", partial(embed_torchvision, net))
    yield Step("encoder.dropout", net.encoder.dropout)
    blocks = dict(net.encoder.layers.named_children())
    for i, (name, block) in enumerate(blocks.items()):
        end = i == len(blocks) - 1
        yield Step(f"encoder.layers.{name}", block, not end, end, split_torchvision, maps, feature=True)
    yield Step("encoder.ln", net.encoder.ln, maps=maps)


def head_torchvision(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    x = x[:, 0]
    for name, layer in net.heads.named_children():
        if not (pre_logits and name == "head"):
            x = layer(x)
    return x


def side_torchvision(net: Any) -> int:
    return net.image_size


TIMM = Plan(
    "timm ViT", matches_timm, steps_timm, timm_head, classifiers_timm, head_dim=32, probe_size=side_timm,
    norm="layer", stem=("cls_token", "dist_token", "reg_token", "pos_embed"),
)  # fmt: skip
TORCHVISION = Plan(
    "torchvision ViT", matches_torchvision, steps_torchvision, head_torchvision, "heads.head", head_dim=32,
    probe_size=side_torchvision, norm="layer", stem=("class_token", "encoder.pos_embedding"),
)  # fmt: skip
