"""The extensions and ablations of KCLA, O(L²): every layer's map and score is kept, and every weight is written out.

See `tests.oracles.depth` for what an oracle is. Section 8.1 of the specification, and the ablation in section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracles.depth import (
    KCLA_FORMS,
    add,
    batch_norm,
    channel_conv,
    depthwise_3x3,
    on_maps,
    pointwise,
    split_heads,
)


@dataclass(frozen=True)
class Layer:
    """What a layer has left: its map or value, its key, how that agreed with its query, and the site that wrote it."""

    map: Tensor
    key: Tensor
    rho: Tensor | None
    module: Any

    @property
    def score(self) -> Tensor:
        """With KCLA's temperatures."""
        return KCLA_FORMS["paper"].scores(self.key, 0.7)


Scores = Callable[[list[Layer]], list[Tensor]]
Mean = Callable[[list[Layer]], Tensor]


def mean(layers: list[Layer], scores: list[Tensor]) -> Tensor:
    largest = torch.stack(scores).amax(0)  # learned temperatures may be any: exponentials would overflow
    weights = [torch.exp(score - largest) for score in scores]
    return sum(
        layer.map * on_maps(w / sum(weights), layer.map.shape[1]) for layer, w in zip(layers, weights, strict=True)
    )


def scores_temperature(layers: list[Layer]) -> list[Tensor]:
    return [layer.key.square().sum(-1).sqrt() / torch.exp(layer.module.log_temperature) for layer in layers]


def scores_write(layers: list[Layer]) -> list[Tensor]:
    found = []
    for layer in layers:
        bend = torch.zeros_like(layer.score)
        if layer.rho is not None:
            bend = torch.tanh(layer.rho @ layer.module.temper.weight.T + layer.module.temper.bias)
        found.append(layer.score / torch.exp(bend))
    return found


def scores_decay(layers: list[Layer]) -> list[Tensor]:
    """A layer is written once for each that follows it; what a transition sums up is written by nobody."""
    return [layer.score - sum(later.module.decay.abs() for later in layers[s + 1 :]) for s, layer in enumerate(layers)]


def of_one_mean(scores: Scores):
    def run(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None) -> list[Tensor]:
        return attend(modules, outs, keeps, lambda layers: mean(layers, scores(layers)))

    return run


temperature, write, decay = map(of_one_mean, (scores_temperature, scores_write, scores_decay))


def plain_scores(layers: list[Layer]) -> list[Tensor]:
    return [layer.score for layer in layers]


def plain_mean(layers: list[Layer]) -> Tensor:
    return mean(layers, plain_scores(layers))


def mean_by_length(layers: list[Layer]) -> Tensor:
    lengths = [layer.key.square().sum(-1).sqrt() for layer in layers]
    channels = layers[0].map.shape[1]
    total = sum(layer.map * on_maps(n, channels) for layer, n in zip(layers, lengths, strict=True))
    return total / on_maps(sum(lengths), channels)


def no_exp(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None) -> list[Tensor]:
    return attend(modules, outs, keeps, mean_by_length)


def no_gate(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None) -> list[Tensor]:
    return attend(modules, outs, keeps, plain_mean, gated=False)


def static_value(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None) -> list[Tensor]:
    return attend(modules, outs, keeps, plain_mean, static=True)


def corrected(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None, exact: bool = False):
    """To first order by the two moments of the specification, or exactly at the reader's temperature."""

    def read(layers: list[Layer]) -> Tensor:
        reader = layers[-1]
        scores = plain_scores(layers)
        if len(layers) == 1:
            return mean(layers, scores)
        linear = reader.module.correction
        epsilon = torch.tanh(reader.rho @ linear.weight.T + linear.bias) / 4
        if exact:
            return mean(layers, [score * (1 + epsilon) for score in scores])
        channels = reader.map.shape[1]
        m = mean(layers, scores)
        weights = [torch.exp(score) / sum(torch.exp(other) for other in scores) for score in scores]
        m1 = sum(layer.map * on_maps(w * s, channels) for layer, w, s in zip(layers, weights, scores, strict=True))
        mean_score = sum(w * s for w, s in zip(weights, scores, strict=True))
        return m + on_maps(epsilon, channels) * (m1 - on_maps(mean_score, channels) * m)

    return attend(modules, outs, keeps, read, summed_up=plain_mean)


