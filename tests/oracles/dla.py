"""Dynamic layer attention, section 1.4 of the specification: every refreshed key and map is written anew, one by one.

As in `tests.oracles.depth`: only parameters are shared with the package. With ``leak_sample0`` every refreshing call
gets the state of the batch's first sample, bug 21b of the specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.oracles.depth import add, batch_norm, channel_conv, depthwise_3x3, on_maps, split_heads


@dataclass
class Cell:
    """The recurrent cell of a stage, with the modules of the stage's first site."""

    input: nn.Sequential
    hidden: nn.Sequential
    h: Tensor
    c: Tensor

    def __call__(self, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        sums = _two_layers(y, self.input) + _two_layers(h, self.hidden)
        i, f, g = sums.split(y.shape[1], 1)
        after = c / (1 + torch.exp(-f)) + torch.tanh(g) / (1 + torch.exp(-i))
        return 1 / (1 + torch.exp(-after)), after

    def update(self, y: Tensor) -> None:
        self.h, self.c = self(y, self.h, self.c)

    def gate(self, y: Tensor, leak_sample0: bool) -> Tensor:
        h, c = (s[0].expand_as(s) if leak_sample0 else s for s in (self.h, self.c))
        return self(y, h, c)[0]


def _two_layers(y: Tensor, layers: nn.Sequential) -> Tensor:
    narrow, _, wide = layers
    inner = y @ narrow.weight.T + narrow.bias
    return torch.where(inner > 0, inner, 0) @ wide.weight.T + wide.bias


def _new_cell(module: nn.Module, y: Tensor) -> Cell:
    return Cell(module.cell.input, module.cell.hidden, torch.zeros_like(y), torch.zeros_like(y))


def base(modules: Sequence[nn.Module], outs: Sequence[Tensor], *, leak_sample0: bool = False, keeps=None):
    results, keys, values = [], [], []
    for t, (module, x) in enumerate(zip(modules, outs, strict=True)):
        y = x.mean((2, 3))
        if module.site.entry == "start":
            cell, keys, values = _new_cell(module, y), [], []
        cell.update(y)
        keys = [key * cell.gate(key, leak_sample0) for key in keys]
        values = [v * cell.gate(v.mean((2, 3)), leak_sample0)[:, :, None, None] for v in values]
        keys = [*keys, channel_conv(y, module.key.weight)]
        values = [*values, depthwise_3x3(x, module.value.weight)]
        query, d = channel_conv(y, module.query.weight), module.head_dim
        weights = [torch.exp((split_heads(query, d) * split_heads(k, d)).sum(-1) / math.sqrt(d)) for k in keys]
        read = sum(v * on_maps(w / sum(weights), v.shape[1]) for v, w in zip(values, weights, strict=True))
        results.append(add(module, x, batch_norm(read, module.norm), True, None if keeps is None else keeps[t]))
    return results


def light(
    modules: Sequence[nn.Module],
    outs: Sequence[Tensor],
    shortcuts: Sequence[Tensor],
    *,
    leak_sample0: bool = False,
    keeps=None,
):
    results = []
    for t, (module, x, shortcut) in enumerate(zip(modules, outs, shortcuts, strict=True)):
        y = x.mean((2, 3))
        if module.site.entry == "start":
            cell, extract = _new_cell(module, y), module.extract.weight
        cell.update(y)
        opened = cell.gate(shortcut.mean((2, 3)), leak_sample0)
        refreshed = shortcut * opened[:, :, None, None] + depthwise_3x3(shortcut, extract)
        query, key = (split_heads(channel_conv(y, c.weight), module.head_dim) for c in (module.query, module.key))
        gate = torch.sigmoid((query * key).sum(-1) / math.sqrt(module.head_dim))
        read = depthwise_3x3(x, module.value.weight) * on_maps(gate, x.shape[1])
        read = read + module.decay[:, None, None] * refreshed
        results.append(add(module, x, batch_norm(read, module.norm), False, None if keeps is None else keeps[t]))
    return results
