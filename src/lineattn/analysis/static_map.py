r"""Which attention maps a cell can have at all, with tensors that are free where the cell's are maps of the token.

.. math::
    A_{t,s} = \sum_c q_{t,c} \, k_{s,c} \, e^{g_{s+1,c} + \dots + g_{t,c}}, \qquad s \le t

for as many key channels as tokens. Queries, and keys that are maps of the token, lie in a ball whose radius is the same
for any number of tokens: "bounded" has to be so, since a fixed decay is made up for by keys that grow without end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.analysis.anatomy import Anatomy
from lineattn.analysis.least_squares import least_squares

# What closed forms need, and some room. Without decay a map is q_t = p_t and k_s = e_s, of length one; without queries
# it is k_sc = p_cs - p_(c+1)s for c from s on, with channels that forget all behind token c: of length sqrt(2).
RADIUS = 1.5

# Tokens from one that is read to the next, where keys can leave out those between: 16 of them span 961, as contexts do.
APART = 64

_STEPS, _MAPS, _STARTS = 80, 2, 3

_ROW = 6  # entries of the row whose directions are counted

ENOUGH = 1e-3  # an entry of the map may be so far off

# Of logits: rows from nearly even to nearly all at one token.
_SPREAD = 2.0


class Fit(NamedTuple):
    """How near a cell came to random softmax maps.

    Attributes:
        tokens: ``n``.
        error: The largest difference of an entry, over all maps.
    """

    tokens: int
    error: float


def softmax_maps(count: int, tokens: int, draws: torch.Generator) -> Tensor:
    """Softmax attention of random logits, ``(count, n, n)``.

    Example:
        >>> softmax_maps(1, 3, torch.Generator().manual_seed(0)).sum(-1).allclose(torch.ones(1, 3).double())
        True
    """
    logits = _SPREAD * torch.randn(count, tokens, tokens, generator=draws, dtype=torch.float64)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1)


def fit(anatomy: Anatomy, tokens: int, draws: torch.Generator) -> Fit:
    """Fits a cell of this anatomy to random softmax maps of so many tokens.

    A part that is a map of the token is free at every token; one that is the same for all tokens is one free vector;
    fixed decays are those that were measured, of the head that forgets the fastest. Left out are turns by position,
    which are the same for all maps, and a division by the sum of a row, which is one in every map.

    Example:
        >>> from lineattn.analysis.anatomy import dissect
        >>> from lineattn.nn.token.retention import Retention
        >>> draws = torch.Generator().manual_seed(0)
        >>> fit(dissect(Retention(32, heads=2), draws), 4, draws).error > 0.1
        True
    """
    cell = _Cell(anatomy, tokens)
    return _fit(cell.map, cell.unknowns, tokens, draws)


def fit_tokens(weights: Callable[[Tensor], Tensor], channels: int, tokens: int, draws: torch.Generator) -> Fit:
    """As `fit`, for a method that shows its attention alone: what is free are the tokens that it is given.

    Args:
        weights: From tokens ``(P, n, C)`` to the attention of one head, ``(P, n, n)``.
        channels: ``C``.
        tokens: ``n``.
        draws: For the maps and the starts.
    """
    return _fit(lambda theta: weights(theta.unflatten(1, (tokens, channels))), tokens * channels, tokens, draws)


def redundancy(anatomy: Anatomy) -> int:
    """How many numbers more one row of the map of a single channel is made of than there are directions to move it in.

    Of queries and decays, one: the size of the query. With keys too, as many more as there are tokens but one.

    Example:
        >>> from lineattn.analysis.anatomy import dissect
        >>> from lineattn.nn.token.metala import MetaLA
        >>> redundancy(dissect(MetaLA(64), torch.Generator().manual_seed(0)))
        1
    """
    cell = _Cell(anatomy, _ROW, channels=1)
    theta = torch.randn(1, cell.unknowns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    slopes: Any = torch.autograd.functional.jacobian(lambda theta: cell.map(theta)[0, -1], theta)
    slopes = slopes[:, 0]
    return int((slopes != 0).any(0).sum()) - int(torch.linalg.matrix_rank(slopes, rtol=1e-9))


class _Cell:
    """The map of a cell from free numbers."""

    def __init__(self, anatomy: Anatomy, tokens: int, channels: int | None = None) -> None:
        self.anatomy, self.tokens = anatomy, tokens
        self.channels = tokens if channels is None else channels
        sizes = {"input": tokens * self.channels, "fixed": self.channels}
        row = anatomy.row
        decays = tokens if anatomy.together else sizes["input"]
        itself = self.channels if anatomy.reads == "before" else 0
        self.sizes = [sizes.get(row.query, 0), sizes.get(row.key, 0), decays if row.decay == "input" else 0, itself]
        self.unknowns = sum(self.sizes)
        # The numbers of the head that forgets the fastest, by its slowest channel; as many channels, spread over them.
        own = anatomy.decays[anatomy.decays.amax(1).argmin()].sort().values
        self.decays = own[torch.linspace(0, len(own) - 1, self.channels).round().long()]

    def map(self, theta: Tensor) -> Tensor:
        """The map, ``(P, n, n)``."""
        row, signs, problems = self.anatomy.row, self.anatomy.signs, len(theta)
        query, key, decay, share = theta.split(self.sizes, 1)
        g = self._decay(decay, problems)
        q = self._bounded(query, signs[0], problems)
        k = -torch.expm1(g) if row.key == "decay" else self._bounded(key, signs[1], problems)
        if row.decay == "fixed" and row.key == "input":
            g = g * APART
        sums = g.cumsum(1)
        before = self.anatomy.reads == "before"
        later = torch.ones(self.tokens, self.tokens, dtype=torch.bool).triu(0 if before else 1)[..., None]
        read = sums - g if before else sums
        between = (read[:, :, None] - sums[:, None]).masked_fill(later, -torch.inf).exp()
        found = torch.einsum("ptc,psc,ptsc->pts", q, k, between)
        return found + torch.diag_embed((q * k * share[:, None]).sum(-1)) if before else found

    def _decay(self, theta: Tensor, problems: int) -> Tensor:
        shape = (problems, self.tokens, self.channels)
        if self.anatomy.row.decay != "input":
            return self.decays.expand(shape)
        if self.anatomy.together:
            return -F.softplus(theta)[..., None] * self.decays
        return F.logsigmoid(theta).view(shape)

    def _bounded(self, theta: Tensor, signs: bool, problems: int) -> Tensor:
        shape = (problems, self.tokens, self.channels)
        if not theta.shape[1]:
            return torch.ones(shape, dtype=theta.dtype)
        free = theta.unflatten(1, (-1, self.channels)).expand(shape)
        free = free if signs else F.softplus(free)
        return RADIUS * free / (1 + free.square().sum(-1, keepdim=True)).sqrt()


def _fit(map_of: Callable[[Tensor], Tensor], unknowns: int, tokens: int, draws: torch.Generator) -> Fit:
    rows, columns = torch.tril_indices(tokens, tokens)
    goal = softmax_maps(_MAPS, tokens, draws)[:, rows, columns]
    errors = torch.full((_MAPS,), torch.inf, dtype=goal.dtype)
    for _ in range(_STARTS):
        left = errors >= ENOUGH
        if not left.any():
            break
        start = torch.randn(int(left.sum()), unknowns, generator=draws, dtype=goal.dtype)
        own = goal[left]
        _, found = least_squares(
            lambda theta, own=own: map_of(theta)[:, rows, columns] - own, start, steps=_STEPS, tolerance=ENOUGH / 10
        )
        errors[left] = torch.minimum(errors[left], found)
    return Fit(tokens, errors.max().item())
