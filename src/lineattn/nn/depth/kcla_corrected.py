r"""KCLA that is read at a temperature of the reader's choice, to first order.

An extension of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, whose
authors name a temperature that adapts itself as future work.

A reader that would like the scores :math:`(1 + \epsilon) S_s` needs the mean at another temperature than it is kept at.
Its derivative is a covariance over the layers so far, which obeys a recurrence too:

.. math::
    m_t(\epsilon) = m_t + \epsilon_t \odot c_t + O(\epsilon^2), \qquad
    c_t = \sum_s a_s (S_s - \bar S_t)(x_s - m_t), \qquad
    \bar S_t = \sum_s a_s S_s

.. math::
    c_t = (1 - \alpha_t) \left( c_{t-1} + \alpha_t (S_t - \bar S_{t-1}) (x_t - m_{t-1}) \right), \qquad
    \epsilon_t = \tfrac{1}{4} \tanh(W \rho_t + b), \quad W = b = 0 \text{ at the start}

In inverse temperatures :math:`\beta = 1 / D_h` this is :math:`m(\beta + \delta) \approx m + \delta (m^1 - \bar n m)`
with :math:`\delta = \epsilon \beta`, :math:`m^1 = \sum_s a_s n_s x_s`; kept centred, since the difference would cancel.
:math:`m` and :math:`c` are exact; the read is off by :math:`O(\epsilon^2)` of the mean at the reader's temperature.
Cost O(L); state: two maps and ``2h`` scalars a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import KCLAExtension, Read, zero_linear
from lineattn.ops.channels import linear, per_channel
from lineattn.ops.kcla import agreement, write
from lineattn.registry import register

# Largest part of a score that the correction takes away or adds: beyond that, first order says little.
LARGEST = 0.25


class CorrectedState(NamedTuple):
    """A mean over depth and its derivative in the scores' scale; all at least float32.

    Attributes:
        mean: :math:`m`, ``(B, C, H, W)``.
        log_norm: :math:`\\ell`, ``(B, h)``.
        score: :math:`\\bar S`, ``(B, h)``.
        covariance: :math:`c`, ``(B, C, H, W)``; ``None`` where one layer is all there is.
    """

    mean: Tensor
    log_norm: Tensor
    score: Tensor
    covariance: Tensor | None = None


@register(
    "kcla_corrected",
    axis="depth",
    title="KCLA with a first-order read temperature",
    paper="extension of KCLA (2026), its stated future work",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLACorrected(KCLAExtension):
    r"""KCLA whose reader moves the temperature of all layers before it by up to a quarter, to first order.

    .. math:: m_t + \tfrac{1}{4} \tanh(W \rho_t + b) \odot c_t, \qquad c_t = \sum_s a_s (S_s - \bar S_t)(x_s - m_t)

    Starts as KCLA. :math:`c_t` is exact, and the read is off by :math:`O(\epsilon^2)` of the mean with scores
    :math:`(1 + \epsilon) S_s`; it may leave the convex hull of the layers by as much. Cost O(L); state O(1), two maps
    and ``2h`` scalars a sample, twice KCLA's. In PyTorch's operators: slower than KCLA, which has kernels of its own.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper`` (as KCLA is published).

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `CorrectedState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `CorrectedState`.

    Example:
        >>> attention = KCLACorrected(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), state.log_norm.shape
        (True, torch.Size([2, 2]))

    Reference:
        This library's own. "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv
        2606.28405, names a temperature that adapts itself as future work.
    """

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
        self.correction = None if site.entry == "start" else zero_linear(self.head_count, self.head_count)

    def _enter(self, out: Tensor, state: CorrectedState | None) -> CorrectedState | None:
        if self.transition is None:
            return state
        assert state is not None
        r, key = self._summed_up(state.mean, out)
        weight = self._score(key)
        return CorrectedState(r, weight, weight)

    def _read(self, out: Tensor, state: CorrectedState | None) -> Read:
        query, key, weight, opening = self._address(out)
        exposed = {"query": query, "key": key, "score": weight, "gate": opening}
        if state is None:
            mean, log_norm = write(out, weight)
            exposed["share"] = torch.ones_like(weight)
            return Read(CorrectedState(mean, log_norm, weight), mean, exposed)
        mean, log_norm = write(out, weight, state.mean, state.log_norm)
        share, rest = (weight - log_norm).exp(), (state.log_norm - log_norm).exp()
        further = weight - state.score
        covariance = (out - state.mean) * _on_maps(rest * share * further, out)
        if state.covariance is not None:
            covariance = torch.addcmul(covariance, state.covariance, _on_maps(rest, out))
        after = CorrectedState(mean, log_norm, state.score + share * further, covariance)

        assert self.correction is not None
        logits = linear(agreement(query, key), self.correction.weight, self.correction.bias)
        correction = LARGEST * torch.tanh(logits)
        read = torch.addcmul(mean, covariance, _on_maps(correction, out))
        return Read(after, read, exposed | {"share": share, "correction": correction})


def _on_maps(per_head: Tensor, like: Tensor) -> Tensor:
    return per_channel(per_head, like.shape[1])[:, :, None, None]
