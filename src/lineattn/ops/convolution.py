"""The short causal convolution along a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.errors import InputError


def causal_convolution(
    x: Tensor, weight: Tensor, recent: Tensor | None = None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""A filter a channel over a token and those just before it.

    .. math:: y_{t,c} = \sum_{j=0}^{n-1} w_{c,j} \, x_{t-n+1+j,c}

    Args:
        x: Tokens, ``(B, T, C)``.
        weight: :math:`w`, ``(C, n)``; its last column is the token's own.
        recent: The ``n - 1`` tokens before the first, ``(B, n - 1, C)``; ``None`` for zeros, the start of a sequence.
        lengths: Tokens that there are of each row, ``(B,)``, the first ones; ``None`` for all.

    Returns:
        :math:`y`, ``(B, T, C)``, and the last ``n - 1`` tokens that there are, ``(B, n - 1, C)``, which is what the
        next call wants of this one.

    Raises:
        InputError: ``recent`` is not of this shape.

    Example:
        >>> x, weight = torch.arange(5.0)[None, :, None], torch.tensor([[1.0, 1.0]])
        >>> first, recent = causal_convolution(x[:, :2], weight)
        >>> rest, recent = causal_convolution(x[:, 2:], weight, recent)
        >>> torch.cat([first, rest], 1).flatten().tolist(), recent.tolist()
        ([0.0, 1.0, 3.0, 5.0, 7.0], [[[4.0]]])
    """
    tokens, before = x.shape[1], weight.shape[1] - 1
    row, recent = preceded(x, before, recent, lengths)
    # As sums of shifted rows: channels stay side by side, and there may be no token at all.
    out = row[:, before:] * weight[:, before]
    for j in range(before):
        out = out + row[:, j : j + tokens] * weight[:, j]
    return out, recent


def preceded(
    x: Tensor, before: int, recent: Tensor | None = None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens behind the last ``before`` ones of an earlier call, ``(B, before + T, C)``, and the last ones of them.

    ``recent`` and ``lengths`` are those of `causal_convolution`.

    Example:
        >>> row, recent = preceded(torch.arange(4.0)[None, :, None], 1)
        >>> row.flatten().tolist(), recent.tolist()
        ([0.0, 0.0, 1.0, 2.0, 3.0], [[[3.0]]])
    """
    shape = (x.shape[0], before, x.shape[2])
    if recent is None:
        recent = x.new_zeros(shape)
    elif recent.shape != shape:
        raise InputError(f"state: the tokens before are {tuple(recent.shape)}; they must be {shape}")
    row = torch.cat([recent, x], 1)
    if lengths is None:
        return row, row[:, x.shape[1] :].clone()  # a view would keep the whole row in memory
    last = lengths[:, None] + torch.arange(before, device=x.device)
    return row, row.take_along_dim(last[..., None], 1)
