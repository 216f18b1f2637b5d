"""What attention over depth costs a network, by counting: parameters, MACs, and the mixing of maps."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lineattn import registry
from lineattn.analysis.cost import count_macs, count_params
from lineattn.hosts.depth_host import DepthHost
from lineattn.nn.depth.base import DepthAttention


class DepthCost(NamedTuple):
    """Costs of one forward pass.

    Attributes:
        params: Parameters.
        macs: Multiply-accumulates of convolutions and matrix products, see `lineattn.analysis.cost.count_macs`.
        mixing: Multiply-adds of the mixing of maps over depth, which those leave out, being elementwise.
    """

    params: int
    macs: int
    mixing: int


def count_depth_cost(net: nn.Module, example: Tensor) -> DepthCost:
    """Counts on a pass without data; the network is not touched.

    The mixing is one multiply-add for each element of each map that a site reads over depth: at cost O(L²) all maps
    of the stretch so far, the present one too, so ``t C H W`` at the ``t``-th site; at cost O(L) the running maps or
    the shortcut, if any, so ``C H W`` each; none for methods that gate the branch. What makes the shares, and gates,
    norms and sums, are not counted.

    Args:
        net: A plain network, or one with attention over depth.
        example: An input; only its shape and dtype matter.

    Example:
        >>> import torch, lineattn
        >>> net = lineattn.create_model("resnet20_cifar", attn="layer_softmax", width=8)
        >>> count_depth_cost(net, torch.zeros(1, 3, 8, 8)).mixing  # three layers a stage
        5376
        >>> (1 + 2 + 3) * (8 * 8 * 8 + 16 * 4 * 4 + 32 * 2 * 2)
        5376
    """
    mixing = 0

    def add(site: nn.Module, inputs: tuple, _output: object) -> None:
        nonlocal mixing
        out, _, state = inputs
        mixing += _maps_read(cast(DepthAttention, site), out, state) * out.numel()

    sites = list(net.sites.values()) if isinstance(net, DepthHost) else []
    hooks = [site.register_forward_hook(add) for site in sites]
    try:
        macs = count_macs(net, example)
    finally:
        for hook in hooks:
            hook.remove()
    return DepthCost(count_params(net), macs, mixing)


def _maps_read(site: DepthAttention, out: Tensor, state: object) -> int:
    if site.position == "branch":
        return 0
    cards = map(registry.get, registry.list_methods("depth"))
    if next(card.cost for card in cards if card.cls is type(site)) == "O(L)":
        # By their dimensions: at a transition they are of another shape. Who reads a shortcut keeps no map.
        return int(site.needs_shortcut) or sum(isinstance(x, Tensor) and x.ndim == 4 for x in pytree.tree_leaves(state))
    kept = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor) and leaf.shape == out.shape]
    return len(kept) + 1
