r"""The gated linear recurrence as attention: which token reads how much of which.

.. math::
    A_{t,s} = s_q \sum_c q_{t,c} \, k_{s,c} \, e^{g_{s+1,c} + \dots + g_{t,c}} \; (s \le t), \qquad
    o_t = \sum_s A_{t,s} v_s

The decay of a token is not applied to what it writes itself. Time and memory go with the square of the tokens, times
the width of the keys: for analyses and tests. `lineattn.ops.scan` computes the same in linear time.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.ops import packing
from lineattn.ops.autocast import no_autocast


def attention_map(q: Tensor, k: Tensor, g: Tensor, *, scale: float | None = None) -> Tensor:
    """:math:`A`.

    Args:
        q: Queries, ``(B, T, h, K)``.
        k: Keys, ``(B, T, h, K)``.
        g: Logarithms of the decays, ``(B, T, h, K)``, or ``(B, T, h)`` for one a head.
        scale: :math:`s_q`; ``K**-0.5`` where it is not given.

    Returns:
        ``(B, h, T, T)``: row :math:`t` is what token :math:`t` reads.

    Example:
        >>> q = k = torch.ones(1, 3, 1, 1)
        >>> attention_map(q, k, torch.full((1, 3, 1), 0.5).log())[0, 0].tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return factor * torch.einsum("bthc,bshc,btshc->bhts", q, k, _decays(g))


def scan_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`lineattn.ops.scan.scan` by the map; results in the widest type that it is given, at least float32."""
    dtype = torch.float32
    for t in (q, k, v, g):
        dtype = torch.promote_types(dtype, t.dtype)
    q, k, v, g = (t.to(dtype) for t in (q, k, v, g))
    g = g if g.ndim == 4 else g[..., None]
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = v.new_zeros(sequences, *q.shape[2:], v.shape[3])
    state = zeros if initial_state is None else initial_state.to(dtype)
    form = partial(_parallel, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    with no_autocast(q.device):
        if cu_seqlens is None:
            return form(q, k, v, g, state)
        return packing.one_by_one(form, [q, k, v, g], state, cu_seqlens)


def _parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.einsum("bhts,bshv->bthv", attention_map(q, k, g, scale=scale), v)
    out = out + scale * torch.einsum("bthc,bhcv->bthv", q * g.cumsum(1).exp(), state)
    to_end = F.pad(g[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1).exp()  # from after a token
    return out, torch.einsum("bshc,bshv->bhcv", k * to_end, v) + g.sum(1).exp()[..., None] * state


def _decays(g: Tensor) -> Tensor:
    """From after token ``s`` to after token ``t``, ``(B, t, s, h, K or 1)``; zero for what is later."""
    g = g if g.ndim == 4 else g[..., None]
    tokens = g.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril(-1)[..., None, None]  # s < t
    # Sums of what lies between, never a difference of two sums, which loses digits where decays are strong.
    sums = g[:, :, None].where(earlier, 0).cumsum(1)
    return sums.masked_fill(earlier.transpose(0, 1), -torch.inf).exp()
