"""Layer attention with other weights than the softmax's: plain loops over layers, heads' channels and slots.

As in `tests.oracles.depth`: only parameters are shared with the package. The published values are those of a map by
itself, a convolution for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.oracles.depth import add, batch_norm, channel_conv, depthwise_3x3, on_maps

Read = Callable[[nn.Module, list[Tensor], list[Tensor]], Tensor]


def _stage_by_stage(modules: Sequence[nn.Module], outs: Sequence[Tensor], keeps, read: Read, relu: bool):
    """Each layer's ``read`` of the maps of its stage so far, given their pooled maps, and the tail of the method."""
    results, maps, pooled = [], [], []
    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        if module.site.entry == "start":
            maps, pooled = [], []
        maps, pooled = [*maps, x], [*pooled, x.mean((2, 3))]
        y = batch_norm(read(module, maps, pooled), module.norm)
        results.append(add(module, x, y, relu, None if keeps is None else keeps[t]))
    return results


def _head_sums(product: Tensor, head_dim: int) -> Tensor:
    """Sums over the channels of each head: ``(B, C)`` to ``(B, h)``."""
    return torch.stack([part.sum(1) for part in product.split(head_dim, 1)], 1)


def _values(module: nn.Module, maps: list[Tensor]) -> list[Tensor]:
    return [depthwise_3x3(x, module.value.weight) for x in maps]


def linear(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, normalise: bool = False, keeps=None):
    """Section 1.6, linear_attention: elu + 1 on query and keys, without the denominator unless asked for."""

    def kernel(y: Tensor) -> Tensor:
        return torch.where(y > 0, y + 1, torch.exp(torch.clamp(y, max=0)))

    def read(module: nn.Module, maps: list[Tensor], pooled: list[Tensor]) -> Tensor:
        query = kernel(channel_conv(pooled[-1], module.query.weight))
        keys = [kernel(channel_conv(y, module.key.weight)) for y in pooled]
        weights = [_head_sums(query * key, module.head_dim) for key in keys]
        total = sum(weights) if normalise else torch.ones_like(weights[0])
        channels = maps[0].shape[1]
        return sum(v * on_maps(w / total, channels) for v, w in zip(_values(module, maps), weights, strict=True))

    return _stage_by_stage(modules, outs, keeps, read, relu=True)


def hydra(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None):
    """Section 1.6, hydra: the query times the sum of keys times values, channel by channel."""

    def unit(y: Tensor) -> Tensor:
        return y / y.square().sum(1, keepdim=True).sqrt()

    def read(module: nn.Module, maps: list[Tensor], pooled: list[Tensor]) -> Tensor:
        keys = [unit(channel_conv(y, module.key.weight)) for y in pooled]
        total = sum(v * k[:, :, None, None] for v, k in zip(_values(module, maps), keys, strict=True))
        return unit(channel_conv(pooled[-1], module.query.weight))[:, :, None, None] * total

    return _stage_by_stage(modules, outs, keeps, read, relu=False)


def focused(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None):
    """Section 1.6, focused_la: every layer's own position in its pooled map, the present layer's scale for all."""
    positions: list[Tensor] = []

    def focus(y: Tensor, module: nn.Module) -> Tensor:
        r = (torch.where(y > 0, y, 0) + 1e-6) / torch.log(1 + torch.exp(module.scale))
        sharp = r * r
        return sharp / sharp.square().sum(1, keepdim=True).sqrt() * r.square().sum(1, keepdim=True).sqrt()

    def read(module: nn.Module, maps: list[Tensor], pooled: list[Tensor]) -> Tensor:
        del positions[len(maps) - 1 :]
        positions.append(module.position_bias)
        placed = [y + p for y, p in zip(pooled, positions, strict=True)]
        query = focus(channel_conv(placed[-1], module.query.weight), module)
        keys = [focus(channel_conv(y, module.key.weight), module) for y in placed]
        channels = maps[0].shape[1]
        return sum(
            v * on_maps(_head_sums(query * key, module.head_dim), channels)
            for v, key in zip(_values(module, maps), keys, strict=True)
        )

    return _stage_by_stage(modules, outs, keeps, read, relu=False)


def linformer(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, rank: int = 2, keeps=None):
    """Section 1.6, linformer as intended: keys and value maps mixed into ``rank`` of each, then softmax attention."""

    def read(module: nn.Module, maps: list[Tensor], pooled: list[Tensor]) -> Tensor:
        query = channel_conv(pooled[-1], module.query.weight)
        keys = [channel_conv(y, module.key.weight) for y in pooled]
        values = _values(module, maps)
        if len(maps) > rank:
            keys = [sum(e * key for e, key in zip(row, keys, strict=True)) for row in module.key_slots]
            values = [sum(f * v for f, v in zip(row, values, strict=True)) for row in module.value_slots]
        weights = [torch.exp(_head_sums(query * key, module.head_dim) / math.sqrt(module.head_dim)) for key in keys]
        channels = maps[0].shape[1]
        return sum(v * on_maps(w / sum(weights), channels) for v, w in zip(values, weights, strict=True))

    return _stage_by_stage(modules, outs, keeps, read, relu=True)


def performer(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None):
    """Section 1.6, performer: keys and values as each layer made them, the present layer's frequencies for all.

    The product of the features, ``sin a sin b + cos a cos b``, is ``cos(a - b)``.
    """
    own: list[tuple[Tensor, Tensor]] = []  # of the stage's layers so far: key, value

    def read(module: nn.Module, maps: list[Tensor], pooled: list[Tensor]) -> Tensor:
        del own[len(maps) - 1 :]
        own.append((channel_conv(pooled[-1], module.key.weight), depthwise_3x3(maps[-1], module.value.weight)))
        query, d = channel_conv(pooled[-1], module.query.weight), module.head_dim
        total, channels = 0, maps[0].shape[1]
        for key, value in own:
            weights = []
            for head, frequencies in enumerate(module.frequencies):
                difference = (query - key)[:, head * d : (head + 1) * d]
                angles = [(difference * w).sum(1) for w in frequencies.T]
                weights.append(sum(torch.cos(angle) for angle in angles) / len(angles))
            total = total + value * on_maps(torch.stack(weights, 1), channels)
        return total

    return _stage_by_stage(modules, outs, keeps, read, relu=True)


def attnres(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, block: int = 1):
    """arXiv 2603.15031 over the outputs of blocks: at each position a softmax over the layers, by a learned query.

    With blocks of layers: the first output of the stage, the last of every further ``block`` and the present one.
    """
    results, stage = [], []
    for module, x in zip(modules, outs, strict=True):
        stage = [x] if module.site.entry == "start" else [*stage, x]
        seen = [*stage[:-1:block], x]
        scores = []
        for v in seen:
            rms = torch.sqrt(v.square().mean(1) + 1e-6)
            scores.append(sum(w * v[:, c] / rms for c, w in enumerate(module.query)))
        highest = torch.stack(scores).amax(0)
        weights = [torch.exp(score - highest) for score in scores]
        read = sum(v * (w / sum(weights))[:, None] for v, w in zip(seen, weights, strict=True))
        gain = 1 if module.gain is None else module.gain[:, None, None]
        results.append((1 - gain) * x + gain * read)
    return results
