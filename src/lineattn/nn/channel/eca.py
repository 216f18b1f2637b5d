r"""Efficient channel attention: a gate a channel from the pooled branch, by one small convolution over the channels.

"ECA-Net: Efficient Channel Attention for Deep Convolutional Neural Networks" (Wang, Wu, Zhu, Li, Zuo, Hu; CVPR 2020),
arXiv 1910.03151.

.. math:: \tilde b = \sigma(\mathrm{Conv1d}_k(\mathrm{GAP}(b))) \odot b, \qquad
    k = \lfloor |\log_2 C + 1| / 2 \rfloor \text{ made odd}

No layer sees another one: a baseline for attention over depth. Cost O(L); no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.nn.channel.gate import ChannelGate
from lineattn.nn.common import ChannelConv
from lineattn.nn.depth.base import Init, Site
from lineattn.ops.channels import pool
from lineattn.registry import register


@register(
    "eca",
    axis="depth",
    title="Efficient channel attention",
    paper="ECA-Net: Efficient Channel Attention for Deep Convolutional Neural Networks (2020)",
    arxiv="1910.03151",
    cost="O(L)",
    state="none",
    start="each block's branch is multiplied by a gate near 1/2",
)
class ECA(ChannelGate):
    r"""A gate a channel from its neighbours in the same branch.

    .. math:: \tilde b = \sigma(\mathrm{Conv1d}_k(\mathrm{GAP}(b))) \odot b

    Cost O(L) for a network of L layers, ``k`` parameters a layer; no state.

    Args:
        site: Where the module stands.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: the branch, ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: ``None``.
        - Returns ``(B, C, H, W)`` and ``None``.

    Example:
        >>> attention = ECA(Site(channels=32), init="paper")
        >>> branch = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(branch, None, None)
        >>> bool((out.abs() < branch.abs()).all()), state
        (True, None)

    Reference:
        "ECA-Net" (2020), arXiv 1910.03151, section 3.2.
    """

    def __init__(self, site: Site, *, init: Init = "identity") -> None:
        super().__init__(site, init=init)
        self.conv = ChannelConv(site.channels)

    def forward(self, out: Tensor, shortcut: Tensor | None, state: None) -> tuple[Tensor, None]:
        return self._gated(out, self.weights(out, shortcut, state)["gate"]), None

    def weights(self, out: Tensor, shortcut: Tensor | None, state: None) -> dict[str, Tensor]:
        """``gate`` ``(B, C)``, at least float32."""
        return {"gate": torch.sigmoid(self.conv(pool(out)))}
