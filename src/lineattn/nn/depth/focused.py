r"""Focused layer attention: layer attention with a kernel that sharpens directions.

"FLatten Transformer: Vision Transformer using Focused Linear Attention" (Han, Pan, Han, Song, Huang; ICCV 2023),
arXiv 2308.00442, as a baseline of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv
2606.28405.

.. math::
    a_{t,s} = \langle \varphi(q_t), \varphi(k_{t,s}) \rangle, \qquad
    \varphi(y) = \frac{\lVert r \rVert}{\lVert r^2 \rVert}\, r^2, \qquad
    r = \frac{\mathrm{ReLU}(y) + 10^{-6}}{\mathrm{softplus}(\sigma_t)}

with :math:`r^2` element by element and lengths over all channels. Cost O(L²); state O(L), one map a layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.nn.common import compare
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.mixing import MixingAttention
from lineattn.ops.channels import pool
from lineattn.registry import register


@register(
    "layer_focused",
    axis="depth",
    title="Focused layer attention",
    paper="FLatten Transformer: Vision Transformer using Focused Linear Attention (2023)",
    arxiv="2308.00442",
    cost="O(L^2)",
    state="O(L)",
)
class LayerFocused(MixingAttention):
    r"""Attention over depth by the focused kernel, with the present layer's query, keys and values.

    .. math::
        o_t = \mathrm{BN}(V_t * \textstyle\sum_s \langle \varphi(Q_t (y_t + p_t)), \varphi(K_t (y_s + p_s))\rangle\,
            x_s), \qquad \varphi(y) = \frac{\lVert r \rVert}{\lVert r^2 \rVert}\, r^2, \quad
        r = \frac{\mathrm{ReLU}(y) + 10^{-6}}{\mathrm{softplus}(\sigma_t)}

    :math:`p_t` is the layer's learned position and :math:`\sigma_t` the layer's learned scale, a number a channel each.
    Cost O(L²) in the mixing of maps; state O(L), one map a layer.

    Note:
        The published code for depth adds the position to the map, before anything else. Here it goes where a position
        belongs, into queries and keys: the values are the block's own outputs, of which no copy has to be made. There
        is no denominator and the power is two, as in that code (the paper's own code for tokens takes the third); the
        depth-wise convolution that the paper adds for the rank is left out, for :math:`V_t` is one.

        The taps of :math:`Q` and :math:`K` start positive. Pooled maps are positive behind a ReLU, and with negative
        taps the kernel's own ReLU would let nothing through, of any image and for good.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        head_dim: Width of a head; it divides the site's channels.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `lineattn.nn.depth.mixing.MixingState` or ``None``; its pooled maps have the positions in them.
        - Returns ``(B, C, H, W)`` and the new state.

    Example:
        >>> attention = LayerFocused(Site(channels=32), head_dim=16)
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> out.shape, len(state.maps)
        (torch.Size([2, 32, 8, 8]), 1)

    Reference:
        "FLatten Transformer: Vision Transformer using Focused Linear Attention" (2023), arXiv 2308.00442.
    """

    relu = False

    def __init__(self, site: Site, *, head_dim: int = 32, drop_path: float = 0.2, init: Init = "identity") -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        with torch.no_grad():
            self.query.weight.abs_()
            self.key.weight.abs_()
        self.position_bias = nn.Parameter(torch.zeros(site.channels))
        self.scale = nn.Parameter(torch.zeros(site.channels))

    def _pool(self, out: Tensor) -> Tensor:
        return pool(out) + self.position_bias

    def _shares(self, query: Tensor, keys: Tensor) -> Tensor:
        scale = F.softplus(self.scale.to(query.dtype))
        return compare(*self._split(_focus(query, scale), _focus(keys, scale)))


def _focus(y: Tensor, scale: Tensor) -> Tensor:
    r""":math:`\varphi`, over the last axis."""
    r = (F.relu(y) + 1e-6) / scale
    squares = r.square()
    return squares * (r.norm(dim=-1, keepdim=True) / squares.norm(dim=-1, keepdim=True))
