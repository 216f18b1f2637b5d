r"""KCLA with static values, in the form of recurrent layer attention: row (d) of its paper's ablation.

"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    o_t = \mathrm{ReLU}(\mathrm{BN}(\sigma(\Phi \rho_t) \odot m_t)), \qquad
    m_t = \frac{\sum_{s \le t} e^{S_s}\, V_s * x_s}{\sum_{s \le t} e^{S_s}}, \qquad
    S_{t,h} = \lVert k_{t,h} \rVert / D_h

KCLA keeps the mean of the layers' outputs, of which every reader makes values of its own (:math:`V_t * m_t`). Here each
layer makes its value once, when it is written, as in MRLA (arXiv 2302.03985). Cost O(L); state: one map and ``h``
scalars a sample, as KCLA.
"""

from __future__ import annotations

from lineattn.nn.depth.key_correlated import OneMean
from lineattn.registry import register


@register(
    "kcla_static_value",
    axis="depth",
    title="KCLA with static values (ablation)",
    paper="Enhancing Layer Interaction Using Key-Correlated Layer Attention (2026), ablation (d)",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLAStaticValue(OneMean):
    r"""KCLA over values that each layer made for itself; an ablation of the paper.

    .. math:: m_t = m_{t-1} + \sigma(S_t - \ell_{t-1}) (V_t * x_t - m_{t-1})

    What a transition does in this form is this library's reading: the mean of values is brought to the new width and
    resolution as KCLA's mean of outputs is, :math:`r = \mathrm{BN}(\mathrm{Conv}_{1 \times 1}(m))`, and counts as one
    layer with the key of :math:`r` pooled. It holds values already, so no :math:`V` is applied to it again. Parameters
    are KCLA's. Cost O(L); state O(1), KCLA's. In PyTorch's operators: slower than KCLA, which has kernels of its own.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper`` (as KCLA is published).

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `MeanState` of values, or ``None``.
        - Returns ``(B, C, H, W)`` and the new `MeanState`.

    Example:
        >>> import torch
        >>> from lineattn.nn.depth.base import Site
        >>> attention = KCLAStaticValue(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), torch.equal(state.mean, attention.value(x))
        (True, True)

    Reference:
        "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, ablation table,
        row (d).
    """

    static_values = True

    def _fold(self) -> None:
        """The norm stays: values are made before it is known how it will scale their mean."""
        if self.transition is not None:
            self.transition.fold()
