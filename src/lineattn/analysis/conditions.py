r"""What linear attention needs to stand for softmax attention: the conditions of MetaLA's paper, measured on a layer.

"MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map" (2024), arXiv 2411.10741, section 4.

- **C0, linear cost**: the state is as large after many tokens as after few, work grows with the tokens, and one more
  token costs the same wherever it stands. Work is counted: multiply-accumulates, and numbers that operators write.
- **C1, dynamic memory**: what is left of a token depends on those after it, and a token can overwrite one row of the
  state and leave the others as they are, so that each decay has to be a number of its own:

  .. math:: \mathrm{diag}(a_t) \, S + k_t^\top v = (S_1, \dots, v, \dots, S_K)^\top

- **C2, static approximation**: for any softmax map of :math:`K` tokens there are bounded queries, keys and decays.
- **C3, least parameters**: C0 to C2, and nothing but the size of the query could be left out.

All is measured by running the layer, with random weights or with those that a search finds. Where that differs from
what the method says of itself, it is a *fault*.

What it does not say: it is about maps that can be had, not about what is learned. C2 is about as many tokens as a head
has key channels; the blocks of longer maps have no higher rank. A decay that is a sigmoid is zero in the limit alone:
how small it is for tokens of several sizes is measured too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lineattn.analysis.anatomy import (
    MIDDLE,
    SMALL,
    Anatomy,
    dissect,
    interaction,
    own_map,
    sequence,
    shaken,
    wide,
)
from lineattn.analysis.least_squares import least_squares
from lineattn.analysis.static_map import APART, ENOUGH, fit, fit_tokens, redundancy
from lineattn.nn.token.base import Row, TokenMixer

# A head is a few channels wide at it, and everything can be run.
CHANNELS = 64

# Tokens after which states are compared, and between which the growth of work is measured.
FEW, MANY = 64, 1024
GROWTHS = (256, 512)

# Root mean squares of tokens; a layer sees about 1, and what its weights make of it may be as much larger as they are.
SIZES = (1, 10, 100, 1000)

TOKENS = (4, 8, 12)

# What is looked at of a layer that has more; and how often a search begins.
_HEADS, _ROWS, _STARTS = 2, 4, 3


@dataclass(frozen=True)
class Conditions:
    """What was measured of a method.

    Attributes:
        method: Its name.
        of_token: Its parts that are maps of the token; empty where it shows its attention alone.
        cell: What its parts are made from, and how they are put together: methods that share it can do the same.
        linear: C0.
        dynamic: C1.
        static: C2.
        least: C3; ``None``, as any of the others, where it could not be measured.
        state: Numbers of its state after `FEW` and `MANY` tokens.
        growth: Exponent of work in tokens.
        step_growth: Work of one more token after `MANY` tokens over that after `FEW`.
        slope: The largest derivative of what is read of an early token by a later one between the two.
        overwriting: How far decays and keys are, at best, from those that overwrite one row and leave the others.
        least_decays: The smallest decay that random weights make, for tokens of the `SIZES`.
        fits: The largest error of an entry, by the number of tokens; ends at the first that is not reached.
        rank: Of a block of the map, of so many tokens (``block``): at most that of the width of a head's keys.
        redundant: Numbers of a row of the map that are redundant.
        parameters: Those that queries, keys and decays are made from and values are not.
        notes: What the figures need to be understood.
        faults: Where the method is not what it says.
    """

    method: str
    of_token: str
    cell: str
    linear: bool
    dynamic: bool | None
    static: bool | None
    least: bool | None
    keys: int | None
    state: tuple[int, int]
    growth: float
    step_growth: float
    slope: float
    overwriting: float | None
    least_decays: tuple[float, ...]
    fits: dict[int, float]
    rank: int
    block: int
    redundant: int | None
    parameters: int | None
    notes: tuple[str, ...]
    faults: tuple[str, ...]


PARTS = 4  # calls of `measure`'s ``tick``


def measure(method: str, mixer: TokenMixer, *, seed: int = 0, tick: Callable[[], None] = lambda: None) -> Conditions:
    """Measures the conditions on a layer, which is left as it is.

    Args:
        method: Its name, for the result.
        mixer: The layer; of its weights, the shapes matter and where they start.
        seed: Of all random numbers.
        tick: Called after each of `PARTS` parts of the work.

    Example:
        >>> from lineattn.nn.token.retention import Retention
        >>> found = measure("retention", Retention(16, heads=2))
        >>> found.linear, found.dynamic, found.static, found.faults
        (True, False, False, ())
    """
    draws = torch.Generator().manual_seed(seed)
    anatomy = dissect(mixer, draws)
    shown = anatomy if anatomy is not None and anatomy.reads is not None else None  # what attention is made of
    state, growth, step_growth = work(mixer, draws)
    tick()
    slope = between(mixer, anatomy, draws)
    overwriting = None if anatomy is None else overwrite(mixer, anatomy, draws)
    tick()
    fits = _fits(mixer, shown, draws)
    tick()
    rank, block = rank_of(mixer, None if anatomy is None else anatomy.keys, draws)
    redundant = None if shown is None else redundancy(shown)
    linear = state[0] == state[1] and growth < 1.1 and step_growth == 1
    dynamic = slope > SMALL and (overwriting is None or overwriting < ENOUGH)
    static = max(fits.values()) < ENOUGH
    found = Conditions(
        method=method,
        of_token="" if anatomy is None else anatomy.row.dynamic,
        cell="" if shown is None else _cell(shown),
        linear=linear,
        dynamic=None if anatomy is not None and anatomy.reach > MIDDLE else dynamic,
        # A search by the layer's own tokens that fails says nothing.
        static=None if shown is None and not static else static,
        least=None if redundant is None else redundant <= 1,
        keys=None if anatomy is None else anatomy.keys,
        state=state,
        growth=growth,
        step_growth=step_growth,
        slope=slope,
        overwriting=overwriting,
        least_decays=() if anatomy is None else least_decays(mixer, draws),
        fits=fits,
        rank=rank,
        block=block,
        redundant=redundant,
        parameters=None if anatomy is None else made_with(mixer, draws),
        notes=tuple(_notes(anatomy)),
        faults=tuple(_faults(mixer, anatomy, state, draws)),
    )
    tick()
    before = (found.linear, found.dynamic, found.static)
    return replace(found, least=False if False in before else None if None in before else found.least)


def work(mixer: TokenMixer, draws: torch.Generator) -> tuple[tuple[int, int], float, float]:
    """Sizes of the state after few and many tokens, the exponent of work in tokens, and how that of a step grows."""
    mixer = shaken(mixer, draws)
    x = sequence(mixer, draws, tokens=MANY + 1)
    sizes, steps, works = [], [], []
    with torch.no_grad():
        for tokens in (FEW, MANY):
            _, state = mixer(x[:, :tokens])
            sizes.append(sum(leaf.numel() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)))
            steps.append(_count(lambda at=tokens, state=state: mixer.step(x[:, at], state)))
        works = [_count(lambda tokens=tokens: mixer(x[:, :tokens])) for tokens in GROWTHS]
    growth = math.log(works[1] / works[0]) / math.log(GROWTHS[1] / GROWTHS[0])
    return (sizes[0], sizes[1]), growth, steps[1] / steps[0]


def between(mixer: TokenMixer, anatomy: Anatomy | None, draws: torch.Generator) -> float:
    r"""The largest :math:`|\partial A_{t,s} / \partial x_j| / |A_{t,s}|`, for one :math:`s < j < t`.

    Queries and keys don't see token :math:`j`, so it is zero for fixed decays. Where it can be, attention is taken
    without what its rows are divided by, which lessens all earlier tokens alike.
    """
    mixer = shaken(mixer, draws)
    reach = MIDDLE if anatomy is None else anatomy.reach
    x = sequence(mixer, draws, tokens=reach + 2).requires_grad_()
    weights = mixer.weights(x)
    found = own_map(weights) if anatomy is not None and anatomy.reads == "after" else weights["attention"]
    reads = found[0, :_HEADS, -1, 0]
    return max((_slope(read, [x])[0][0, 1].abs().max() / read.abs()).item() for read in reads)


def overwrite(mixer: TokenMixer, anatomy: Anatomy, draws: torch.Generator) -> float:
    """How far a head is from decays and keys that overwrite one row and leave the others, for the worst of its rows.

    Searched for together: weights of the layer, and with them a token for each row, of four of them at most.
    """
    readable = _Readable(copy.deepcopy(mixer).double().eval())
    weights = dict(readable.named_parameters())
    rows = torch.linspace(0, anatomy.keys - 1, min(_ROWS, anatomy.keys)).round().long()
    goal = torch.eye(len(rows), dtype=torch.float64)
    sizes = [len(rows) * mixer.channels, *(weight.numel() for weight in weights.values())]

    def residual(theta: Tensor) -> Tensor:
        tokens, *flat = theta[0].split(sizes)
        own = {name: part.view_as(weights[name]) for name, part in zip(weights, flat, strict=True)}
        made = functional_call(readable, own, (tokens.view(len(rows), 1, -1),))
        decays = wide(made["g"], made["k"])[:, 0, 0, rows].exp()
        return torch.cat([decays - (1 - goal), made["k"][:, 0, 0, rows] - goal]).flatten()[None]

    best = math.inf
    # Where decays are the same for all tokens, it doesn't matter from where.
    for _ in range(_STARTS if anatomy.row.decay == "input" else 1):
        fresh = shaken(mixer, draws).parameters()
        tokens = torch.randn(sizes[0], generator=draws, dtype=torch.float64)
        start = torch.cat([tokens, *(weight.detach().flatten() for weight in fresh)])[None]
        _, error = least_squares(residual, start, steps=60, tolerance=ENOUGH / 10)
        best = min(best, error.item())
        if best < ENOUGH:
            break
    return best


@torch.no_grad()
def least_decays(mixer: TokenMixer, draws: torch.Generator) -> tuple[float, ...]:
    """The smallest decay of any channel that random weights make, for tokens of each of the `SIZES`."""
    mixer = shaken(mixer, draws)
    x = sequence(mixer, draws, tokens=1, batch=256)
    return tuple(mixer.weights(size * x)["g"].min().exp().item() for size in SIZES)


class _Readable(nn.Module):
    """A mixer that is called for its `weights`."""

    def __init__(self, mixer: TokenMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.mixer.weights(x)


@torch.no_grad()
def rank_of(mixer: TokenMixer, keys: int | None, draws: torch.Generator) -> tuple[int, int]:
    """The rank of what the later half of a sequence reads of the earlier one, and the tokens of a half.

    Twice as many as a head has key channels, up to 32.
    """
    mixer = shaken(mixer, draws)
    block = min(32, 2 * (keys or 16))
    attention = mixer.weights(sequence(mixer, draws, tokens=2 * block))["attention"][0, 0]
    return int(torch.linalg.matrix_rank(attention[block:, :block], rtol=SMALL)), block


def made_with(mixer: TokenMixer, draws: torch.Generator) -> int:
    """Parameters that queries, keys and decays depend on, and values don't; each number of a tensor by itself."""
    mixer = shaken(mixer, draws)
    weights, parameters = mixer.weights(sequence(mixer, draws, tokens=8)), list(mixer.parameters())
    touched = []
    for names in (("q", "k", "g"), ("v",)):
        parts = [weights[name] for name in names]
        cotangents = [torch.randn(part.shape, generator=draws, dtype=part.dtype) for part in parts]
        read: Any = sum((part * other).sum() for part, other in zip(parts, cotangents, strict=True))
        touched.append(torch.cat([slope.flatten() != 0 for slope in _slope(read, parameters)]))
    return int((touched[0] & ~touched[1]).sum())


