r"""The published form of KCLA, frozen: what our own is timed against.

The state is the sum of weighted maps and the sum of the weights, as in the paper's algorithm 1 and the code released
for classification:

.. math::
    w_t = e^{\min(P \lVert k_t \rVert,\, 10)}, \qquad
    U_t = U_{t-1} + w_t x_t, \qquad
    Z_t = Z_{t-1} + w_t, \qquad
    o_t = \mathrm{ReLU}\Big(\mathrm{BN}\Big(\sigma(\Phi \rho_t) \odot V_t * \frac{U_t}{Z_t + 10^{-3}}\Big)\Big)

Written from the formulas in the released code's order, one operator after the other, each leaving to autograd what it
needs: five maps a layer. It is not made faster when ours is, and shares no code with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class PublishedKCLA(nn.Module):
    """One layer; its parameters have the names and shapes of ``KCLA(variant="ref-cls", init="paper")``.

    Args:
        channels: Width of the map.
        head_dim: Width of a head; it divides ``channels``.
        drop_path: Probability of leaving out the attention of a sample in training.

    Shape:
        - ``x``: ``(B, C, H, W)``.
        - ``state``: ``U`` ``(B, h, D, H, W)`` and ``Z`` ``(B, h, 1, 1, 1)``, or ``None`` at the first layer.
        - Returns ``x + o`` and the new state.
    """

    temperature: Tensor

    def __init__(self, channels: int, head_dim: int, *, drop_path: float = 0.2) -> None:
        super().__init__()
        self.head_dim, self.head_count, self.drop_path = head_dim, channels // head_dim, drop_path
        taps = int(abs((math.log2(channels) + 1) / 2))
        taps += 1 - taps % 2
        self.query = nn.Conv1d(1, 1, taps, padding=taps // 2, bias=False)
        self.key = nn.Conv1d(1, 1, taps, padding=taps // 2, bias=False)
        self.value = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.gate = nn.Linear(self.head_count, self.head_count, bias=False)
        for layer in (self.query, self.key, self.gate):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.kaiming_normal_(self.value.weight, mode="fan_out", nonlinearity="relu")
        softest, sharpest = math.log(0.7), -math.log(0.7)
        spread = torch.linspace(softest, sharpest, self.head_count) if self.head_count > 1 else torch.zeros(1)
        self.register_buffer("temperature", spread.exp(), persistent=False)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, c, height, width = x.shape
        y = nn.functional.adaptive_avg_pool2d(x, 1).view(b, 1, c)
        q = self.query(y).view(b, self.head_count, self.head_dim)
        k = self.key(y).view(b, self.head_count, self.head_dim)
        length = torch.norm(k, dim=-1)
        weight = torch.exp(torch.clamp(length * self.temperature, max=10)).view(b, self.head_count, 1, 1, 1)

        weighted = weight * x.view(b, self.head_count, self.head_dim, height, width)
        u, z = (weighted, weight) if state is None else (state[0] + weighted, state[1] + weight)
        read = (u / (z + 1e-3)).reshape(b, c, height, width)

        rho = (q * k / length[..., None]).sum(-1)
        gate = torch.sigmoid(self.gate(rho)).view(b, self.head_count, 1, 1, 1)
        values = self.value(read).view(b, self.head_count, self.head_dim, height, width)
        out = torch.relu(self.norm((gate * values).reshape(b, c, height, width)))
        return x + self._dropped(out), (u, z)

    def _dropped(self, out: Tensor) -> Tensor:
        if not self.training or not self.drop_path:
            return out
        keep = 1 - self.drop_path
        return out * out.new_empty(len(out), 1, 1, 1).bernoulli_(keep).div_(keep)
