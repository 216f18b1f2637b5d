"""Attention over the tokens of a sequence, from its formulas: row by row, token by token, head by head; in float64.

A module gives its parameters and what it was built with; nothing else of it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sigmoid(y: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-y))


def silu(y: Tensor) -> Tensor:
    return y * sigmoid(y)


def of_head(y: Tensor, h: int, heads: int) -> Tensor:
    width = len(y) // heads
    return y[h * width : (h + 1) * width]


def each_row(row: Any, module: Any, x: Tensor) -> Tensor:
    """``row(module, tokens)`` on each sequence, a list of vectors in and out."""
    return torch.stack([torch.stack(row(module, list(sequence))) for sequence in x])


def convolved(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    if module.conv1d is None:
        return tokens
    filters = module.conv1d.weight[:, 0]
    length = filters.shape[1]
    out = []
    for t in range(len(tokens)):
        total = torch.zeros_like(tokens[0])
        for back in range(min(length, t + 1)):
            total = total + filters[:, length - 1 - back] * tokens[t - back]
        out.append(silu(total if module.conv1d.bias is None else total + module.conv1d.bias))
    return out


def rms_normed(y: Tensor, weight: Tensor) -> Tensor:
    return weight * y / torch.sqrt((y**2).mean() + 1e-5)


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float) -> list[Tensor]:
    """One head: rows of q, k, a of width K and of v; the state as the sum over what was written."""
    state, out = torch.zeros(k.shape[1], v.shape[1]), []
    for t in range(len(q)):
        state = a[t][:, None] * state + torch.outer(k[t], v[t])
        out.append(scale * (q[t] @ state))
    return out


def metala(module: Any, x: Tensor) -> Tensor:
    return each_row(_metala, module, x)


def _metala(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    heads = module.heads
    tokens = convolved(module, tokens)
    read = [[] for _ in tokens]
    for h in range(heads):
        q, z, v = (
            torch.stack([of_head(layer.weight @ x, h, heads) for x in tokens])
            for layer in (module.q_proj, module.k_gate, module.v_proj)
        )
        a = sigmoid(z) ** (1 / module.tau)
        k = 1 - a
        if module.k_proj is not None:
            k = torch.stack([of_head(module.k_proj.weight @ x, h, heads) for x in tokens])
        for t, o in enumerate(recurrence(q, k, v, a, module.scale)):
            if module.aug_balance is not None:
                w = (q[t] * k[t] * of_head(module.aug_balance, h, heads)).sum()
                o = (
                    o
                    + {"official": sigmoid(w * v[t]), "gated": sigmoid(w) * v[t], "linear": w * v[t]}[
                        module.augmentation
                    ]
                )
            if module.norm:
                centred = o - o.mean()
                o = centred / torch.sqrt((centred**2).mean() + 1e-5)
            read[t].append(o)
    out = []
    for x, o in zip(tokens, read, strict=True):
        y = torch.cat(o)
        if module.g_proj is not None:
            y = y * silu(module.g_proj.weight @ x + module.g_proj.bias)
        out.append(module.out_proj.weight @ y)
    return out


def linear_attention(module: Any, x: Tensor) -> Tensor:
    return each_row(_linear_attention, module, x)


def _linear_attention(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    def feature(y: Tensor) -> Tensor:
        return torch.where(y > 0, y + 1, torch.exp(y))

    out = []
    for t, x in enumerate(tokens):
        heads = []
        for h in range(module.heads):
            q = feature(of_head(module.q_proj.weight @ x, h, module.heads))
            above, below = 0, 0
            for earlier in tokens[: t + 1]:
                k = feature(of_head(module.k_proj.weight @ earlier, h, module.heads))
                above = above + (q @ k) * of_head(module.v_proj.weight @ earlier, h, module.heads)
                below = below + q @ k
            heads.append(above / below)
        out.append(module.out_proj.weight @ torch.cat(heads))
    return out


def turned(y: Tensor, position: int) -> Tensor:
    """Pairs of channels as complex numbers, turned."""
    width = len(y)
    speeds = torch.tensor([10000 ** (-2 * j / width) for j in range(width // 2)])
    return torch.complex(y[0::2], y[1::2]) * torch.exp(1j * position * speeds)


def retention(module: Any, x: Tensor) -> Tensor:
    return each_row(_retention, module, x)


def _retention(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    out = []
    for t, x in enumerate(tokens):
        heads = []
        for h in range(module.heads):
            q, total = turned(of_head(module.q_proj.weight @ x, h, module.heads), t), 0
            for s, earlier in enumerate(tokens[: t + 1]):
                k = turned(of_head(module.k_proj.weight @ earlier, h, module.heads), s)
                v = of_head(module.v_proj.weight @ earlier, h, module.heads)
                score = (q.conj() * k).real.sum() / (module.channels // module.heads) ** 0.5
                total = total + (1 - 2 ** (-5 - h)) ** (t - s) * score * v
            centred = total - total.mean()
            heads.append(centred / torch.sqrt((centred**2).mean() + 1e-5))
        out.append(module.out_proj.weight @ (silu(module.g_proj.weight @ x) * torch.cat(heads)))
    return out


def gla(module: Any, x: Tensor) -> Tensor:
    return each_row(_gla, module, x)


def _gla(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    first, second = module.decay
    read = [[] for _ in tokens]
    for h in range(module.heads):
        q, k, v = (
            torch.stack([of_head(layer.weight @ x, h, module.heads) for x in tokens])
            for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
        logits = [second.weight @ (first.weight @ x) + second.bias for x in tokens]
        a = torch.stack([of_head(sigmoid(z) ** (1 / module.tau), h, module.heads) for z in logits])
        for t, o in enumerate(recurrence(q, k, v, a, q.shape[1] ** -0.5)):
            centred = o - o.mean()
            read[t].append(centred / torch.sqrt((centred**2).mean() + 1e-5))
    return [
        module.out_proj.weight @ (silu(module.g_proj.weight @ x + module.g_proj.bias) * torch.cat(o))
        for x, o in zip(tokens, read, strict=True)
    ]


def hgrn2(module: Any, x: Tensor) -> Tensor:
    return each_row(_hgrn2, module, x)


def _hgrn2(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    read = [[] for _ in tokens]
    for h in range(module.heads):
        q, z, v = (
            torch.stack([of_head(layer.weight @ x, h, module.heads) for x in tokens])
            for layer in (module.q_proj, module.f_proj, module.i_proj)
        )
        a = module.lower_bound + (1 - module.lower_bound) * sigmoid(z)
        for t, o in enumerate(recurrence(silu(q), 1 - a, v, a, 1.0)):
            read[t].append(o)
    return [module.out_proj.weight @ rms_normed(torch.cat(o), module.norm.weight) for o in read]


def s4d(module: Any, x: Tensor) -> Tensor:
    return each_row(_s4d, module, x)


def _s4d(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    """As the convolution that it is: a filter a channel, each of its terms a power of the whole complex decay."""
    out, width = [], module.channels // module.heads
    matrix = torch.complex(-torch.exp(module.log_A_real), module.A_imag)
    readers = torch.complex(module.C[..., 0], module.C[..., 1])
    for t, x in enumerate(tokens):
        channels = []
        for c in range(module.channels):
            h = c // width
            step = torch.exp(module.log_dt[h])
            decay = torch.exp(step * matrix[h])
            held = readers[h] * (decay - 1) / matrix[h]
            total = module.D[c] * x[c]
            for s in range(t + 1):
                total = total + 2 * (held * decay ** (t - s)).real.sum() * tokens[s][c]
            channels.append(total * (1 + torch.erf(total / 2**0.5)) / 2)
        y = module.out_proj.weight @ torch.stack(channels) + module.out_proj.bias
        out.append(y[: module.channels] * sigmoid(y[module.channels :]))
    return out


def mamba(module: Any, x: Tensor) -> Tensor:
    return each_row(_mamba, module, x)


def _mamba(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    """Channel by channel, as published; channels of a head have the same step and decays."""
    inner, state = len(module.D), module.A_log.shape[1]
    rank, width = module.x_proj.weight.shape[0] - 2 * state, inner // len(module.A_log)
    projected = [module.in_proj.weight @ x for x in tokens]
    mixed = convolved(module, [y[:inner] for y in projected])
    selected = [module.x_proj.weight @ y for y in mixed]
    steps = [torch.log(1 + torch.exp(module.dt_proj.weight @ y[:rank] + module.dt_proj.bias)) for y in selected]
    states, out = [torch.zeros(state) for _ in range(inner)], []
    for y, u, chosen, step in zip(projected, mixed, selected, steps, strict=True):
        channels = []
        for c in range(inner):
            h = c // width
            decays = torch.exp(-torch.exp(module.A_log[h]) * step[h])
            states[c] = decays * states[c] + step[h] * u[c] * chosen[rank : rank + state]
            channels.append(chosen[rank + state :] @ states[c] + module.D[c] * u[c])
        out.append(module.out_proj.weight @ (torch.stack(channels) * silu(y[inner:])))
    return out


def mamba2(module: Any, x: Tensor) -> Tensor:
    return each_row(_mamba2, module, x)


def _mamba2(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    heads, inner = len(module.D), len(module.norm.weight)
    width, projected = inner // heads, [module.in_proj.weight @ x for x in tokens]
    mixed = convolved(module, [y[inner : len(y) - heads] for y in projected])
    state = (len(mixed[0]) - inner) // 2
    out = []
    for t, y in enumerate(projected):
        read = []
        for h in range(heads):
            total = module.D[h] * of_head(mixed[t][:inner], h, heads)
            kept = torch.ones(())
            for s in range(t, -1, -1):
                step = torch.log(1 + torch.exp(projected[s][len(y) - heads + h] + module.dt_bias[h]))
                score = mixed[t][inner + state :] @ mixed[s][inner : inner + state]
                total = total + kept * score * step * mixed[s][h * width : (h + 1) * width]
                kept = kept * torch.exp(-step * torch.exp(module.A_log[h]))
            read.append(total)
        out.append(module.out_proj.weight @ rms_normed(torch.cat(read) * silu(y[:inner]), module.norm.weight))
    return out


def rwkv6(module: Any, x: Tensor) -> Tensor:
    return each_row(_rwkv6, module, x)


def _rwkv6(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    heads, inputs = module.heads, []
    for t, x in enumerate(tokens):
        change = (tokens[t - 1] if t else torch.zeros_like(x)) - x
        low = torch.tanh(module.mix_in.weight @ (x + change * module.mu)).view(5, -1)
        inputs.append([x + change * (module.mus[i] + low[i] @ module.mix_out[i]) for i in range(5)])
    first, _, second = module.decay
    rows = {
        "r": [module.r_proj.weight @ y[0] for y in inputs],
        "k": [module.k_proj.weight @ y[1] for y in inputs],
        "v": [module.v_proj.weight @ y[2] for y in inputs],
        "a": [torch.exp(-torch.exp(second.bias + second.weight @ torch.tanh(first.weight @ y[3]))) for y in inputs],
    }
    read = [[] for _ in tokens]
    for h in range(heads):
        r, k, v, a = ([of_head(y, h, heads) for y in rows[name]] for name in "rkva")
        state, u = torch.zeros(len(k[0]), len(v[0])), of_head(module.bonus, h, heads)
        for t in range(len(tokens)):
            written = torch.outer(k[t], v[t])
            o = r[t] @ (state + u[:, None] * written)
            state = a[t][:, None] * state + written
            centred = o - o.mean()
            read[t].append(centred / torch.sqrt((centred**2).mean() + 1e-5))
    return [
        module.out_proj.weight
        @ (silu(module.g_proj.weight @ y[4]) * (module.norm_weight * torch.cat(o) + module.norm_bias))
        for y, o in zip(inputs, read, strict=True)
    ]


def softmax_attention(module: Any, x: Tensor) -> Tensor:
    return each_row(_softmax_attention, module, x)


def _softmax_attention(module: Any, tokens: list[Tensor]) -> list[Tensor]:
    width, out = module.channels // module.heads, []
    for t, x in enumerate(tokens):
        heads = []
        for h in range(module.heads):
            q = of_head(module.q_proj.weight @ x, h, module.heads)
            above, below = 0, 0
            for s, earlier in enumerate(tokens[: t + 1]):
                k = of_head(module.k_proj.weight @ earlier, h, module.heads)
                score = (turned(q, t).conj() * turned(k, s)).real.sum() if module.rotary else q @ k
                weight = torch.exp(score / width**0.5)
                above = above + weight * of_head(module.v_proj.weight @ earlier, h, module.heads)
                below = below + weight
            heads.append(above / below)
        out.append(module.out_proj.weight @ torch.cat(heads))
    return out
