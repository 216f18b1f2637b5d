"""The contract of attention over the tokens of a sequence.

A method takes tokens ``(B, T, C)`` and returns as many; what comes out at a token depends on it and on earlier ones
alone. What later tokens need of earlier ones is the *state*: it is taken as an argument and returned, never written to
``self`` and never changed in place. A sequence in pieces, the state handed on, gives what it gives at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.ops import packing
from lineattn.ops.memory import check_mask

Form = Literal["auto", "parallel", "chunked", "loop"]
Origin = Literal["input", "decay", "fixed", "one"]


class Row(NamedTuple):
    """A method's row in the table of "MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map".

    What each part of attention is made from: ``input``, a map of the token; ``decay``, one minus the token's decay;
    ``fixed``, numbers that are the same for all tokens; ``one``, nothing.
    """

    query: Origin
    key: Origin
    value: Origin
    decay: Origin

    @property
    def dynamic(self) -> str:
        """The parts that are maps of the token: what there are parameters for, in the paper's count of them.

        Example:
            >>> Row(query="input", key="decay", value="input", decay="input").dynamic
            'query, value, decay'
        """
        return ", ".join(part for part, origin in self._asdict().items() if origin == "input")

    def __str__(self) -> str:
        words = {"decay": "1 - decay", "one": "1"}
        return ", ".join(f"{part}: {words.get(origin, origin)}" for part, origin in self._asdict().items())


class Layout(NamedTuple):
    """How sequences lie in the rows of tokens: one a row and all of it, if neither is given.

    Attributes:
        lengths: Tokens that there are of each row, ``(B,)``, the first ones.
        cu_seqlens: Where sequences that are packed in the only row start, and the last one ends, ``(N + 1,)``.
    """

    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def count(self, x: Tensor) -> int:
        """Sequences that there are in ``x``, each of which has a state."""
        return x.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def pieces(self, x: Tensor, length: int) -> Iterator[tuple[Tensor, slice, Layout]]:
        """So many tokens at a time; which sequences are packed there, else all in one; and how they lie there.

        Example:
            >>> packed = Layout(cu_seqlens=torch.tensor([0, 1, 5, 5, 6]))
            >>> for x, which, layout in packed.pieces(torch.zeros(1, 6, 2), 3):
            ...     print(x.shape[1], which.start, which.stop, layout.cu_seqlens.tolist())
            3 0 2 [0, 1, 3]
            3 1 4 [0, 2, 2, 3]
        """
        offsets = [] if self.cu_seqlens is None else self.cu_seqlens.tolist()
        for n, piece in enumerate(x.split(length, 1)):
            start, size = n * length, piece.shape[1]
            if self.cu_seqlens is not None:
                first, end = bisect_right(offsets, start) - 1, bisect_left(offsets, start + size)
                inside = (self.cu_seqlens[first : end + 1] - start).clamp(0, size)
                yield piece, slice(first, end), Layout(cu_seqlens=inside)
            else:
                left = None if self.lengths is None else (self.lengths - start).clamp(0, size)
                yield piece, slice(0, 1), Layout(left)


class TokenMixer(nn.Module, ABC):
    """Base of every method of the token axis.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; they divide the channels.
        divided: What they have to divide in the place of the channels, where a method widens them first.

    Shape:
        - ``x``: ``(B, T, C)``.
        - ``state``: What a call before returned, or ``None`` at the start. Every tensor in it has the batch first, so
          rows are chosen, for a beam search say, by indexing all of them.
        - ``mask``: ``(B, T)`` of booleans, true where there is a token; ``None`` for everywhere. What comes out, and
          the state, are as if the others were not there, wherever they stand; their own outputs are zeros.
        - ``cu_seqlens``: ``(N + 1,)`` of integers, for ``N`` sequences packed one after another in the row of a batch
          of one: where each starts, and where the last one ends, as `lineattn.ops.scan` has it. Each is computed as if
          it were alone, from its row of the state, of which there are ``N``.
        - ``form``: How it is computed, with the same results: ``parallel``, all pairs of tokens at once; ``chunked``,
          in pieces; ``loop``, token by token; ``auto``, the fastest there is.
        - Returns ``(out, state)``, ``out`` shaped like ``x``.

    Raises:
        InputError: From `forward`: tokens, a state, a mask or offsets that don't fit, or a form that there isn't.
    """

    row: Row
    """Of the class, that of its default arguments."""

    def __init__(self, channels: int, heads: int, *, divided: int | None = None) -> None:
        super().__init__()
        divided = channels if divided is None else divided
        if heads < 1 or channels < 1 or divided % heads:
            raise InputError(f"heads is {heads}; it must divide the {divided} channels")
        self.channels, self.heads = channels, heads

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        form: Form = "auto",
    ) -> tuple[Tensor, Any]:
        self._check(x)
        if form not in get_args(Form):
            raise InputError(f"form is {form!r}; it must be 'auto', 'parallel', 'chunked' or 'loop'")
        check_mask(mask, x.shape[:2])
        if cu_seqlens is not None:
            if mask is not None:
                raise InputError("mask: packed sequences (cu_seqlens) have no padding")
            packing.check_offsets(cu_seqlens, x.shape[0])
            if not torch.compiler.is_compiling():  # reading them would break the graph
                packing.lengths(cu_seqlens, x.shape[1])
        layout = Layout(cu_seqlens=cu_seqlens)
        if state is not None and len(state[0]) != layout.count(x):
            raise InputError(f"state: it has {len(state[0])} rows, and there are {layout.count(x)} sequences")
        if mask is None:
            return self.mix(x, state, layout, form)
        # To the front with the tokens that there are: a method has to know padding on the right alone.
        order = (~mask).byte().argsort(dim=1, stable=True)
        lengths = mask.sum(1)
        front = x.take_along_dim(order[..., None], 1).where(exists(lengths, x.shape[1])[..., None], 0)
        out, state = self.mix(front, state, Layout(lengths), form)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        return out.take_along_dim(places[..., None], 1).where(mask[..., None], 0), state

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """One more token, ``(B, C) -> (B, C)``, and the state after it."""
        if x.ndim != 2:
            raise InputError(f"x is {tuple(x.shape)}; one token is (B, {self.channels})")
        out, state = self(x[:, None], state)
        return out[:, 0], state

    @abstractmethod
    def mix(self, x: Tensor, state: Any, layout: Layout, form: Form) -> tuple[Tensor, Any]:
        """`forward` where the tokens that there are come first in each row, or sequences are packed."""

    @abstractmethod
    def state_size(self, tokens: int) -> int:
        """Numbers that the state of a sequence holds after so many tokens."""

    @abstractmethod
    def weights(self, x: Tensor) -> dict[str, Tensor]:
        """What attention is made of, for the analyses; pure.

        ``attention``, ``(B, h, T, T)``, what each token reads of each. Where attention is a recurrence, also its ``q``,
        ``k`` ``(B, T, h, K)``, ``v`` ``(B, T, h, V)`` and ``g``, the logarithms of the decays, ``(B, T, h, K)`` or
        ``(B, T, h)``.
        """

    def _check(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[2] != self.channels:
            hint = "; one token, (B, C), is for step" if x.ndim == 2 else ""
            raise InputError(f"x is {tuple(x.shape)}; tokens are (B, T, {self.channels}){hint}")


def exists(lengths: Tensor, tokens: int) -> Tensor:
    """The mask ``(B, T)`` of rows whose first so many tokens there are.

    Example:
        >>> exists(torch.tensor([2, 0]), 3).tolist()
        [[True, True, False], [False, False, False]]
    """
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]
