r"""Key-Correlated Layer Attention.

"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

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

from typing import NamedTuple

from torch import Tensor

from lineattn.errors import unknown
from lineattn.nn.common import drop_path_factor, norm_data, read_out
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import PAPER, KeyCorrelated, Variant
from lineattn.ops.channels import per_channel, pool
from lineattn.ops.kcla import Past, address, gate, write
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


VARIANTS = {
    "paper": PAPER,
    "ref-cls": Variant(score="multiply", clamp=10.0, eps=1e-3),
    "ref-det0": Variant(clamp=10.0, eps=1e-3, direction="running"),
    "ref-seg": Variant(
        score="divide", clamp=10.0, gate="plain", relu=False, own_transition_key=False, transition_conv="always"
    ),
}


@register(
    "kcla",
    axis="depth",
    title="Key-Correlated Layer Attention",
    paper="Enhancing Layer Interaction Using Key-Correlated Layer Attention (2026)",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLA(KeyCorrelated):
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
        >>> import torch
        >>> attention = KCLA(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), state.log_norm.shape
        (True, torch.Size([2, 2]))

    Reference:
        "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, equations 7-11
        and algorithm 1.
    """

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
        if variant not in VARIANTS:
            raise unknown("KCLA variant", variant, VARIANTS)
        super().__init__(site, head_dim=head_dim, p=p, drop_path=drop_path, init=init, variant=VARIANTS[variant])
        self.variant_name = variant

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, variant={self.variant_name!r}"

    def forward(self, out: Tensor, shortcut: Tensor | None, state: KCLAState | None) -> tuple[Tensor, KCLAState]:
        state = self._enter(out, state)
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
        return self._write(out, self._enter(out, state))

    def _write(self, out: Tensor, state: KCLAState | None) -> tuple[KCLAState, Tensor]:
        query, key, weight = address(pool(out), self._weights(), self._form())
        mean, log_norm = write(out, weight, *(() if state is None else (state.mean, state.log_norm)))
        direction = None
        if self.variant.direction == "running":
            before = None if state is None else state.direction
            direction = key if before is None else before + key
        towards = key if direction is None else direction
        return KCLAState(mean, log_norm, direction), gate(query, towards, log_norm, self._weights(), self._form())

    def _enter(self, out: Tensor, state: KCLAState | None) -> KCLAState | None:
        """At a transition, the old state as the first layer of the new stage."""
        if self.transition is None:
            return state
        assert state is not None
        r, key = self._summed_up(state.mean, out)
        direction = key if self.variant.direction == "running" else None
        return KCLAState(r, self._score(key), direction)
