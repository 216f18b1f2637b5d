r"""KCLA with a learned decay of the past.

An extension of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    \ell_t = \log(e^{\ell_{t-1} - \delta_t} + e^{S_t}), \qquad
    a_{s \to t} \propto e^{S_s - \sum_{r=s+1}^{t} \delta_r}, \qquad
    \delta_t = |w_t|, \quad w_t = 0 \text{ at the start}

KCLA's mean gives layer :math:`t` a share of about :math:`1/t`, so that late layers hardly move it. With a decay a head
it becomes an exponential mean, in which a layer keeps a share of :math:`1 - e^{-\delta}` however deep it stands.
Exactly recurrent. Cost O(L); state: one map and ``h`` scalars a sample, as KCLA.
"""

from __future__ import annotations

import torch
from torch import nn

from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import MeanState, OneMean
from lineattn.registry import register


@register(
    "kcla_decay",
    axis="depth",
    title="KCLA with a learned decay",
    paper="extension of KCLA (2026)",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLADecay(OneMean):
    r"""KCLA between the mean over all layers and an exponential mean over the latest.

    .. math:: \ell_t = \log(e^{\ell_{t-1} - \delta_t} + e^{S_t}), \qquad \delta_t = |w_t|

    Starts as KCLA, and is exactly the weighted mean with the decayed weights. What a transition sums up decays as any
    layer. Cost O(L); state O(1), KCLA's. In PyTorch's operators: slower than KCLA, which has kernels of its own.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper`` (as KCLA is published).

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `MeanState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `MeanState`.

    Example:
        >>> attention = KCLADecay(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), state.log_norm.shape
        (True, torch.Size([2, 2]))

    Reference:
        This library's own. "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv
        2606.28405, is the method without decay.
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
        self.decay = None if site.entry == "start" else nn.Parameter(torch.zeros(self.head_count))

    def _aged(self, state: MeanState) -> MeanState:
        if self.decay is None:
            return state
        # Not torch.abs: at zero, where training starts, its derivative is 0, and this one's is 1.
        decay = torch.where(self.decay < 0, -self.decay, self.decay)
        return state._replace(log_norm=state.log_norm - decay.to(state.log_norm.dtype))
