"""The contract of attention over the positions of a sample.

A method takes tokens ``(B, N, C)`` or a map ``(B, C, H, W)`` and returns the same shape. What it computes does not
depend on how positions are laid out in memory; a map is not copied to become tokens.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.depth.base import Init
from lineattn.ops.memory import check_mask, is_map


class SampleAttention(nn.Module, ABC):
    """Base of every method of the sample axis.

    Args:
        channels: Width ``C``.

    Shape:
        - ``x``: ``(B, N, C)`` or ``(B, C, H, W)``.
        - ``mask``: ``(B, N)`` or ``(B, H, W)`` of booleans, true where there is a position; ``None`` for everywhere.
          Other positions take no part in any sum.
        - Returns the shape of ``x``; from a residual block in the same order in memory.

    Raises:
        InputError: From `forward`: channels that aren't where they should be, or a mask that doesn't fit.
    """

    residual: bool = False
    """Whether the method adds what it finds to its input, and so is a block that can be put behind another."""
    added: bool = False
    """Whether `lineattn.swap` or `lineattn.attach` has put it into a network, whose weights have none of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels < 1:
            raise InputError(f"channels is {channels}; it must be at least 1")
        self.channels = channels

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens, mask = self._tokens(x, mask)
        out = self.attend(tokens, mask)
        return out if x.ndim == 3 else out.mT.unflatten(2, x.shape[2:])

    @abstractmethod
    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, N, C) -> (B, N, C)``; a map comes with its positions side by side in memory."""

    @abstractmethod
    def macs(self, positions: int) -> int:
        """Multiply-accumulates of one sample of so many positions, of the matrix products."""

    def weights(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Attention and what tells whether it is healthy, by name, for the analyses; pure."""
        return {}

    def fuse(self) -> Self:
        """A copy for evaluation with the same outputs, where everything constant is folded."""
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        fused._fold()
        return fused

    def _fold(self) -> None:
        """Folds what is constant in evaluation, in place; a method with nothing to fold needs none."""

    def _tokens(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``(B, N, C)`` and ``(B, N)``, views of what is given."""
        if x.ndim == 3:
            if x.shape[2] != self.channels:
                hint = "; (B, C, N) is given as x.mT" if x.shape[1] == self.channels else ""
                raise InputError(f"x is {tuple(x.shape)}; tokens are (B, N, {self.channels}){hint}")
            tokens = x
        elif x.ndim == 4:
            if x.shape[1] != self.channels:
                last = x.shape[3] == self.channels
                hint = "; (B, H, W, C) is given as x.flatten(1, 2), or as x.permute(0, 3, 1, 2)" if last else ""
                raise InputError(f"x is {tuple(x.shape)}; a map is (B, {self.channels}, H, W){hint}")
            tokens = x.flatten(2).mT
            if mask is not None:
                check_mask(mask, (x.shape[0], *x.shape[2:]))
                mask = mask.flatten(1)
        else:
            raise InputError(f"x is {tuple(x.shape)}; it must be (B, N, C) or (B, C, H, W)")
        check_mask(mask, tokens.shape[:2])
        return tokens, mask


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer on every position, ``(B, N, I), (O, I) -> (B, N, O)``; the result lies in memory as x does."""
    if is_map(x):
        rows = x.mT.unsqueeze(-1)  # a map of one column: a convolution does not need its channels side by side
        return F.conv2d(rows, weight[:, :, None, None], bias).squeeze(-1).mT
    return F.linear(x, weight, bias)


def normed(norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """A `torch.nn.BatchNorm1d` over the positions of ``(B, N, C)``; the result lies in memory as x does."""
    if mask is not None and norm.training:  # statistics of the positions that exist
        return torch.zeros_like(x).masked_scatter(mask[..., None], norm(x[mask]))
    # Not as a map of one column: of such ones torch 2.14's backward is wrong where the gradient lies otherwise.
    return norm(x.mT).mT if is_map(x) else norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def check_init(init: str) -> None:
    """Refuses what is no `Init`."""
    if init not in get_args(Init):
        raise InputError(f"init is {init!r}; it must be 'identity' or 'paper'")
