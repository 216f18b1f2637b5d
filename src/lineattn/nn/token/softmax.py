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
from lineattn.nn.token.base import Form, Layout, Row, TokenMixer, exists
from lineattn.ops import packing
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

    def mix(self, x: Tensor, state: SoftmaxState | None, layout: Layout, form: Form) -> tuple[Tensor, SoftmaxState]:
        tokens, count = x.shape[1], layout.count(x)
        before = x.new_zeros(count, dtype=torch.long) if state is None else state.there.sum(1)
        if layout.cu_seqlens is not None:
            return self._mix_packed(x, state, before, layout.cu_seqlens.to(x.device), form)
        new = x.new_ones(x.shape[:2], dtype=torch.bool) if layout.lengths is None else exists(layout.lengths, tokens)
        q, keys, values = self._projected(x, before[:, None] + torch.arange(tokens, device=x.device))
        if state is None and layout.lengths is None and form in ("auto", "parallel"):
            # Without a mask, which slower kernels take.
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
            return self._read_out(out), SoftmaxState(keys, values, new)
        after = _joined(state, SoftmaxState(keys, values, new))
        allowed = after.there[:, None].expand(-1, tokens, -1)
        return self._read_out(_attended(q, after.keys, after.values, allowed, form)), after

    def _mix_packed(
        self, x: Tensor, state: SoftmaxState | None, before: Tensor, cu_seqlens: Tensor, form: Form
    ) -> tuple[Tensor, SoftmaxState]:
        tokens = x.shape[1]
        sequence, place = packing.places(cu_seqlens, tokens)
        q, keys, values = self._projected(x, (before[sequence] + place)[None])
        lengths = cu_seqlens.diff()
        new = exists(lengths, max(lengths.tolist(), default=0))
        where = (cu_seqlens[:-1, None] + torch.arange(new.shape[1], device=x.device)).clamp(max=tokens - 1)
        own_keys, own_values = (t[0][:, where].transpose(0, 1).where(new[:, None, :, None], 0) for t in (keys, values))
        after = _joined(state, SoftmaxState(own_keys, own_values, new))
        if state is None and form == "auto" and tokens and not torch.compiler.is_compiling():
            # Each by itself: a mask would have all pairs of tokens, those of different sequences too.
            parts = zip(*(t.split(lengths.tolist(), 2) for t in (q, keys, values)), strict=True)
            outs = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts if part[0].shape[2]]
            return self._read_out(torch.cat(outs, 2)), after
        of = sequence  # whose keys they are; nobody's, -1
        if state is not None:
            keys, values = (
                torch.cat([kept.transpose(0, 1).flatten(1, 2)[None], t], 2)
                for kept, t in ((state.keys, keys), (state.values, values))
            )
            rows_of = torch.arange(len(lengths), device=x.device)[:, None].where(state.there, -1)
            of = torch.cat([rows_of.flatten(), sequence])
        allowed = (sequence[:, None] == of)[None]
        return self._read_out(_attended(q, keys, values, allowed, form)), after

    def state_size(self, tokens: int) -> int:
        return tokens * (2 * self.channels + 1)

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        self._check(x)
        q, k, _ = self._projected(x, torch.arange(x.shape[1], device=x.device)[None])
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        seen = _causal(x.shape[1], x.shape[1], x.device)
        return {"attention": scores.masked_fill(~seen, -torch.inf).softmax(-1)}

    def _read_out(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _projected(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        """Queries, keys and values ``(B, h, T, D)`` at positions ``(B or 1, T)``."""
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if not self.rotary:
            return [q, k, v]
        return [rotate(q, positions[:, None]), rotate(k, positions[:, None]), v]


def _joined(state: SoftmaxState | None, new: SoftmaxState) -> SoftmaxState:
    """What was there, and behind it what is new."""
    if state is None:
        return new
    pairs = zip(state, new, (2, 2, 1), strict=True)
    return SoftmaxState(*(torch.cat([before, after], axis) for before, after, axis in pairs))


def _attended(q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, form: Form) -> Tensor:
    """Attention of the last tokens to all before them that are ``allowed``, ``(B, queries, keys)``."""
    tokens = q.shape[2]
    before = keys.shape[2] - tokens
    length = {"auto": tokens, "parallel": tokens, "chunked": _CHUNK, "loop": 1}[form]
    outs = []
    for start in range(0, max(tokens, 1), max(length, 1)):
        piece = q[:, :, start : start + length]
        end = before + start + piece.shape[2]
        seen = allowed[:, None, start : start + length, :end] & _causal(piece.shape[2], end, q.device)
        outs.append(F.scaled_dot_product_attention(piece, keys[:, :, :end], values[:, :, :end], attn_mask=seen))
    return torch.cat(outs, 2)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys the last so many tokens may see, ``(queries, keys)``."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
