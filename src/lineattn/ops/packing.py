"""Sequences of different lengths packed one after another in a single row of tokens."""

from __future__ import annotations

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
