r"""KCLA without the attention to heads: row (c) of its paper's ablation.

"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    o_t = \mathrm{ReLU}(\mathrm{BN}(V_t * m_t)), \qquad
    m_t = \frac{\sum_{s \le t} e^{S_s} x_s}{\sum_{s \le t} e^{S_s}}, \qquad
    S_{t,h} = \lVert k_{t,h} \rVert / D_h

The query is only in KCLA's gate :math:`\sigma(\Phi \rho_t)`, so without the gate there is no query either. Cost O(L);
state: one map and ``h`` scalars a sample, as KCLA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import OneMean
from lineattn.ops.channels import heads, pool
from lineattn.registry import register


@register(
    "kcla_no_gate",
    axis="depth",
    title="KCLA without the gate over heads (ablation)",
    paper="Enhancing Layer Interaction Using Key-Correlated Layer Attention (2026), ablation (c)",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLANoGate(OneMean):
    r"""KCLA whose heads are read as they are, with neither gate nor query; an ablation of the paper.

    .. math:: o_t = \mathrm{ReLU}(\mathrm{BN}(V_t * m_t))

    A site that is all of its stretch has no key either: one layer has the whole weight, whatever its score is, and that
    is 0 there. What is built starts with the numbers that KCLA's has at the same seed. Cost O(L); state O(1), KCLA's.
    In PyTorch's operators: slower than KCLA, which has kernels of its own.

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
        >>> attention = KCLANoGate(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), [name for name, _ in attention.named_parameters()]
        (True, ['gain', 'key.weight', 'value.weight', 'norm.weight', 'norm.bias'])

    Reference:
        "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, ablation table,
        row (c).
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
        del self.query, self.gate
        self.weighs = site.entry != "start" or not site.alone
        if not self.weighs:
            del self.key

    def _exposed(self, out: Tensor) -> dict[str, Tensor]:
        pooled = pool(out)
        if not self.weighs:
            score = pooled.new_zeros(pooled.shape[0], self.head_count)  # not len(), which an export would hold fast
            return {"score": score, "gate": torch.ones_like(score)}
        key = heads(self.key(pooled), self.head_count)
        score = self._score(key)
        return {"key": key, "score": score, "gate": torch.ones_like(score)}
