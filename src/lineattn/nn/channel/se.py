r"""Squeeze-and-excitation: a gate a channel from the pooled branch, by two linear layers.

"Squeeze-and-Excitation Networks" (Hu, Shen, Albanie, Sun, Wu; CVPR 2018), arXiv 1709.01507.

.. math:: \tilde b = \sigma(W_2\, \mathrm{ReLU}(W_1\, \mathrm{GAP}(b) + b_1) + b_2) \odot b

No layer sees another one: a baseline for attention over depth. Cost O(L); no state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lineattn.nn.channel.gate import ChannelGate, squeezed
from lineattn.nn.depth.base import Init, Site
from lineattn.ops.channels import linear, pool
from lineattn.registry import register


@register(
    "se",
    axis="depth",
    title="Squeeze-and-excitation",
    paper="Squeeze-and-Excitation Networks (2018)",
    arxiv="1709.01507",
    cost="O(L)",
    state="none",
    start="each block's branch is multiplied by a gate near 1/2",
)
class SE(ChannelGate):
    r"""A gate a channel from all channels of the same branch.

    .. math:: \tilde b = \sigma(W_2\, \mathrm{ReLU}(W_1\, \mathrm{GAP}(b) + b_1) + b_2) \odot b

    with :math:`W_1` from ``C`` to ``C / reduction`` channels (rounded down, at least 8) and :math:`W_2` back.
    Cost O(L) for a network of L layers; no state.

    Args:
        site: Where the module stands.
        reduction: Width of the branch over that of the hidden layer.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: the branch, ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: ``None``.
        - Returns ``(B, C, H, W)`` and ``None``.

    Example:
        >>> attention = SE(Site(channels=32), init="paper")
        >>> branch = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(branch, None, None)
        >>> bool((out.abs() < branch.abs()).all()), state
        (True, None)

    Reference:
        "Squeeze-and-Excitation Networks" (2018), arXiv 1709.01507, equations 2-4.
    """

    def __init__(self, site: Site, *, reduction: int = 16, init: Init = "identity") -> None:
        super().__init__(site, init=init)
        hidden = squeezed(site.channels, reduction)
        self.squeeze = nn.Linear(site.channels, hidden)
        self.excite = nn.Linear(hidden, site.channels)

    def forward(self, out: Tensor, shortcut: Tensor | None, state: None) -> tuple[Tensor, None]:
        return self._gated(out, self.weights(out, shortcut, state)["gate"]), None

    def weights(self, out: Tensor, shortcut: Tensor | None, state: None) -> dict[str, Tensor]:
        """``gate`` ``(B, C)``, at least float32."""
        hidden = torch.relu(linear(pool(out), self.squeeze.weight, self.squeeze.bias))
        return {"gate": torch.sigmoid(linear(hidden, self.excite.weight, self.excite.bias))}
