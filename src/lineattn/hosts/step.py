"""What the host has to know of a family of networks: the steps of its forward pass, in order.

A *plan* is written once a family, in `lineattn.hosts.plans`. It names modules of the network, it never copies one;
the network keeps its class, its modules and the names of its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

Act: TypeAlias = Callable[[Tensor], Tensor]
Split: TypeAlias = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, Act]]
"""``split(block, x) -> (branch, shortcut, act)`` with ``block(x) == act(branch + shortcut)``, bit for bit and in
training too. The branch is a fresh tensor: the host adds to it in place, as the blocks themselves do."""


@dataclass(frozen=True)
class Step:
    """One step of a network's forward pass.

    Attributes:
        path: Name of the module in the network, ``layer1.0``.
        module: The module.
        site: Whether a method may stand behind it.
        stage_end: Whether its output is a map of the feature pyramid.
        split: How the module falls into residual branch and shortcut, where it does.
    """

    path: str
    module: nn.Module
    site: bool = False
    stage_end: bool = False
    split: Split | None = None


@dataclass(frozen=True)
class Plan:
    """How a family of networks is walked.

    Attributes:
        family: Name of the family, for messages.
        matches: Whether a network belongs to it.
        steps: The network's steps up to its last map, read from the network at each call.
        head: ``head(net, x, pre_logits)`` takes the last map to the logits, or to what the classifier reads.
        classifier: Path of the classifier, a linear layer.
        head_dim: Width of an attention head unless the user says otherwise.
        probe_size: Height and width of an input that every stage can be told apart with.
    """

    family: str
    matches: Callable[[nn.Module], bool]
    steps: Callable[[nn.Module], Iterator[Step]]
    head: Callable[[nn.Module, Tensor, bool], Tensor]
    classifier: str
    head_dim: int
    probe_size: int


def run_split(split: Split, block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The block's output and the shortcut in it."""
    branch, shortcut, act = split(block, x)
    branch += shortcut
    return act(branch), shortcut


def loaded(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module, for `isinstance`, without importing it: what isn't loaded has no instances."""
    home = sys.modules.get(module)
    return () if home is None else tuple(getattr(home, name) for name in names)
