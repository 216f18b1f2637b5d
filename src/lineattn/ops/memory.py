r"""External attention: positions look at a small memory that all samples share.

The weight of position :math:`i` for memory slot :math:`j` is normalised twice, over the positions, then over the slots:

.. math::
    \hat\alpha_{ij} = \frac{e^{L_{ij}}}{\sum_{i'} e^{L_{i'j}}}, \qquad
    \alpha_{ij} = \frac{\hat\alpha_{ij}}{\varepsilon + \sum_{j'} \hat\alpha_{ij'}}

In the log domain, and without :math:`\varepsilon`, this is one ordinary softmax over the slots, and positions exchange
nothing but one number a slot:

.. math::
    \alpha_i = \mathrm{softmax}_j(L_{ij} - \ell_j), \qquad
    \ell_j = \log \sum_i e^{L_{ij}}

``norm="log"`` computes this; where all :math:`\hat\alpha_{ij}` of a position are far below :math:`\varepsilon`, it is
exact, and the published form, ``norm="official"`` with :math:`\varepsilon = 10^{-9}`, leaves the position without
attention. Sums, logarithms and weights are float32 at least, whatever the type of the logits.

"Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (Guo, Liu, Mu, Hu; 2021), arXiv
2105.02358.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.ops.autocast import autocast_dtype, no_autocast

Norm = Literal["log", "official"]
EPSILON = 1e-9  # the authors'
_Part = TypeVar("_Part")


def external_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    norm: Norm = "log",
    tile: int | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:
    r""":math:`o_i = \sum_j \alpha_{ij} v_j` with :math:`L_{ij} = \langle q_i, k_j \rangle`, doubly normalised.

    Linear in the positions. For the backward it keeps its arguments and one map of logits, in single precision, half of
    what plain operators keep; in tiles only one number a sample, head and slot. In what order positions lie in memory
    does not matter: a map ``(B, C, H, W)`` is given as ``x.flatten(2).mT`` without a copy, and its attention comes back
    in the same order.

    Args:
        query: :math:`q`, ``(B, N, C)``, or ``(B, N, h, D)`` for heads.
        keys: :math:`k`, the memory's keys, ``(M, C)``; for heads ``(M, D)``, the same for all, or ``(h, M, D)``.
        values: :math:`v`, the memory's values, as many as keys; of any width.
        mask: Positions that exist, ``(B, N)``, of booleans; others are in no sum, and get zeros. They must be finite
            all the same.
        norm: ``log``, exact, or ``official``, as published.
        tile: Positions at a time, in two passes over them: no map of logits of more positions than that is ever there,
            and the backward computes them again. The result is the same. All of them if not given; compiled, and where
            the gradient is differentiated again, it is all of them too.
        log_sums: :math:`\ell`, from `slot_log_sums`, where these positions are some of a larger sample; by default
            theirs. Plain operators compute this, and the gradient reaches :math:`\ell` too.

    Returns:
        ``(B, N, C)``, or ``(B, N, h, D)``, with the width of the values.

    Raises:
        InputError: Shapes, or a mask, that don't fit.

    Example:
        >>> external_attention(torch.randn(2, 100, 32), torch.randn(8, 32), torch.randn(8, 32)).shape
        torch.Size([2, 100, 32])
    """
    _check(query, keys, values, mask, norm, tile)
    query, keys, values = _lowered(query, keys, values)
    with no_autocast(query.device):
        if log_sums is not None:
            return _attended(query, keys, values, _column(mask, query), norm, tile, log_sums)
        if torch.compiler.is_compiling():
            alpha = double_normalisation(products(query, keys.mT), mask=mask, norm=norm)
            return spread(alpha.to(values.dtype), values, query)
        arguments = query, keys, values, _column(mask, query), norm, tile
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in arguments[:3]):
            return _ExternalAttention.forward(*arguments)[0]  # small sets feel what apply costs
        return _ExternalAttention.apply(*arguments)[0]


def slot_log_sums(query: Tensor, keys: Tensor, *, mask: Tensor | None = None, tile: int | None = None) -> Tensor:
    r""":math:`\ell_j = \log \sum_i e^{L_{ij}}` of each slot: all that positions learn of one another.

    Those of parts of a sample give that of the whole by `torch.logaddexp`.

    Args:
        query: :math:`q`, as for `external_attention`.
        keys: :math:`k`.
        mask: Positions that exist.
        tile: Positions at a time; all of them if not given.

    Returns:
        ``(B, 1, M)``, or for heads ``(B, 1, h, M)``, in single precision at least.

    Raises:
        InputError: Shapes, or a mask, that don't fit.

    Example:
        >>> x, keys = torch.randn(1, 100, 32), torch.randn(8, 32)
        >>> parts = torch.logaddexp(slot_log_sums(x[:, :30], keys), slot_log_sums(x[:, 30:], keys))
        >>> whole = external_attention(x, keys, keys)
        >>> torch.allclose(external_attention(x[:, :30], keys, keys, log_sums=parts), whole[:, :30], atol=1e-5)
        True
    """
    _check(query, keys, keys, mask, "log", tile)
    query, keys = _lowered(query, keys)
    with no_autocast(query.device):
        return _log_sums(query, keys, _column(mask, query), tile)


def double_normalisation(logits: Tensor, *, mask: Tensor | None = None, norm: Norm = "log") -> Tensor:
    r""":math:`\alpha`, from logits: a softmax over the positions, then every position over its sum over the slots.

    Args:
        logits: :math:`L`, ``(B, N, M)`` or ``(B, N, h, M)``: positions, then slots.
        mask: Positions that exist, ``(B, N)``, of booleans.
        norm: ``log``, exact, or ``official``, as published.

    Returns:
        :math:`\alpha`, shaped and typed like ``logits``; a position sums to one over the slots, one that isn't there to
        zero.

    Example:
        >>> alpha = double_normalisation(1000 * torch.randn(2, 50, 8))
        >>> torch.allclose(alpha.sum(-1), torch.ones(2, 50))
        True
    """
    if logits.ndim not in (3, 4):
        raise InputError(f"logits {_size(logits)}: they must be (B, N, M), or for heads (B, N, h, M)")
    check_norm(norm)
    check_mask(mask, logits.shape[:2])
    there = _column(mask, logits)
    return _weights(_log_shares(logits, there), there, norm).to(logits.dtype)


def _lowered(query: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
    """What autocast would make of them; it leaves double precision alone."""
    lowered = autocast_dtype(query.device)
    if lowered is None or query.dtype == torch.float64:
        return query, *memories
    return tuple(tensor.to(lowered) for tensor in (query, *memories))


class _ExternalAttention(torch.autograd.Function):
    r"""Returns the attention, and what is kept for the backward: :math:`L - \ell`, in tiles :math:`\ell`.

    With :math:`G_{ij} = \langle \partial o_i, v_j \rangle`, in both norms,

    .. math::
        h_{ij} = \alpha_{ij} \Big(G_{ij} - \sum_{j'} \alpha_{ij'} G_{ij'}\Big), \qquad
        \frac{\partial}{\partial L_{ij}} = h_{ij} - e^{L_{ij} - \ell_j} \sum_{i'} h_{i'j}
    """

    @staticmethod
    def forward(
        query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, norm: Norm, tile: int | None
    ) -> tuple[Tensor, Tensor]:
        if tile is None:
            shares = _log_shares(products(query, keys.mT), mask)
            return spread(_weights(shares, mask, norm).to(values.dtype), values, query), shares
        lse = _log_sums(query, keys, mask, tile)
        return _attended(query, keys, values, mask, norm, tile, lse), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.norm, ctx.tile = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for what is kept, as large as it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 6
        query, keys, values, mask, kept = ctx.saved_tensors
        with no_autocast(query.device):
            return *_gradients(query, keys, values, mask, kept, grads[0], ctx.norm, ctx.tile), None, None, None


def _gradients(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    grad: Tensor,
    norm: Norm,
    tile: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled():  # to be differentiated again, and what was kept hangs on nothing
        kept, tile = _log_shares(products(query, keys.mT), mask), None
    spans = _spans(query, tile)

    def compute(at: slice) -> tuple[Tensor, Tensor, Tensor]:
        there = _at(mask, at)
        shares = kept if tile is None else _shifted(products(query[:, at], keys.mT), kept, there)
        alpha = _weights(shares, there, norm)
        g = products(grad[:, at], values.mT).to(alpha.dtype)
        # The backward of a softmax over the slots, in one pass: h.
        h = torch.ops.aten._softmax_backward_data(g, alpha, -1, alpha.dtype)
        return alpha, _filled(shares.exp(), there), h

    weights = _once(spans, compute)
    sums = grad_keys = grad_values = None
    for at in spans:
        alpha, _, h = weights(at)
        sums = _plus(sums, h.sum(1, keepdim=True))
        grad_values = _plus(grad_values, _over_positions(alpha.to(grad.dtype), grad[:, at], values).to(kept.dtype))
    assert sums is not None

    def grad_query(at: slice) -> Tensor:
        nonlocal grad_keys
        _, over_positions, h = weights(at)
        grad_logits = h.addcmul_(over_positions, sums, value=-1).to(query.dtype)  # nothing reads h after this
        grad_keys = _plus(grad_keys, _over_positions(grad_logits, query[:, at], keys).to(kept.dtype))
        return spread(grad_logits, keys, query)

    query_grad = _joined(spans, grad_query, query)
    assert grad_keys is not None and grad_values is not None
    return query_grad, grad_keys.to(keys.dtype), grad_values.to(values.dtype)


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, norm: Norm, tile: int | None, lse: Tensor
) -> Tensor:
    r"""The attention for given :math:`\ell`, a tile at a time."""

    def part(at: slice) -> Tensor:
        there = _at(mask, at)
        shares = _shifted(products(query[:, at], keys.mT), lse, there)
        return spread(_weights(shares, there, norm).to(values.dtype), values, query)

    return _joined(_spans(query, tile), part, query)


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _log_shares(logits: Tensor, mask: Tensor | None) -> Tensor:
    r""":math:`L - \ell`, the logarithm of a position's share of a slot; zero where there is no position."""
    logits = _counted(logits, mask, mask)
    return _filled(logits.log_softmax(1), mask)


def _log_sums(query: Tensor, keys: Tensor, mask: Tensor | None, tile: int | None) -> Tensor:
    r""":math:`\ell`, a tile at a time."""
    lse: Tensor | None = None
    for at in _spans(query, tile):
        logits = _counted(products(query[:, at], keys.mT), _at(mask, at), mask)
        sums = logits.logsumexp(1, keepdim=True)
        lse = sums if lse is None else torch.logaddexp(lse, sums)
    assert lse is not None
    return lse


def _counted(logits: Tensor, there: Tensor | None, mask: Tensor | None) -> Tensor:
    """In single precision at least; minus infinity where there is no position, but for samples without any, whose sums
    have to be finite."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if there is None or mask is None:
        return logits
    return torch.where(there | ~mask.any(1, keepdim=True), logits, -torch.inf)


def _shifted(logits: Tensor, lse: Tensor, mask: Tensor | None) -> Tensor:
    r""":math:`L - \ell`; zero where there is no position, and so finite: what is infinite has no gradient of zero."""
    return _filled(logits - lse, mask)


def _weights(shares: Tensor, mask: Tensor | None, norm: Norm) -> Tensor:
    r""":math:`\alpha`, of :math:`L - \ell`."""
    if norm == "log":
        alpha = shares.softmax(-1)
    else:
        alpha = shares.exp()
        alpha = alpha / (EPSILON + alpha.sum(-1, keepdim=True))
    return _filled(alpha, mask)


def _filled(weights: Tensor, mask: Tensor | None) -> Tensor:
    return weights if mask is None else torch.where(mask, weights, 0)


def products(x: Tensor, matrix: Tensor) -> Tensor:
    """``(B, N, I) (I, O)``, ``(B, N, h, I) (I, O)`` or ``(B, N, h, I) (h, I, O)``; outputs lie side by side in memory,
    also of a map, since it is faster to normalise them so."""
    if matrix.ndim == 3:
        return torch.einsum("bnhi,hio->bnho", x, matrix)
    return _of_map(x, matrix) if is_map(x) else torch.matmul(x, matrix)


def spread(weights: Tensor, memory: Tensor, like: Tensor) -> Tensor:
    """``weights`` times ``memory``, as `products`; the result lies in memory like ``like``."""
    return _of_map(memory.mT, weights.mT).mT if is_map(like) else products(weights, memory)


def _of_map(a: Tensor, b: Tensor) -> Tensor:
    """One of the two is the same for all samples; `torch.matmul` would copy a map to have one product of all."""
    batch = (a if a.ndim == 3 else b).shape[0]
    return torch.bmm(a.expand(batch, -1, -1), b.expand(batch, -1, -1))


def _over_positions(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """The gradient of the memory ``like``: ``a`` times ``b``, slots times width, summed over samples and positions."""
    if like.ndim == 3:
        return torch.einsum("bnhm,bnhd->hmd", a, b)
    if is_map(b):
        return torch.bmm(a.mT, b).sum(0)
    return a.flatten(0, -2).mT @ b.flatten(0, -2)


def is_map(x: Tensor) -> bool:
    """Whether the positions of ``(B, N, C)`` lie side by side in memory, as those of a channel of a map do."""
    return x.ndim == 3 and not torch.compiler.is_compiling() and x.stride(1) == 1 and x.stride(2) > 1


def _column(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask that multiplies slots, and heads."""
    return None if mask is None else mask[(..., *[None] * (like.ndim - 2))]


def _at(mask: Tensor | None, at: slice) -> Tensor | None:
    return None if mask is None else mask[:, at]


def _spans(query: Tensor, tile: int | None) -> list[slice]:
    positions = query.shape[1]
    tile = tile or max(positions, 1)
    return [slice(start, min(start + tile, positions)) for start in range(0, max(positions, 1), tile)]


def _once(spans: list[slice], compute: Callable[[slice], _Part]) -> Callable[[slice], _Part]:
    """What there is room for is kept: everything where there is one span. Of many each is computed when it is asked."""
    if len(spans) > 1:
        return compute
    kept = compute(spans[0])
    return lambda _: kept


def _joined(spans: list[slice], compute: Callable[[slice], Tensor], like: Tensor) -> Tensor:
    """The parts side by side, in one tensor that is there before them, and in memory like ``like``."""
    first = compute(spans[0])
    if len(spans) == 1:
        return first
    shape = (first.shape[0], spans[-1].stop, *first.shape[2:])
    out = first.new_empty(shape[0], shape[2], shape[1]).mT if is_map(like) else first.new_empty(shape)
    out[:, spans[0]] = first
    for at in spans[1:]:
        out[:, at] = compute(at)
    return out


def _check(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, norm: str, tile: int | None) -> None:
    check_norm(norm)
    check_tile(tile)
    if query.ndim not in (3, 4) or keys.ndim not in (2, query.ndim - 1):
        raise InputError(
            f"query {_size(query)}, keys {_size(keys)}: they must be (B, N, C) and (M, C), or for heads "
            "(B, N, h, D) and (M, D) or (h, M, D)"
        )
    if query.shape[-1] != keys.shape[-1] or (keys.ndim == 3 and query.shape[2] != keys.shape[0]):
        raise InputError(f"query {_size(query)} and keys {_size(keys)} differ in width, or in heads")
    if keys.shape[:-1] != values.shape[:-1]:
        raise InputError(f"keys {_size(keys)} and values {_size(values)} are not as many")
    check_mask(mask, query.shape[:2])


def check_norm(norm: str) -> None:
    """Refuses what is no `Norm`."""
    if norm not in get_args(Norm):
        raise InputError(f"norm is {norm!r}; it must be 'log' (exact) or 'official' (as published)")


def check_tile(tile: int | None) -> None:
    """Refuses what is no number of positions."""
    if tile is not None and tile < 1:
        raise InputError(f"tile is {tile}; it is how many positions are worked on at a time, at least 1")


def check_mask(mask: Tensor | None, shape: Sequence[int]) -> None:
    """Refuses what is no mask of positions ``(B, N)``, or ``(B, H, W)``."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
        raise InputError(
            f"mask {_size(mask)} of {mask.dtype}: it must be {tuple(shape)}, one a position, of torch.bool; "
            "true where there is one"
        )


def _size(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
