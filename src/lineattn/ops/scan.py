r"""The gated linear recurrence: a state of fixed size that forgets, is written, and is read, token by token.

.. math::
    S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1} + k_t^\top v_t, \qquad
    o_t = s \, q_t S_t

The write happens before the read. The decay is given as its logarithm :math:`g \le 0`, one a key channel (GLA, MetaLA)
or one a head (RetNet, Mamba-2). The cost is linear in the tokens, and :math:`S` is all that one more token needs.

- `scan` is the one to call: it takes the fastest of the forms below that the tensors allow.
- `scan_loop` is the formula, token by token; the others are checked against it.
- `scan_chunked` makes matrix products of chunks of tokens, for devices and types that the native kernels don't know.
- `scan_step` is one token, for decoding.

All return the same. State, key and decay are at least float32, whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.errors import InputError
from lineattn.ops import native
from lineattn.ops.autocast import no_autocast
from lineattn.ops.native import scan as kernels

# Tokens of a chunk, and of the blocks in it whose tokens meet one by one. Long chunks save steps, short blocks save
# numbers: what is between the tokens of a block takes BLOCK * K of them a token.
CHUNK, BLOCK = 64, 8


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r""":math:`S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t^\top v_t` and :math:`o_t = s \, q_t S_t`.

    Native kernels compute it where they can (float32 and less on the CPU); else, and under a tracer, PyTorch's
    operators, with the same results. For the backward the kernels keep nothing but the inputs.

    Args:
        q: Queries, ``(B, T, h, K)``.
        k: Keys, ``(B, T, h, K)``.
        v: Values, ``(B, T, h, V)``.
        g: Logarithms of the decays, zero at most: ``(B, T, h, K)``, or ``(B, T, h)`` for one a head.
        scale: :math:`s`; ``K**-0.5`` where it is not given.
        initial_state: :math:`S_0`, ``(B, h, K, V)``, or ``None`` for zeros.

    Returns:
        :math:`o`, ``(B, T, h, V)``, in the type of ``v``, and :math:`S_T`, ``(B, h, K, V)``, at least float32.

    Raises:
        InputError: The shapes don't belong together.

    Example:
        >>> q, k, v = torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 32)
        >>> out, state = scan(q, k, v, -torch.rand(2, 100, 4, 16))
        >>> out.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 16, 32]))
    """
    return _in_type(_fastest, 4, q, k, v, g, scale, initial_state)


def scan_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scan` as the formula stands."""
    return _in_type(_loop, 4, q, k, v, g, scale, initial_state)


