r"""Self-attention over positions, to compare with: every position attends to every other one.

"Attention Is All You Need" (Vaswani et al.; NeurIPS 2017), arXiv 1706.03762.

.. math::
    y = W_o\, [\mathrm{softmax}(q_k k_k^\top / \sqrt{D})\, v_k]_{k = 1 \dots h}, \qquad q, k, v = W x

Cost O(N²); no state.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.sample.base import SampleAttention, pointwise
from lineattn.registry import register


@register(
    "self_attention",
    axis="sample",
    title="Self-attention",
    paper="Attention Is All You Need (2017)",
    arxiv="1706.03762",
    cost="O(N^2)",
    state="none",
)
class SelfAttention(SampleAttention):
    r"""Multi-head self-attention by PyTorch's own kernel, without a residual, as a transformer's.

    .. math:: y = W_o\, [\mathrm{softmax}(q_k k_k^\top / \sqrt{D})\, v_k]_{k = 1 \dots h} + b_o

    :math:`4 C^2 + 4 C` parameters, :math:`4 C^2 + 2 C N` MACs a position.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``.

    Shape:
        - ``x``: ``(B, N, C)`` or ``(B, C, H, W)``; ``mask``: ``(B, N)`` or ``(B, H, W)`` of booleans, true where there
          is a position.
        - Returns the shape of ``x``.

    Example:
        >>> import torch
        >>> SelfAttention(64, 4)(torch.randn(2, 49, 64)).shape
        torch.Size([2, 49, 64])

    Reference:
        "Attention Is All You Need" (2017), arXiv 1706.03762, section 3.2.
    """

    def __init__(self, channels: int, heads: int = 8) -> None:
        super().__init__(channels)
        if heads < 1 or channels % heads:
            raise InputError(f"heads is {heads}; it must divide the {channels} channels")
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = pointwise(x, self.qkv.weight, self.qkv.bias).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = None if mask is None else mask[:, None, None]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return pointwise(found.transpose(1, 2).flatten(2), self.project.weight, self.project.bias)

    def macs(self, positions: int) -> int:
        return self_attention_macs(self.channels, positions)


def self_attention_macs(channels: int, positions: int) -> int:
    """Multiply-accumulates of a self-attention, whatever its heads.

    Example:
        >>> self_attention_macs(256, 197)
        71512576
    """
    return positions * channels * (4 * channels + 2 * positions)
