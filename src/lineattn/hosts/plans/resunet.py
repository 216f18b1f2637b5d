"""The encoder of `lineattn.models.resunet`, which has no classifier; its parts are named as those of CIFAR ResNets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lineattn.hosts.plans.torchvision_resnet import split
from lineattn.hosts.step import Plan, Step, loaded

_HOME = "lineattn.models.resunet"


def matches(net: nn.Module) -> bool:
    return isinstance(net, loaded(_HOME, "ResUNetEncoder"))


def steps(net: Any) -> Iterator[Step]:
    for path in ("conv1", "bn1", "relu"):
        yield Step(path, getattr(net, path), feature=path == "relu")
    for s, blocks in enumerate(net.stages):
        for i, block in enumerate(blocks):
            yield Step(f"stages.{s}.{i}", block, True, i == len(blocks) - 1, split)


def head(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    return x


def classifiers(net: nn.Module) -> tuple[str, ...]:
    return ()


PLAN = Plan("ResUNet encoder", matches, steps, head, classifiers, head_dim=16, probe_size=32)
