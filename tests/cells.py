"""The contract's cells: every method of the depth axis on every family of networks that takes it."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor

from lineattn import attach, registry
from lineattn.hosts import plans
from lineattn.hosts.depth_host import DepthHost
from lineattn.nn.depth.base import DepthAttention
from tests.hosts.nets import FAMILIES, image, shake, small

METHODS = registry.list_methods("depth")
PAIRS = [(method, family) for family in FAMILIES for method in METHODS]

# Families whose plan is another's in other names, and one method for each thing that a plan has to offer: the output,
# branch and shortcut, the branch alone. `make test` has these methods on these families, `make test-slow` the others.
LIKE_OTHERS = {
    *("cifar_bottleneck", "torchvision_bottleneck", "torchvision_convnext", "torchvision_regnet", "timm_mobilenet"),
    *("torchvision_efficientnet", "torchvision_mobilenet_v2", "torchvision_mobilenet_v3", "timm_deit_distilled"),
    *("torchvision_vit", "timm_swin_v2", "torchvision_swin"),
}
TYPICAL = ("kcla", "mrla_light", "se")


def needs_split(method: str) -> bool:
    """Whether the method, as it is by default, reads a block's branch or shortcut."""
    cls = registry.get(method).cls
    return cls.position == "branch" or bool(cls.needs_shortcut)


@cache
def splits(family: str) -> bool:
    """Whether the blocks of a family fall into branch and shortcut."""
    net = small(family)
    return all(step.split for step in plans.find(net).steps(net) if step.site)


def is_cell(method: str, family: str) -> bool:
    return splits(family) or not needs_split(method)


def is_slow(method: str, family: str) -> bool:
    return family in LIKE_OTHERS and method not in TYPICAL


CELLS = [pair for pair in PAIRS if is_cell(*pair)]
REFUSED = [pair for pair in PAIRS if not is_cell(*pair)]


def build(method: str, family: str, **arguments: object) -> DepthHost:
    return attach(small(family), method, **arguments)


def example(host: DepthHost, batch: int = 2) -> Tensor:
    return image(batch, host.plan.probe_side(host.backbone))


def methods_of(host: DepthHost) -> dict[str, DepthAttention]:
    return {key: module for key, module in host.sites.items() if isinstance(module, DepthAttention)}


def shaken(host: DepthHost, dtype: torch.dtype = torch.float32) -> DepthHost:
    """A copy away from its start."""
    host = copy.deepcopy(host).to(dtype)
    shake(host)
    return host


def without_drop_path(host: DepthHost) -> DepthHost:
    for module in methods_of(host).values():
        module.drop_path = 0.0
    return host
