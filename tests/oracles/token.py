"""Attention over the tokens of a sequence, from its formulas: row by row, token by token, head by head; in float64.

A module gives its parameters and what it was built with; nothing else of it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sigmoid(y: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-y))


def silu(y: Tensor) -> Tensor:
    return y * sigmoid(y)


def of_head(y: Tensor, h: int, heads: int) -> Tensor:
    width = len(y) // heads
    return y[h * width : (h + 1) * width]


def each_row(row: Any, module: Any, x: Tensor) -> Tensor:
    """``row(module, tokens)`` on each sequence, a list of vectors in and out."""
    return torch.stack([torch.stack(row(module, list(sequence))) for sequence in x])


def convolved(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    if module.conv1d is None:
        return tokens
    filters = module.conv1d.weight[:, 0]
    length = filters.shape[1]
    out = []
    for t in range(len(tokens)):
        total = torch.zeros_like(tokens[0])
        for back in range(min(length, t + 1)):
            total = total + filters[:, length - 1 - back] * tokens[t - back]
        out.append(silu(total))
    return out


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float) -> list[Tensor]:
    """One head: rows of q, k, a of width K and of v; the state as the sum over what was written."""
    state, out = torch.zeros(k.shape[1], v.shape[1]), []
    for t in range(len(q)):
        state = a[t][:, None] * state + torch.outer(k[t], v[t])
        out.append(scale * (q[t] @ state))
    return out


def metala(module: Any, x: Tensor) -> Tensor:
    return each_row(_metala, module, x)


def _metala(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    heads = module.heads
    tokens = convolved(module, tokens)
    read = [[] for _ in tokens]
    for h in range(heads):
        q, z, v = (
            torch.stack([of_head(layer.weight @ x, h, heads) for x in tokens])
            for layer in (module.q_proj, module.k_gate, module.v_proj)
        )
        a = sigmoid(z) ** (1 / module.tau)
        k = 1 - a
        if module.k_proj is not None:
            k = torch.stack([of_head(module.k_proj.weight @ x, h, heads) for x in tokens])
        for t, o in enumerate(recurrence(q, k, v, a, module.scale)):
            if module.aug_balance is not None:
                w = (q[t] * k[t] * of_head(module.aug_balance, h, heads)).sum()
                o = (
                    o
                    + {"official": sigmoid(w * v[t]), "gated": sigmoid(w) * v[t], "linear": w * v[t]}[
                        module.augmentation
                    ]
                )
            if module.norm:
                centred = o - o.mean()
                o = centred / torch.sqrt((centred**2).mean() + 1e-5)
            read[t].append(o)
    out = []
    for x, o in zip(tokens, read, strict=True):
        y = torch.cat(o)
        if module.g_proj is not None:
            y = y * silu(module.g_proj.weight @ x + module.g_proj.bias)
        out.append(module.out_proj.weight @ y)
    return out
