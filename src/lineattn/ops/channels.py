"""Functions of the pooled map: what the queries, keys and gates of attention over depth are computed from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.ops.autocast import no_autocast


def pool(x: Tensor) -> Tensor:
    """``(B, C, H, W) -> (B, C)``: mean over space, at least in float32."""
    # A sum: its gradient is an expanded view, where the mean's would be a map of its own.
    total = x.sum((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))
    return total / (x.shape[2] * x.shape[3])


def channel_conv(y: Tensor, weight: Tensor) -> Tensor:
    """1-D convolution along the channel axis, one kernel for all channels: ``(B, C), (1, 1, k) -> (B, C)``.

    Written as a product with shifted copies: the library's one-channel convolution is many times slower in the
    backward than this, and under autocast it would leave float32.
    """
    taps = weight.to(y.dtype).flatten()
    return (F.pad(y, (len(taps) // 2, len(taps) // 2)).unfold(-1, len(taps), 1) * taps).sum(-1)


def linear(y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:math:`y W^T + b` in the type of ``y``: ``(B, I), (O, I), (O,) -> (B, O)``; autocast doesn't lower it."""
    with no_autocast(y.device):
        return F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))


def heads(y: Tensor, count: int) -> Tensor:
    """``(B, C) -> (B, h, D)``; a head is a contiguous slice of the channels."""
    return y.unflatten(-1, (count, -1))


def per_channel(heads: Tensor, channels: int) -> Tensor:
    """``(B, h) -> (B, C)``: repeats a head's value over its channels."""
    return heads.repeat_interleave(channels // heads.shape[1], dim=1)
