"""The gated linear recurrence from its definition: every read is a sum over every earlier write, decayed in between."""

from __future__ import annotations

import torch
from torch import Tensor


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and final state; one decay a token, head and key channel, or one a token and head."""
    batch, tokens, heads, width = q.shape
    if g.ndim == 3:
        g = g[..., None].expand(batch, tokens, heads, width)
    decay = torch.exp(g)
    state = torch.zeros(batch, heads, width, v.shape[-1], dtype=v.dtype) if initial_state is None else initial_state
    outs = []
    for t in range(tokens):
        state = torch.einsum("bhk,bhkv->bhkv", decay[:, t], state) + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * scale)
    return torch.stack(outs, 1) if outs else v, state
