"""EAMLP of `lineattn.models.eamlp`.

As in `lineattn.hosts.plans.vit`: blocks are one stage, methods see the patches' tokens as maps, and none stands at the
last block, behind which the head reads the class token alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.hosts.plans.vit import tokens
from lineattn.hosts.step import Act, Plan, Step, loaded, same, timm_head

_HOME = "lineattn.models.eamlp"


def matches(net: nn.Module) -> bool:
    return isinstance(net, loaded(_HOME, "EAMLP"))


def split(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Act]:
    x = x + block.drop_path(block.attn(block.norm1(x)))
    return block.mlp_branch(x), x, same


def steps(net: Any) -> Iterator[Step]:
    maps = tokens(1, lambda _size: net.grid)
    yield Step("stem", net.tokens)
    yield Step("embed positions", net.embed)
    yield Step("pos_drop", net.pos_drop)
    for i, block in enumerate(net.blocks):
        end = i == len(net.blocks) - 1
        yield Step(f"blocks.{i}", block, not end, end, split, maps, feature=True)
    yield Step("norm", net.norm, maps=maps)


def side(net: Any) -> int:
    height, width = net.img_size
    if height != width:
        raise InputError(f"the network was built for images of {height}x{width}; build it with a square img_size")
    return height


PLAN = Plan("EAMLP", matches, steps, timm_head, "head", head_dim=32, probe_size=side, norm="layer", stem=("cls_token",))
