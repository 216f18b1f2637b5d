"""External attention from its formulas, in two steps and in the published order; float64 is what it is for."""

from __future__ import annotations

from torch import Tensor


def double_normalisation(logits: Tensor) -> Tensor:
    """A softmax over the positions, then every position divided by its sum over the slots."""
    weights = (logits - logits.max()).exp()
    over_positions = weights / weights.sum(1, keepdim=True)
    return over_positions / over_positions.sum(2, keepdim=True)


def external_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    logits = (query[:, :, None] * keys).sum(-1)
    alpha = double_normalisation(logits)
    return (alpha[..., None] * values).sum(2)
