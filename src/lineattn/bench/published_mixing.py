r"""The published forms of softmax attention over depth, frozen: what saved bytes are counted of beside our own.

.. math::
    O_t = \sum_{s \le t} a_{t,s}\, v_s, \qquad
    a_t = \mathrm{softmax}_s(\langle q_t, k_s \rangle / \sqrt{D}), \qquad
    o_t = \mathrm{ReLU}(\mathrm{BN}(O_t))

In standard layer attention :math:`k_s, v_s` are made by layer :math:`t` from all outputs of the stage so far; in
MRLA-base each layer has made them for itself. Both are written as their formulas are, with a cache that every layer
concatenates to a longer one and reads by a product of matrices. Autograd then keeps what was read at each layer, which
is ``t`` maps at the ``t``-th: ``T (T + 1) / 2`` for a stage of ``T`` layers with MRLA-base, and twice that with
standard layer attention, whose value convolution reads all the maps again.

Not made leaner when ours are, and no code is shared with them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class _PublishedSoftmax(nn.Module):
    """What both have: parameters with the names and shapes of ours with ``init="paper"``, the read, and the tail.

    Args:
        channels: Width of the map.
        head_dim: Width of a head; it divides ``channels``.
        drop_path: Probability of leaving out the attention of a sample in training.
    """

    def __init__(self, channels: int, head_dim: int, *, drop_path: float = 0.2) -> None:
        super().__init__()
        self.head_dim, self.head_count, self.drop_path = head_dim, channels // head_dim, drop_path
        taps = int(abs((math.log2(channels) + 1) / 2))
        taps += 1 - taps % 2
        self.query = nn.Conv1d(1, 1, taps, padding=taps // 2, bias=False)
        self.key = nn.Conv1d(1, 1, taps, padding=taps // 2, bias=False)
        self.value = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        for layer in (self.query, self.key):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.kaiming_normal_(self.value.weight, mode="fan_out", nonlinearity="relu")

    def _attended(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``(B, C, H, W), (B, L, C), (B, L, C, H, W) -> (B, C, H, W)``."""
        b, layers = keys.shape[:2]
        q = self.query(x.mean((2, 3))[:, None]).reshape(b, 1, self.head_count, self.head_dim).transpose(1, 2)
        k = keys.reshape(b, layers, self.head_count, self.head_dim).transpose(1, 2)
        share = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.head_dim), dim=-1)
        by_head = values.reshape(b, layers, self.head_count, -1).transpose(1, 2)
        out = torch.relu(self.norm((share @ by_head).reshape(x.shape)))
        if self.training and self.drop_path:
            keep = 1 - self.drop_path
            out = out * out.new_empty(b, 1, 1, 1).bernoulli_(keep).div_(keep)
        return x + out


class PublishedLayerSoftmax(_PublishedSoftmax):
    """One layer of standard layer attention; see the module's text.

    Shape:
        - ``x``: ``(B, C, H, W)``.
        - ``state``: outputs of the stage's layers so far ``(B, L, C, H, W)``, or ``None`` at the first.
        - Returns ``x + o`` and the new state.
    """

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        maps = x[:, None] if state is None else torch.cat([state, x[:, None]], dim=1)
        b, layers, c, height, width = maps.shape
        keys = self.key(maps.mean((3, 4)).reshape(b * layers, 1, c)).reshape(b, layers, c)
        values = self.value(maps.reshape(b * layers, c, height, width)).reshape(b, layers, c, height, width)
        return self._attended(x, keys, values), maps


class PublishedMRLABase(_PublishedSoftmax):
    """One layer of MRLA-base; see the module's text.

    Shape:
        - ``x``: ``(B, C, H, W)``.
        - ``state``: keys ``(B, L, C)`` and values ``(B, L, C, H, W)`` of the stage's layers so far, or ``None``.
        - Returns ``x + o`` and the new state.
    """

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        key, value = self.key(x.mean((2, 3))[:, None]), self.value(x)[:, None]
        if state is not None:
            key, value = torch.cat([state[0], key], dim=1), torch.cat([state[1], value], dim=1)
        return self._attended(x, key, value), (key, value)
