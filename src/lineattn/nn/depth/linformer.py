r"""Linformer layer attention: softmax attention to a fixed number of mixtures of the earlier layers.

"Linformer: Self-Attention with Linear Complexity" (Wang, Li, Khabsa, Fang, Ma; 2020), arXiv 2006.04768, as a baseline
of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.

.. math::
    p_t = \mathrm{softmax}_r(\langle q_t, \textstyle\sum_s E_{t,rs}\, k_{t,s} \rangle / \sqrt{D}), \qquad
    a_{t,s} = \textstyle\sum_r p_{t,r} F_{t,rs}

Cost O(L²); state O(L), one map a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.common import softmax_over_depth
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.mixing import MixingAttention
from lineattn.ops.channels import linear
from lineattn.registry import register

_ONE = "where a stage starts there is one layer to attend to, and the softmax of one is 1"


@register(
    "layer_linformer",
    axis="depth",
    title="Linformer layer attention",
    paper="Linformer: Self-Attention with Linear Complexity (2020)",
    arxiv="2006.04768",
    cost="O(L^2)",
    state="O(L)",
    no_gradient=(("query.weight", _ONE), ("key.weight", _ONE)),
)
class LayerLinformer(MixingAttention):
    r"""Softmax attention over depth to ``rank`` learned mixtures of the stage's layers so far.

    .. math::
        o_t = \mathrm{ReLU}(\mathrm{BN}(V_t * \textstyle\sum_r p_r \sum_s F_{rs} x_s)), \qquad
        p = \mathrm{softmax}_r(\langle q_t, \textstyle\sum_s E_{rs} K_t y_s \rangle / \sqrt{D})

    As long as there are no more than ``rank`` layers, it is softmax attention to them. Cost O(L²), since each layer's
    mixtures are its own; state O(L), one map a layer.

    Note:
        In the published code for depth a counter stands still, so that the projection is never made: its "Linformer" is
        `lineattn.nn.depth.layer_softmax.LayerSoftmax`. This is what was meant, without a bias, as in the paper of
        Linformer.

    Args:
        site: Where the module stands; its stage's layers are all it sees, and their number shapes :math:`E` and
            :math:`F`.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        rank: Mixtures, at least 2.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `lineattn.nn.depth.mixing.MixingState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new state.

    Raises:
        InputError: The state starts within a stage, so that the number of layers is not known; or ``rank`` is below 2.

    Example:
        >>> third = LayerLinformer(Site(channels=32, index=2, entry="continue"), head_dim=16)
        >>> third.key_slots.shape
        torch.Size([2, 3])

    Reference:
        "Linformer: Self-Attention with Linear Complexity" (2020), arXiv 2006.04768, equation 7.
    """

    def __init__(
        self, site: Site, *, head_dim: int = 32, rank: int = 2, drop_path: float = 0.2, init: Init = "identity"
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        if rank < 2:
            raise InputError(f"rank is {rank}; it must be at least 2, as the softmax of one mixture is 1")
        if site.entry == "start" and site.index:
            raise InputError(
                f"layer_linformer sees a stage from its first block on, and here it starts at block {site.index}; "
                "use scope='per_stage'"
            )
        layers = site.index + 1
        self.rank = rank
        self.key_slots = self.value_slots = None
        if layers > rank:
            self.key_slots, self.value_slots = _slots(rank, layers), _slots(rank, layers)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"

    def _shares(self, query: Tensor, keys: Tensor) -> Tensor:
        if self.key_slots is None or self.value_slots is None:
            return softmax_over_depth(*self._split(query, keys))
        slots = linear(keys.transpose(1, 2), self.key_slots).transpose(1, 2)
        return linear(softmax_over_depth(*self._split(query, slots)), self.value_slots.t())


def _slots(rank: int, layers: int) -> nn.Parameter:
    """A linear layer's weights, with the range that such layers are drawn from."""
    bound = 1 / math.sqrt(layers)
    return nn.Parameter(torch.empty(rank, layers).uniform_(-bound, bound))
