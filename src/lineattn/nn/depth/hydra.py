r"""Hydra layer attention: layer attention with as many heads as channels.

"Hydra Attention: Efficient Attention with Many Heads" (Bolya, Fu, Dai, Zhang, Hoffman; 2022), arXiv 2209.07484, as a
baseline of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    o_t = \mathrm{BN}\Big(\hat q_t \odot \sum_{s \le t} \hat k_{t,s} \odot V_t * x_s\Big), \qquad
    \hat y = y / \lVert y \rVert

Cost O(L²); state O(L), one map a layer.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lineattn.nn.common import compare
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.mixing import MixingAttention
from lineattn.registry import register


@register(
    "layer_hydra",
    axis="depth",
    title="Hydra layer attention",
    paper="Hydra Attention: Efficient Attention with Many Heads (2022)",
    arxiv="2209.07484",
    cost="O(L^2)",
    state="O(L)",
)
class LayerHydra(MixingAttention):
    r"""Attention over depth with one channel a head and cosines in place of the softmax.

    .. math::
        o_t = \mathrm{BN}(V_t * \textstyle\sum_s \hat q_t \odot \widehat{K_t y_s} \odot x_s)

    The length that the hats divide by is over all channels. Cost O(L²) in the mixing of maps; state O(L), one map a
    layer.

    Note:
        With one channel a head the sum :math:`\sum_s \hat k_s \odot v_s` is a single map, so that hydra attention is
        known for a state of fixed size. That takes keys and values that a layer makes once and for all. As published
        over depth, every layer makes them anew of all earlier maps by its own :math:`K_t`, and nothing can be summed
        up: this costs what the softmax costs.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `lineattn.nn.depth.mixing.MixingState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new state.

    Example:
        >>> import torch
        >>> attention = LayerHydra(Site(channels=32))
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> attention.weights(out, None, state)["share"].shape
        torch.Size([2, 32, 2])

    Reference:
        "Hydra Attention: Efficient Attention with Many Heads" (2022), arXiv 2209.07484.
    """

    relu = False

    def __init__(self, site: Site, *, drop_path: float = 0.2, init: Init = "identity") -> None:
        super().__init__(site, head_dim=1, drop_path=drop_path, init=init)

    def _shares(self, query: Tensor, keys: Tensor) -> Tensor:
        return compare(*self._split(F.normalize(query, dim=-1), F.normalize(keys, dim=-1)))
