"""The gated linear recurrence by the Triton kernels of fla-core (Yang et al., flash-linear-attention), on CUDA.

Written to the documented interface of fla-core 0.6, ``fla.ops.gla.chunk_gla``; called through a stand-in in the tests,
it has not run on a GPU yet. Of its kernels one should know:

- They multiply float32 in TF32: results agree with the other forms to about 1e-3.
- They subtract sums of logarithms, so a decay after far stronger ones in the same 64 tokens loses digits.
- They have no second derivatives.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.ops import native, packing
from lineattn.ops.scan_chunked import chunked

DEVICE = "cuda"

# Narrower keys fill no matrix product of a GPU.
NARROWEST = 16

# It leaves nothing that float32 could hold; with minus infinity, a difference of two sums would be a NaN.
STRONGEST = -100.0

Kernel = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def kernel() -> Kernel | None:
    """``chunk_gla``, imported when first asked for; ``None`` where fla-core is missing or of another interface.

    Older versions take the heads before the tokens, and would mix the two without an error.
    """
    try:
        found = importlib.import_module("fla.ops.gla").chunk_gla
    except (ImportError, AttributeError):
        return None
    return found if {"cu_seqlens", "state_v_first"} <= inspect.signature(found).parameters.keys() else None


def usable(*tensors: Tensor | None) -> bool:
    """Whether it takes these: float32 on CUDA, with fla-core there, and no compiler, whose graph it would break."""
    return not torch.compiler.is_compiling() and native.plain(tensors, DEVICE) and kernel() is not None


def fla_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`lineattn.ops.scan.scan` for tensors that are `usable`."""
    if not q.numel() or not v.numel():
        return chunked(q, k, v, g, state, scale, cu_seqlens)
    g = (g if g.ndim == 4 else g[..., None].expand_as(q)).clamp(min=STRONGEST)
    if cu_seqlens is None:
        return _call(q, k, v, g, state, scale, None)
    lengths = packing.lengths(cu_seqlens, q.shape[1])
    offsets = cu_seqlens.to(q.device, torch.int64)
    if all(lengths):
        return _call(q, k, v, g, state, scale, offsets)
    # It takes no empty sequences: their final state is the initial one.
    filled = torch.tensor([n for n, length in enumerate(lengths) if length], device=q.device)
    if state is None:
        state = v.new_zeros(len(lengths), *q.shape[2:], v.shape[3])
    out, final = _call(q, k, v, g, state[filled], scale, F.pad(offsets[filled + 1], (1, 0)))
    return out, state.index_copy(0, filled, final)


def _call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, scale: float, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    call = kernel()
    assert call is not None
    return call(q, k, v, g, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=offsets)
