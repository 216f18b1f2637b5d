"""KCLA on CUDA: the functions of `lineattn.ops.native.kcla`, with the same arguments and results.

What is read or written as a map goes through `kernels`; the few thousand numbers of a sample between two passes are
PyTorch's, in double precision: the gradients of the query and the key nearly cancel.

A forward reads ``x`` to pool it, and then, in evaluation, makes one pass. Training has to know the batch's statistics
first, so it convolves twice; keeping the values would cost more. A backward makes the mean again from the last kept one
and the maps since, then the values and the sums that the norm needs, then the mean's gradient and the sums that the
weights need, and then the gradients of ``x`` and of the mean before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lineattn.ops import native
from lineattn.ops.channels import channel_conv, heads
from lineattn.ops.depth import accumulate
from lineattn.ops.kcla import SHORT, Form, Weights, address, gate
from lineattn.ops.triton import kernels

# Values of a map that a program holds at a time, neighbouring channels among them (a cache line of 128 bytes), and how
# many programs are enough: with more, each takes a longer span. Guesses, until they have been tuned on a GPU.
TILE, CHANNELS, PROGRAMS = 512, 32, 4096

# The longest span, in tiles: its sums are in single precision.
LONGEST = 16


def forward(
    x: Tensor,
    mean: Tensor | None,
    log_norm: Tensor | None,
    query: Tensor,
    key: Tensor,
    inv_temperature: Tensor,
    mixing: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    gain: Tensor | None,
    drop: Tensor | None,
    relu: bool,
    training: bool,
    clamp: float | None,
    gate_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`lineattn.ops.kcla.kcla_plain`, in the form of `lineattn.ops.native.kcla.forward`."""
    weights, form = Weights(query, key, inv_temperature, mixing, value), Form(clamp, gate_eps, relu)
    b, c, h, w = x.shape
    order = _order(x)
    x, mean = _last(x), None if mean is None else _last(mean)
    _check_parameters(x, weights)
    _check(x, x.shape, channels_last=True, x=x, mean=mean)
    _check(x, (b, len(inv_temperature)), log_norm=log_norm)
    _check(x, (c,), weight=weight, bias=bias, running_mean=running_mean, running_var=running_var, gain=gain)
    _check(x, (b,), drop=drop)

    cut = _cut(x, len(inv_temperature))
    with torch.no_grad(), torch.cuda.device_of(x):
        sums = x.new_empty(b, cut.spans, c)
        cut.launch(kernels.pool, x, sums)
        pooled = (sums.sum(1, dtype=torch.float64) / (h * w)).float()
        sample = _sample(pooled, log_norm, weights, form)
        share, opening, taps = sample.share.float(), sample.gate.float(), value.view(c, 9).T.contiguous()
        out, after = torch.empty_like(x), None if mean is None else torch.empty_like(x)
        before = x if mean is None else mean
        statistics = running_mean, running_var
        if training:
            found = x.new_empty(b, cut.spans, 3, c)
            cut.launch(kernels.moments, x, before, share, opening, taps, after, found)
            statistics = _join_moments(found, cut, h * w)
            before, after = x if after is None else after, None
        slope, offset = _fold(weight, bias, *statistics, norm_eps)
        cut.launch(kernels.emit, x, before, share, opening, taps, slope, offset, gain, drop, out, after, RELU=relu)
        state = None if mean is None else before if after is None else after
        batch = statistics if training else (None, None)
        log_norm_out, score = sample.log_norm.float(), sample.score.float()
        state, batch_mean, batch_var = (x.new_empty(0) if t is None else t for t in (state, *batch))
    return out.contiguous(memory_format=order), state, log_norm_out, score, pooled, batch_mean, batch_var


