r"""Performer layer attention: layer attention with random features in place of the softmax.

"Rethinking Attention with Performers" (Choromanski et al.; ICLR 2021), arXiv 2009.14794, as a baseline in the code of
"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    a_{t,s} = \langle \varphi_t(q_t), \varphi_t(k_s) \rangle, \qquad
    \varphi_t(y) = \sqrt{2 / m}\,[\sin(W_t^T y), \cos(W_t^T y)]

with keys and value maps that layer :math:`s` has made. Cost O(L²); state O(L), one map a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.nn.common import compare
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.mrla import MRLABase
from lineattn.ops.autocast import no_autocast
from lineattn.registry import register


@register(
    "layer_performer",
    axis="depth",
    title="Performer layer attention",
    paper="Rethinking Attention with Performers (2021)",
    arxiv="2009.14794",
    cost="O(L^2)",
    state="O(L)",
)
class LayerPerformer(MRLABase):
    r"""Attention over depth by trigonometric random features, to the keys and values that earlier layers have left.

    .. math::
        o_t = \mathrm{ReLU}(\mathrm{BN}(\textstyle\sum_s \langle \varphi_t(q_t), \varphi_t(k_s)\rangle\, V_s * x_s)),
        \qquad \varphi_t(y) = \sqrt{2 / m}\,[\sin(W_t^T y), \cos(W_t^T y)]

    The frequencies :math:`W_t \in \mathbb{R}^{h \times D \times m/2}` are drawn from :math:`N(0, 1/D)` and stay; the
    expected share is :math:`e^{-\lVert q_t - k_s \rVert^2 / 2D}`. Cost O(L²) in the mixing of maps; state O(L), one map
    a layer.

    Note:
        These are not the positive features that the paper proposes, but the ones that it improves on, and there is no
        denominator: both as in the published code for depth. The frequencies are drawn with the module's parameters
        (`torch.manual_seed` decides) and saved with them.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        features: Number of features :math:`m`, even.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `lineattn.nn.depth.mrla.MRLABaseState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new state.

    Example:
        >>> attention = LayerPerformer(Site(channels=32), head_dim=16)
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> out.shape, attention.frequencies.shape
        (torch.Size([2, 32, 8, 8]), torch.Size([2, 16, 8]))

    Reference:
        "Rethinking Attention with Performers" (2021), arXiv 2009.14794, section 2.3.
    """

    frequencies: Tensor

    def __init__(
        self, site: Site, *, head_dim: int = 32, features: int = 16, drop_path: float = 0.2, init: Init = "identity"
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        if features < 2 or features % 2:
            raise InputError(f"features is {features}; it must be even and at least 2: a sine and a cosine each")
        drawn = torch.randn(self.head_count, head_dim, features // 2) / math.sqrt(head_dim)
        self.register_buffer("frequencies", drawn)

    def _share(self, query: Tensor, keys: Tensor) -> Tensor:
        return compare(self._features(query[..., None, :])[..., 0, :], self._features(keys))

    def _features(self, y: Tensor) -> Tensor:
        """``(B, h, L, D) -> (B, h, L, m)``."""
        with no_autocast(y.device):
            phase = y @ self.frequencies.to(y.dtype)
        return torch.cat([phase.sin(), phase.cos()], dim=-1) / math.sqrt(self.frequencies.shape[-1])
