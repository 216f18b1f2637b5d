r"""Self-attention as generators have it (SAGAN), to compare with: narrow queries and keys, one head, a learned gate.

"Self-Attention Generative Adversarial Networks" (Zhang, Goodfellow, Metaxas, Odena; ICML 2019), arXiv 1805.08318. The
position attention of "Dual Attention Network for Scene Segmentation" (DANet), arXiv 1809.02983, is the same.

.. math:: y = x + \gamma\, \mathrm{softmax}(q k^\top)\, v

Cost O(N²); no state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.nn.depth.base import Init
from lineattn.nn.sample.base import SampleAttention, check_init, pointwise
from lineattn.registry import register


@register(
    "sagan",
    axis="sample",
    title="SAGAN's self-attention",
    paper="Self-Attention Generative Adversarial Networks (2019)",
    arxiv="1805.08318",
    cost="O(N^2)",
    state="none",
    no_gradient=(("key.bias", "the same for all keys, in the logits of a query, which the softmax cancels"),),
)
class SAGANAttention(SampleAttention):
    r"""Self-attention of one head with queries and keys of an eighth of the width, behind a gate: a residual block.

    .. math:: y = x + \gamma\, \mathrm{softmax}(q k^\top)\, v, \qquad \gamma = 0 \text{ at the start}

    :math:`\frac54 (C^2 + C) + 1` parameters, :math:`\frac54 C^2 + \frac98 C N` MACs a position.

    Args:
        channels: Width ``C``.
        init: The gate starts at zero in both; here for the sake of `lineattn.attach`.

    Shape:
        - ``x``: ``(B, C, H, W)`` or ``(B, N, C)``; ``mask``: ``(B, H, W)`` or ``(B, N)`` of booleans, true where there
          is a position.
        - Returns the shape of ``x``.

    Example:
        >>> block = SAGANAttention(512)
        >>> sum(p.numel() for p in block.parameters())
        328321

    Reference:
        "Self-Attention Generative Adversarial Networks" (2019), arXiv 1805.08318, equations 1-3.
    """

    residual = True

    def __init__(self, channels: int, *, init: Init = "paper") -> None:
        super().__init__(channels)
        check_init(init)
        narrow = max(1, channels // 8)
        self.query, self.key = nn.Linear(channels, narrow), nn.Linear(channels, narrow)
        self.value = nn.Linear(channels, channels)
        self.gate = nn.Parameter(torch.zeros(()))

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        # With an axis of one head: without it, there is no such operator in ONNX.
        q, k, v = (pointwise(x, layer.weight, layer.bias)[:, None] for layer in (self.query, self.key, self.value))
        seen = None if mask is None else mask[:, None, None]
        return x + self.gate.to(x.dtype) * F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)[:, 0]

    def macs(self, positions: int) -> int:
        narrow = self.query.out_features
        return positions * (narrow + self.channels) * (self.channels + positions) + positions * narrow * self.channels
