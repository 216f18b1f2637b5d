r"""Gated linear attention (GLA): keys, and a decay a key channel that depends on the token.

"Gated Linear Attention Transformers with Hardware-Efficient Training" (Yang, Wang, Shen, Panda, Kim; ICML 2024), arXiv
2312.06635.

.. math::
    S_t = \mathrm{diag}(a_t) \, S_{t-1} + k_t^\top v_t, \qquad o_t = q_t S_t / \sqrt{K}, \qquad
    a_t = \sigma(x_t W_1 W_2 + b)^{1/16}

Cost O(T); state O(1).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Row
from lineattn.nn.token.recurrent import Parts, Recurrent, gated, head_norm
from lineattn.registry import register


@register(
    "gla",
    axis="token",
    title="Gated linear attention",
    paper="Gated Linear Attention Transformers with Hardware-Efficient Training (2024)",
    arxiv="2312.06635",
    cost="O(T)",
    state="O(1)",
)
class GLA(Recurrent):
    r"""Linear attention that forgets by what it reads.

    .. math::
        S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1} + k_t^\top v_t, \qquad g_t = \log \sigma(x_t W_1 W_2 + b) / \tau

    .. math:: y_t = \big(\mathrm{SiLU}(x_t W_r + b_r) \odot \mathrm{LN}(q_t S_t / \sqrt{K})\big) W_o

    Queries and keys are half as wide as the channels, the decays come through ``rank`` numbers, and LN is a layer norm
    of each head, without weights. :math:`4 C^2 + 1.5 C + 24 C` parameters at rank 16.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``.
        key_width: Width of queries, keys and decays of all heads; half the channels by default.
        rank: Width between the two maps that make a decay.
        tau: :math:`\tau`; where the logit is zero, what is there is halved in so many tokens.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Example:
        >>> import torch
        >>> mixer = GLA(64, heads=4)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 8, 16]))

    Reference:
        "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024), arXiv 2312.06635, section 4.4.
    """

    row = Row(query="input", key="input", value="input", decay="input")

    def __init__(
        self, channels: int, heads: int = 4, *, key_width: int | None = None, rank: int = 16, tau: float = 16.0
    ) -> None:
        width = channels // 2 if key_width is None else key_width
        super().__init__(channels, heads, key_width=width)
        if rank < 1:
            raise InputError(f"rank is {rank}; it must be at least 1")
        if tau <= 0:
            raise InputError(f"tau is {tau}; it must be positive")
        self.tau = tau
        self.q_proj = nn.Linear(channels, width, bias=False)
        self.k_proj = nn.Linear(channels, width, bias=False)
        self.v_proj = nn.Linear(channels, channels, bias=False)
        self.decay = nn.Sequential(nn.Linear(channels, rank, bias=False), nn.Linear(rank, width))
        self.g_proj = nn.Linear(channels, channels)
        self.out_proj = nn.Linear(channels, channels, bias=False)

    def parts(self, x: Tensor) -> Parts:
        q, k, v, logits = self._heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.decay(x))
        return Parts(q, k, v, F.logsigmoid(logits) / self.tau)

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        return gated(x, head_norm(out), self.g_proj, self.out_proj)
