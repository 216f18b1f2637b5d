"""Attention over the positions of a sample, from its formulas, on tokens ``(B, N, C)``; in float64.

A module gives its parameters; nothing else of it is used. Sums over positions are taken where ``mask`` is true.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracles.memory import external_attention


def apply(x: Tensor, layer: Any) -> Tensor:
    y = torch.einsum("bni,oi->bno", x, layer.weight)
    return y if layer.bias is None else y + layer.bias


def softmax(logits: Tensor, dim: int, there: Tensor) -> Tensor:
    weights = (logits - logits.max()).exp() * there
    return weights / weights.sum(dim, keepdim=True)


def everywhere(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def memories(module: Any) -> tuple[Tensor, Tensor]:
    memory = module.memory
    return memory.keys, memory.keys if memory.values is None else memory.values


def attended(module: Any, query: Tensor, mask: Tensor | None) -> Tensor:
    keys, values = memories(module)
    if module.memory.norm == "slots":
        bias = getattr(module.memory, "key_bias", None)
        logits = (query[..., None, :] * keys).sum(-1) + (0 if bias is None else bias)
        alpha = softmax(logits, -1, torch.ones(()))
        there = torch.ones(()) if mask is None else mask.reshape(*mask.shape, *[1] * (logits.ndim - 2))
        return (there[..., None] * alpha[..., None] * values).sum(-2)
    return external_attention(query, keys, values, mask, 1e-9 if module.memory.norm == "official" else 0.0)


def external(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    if not module.residual:
        return attended(module, x, mask)
    y = apply(attended(module, apply(x, module.query), mask), module.project)
    norm = module.norm
    mean, var = norm.running_mean, norm.running_var
    if norm.training:
        mean, var = y.mean((0, 1)), y.var((0, 1), unbiased=False)
    y = x + norm.weight * (y - mean) / (var + norm.eps).sqrt() + norm.bias
    return y.clamp(min=0) if module.act else y


def external_multihead(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    query = apply(x, module.query)
    query = query.reshape(*x.shape[:2], -1, module.channels // module.heads)
    out = attended(module, query, mask) + module.memory.value_bias
    return apply(out.reshape(*x.shape[:2], -1), module.project)


def self_attention(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    there = everywhere(x) if mask is None else mask
    size, width = module.heads, module.channels // module.heads
    q, k, v = apply(x, module.qkv).split(module.channels, -1)
    heads = []
    for h in range(size):
        at = slice(h * width, (h + 1) * width)
        logits = torch.einsum("bid,bjd->bij", q[..., at], k[..., at]) / width**0.5
        heads.append(softmax(logits, 2, there[:, None]) @ v[..., at])
    return apply(torch.cat(heads, -1), module.project)


def sagan(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    there = everywhere(x) if mask is None else mask
    q, k, v = (apply(x, layer) for layer in (module.query, module.key, module.value))
    return x + module.gate * (softmax(torch.einsum("bid,bjd->bij", q, k), 2, there[:, None]) @ v)


def double_attention(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    there = everywhere(x) if mask is None else mask
    feature, gather, distribute = (apply(x, layer) for layer in (module.feature, module.gather, module.distribute))
    gathered = torch.einsum("bns,bnw->bsw", softmax(gather, 1, there[..., None]), feature)
    return x + apply(softmax(distribute, 2, torch.ones(())) @ gathered, module.project)
