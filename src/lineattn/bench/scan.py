"""The gated linear recurrence: ours, the loops that everybody writes first, and causal softmax attention.

The projections around it are left out on every side. Softmax attention has as many heads, as wide as the values. The
loop of the forward picks each token by an index, as published references do; with a backward such a loop is quadratic
in the tokens, since every index costs a gradient of full size, so there the tokens are unbound once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from lineattn.bench.timing import compared, take_turns
from lineattn.measure import SavedBytes
from lineattn.ops.scan import scan, scan_chunked

LENGTHS = (512, 2048)
BATCH, HEADS, KEYS, VALUES = 1, 4, 64, 128
SETTING = {"batch_size": BATCH, "heads": HEADS, "key_width": KEYS, "value_width": VALUES, "decays": "per key channel"}
SOFTMAX = f"causal softmax (SDPA, d={VALUES})"

Form = Callable[..., Tensor]


def indexing_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The formula, token by token."""
    state, out = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[:, t] = (q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5
    return out


def unbinding_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The formula, token by token, in the form whose backward is linear."""
    state, outs = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
    for qt, kt, vt, at in zip(q.unbind(1), k.unbind(1), v.unbind(1), g.exp().unbind(1), strict=True):
        state = state * at[..., None] + kt[..., None] * vt[..., None, :]
        outs.append((qt[..., None] * state).sum(-2))
    return torch.stack(outs, 1) * q.shape[-1] ** -0.5


def causal_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own, on tensors ``(B, h, T, D)``."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """`lineattn.ops.scan.scan` without the final state."""
    return scan(q, k, v, g)[0]


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """`lineattn.ops.scan.scan_chunked` without the final state."""
    return scan_chunked(q, k, v, g)[0]


def measure(
    *,
    rounds: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    lengths: Sequence[int] = LENGTHS,
) -> list[dict[str, Any]]:
    """One row for each length, mode and form.

    Args:
        rounds: Timed calls a row.
        seed: Seed of the tensors.
        tick: Called after every timed call.
        lengths: Tokens.

    Returns:
        Rows with ``length``, ``mode`` and ``name``: medians ``wall_ms`` and ``cpu_ms`` and how many times slower than
        ours (``wall_ratio``, ``cpu_ratio``); in mode ``saved`` instead ``saved_mb``, what autograd keeps beyond the
        inputs (10^6 bytes).
    """
    rows = []
    for length in lengths:
        inputs, wide = _inputs(length, torch.Generator().manual_seed(seed))
        for mode, loop in (("forward", indexing_loop), ("forward + backward", unbinding_loop)):
            bind = _forward if loop is indexing_loop else _both
            calls = {
                "ours": bind(ours, inputs),
                "python loop": bind(loop, inputs),
                SOFTMAX: bind(causal_softmax, wide),
                "chunked (PyTorch)": bind(chunked, inputs),
            }
            times = compared(take_turns(calls, rounds=rounds, tick=tick), "ours")
            rows += [{"length": length, "mode": mode, "name": name} | times[name] for name in calls]
        rows += [
            {"length": length, "mode": "saved", "name": name, "saved_mb": _saved_bytes(form, given) / 1e6}
            for name, form, given in (
                ("ours", ours, inputs),
                ("python loop", unbinding_loop, inputs),
                (SOFTMAX, causal_softmax, wide),
                ("chunked (PyTorch)", chunked, inputs),
            )
        ]
    return rows


def calls(rounds: int) -> int:
    """How often `measure` will call ``tick``."""
    return rounds * len(LENGTHS) * 2 * 4


def _inputs(length: int, draws: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """``q, k, v, g`` as MetaLA's layer makes them, and ``q, k, v`` for softmax attention."""
    q, gate = (torch.randn(BATCH, length, HEADS, KEYS, generator=draws) for _ in range(2))
    g = logsigmoid(gate) / 16
    wide = [torch.randn(BATCH, HEADS, length, VALUES, generator=draws).requires_grad_() for _ in range(3)]
    v = torch.randn(BATCH, length, HEADS, VALUES, generator=draws)
    return [t.requires_grad_() for t in (q, -torch.expm1(g), v, g)], wide


def _forward(form: Form, inputs: list[Tensor]) -> Callable[[], object]:
    def step() -> None:
        with torch.no_grad():
            form(*inputs)

    return step


def _both(form: Form, inputs: list[Tensor]) -> Callable[[], object]:
    with torch.no_grad():
        cotangent = torch.ones_like(form(*inputs))
    return lambda: torch.autograd.grad(form(*inputs), inputs, cotangent)


def _saved_bytes(form: Form, inputs: list[Tensor]) -> int:
    saved = SavedBytes()
    with saved.counting(nn.Module(), *inputs):
        form(*inputs)
    return saved.total
