"""What the host has to know of a family of networks: the steps of its forward pass, in order.

A *plan* is written once a family, in `lineattn.hosts.plans`. It names modules of the network, it never copies one;
the network keeps its class, its modules and the names of its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

Act: TypeAlias = Callable[[Tensor], Tensor]
Split: TypeAlias = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, Act]]
"""``split(block, x) -> (branch, shortcut, act)`` with ``block(x) == act(branch + shortcut)``, bit for bit and in
training too. The branch is a fresh tensor: the host adds to it in place, as the blocks themselves do."""


@dataclass(frozen=True)
class Maps:
    """How what a step puts out is seen as maps ``(B, C, H, W)``, where it isn't one.

    Attributes:
        of: ``of(x, size)`` shows ``x`` as maps, if possible without copying; ``size`` is that of the network's input.
        back: ``back(x, maps)`` is ``x`` with other maps in it, laid out in memory as ``x`` is, so that the network goes
            on with the same kernels; what isn't part of the maps (a class token) stays.
    """

    of: Callable[[Tensor, tuple[int, int]], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


def laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """``y`` in memory as ``x`` is, copied if need be."""
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)


NHWC = Maps(
    of=lambda x, size: x.permute(0, 3, 1, 2),
    back=lambda x, maps: laid_out_as(x, maps.permute(0, 2, 3, 1)),
)


@dataclass(frozen=True)
class Step:
    """One step of a network's forward pass.

    Attributes:
        path: Name of the module in the network, ``layer1.0``; a name for messages where it is no module.
        module: The module, or a function of the network (adding position embeddings).
        site: Whether a method may stand at it.
        stage_end: Whether a stage ends here: width or resolution change behind it.
        split: How the module falls into residual branch and shortcut, where it does.
        maps: How its output is seen as maps; ``None`` where it is one.
        feature: Whether its output is a map of the feature pyramid; by default where a stage ends.
    """

    path: str
    module: Callable[[Tensor], Tensor]
    site: bool = False
    stage_end: bool = False
    split: Split | None = None
    maps: Maps | None = None
    feature: bool | None = None

    @property
    def is_feature(self) -> bool:
        return self.stage_end if self.feature is None else self.feature

    def show(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """``x``, which is shaped like the step's output, as maps."""
        return x if self.maps is None else self.maps.of(x, size)

    def put_back(self, x: Tensor, maps: Tensor) -> Tensor:
        """``x`` with other maps in it."""
        return maps if self.maps is None else self.maps.back(x, maps)


@dataclass(frozen=True)
class Plan:
    """How a family of networks is walked.

    Attributes:
        family: Name of the family, for messages.
        matches: Whether a network belongs to it.
        steps: The network's steps up to its last map, read from the network at each call.
        head: ``head(net, x, pre_logits)`` takes the last map to the logits, or to what the classifier reads.
        classifier: Path of the classifier, a linear layer; or ``classifier(net)``, the paths of all, if there are any.
        head_dim: Width of an attention head unless the user says otherwise.
        probe_size: Side of an input that every stage can be told apart with, or ``probe_size(net)`` where the network
            takes one size only.
        norm: How the family normalises, see `lineattn.nn.depth.base.Site`.
        stem: Parameters in front of the first step that are in none of its modules (``pos_embed``).
    """

    family: str
    matches: Callable[[nn.Module], bool]
    steps: Callable[[nn.Module], Iterator[Step]]
    head: Callable[[nn.Module, Tensor, bool], Tensor]
    classifier: str | Callable[[nn.Module], tuple[str, ...]]
    head_dim: int
    probe_size: int | Callable[[nn.Module], int]
    norm: Literal["batch", "layer"] = "batch"
    stem: tuple[str, ...] = ()

    def classifiers(self, net: nn.Module) -> tuple[str, ...]:
        return (self.classifier,) if isinstance(self.classifier, str) else self.classifier(net)

    def probe_side(self, net: nn.Module) -> int:
        return self.probe_size if isinstance(self.probe_size, int) else self.probe_size(net)


def run_split(split: Split, block: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The block's output and the shortcut in it."""
    branch, shortcut, act = split(cast(nn.Module, block), x)
    branch += shortcut
    return act(branch), shortcut


def same(x: Tensor) -> Tensor:
    """The activation of a block that has none behind its add."""
    return x


def timm_head(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    """`Plan.head` of every network of timm."""
    return net.forward_head(x, pre_logits=pre_logits)


def through_classifier(net: Any, x: Tensor, pre_logits: bool) -> Tensor:
    """Through the layers of a network's ``classifier``, the last of which is the linear one."""
    *layers, last = net.classifier
    for layer in layers:
        x = layer(x)
    return x if pre_logits else last(x)


def last_of_classifier(net: Any) -> tuple[str, ...]:
    """`Plan.classifier` of such a network."""
    return (f"classifier.{len(net.classifier) - 1}",)


def loaded(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module, for `isinstance`, without importing it: what isn't loaded has no instances."""
    home = sys.modules.get(module)
    return () if home is None else tuple(getattr(home, name) for name in names)
