r"""Key-Correlated Layer Attention.

"KCLA: Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

Keys of different layers point nearly the same way, so the attention of layer :math:`t` to layer :math:`s` depends on
:math:`s` almost only through the length of its key. With one fixed temperature :math:`D_h` a head, the weighted sum
over all earlier layers then obeys a recurrence with a state of fixed size:

.. math::
    S_{t,h} = \lVert k_{t,h} \rVert / D_h, \qquad
    m_t = \frac{\sum_{s \le t} e^{S_s} x_s}{\sum_{s \le t} e^{S_s}}, \qquad
    o_t = \mathrm{ReLU}(\mathrm{BN}(\sigma(\Phi\,\rho_t) \odot V_t * m_t)), \qquad
    \rho_{t,h} = \langle q_{t,h}, k_{t,h} / \lVert k_{t,h} \rVert \rangle

with :math:`q, k` channel convolutions of the pooled map and :math:`D_h = P_h \sqrt{D}`, :math:`P_h` log-spaced from
:math:`p` to :math:`1/p`. Cost O(L); state: one map and ``h`` scalars a sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lineattn.errors import InputError, unknown
from lineattn.nn.common import ChannelConv, channel_norm, drop_path_factor, fold_norm, norm_data, read_out
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.pooled import PooledAttention
from lineattn.ops.channels import heads, per_channel, pool
from lineattn.ops.kcla import Form, Past, Weights, address, gate, score, write
from lineattn.ops.kcla_operator import kcla
from lineattn.registry import register


class KCLAState(NamedTuple):
    """What KCLA carries from site to site.

    Attributes:
        mean: :math:`m`, ``(B, C, H, W)``, at least float32.
        log_norm: :math:`\\ell`, ``(B, h)``, at least float32.
        direction: Sum of all keys, ``(B, h, D)``, for the variant ``ref-det0`` only.
        past: What the mean can be made from again, where native kernels keep that for the backward instead of it.
    """

    mean: Tensor
    log_norm: Tensor
    direction: Tensor | None = None
    past: Past | None = None


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


VARIANTS = {
    "paper": Variant(),
    "ref-cls": Variant(score="multiply", clamp=10.0, eps=1e-3),
    "ref-det0": Variant(clamp=10.0, eps=1e-3, direction="running"),
    "ref-seg": Variant(
        score="divide", clamp=10.0, gate="plain", relu=False, own_transition_key=False, transition_conv="always"
    ),
}


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

    def forward(self, mean: Tensor) -> Tensor:
        r = mean.to(next(self.parameters()).dtype)
        if self.conv is not None:
            r = self.conv(r)
        return self.norm(r)

    def fold(self) -> None:
        """For evaluation: the norm goes into the convolution, where there is one; in place."""
        if self.conv is not None and isinstance(self.norm, nn.BatchNorm2d):
            self.conv = fuse_conv_bn_eval(self.conv, self.norm)
            self.norm = nn.Identity()


@register(
    "kcla",
    axis="depth",
    title="Key-Correlated Layer Attention",
    paper="KCLA: Key-Correlated Layer Attention (2026)",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLA(PooledAttention):
    r"""Layer attention at linear cost by a running mean of the earlier layers' outputs.

    .. math::
        m_t = m_{t-1} + \sigma(S_t - \ell_{t-1}) (x_t - m_{t-1}), \qquad
        o_t = \mathrm{ReLU}(\mathrm{BN}(\sigma(\Phi \rho_t) \odot V_t * m_t))

    Cost O(L) for a network of L layers; state O(1), one map and ``h`` scalars a sample.

    Note:
        The released code is not the paper: for classification it multiplies the key's length by :math:`P_h` and has no
        :math:`\sqrt{D}`, clamps scores at 10 and adds 1e-3 to the normaliser. ``variant`` selects such a form
        (``ref-cls``, ``ref-det0``, ``ref-seg``); the default is the paper's, which needs no clamp in this form.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels. The papers use 16 on CIFAR, 32 on ImageNet.
        variant: ``paper`` or one of the published codes.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `KCLAState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `KCLAState`.

    Example:
        >>> attention = KCLA(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), state.log_norm.shape
        (True, torch.Size([2, 2]))

    Reference:
        "KCLA: Key-Correlated Layer Attention" (2026), arXiv 2606.28405, equations 7-11 and algorithm 1.
    """

    carries = True
    inv_temperature: Tensor

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 32,
        variant: str = "paper",
        p: float = 0.7,
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        if variant not in VARIANTS:
            raise unknown("KCLA variant", variant, VARIANTS)
        if not 0 < p <= 1:
            raise InputError(f"p is {p}; it must be in (0, 1]")
        self.variant_name, self.variant = variant, VARIANTS[variant]
        self.relu = self.variant.relu

        factor = temperatures(self.head_count, p)
        if self.variant.score == "paper":
            inverse = 1 / (factor * math.sqrt(head_dim))
        else:
            inverse = factor if self.variant.score == "multiply" else 1 / factor
        self.register_buffer("inv_temperature", inverse, persistent=False)

        self.gate = None
        if self.variant.gate == "mixed":
            self.gate = nn.Linear(self.head_count, self.head_count, bias=False)
            nn.init.xavier_uniform_(self.gate.weight)
        self.transition = Transition(site, self.head_count, self.variant) if site.entry == "transition" else None

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, variant={self.variant_name!r}, entry={self.site.entry!r}"

    def forward(self, out: Tensor, shortcut: Tensor | None, state: KCLAState | None) -> tuple[Tensor, KCLAState]:
        state = self._enter(state)
        drop = drop_path_factor(out, self.drop_path, self.training)
        norm = norm_data(self.norm) if self.variant.direction == "current" else None
        if norm is None:
            state, opening = self._write(out, state)
            opening = per_channel(opening, out.shape[1])
            x = read_out(out, state.mean, self.value, opening, self.norm, relu=self.relu, gain=self.gain, drop=drop)
            return x, state
        mean, log_norm, _, past = (None, None, None, None) if state is None else state
        x, mean, log_norm, past = kcla(
            out, mean, log_norm, past,
            weights=self._weights(), form=self._form(), norm=norm, gain=self.gain, drop=drop,
        )  # fmt: skip
        return x, KCLAState(mean, log_norm, past=past)

    def weights(self, out: Tensor, shortcut: Tensor | None, state: KCLAState | None) -> dict[str, Tensor]:
        """``query``, ``key`` ``(B, h, D)``; ``score``, ``share`` (of this layer in the mean), ``gate`` ``(B, h)``."""
        query, key, weight = address(pool(out), self._weights(), self._form())
        after, opening = self.update(out, state)
        share = (weight - after.log_norm).exp()
        return {"query": query, "key": key, "score": weight, "share": share, "gate": opening}

    def update(self, out: Tensor, state: KCLAState | None) -> tuple[KCLAState, Tensor]:
        """Writes ``out`` into the state; returns it with the gate ``(B, h)`` for reading it."""
        return self._write(out, self._enter(state))

    def _write(self, out: Tensor, state: KCLAState | None) -> tuple[KCLAState, Tensor]:
        query, key, weight = address(pool(out), self._weights(), self._form())
        mean, log_norm = write(out, weight, *(() if state is None else (state.mean, state.log_norm)))
        direction = None
        if self.variant.direction == "running":
            before = None if state is None else state.direction
            direction = key if before is None else before + key
        towards = key if direction is None else direction
        return KCLAState(mean, log_norm, direction), gate(query, towards, log_norm, self._weights(), self._form())

    def _enter(self, state: KCLAState | None) -> KCLAState | None:
        """At a transition, the old state as the first layer of the new stage."""
        if self.transition is None:
            return state
        assert state is not None
        r = self.transition(state.mean)
        conv = self.key if self.transition.key is None else self.transition.key
        key = heads(conv(pool(r)), self.head_count)
        direction = key if self.variant.direction == "running" else None
        weight = score(key, self._weights(), self._form())
        return KCLAState(r.to(weight.dtype), weight, direction)

    def _weights(self) -> Weights:
        mixing = None if self.gate is None else self.gate.weight
        return Weights(self.query.weight, self.key.weight, self.inv_temperature, mixing, self.value.weight)

    def _form(self) -> Form:
        return Form(self.variant.clamp, self.variant.eps, self.variant.relu)

    def _fold(self) -> None:
        fold_norm(self, relu=self.relu)
        if self.transition is not None:
            self.transition.fold()
