"""The networks of the published KCLA code as it computes, with its names of parameters; written from the formulas.

What its members are called where the specification doesn't say is a guess: ``Wv``, ``bn``. Blocks are torchvision's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

KERNELS = {64: 3, 128: 5, 256: 5, 512: 5, 1024: 5, 2048: 7}


class Cell(nn.Module):
    """Attention behind one block; the one of a stage's first block opens the stage, whether it is called or not."""

    def __init__(self, channels: int, head_dim: int, opens: bool) -> None:
        super().__init__()
        heads = channels // head_dim
        kernel = KERNELS[channels]
        self.Wq, self.Wk = (nn.Conv1d(1, 1, kernel, padding=kernel // 2, bias=False) for _ in range(2))
        self.Wv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.head_att = nn.Linear(heads, heads, bias=False)
        self.norm_d = nn.Parameter((1 / 0.7**2) ** (torch.arange(heads) / (heads - 1)) * 0.7, requires_grad=False)
        self.bn = nn.BatchNorm2d(channels)
        self.opens = opens
        if opens:
            self.adjust_channel = nn.Conv2d(channels // 2, channels, 1, stride=2, groups=heads, bias=False)
            self.u_bn = nn.BatchNorm2d(channels)
            self.u_Wk = nn.Conv1d(1, 1, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if state is not None and self.opens:
            u, z = state
            before = (u / z).flatten(1, 2)
            if before.shape[1] != x.shape[1]:
                before = self.adjust_channel(before)
            before = self.u_bn(before)
            weight = self.weigh(self.over_channels(self.u_Wk, before))
            state = self.per_head(before) * weight, weight
        query, key = self.over_channels(self.Wq, x), self.over_channels(self.Wk, x)
        weight = self.weigh(key)
        u, z = self.per_head(x) * weight, weight
        if state is not None:
            u, z = state[0] + u, state[1] + z
        value = self.Wv((u / (z + 1e-3)).flatten(1, 2))
        agreement = (query * key).sum(-1) / key.norm(dim=-1)
        gate = torch.sigmoid(self.head_att(agreement))[:, :, None, None, None]
        return torch.relu(self.bn((self.per_head(value) * gate).flatten(1, 2))), (u, z)

    def per_head(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (len(self.norm_d), -1))

    def over_channels(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        return self.per_head(conv(x.mean((2, 3))[:, None])[:, 0])

    def weigh(self, key: Tensor) -> Tensor:
        return torch.exp(torch.clamp(key.norm(dim=-1) * self.norm_d, max=10))[:, :, None, None, None]


def bottlenecks(inputs: int, planes: int, count: int, stride: int, base_width: int = 64) -> list[Bottleneck]:
    project = nn.Sequential(nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes))
    first = Bottleneck(inputs, planes, stride, project, base_width=base_width)
    return [first, *(Bottleneck(4 * planes, planes, base_width=base_width) for _ in range(count - 1))]


class Cifar(nn.Module):
    """``stages.S.i`` are blocks with their cell inside, as ``kcla``."""

    def __init__(self, depth: int, num_classes: int, head_dim: int = 16) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.stages, inputs = nn.ModuleList(), 16
        for planes in (16, 32, 64):
            blocks = bottlenecks(inputs, planes, (depth - 2) // 9, 1 if planes == 16 else 2)
            for i, block in enumerate(blocks):
                block.kcla = Cell(4 * planes, head_dim, opens=i == 0)
            self.stages.append(nn.ModuleList(blocks))
            inputs = 4 * planes
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x, state = torch.relu(self.bn1(self.conv1(x))), None
        for block in (block for stage in self.stages for block in stage):
            x = block(x)
            attention, state = block.kcla(x, state)
            x = x + attention
        return self.fc(x.mean((2, 3)))


class Stage(nn.Module):
    """Blocks and cells side by side; a cell opens at the first block and, undocumented, at the twelfth."""

    def __init__(self, blocks: list[Bottleneck], channels: int, head_dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.attention = nn.ModuleList(Cell(channels, head_dim, opens=i in (0, 11)) for i in range(len(blocks)))


class ImageNet(nn.Module):
    """``layerN.layers.i`` and ``layerN.attention.i``."""

    def __init__(self, counts: list[int], num_classes: int, head_dim: int = 64, base_width: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for n, (planes, count) in enumerate(zip((64, 128, 256, 512), counts, strict=True), start=1):
            blocks = bottlenecks(inputs, planes, count, 1 if n == 1 else 2, base_width)
            setattr(self, f"layer{n}", Stage(blocks, 4 * planes, head_dim))
            inputs = 4 * planes
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x, state = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1), None
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block, cell in zip(stage.layers, stage.attention, strict=True):
                x = block(x)
                attention, state = cell(x, state)
                x = x + attention
        return self.fc(x.mean((2, 3)))
