"""EAMLP as the published code computes it, with its names of parameters; written from the specification.

The double normalisation is in its two steps. Of the published stem there are two files, which differ in the names of
the memories: ``first`` is the number of the layer that holds the keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, unfold


def double_norm(logits: Tensor) -> Tensor:
    """Positions are the last axis but one, slots the last one."""
    over_positions = torch.softmax(logits, -2)
    return over_positions / (1e-9 + over_positions.sum(-1, keepdim=True))


class Perceptron(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class StemAttention(nn.Module):
    def __init__(self, inputs: int, width: int, slots: int, first: int) -> None:
        super().__init__()
        self.q_linear, self.proj = nn.Linear(inputs, width), nn.Linear(width, width)
        self.names = f"linear_{first}", f"linear_{first + 1}"
        self.add_module(self.names[0], nn.Linear(width, slots, bias=False))
        self.add_module(self.names[1], nn.Linear(slots, width))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (self.get_submodule(name) for name in self.names)
        query = self.q_linear(x)
        return query + self.proj(values(double_norm(keys(query))))


class StemLayer(nn.Module):
    def __init__(self, inputs: int, width: int, slots: int, first: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(inputs), nn.LayerNorm(width)
        self.attn, self.mlp = StemAttention(inputs, width, slots, first), Perceptron(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    def __init__(self, embed_dim: int, in_chans: int, first: int) -> None:
        super().__init__()
        self.attention1 = StemLayer(49 * in_chans, 64, 128, first)
        self.attention2 = StemLayer(9 * 64, 64, 128, first)
        self.project = nn.Linear(9 * 64, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.attention1(unfold(x, (7, 7), stride=(4, 4), padding=(2, 2)).transpose(1, 2))
        tokens = self.attention2(self.split(tokens))
        return self.project(self.split(tokens))

    @staticmethod
    def split(tokens: Tensor) -> Tensor:
        side = round(tokens.shape[1] ** 0.5)
        image = tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)
        return unfold(image, (3, 3), stride=(2, 2), padding=(1, 1)).transpose(1, 2)


class HeadsAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = 4 * heads
        self.trans_dims, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.linear_0, self.linear_1 = nn.Linear(width // heads, 64), nn.Linear(64, width // heads)

    def forward(self, x: Tensor) -> Tensor:
        per_head = torch.stack(self.trans_dims(x).chunk(self.heads, -1), 1)
        found = self.linear_1(double_norm(self.linear_0(per_head)))
        return self.proj(torch.cat(found.unbind(1), -1))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = HeadsAttention(width, heads), Perceptron(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class EAMLP(nn.Module):
    """Without dropout and drop path, so that training computes what evaluation does."""

    def __init__(
        self,
        *,
        img_size: int,
        embed_dim: int,
        depth: int,
        heads: int,
        mlp_ratio: float,
        num_classes: int,
        in_chans: int = 3,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.tokens_to_token = Tokens(embed_dim, in_chans, first)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(sines(1 + (img_size // 16) ** 2, embed_dim), requires_grad=False)
        self.blocks = nn.ModuleList(Layer(embed_dim, heads, round(mlp_ratio * embed_dim)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(embed_dim), nn.Linear(embed_dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens_to_token(x)
        tokens = torch.cat([self.cls_token.repeat(len(x), 1, 1), tokens], 1) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


def sines(positions: int, width: int) -> Tensor:
    """Neighbours share a wave length: the sine of it first, then the cosine."""
    waves = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(positions), waves)
    return torch.from_numpy(np.stack([np.sin(angles), np.cos(angles)], -1).reshape(1, positions, width)).float()
