"""Attention over depth, written from the formulas in the plainest way: every earlier map is kept, every sum is a sum.

An oracle shares nothing with the package but the parameters, which it reads from the modules. It takes the modules of
a chain of sites and what the blocks put out there, and returns what the sites put out. The sizes of the temperatures
and the form of each published variant are written down here once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def channel_conv(y: Tensor, weight: Tensor) -> Tensor:
    """``(B, C)`` with zeros beyond both ends, times a kernel ``(1, 1, k)`` that slides along the channels."""
    taps, channels = weight.flatten(), y.shape[1]
    half = len(taps) // 2
    padded = torch.zeros(len(y), channels + 2 * half, dtype=y.dtype)
    padded[:, half : half + channels] = y
    return sum(padded[:, i : i + channels] * tap for i, tap in enumerate(taps))


def depthwise_3x3(x: Tensor, weight: Tensor) -> Tensor:
    height, width = x.shape[2:]
    padded = torch.zeros(*x.shape[:2], height + 2, width + 2, dtype=x.dtype)
    padded[:, :, 1:-1, 1:-1] = x
    shifts = [(i, j) for i in range(3) for j in range(3)]
    return sum(padded[:, :, i : i + height, j : j + width] * weight[:, 0, i, j, None, None] for i, j in shifts)


def pointwise(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A grouped 1x1 convolution with stride, one group after the other."""
    x = x[:, :, :: conv.stride[0], :: conv.stride[1]]
    groups = zip(conv.weight[:, :, 0, 0].chunk(conv.groups), x.chunk(conv.groups, 1), strict=True)
    y = torch.cat([torch.einsum("oi,bihw->bohw", weight, part) for weight, part in groups], 1)
    return y if conv.bias is None else y + conv.bias[:, None, None]


