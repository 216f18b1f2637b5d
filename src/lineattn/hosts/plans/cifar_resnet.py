"""The CIFAR ResNets of `lineattn.models.cifar_resnet`; their parts are named as torchvision's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lineattn.hosts.plans.torchvision_resnet import head, split
from lineattn.hosts.step import Plan, Step, loaded

_HOME = "lineattn.models.cifar_resnet"


def matches(net: nn.Module) -> bool:
    return isinstance(net, loaded(_HOME, "CifarResNet"))


def steps(net: Any) -> Iterator[Step]:
    residuals = loaded(_HOME, "BasicBlock", "Bottleneck")
    for path in ("conv1", "bn1", "relu"):
        yield Step(path, getattr(net, path))
    for s, blocks in enumerate(net.stages):
        for i, block in enumerate(blocks):
            residual = isinstance(block, residuals)
            yield Step(f"stages.{s}.{i}", block, residual, i == len(blocks) - 1, split if residual else None)


PLAN = Plan("CIFAR ResNet", matches, steps, head, classifier="fc", head_dim=16, probe_size=32)