def _fits(mixer: TokenMixer, anatomy: Anatomy | None, draws: torch.Generator) -> dict[int, float]:
    copied, fits = shaken(mixer, draws).requires_grad_(False), {}
    # A layer's own heads may have no room for the most.
    for tokens in TOKENS if anatomy is not None else TOKENS[:-1]:
        if anatomy is not None:
            found = fit(anatomy, tokens, draws)
        else:
            found = fit_tokens(lambda x: copied.weights(x)["attention"][:, 0], copied.channels, tokens, draws)
        fits[tokens] = found.error
        if found.error >= ENOUGH:
            break
    return fits


def _cell(anatomy: Anatomy) -> str:
    decays = ", decays of a head together" if anatomy.together else ""
    return f"{anatomy.row}{decays}; read {anatomy.reads} the write"


def _notes(anatomy: Anatomy | None) -> Iterator[str]:
    if anatomy is None:
        yield "shows its attention alone: C1 is that of the map, as each token has a place of its own in the state"
        return
    if anatomy.reads is None:
        yield "attention is not that of its queries, keys and decays, so C2 was searched for by its own tokens"
    if anatomy.reach > MIDDLE:
        yield f"parts are made from {anatomy.reach} tokens: too many to tell what decays from what is read"
    if anatomy.row.decay == "input" and anatomy.together:
        yield "the decays of a head move together: dynamic, but not row by row"
    if anatomy.row.decay == "fixed":
        needed = math.exp(-anatomy.decays.amax(1).min().item() * APART)
        yield f"to be read as well {APART} tokens later, a key has to be {needed:.3g} times as long, and so on"


