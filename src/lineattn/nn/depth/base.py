"""The contract of attention over depth.

A network is a chain of blocks; at a block stands a *site*. After block ``t`` a method gets the block's output
``x_t`` and returns ``x_t + o_t``, where ``o_t`` looks back at ``x_1 ... x_t``; a method with ``position="branch"``
gets the block's branch before the shortcut is added, and returns it changed. What it remembers travels as an
argument: nothing is written to ``self``. Maps are ``(B, C, H, W)`` always: a host shows the tokens of a transformer
as a map, without copying them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from lineattn.errors import InputError

Init = Literal["identity", "paper"]


@dataclass(frozen=True)
class Site:
    """Where a method stands: everything it may know of the network around it.

    Attributes:
        channels: Width ``C`` of the block's output.
        stage: Stage of the network, from 0; stages differ in width or resolution.
        index: Block of the stage, from 0.
        entry: What state arrives here. ``start``: none. ``continue``: the previous site's, of the same shape.
            ``transition``: the previous site's, which has to be brought to this width and resolution first (or,
            with neither changed, is to be summed up as one layer).
        prev_channels: Width at the previous site, for a transition.
        stride: Resolution of the previous site over this one's, for a transition.
        norm: How the network normalises, which its methods do too: ``batch`` norm, or ``layer`` norm over the
            channels of a position.
        alone: Whether the stretch that begins here (by a start or a transition) has no other site.
    """

    channels: int
    stage: int = 0
    index: int = 0
    entry: Literal["start", "continue", "transition"] = "start"
    prev_channels: int | None = None
    stride: int = 1
    norm: Literal["batch", "layer"] = "batch"
    alone: bool = False


class DepthAttention(nn.Module, ABC):
    """Base of every method of the depth axis.

    Args:
        site: Where the module stands. A subclass builds only what it will call there.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` multiplies the attention by a gain per channel that starts at zero, so that a network
            is unchanged until trained; ``paper`` has no gain and starts as published.

    Shape:
        - ``out``: ``(B, C, H, W)``, output of the block, after its residual add and activation; with
          ``position="branch"`` the branch before both.
        - ``shortcut``: same shape, what the block adds to its branch; ``None`` where the method needs none.
        - ``state``: ``None`` at a site with ``entry="start"``, else what the previous site returned.
        - Returns ``(x, state)``, ``x`` shaped like ``out``.
    """

    carries: ClassVar[bool] = False
    """Whether the state can go through a change of width or resolution (``Site.entry == "transition"``)."""

    position: ClassVar[Literal["after", "branch"]] = "after"
    """What `forward` gets and returns: the block's output, or its residual branch before the shortcut is added."""

    needs_shortcut: bool = False
    """Whether `forward` reads ``shortcut``; of the class, whether it does so unless an argument says otherwise."""

    def __init__(self, site: Site, *, drop_path: float = 0.0, init: Init = "identity") -> None:
        super().__init__()
        if not 0 <= drop_path < 1:
            raise InputError(f"drop_path is {drop_path}; it must be at least 0 and less than 1")
        if init not in ("identity", "paper"):
            raise InputError(f"init is {init!r}; it must be 'identity' or 'paper'")
        if site.entry == "transition" and not self.carries:
            raise InputError(f"{type(self).__name__} can't carry its state across stages; use scope='per_stage'")
        self.site, self.drop_path = site, drop_path
        self.gain = nn.Parameter(torch.zeros(site.channels)) if init == "identity" else None
        self.register_load_state_dict_pre_hook(_check_init)

    @property
    def needs_split(self) -> bool:
        """Whether the block has to be computed as branch and shortcut."""
        return self.needs_shortcut or self.position == "branch"

    @abstractmethod
    def forward(self, out: Tensor, shortcut: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Returns the block's output with attention added, and the state for the next site."""

    def weights(self, out: Tensor, shortcut: Tensor | None, state: Any) -> dict[str, Tensor]:
        """Keys, scores and attention at this site, by name, for the analyses; pure.

        `lineattn analyze` reads ``key`` ``(B, h, D)``, this layer's own, or ``keys`` ``(B, h, L, D)`` of all layers so
        far; ``share``, its attention to them, ``(B, h, L)``, or ``(B, L, H, W)`` where that differs from pixel to pixel
        (KCLA and its kin give the share of this layer in their mean, ``(B, h)``); ``gate`` ``(B, h)``. All optional.
        """
        return {}

    def fuse(self) -> Self:
        """A copy for evaluation with the same outputs, where everything constant is folded."""
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        fused._fold()
        return fused

    def _fold(self) -> None:
        """Folds what is constant in evaluation, in place; a method with nothing to fold needs none."""

    def fold_gain(self) -> None:
        """Turns ``init="identity"`` into ``init="paper"`` in place, at the same outputs.

        Raises:
            InputError: The method has no exact form without the gain (a negative gain after a ReLU).
        """
        if self.gain is not None:
            self._fold_gain(self.gain.detach())
            self.gain = None

    @abstractmethod
    def _fold_gain(self, gain: Tensor) -> None:
        """Multiplies ``gain`` into the parameters that produce the attention's output."""


def _check_init(module: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """The two inits differ by one parameter; loading one into the other would be silent with ``strict=False``."""
    assert isinstance(module, DepthAttention)
    ours = {key for key in state_dict if key.startswith(prefix)}
    if not ours:
        return
    if module.gain is None and prefix + "gain" in ours:
        raise InputError(
            f"{prefix}gain: these weights were trained with init='identity' and this module has init='paper'; "
            "build it with init='identity'"
        )
    if module.gain is not None and prefix + "gain" not in ours:
        raise InputError(
            f"{prefix}gain is missing: these weights were trained with init='paper' and this module has "
            "init='identity'; build it with init='paper'"
        )
