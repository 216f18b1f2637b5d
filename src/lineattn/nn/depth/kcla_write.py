r"""KCLA with a temperature that depends on the layer that is written.

An extension of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, whose
authors name a temperature that adapts itself as future work.

.. math::
    S_{t,h} = \frac{\lVert k_{t,h} \rVert}{P_h \sqrt{D}}\, e^{-\tanh(W \rho_t + b)_h}, \qquad W = b = 0
    \text{ at the start}

A temperature that a later layer chooses would change the weights of all layers before it, which one running sum can't
do. This one is chosen by a layer's own query and key when it is written, so the recurrence stays exact. It is within a
factor of :math:`e` of the head's. Cost O(L); state: one map and ``h`` scalars a sample, as KCLA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import OneMean, zero_linear
from lineattn.ops.channels import linear
from lineattn.ops.kcla import agreement
from lineattn.registry import register


@register(
    "kcla_write",
    axis="depth",
    title="KCLA with a temperature chosen when written",
    paper="extension of KCLA (2026), its stated future work",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLAWrite(OneMean):
    r"""KCLA where a layer's agreement of query and key says how sharply its key's length counts.

    .. math:: S_t = S^{\mathrm{KCLA}}_t \odot e^{-\tanh(W \rho_t + b)}

    Starts as KCLA, and is exactly the weighted mean over all layers. What a transition sums up has no query, and is
    written at the head's own temperature. Cost O(L); state O(1), KCLA's. In PyTorch's operators: slower than KCLA,
    which has kernels of its own.

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
        >>> attention = KCLAWrite(Site(channels=32), head_dim=16)
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
        # One layer by itself has the whole weight at any temperature.
        weighs = site.entry != "start" or not site.alone
        self.temper = zero_linear(self.head_count, self.head_count) if weighs else None

    def _adapted(self, score: Tensor, query: Tensor | None, key: Tensor) -> Tensor:
        if self.temper is None or query is None:
            return score
        return score * torch.exp(-torch.tanh(linear(agreement(query, key), self.temper.weight, self.temper.bias)))
