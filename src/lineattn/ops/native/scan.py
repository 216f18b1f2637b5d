"""The native kernels of the gated linear recurrence, for dense float32 tensors on the CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lineattn.ops import native, packing


def _structure(pointers: str) -> type[ctypes.Structure]:
    integers = ("batch", "tokens", "heads", "keys", "values", "decays", "threads")
    fields = [(name, ctypes.c_int64) for name in integers] + [("scale", ctypes.c_double)]
    fields += [(name, ctypes.c_void_p) for name in pointers.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


# In the order of csrc/scan.h.
_Forward = _structure("q k v g initial offsets out final")
_Backward = _structure("q k v g initial offsets grad_out grad_final grad_q grad_k grad_v grad_g grad_initial")
native.check_mirror("ScanForward", _Forward)
native.check_mirror("ScanBackward", _Backward)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, offsets: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`lineattn.ops.scan.scan_loop` in one call: the output, ``(B, T, h, V)``, and the final state.

    With ``offsets`` they are int64 and contiguous, and there is a state a sequence.
    """
    of_state = _state(q, v, offsets)
    out, final = torch.empty_like(v), v.new_empty(of_state)
    arguments = _Forward(
        *_sizes(q, v, g, offsets), scale, *_inputs(q, k, v, g, initial, offsets),
        native.address("out", out, v.shape), native.address("final", final, of_state),
    )  # fmt: skip
    native.check(native.library().lineattn_scan_forward(ctypes.byref(arguments)))
    return out, final


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`lineattn.ops.scan.scan_step` in one call, for a state that is given."""
    out, final = torch.empty_like(v), torch.empty_like(state)
    batch, heads, keys = q.shape
    of_value, of_state, of_decay = (batch, heads, v.shape[2]), (batch, heads, keys, v.shape[2]), q.shape[: g.ndim]
    door = native.address
    arguments = _Forward(
        batch, 1, heads, keys, v.shape[2], keys if g.ndim == 3 else 1, native.threads(), scale,
        door("q", q, q.shape), door("k", k, q.shape), door("v", v, of_value), door("g", g, of_decay),
        door("state", state, of_state), None, door("out", out, of_value), door("final", final, of_state),
    )  # fmt: skip
    native.check(native.library().lineattn_scan_step(ctypes.byref(arguments)))
    return out, final


def backward(
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
    """The gradients of `forward`: of ``q``, ``k``, ``v``, ``g``, and of the initial state, given or zero."""
    of_state = _state(q, v, offsets)
    grads = [torch.empty_like(t) for t in (q, k, v, g)] + [v.new_empty(of_state)]
    arguments = _Backward(
        *_sizes(q, v, g, offsets), scale, *_inputs(q, k, v, g, initial, offsets),
        native.address("grad_out", grad_out, v.shape), native.address("grad_final", grad_final, of_state),
        *(native.address("gradient", t, like) for t, like in zip(grads, (*_rows(q, v, g), of_state), strict=True)),
    )  # fmt: skip
    native.check(native.library().lineattn_scan_backward(ctypes.byref(arguments)))
    grad_q, grad_k, grad_v, grad_g, grad_initial = grads
    return grad_q, grad_k, grad_v, grad_g, grad_initial


def _sizes(q: Tensor, v: Tensor, g: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    """``batch, tokens, heads, keys, values, decays, threads``."""
    if g.ndim == 4 and g.shape != q.shape:
        raise ValueError(f"g: shape {tuple(q.shape)} or {tuple(q.shape[:3])} is expected, not {tuple(g.shape)}")
    sequences, *_ = _state(q, v, offsets)
    return sequences, *q.shape[1:], v.shape[3], q.shape[3] if g.ndim == 4 else 1, native.threads()


def _state(q: Tensor, v: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    batch, _, heads, keys = q.shape
    return batch if offsets is None else len(offsets) - 1, heads, keys, v.shape[3]


def _rows(q: Tensor, v: Tensor, g: Tensor) -> tuple[tuple[int, ...], ...]:
    of_head = q.shape[:3]
    return q.shape, q.shape, (*of_head, v.shape[3]), q.shape if g.ndim == 4 else of_head


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, offsets: Tensor | None
) -> list[int | None]:
    shapes = (*_rows(q, v, g), _state(q, v, offsets))
    named = zip(("q", "k", "v", "g", "initial"), (q, k, v, g, initial), shapes, strict=True)
    found = [native.address(name, t, shape) for name, t, shape in named]
    if offsets is not None:
        # They lead to addresses too, and an operator in a compiled graph is the first to see their values.
        packing.check_offsets(offsets, len(q))
        packing.lengths(offsets, q.shape[1])
    return [
        *found,
        native.address("offsets", offsets, tuple(offsets.shape) if offsets is not None else (), dtype=torch.int64),
    ]
