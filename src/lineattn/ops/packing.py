"""Sequences of different lengths packed one after another in a single row of tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lineattn.errors import InputError


def check_offsets(cu_seqlens: Tensor, batch: int) -> None:
    """What can be said of offsets without reading them.

    Raises:
        InputError: They are no ``(N + 1,)`` integers, or there is more than one row of tokens.
    """
    if cu_seqlens.ndim != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            "cu_seqlens: int32 or int64 of shape (N + 1,) is expected for N sequences, not "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise InputError(f"cu_seqlens: packed sequences lie in a batch of 1, not of {batch}")


def lengths(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """How long each of the packed sequences is; reads the offsets, so a GPU is waited for.

    Args:
        cu_seqlens: Where each sequence starts, and where the last one ends, ``(N + 1,)``.
        tokens: How many there are in all.

    Raises:
        InputError: The offsets don't start at 0, decrease, or don't end at ``tokens``.

    Example:
        >>> lengths(torch.tensor([0, 3, 3, 7]), 7)
        [3, 0, 4]
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise InputError(
            f"cu_seqlens: offsets from 0 to the {tokens} tokens are expected, not from {offsets[0]} to {offsets[-1]}"
        )
    found = [end - start for start, end in pairwise(offsets)]
    if found and min(found) < 0:
        raise InputError(f"cu_seqlens: offset {found.index(min(found)) + 1} is smaller than the one before it")
    return found


def places(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Of which sequence each token is, and where in it, both ``(T,)``; nothing is read on the host.

    Example:
        >>> [t.tolist() for t in places(torch.tensor([0, 2, 2, 5]), 5)]
        [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    cu_seqlens = cu_seqlens.long()
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return sequence, token - cu_seqlens[sequence]


def one_by_one(
    form: Callable[..., tuple[Tensor, Tensor]], tokens: list[Tensor], state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """``form(*tokens, state)`` of each packed sequence for itself; outputs in a row again, and a state each."""
    found = lengths(cu_seqlens, tokens[0].shape[1])
    if not found:
        return form(*tokens, state)
    pieces = zip(*(t.split(found, 1) for t in tokens), state.split(1), strict=True)
    outs, finals = zip(*(form(*piece) for piece in pieces), strict=True)
    return torch.cat(outs, 1), torch.cat(finals)
