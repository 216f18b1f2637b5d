r"""What a method of the token axis is made of, measured: by its outputs for several random weights and inputs.

.. math::
    S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1} + k_t^\top v_t, \qquad o_t = q_t S_t

Which of :math:`q, k, v, g` are maps of the token, and which are the same for all; whether the key is one minus the
decay; whether a head's decays are numbers of their own or move together. What a class says of itself, its `Row`, is not
read.
"""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lineattn.nn.token.base import Origin, Row, TokenMixer
from lineattn.ops.attention_map import attention_map

# What is far less than anything that is there, in units of the largest, and far above the rounding of float64.
SMALL = 1e-8

# Tokens of a sequence, and half of them, which is longer than a short convolution.
LENGTH, MIDDLE = 32, 16

_WEIGHTS = 3  # random weights: what holds for all of them is no accident of a start


class Anatomy(NamedTuple):
    """What attention is made of.

    Attributes:
        row: What each part is made from.
        heads: Heads ``h``.
        keys: Width of a head's keys, ``K``.
        together: The decays of a head are one number a token, times numbers that are the same for all tokens.
        decays: Those numbers, ``(h, K)``: logarithms of the decays where they are the same for all tokens, else their
            ratios; ones where each has a number of its own.
        signs: Whether queries, and whether keys, take both signs.
        reads: When attention reads what these parts make, up to a number for each of its rows: ``after`` the token was
            written, or ``before``, with a fixed share of what the token itself writes; ``None`` for neither.
        reach: How many tokens the parts of a token are made from, itself among them.
    """

    row: Row
    heads: int
    keys: int
    together: bool
    decays: Tensor
    signs: tuple[bool, bool]
    reads: Literal["after", "before"] | None
    reach: int


def shaken(mixer: TokenMixer, draws: torch.Generator) -> TokenMixer:
    """A copy in float64, with noise on every parameter: a start may hide what weights can do."""
    mixer = copy.deepcopy(mixer).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            width = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter += torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype) * width**-0.5
    return mixer


def sequence(mixer: TokenMixer, draws: torch.Generator, *, tokens: int = LENGTH, batch: int = 1) -> Tensor:
    """Random tokens, ``(B, T, C)``."""
    return torch.randn(batch, tokens, mixer.channels, generator=draws, dtype=torch.float64)


@torch.no_grad()
def dissect(mixer: TokenMixer, draws: torch.Generator) -> Anatomy | None:
    """Measures what a method is made of; ``None`` for one that shows its attention alone, as softmax attention.

    Example:
        >>> from lineattn.nn.token.metala import MetaLA
        >>> found = dissect(MetaLA(64), torch.Generator().manual_seed(0))
        >>> str(found.row), found.keys, found.reach
        ('query: input, key: 1 - decay, value: input, decay: input', 4, 4)
    """
    seen = []
    for _ in range(_WEIGHTS):
        copied = shaken(mixer, draws)
        seen.append([copied.weights(sequence(copied, draws, tokens=MIDDLE)) for _ in range(2)])
    if not {"q", "k", "v", "g"} <= seen[0][0].keys():
        return None
    flat = [weights for pair in seen for weights in pair]
    origins: dict[str, Origin] = {
        name: _origin([(a[name], b[name]) for a, b in seen], 0.0 if name == "g" else 1.0) for name in "qkvg"
    }
    row = Row(query=origins["q"], key=origins["k"], value=origins["v"], decay=origins["g"])
    if row.decay != "one" and all(_equal(w["k"], -torch.expm1(wide(w["g"], w["k"]))) for w in flat):
        row = row._replace(key="decay")
    together, decays = _decays(flat[0], row.decay)
    return Anatomy(
        row=row,
        heads=flat[0]["k"].shape[2],
        keys=flat[0]["k"].shape[3],
        together=together,
        decays=decays,
        signs=(any(bool((w["q"] < 0).any()) for w in flat), any(bool((w["k"] < 0).any()) for w in flat)),
        reads="after" if all(map(_read_after, flat)) else "before" if all(map(_read_before, flat)) else None,
        reach=_reach(mixer, draws),
    )


