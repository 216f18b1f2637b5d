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

**Layout.** Tokens before heads, ``(B, T, h, K)`` and ``(B, T, h, V)``; a state is ``(B, h, K, V)``, keys before values.

**Packing.** With ``cu_seqlens``, as FlashAttention and fla-core have it, the ``T`` tokens of a batch of one are ``N``
sequences, one after another: sequence ``n`` has the tokens from ``cu_seqlens[n]`` to before ``cu_seqlens[n + 1]``, and
may have none. Each is computed as if it were alone, from its own initial state; states are ``(N, h, K, V)``, so that
decoding goes on with the final ones in a batch of ``N``.

**Padding.** `mask_padding` makes the tokens that are none leave the state as it is, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lineattn.errors import InputError, unknown
from lineattn.ops import native, packing, scan_fla
from lineattn.ops.native import scan as kernels
from lineattn.ops.scan_chunked import chunked
from lineattn.ops.scan_operator import differentiable, native_scan


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r""":math:`S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t^\top v_t` and :math:`o_t = s \, q_t S_t`.

    ``backend`` says what computes it: ``native``, the kernels of this package (float32 and less on the CPU; for the
    backward they keep nothing but the inputs); ``fla``, those of fla-core (float32 and less on CUDA, of TF32's
    accuracy; not seen on a GPU yet); ``chunked``, PyTorch's operators; ``loop``, the formula. ``auto`` takes the first
    of them that is there and takes the tensors, so ``chunked`` under a tracer, for float64, and without either library.

    Args:
        q: Queries, ``(B, T, h, K)``.
        k: Keys, ``(B, T, h, K)``.
        v: Values, ``(B, T, h, V)``.
        g: Logarithms of the decays, zero at most: ``(B, T, h, K)``, or ``(B, T, h)`` for one a head. Minus infinity
            forgets everything before.
        scale: :math:`s`; ``K**-0.5`` where it is not given.
        initial_state: :math:`S_0`, ``(B, h, K, V)``, or ``None`` for zeros; packed, ``(N, h, K, V)``.
        cu_seqlens: Where packed sequences start and the last one ends, int32 or int64 of ``(N + 1,)``, from 0 to ``T``;
            ``B`` is 1 then. They are read on the host. A graph without a break takes them with the native kernels only.
        backend: ``auto``, ``native``, ``fla``, ``chunked`` or ``loop``.

    Returns:
        :math:`o`, ``(B, T, h, V)``, in the type of ``v``, and :math:`S_T`, ``(B, h, K, V)``, or ``(N, h, K, V)``, at
        least float32.

    Raises:
        InputError: The shapes or types don't belong together, the offsets are none, or the backend can't compute it.

    Example:
        >>> q, k, v = torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 32)
        >>> out, state = scan(q, k, v, -torch.rand(2, 100, 4, 16))
        >>> out.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 16, 32]))
        >>> packed = [t[:1] for t in (q, k, v, -torch.rand(2, 100, 4))]
        >>> out, state = scan(*packed, cu_seqlens=torch.tensor([0, 30, 100]))
        >>> out.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([2, 4, 16, 32]))
    """
    if backend not in _BACKENDS:
        raise unknown("backend", backend, _BACKENDS)
    return _in_type(_BACKENDS[backend], q, k, v, g, scale, initial_state, cu_seqlens)


def scan_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scan` as the formula stands."""
    return _in_type(_loop, q, k, v, g, scale, initial_state, cu_seqlens)


def scan_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scan` by matrix products, for any device and floating-point type.

    A decay between two tokens is always formed from sums of logarithms, or products of decays, that lie between them,
    never as the difference of two sums: it neither overflows nor loses digits, however strong the decays before were.
    """
    return _in_type(chunked, q, k, v, g, scale, initial_state, cu_seqlens)


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
        InputError: The shapes or types don't belong together.

    Example:
        >>> q, k, v, g = torch.randn(2, 4, 16), torch.randn(2, 4, 16), torch.randn(2, 4, 32), -torch.rand(2, 4)
        >>> out, state = scan_step(q, k, v, g, None)
        >>> out, state = scan_step(q, k, v, g, state)
        >>> out.shape, state.shape
        (torch.Size([2, 4, 32]), torch.Size([2, 4, 16, 32]))
    """
    return _in_type(_one, q, k, v, g, scale, state, None, axes=3)


