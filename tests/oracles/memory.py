"""External attention from its formulas, in two steps and in the published order; float64 is what it is for."""

from __future__ import annotations

from torch import Tensor


def double_normalisation(logits: Tensor, mask: Tensor | None = None, epsilon: float = 0.0) -> Tensor:
    """A softmax over the positions, then every position divided by its sum over the slots: ``(B, N, ..., M)``."""
    weights = (logits - logits.max()).exp()
    if mask is not None:
        weights = weights * mask.reshape(*mask.shape, *[1] * (logits.ndim - 2))
    columns = weights.sum(1, keepdim=True)
    over_positions = weights / (columns + (columns == 0))
    sums = over_positions.sum(-1, keepdim=True)
    if mask is not None:
        sums = sums + (sums == 0)
    return over_positions / (epsilon + sums)


def external_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, epsilon: float = 0.0
) -> Tensor:
    """Of one head, ``(B, N, C)``, or of several, ``(B, N, h, D)`` with memories for all or for each."""
    logits = (query[..., None, :] * keys).sum(-1)
    alpha = double_normalisation(logits, mask, epsilon)
    return (alpha[..., None] * values).sum(-2)