def scan_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scan` by matrix products, for any device and floating-point type.

    A decay between two tokens is always formed from sums of logarithms, or products of decays, that lie between them,
    never as the difference of two sums: it neither overflows nor loses digits, however strong the decays before were.
    """
    return _in_type(_chunked, 4, q, k, v, g, scale, initial_state)


def scan_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    r"""One token of `scan`.

    Args:
        q: Query, ``(B, h, K)``.
        k: Key, ``(B, h, K)``.
        v: Value, ``(B, h, V)``.
        g: Logarithm of the decay, ``(B, h, K)``, or ``(B, h)`` for one a head.
        state: :math:`S_{t-1}`, ``(B, h, K, V)``, or ``None`` for zeros; it is not changed.
        scale: :math:`s`; ``K**-0.5`` where it is not given.

    Returns:
        :math:`o_t`, ``(B, h, V)``, in the type of ``v``, and :math:`S_t`, ``(B, h, K, V)``, at least float32.

    Raises:
        InputError: The shapes don't belong together.

    Example:
        >>> q, k, v, g = torch.randn(2, 4, 16), torch.randn(2, 4, 16), torch.randn(2, 4, 32), -torch.rand(2, 4)
        >>> out, state = scan_step(q, k, v, g, None)
        >>> out, state = scan_step(q, k, v, g, state)
        >>> out.shape, state.shape
        (torch.Size([2, 4, 32]), torch.Size([2, 4, 16, 32]))
    """
    return _in_type(_one, 3, q, k, v, g, scale, state)


_Form = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", float], "tuple[Tensor, Tensor]"]


def _in_type(
    form: _Form, axes: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Checks the shapes, and lets ``form`` compute in float32 at least."""
    _check(axes, q, k, v, g, state)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, g) if state is None else (q, k, v, g, state)
    if all(t.dtype == torch.float32 for t in tensors):
        return form(q, k, v, g, state, factor)
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    initial = None if state is None else state.to(dtype)
    out, final = form(q.to(dtype), k.to(dtype), v.to(dtype), g.to(dtype), initial, factor)
    return out.to(v.dtype), final


def _check(axes: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> None:
    if q.ndim != axes:
        wanted = "(B, T, h, K)" if axes == 4 else "(B, h, K)"
        raise InputError(f"q: shape {wanted} is expected, not {tuple(q.shape)}")
    *rows, _ = q.shape
    width = v.shape[-1]
    for name, found, wanted in (
        ("k", k.shape, [q.shape]),
        ("v", v.shape, [(*rows, width)]),
        ("g", g.shape, [q.shape, (*rows,)]),
        ("state", None if state is None else state.shape, [None, (q.shape[0], *q.shape[-2:], width)]),
    ):
        if found not in wanted:
            shapes = " or ".join(str(tuple(shape)) for shape in wanted if shape is not None)
            raise InputError(f"{name}: shape {shapes} is expected with q of {tuple(q.shape)}, not {tuple(found or ())}")


def _fastest(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if q.shape[1] == 1:
        out, state = _one(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, scale)
        return out[:, None], state
    if not native.usable(q, k, v, g, state):
        return _chunked(q, k, v, g, state, scale)
    if _differentiable(q, k, v, g, state) or torch.compiler.is_compiling():
        return torch.ops.lineattn.scan_forward(q, k, v, g, state, scale)
    initial = None if state is None else state.contiguous()
    return kernels.forward(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), initial, scale)


def _one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if state is None:
        state = v.new_zeros(*q.shape, v.shape[-1])
    # A kernel saves little where a gradient is wanted or a compiler is at work: these are a handful of operators.
    if torch.compiler.is_compiling() or _differentiable(q, k, v, g, state) or not native.usable(q, k, v, g, state):
        return _step(q, k, v, g if g.ndim == 3 else g[..., None], state, scale)
    return kernels.step(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), state.contiguous(), scale)


def _differentiable(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # Sums of products rather than matrix products, which autocast would take out of float32.
    state = g.exp()[..., None] * state + k[..., None] * v[..., None, :]
    return scale * (q[..., None] * state).sum(-2), state


def _zero_state(q: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(q.shape[0], *q.shape[2:], v.shape[3])


def _loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    state = _zero_state(q, v) if state is None else state
    outs = []
    # Unbound once: an index a token would cost the backward a full zero gradient each.
    tokens = zip(*(t.unbind(1) for t in (q, k, v, g if g.ndim == 4 else g[..., None])), strict=True)
    for q_t, k_t, v_t, g_t in tokens:
        out, state = _step(q_t, k_t, v_t, g_t, state, scale)
        outs.append(out)
    return torch.stack(outs, 1) if outs else v, state


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    state = _zero_state(q, v) if state is None else state
    tokens = q.shape[1]
    if tokens == 0:
        return v, state
    blocks = min(CHUNK, tokens + BLOCK - 1) // BLOCK
    # A token more that writes nothing and decays nothing leaves the state as it is.
    missing = -tokens % (blocks * BLOCK)
    q, k, v, g = (
        F.pad(t, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, blocks, BLOCK))
        for t in (q * scale, k, v, g if g.ndim == 4 else g[..., None])
    )  # (B, h, chunks, blocks, BLOCK, .)
    with no_autocast(q.device) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        out, reads, writes, kept = _within_chunks(q, k, v, g)
        pairs = writes.transpose(-1, -2) @ v.flatten(3, 4)
        before = []
        for n in range(out.shape[2]):
            before.append(state)
            state = kept[:, :, n, :, None] * state + pairs[:, :, n]
        out = out + reads @ torch.stack(before, 2)
    return out.flatten(2, 3)[:, :, :tokens].transpose(1, 2).contiguous(), state


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunks for themselves.

    Returns:
        What a token reads of its own chunk, ``(B, h, chunks, CHUNK, V)``; queries decayed from the chunk's start, and
        keys decayed to its end, ``(B, h, chunks, CHUNK, K)``; and the whole decay, ``(B, h, chunks, K)``.
    """
    decays = g.cumsum(-2).exp()  # from a block's start to after a token
    rest = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()  # from after a token to a block's end
    scores = _within_blocks(q, k, g)
    outs, reads, before = [], [], torch.ones_like(decays[:, :, :, 0, 0])
    writes = k[:, :, :, 0, :0]
    for i in range(q.shape[3]):
        query = q[:, :, :, i] * decays[:, :, :, i]
        earlier = query @ writes.transpose(-1, -2) @ v[:, :, :, :i].flatten(3, 4)
        outs.append(earlier + scores[:, :, :, i] @ v[:, :, :, i])
        reads.append(query * before[..., None, :])
        whole = decays[:, :, :, i, -1]
        before = before * whole
        writes = torch.cat([writes * whole[..., None, :], k[:, :, :, i] * rest[:, :, :, i]], 3)
    return torch.cat(outs, 3), torch.cat(reads, 3), writes, before


def _within_blocks(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    r""":math:`\sum_c q_{t,c} k_{s,c} e^{g_{s+1,c} + \dots + g_{t,c}}` for :math:`s \le t`, else zero."""
    before = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril(-1)[..., None]  # s < t
    sums = g[..., :, None, :].where(before, 0).cumsum(-3)
    # Masked before the exponential, which could overflow where nobody looks, and make the gradient a NaN.
    decays = sums.masked_fill(before.transpose(0, 1), -torch.inf).exp()
    if g.shape[-1] == 1:
        return (q @ k.transpose(-1, -2)) * decays[..., 0]
    return (q[..., :, None, :] * k[..., None, :, :] * decays).sum(-1)


@torch.library.custom_op("lineattn::scan_forward", mutates_args=(), device_types="cpu")
def _forward_operator(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    initial = None if initial is None else initial.contiguous()
    return kernels.forward(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), initial, scale)


@_forward_operator.register_fake
def _(q, k, v, g, initial, scale):  # noqa: ANN001, ANN202
    return v.new_empty(v.shape), v.new_empty(q.shape[0], *q.shape[2:], v.shape[3])


@torch.library.custom_op("lineattn::scan_backward", mutates_args=(), device_types="cpu")
def _backward_operator(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_final, q, k, v, g = (t.contiguous() for t in (grad_out, grad_final, q, k, v, g))
    initial = None if initial is None else initial.contiguous()
    return kernels.backward(grad_out, grad_final, q, k, v, g, initial, scale)


@_backward_operator.register_fake
def _(grad_out, grad_final, q, k, v, g, initial, scale):  # noqa: ANN001, ANN202
    return tuple(t.new_empty(t.shape) for t in (q, k, v, g, grad_final))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _plain_gradients(ctx, grad_out, grad_final)
    else:
        found = torch.ops.lineattn.scan_backward(grad_out, grad_final, *ctx.saved_tensors, ctx.scale)
    return *(grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=False)), None


def _plain_gradients(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> list[Tensor | None]:
    """The gradients as a graph that can be differentiated again."""
    # Aliases: an argument may be computed from another or be the same tensor, and each gets its own gradient only.
    inputs = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
    q, k, v, g, state = inputs
    assert q is not None and k is not None and v is not None and g is not None
    out = _chunked(q, k, v, g, state, ctx.scale)
    needed = ctx.needs_input_grad[:5]
    wanted = [t for t, need in zip(inputs, needed, strict=True) if t is not None and need]
    # The final state has no graph where only the queries need a gradient.
    results, grads = zip(
        *((r, d) for r, d in zip(out, (grad_out, grad_final), strict=True) if r.requires_grad), strict=True
    )
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


_forward_operator.register_autograd(_gradients, setup_context=_save)
