"""The networks of the published MRLA and DLA codes as they compute, with their names of parameters; from the formulas.

Where MRLA's base form keeps its projections is a guess, and so is what an attention inside its projections is called in
either: our loader doesn't read that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from tests.published.networks import KERNELS, bottlenecks

Build = Callable[[list[Bottleneck], int], nn.Module]


def halves(block: Bottleneck, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output of a block, and the shortcut in it."""
    branch = torch.relu(block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x))))))
    shortcut = x if block.downsample is None else block.downsample(x)
    return torch.relu(block.bn3(block.conv3(branch)) + shortcut), shortcut


class Projections(nn.Module):
    def __init__(self, channels: int, head_dim: int) -> None:
        super().__init__()
        kernel = KERNELS[channels]
        self.Wq, self.Wk = (nn.Conv1d(1, 1, kernel, padding=kernel // 2, bias=False) for _ in range(2))
        self.Wv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.head_dim = head_dim

    def of_pooled(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        return conv(x.mean((2, 3))[:, None])[:, 0]

    def per_head(self, y: Tensor) -> Tensor:
        return y.unflatten(1, (-1, self.head_dim))


class Light(nn.Module):
    """``lambda_t`` times what is handed in, plus the gated value."""

    def __init__(self, channels: int, head_dim: int) -> None:
        super().__init__()
        self.mrla = Projections(channels, head_dim)
        self.lambda_t = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        of = self.mrla
        query, key = (of.per_head(of.of_pooled(conv, x)) for conv in (of.Wq, of.Wk))
        gate = torch.sigmoid((query * key).sum(-1) / math.sqrt(of.head_dim))
        return gate.repeat_interleave(of.head_dim, 1)[:, :, None, None] * of.Wv(x) + self.lambda_t * past


def attend(of: Projections, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax attention of ``x`` to the stage's layers, head by head."""
    query = of.per_head(of.of_pooled(of.Wq, x))
    scores = torch.stack([(query * of.per_head(key)).sum(-1) for key in keys]) / math.sqrt(of.head_dim)
    share = scores.softmax(0).repeat_interleave(of.head_dim, 2)[..., None, None]
    return (share * torch.stack(values)).sum(0)


class MRLALightStage(nn.Sequential):
    """Blocks with ``mrla`` and ``bn_mrla`` inside."""

    def __init__(self, blocks: list[Bottleneck], channels: int, head_dim: int) -> None:
        for block in blocks:
            block.mrla, block.bn_mrla = Light(channels, head_dim), nn.BatchNorm2d(channels)
        super().__init__(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x, shortcut = halves(block, x)
            x = x + block.bn_mrla(block.mrla(x, shortcut))
        return x


class MRLABaseStage(nn.Sequential):
    def __init__(self, blocks: list[Bottleneck], channels: int, head_dim: int) -> None:
        for block in blocks:
            block.mrla = nn.ModuleDict({"mrla": Projections(channels, head_dim)})
            block.bn_mrla = nn.BatchNorm2d(channels)
        super().__init__(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = [], []
        for block in self:
            x, _ = halves(block, x)
            of = block.mrla["mrla"]
            keys.append(of.of_pooled(of.Wk, x))
            values.append(of.Wv(x))
            x = x + torch.relu(block.bn_mrla(attend(of, x, keys, values)))
        return x


class Unit(nn.Module):
    """DLA's recurrent cell."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.w_ih, self.w_hh = (nn.ModuleList([Narrow(channels, reduction)]) for _ in range(2))

    def forward(self, y: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, f, g = (self.w_ih[0].seq(y) + self.w_hh[0].seq(state[0])).chunk(3, 1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(c), c

    def refresh(self, y: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """With the state of the first sample, for all of them."""
        return self(y, (state[0][0], state[1][0]))[0]


class Narrow(nn.Module):
    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        narrow = channels // reduction
        self.seq = nn.Sequential(nn.Linear(channels, narrow), nn.ReLU(), nn.Linear(narrow, 3 * channels))


class DLAStage(nn.Module):
    """``layers`` and ``attention`` side by side, and ``lstm`` for all of them."""

    def __init__(self, blocks: list[Bottleneck], channels: int, reduction: int, attention: Callable[[], nn.Module]):
        super().__init__()
        self.layers, self.lstm = nn.ModuleList(blocks), Unit(channels, reduction)
        self.attention = nn.ModuleList(
            nn.ModuleDict({"layer_attention": attention(), "bn_layer_attention": nn.BatchNorm2d(channels)})
            for _ in blocks
        )

    def walk(self, x: Tensor):
        """Output, shortcut, state of the cell, and the attention of each layer; fed with what attention makes of it."""
        state = None
        for block, attention in zip(self.layers, self.attention, strict=True):
            out, shortcut = halves(block, x)
            y = out.mean((2, 3))
            state = self.lstm(y, (torch.zeros_like(y), torch.zeros_like(y)) if state is None else state)
            x = yield out, shortcut, state, attention["layer_attention"], attention["bn_layer_attention"]

    def forward(self, x: Tensor) -> Tensor:
        layers = self.walk(x)
        keys, values = [], []
        found = next(layers)
        while True:
            x = self.attend(*found, keys, values)
            try:
                found = layers.send(x)
            except StopIteration:
                return x


class DLALightStage(DLAStage):
    """With a convolution that is called ``extict`` on ImageNet and ``excite`` on CIFAR."""

    def __init__(
        self, blocks: list[Bottleneck], channels: int, head_dim: int, reduction: int, extract: str = "extict"
    ) -> None:
        super().__init__(blocks, channels, reduction, lambda: Light(channels, head_dim))
        self.extract = extract
        setattr(self, extract, nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False))

    def attend(self, x, shortcut, state, attention, norm, _keys, _values) -> Tensor:
        refreshed = shortcut * self.lstm.refresh(shortcut.mean((2, 3)), state)[:, :, None, None]
        return x + norm(attention(x, refreshed + getattr(self, self.extract)(shortcut)))


class DLABaseStage(DLAStage):
    def __init__(self, blocks: list[Bottleneck], channels: int, head_dim: int, reduction: int) -> None:
        nested = lambda: nn.ModuleDict({"layer_attention": Projections(channels, head_dim)})  # noqa: E731
        super().__init__(blocks, channels, reduction, nested)

    def attend(self, x, _shortcut, state, attention, norm, keys, values) -> Tensor:
        of = attention["layer_attention"]
        for s, (key, value) in enumerate(zip(keys, values, strict=True)):
            keys[s] = key * self.lstm.refresh(key, state)
            values[s] = value * self.lstm.refresh(value.mean((2, 3)), state)[:, :, None, None]
        keys.append(of.of_pooled(of.Wk, x))
        values.append(of.Wv(x))
        return x + torch.relu(norm(attend(of, x, keys, values)))


class Cifar(nn.Module):
    """``stages.S``, each what ``stage`` builds."""

    def __init__(self, depth: int, num_classes: int, stage: Build) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.stages, inputs = nn.ModuleList(), 16
        for planes in (16, 32, 64):
            blocks = bottlenecks(inputs, planes, (depth - 2) // 9, 1 if planes == 16 else 2)
            inputs = 4 * planes
            self.stages.append(stage(blocks, inputs))
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class ImageNet(nn.Module):
    """``layerN``, each what ``stage`` builds."""

    def __init__(self, counts: list[int], num_classes: int, stage: Build, base_width: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for n, (planes, count) in enumerate(zip((64, 128, 256, 512), counts, strict=True), start=1):
            blocks = bottlenecks(inputs, planes, count, 1 if n == 1 else 2, base_width)
            inputs = 4 * planes
            setattr(self, f"layer{n}", stage(blocks, inputs))
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))