def attend(
    modules: Sequence[nn.Module],
    outs: Sequence[Tensor],
    keeps: Sequence[Tensor] | None,
    read: Mean,
    *,
    summed_up: Mean | None = None,
    gated: bool = True,
    static: bool = False,
) -> list[Tensor]:
    """KCLA around what is read, which is what a transition sums up too, if that is not said apart."""
    results, layers = [], []
    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        if module.site.entry == "transition":
            (r,), (key,) = transition(module, [(summed_up or read)(layers)], x)
            layers = [Layer(r, key, None, module)]
        own = depthwise_3x3(x, module.value.weight) if static else x
        key = pooled_heads(module, x, module.key)
        layers = [*layers, Layer(own, key, agreement(module, x, key) if gated else None, module)]
        found = read(layers)
        values = found if static else depthwise_3x3(found, module.value.weight)
        results.append(put_out(module, x, values, layers[-1].rho, None if keeps is None else keeps[t]))
    return results


def bank(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, keeps=None, copies: int = 2):
    """A list of layers for each temperature, as a transition brings another map into each."""
    count = copies
    factors = [2 ** (2 * b / (count - 1) - 1) for b in range(count)] if count > 1 else [1]
    results: list[Tensor] = []
    banks: list[list[Layer]] = [[] for _ in factors]

    def means() -> list[Tensor]:
        return [mean(layers, [a.score / f for a in layers]) for layers, f in zip(banks, factors, strict=True)]

    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        if module.site.entry == "transition":
            rs, keys = transition(module, means(), x)
            banks = [[Layer(r, key, None, module)] for r, key in zip(rs, keys, strict=True)]
        key = pooled_heads(module, x, module.key)
        rho = agreement(module, x, key)
        banks = [[*layers, Layer(x, key, rho, module)] for layers in banks]
        maps = means()
        read = maps[0]
        if module.choice is not None:
            logits = (rho @ module.choice.weight.T + module.choice.bias).reshape(*rho.shape, count)
            raised = torch.exp(logits)
            choice = raised / raised.sum(-1, keepdim=True)
            read = sum(m * on_maps(choice[..., b], x.shape[1]) for b, m in enumerate(maps))
        values = depthwise_3x3(read, module.value.weight)
        results.append(put_out(module, x, values, rho, None if keeps is None else keeps[t]))
    return results


def pooled_heads(module: nn.Module, x: Tensor, conv: nn.Module) -> Tensor:
    return split_heads(channel_conv(x.mean((2, 3)), conv.weight), module.head_dim)


def agreement(module: nn.Module, x: Tensor, key: Tensor) -> Tensor:
    return (pooled_heads(module, x, module.query) * key).sum(-1) / key.square().sum(-1).sqrt()


def transition(module: nn.Module, maps: list[Tensor], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The maps in the new width and resolution, by one batch norm over all of them, and their keys."""
    site, parts = module.site, module.transition
    changes = site.prev_channels != site.channels or site.stride != 1
    adapted = [pointwise(m, parts.conv)[..., : x.shape[2], : x.shape[3]] if changes else m for m in maps]
    adapted = batch_norm(torch.cat(adapted), parts.norm)
    rs = list(adapted.split(len(maps[0])))
    return rs, [pooled_heads(module, r, parts.key) for r in rs]


def put_out(module: nn.Module, x: Tensor, values: Tensor, rho: Tensor | None, keep: Tensor | None) -> Tensor:
    if rho is not None:
        values = values * on_maps(1 / (1 + torch.exp(-rho @ module.gate.weight.T)), x.shape[1])
    return add(module, x, batch_norm(values, module.norm), True, keep)
