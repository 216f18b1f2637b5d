r"""Linear layer attention: layer attention with a kernel in place of the softmax.

"Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (Katharopoulos, Vyas, Pappas, Fleuret;
ICML 2020), arXiv 2006.16236, as a baseline of "Enhancing Layer Interaction Using Key-Correlated Layer Attention"
(2026), arXiv 2606.28405.

.. math::
    a_{t,s} = \langle \varphi(q_t), \varphi(k_{t,s}) \rangle, \qquad \varphi(y) = \mathrm{elu}(y) + 1

Cost O(L²); state O(L), one map a layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.nn.common import compare
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.mixing import MixingAttention
from lineattn.registry import register

_ONE = "with normalise=True, where a stage starts, there is one layer to attend to, and its share is 1"


@register(
    "layer_linear",
    axis="depth",
    title="Linear layer attention",
    paper="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention (2020)",
    arxiv="2006.16236",
    cost="O(L^2)",
    state="O(L)",
    no_gradient=(("query.weight", _ONE), ("key.weight", _ONE)),
)
class LayerLinear(MixingAttention):
    r"""Attention over depth by the kernel elu + 1, with the present layer's query, keys and values.

    .. math::
        o_t = \mathrm{ReLU}(\mathrm{BN}(V_t * \textstyle\sum_s
            \langle \varphi(q_t), \varphi(K_t y_s)\rangle\, x_s)), \qquad \varphi(y) = \mathrm{elu}(y) + 1

    Cost O(L²) in the mixing of maps; state O(L), one map a layer.

    Note:
        Linear in name: the cost over depth is that of the softmax. A recurrent form would need keys and values that
        each layer makes once and for all, and its state, the sum of :math:`\varphi(k_s) \otimes v_s`, is ``head_dim``
        maps; with fewer layers in a stage than that, the maps themselves are less.
        The published baseline has no denominator; ``normalise`` divides the shares by their sum, as the paper of
        linear attention does. A later state of that code leaves out the ReLU.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        head_dim: Width of a head; it divides the site's channels.
        normalise: Whether the shares add up to one.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `lineattn.nn.depth.mixing.MixingState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new state.

    Example:
        >>> attention = LayerLinear(Site(channels=32), normalise=True)
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> attention.weights(out, None, state)["share"].sum(-1).allclose(torch.ones(2, 4))
        True

    Reference:
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020), arXiv 2006.16236,
        equations 4-7.
    """

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 8,
        normalise: bool = False,
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        self.normalise = normalise

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalise={self.normalise}"

    def _shares(self, query: Tensor, keys: Tensor) -> Tensor:
        share = compare(*self._split(F.elu(query) + 1, F.elu(keys) + 1))
        if not self.normalise:
            return share
        # The kernel of a long negative vector is zero in floating point.
        return share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
