"""What most methods of the depth axis are made of; no method by itself."""

from __future__ import annotations

from torch import Tensor, nn

from lineattn.nn.common import ChannelConv, channel_norm, count_heads, depthwise_value, fold_into_norm, fold_norm
from lineattn.nn.depth.base import DepthAttention, Init, Site


class PooledAttention(DepthAttention):
    """Base of methods whose queries and keys come from the pooled map, and whose values are a depth-wise convolution.

    A subclass adds what it reads from the past, by `lineattn.nn.common.read_out`.

    Args:
        site: Where the module stands.
        head_dim: Width of a head; it divides the site's channels.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.
    """

    relu: bool = True
    """Whether a ReLU follows the norm."""

    def __init__(self, site: Site, *, head_dim: int, drop_path: float, init: Init) -> None:
        super().__init__(site, drop_path=drop_path, init=init)
        self.head_dim, self.head_count = head_dim, count_heads(site.channels, head_dim)
        self.query = ChannelConv(site.channels)
        self.key = ChannelConv(site.channels)
        self.value = depthwise_value(site.channels)
        self.norm: nn.Module = channel_norm(site)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}"

    def _fold(self) -> None:
        fold_norm(self, relu=self.relu)

    def _fold_gain(self, gain: Tensor) -> None:
        fold_into_norm(self.norm, gain, relu=self.relu)
