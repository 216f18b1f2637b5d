# ruff: noqa: ANN001, ANN201, ANN202
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""KCLA's passes over memory on a GPU; `kcla.py` launches them.

A map is dense in channels_last order. A program has `CB` neighbouring channels of one sample, whose positions it takes
`P` at a time from a span of them; axis 0 of the grid counts spans, those of the first sample first, and axis 1 blocks
of channels. A sum is written once for each span, and joined by the caller, always in one order: no atomic additions, so
the same bits come out every time. What belongs to a head is ``(B, h)``, to a channel ``(C,)``; taps are
``(9, C)``.

A neighbour's mean, or gradient, is made again where it is read: programs wait for no one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(spans, span, CB: tl.constexpr):
    """The program's number, its sample, its first position, and its channels."""
    item = tl.program_id(0).to(tl.int64)
    return item, item // spans, ((item % spans) * span).to(tl.int32), tl.program_id(1) * CB + tl.arange(0, CB)


@triton.jit
def _of_channel(values, c, C):
    return tl.load(values + c, mask=c < C, other=0.0)[None, :]


@triton.jit
def _of_head(values, b, c, C, heads):
    return tl.load(values + b * heads + c // (C // heads), mask=c < C, other=0.0)[None, :]


@triton.jit
def _tile(positions, c, C):
    """Where the values of some positions are, from the start of their sample."""
    return positions[:, None] * C + c[None, :]


@triton.jit
def _inside(positions, c, area, C):
    return (positions < area)[:, None] & (c < C)[None, :]


@triton.jit
def _neighbour(positions, k: tl.constexpr, c, H, W, C):
    """Where the k-th of a position's nine neighbours is, in the order of a kernel's taps, and whether it is there."""
    h, w = positions // W + (k // 3 - 1), positions % W + (k % 3 - 1)
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
    return _tile(h * W + w, c, C), inside[:, None] & (c < C)[None, :]


@triton.jit
def _convolve(mean, x, share, taps, positions, c, H, W, C, P: tl.constexpr, CB: tl.constexpr):
    """The depth-wise 3x3 convolution of a sample's mean; of the mean with `x` in it, unless `x` is `None`."""
    value = tl.zeros((P, CB), tl.float32)
    for k in tl.static_range(9):
        at, ok = _neighbour(positions, k, c, H, W, C)
        m = tl.load(mean + at, mask=ok, other=0.0)
        if x is not None:
            m += share * (tl.load(x + at, mask=ok, other=0.0) - m)
        value += _of_channel(taps + k * C, c, C) * m
    return value


@triton.jit
def pool(x, sums, H, W, C, heads, spans, span, P: tl.constexpr, CB: tl.constexpr):
    """sums(B, spans, C) = the sum of x."""
    item, b, first, c = _place(spans, span, CB)
    x += b * H * W * C
    total = tl.zeros((P, CB), tl.float32)
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        total += tl.load(x + _tile(positions, c, C), mask=_inside(positions, c, H * W, C), other=0.0)
    tl.store(sums + item * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit
def emit(
    x, mean, share, gate, taps, slope, offset, gain, drop, out, mean_out,
    H, W, C, heads, spans, span, RELU: tl.constexpr, P: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """out = x + gain * drop * relu(slope * gate * V * m + offset).

    With a `mean_out`, x is put into the mean on the way, and the mean goes there; else it stands as it is.
    """
    _, b, first, c = _place(spans, span, CB)
    image = b * H * W * C
    a, a0 = _of_channel(slope, c, C) * _of_head(gate, b, c, C, heads), _of_channel(offset, c, C)
    s = _of_head(share, b, c, C, heads)
    new = x + image if mean_out is not None else None
    scale = 1.0
    if gain is not None:
        scale = scale * _of_channel(gain, c, C)
    if drop is not None:
        scale = scale * tl.load(drop + b)
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        y = a * _convolve(mean + image, new, s, taps, positions, c, H, W, C, P, CB) + a0
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # a NaN stays one, as in PyTorch
        at, ok = image + _tile(positions, c, C), _inside(positions, c, H * W, C)
        to = tl.load(x + at, mask=ok, other=0.0)
        tl.store(out + at, to + scale * y, mask=ok)
        if mean_out is not None:
            m = tl.load(mean + at, mask=ok, other=0.0)
            tl.store(mean_out + at, m + s * (to - m), mask=ok)


@triton.jit
def moments(
    x, mean, share, gate, taps, mean_out, found,
    H, W, C, heads, spans, span, P: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """found(B, spans, 3, C) = the moments of gate * V * m: a pivot, and the sums of z and z ** 2 about it.

    The pivot is the mean of the first positions, so no digits are lost where the mean is large.
    """
    item, b, first, c = _place(spans, span, CB)
    image = b * H * W * C
    g, s = _of_head(gate, b, c, C, heads), _of_head(share, b, c, C, heads)
    new = x + image if mean_out is not None else None
    pivot = tl.zeros((1, CB), tl.float32)
    one, two = tl.zeros((P, CB), tl.float32), tl.zeros((P, CB), tl.float32)
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        at, ok = image + _tile(positions, c, C), _inside(positions, c, H * W, C)
        z = g * _convolve(mean + image, new, s, taps, positions, c, H, W, C, P, CB)
        if start == first:
            count = tl.minimum(H * W - first, P)
            pivot = (tl.sum(tl.where(ok, z, 0.0), 0) / count)[None, :]
        z = tl.where(ok, z - pivot, 0.0)
        one += z
        two += z * z
        if mean_out is not None:
            m = tl.load(mean + at, mask=ok, other=0.0)
            to = tl.load(x + at, mask=ok, other=0.0)
            tl.store(mean_out + at, m + s * (to - m), mask=ok)
    found += 3 * item * C + c
    tl.store(found, tl.sum(pivot, 0), mask=c < C)
    tl.store(found + C, tl.sum(one, 0), mask=c < C)
    tl.store(found + 2 * C, tl.sum(two, 0), mask=c < C)


@triton.jit
def recall(maps, coefficients, mean, H, W, C, heads, spans, span, P: tl.constexpr, CB: tl.constexpr):
    """mean = the sum of the maps, each times its coefficient; coefficients(maps, B, h)."""
    _, b, first, c = _place(spans, span, CB)
    samples = tl.num_programs(0) // spans
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        at, ok = b * H * W * C + _tile(positions, c, C), _inside(positions, c, H * W, C)
        total = tl.zeros((P, CB), tl.float32)
        for i in tl.static_range(len(maps)):
            weight = _of_head(coefficients, i * samples + b, c, C, heads)
            total += weight * tl.load(maps[i] + at, mask=ok, other=0.0)
        tl.store(mean + at, total, mask=ok)


@triton.jit
def values(
    mean, grad_out, gate, taps, slope, offset, centre, drop, value, sums,
    H, W, C, heads, spans, span, RELU: tl.constexpr, P: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """value = V * m, and sums(B, spans, 2, C) of dn and dn * (z - centre).

    Here z = gate * value, and dn = drop * grad_out where the ReLU is open.
    """
    item, b, first, c = _place(spans, span, CB)
    image = b * H * W * C
    g, middle = _of_head(gate, b, c, C, heads), _of_channel(centre, c, C)
    a, a0 = _of_channel(slope, c, C), _of_channel(offset, c, C)
    one, two = tl.zeros((P, CB), tl.float32), tl.zeros((P, CB), tl.float32)
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        at, ok = image + _tile(positions, c, C), _inside(positions, c, H * W, C)
        v = _convolve(mean + image, None, None, taps, positions, c, H, W, C, P, CB)
        tl.store(value + at, v, mask=ok)
        z = g * v
        dn = tl.load(grad_out + at, mask=ok, other=0.0)
        if RELU:
            dn = tl.where(a * z + a0 > 0, dn, 0.0)
        one += dn
        two += tl.where(ok, dn * (z - middle), 0.0)
    scale = 1.0
    if drop is not None:
        scale = tl.load(drop + b)
    sums += 2 * item * C + c
    tl.store(sums, scale * tl.sum(one, 0), mask=c < C)
    tl.store(sums + C, scale * tl.sum(two, 0), mask=c < C)


@triton.jit
def spread(
    value, grad_out, mean, x, grad_mean, gate, taps, slope, offset, by_grad, by_z, fixed, drop, to, parts,
    H, W, C, heads, spans, span, RELU: tl.constexpr, P: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """to = the gradient of the mean, and parts(B, spans, 11, C) = the sums for the gate, the share and the taps.

    The gradient of z is by_grad * dn + by_z * z + fixed.
    """
    item, b, first, c = _place(spans, span, CB)
    image = b * H * W * C
    g = _of_head(gate, b, c, C, heads)
    a, a0 = _of_channel(slope, c, C), _of_channel(offset, c, C)
    of_grad, of_z, rest = _of_channel(by_grad, c, C), _of_channel(by_z, c, C), _of_channel(fixed, c, C)
    if drop is not None:
        of_grad *= tl.load(drop + b)
    grad_gate, pull = tl.zeros((P, CB), tl.float32), tl.zeros((P, CB), tl.float32)
    grad_taps = (tl.zeros((P, CB), tl.float32),) * 9
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        at, ok = image + _tile(positions, c, C), _inside(positions, c, H * W, C)
        m = tl.load(mean + at, mask=ok, other=0.0)
        total = tl.zeros((P, CB), tl.float32)
        if grad_mean is not None:
            total += tl.load(grad_mean + at, mask=ok, other=0.0)
        sums = ()
        for k in tl.static_range(9):
            # This position is seen from the neighbour on the opposite side of the tap.
            there, seen = _neighbour(positions, 8 - k, c, H, W, C)
            v = tl.load(value + image + there, mask=seen, other=0.0)
            dn = tl.load(grad_out + image + there, mask=seen, other=0.0)
            if RELU:
                dn = tl.where(a * (g * v) + a0 > 0, dn, 0.0)
            dz = tl.where(seen, of_grad * dn + of_z * (g * v) + rest, 0.0)
            if k == 4:
                grad_gate += tl.where(ok, dz * v, 0.0)
            total += _of_channel(taps + k * C, c, C) * (g * dz)
            sums = sums + (grad_taps[k] + m * (g * dz),)  # noqa: RUF005
        grad_taps = sums
        tl.store(to + at, total, mask=ok)
        pull += tl.where(ok, total * (tl.load(x + at, mask=ok, other=0.0) - m), 0.0)
    parts += 11 * item * C + c
    tl.store(parts, tl.sum(grad_gate, 0), mask=c < C)
    tl.store(parts + C, tl.sum(pull, 0), mask=c < C)
    for k in tl.static_range(9):
        tl.store(parts + (2 + k) * C, tl.sum(grad_taps[k], 0), mask=c < C)


@triton.jit
def finish(
    grad_out, of_mean, share, rest, pooled, grad_x, grad_mean_before,
    H, W, C, heads, spans, span, P: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """grad_x = grad_out + pooled + share * of_mean, and grad_mean_before = rest * of_mean; pooled is (B, C).

    At the start of a chain the mean is x: there is none before, and the share is one.
    """
    _, b, first, c = _place(spans, span, CB)
    of_pool = _of_channel(pooled + b * C, c, C)
    s, r = _of_head(share, b, c, C, heads), _of_head(rest, b, c, C, heads)
    for start in range(first, tl.minimum(first + span, H * W), P):
        positions = start + tl.arange(0, P)
        at, ok = b * H * W * C + _tile(positions, c, C), _inside(positions, c, H * W, C)
        grad = tl.load(of_mean + at, mask=ok, other=0.0)
        direct = tl.load(grad_out + at, mask=ok, other=0.0) + of_pool
        tl.store(grad_x + at, direct + s * grad, mask=ok)
        if grad_mean_before is not None:
            tl.store(grad_mean_before + at, r * grad, mask=ok)
