r"""Mamba-2: a selective state space whose decay is one number a head, which makes it attention with a mask.

"Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality" (Dao, Gu;
ICML 2024), arXiv 2405.21060.

.. math::
    S_t = e^{\Delta_t A} S_{t-1} + \Delta_t B_t^\top x_t, \qquad o_t = C_t S_t + D x_t, \qquad
    \Delta_t = \mathrm{softplus}(x_t W_\Delta + b), \quad A < 0

Cost O(T); state O(1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Layout, Row
from lineattn.nn.token.recurrent import Parts, Recurrent, rms_norm, start_of_steps, wide
from lineattn.registry import register


@register(
    "mamba2",
    axis="token",
    title="Mamba-2",
    paper="Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality "
    "(2024)",
    arxiv="2405.21060",
    cost="O(T)",
    state="O(1)",
)
class Mamba2(Recurrent):
    r"""A state space of which all heads share queries and keys, and each has one decay, of the token.

    .. math::
        z, u, \delta = x W_{in}, \quad x', B, C = \mathrm{SiLU}(\mathrm{conv}_4(u) + b_c), \quad
        \Delta = \mathrm{softplus}(\delta + b_\Delta)

    .. math::
        S_t = e^{\Delta_t A} S_{t-1} + \Delta_t B_t^\top x'_t, \qquad
        y_t = \big(w \odot \mathrm{RMSNorm}((C_t S_t + D x'_t) \odot \mathrm{SiLU}(z_t))\big) W_{out}

    :math:`x'` and :math:`z` are :math:`E` wide, :math:`A` and :math:`D` are a number a head, and the norm is over all
    heads. A head's state can only be forgotten as a whole. With :math:`E = 2C`, :math:`6 C^2 + 2 C N` parameters and
    some a channel.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; they divide the channels. The paper's are 64 numbers of ``E`` wide.
        state_width: ``N``, width of queries and keys.
        expand: :math:`E / C`.
        conv: Length of the short convolution; 0 for none, and then no SiLU.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``; its recent tokens are :math:`u`, ``(B, 3, E + 2 N)``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Note:
        The parameters have the published code's names and order. Left out of it: groups of heads with queries and keys
        of their own (there is one), and bounds of :math:`\Delta`.

    Example:
        >>> mixer = Mamba2(64, heads=4, state_width=32)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 32, 32]))

    Reference:
        "Transformers are SSMs" (2024), arXiv 2405.21060, section 7.
    """

    row = Row(query="input", key="input", value="input", decay="input")

    def __init__(
        self, channels: int, heads: int = 8, *, state_width: int = 128, expand: int = 2, conv: int = 4
    ) -> None:
        for name, found in (("state_width", state_width), ("expand", expand)):
            if found < 1:
                raise InputError(f"{name} is {found}; it must be at least 1")
        inner = expand * channels
        super().__init__(
            channels,
            heads,
            key_width=heads * state_width,
            value_width=inner,
            conv=conv,
            conv_width=inner + 2 * state_width,
            conv_bias=True,
            scale=1.0,
        )
        self.widths = (inner, inner + 2 * state_width, heads)
        self.in_proj = nn.Linear(channels, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(start_of_steps(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, channels, bias=False)

    def local(self, x: Tensor, recent: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        gate, inner, steps = self.in_proj(x).split(self.widths, -1)
        inner, recent = super().local(inner, recent, layout)
        return torch.cat([gate, inner, steps], -1), recent

    def parts(self, x: Tensor) -> Parts:
        _, inner, steps = x.split(self.widths, -1)
        v, k, q = inner.split([self.value_width, *2 * [self.key_width // self.heads]], -1)
        step = F.softplus(wide(steps) + wide(self.dt_bias))
        (v,) = self._heads(v)
        k = wide(k)[:, :, None] * step[..., None]
        return Parts(wide(q)[:, :, None].expand_as(k), k, v, -wide(self.A_log).exp() * step)

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        out = (out + self.D[:, None] * parts.v).flatten(2)
        gate = x[..., : self.value_width]
        return self.out_proj(rms_norm(out * F.silu(gate), self.norm).to(x.dtype))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, state_width={self.key_width // self.heads}"