def _faults(
    mixer: TokenMixer, anatomy: Anatomy | None, state: tuple[int, int], draws: torch.Generator
) -> Iterator[str]:
    said = (mixer.state_size(FEW), mixer.state_size(MANY))
    if said != state:
        yield f"state_size says {said} for {FEW} and {MANY} tokens, and the state has {state} numbers"
    if anatomy is None:
        return
    for part, origin, measured in zip(Row._fields, mixer.row, anatomy.row, strict=True):
        if origin != measured:
            yield f"its row says {part}: {origin}, and measured is {part}: {measured}"
    if (interaction(mixer, anatomy.reach, draws) > SMALL) != (anatomy.row.decay == "input"):
        does = "does not depend" if anatomy.row.decay == "input" else "depends"
        yield f"weights() has decay: {anatomy.row.decay}, and what forward keeps of a token {does} on later ones"


def _slope(read: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of one number; zeros where it depends on nothing."""
    if not read.requires_grad:
        return tuple(torch.zeros_like(t) for t in inputs)
    return torch.autograd.grad(read, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)


class _Written(TorchDispatchMode):
    """Counts the numbers that operators write; a view writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self.numbers += sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


def _count(call: Callable[[], object]) -> int:
    """Multiply-accumulates, and numbers written, by operators that can be seen into."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, _Written() as written:
        call()
    return flops.get_total_flops() // 2 + written.numbers
