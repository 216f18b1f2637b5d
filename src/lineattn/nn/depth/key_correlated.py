r"""What KCLA and its extensions are made of; no method by itself.

Queries, keys and values of the pooled map, one temperature a head, the gate :math:`\sigma(\Phi \rho)`, and the
transition between stages. An extension changes one thing: the score, how the past is weighed, or how it is read.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lineattn.errors import InputError
from lineattn.nn.common import ChannelConv, channel_norm, drop_path_factor, fold_norm, read_out
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.pooled import PooledAttention
from lineattn.ops.channels import heads, per_channel, pool
from lineattn.ops.kcla import Form, Weights, address, gate, score, write


@dataclass(frozen=True)
class Variant:
    """Where the published codes part from the paper and from each other.

    Attributes:
        score: ``paper`` divides the key's length by :math:`P_h \\sqrt{D}`, ``multiply`` multiplies it by
            :math:`P_h` (so that head 1 is the softest), ``divide`` divides it by :math:`P_h`.
        clamp: Largest score, or ``None``; a clamped score passes no gradient to its key.
        eps: Added to the normaliser of what is read.
        gate: Whether the gate mixes heads by :math:`\\Phi`, or is :math:`\\sigma(\\rho)`.
        direction: Key that the query is compared with: the ``current`` one or the ``running`` sum of all.
        relu: Whether a ReLU follows the batch norm.
        own_transition_key: Whether a transition has a channel convolution of its own for its key, or uses the site's.
        transition_conv: ``changes``: a transition has a 1x1 convolution, without a bias, where width or resolution
            changes. ``always``: every transition has one, with a bias.
    """

    score: Literal["paper", "multiply", "divide"] = "paper"
    clamp: float | None = None
    eps: float = 0.0
    gate: Literal["mixed", "plain"] = "mixed"
    direction: Literal["current", "running"] = "current"
    relu: bool = True
    own_transition_key: bool = True
    transition_conv: Literal["changes", "always"] = "changes"


PAPER = Variant()


def temperatures(count: int, p: float) -> Tensor:
    """:math:`P_h`, log-spaced from ``p`` to ``1 / p``; one head gets their geometric mean, 1.

    Example:
        >>> [round(t, 3) for t in temperatures(3, 0.7).tolist()]
        [0.7, 1.0, 1.429]
    """
    if count == 1:
        return torch.ones(1)
    return torch.logspace(math.log(p), -math.log(p), count, base=math.e)


class Transition(nn.Module):
    """Brings the mean of a stage to the width and resolution of the next, where it counts as one layer.

    :math:`r = \\mathrm{BN}(\\mathrm{Conv}_{1 \\times 1}(m))`, grouped by heads; but for the variant
    ``ref-seg`` the convolution is left out where neither width nor resolution changes.
    """

    def __init__(self, site: Site, head_count: int, variant: Variant) -> None:
        super().__init__()
        before = site.prev_channels
        if before is None:
            raise InputError("a transition needs the width of the previous site (Site.prev_channels)")
        self.conv = None
        always = variant.transition_conv == "always"
        if always or before != site.channels or site.stride != 1:
            groups = math.gcd(head_count, before)
            self.conv = nn.Conv2d(before, site.channels, 1, stride=site.stride, groups=groups, bias=always)
            nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.norm: nn.Module = channel_norm(site)
        self.key = ChannelConv(site.channels) if variant.own_transition_key else None

    def forward(self, mean: Tensor, like: Tensor) -> Tensor:
        r = mean.to(next(self.parameters()).dtype)
        if self.conv is not None:
            r = self.conv(r)
            if r.shape[2:] != like.shape[2:]:  # of an odd size, some networks leave out the last row and column
                r = r[:, :, : like.shape[2], : like.shape[3]]
        return self.norm(r)

    def fold(self) -> None:
        """For evaluation: the norm goes into the convolution, where there is one; in place."""
        if self.conv is not None and isinstance(self.norm, nn.BatchNorm2d):
            self.conv = fuse_conv_bn_eval(self.conv, self.norm)
            self.norm = nn.Identity()


class KeyCorrelated(PooledAttention):
    """Base of KCLA and its extensions.

    Args:
        site: Where the module stands.
        head_dim: Width of a head; it divides the site's channels.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.
        variant: The paper's form, or that of a published code.
    """

    carries = True
    inv_temperature: Tensor

    def __init__(
        self, site: Site, *, head_dim: int, p: float, drop_path: float, init: Init, variant: Variant = PAPER
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        if not 0 < p <= 1:
            raise InputError(f"p is {p}; it must be in (0, 1]")
        self.variant, self.relu = variant, variant.relu

        factor = temperatures(self.head_count, p)
        if variant.score == "paper":
            inverse = 1 / (factor * math.sqrt(head_dim))
        else:
            inverse = factor if variant.score == "multiply" else 1 / factor
        self.register_buffer("inv_temperature", inverse, persistent=False)

        self.gate = None
        if variant.gate == "mixed":
            self.gate = nn.Linear(self.head_count, self.head_count, bias=False)
            nn.init.xavier_uniform_(self.gate.weight)
        self.transition = Transition(site, self.head_count, variant) if site.entry == "transition" else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, entry={self.site.entry!r}"

    def head_temperatures(self) -> Tensor:
        """What each head divides its key's length by, ``(h,)``; before what an input changes of it."""
        return 1 / self._inv_temperature().detach()

    def _summed_up(self, mean: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """At a transition, the mean as a layer of ``out``'s stage: its map ``(B, C, H, W)`` and key ``(B, h, D)``."""
        assert self.transition is not None
        r = self.transition(mean, out)
        conv = self.key if self.transition.key is None else self.transition.key
        key = heads(conv(pool(r)), self.head_count)
        return r.to(key.dtype), key

    def _inv_temperature(self) -> Tensor:
        return self.inv_temperature

    def _score(self, key: Tensor) -> Tensor:
        return score(key, self._inv_temperature(), self.variant.clamp)

    def _weights(self) -> Weights:
        mixing = None if self.gate is None else self.gate.weight
        return Weights(self.query.weight, self.key.weight, self._inv_temperature(), mixing, self.value.weight)

    def _form(self) -> Form:
        return Form(self.variant.clamp, self.variant.eps, self.variant.relu)

    def _fold(self) -> None:
        fold_norm(self, relu=self.relu)
        if self.transition is not None:
            self.transition.fold()


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer whose outputs start at zero, so that what it bends starts unbent."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class MeanState(NamedTuple):
    """A mean over depth.

    Attributes:
        mean: :math:`m`, ``(B, C, H, W)``, at least float32.
        log_norm: :math:`\\ell`, the logarithm of the weights' sum, ``(B, h)``, at least float32.
    """

    mean: Tensor
    log_norm: Tensor


class Read(NamedTuple):
    """What a site has read.

    Attributes:
        state: The state with the site's own layer in it.
        map: What values are made of, or their mean, ``(B, C, H, W)``.
        exposed: Keys, scores and attention by name; ``gate`` ``(B, h)`` among them.
    """

    state: Any
    map: Tensor
    exposed: dict[str, Tensor]


class KCLAExtension(KeyCorrelated):
    """Base of what goes beyond KCLA, in PyTorch's operators.

    A subclass says what arrives at a site (`_enter`) and what is read there (`_read`).

    Args:
        site: Where the module stands.
        head_dim: Width of a head; it divides the site's channels.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.
    """

    static_values: ClassVar[bool] = False
    """Whether what is read holds values already, each made where it was written."""

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 32,
        p: float = 0.7,
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(site, head_dim=head_dim, p=p, drop_path=drop_path, init=init)

    def forward(self, out: Tensor, shortcut: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        after, read, exposed = self._read(out, self._enter(out, state))
        opening = per_channel(exposed["gate"], out.shape[1])
        drop = drop_path_factor(out, self.drop_path, self.training)
        value = None if self.static_values else self.value
        return read_out(out, read, value, opening, self.norm, relu=True, gain=self.gain, drop=drop), after

    def weights(self, out: Tensor, shortcut: Tensor | None, state: Any) -> dict[str, Tensor]:
        """KCLA's ``query``, ``key`` ``(B, h, D)``, ``score``, ``share``, ``gate`` ``(B, h)``, and what is added."""
        return self._read(out, self._enter(out, state)).exposed

    @abstractmethod
    def _enter(self, out: Tensor, state: Any) -> Any:
        """The state in the width and resolution of ``out``."""

    @abstractmethod
    def _read(self, out: Tensor, state: Any) -> Read:
        """Writes ``out`` into the state and reads that."""

    def _address(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query and key ``(B, h, D)`` of a map, its score at the head's temperature and its gate, ``(B, h)``."""
        weights, form = self._weights(), self._form()
        query, key, found = address(pool(out), weights, form)
        return query, key, found, gate(query, key, found, weights, form)  # with no eps, no normaliser is read


class OneMean(KCLAExtension):
    """Base of the extensions whose state is KCLA's: one mean, in which layers weigh otherwise."""

    def _enter(self, out: Tensor, state: MeanState | None) -> MeanState | None:
        if self.transition is None:
            return state
        assert state is not None
        r, key = self._summed_up(state.mean, out)
        return MeanState(r, self._adapted(self._score(key), None, key))

    def _read(self, out: Tensor, state: MeanState | None) -> Read:
        exposed = self._exposed(out)
        weight, written = exposed["score"], self.value(out) if self.static_values else out
        mean, log_norm = write(written, weight, *(() if state is None else self._aged(state)))
        return Read(MeanState(mean, log_norm), mean, exposed | {"share": (weight - log_norm).exp()})

    def _exposed(self, out: Tensor) -> dict[str, Tensor]:
        """Query, key, and gate of a map, and the score that it is written with, by name."""
        query, key, weight, opening = self._address(out)
        return {"query": query, "key": key, "score": self._adapted(weight, query, key), "gate": opening}

    def _adapted(self, score: Tensor, query: Tensor | None, key: Tensor) -> Tensor:
        """The score that a layer is written with; what a transition sums up has no query."""
        return score

    def _aged(self, state: MeanState) -> MeanState:
        """The past as it weighs one layer later."""
        return state
