r"""Softmax attention to all earlier tokens, to compare with: each is kept.

"Attention Is All You Need" (Vaswani et al.; NeurIPS 2017), arXiv 1706.03762.

.. math::
    o_t = \sum_{s \le t} \mathrm{softmax}_s(\langle q_t, k_s \rangle / \sqrt{D})\, v_s

Cost O(T²); state O(T): keys and values of all tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Form, Row, TokenMixer, exists
from lineattn.ops.rotary import rotate
from lineattn.registry import register

# Queries at a time of the form "chunked".
_CHUNK = 64


class SoftmaxState(NamedTuple):
    """All earlier tokens.

    Attributes:
        keys: Rotated, ``(B, h, N, D)``.
        values: ``(B, h, N, D)``.
        there: Which of them there are, ``(B, N)``; rows may have come to different lengths.
    """

    keys: Tensor
    values: Tensor
    there: Tensor


@register(
    "softmax_attention",
    axis="token",
    title="Softmax attention",
    paper="Attention Is All You Need (2017)",
    arxiv="1706.03762",
    cost="O(T^2)",
    state="O(T)",
)
class SoftmaxAttention(TokenMixer):
    r"""Multi-head causal attention by PyTorch's own kernel.

    .. math:: y_t = \Big(\sum_{s \le t} \mathrm{softmax}_s(\langle R_t q_t, R_s k_s \rangle / \sqrt{D})\, v_s\Big) W_o

    :math:`R` rotates by a token's position (`lineattn.ops.rotary`), as in LLaMA. :math:`4 C^2` parameters.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``.
        rotary: Positions as rotations, for which the width of a head is even; if not, keys don't tell how far they are.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `SoftmaxState` or ``None``.
        - Returns ``(B, T, C)`` and the new `SoftmaxState`, ``T`` tokens longer.

    Example:
        >>> mixer = SoftmaxAttention(64, heads=4)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.keys.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 10, 16]))

    Reference:
        "Attention Is All You Need" (2017), arXiv 1706.03762, section 3.2.
    """

    row = Row(query="input", key="input", value="input", decay="one")

    def __init__(self, channels: int, heads: int = 8, *, rotary: bool = True) -> None:
        super().__init__(channels, heads)
        if rotary and (channels // heads) % 2:
            raise InputError(f"heads is {heads}; a head of {channels // heads} channels has no pairs to rotate")
        self.rotary = rotary
        self.q_proj = nn.Linear(channels, channels, bias=False)
        self.k_proj = nn.Linear(channels, channels, bias=False)
        self.v_proj = nn.Linear(channels, channels, bias=False)
        self.out_proj = nn.Linear(channels, channels, bias=False)

    def mix(
        self, x: Tensor, state: SoftmaxState | None, lengths: Tensor | None, form: Form
    ) -> tuple[Tensor, SoftmaxState]:
        tokens = x.shape[1]
        new = x.new_ones(x.shape[:2], dtype=torch.bool) if lengths is None else exists(lengths, tokens)
        if state is not None and state.there.shape[0] != x.shape[0]:
            raise InputError(f"state: it has {state.there.shape[0]} rows, and x has {x.shape[0]}")
        before = 0 if state is None else state.there.shape[1]
        q, keys, values = self._projected(x, None if state is None else state.there.sum(1))
        there = new
        if state is not None:
            keys, values = torch.cat([state.keys, keys], 2), torch.cat([state.values, values], 2)
            there = torch.cat([state.there, new], 1)
        length = {"auto": tokens, "parallel": tokens, "chunked": _CHUNK, "loop": 1}[form]
        if state is None and lengths is None and length == tokens:  # without a mask, which slower kernels take
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
            return self._read_out(out), SoftmaxState(keys, values, there)
        outs = []
        for start in range(0, max(tokens, 1), max(length, 1)):
            piece = q[:, :, start : start + length]
            end = before + start + piece.shape[2]
            seen = there[:, None, None, :end] & _causal(piece.shape[2], end, x.device)
            outs.append(F.scaled_dot_product_attention(piece, keys[:, :, :end], values[:, :, :end], attn_mask=seen))
        return self._read_out(torch.cat(outs, 2)), SoftmaxState(keys, values, there)

    def state_size(self, tokens: int) -> int:
        return tokens * (2 * self.channels + 1)

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        self._check(x)
        q, k, _ = self._projected(x, None)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        seen = _causal(x.shape[1], x.shape[1], x.device)
        return {"attention": scores.masked_fill(~seen, -torch.inf).softmax(-1)}

    def _read_out(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _projected(self, x: Tensor, before: Tensor | None) -> list[Tensor]:
        """Queries, keys and values ``(B, h, T, D)`` behind so many tokens, ``(B,)``."""
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if not self.rotary:
            return [q, k, v]
        positions = torch.arange(x.shape[1], device=x.device)
        if before is not None:
            positions = before[:, None, None] + positions
        return [rotate(q, positions), rotate(k, positions), v]


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys the last so many tokens may see, ``(queries, keys)``."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