@torch.no_grad()
def interaction(mixer: TokenMixer, reach: int, draws: torch.Generator) -> float:
    r"""How far what `forward` keeps of an early token depends on a later one.

    .. math:: \frac{\lVert S(x + \delta_s + \delta_j) - S(x + \delta_s) - S(x + \delta_j) + S(x) \rVert}
        {\lVert S(x + \delta_s) - S(x) \rVert}

    for tokens :math:`s < j` farther apart than the ``reach`` of what a token is made of. Zero where what is forgotten
    does not depend on the token; it is read off the state alone, whatever `weights` says.

    Example:
        >>> from lineattn.nn.token.linear import LinearAttention
        >>> interaction(LinearAttention(16), 1, torch.Generator().manual_seed(0)) < 1e-12
        True
    """
    mixer = shaken(mixer, draws)
    x = sequence(mixer, draws, tokens=reach + 1)
    early, late = torch.zeros_like(x), torch.zeros_like(x)
    early[:, 0], late[:, reach] = sequence(mixer, draws, tokens=2).unbind(1)

    def state(tokens: Tensor) -> Tensor:
        leaves = tree_leaves(mixer(tokens)[1])
        return torch.cat([leaf.flatten() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()])

    plain, first = state(x), state(x + early)
    both = state(x + early + late) - first - state(x + late) + plain
    return (both.norm() / (first - plain).norm().clamp_min(torch.finfo(x.dtype).tiny)).item()


def own_map(weights: dict[str, Tensor]) -> Tensor:
    """Attention as `q`, `k` and `g` make it, without a scale, ``(B, h, T, T)``."""
    return attention_map(weights["q"], weights["k"], weights["g"], scale=1.0)


def wide(g: Tensor, k: Tensor) -> Tensor:
    """Logarithms of the decays for each channel of the keys ``(B, T, h, K)``, where there is one a head too."""
    return (g if g.ndim == 4 else g[..., None]).expand_as(k)


def _origin(pairs: list[tuple[Tensor, Tensor]], nothing: float) -> Origin:
    if any(not _equal(first, second) for first, second in pairs):
        return "input"
    return "one" if all((first == nothing).all() for first, _ in pairs) else "fixed"


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=SMALL, atol=SMALL * second.abs().max().item())


def _decays(weights: dict[str, Tensor], origin: Origin) -> tuple[bool, Tensor]:
    g = wide(weights["g"], weights["k"])[0].transpose(0, 1)  # (h, T, K)
    if origin != "input":
        return False, g[:, 0]
    _, sizes, directions = torch.linalg.svd(g, full_matrices=False)
    together = g.shape[2] > 1 and bool((sizes[:, 1] < SMALL * sizes[:, 0]).all())
    # A singular vector has either sign, and no decay is above one.
    return together, directions[:, 0].abs() / directions[:, 0].abs().amax(1, True) if together else torch.ones_like(
        g[:, 0]
    )


def _read_after(weights: dict[str, Tensor]) -> bool:
    return _proportional(weights["attention"], own_map(weights))


def _read_before(weights: dict[str, Tensor]) -> bool:
    """As RWKV does: the decay of the token that reads is not in, and of its own key and value it has another share."""
    q, k, attention = weights["q"], weights["k"], weights["attention"]
    own = attention_map(q[:, 1:], k[:, :-1], weights["g"][:, :-1], scale=1.0)
    if not _proportional(attention[:, :, 1:, :-1].tril(), own):
        return False
    itself, products = attention.diagonal(dim1=2, dim2=3), (q * k).transpose(1, 2)  # (B, h, T), (B, h, T, K)
    shares = torch.linalg.lstsq(products, itself[..., None]).solution
    return _equal((products @ shares)[..., 0], itself)


def _proportional(rows: Tensor, own: Tensor) -> bool:
    factors = (rows * own).sum(-1) / own.square().sum(-1).clamp_min(torch.finfo(own.dtype).tiny)
    return _equal(factors[..., None] * own, rows)


def _reach(mixer: TokenMixer, draws: torch.Generator) -> int:
    mixer = shaken(mixer, draws)
    x = sequence(mixer, draws)
    changed = x.clone()
    changed[:, 0] += 1
    before, after = mixer.weights(x), mixer.weights(changed)
    seen = [(before[name] - after[name]).flatten(2).abs().amax((0, 2)) > 0 for name in "qkvg" if before[name].ndim > 2]
    return int(torch.stack(seen).any(0).nonzero().amax().item()) + 1
