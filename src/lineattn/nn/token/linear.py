r"""Linear attention: softmax attention with a product of feature maps in the place of the exponential.

"Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (Katharopoulos, Vyas, Pappas, Fleuret;
ICML 2020), arXiv 2006.16236.

.. math::
    o_t = \frac{\varphi(q_t) \sum_{s \le t} \varphi(k_s)^\top v_s}{\varphi(q_t) \sum_{s \le t} \varphi(k_s)^\top},
    \qquad \varphi(y) = \mathrm{elu}(y) + 1

Nothing is ever forgotten: the decay is one. Cost O(T); state O(1).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.nn.token.base import Row
from lineattn.nn.token.recurrent import Parts, Recurrent
from lineattn.registry import register


@register(
    "linear_attention",
    axis="token",
    title="Linear attention",
    paper="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention (2020)",
    arxiv="2006.16236",
    cost="O(T)",
    state="O(1)",
)
class LinearAttention(Recurrent):
    r"""Attention by positive features of queries and keys, whose sums are the state.

    .. math::
        y_t = \frac{\varphi(q_t) S_t}{\varphi(q_t) z_t} W_o, \qquad
        S_t = S_{t-1} + \varphi(k_t)^\top v_t, \quad z_t = z_{t-1} + \varphi(k_t)^\top, \quad
        \varphi(y) = \mathrm{elu}(y) + 1

    The normaliser :math:`z` is the last column of the state, that of a value which is one. :math:`4 C^2` parameters.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Example:
        >>> import torch
        >>> mixer = LinearAttention(64, heads=4)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 17]))

    Reference:
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020), arXiv 2006.16236,
        equations 7 and 16-20.
    """

    row = Row(query="input", key="input", value="input", decay="one")

    def __init__(self, channels: int, heads: int = 8) -> None:
        super().__init__(channels, heads, key_width=channels, value_width=channels + heads, scale=1.0)
        self.q_proj = nn.Linear(channels, channels, bias=False)
        self.k_proj = nn.Linear(channels, channels, bias=False)
        self.v_proj = nn.Linear(channels, channels, bias=False)
        self.out_proj = nn.Linear(channels, channels, bias=False)

    def parts(self, x: Tensor) -> Parts:
        q, k, v = self._heads(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return Parts(F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0), q.new_zeros(q.shape[:3]))

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        """With attention as it is after the division, whose rows sum to one, and values without their last column."""
        found = super().weights(x)
        attention = found["attention"]
        return {**found, "v": found["v"][..., :-1], "attention": attention / attention.sum(-1, keepdim=True)}

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        # Nothing was written yet where a row has no token: zero, with a gradient that is zero too.
        out = out[..., :-1] / out[..., -1:].clamp(min=1e-12)
        return self.out_proj(out.flatten(2).to(x.dtype))