def backward(
    grad_out: Tensor,
    grad_mean: Tensor | None,
    grad_log_norm: Tensor | None,
    grad_score: Tensor | None,
    x: Tensor,
    base: Tensor | None,
    base_log_norm: Tensor | None,
    maps: Sequence[Tensor],
    scores: Sequence[Tensor],
    log_norm_before: Tensor | None,
    log_norm: Tensor,
    pooled: Tensor,
    query: Tensor,
    key: Tensor,
    inv_temperature: Tensor,
    mixing: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    norm_mean: Tensor | None,
    norm_var: Tensor | None,
    gain: Tensor | None,
    drop: Tensor | None,
    relu: bool,
    training: bool,
    clamp: float | None,
    gate_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `forward`, in the form of `lineattn.ops.native.kcla.backward`."""
    weights, form = Weights(query, key, inv_temperature, mixing, value), Form(clamp, gate_eps, relu)
    b, c, h, w = x.shape
    count, order = len(inv_temperature), _order(x)
    grad_out, x, maps = _last(grad_out), _last(x), [_last(one) for one in maps]
    grad_mean, base = (None if t is None else _last(t) for t in (grad_mean, base))
    _check_parameters(x, weights)
    _check(x, x.shape, channels_last=True, x=x, base=base, grad_out=grad_out, grad_mean=grad_mean)
    for one, its_score in zip(maps, scores, strict=True):
        _check(x, x.shape, channels_last=True, maps=one)
        _check(x, (b, count), scores=its_score)
    _check(x, (b, count), grad_log_norm=grad_log_norm, grad_score=grad_score, log_norm=log_norm)
    _check(x, (b, count), base_log_norm=base_log_norm, log_norm_before=log_norm_before)
    _check(x, (c,), weight=weight, bias=bias, norm_mean=norm_mean, norm_var=norm_var, gain=gain)
    _check(x, (b,), drop=drop)
    _check(x, (b, c), pooled=pooled)

    cut = _cut(x, count)
    with torch.no_grad(), torch.cuda.device_of(x):
        sample = _sample(pooled, log_norm_before, weights, form)
        share, opening, taps = sample.share.float(), sample.gate.float(), value.view(c, 9).T.contiguous()
        grad_x, before, values = torch.empty_like(x), None, torch.empty_like(x)
        mean, grad_of_mean = x, grad_x
        if base is not None and base_log_norm is not None:
            # The mean stands where the last pass writes, and so does its gradient.
            mean, grad_of_mean = grad_x, torch.empty_like(x)
            before = grad_of_mean
            shares = (torch.stack([base_log_norm, *scores]) - sample.log_norm).exp()
            coefficients = torch.cat([shares, sample.share[None]]).float()
            cut.launch(kernels.recall, (base, *maps, x), coefficients, mean)
        slope, offset = _fold(weight, bias, norm_mean, norm_var, norm_eps)
        centre = torch.zeros_like(bias) if weight is None else norm_mean
        sums = x.new_empty(b, cut.spans, 2, c)
        cut.launch(kernels.values, mean, grad_out, opening, taps, slope, offset, centre, drop, values, sums, RELU=relu)
        norm = _norm_backward(sums, b * h * w, weight, bias, norm_mean, norm_var, gain, training, norm_eps)
        parts = x.new_empty(b, cut.spans, 11, c)
        cut.launch(
            kernels.spread, values, grad_out, mean, x, grad_mean, opening, taps, slope, offset, norm.by_grad,
            norm.by_z, norm.fixed, drop, grad_of_mean, parts, RELU=relu,
        )  # fmt: skip
        joined = parts.sum(1, dtype=torch.float64)
        of_gate, pull = (heads(joined[:, i], count).sum(-1) for i in range(2))
        grad_value = joined[:, 2:].sum(0).float().T.contiguous().view(value.shape)
        small = _sample_backward(sample, of_gate, pull, grad_log_norm, grad_score, pooled, weights, form)
        of_pool, rest = (small.pooled / (h * w)).float(), sample.rest.float()
        cut.launch(kernels.finish, grad_out, grad_of_mean, share, rest, of_pool, grad_x, before)
        of_log_norm = None if base is None else small.log_norm.float()
        of_mixing = None if small.mixing is None else small.mixing.float()
        found = (before, of_log_norm, small.query.float(), small.key.float(), of_mixing, grad_value, norm.weight,
                 norm.bias, norm.gain)  # fmt: skip
        gm, gl, gq, gk, gmix, gv, gw, gb, gg = (x.new_empty(0) if g is None else g for g in found)
    return grad_x.contiguous(memory_format=order), gm, gl, gq, gk, gmix, gv, gw, gb, gg


def _order(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _check(x: Tensor, shape: tuple[int, ...], /, *, channels_last: bool = False, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        native.address(name, tensor, shape, channels_last=channels_last, device=x.device)


def _check_parameters(x: Tensor, weights: Weights) -> None:
    c, count = x.shape[1], len(weights.inv_temperature)
    if min(x.shape) == 0 or c % count:
        raise ValueError(f"a map of shape {tuple(x.shape)} can't be cut into {count} heads")
    if x[0].numel() >= 2**31:
        raise ValueError(f"a map of shape {tuple(x.shape)} has too many values a sample")
    _check(x, (1, 1, weights.query.numel()), query=weights.query)
    _check(x, (1, 1, weights.key.numel()), key=weights.key)
    _check(x, (count,), inv_temperature=weights.inv_temperature)
    _check(x, (count, count), mixing=weights.mixing)
    _check(x, (c, 1, 3, 3), value=weights.value)


class _Cut(NamedTuple):
    """How maps are cut up: the number of spans a sample and their length, the grid, and what a kernel has to know."""

    spans: int
    span: int
    programs: tuple[int, int]
    sizes: dict[str, int]

    def launch(self, kernel: Any, *arguments: Any, **flags: bool) -> None:
        kernel[self.programs](*arguments, **self.sizes, **flags)


def _cut(x: Tensor, heads: int) -> _Cut:
    b, c, h, w = x.shape
    across = min(CHANNELS, triton.next_power_of_2(c))
    positions = TILE // across
    columns = triton.cdiv(c, across)
    tiles = b * columns * triton.cdiv(h * w, positions)
    span = positions * min(max(tiles // PROGRAMS, 1), LONGEST)
    spans = triton.cdiv(h * w, span)
    sizes = {"H": h, "W": w, "C": c, "heads": heads, "spans": spans, "span": span, "P": positions, "CB": across}
    return _Cut(spans, span, (b * spans, columns), sizes)


def _join_moments(found: Tensor, cut: _Cut, area: int) -> tuple[Tensor, Tensor]:
    """The batch's mean and biased variance from the spans' moments, ``(B, spans, 3, C)``."""
    lengths = found.new_full((cut.spans, 1), cut.span, dtype=torch.float64)
    lengths[-1] = area - (cut.spans - 1) * cut.span
    pivot, one, two = found.double().unbind(2)
    moved = one / lengths
    total = len(found) * area
    mean = ((pivot + moved) * lengths).sum((0, 1)) / total
    square = (two - one * moved + lengths * (pivot + moved - mean).square()).sum((0, 1))
    return mean.float(), (square / total).clamp_min(0).float()


def _fold(
    weight: Tensor | None, bias: Tensor, mean: Tensor | None, var: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm as a slope and an offset a channel."""
    if weight is None:
        return torch.ones_like(bias), bias
    assert mean is not None and var is not None
    slope = weight / (var.double() + eps).sqrt()
    return slope.float(), (bias - mean * slope).float()


class _Sample(NamedTuple):
    """What a pooled map says, in double precision: query and key, ``(B, h, D)``, and numbers of a head, ``(B, h)``."""

    query: Tensor
    key: Tensor
    log_norm: Tensor
    share: Tensor
    rest: Tensor  # 1 - share, without cancellation
    score: Tensor
    gate: Tensor


def _sample(pooled: Tensor, before: Tensor | None, weights: Weights, form: Form) -> _Sample:
    query, key, score = address(pooled.double(), weights, form)
    if before is None:
        log_norm, share, rest = score, torch.ones_like(score), torch.zeros_like(score)
    else:
        log_norm, share = accumulate(before.double(), score)
        rest = torch.sigmoid(before - score)
    return _Sample(query, key, log_norm, share, rest, score, gate(query, key, log_norm, weights, form))


class _SampleGrads(NamedTuple):
    pooled: Tensor
    log_norm: Tensor
    query: Tensor
    key: Tensor
    mixing: Tensor | None


def _sample_backward(
    sample: _Sample,
    of_gate: Tensor,
    pull: Tensor,
    of_log_norm: Tensor | None,
    of_score: Tensor | None,
    pooled: Tensor,
    weights: Weights,
    form: Form,
) -> _SampleGrads:
    """The gradients of `_sample`, from those of its results and from the sum of ``grad(mean) * (x - mean)`` of a head.

    Explicit, for there is no graph below a custom operator. ``pull`` stands for the gradient of the share, which moves
    the mean by ``x - mean_before = (x - mean) / rest``: nothing is divided by what may vanish.
    """
    query, key, log_norm, share, rest, _, opening = sample
    shrink = form.gate_eps * torch.exp(-log_norm)
    sigmoid = opening * (1 + shrink)
    of_norm = of_gate * opening * shrink / (1 + shrink)
    if of_log_norm is not None:
        of_norm = of_norm + of_log_norm
    of_rho = of_gate / (1 + shrink) * sigmoid * (1 - sigmoid)
    length = key.norm(dim=-1)
    divisor = length.clamp_min(SHORT)
    rho = (query * key).sum(-1) / divisor
    of_mixing = None
    if weights.mixing is not None:
        of_mixing = (of_rho[:, :, None] * rho[:, None]).sum(0)
        of_rho = (of_rho[:, :, None] * weights.mixing).sum(1)
    moved = share * pull
    of_score = moved + share * of_norm if of_score is None else moved + share * of_norm + of_score
    smooth = torch.sqrt(length.square() + torch.finfo(torch.float32).tiny)
    of_length = of_score * weights.inv_temperature / smooth
    if form.clamp is not None:  # a score at the clamp passes nothing on
        of_length = torch.where(smooth * weights.inv_temperature > form.clamp, 0.0, of_length)
    along = of_length - torch.where(length < SHORT, 0.0, of_rho * rho / divisor.square())
    of_query = (of_rho / divisor)[..., None] * key
    of_key = (of_rho / divisor)[..., None] * query + along[..., None] * key
    pooled_query, taps_query = _channel_conv_backward(of_query.flatten(1), pooled.double(), weights.query)
    pooled_key, taps_key = _channel_conv_backward(of_key.flatten(1), pooled.double(), weights.key)
    return _SampleGrads(pooled_query + pooled_key, rest * of_norm - moved, taps_query, taps_key, of_mixing)


def _channel_conv_backward(grad: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    count = weight.numel()
    shifted = F.pad(y, (count // 2, count // 2)).unfold(-1, count, 1)
    return channel_conv(grad, weight.flip(-1)), (shifted * grad[..., None]).sum((0, 1)).view(weight.shape)


class _NormGrads(NamedTuple):
    """Gradients of the norm and the gain, and the gradient of z: by_grad * dn + by_z * z + fixed, each ``(C,)``."""

    weight: Tensor | None
    bias: Tensor
    gain: Tensor | None
    by_grad: Tensor
    by_z: Tensor
    fixed: Tensor


def _norm_backward(
    sums: Tensor,
    count: int,
    weight: Tensor | None,
    bias: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    gain: Tensor | None,
    training: bool,
    eps: float,
) -> _NormGrads:
    """From the sums of dn and dn * (z - mean) over the spans, ``(B, spans, 2, C)``."""
    one, two = sums.sum((0, 1), dtype=torch.float64)
    factor = torch.ones_like(one) if gain is None else gain.double()
    slope, of_weight = factor, None
    by_z = fixed = torch.zeros_like(one)
    if weight is not None:
        assert mean is not None and var is not None
        inverse = 1 / (var.double() + eps).sqrt()
        two = two * inverse  # of dn and the normalised z
        of_weight = (factor * two).float()
        slope = factor * weight * inverse
        if training:
            by_z = -slope * inverse * two / count
            fixed = -slope * one / count - by_z * mean
    of_gain = None
    if gain is not None:
        of_gain = ((two if weight is None else weight * two) + bias * one).float()
    return _NormGrads(of_weight, (factor * one).float(), of_gain, slope.float(), by_z.float(), fixed.float())
