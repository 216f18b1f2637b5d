r"""Standard layer attention: softmax attention of a layer to all earlier layers of its stage.

"Cross-Layer Retrospective Retrieving via Layer Attention" (Fang, Cai, Chen, Ye, Li; ICLR 2023), arXiv 2302.03985,
where it is the starting point; equations 2-3 of "Enhancing Layer Interaction Using Key-Correlated Layer Attention"
(2026), arXiv 2606.28405.

Layer :math:`t` applies its own projections to all outputs so far:

.. math::
    o_t = \mathrm{ReLU}\Big(\mathrm{BN}\Big(\sum_{s \le t} a_{t,s}\, V_t * x_s\Big)\Big), \qquad
    a_t = \mathrm{softmax}_s(\langle Q_t y_t, K_t y_s \rangle / \sqrt{D}), \qquad y_s = \mathrm{GAP}(x_s)

Cost O(L²); state O(L), one map a layer.
"""

from __future__ import annotations

from torch import Tensor

from lineattn.nn.common import softmax_over_depth
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.mixing import MixingAttention
from lineattn.registry import register


@register(
    "layer_softmax",
    axis="depth",
    title="Standard layer attention",
    paper="Cross-Layer Retrospective Retrieving via Layer Attention (2023)",
    arxiv="2302.03985",
    cost="O(L^2)",
    state="O(L)",
    no_gradient=(
        ("query.weight", "where a stage starts there is one layer to attend to, and the softmax of one is 1"),
        ("key.weight", "where a stage starts there is one layer to attend to, and the softmax of one is 1"),
    ),
)
class LayerSoftmax(MixingAttention):
    r"""Softmax attention over depth with the present layer's query, keys and values.

    .. math::
        o_t = \mathrm{ReLU}(\mathrm{BN}(
            V_t * \textstyle\sum_s \mathrm{softmax}_s(\langle q_t, K_t y_s\rangle / \sqrt{D})\, x_s))

    Cost O(L²) in the mixing of maps; state O(L), one map a layer.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `lineattn.nn.depth.mixing.MixingState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `MixingState`.

    Example:
        >>> import torch
        >>> attention = LayerSoftmax(Site(channels=32), head_dim=16)
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> out.shape, len(state.maps)
        (torch.Size([2, 32, 8, 8]), 1)

    Reference:
        "Cross-Layer Retrospective Retrieving via Layer Attention" (2023), arXiv 2302.03985, equation 3.
    """

    def __init__(self, site: Site, *, head_dim: int = 32, drop_path: float = 0.2, init: Init = "identity") -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)

    def _shares(self, query: Tensor, keys: Tensor) -> Tensor:
        return softmax_over_depth(*self._split(query, keys))