def batch_norm(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    if norm.training:
        mean = y.mean((0, 2, 3), keepdim=True)
        variance = (y - mean).square().mean((0, 2, 3), keepdim=True)
    else:
        mean, variance = norm.running_mean[:, None, None], norm.running_var[:, None, None]
    return (y - mean) / torch.sqrt(variance + norm.eps) * norm.weight[:, None, None] + norm.bias[:, None, None]


def split_heads(y: Tensor, head_dim: int) -> Tensor:
    return y.reshape(len(y), -1, head_dim)


def on_maps(per_head: Tensor, channels: int) -> Tensor:
    """``(B, h)`` to ``(B, C, 1, 1)``: a head is a run of neighbouring channels."""
    batch, count = per_head.shape
    return per_head[:, :, None].expand(batch, count, channels // count).reshape(batch, channels, 1, 1)


def add(module: nn.Module, x: Tensor, y: Tensor, relu: bool, keep: Tensor | None) -> Tensor:
    """``x + keep * gain * relu(y)``, with ``keep`` a sample (0, or 1 over the probability of staying)."""
    y = torch.where(y > 0, y, 0) if relu else y
    y = y if module.gain is None else y * module.gain[:, None, None]
    return x + (y if keep is None else y * keep[:, None, None, None])


@dataclass(frozen=True)
class KCLAForm:
    """Section 2.2 of the specification, one published code a line."""

    score: str  # "n/(P√d)", "n·P" or "n/P"
    clamp: float = math.inf
    eps: float = 0.0
    mixes_heads: bool = True
    sums_keys: bool = False
    relu: bool = True
    own_key: bool = True
    always_adapts: bool = False

    def scores(self, key: Tensor, p: float) -> Tensor:
        count, head_dim = key.shape[1:]
        norm = key.square().sum(-1).sqrt()
        h = torch.arange(1, count + 1, dtype=key.dtype)
        factor = torch.exp(math.log(p) + (h - 1) / max(count - 1, 1) * (-2 * math.log(p))) if count > 1 else 1.0
        scores = {"n/(P√d)": norm / (factor * math.sqrt(head_dim)), "n·P": norm * factor, "n/P": norm / factor}
        return torch.clamp(scores[self.score], max=self.clamp)


KCLA_FORMS = {
    "paper": KCLAForm("n/(P√d)"),
    "ref-cls": KCLAForm("n·P", clamp=10, eps=1e-3),
    "ref-det0": KCLAForm("n/(P√d)", clamp=10, eps=1e-3, sums_keys=True),
    "ref-seg": KCLAForm("n/P", clamp=10, mixes_heads=False, relu=False, own_key=False, always_adapts=True),
}


def kcla(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, variant: str, p: float = 0.7, keeps=None):
    """Sections 2.2, 2.3 and 2.5: the weighted mean of all maps so far, O(L²)."""
    form, results = KCLA_FORMS[variant], []
    kept: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: the map, exp(score), the key
    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        d = module.head_dim
        if module.site.entry == "transition":
            kept = [_pseudo_layer(module, weighted_mean(kept, 0.0), x, form, p)]
        y = x.mean((2, 3))
        query, key = (split_heads(channel_conv(y, conv.weight), d) for conv in (module.query, module.key))
        kept.append((x, torch.exp(form.scores(key, p)), key))
        direction = sum(k for _, _, k in kept) if form.sums_keys else key
        rho = (query * direction).sum(-1) / direction.square().sum(-1).sqrt()
        gate = torch.sigmoid(rho @ module.gate.weight.T if form.mixes_heads else rho)
        read = depthwise_3x3(weighted_mean(kept, form.eps), module.value.weight) * on_maps(gate, x.shape[1])
        keep = None if keeps is None else keeps[t]
        results.append(add(module, x, batch_norm(read, module.norm), form.relu, keep))
    return results


def weighted_mean(kept: list[tuple[Tensor, Tensor, Tensor]], eps: float) -> Tensor:
    total = sum(weight for _, weight, _ in kept) + eps
    return sum(x * on_maps(weight / total, x.shape[1]) for x, weight, _ in kept)


def _pseudo_layer(
    module: nn.Module, mean: Tensor, x: Tensor, form: KCLAForm, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What has been read so far, as the first layer of a new stage, whose own first layer is ``x``."""
    transition, site = module.transition, module.site
    adapts = form.always_adapts or site.prev_channels != site.channels or site.stride != 1
    r = pointwise(mean, transition.conv)[..., : x.shape[2], : x.shape[3]] if adapts else mean
    r = batch_norm(r, transition.norm)
    weight = transition.key.weight if form.own_key else module.key.weight
    key = split_heads(channel_conv(r.mean((2, 3)), weight), module.head_dim)
    return r, torch.exp(form.scores(key, p)), key


def kcla_states(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, variant: str, p: float = 0.7):
    """Section 2.2 with the published state: the sum U of weighted maps and the sum Z of weights, after each layer."""
    form, states, u, z = KCLA_FORMS[variant], [], None, None
    for module, x in zip(modules, outs, strict=True):
        channels = x.shape[1]
        if module.site.entry == "transition":
            r, z, _ = _pseudo_layer(module, u / on_maps(z, u.shape[1]), x, form, p)
            u = r * on_maps(z, channels)
        key = split_heads(channel_conv(x.mean((2, 3)), module.key.weight), module.head_dim)
        weight = torch.exp(form.scores(key, p))
        u = x * on_maps(weight, channels) if u is None else u + x * on_maps(weight, channels)
        z = weight if z is None else z + weight
        states.append((u, z))
    return states


def layer_softmax(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None):
    """Section 1.1: this layer's query, keys and values of all maps of the stage; V of each map by itself."""
    results, maps = [], []
    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        maps = [x] if module.site.entry == "start" else [*maps, x]
        query = channel_conv(x.mean((2, 3)), module.query.weight)
        keys = [channel_conv(past.mean((2, 3)), module.key.weight) for past in maps]
        values = [depthwise_3x3(past, module.value.weight) for past in maps]
        read = _softmax_read(query, keys, values, module.head_dim)
        results.append(add(module, x, batch_norm(read, module.norm), True, None if keeps is None else keeps[t]))
    return results


def mrla_base(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None):
    """Section 1.2: as above, but keys and values are those that each layer made for itself."""
    results, keys, values = [], [], []
    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        if module.site.entry == "start":
            keys, values = [], []
        query = channel_conv(x.mean((2, 3)), module.query.weight)
        keys = [*keys, channel_conv(x.mean((2, 3)), module.key.weight)]
        values = [*values, depthwise_3x3(x, module.value.weight)]
        read = _softmax_read(query, keys, values, module.head_dim)
        results.append(add(module, x, batch_norm(read, module.norm), True, None if keeps is None else keeps[t]))
    return results


def _softmax_read(query: Tensor, keys: list[Tensor], values: list[Tensor], head_dim: int) -> Tensor:
    scores = [(split_heads(query, head_dim) * split_heads(key, head_dim)).sum(-1) / math.sqrt(head_dim) for key in keys]
    weights = [torch.exp(score) for score in scores]
    return sum(v * on_maps(weight / sum(weights), v.shape[1]) for v, weight in zip(values, weights, strict=True))


def mrla_light(modules: Sequence[nn.Module], outs: Sequence[Tensor], shortcuts: Sequence[Tensor], *, keeps=None):
    """Section 1.3 with either source: ``O_t = A_t + λ_t I_t``, or ``O_t = A_t + λ_t O_{t-1}`` unrolled to a sum."""
    results, own = [], []  # of the stage's layers so far: A_s
    decays: list[Tensor] = []
    for t, (module, x, shortcut) in enumerate(zip(modules, outs, shortcuts, strict=True)):
        if module.site.entry == "start":
            own, decays = [], []
        query, key = (channel_conv(x.mean((2, 3)), conv.weight) for conv in (module.query, module.key))
        agreement = (split_heads(query, module.head_dim) * split_heads(key, module.head_dim)).sum(-1)
        gate = torch.sigmoid(agreement / math.sqrt(module.head_dim))
        attended = depthwise_3x3(x, module.value.weight) * on_maps(gate, x.shape[1])
        if module.source == "shortcut":
            read = attended + module.decay[:, None, None] * shortcut
        else:
            own, decays = [*own, attended], [*decays, module.decay]
            read = sum(a * _product(decays[s + 1 :]) for s, a in enumerate(own))
        results.append(add(module, x, batch_norm(read, module.norm), False, None if keeps is None else keeps[t]))
    return results


def _product(decays: list[Tensor]) -> Tensor | int:
    """β: the product of the decays between a layer and the present one."""
    return math.prod(decay[:, None, None] for decay in decays)
