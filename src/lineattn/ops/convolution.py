"""The short causal convolution along a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.ops import packing


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    recent: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""A filter a channel over a token and those just before it.

    .. math:: y_{t,c} = \sum_{j=0}^{n-1} w_{c,j} \, x_{t-n+1+j,c}

    Args:
        x: Tokens, ``(B, T, C)``.
        weight: :math:`w`, ``(C, n)``; its last column is the token's own.
        recent: The ``n - 1`` tokens before the first, ``(B, n - 1, C)``; ``None`` for zeros, the start of a sequence.
        lengths: Tokens that there are of each row, ``(B,)``, the first ones; ``None`` for all.
        cu_seqlens: Where packed sequences start and the last one ends, ``(N + 1,)``, as `lineattn.ops.scan` has it;
            each is filtered as if it were alone, and has ``recent`` tokens of its own, ``(N, n - 1, C)``.

    Returns:
        :math:`y`, ``(B, T, C)``, and the last ``n - 1`` tokens that there are, ``(B, n - 1, C)``, or
        ``(N, n - 1, C)``, which is what the next call wants of this one.

    Raises:
        InputError: ``recent`` is not of this shape.

    Example:
        >>> x, weight = torch.arange(5.0)[None, :, None], torch.tensor([[1.0, 1.0]])
        >>> first, recent = causal_convolution(x[:, :2], weight)
        >>> rest, recent = causal_convolution(x[:, 2:], weight, recent)
        >>> torch.cat([first, rest], 1).flatten().tolist(), recent.tolist()
        ([0.0, 1.0, 3.0, 5.0, 7.0], [[[4.0]]])
    """
    before = weight.shape[1] - 1
    earlier, recent = preceding(x, before, recent, lengths, cu_seqlens)
    # As sums of shifted rows: channels stay side by side, and there may be no token at all.
    out = x * weight[:, before]
    for j, shifted in enumerate(earlier):
        out = out + shifted * weight[:, j]
    return out, recent


def preceding(
    x: Tensor,
    before: int,
    recent: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The tokens before each one.

    Args:
        x: Tokens, ``(B, T, ...)``.
        before: How many.
        recent: Those before the first, see `causal_convolution`; also for ``lengths`` and ``cu_seqlens``.

    Returns:
        The tokens so many places before, each ``(B, T, ...)``, from the farthest to the nearest; and the last ones that
        there are, ``(B, before, ...)``, or ``(N, before, ...)``.

    Raises:
        InputError: ``recent`` is not of this shape.

    Example:
        >>> (previous,), recent = preceding(torch.arange(4.0)[None], 1)
        >>> previous.tolist(), recent.tolist()
        ([[0.0, 0.0, 1.0, 2.0]], [[3.0]])
        >>> (previous,), recent = preceding(torch.arange(4.0)[None], 1, cu_seqlens=torch.tensor([0, 3, 3, 4]))
        >>> previous.tolist(), recent.tolist()
        ([[0.0, 0.0, 1.0, 0.0]], [[2.0], [0.0], [3.0]])
    """
    tokens, sequences = x.shape[1], x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (sequences, before, *x.shape[2:])
    if recent is None:
        recent = x.new_zeros(shape)
    elif recent.shape != shape:
        raise InputError(f"state: the tokens before are {tuple(recent.shape)}; they must be {shape}")
    if cu_seqlens is not None:
        return _preceding_packed(x, before, recent, cu_seqlens)
    row = torch.cat([recent, x], 1)
    earlier = [row[:, j : j + tokens] for j in range(before)]
    if lengths is None:
        return earlier, row[:, tokens:].clone()  # a view would keep the whole row in memory
    last = lengths[:, None] + torch.arange(before, device=x.device)
    return earlier, row[torch.arange(sequences, device=x.device)[:, None], last]


def _preceding_packed(x: Tensor, before: int, recent: Tensor, cu_seqlens: Tensor) -> tuple[list[Tensor], Tensor]:
    count, cu_seqlens = recent.shape[0], cu_seqlens.to(x.device, torch.int64)
    row = torch.cat([recent.flatten(0, 1), x[0]])

    def at(sequence: Tensor, place: Tensor) -> Tensor:
        """What stands at a place of a sequence; what is before its start is recent."""
        found = torch.where(place < 0, (sequence + 1) * before, count * before + cu_seqlens[sequence]) + place
        return row[found]

    sequence, place = packing.places(cu_seqlens, x.shape[1])
    every, back = torch.arange(count, device=x.device)[:, None], torch.arange(-before, 0, device=x.device)
    return [at(sequence, place + j)[None] for j in back], at(every, cu_seqlens.diff()[:, None] + back)
