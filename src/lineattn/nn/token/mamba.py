r"""Mamba: a selective state space, whose steps, and with them decays, depend on the token, channel by channel.

"Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (Gu, Dao; COLM 2024), arXiv 2312.00752.

.. math::
    S_t = e^{\Delta_t A} \odot S_{t-1} + (\Delta_t x_t) B_t^\top, \qquad o_t = S_t C_t + D \odot x_t, \qquad
    \Delta_t = \mathrm{softplus}(x_t W_1 W_2 + b), \quad A < 0

Cost O(T); state O(1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Layout, Row
from lineattn.nn.token.recurrent import Parts, Recurrent, start_of_steps, wide
from lineattn.registry import register

# Tokens at a time: a chunk of `lineattn.ops.scan_chunked`, which fewer would not fill.
_PIECE = 64


@register(
    "mamba",
    axis="token",
    title="Mamba",
    paper="Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023)",
    arxiv="2312.00752",
    cost="O(T)",
    state="O(1)",
)
class Mamba(Recurrent):
    r"""A state space with a decay for each channel and number of its state, of the token.

    .. math::
        u, z = x W_{in}, \quad x' = \mathrm{SiLU}(\mathrm{conv}_4(u) + b_c), \quad
        r, B, C = x' W_x, \quad \Delta = \mathrm{softplus}(r W_\Delta + b_\Delta)

    .. math::
        S_t = e^{\Delta_t A} \odot S_{t-1} + \Delta_t B_t^\top x'_t, \qquad
        y_t = \big((C_t S_t + D \odot x'_t) \odot \mathrm{SiLU}(z_t)\big) W_{out}

    :math:`x'` and :math:`z` are :math:`E` wide, and each channel of :math:`x'` is a head: its value is one number, its
    step :math:`\Delta` and its row of :math:`A` are its own, while :math:`B` and :math:`C`, keys and queries, are those
    of all. :math:`A` starts as :math:`-1, \dots, -N`. With :math:`E = 2C`, :math:`6 C^2 + 2 C (2 R + 3 N)` parameters
    and some a channel.

    Cost: for the recurrence (`lineattn.ops.scan`), which knows one decay a key and not one a key and value, queries,
    keys and decays are :math:`3 h N` numbers a token, 48 times as many as values. They are made and used for 64 tokens
    at a time, and made again for the gradients, as the published kernel does it too: a training step keeps the tokens,
    and a state for every 64 of them. Fewer heads than channels, which then share steps and :math:`A`, cost less.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; they divide ``E``, and ``E`` by default, as published.
        state_width: ``N``, width of queries and keys.
        expand: :math:`E / C`.
        rank: ``R``, width of what steps are made from; a sixteenth of the channels by default, rounded up.
        conv: Length of the short convolution; 0 for none, and then no SiLU.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``; its recent tokens are :math:`u`, ``(B, 3, E)``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Note:
        The parameters have the published code's names and order. Left out of it: an initial :math:`\Delta` of at least
        0.0001.

    Example:
        >>> mixer = Mamba(64)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128, 16, 1]))

    Reference:
        "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), arXiv 2312.00752, algorithm 2 and
        section 3.4.
    """

    row = Row(query="input", key="input", value="input", decay="input")

    def __init__(
        self,
        channels: int,
        heads: int | None = None,
        *,
        state_width: int = 16,
        expand: int = 2,
        rank: int | None = None,
        conv: int = 4,
    ) -> None:
        rank = -(-channels // 16) if rank is None else rank
        for name, found in (("state_width", state_width), ("expand", expand), ("rank", rank)):
            if found < 1:
                raise InputError(f"{name} is {found}; it must be at least 1")
        inner = expand * channels
        heads = inner if heads is None else heads
        super().__init__(
            channels,
            heads,
            divided=inner,
            key_width=heads * state_width,
            value_width=inner,
            conv=conv,
            conv_width=inner,
            conv_bias=True,
            piece=_PIECE,
            scale=1.0,
        )
        self.rank, self.state_width = rank, state_width
        self.in_proj = nn.Linear(channels, 2 * inner, bias=False)
        self.x_proj = nn.Linear(inner, rank + 2 * state_width, bias=False)
        self.dt_proj = nn.Linear(rank, heads)
        self.A_log = nn.Parameter(torch.arange(1, state_width + 1).repeat(heads, 1).to(self.dt_proj.bias).log())
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, channels, bias=False)
        with torch.no_grad():
            self.dt_proj.bias.copy_(start_of_steps(heads))

    def local(self, x: Tensor, recent: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        inner, gate = self.in_proj(x).chunk(2, -1)
        inner, recent = super().local(inner, recent, layout)
        return torch.cat([inner, gate], -1), recent

    def parts(self, x: Tensor) -> Parts:
        inner = x[..., : self.value_width]
        rank, k, q = self.x_proj(inner).split([self.rank, self.state_width, self.state_width], -1)
        step = F.softplus(wide(self.dt_proj(rank)))[..., None]
        (v,) = self._heads(inner)
        k = wide(k)[:, :, None] * step
        return Parts(wide(q)[:, :, None].expand_as(k), k, v, -wide(self.A_log).exp() * step)

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        inner, gate = x.chunk(2, -1)
        out = out.flatten(2) + self.D * inner
        return self.out_proj((out * F.silu(gate)).to(x.dtype))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, state_width={self.state_width}, rank={self.rank}"
