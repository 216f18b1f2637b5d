r"""Double attention (A²), to compare with: a few features gathered from all positions, and given out to each.

"A²-Nets: Double Attention Networks" (Chen, Kalantidis, Li, Yan, Feng; NeurIPS 2018), arXiv 1810.11579.

.. math::
    G = \mathrm{softmax}_N(B)^\top A, \qquad y = x + W_o\,\big(\mathrm{softmax}_M(V)\, G\big), \qquad A, B, V = W x

Cost O(N), as external attention's; but what is gathered is the sample's own. No state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.depth.base import Init
from lineattn.nn.sample.base import SampleAttention, check_init, pointwise
from lineattn.registry import register


@register(
    "double_attention",
    axis="sample",
    title="Double attention (A²)",
    paper="A²-Nets: Double Attention Networks (2018)",
    arxiv="1810.11579",
    cost="O(N)",
    state="none",
    no_gradient=(("gather.bias", "the same for all positions, which the softmax over them cancels"),),
)
class DoubleAttention(SampleAttention):
    r"""Gathers ``M`` features by attention over the positions and distributes them by attention over the features.

    .. math:: y = x + W_o\,\big(\mathrm{softmax}_M(V)\, \mathrm{softmax}_N(B)^\top A\big) + b_o

    :math:`A` has ``width`` channels, :math:`B` and :math:`V` have ``slots``.

    Args:
        channels: Width ``C``.
        width: Channels of what is gathered, by default ``C // 4``.
        slots: How many are gathered, by default ``C // 4``.
        init: ``paper``, or ``identity``: :math:`W_o` and its bias start at zero.

    Shape:
        - ``x``: ``(B, C, H, W)`` or ``(B, N, C)``; ``mask``: ``(B, H, W)`` or ``(B, N)`` of booleans, true where there
          is a position.
        - Returns the shape of ``x``.

    Note:
        A widely read implementation takes the softmax over the batch, so that samples see each other; this one follows
        the paper.

    Example:
        >>> DoubleAttention(64)(torch.randn(2, 64, 7, 7)).shape
        torch.Size([2, 64, 7, 7])

    Reference:
        "A²-Nets: Double Attention Networks" (2018), arXiv 1810.11579, equations 1-6.
    """

    residual = True

    def __init__(
        self, channels: int, *, width: int | None = None, slots: int | None = None, init: Init = "paper"
    ) -> None:
        super().__init__(channels)
        check_init(init)
        width, slots = (max(1, channels // 4) if given is None else given for given in (width, slots))
        if width < 1 or slots < 1:
            raise InputError(f"width is {width} and slots is {slots}; they must be at least 1")
        self.feature = nn.Linear(channels, width)
        self.gather, self.distribute = nn.Linear(channels, slots), nn.Linear(channels, slots)
        self.project = nn.Linear(width, channels)
        if init == "identity":
            nn.init.zeros_(self.project.weight)
            nn.init.zeros_(self.project.bias)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        features, gather, distribute = (
            pointwise(x, layer.weight, layer.bias) for layer in (self.feature, self.gather, self.distribute)
        )
        gather = gather.to(torch.promote_types(gather.dtype, torch.float32))
        if mask is None:
            gather = gather.softmax(1)
        else:  # a number, not infinity: of a sample without a position nothing is gathered
            gather = gather.masked_fill(~mask[..., None], torch.finfo(gather.dtype).min).softmax(1)
            gather = gather.masked_fill(~mask[..., None], 0)
        gathered = gather.to(features.dtype).mT @ features
        return x + pointwise(distribute.softmax(-1) @ gathered, self.project.weight, self.project.bias)

    def macs(self, positions: int) -> int:
        width, slots = self.feature.out_features, self.gather.out_features
        return 2 * positions * (self.channels * (width + slots) + width * slots)