def mask_padding(q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Makes the tokens of padding leave the state as it is: they write nothing, and nothing decays at them.

    .. math:: g_t = 0,\ k_t = 0 \;\Rightarrow\; S_t = S_{t-1}

    That is exact on the left, on the right and in between: outputs at the other tokens and the final state are those
    without padding. At padding the outputs are zero, and so are the gradients, even of what is not finite there.

    Args:
        q: Queries, ``(B, T, h, K)``, or ``(B, h, K)`` for `scan_step`.
        k: Keys, as ``q``.
        v: Values, ``(B, T, h, V)``, or ``(B, h, V)``.
        g: Logarithms of the decays, as ``q``, or without the last axis.
        mask: ``(B, T)``, or ``(B,)``: true, or not zero, at the tokens that are there, as Hugging Face's
            ``attention_mask``.

    Returns:
        ``q``, ``k``, ``v`` and ``g``, zero where the mask is.

    Raises:
        InputError: The mask has another shape.

    Example:
        >>> tokens = torch.randn(1, 5, 2, 3), torch.randn(1, 5, 2, 3), torch.randn(1, 5, 2, 4), -torch.rand(1, 5, 2)
        >>> out, state = scan(*mask_padding(*tokens, torch.tensor([[0, 1, 1, 0, 1]])))
        >>> alone, same = scan(*(t[:, [1, 2, 4]] for t in tokens))
        >>> torch.allclose(out[:, [1, 2, 4]], alone, atol=1e-6), torch.allclose(state, same, atol=1e-6)
        (True, True)
    """
    if mask.shape != q.shape[:-2]:
        raise InputError(
            f"mask: shape {tuple(q.shape[:-2])} is expected with q of {tuple(q.shape)}, not {tuple(mask.shape)}"
        )
    there = mask.bool()[..., None]
    # Chosen, not multiplied: zero times what is not finite would be a NaN.
    q, k, v = (torch.where(there[..., None], t, 0) for t in (q, k, v))
    return q, k, v, torch.where(there if g.ndim < q.ndim else there[..., None], g, 0)


_Form = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", float, "Tensor | None"], "tuple[Tensor, Tensor]"]


def _in_type(
    form: _Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    axes: int = 4,
) -> tuple[Tensor, Tensor]:
    """Checks the shapes, and lets ``form`` compute in float32 at least."""
    _check(axes, q, k, v, g, state, cu_seqlens)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, g) if state is None else (q, k, v, g, state)
    if all(t.dtype == torch.float32 for t in tensors):
        return form(q, k, v, g, state, factor, cu_seqlens)
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    initial = None if state is None else state.to(dtype)
    out, final = form(q.to(dtype), k.to(dtype), v.to(dtype), g.to(dtype), initial, factor, cu_seqlens)
    return out.to(v.dtype), final


def _check(
    axes: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    if q.ndim != axes:
        wanted = "(B, T, h, K)" if axes == 4 else "(B, h, K)"
        raise InputError(f"q: shape {wanted} is expected, not {tuple(q.shape)}")
    *rows, _ = q.shape
    width = v.shape[-1]
    sequences = q.shape[0]
    if cu_seqlens is not None:
        packing.check_offsets(cu_seqlens, sequences)
        sequences = cu_seqlens.shape[0] - 1
    for name, found, wanted in (
        ("q", q, [q.shape]),
        ("k", k, [q.shape]),
        ("v", v, [(*rows, width)]),
        ("g", g, [q.shape, (*rows,)]),
        ("state", state, [(sequences, *q.shape[-2:], width)]),
    ):
        if found is None:
            continue
        if found.shape not in wanted:
            shapes = " or ".join(str(tuple(shape)) for shape in wanted)
            raise InputError(f"{name}: shape {shapes} is expected with q of {tuple(q.shape)}, not {tuple(found.shape)}")
        if not found.is_floating_point():
            raise InputError(f"{name}: a floating-point type is expected, not {found.dtype}")


def _auto(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.shape[1] == 1 and cu_seqlens is None:
        out, state = _one(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, scale)
        return out[:, None], state
    if native.usable(q, k, v, g, state):
        return native_scan(q, k, v, g, state, scale, cu_seqlens)
    if q.shape[-1] >= scan_fla.NARROWEST and scan_fla.usable(q, k, v, g, state):
        return scan_fla.fla_scan(q, k, v, g, state, scale, cu_seqlens)
    return chunked(q, k, v, g, state, scale, cu_seqlens)


def _native(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not native.usable(q, k, v, g, state):
        raise InputError(
            f"backend native: it takes float32 or less on the CPU, without a tracer, not {q.dtype} on {q.device} "
            f"(native kernels: {native.status()}); backend auto takes what there is"
        )
    return native_scan(q, k, v, g, state, scale, cu_seqlens)


def _fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not scan_fla.usable(q, k, v, g, state):
        raise InputError(
            f"backend fla: it takes float32 or less on CUDA, without a tracer, not {q.dtype} on {q.device}, "
            "and needs fla-core (pip install 'lineattn[fla]'); backend auto takes what there is"
        )
    return scan_fla.fla_scan(q, k, v, g, state, scale, cu_seqlens)


def _one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, _: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if state is None:
        state = v.new_zeros(*q.shape, v.shape[-1])
    # A kernel saves little where a gradient is wanted or a compiler is at work: these are a handful of operators.
    if torch.compiler.is_compiling() or differentiable(q, k, v, g, state) or not native.usable(q, k, v, g, state):
        return _step(q, k, v, g if g.ndim == 3 else g[..., None], state, scale)
    return kernels.step(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), state.contiguous(), scale)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # Sums of products rather than matrix products, which autocast would take out of float32.
    state = g.exp()[..., None] * state + k[..., None] * v[..., None, :]
    return scale * (q[..., None] * state).sum(-2), state


def _loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = v.new_zeros(sequences, *q.shape[2:], v.shape[3]) if state is None else state
    if cu_seqlens is not None:
        return packing.one_by_one(partial(_loop, scale=scale), [q, k, v, g], state, cu_seqlens)
    outs = []
    # Unbound once: an index a token would cost the backward a full zero gradient each.
    tokens = zip(*(t.unbind(1) for t in (q, k, v, g if g.ndim == 4 else g[..., None])), strict=True)
    for q_t, k_t, v_t, g_t in tokens:
        out, state = _step(q_t, k_t, v_t, g_t, state, scale)
        outs.append(out)
    return torch.stack(outs, 1) if outs else v, state


_BACKENDS: dict[str, _Form] = {"auto": _auto, "native": _native, "fla": _fla, "chunked": chunked, "loop": _loop}
