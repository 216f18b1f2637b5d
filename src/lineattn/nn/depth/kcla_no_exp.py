r"""KCLA without the exponential: row (b) of its paper's ablation.

"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    m_t = \frac{\sum_{s \le t} \lVert k_s \rVert x_s}{\sum_{s \le t} \lVert k_s \rVert}

A layer weighs what its key's length is. That length's logarithm is the score that is written, so the recurrence and its
log-normaliser are KCLA's. Cost O(L); state: one map and ``h`` scalars a sample, as KCLA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import OneMean
from lineattn.ops.kcla import SHORT
from lineattn.registry import register


@register(
    "kcla_no_exp",
    axis="depth",
    title="KCLA without the exponential (ablation)",
    paper="Enhancing Layer Interaction Using Key-Correlated Layer Attention (2026), ablation (b)",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLANoExp(OneMean):
    r"""KCLA whose layers weigh by the length of their keys, not by its exponential; an ablation of the paper.

    .. math:: S_{t,h} = \ln w_{t,h}, \qquad w_{t,h} = \lVert k_{t,h} \rVert / D_h

    A head's temperature :math:`D_h` is a factor of all its weights and cancels in the mean, so there is no argument for
    it; :math:`D_h = \sqrt{D}`. Cost O(L); state O(1), KCLA's. In PyTorch's operators: slower than KCLA, which has
    kernels of its own.

    Note:
        A key of no length would weigh nothing, and a mean of only such layers would have no weights. A weight below
        1e-6 counts as 1e-6, so layers whose maps are all zero share equally.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper`` (as KCLA is published).

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `MeanState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `MeanState`.

    Example:
        >>> attention = KCLANoExp(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), state.log_norm.shape
        (True, torch.Size([2, 2]))

    Reference:
        "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, ablation table,
        row (b).
    """

    def __init__(self, site: Site, *, head_dim: int = 32, drop_path: float = 0.2, init: Init = "identity") -> None:
        super().__init__(site, head_dim=head_dim, p=1.0, drop_path=drop_path, init=init)

    def _adapted(self, score: Tensor, query: Tensor | None, key: Tensor) -> Tensor:
        return torch.log(score.clamp_min(SHORT))
