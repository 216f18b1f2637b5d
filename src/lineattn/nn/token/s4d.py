r"""S4D: a state space with a diagonal, complex matrix, the same for all tokens.

"On the Parameterization and Initialization of Diagonal State Space Models" (Gu, Gupta, Goel, Ré; NeurIPS 2022), arXiv
2206.11893.

.. math::
    S_t = e^{\Delta A} S_{t-1} + A^{-1} (e^{\Delta A} - 1) \, x_t, \qquad o_t = 2 \, \mathrm{Re}(C S_t), \qquad
    A = -e^{\alpha} + i \omega

Nothing of it is read from the token but the value: queries, keys and decays are parameters. Cost O(T); state O(1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Row
from lineattn.nn.token.recurrent import Parts, Recurrent, wide
from lineattn.ops.rotary import turn
from lineattn.registry import register

# Tokens at a time. The gradient of an angle is a difference of sums that grow with the positions in a piece.
_PIECE = 32


@register(
    "s4d",
    axis="token",
    title="Diagonal state space (S4D)",
    paper="On the Parameterization and Initialization of Diagonal State Space Models (2022)",
    arxiv="2206.11893",
    cost="O(T)",
    state="O(1)",
)
class S4D(Recurrent):
    r"""A linear time-invariant filter of each channel, through states that turn and decay.

    .. math::
        S_t = e^{\Delta A} S_{t-1} + A^{-1} (e^{\Delta A} - 1) \, x_t, \qquad A_n = -e^{\alpha_n} + i \omega_n, \qquad
        y_t = \mathrm{GLU}\big(\mathrm{GELU}(2 \, \mathrm{Re}(C S_t) + D \odot x_t) W_o + b_o\big)

    with a zero-order hold of step :math:`\Delta`, and the start S4D-Lin: :math:`A_n = -1/2 + i \pi n`, and
    :math:`\log \Delta` uniform between those of 0.001 and 0.1. In the form of the other methods, the key is
    :math:`A^{-1} (e^{\Delta A} - 1)`, the query :math:`2 C` and the decay :math:`e^{\Delta A}`, with a value of one
    number a head, as each channel is a head. A complex number is a pair of real ones; :math:`\omega` turns queries and
    keys, as in `Retention`, and the decay, :math:`-\Delta e^{\alpha}`, is real. :math:`2 C^2 + 3 C` parameters, and
    :math:`2 N + 1` a head.

    Cost: the recurrence has ``N`` numbers of queries, keys and decays for each token and head. They are made and used
    for 32 tokens at a time, and made again for the gradients, so that what a training step keeps is the tokens, and a
    state for every 32 of them.

    Args:
        channels: Width ``C``.
        heads: Filters ``h``, each for ``C / h`` channels next to each other; ``None`` for one a channel, as published.
        state_width: ``N``, numbers of a channel's state, two for each complex one.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``; its memory, ``(B, h, N, C / h)``, has real and imaginary parts
          side by side, and is turned to where the next token stands.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Note:
        Left out of the published layer: the direction from the last token to the first, dropout, and a learning rate
        of their own for :math:`\Delta` and :math:`A`. It filters by Fourier transforms, in O(T log T).

    Example:
        >>> mixer = S4D(16)
        >>> out, state = mixer(torch.randn(2, 10, 16))
        >>> out.shape, state.memory.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 16, 64, 1]))

    Reference:
        "On the Parameterization and Initialization of Diagonal State Space Models" (2022), arXiv 2206.11893, sections
        3 and 4.
    """

    row = Row(query="fixed", key="fixed", value="input", decay="fixed")

    def __init__(self, channels: int, heads: int | None = None, *, state_width: int = 64) -> None:
        heads = channels if heads is None else heads
        if state_width < 2 or state_width % 2:
            raise InputError(f"state_width is {state_width}; it must be even, as its numbers are pairs")
        super().__init__(channels, heads, key_width=heads * state_width, scale=1.0, piece=_PIECE)
        pairs = state_width // 2
        self.log_dt = nn.Parameter(torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)))
        self.log_A_real = nn.Parameter(torch.full((heads, pairs), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(pairs).repeat(heads, 1).to(self.log_dt))
        self.C = nn.Parameter(torch.randn(heads, pairs, 2) * 0.5**0.5)
        self.D = nn.Parameter(torch.randn(channels))
        self.out_proj = nn.Linear(channels, 2 * channels)

    def parts(self, x: Tensor) -> Parts:
        (v,) = self._heads(x)
        decay, turns = self._step()
        # exp(z) - 1 for z = decay + i turns, with the digits of a small z; then divided by A.
        real = decay.expm1() * turns.cos() - 2 * (turns / 2).sin().square()
        imag = decay.exp() * turns.sin()
        rate, speed = self._matrix()
        k = torch.stack([speed * imag - rate * real, -speed * real - rate * imag], -1)
        k = k / (rate.square() + speed.square())[..., None]
        # Re(CS) is a product of pairs with the conjugate of C, which turns as keys do.
        q = 2 * wide(self.C) * k.new_tensor([1.0, -1.0])
        angles = -self._angles(torch.arange(1, x.shape[1] + 1, device=x.device))  # the memory stands at 0
        q, k, g = turn(q.flatten(1), angles), turn(k.flatten(1), angles), decay.repeat_interleave(2, -1)
        shape = (*v.shape[:3], q.shape[-1])
        return Parts(q.expand(shape), k.expand(shape), v, g.expand(shape))

    def moved_on(self, memory: Tensor, tokens: int | Tensor) -> Tensor:
        return turn(memory.mT, self._angles(torch.as_tensor(tokens, device=memory.device))[..., None, :]).mT

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        out = F.gelu(out.flatten(2) + self.D * x)
        return F.glu(self.out_proj(out.to(x.dtype)), -1)

    def _matrix(self) -> tuple[Tensor, Tensor]:
        """Minus the real part of A, and the imaginary one, ``(h, N / 2)``."""
        return wide(self.log_A_real).exp(), wide(self.A_imag)

    def _step(self) -> tuple[Tensor, Tensor]:
        """The real and the imaginary part of the step times A, ``(h, N / 2)``."""
        rate, speed = self._matrix()
        step = wide(self.log_dt).exp()[:, None]
        return -step * rate, step * speed

    def _angles(self, tokens: Tensor) -> Tensor:
        """By so many tokens, ``(..., h, N / 2)``; formed in float64, as those of `lineattn.ops.rotary`."""
        return tokens[..., None, None] * self._step()[1].double()

    def extra_repr(self) -> str:
        return f"heads={self.heads}, state_width={self.key_width // self.heads}"
