r"""External attention: positions look at a small memory that all samples share.

The weight of position :math:`i` for memory slot :math:`j` is normalised twice, over the positions, then over the slots:

.. math::
    \hat\alpha_{ij} = \frac{e^{L_{ij}}}{\sum_{i'} e^{L_{i'j}}}, \qquad
    \alpha_{ij} = \frac{\hat\alpha_{ij}}{\sum_{j'} \hat\alpha_{ij'}}

In the log domain this is one ordinary softmax over the slots, which exchange nothing between positions but one number
a slot:

.. math::
    \alpha_i = \mathrm{softmax}_j(L_{ij} - \ell_j), \qquad
    \ell_j = \log \sum_i e^{L_{ij}}

Where the published form divides zero by zero, because every :math:`\hat\alpha_{ij}` of a position underflows, this one
is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def external_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    r""":math:`o_i = \sum_j \alpha_{ij} v_j` with :math:`L_{ij} = \langle q_i, k_j \rangle`, doubly normalised.

    Linear in the positions. For the backward it keeps its inputs and one map of ``M`` numbers a position.

    Args:
        query: :math:`q`, ``(B, N, C)``.
        keys: :math:`k`, the memory's keys, ``(M, C)``.
        values: :math:`v`, the memory's values, ``(M, C)``.

    Returns:
        ``(B, N, C)``.

    Example:
        >>> external_attention(torch.randn(2, 100, 32), torch.randn(8, 32), torch.randn(8, 32)).shape
        torch.Size([2, 100, 32])
    """
    return torch.matmul(double_normalisation(torch.matmul(query, keys.T)), values)


def double_normalisation(logits: Tensor) -> Tensor:
    r""":math:`\alpha_i = \mathrm{softmax}_j(L_{ij} - \log \sum_{i'} e^{L_{i'j}})`, in float32 at least inside.

    Args:
        logits: :math:`L`, ``(B, N, M)``: positions, then slots.

    Returns:
        :math:`\alpha`, shaped and typed like ``logits``; sums to one over the slots.

    Example:
        >>> alpha = double_normalisation(1000 * torch.randn(2, 50, 8))
        >>> torch.allclose(alpha.sum(-1), torch.ones(2, 50))
        True
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and logits.requires_grad):
        return _shifted(logits).softmax(-1).to(logits.dtype)
    return _DoubleNormalisation.apply(logits)[0]


def _shifted(logits: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits - logits.logsumexp(-2, keepdim=True)


class _DoubleNormalisation(torch.autograd.Function):
    r"""Returns :math:`\alpha` and :math:`\log r_i = \log \sum_j \hat\alpha_{ij}`, and keeps nothing else.

    With :math:`G = \partial / \partial \alpha` and :math:`g = \partial / \partial \log r`,

    .. math::
        h_{ij} = \alpha_{ij} \Big(G_{ij} + g_i - \sum_{j'} \alpha_{ij'} G_{ij'}\Big), \qquad
        \frac{\partial}{\partial L_{ij}} = h_{ij} - \alpha_{ij} r_i \sum_{i'} h_{i'j}

    Both are outputs, so that the backward, which reads them, can be differentiated again.
    """

    @staticmethod
    def forward(logits: Tensor) -> tuple[Tensor, Tensor]:
        shifted = _shifted(logits)
        alpha = shifted.softmax(-1)
        # The largest of a row alone tells the sum of all: no second pass of exponentials.
        row = shifted.amax(-1, keepdim=True) - alpha.amax(-1, keepdim=True).log()
        return alpha.to(logits.dtype), row

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad, grad_row = grads
        alpha, row = ctx.saved_tensors
        dtype, alpha = alpha.dtype, alpha.to(row.dtype)
        inner = (alpha * grad).sum(-1, keepdim=True)
        h = alpha * (grad + (grad_row - inner))
        return (h - alpha * row.exp() * h.sum(-2, keepdim=True)).to(dtype)
