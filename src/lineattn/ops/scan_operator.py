"""The native kernels of the gated linear recurrence as operators, which autograd and compilers see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lineattn.ops.native import scan as kernels
from lineattn.ops.scan_chunked import chunked


def native_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`lineattn.ops.scan.scan` for tensors that are `lineattn.ops.native.usable`."""
    offsets = None if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64)
    if differentiable(q, k, v, g, state) or torch.compiler.is_compiling():
        return torch.ops.lineattn.scan_forward(q, k, v, g, state, offsets, scale)
    return _forward(q, k, v, g, state, offsets, scale)


def differentiable(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked for."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, offsets: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v, g = (t.contiguous() for t in (q, k, v, g))
    initial, offsets = (None if t is None else t.contiguous() for t in (initial, offsets))
    return kernels.forward(q, k, v, g, initial, offsets, scale)


@torch.library.custom_op("lineattn::scan_forward", mutates_args=(), device_types="cpu")
def _forward_operator(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, offsets: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, g, initial, offsets, scale)


@_forward_operator.register_fake
def _(q, k, v, g, initial, offsets, scale):  # noqa: ANN001, ANN202
    sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    return v.new_empty(v.shape), v.new_empty(sequences, *q.shape[2:], v.shape[3])


@torch.library.custom_op("lineattn::scan_backward", mutates_args=(), device_types="cpu")
def _backward_operator(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial: Tensor | None,
    offsets: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_final, q, k, v, g = (t.contiguous() for t in (grad_out, grad_final, q, k, v, g))
    initial, offsets = (None if t is None else t.contiguous() for t in (initial, offsets))
    return kernels.backward(grad_out, grad_final, q, k, v, g, initial, offsets, scale)


@_backward_operator.register_fake
def _(grad_out, grad_final, q, k, v, g, initial, offsets, scale):  # noqa: ANN001, ANN202
    return tuple(t.new_empty(t.shape) for t in (q, k, v, g, grad_final))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _plain_gradients(ctx, grad_out, grad_final)
    else:
        found = torch.ops.lineattn.scan_backward(grad_out, grad_final, *ctx.saved_tensors, ctx.scale)
    return *(grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=False)), None, None


def _plain_gradients(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> list[Tensor | None]:
    """The gradients as a graph that can be differentiated again."""
    *tensors, offsets = ctx.saved_tensors
    # Aliases: an argument may be computed from another or be the same tensor, and each gets its own gradient only.
    inputs = [None if t is None else t.view_as(t) for t in tensors]
    q, k, v, g, state = inputs
    assert q is not None and k is not None and v is not None and g is not None
    out = chunked(q, k, v, g, state, ctx.scale, offsets)
    needed = ctx.needs_input_grad[:5]
    wanted = [t for t, need in zip(inputs, needed, strict=True) if t is not None and need]
    # The final state has no graph where only the queries need a gradient.
    results, grads = zip(
        *((r, d) for r, d in zip(out, (grad_out, grad_final), strict=True) if r.requires_grad), strict=True
    )
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


_forward_operator.register_autograd(_gradients, setup_context=_save)
