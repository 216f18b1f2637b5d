"""The gated linear recurrence by matrix products of chunks of tokens: `lineattn.ops.scan.scan_chunked`.

A chunk computes for itself what its tokens read of each other, and what it writes; only the states at the starts of the
chunks are made one after another. Chunks lie in the order in which that is done: the first of every sequence, then the
second ones, and so on, as long as there is a sequence that has one. So packed sequences never meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.ops import packing
from lineattn.ops.autocast import no_autocast

# Tokens of a chunk, and of the blocks in it whose tokens meet one by one. Long chunks save steps, short blocks save
# numbers: what is between the tokens of a block takes BLOCK * K of them a token.
CHUNK, BLOCK = 64, 8


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output, ``(B, T, h, V)``, and the final state; see `lineattn.ops.scan.scan`."""
    batch, tokens = q.shape[:2]
    if state is None:
        sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        state = v.new_zeros(sequences, *q.shape[2:], v.shape[3])
    lengths = None if cu_seqlens is None else packing.lengths(cu_seqlens, tokens)
    if tokens == 0:
        return v, state
    cuts = _Dense(batch, tokens) if lengths is None else _Packed(lengths, q.device)
    q, k, v, g = (
        cuts.chunks(t).unflatten(1, (-1, BLOCK)).permute(0, 3, 1, 2, 4)
        for t in (q * scale, k, v, g if g.ndim == 4 else g[..., None])
    )  # (chunks, h, blocks, BLOCK, .)
    with no_autocast(q.device) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        out, reads, writes, kept = _within_chunks(q, k, v, g)
        pairs = writes.transpose(-1, -2) @ v.flatten(2, 3)
        before, state = _carry(cuts.longest_first(state), kept, pairs, cuts.steps)
        out = out + reads @ before
    return cuts.rows(out.transpose(1, 2)), cuts.as_given(state)


class _Dense:
    """Sequences of one length, cut into chunks of one length, the last of them filled up."""

    def __init__(self, batch: int, tokens: int) -> None:
        self.batch, self.tokens = batch, tokens
        self.chunk = _chunk_length(tokens)
        self.steps = [batch] * -(-tokens // self.chunk)

    def chunks(self, t: Tensor) -> Tensor:
        """``(B, T, h, .)`` to ``(chunks, chunk, h, .)``."""
        # A token more that writes nothing and decays nothing leaves the state as it is.
        t = F.pad(t, (0, 0, 0, 0, 0, -self.tokens % self.chunk))
        return t.unflatten(1, (-1, self.chunk)).transpose(0, 1).flatten(0, 1)

    def rows(self, t: Tensor) -> Tensor:
        """``(chunks, chunk, h, .)`` to ``(B, T, h, .)``."""
        t = t.unflatten(0, (len(self.steps), self.batch))
        return t.transpose(0, 1).flatten(1, 2)[:, : self.tokens].contiguous()

    def longest_first(self, state: Tensor) -> Tensor:
        return state

    as_given = longest_first


class _Packed:
    """Packed sequences, each cut into chunks of its own; where a chunk goes on past its sequence's end, it is empty."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        sizes = torch.tensor(lengths)
        filled = int((sizes > 0).sum())
        # So that, whatever the lengths are, no more places are empty than there are tokens and a block a sequence.
        self.chunk = _chunk_length(-(-sum(lengths) // filled))
        counts = (sizes + self.chunk - 1) // self.chunk
        order = counts.argsort(descending=True, stable=True)
        rank = order.argsort()
        steps = len(lengths) - counts.bincount().cumsum(0)[:-1]
        self.steps: list[int] = steps.tolist()
        sequence = torch.arange(len(lengths)).repeat_interleave(sizes)
        place = torch.arange(sum(lengths)) - (sizes.cumsum(0) - sizes)[sequence]
        chunk = (steps.cumsum(0) - steps)[place // self.chunk] + rank[sequence]
        self._order, self._rank = order.to(device), rank.to(device)
        self._slots = (chunk * self.chunk + place % self.chunk).to(device)

    def chunks(self, t: Tensor) -> Tensor:
        """``(1, T, h, .)`` to ``(chunks, chunk, h, .)``."""
        slots = t.new_zeros(sum(self.steps) * self.chunk, *t.shape[2:])
        return slots.index_copy(0, self._slots, t[0]).unflatten(0, (-1, self.chunk))

    def rows(self, t: Tensor) -> Tensor:
        """``(chunks, chunk, h, .)`` to ``(1, T, h, .)``."""
        return t.flatten(0, 1).index_select(0, self._slots)[None]

    def longest_first(self, state: Tensor) -> Tensor:
        return state.index_select(0, self._order)

    def as_given(self, state: Tensor) -> Tensor:
        return state.index_select(0, self._rank)


def _chunk_length(tokens: int) -> int:
    return min(CHUNK, tokens + BLOCK - 1) // BLOCK * BLOCK


def _carry(state: Tensor, kept: Tensor, pairs: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The states before each chunk, ``(chunks, h, K, V)``, and after the last one of each sequence."""
    before, ended = [], []
    for decay, written in zip(kept.split(steps), pairs.split(steps), strict=True):
        going_on = decay.shape[0]
        if going_on < state.shape[0]:
            ended.append(state[going_on:])
            state = state[:going_on]
        before.append(state)
        state = decay[..., None] * state + written
    return torch.cat(before), torch.cat([state, *reversed(ended)]) if ended else state


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunks for themselves.

    Returns:
        What a token reads of its own chunk, ``(chunks, h, chunk, V)``; queries decayed from the chunk's start, and keys
        decayed to its end, ``(chunks, h, chunk, K)``; and the whole decay, ``(chunks, h, K)``.
    """
    decays = g.cumsum(-2).exp()  # from a block's start to after a token
    rest = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()  # from after a token to a block's end
    scores = _within_blocks(q, k, g)
    outs, reads, before = [], [], torch.ones_like(decays[:, :, 0, 0])
    writes = k[:, :, 0, :0]
    for i in range(q.shape[2]):
        query = q[:, :, i] * decays[:, :, i]
        earlier = query @ writes.transpose(-1, -2) @ v[:, :, :i].flatten(2, 3)
        outs.append(earlier + scores[:, :, i] @ v[:, :, i])
        reads.append(query * before[..., None, :])
        whole = decays[:, :, i, -1]
        before = before * whole
        writes = torch.cat([writes * whole[..., None, :], k[:, :, i] * rest[:, :, i]], 2)
    return torch.cat(outs, 2), torch.cat(reads, 2), writes, before


def _within_blocks(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    r""":math:`\sum_c q_{t,c} k_{s,c} e^{g_{s+1,c} + \dots + g_{t,c}}` for :math:`s \le t`, else zero."""
    before = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril(-1)[..., None]  # s < t
    sums = g[..., :, None, :].where(before, 0).cumsum(-3)
    # Masked before the exponential, which could overflow where nobody looks, and make the gradient a NaN.
    decays = sums.masked_fill(before.transpose(0, 1), -torch.inf).exp()
    if g.shape[-1] == 1:
        return (q @ k.transpose(-1, -2)) * decays[..., 0]
    return (q[..., :, None, :] * k[..., None, :, :] * decays).sum(-1)
