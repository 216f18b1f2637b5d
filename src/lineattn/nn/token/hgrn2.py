r"""HGRN2: a gated recurrent network with a matrix for a state, which writes what it forgets.

"HGRN2: Gated Linear RNNs with State Expansion" (Qin, Yang, Sun, Shen, Li, Sun, Zhong; COLM 2024), arXiv 2404.07904.

.. math::
    S_t = \mathrm{diag}(a_t) \, S_{t-1} + (1 - a_t)^\top v_t, \qquad o_t = q_t S_t, \qquad
    a_t = \beta + (1 - \beta) \, \sigma(x_t W_f)

Keys are one minus decays, as MetaLA's; what remembers for long is said by a bound of the decays, not by their
sixteenth root. Cost O(T); state O(1).
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Row
from lineattn.nn.token.recurrent import Parts, Recurrent, rms_norm
from lineattn.registry import register


@register(
    "hgrn2",
    axis="token",
    title="HGRN2",
    paper="HGRN2: Gated Linear RNNs with State Expansion (2024)",
    arxiv="2404.07904",
    cost="O(T)",
    state="O(1)",
)
class HGRN2(Recurrent):
    r"""Linear attention whose keys are one minus its decays, and whose decays have a lower bound.

    .. math::
        S_t = \mathrm{diag}(a_t) \, S_{t-1} + (1 - a_t)^\top v_t, \qquad
        a_t = \beta + (1 - \beta) \, \sigma(x_t W_f)

    .. math:: y_t = \big(w \odot \mathrm{RMSNorm}(\mathrm{SiLU}(x_t W_q) \, S_t)\big) W_o

    The norm is over the channels of all heads. :math:`4 C^2 + C` parameters.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; the paper's are 128 channels wide.
        lower_bound: :math:`\beta`, from 0 to below 1: a decay is never smaller. In the paper it grows with depth, so
            that upper layers remember for longer; the first layer's is 0.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Note:
        The paper learns the bounds of all layers together, as a cumulative softmax over depth; here a layer is told
        its own.

    Example:
        >>> import torch
        >>> mixer = HGRN2(64, heads=4, lower_bound=0.5)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]))
        >>> bool(mixer.parts(torch.randn(2, 10, 64)).g.exp().min() >= 0.5)
        True

    Reference:
        "HGRN2: Gated Linear RNNs with State Expansion" (2024), arXiv 2404.07904, section 3.
    """

    row = Row(query="input", key="decay", value="input", decay="input")

    def __init__(self, channels: int, heads: int = 8, *, lower_bound: float = 0.0) -> None:
        super().__init__(channels, heads, key_width=channels, scale=1.0)
        if not 0 <= lower_bound < 1:
            raise InputError(f"lower_bound is {lower_bound}; it must be from 0 to below 1")
        self.lower_bound = lower_bound
        self.q_proj = nn.Linear(channels, channels, bias=False)
        self.f_proj = nn.Linear(channels, channels, bias=False)
        self.i_proj = nn.Linear(channels, channels, bias=False)
        self.norm = nn.RMSNorm(channels, eps=1e-5)
        self.out_proj = nn.Linear(channels, channels, bias=False)

    def parts(self, x: Tensor) -> Parts:
        q, logits, v = self._heads(self.q_proj(x), self.f_proj(x), self.i_proj(x))
        # The decay is sigmoid(z) / sigmoid(z - log(bound)): its logarithm so keeps its digits at either end.
        bound = math.log(self.lower_bound) if self.lower_bound else -math.inf
        g = F.logsigmoid(logits) - F.logsigmoid(logits - bound)
        return Parts(F.silu(q), -g.expm1(), v, g)

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        return self.out_proj(rms_norm(out.flatten(2), self.norm).to(x.dtype))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, lower_bound={self.lower_bound}"
