r"""KCLA with a learned temperature a head.

An extension of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, whose
authors name a temperature that adapts itself as future work.

.. math:: S_{t,h} = \lVert k_{t,h} \rVert\, e^{-\tau_h}, \qquad \tau_h = \ln(P_h \sqrt{D}) \text{ at the start}

Exactly recurrent: a layer's score is known when it is written. Cost O(L); state: one map and ``h`` scalars a sample,
as KCLA.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import OneMean
from lineattn.registry import register


@register(
    "kcla_temperature",
    axis="depth",
    title="KCLA with learned temperatures",
    paper="extension of KCLA (2026), its stated future work",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLATemperature(OneMean):
    r"""KCLA whose temperatures are parameters: each site learns how sharply its heads weigh layers.

    .. math:: S_{t,h} = \lVert k_{t,h} \rVert\, e^{-\tau_h}

    Starts as KCLA, and is exactly the weighted mean over all layers. Cost O(L); state O(1), KCLA's. In PyTorch's
    operators: slower than KCLA, which has kernels of its own.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        p: Smallest temperature factor at the start, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper`` (as KCLA is published).

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `MeanState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `MeanState`.

    Example:
        >>> attention = KCLATemperature(Site(channels=32), head_dim=16)
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
        self.log_temperature = nn.Parameter(-self.inv_temperature.log()) if weighs else None

    def _inv_temperature(self) -> Tensor:
        if self.log_temperature is None:
            return super()._inv_temperature()
        # Not in half precision, even where the parameter is.
        log_temperature = self.log_temperature.to(torch.promote_types(self.log_temperature.dtype, torch.float32))
        return torch.exp(-log_temperature)
