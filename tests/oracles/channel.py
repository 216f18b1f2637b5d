"""Gates over channels, written from the formulas; see `tests.oracles.depth` for what an oracle is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.oracles.depth import channel_conv


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def two_layers(y: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
    hidden = torch.einsum("oi,bi->bo", first.weight, y) + first.bias
    return torch.einsum("oi,bi->bo", second.weight, torch.where(hidden > 0, hidden, 0)) + second.bias


def gated(module: nn.Module, branch: Tensor, gate: Tensor) -> Tensor:
    """The gate itself, or of its distance from one as much as the gain says."""
    y = branch * gate[:, :, None, None]
    return y if module.gain is None else branch + (y - branch) * module.gain[:, None, None]


def se(modules: Sequence[nn.Module], outs: Sequence[Tensor]) -> list[Tensor]:
    return [
        gated(module, x, sigmoid(two_layers(x.mean((2, 3)), module.squeeze, module.excite)))
        for module, x in zip(modules, outs, strict=True)
    ]


def eca(modules: Sequence[nn.Module], outs: Sequence[Tensor]) -> list[Tensor]:
    return [
        gated(module, x, sigmoid(channel_conv(x.mean((2, 3)), module.conv.weight)))
        for module, x in zip(modules, outs, strict=True)
    ]


def dianet(modules: Sequence[nn.Module], outs: Sequence[Tensor]) -> list[Tensor]:
    """The cell's content as a sum over the stage's layers: what each wrote, times what was kept of it since."""
    results, written, kept, first, hidden = [], [], [], None, None
    for module, x in zip(modules, outs, strict=True):
        y = x.mean((2, 3))
        if module.site.entry == "start":
            written, kept, first, hidden = [], [], module, torch.zeros_like(y)
        assert first is not None
        gates = two_layers(y, first.input_gates.down, first.input_gates.up)
        gates = gates + two_layers(hidden, first.hidden_gates.down, first.hidden_gates.up)
        channels = y.shape[1]
        i, f, g, o = (gates[:, n * channels : (n + 1) * channels] for n in range(4))
        written, kept = [*written, sigmoid(i) * torch.tanh(g)], [*kept, sigmoid(f)]
        content = sum(w * math.prod(kept[s + 1 :]) for s, w in enumerate(written))
        hidden = sigmoid(o) * sigmoid(content)
        results.append(gated(module, x, hidden))
    return results
