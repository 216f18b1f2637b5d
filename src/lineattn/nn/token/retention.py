r"""RetNet's retention: a recurrence whose decays are fixed numbers, one a head.

"Retentive Network: A Successor to Transformer for Large Language Models" (Sun et al., 2023), arXiv 2307.08621.

.. math::
    S_t = \gamma_h e^{-i\theta} S_{t-1} + k_t^\top v_t, \qquad o_t = \mathrm{Re}(q_t^* S_t) / \sqrt{K}, \qquad
    \gamma_h = 1 - 2^{-5-h}

How fast a head forgets depends neither on the token nor on training. Cost O(T); state O(1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Row
from lineattn.nn.token.recurrent import Parts, Recurrent, gated, head_norm
from lineattn.ops.rotary import rotate
from lineattn.registry import register


@register(
    "retention",
    axis="token",
    title="Retention (RetNet)",
    paper="Retentive Network: A Successor to Transformer for Large Language Models (2023)",
    arxiv="2307.08621",
    cost="O(T)",
    state="O(1)",
)
class Retention(Recurrent):
    r"""Multi-scale retention: rotated queries and keys, a fixed decay a head, and a gate.

    .. math::
        S_t = \gamma_h R^\top S_{t-1} + k_t^\top v_t, \qquad
        y_t = \big(\mathrm{SiLU}(x_t W_g) \odot \mathrm{LN}(q_t S_t / \sqrt{K})\big) W_o, \qquad
        \gamma_h = 1 - 2^{-5-h}

    with :math:`h` from 0, and :math:`R` the rotation of pairs of channels from one token to the next, which here
    `lineattn.ops.rotary` does to queries and keys. LN is a layer norm of each head, without weights. :math:`8 C^2`
    parameters with values twice as wide as the channels.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; the width of a head is even.
        value_width: Width of the values of all heads; twice the channels by default, as published.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``; its memory is turned to where the next token stands, so that no
          position has to be remembered and no angle grows.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Note:
        The paper divides scores by sums of decays and by their size; the norm that follows takes out every such
        factor, so they are left out.

    Example:
        >>> mixer = Retention(64, heads=4)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 32]))

    Reference:
        "Retentive Network: A Successor to Transformer for Large Language Models" (2023), arXiv 2307.08621, equations
        5-8.
    """

    row = Row(query="input", key="input", value="input", decay="fixed")

    def __init__(self, channels: int, heads: int = 8, *, value_width: int | None = None) -> None:
        width = 2 * channels if value_width is None else value_width
        super().__init__(channels, heads, key_width=channels, value_width=width)
        if (channels // heads) % 2:
            raise InputError(f"heads is {heads}; a head of {channels // heads} channels has no pairs to rotate")
        self.q_proj = nn.Linear(channels, channels, bias=False)
        self.k_proj = nn.Linear(channels, channels, bias=False)
        self.v_proj = nn.Linear(channels, width, bias=False)
        self.g_proj = nn.Linear(channels, width, bias=False)
        self.out_proj = nn.Linear(width, channels, bias=False)

    def parts(self, x: Tensor) -> Parts:
        q, k, v = self._heads(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        positions = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]  # the memory stands at 0
        heads = torch.arange(self.heads, dtype=q.dtype, device=x.device)
        g = torch.log1p(-torch.exp2(-5 - heads)).expand(q.shape[:3])
        return Parts(rotate(q, positions), rotate(k, positions), v, g)

    def moved_on(self, memory: Tensor, tokens: int | Tensor) -> Tensor:
        back = -torch.as_tensor(tokens, device=memory.device)
        return rotate(memory.mT, back.reshape(-1, 1, 1)).mT

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        return gated(x, head_norm(out), self.g_proj, self.out_proj)
