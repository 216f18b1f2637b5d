r"""Attention over depth: the maths that KCLA and its baselines share.

Two ideas live here.

**A running mean with a log-normaliser.** A sum of maps weighted by :math:`e^{S_s}`, divided by the sum of the
weights, is kept as the mean itself and the logarithm of its normaliser:

.. math::
    \ell_t = \log(e^{\ell_{t-1}} + e^{S_t}), \qquad
    \alpha_t = e^{S_t - \ell_t} = \sigma(S_t - \ell_{t-1}), \qquad
    m_t = m_{t-1} + \alpha_t (x_t - m_{t-1})

It is algebraically the published pair :math:`U_t = m_t e^{\ell_t}`, :math:`Z_t = e^{\ell_t}`, but nothing overflows,
:math:`m_t` stays in the convex hull of the :math:`x_s`, and no score has to be clamped.

**One tail for every method.** What is read from the past becomes the output in the same way,

.. math::
    \tilde x = x + s \odot \phi(\mathrm{BN}(g \odot V * m + \lambda \odot I)), \qquad
    s = \mathrm{gain} \cdot \mathrm{drop}

with a depth-wise 3x3 convolution :math:`V`. It is a few passes over memory and nearly no arithmetic, so `attend`
keeps only its inputs for the backward and computes the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.ops.autocast import no_autocast
from lineattn.ops.channels import per_channel


def accumulate(log_norm: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    r"""Adds one more weight :math:`e^S` to a normaliser kept as a logarithm.

    Args:
        log_norm: :math:`\ell_{t-1}`, any shape.
        score: :math:`S_t`, same shape.

    Returns:
        :math:`\ell_t` and the share :math:`\alpha_t \in (0, 1)` of the new weight.

    Example:
        >>> log_norm, share = accumulate(torch.tensor([0.0]), torch.tensor([1000.0]))
        >>> log_norm.item(), share.item()
        (1000.0, 1.0)
    """
    return torch.logaddexp(log_norm, score), torch.sigmoid(score - log_norm)


def running_mean(mean: Tensor, x: Tensor, share: Tensor) -> Tensor:
    r""":math:`m_t = m_{t-1} + \alpha_t (x_t - m_{t-1})`, one :math:`\alpha` a sample and head.

    Args:
        mean: ``(B, C, H, W)``, at least float32.
        x: ``(B, C, H, W)``.
        share: ``(B, h)``; head ``i`` covers channels ``i * D`` to ``(i + 1) * D``.
    """
    share = per_channel(share, x.shape[1])[:, :, None, None].to(mean.dtype)
    if x.dtype == mean.dtype:
        return torch.lerp(mean, x, share)
    # Not a lerp with a converted x: that copy would be kept for the backward.
    return (mean * (1 - share)).addcmul_(x, share)


def mix(maps: list[Tensor] | tuple[Tensor, ...], share: Tensor) -> Tensor:
    r""":math:`\sum_s a_s x_s`, the read of softmax attention over depth.

    One map at a time: unlike a product with stacked maps, nothing but the maps themselves is kept for the backward.

    Args:
        maps: ``L`` maps of shape ``(B, C, H, W)``.
        share: ``(B, h, L)``.
    """
    channels = maps[0].shape[1]
    shares = [per_channel(a, channels)[:, :, None, None].to(maps[0].dtype) for a in share.unbind(-1)]
    total = maps[0] * shares[0]
    for x, a in zip(maps[1:], shares[1:], strict=True):
        total = total.addcmul_(x, a)
    return total


class Norm(NamedTuple):
    """Batch normalisation as data; in training, calling it updates the running statistics in place.

    Without a weight it is an offset: the slope of a norm in evaluation can stand in the values before it.
    """

    weight: Tensor | None
    bias: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float

    def __call__(self, y: Tensor) -> Tensor:
        if self.weight is None:
            return y + self.bias[:, None, None]
        stats = (self.running_mean, self.running_var)
        return F.batch_norm(y, *stats, self.weight, self.bias, self.training, self.momentum, self.eps)


def attend_plain(
    x: Tensor,
    read: Tensor,
    value: Tensor | None,
    gate: Tensor | None,
    norm: Callable[[Tensor], Tensor],
    *,
    relu: bool,
    gain: Tensor | None = None,
    drop: Tensor | None = None,
    shortcut: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    r""":math:`x + s \odot \phi(\mathrm{BN}(g \odot V * m + \lambda \odot I))`, written as the formula stands.

    Args:
        x: ``(B, C, H, W)``, what the attention is added to.
        read: :math:`m`, ``(B, C, H, W)``.
        value: :math:`V`, depth-wise kernel ``(C, 1, 3, 3)``; ``None`` where ``read`` holds values already.
        gate: :math:`g`, ``(B, C)``, or ``None`` for one.
        norm: The normalisation: a `Norm`, or any module.
        relu: Whether :math:`\phi` is a ReLU, or the identity.
        gain: Factor of a channel of :math:`s`, ``(C,)``, or ``None`` for one.
        drop: Factor of a sample of :math:`s`, ``(B,)``, or ``None`` for one.
        shortcut: :math:`I`, ``(B, C, H, W)``; with ``decay`` only.
        decay: :math:`\lambda`, ``(C,)``.
    """
    y = _values(read, value, gate, shortcut, decay, x.dtype)
    y = norm(y)
    if relu:
        y = torch.relu(y)
    scale = _scale(gain, drop)
    return x + (y if scale is None else y * _broadcast(scale, y))


def attend(
    x: Tensor,
    read: Tensor,
    value: Tensor | None,
    gate: Tensor | None,
    norm: Norm,
    *,
    relu: bool,
    gain: Tensor | None = None,
    drop: Tensor | None = None,
    shortcut: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """`attend_plain`, keeping nothing but its inputs for the backward.

    The arguments are those of `attend_plain` with a `Norm`, and so are the outputs and gradients up to rounding. A
    compiler sees the plain form, which it fuses by itself; so does a second derivative.
    The transforms of `torch.func` don't know this form; give them `attend_plain`.
    """
    if norm.weight is None:
        scale, rest = _scale(gain, drop), {"shortcut": shortcut, "decay": decay}
        return attend_folded(x, read, value, gate, norm.bias, relu=relu, scale=scale, **rest)
    if torch.compiler.is_compiling():
        return attend_plain(x, read, value, gate, norm, relu=relu, gain=gain, drop=drop, shortcut=shortcut, decay=decay)
    with no_autocast(x.device):
        return _Attend.apply(x, read, value, gate, gain, drop, shortcut, decay, relu, norm, norm.weight, norm.bias)


def attend_folded(
    x: Tensor,
    read: Tensor,
    value: Tensor | None,
    slope: Tensor | None,
    offset: Tensor,
    *,
    relu: bool,
    scale: Tensor | None = None,
    shortcut: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    r""":math:`x + s \odot \phi(a \odot V * m + \lambda' \odot I + b)`: `attend` in evaluation.

    With given statistics the batch norm is a slope and an offset a channel, so the gate, the norm and the sum are one
    multiply-add: :math:`a = g \gamma / \sigma`, :math:`b = \beta - \mu \gamma / \sigma`,
    :math:`\lambda' = \lambda \gamma / \sigma`.

    Args:
        x: ``(B, C, H, W)``.
        read: :math:`m`, ``(B, C, H, W)``.
        value: :math:`V`, ``(C, 1, k, k)``, or ``None`` where ``read`` holds values already.
        slope: :math:`a`, ``(B, C)`` or ``(1, C)``; ``None`` for one.
        offset: :math:`b`, ``(C,)``.
        relu: Whether :math:`\phi` is a ReLU.
        scale: :math:`s`, ``(B, C)`` or ``(1, C)``; ``None`` for one.
        shortcut: :math:`I`, ``(B, C, H, W)``; with ``decay`` only.
        decay: :math:`\lambda'`, ``(C,)``.
    """
    v = read.to(x.dtype)
    if value is not None:
        v = _depthwise(v, value)
    # In the type of the statistics, as batch norm does it: a half-precision slope is off by one share everywhere.
    b = offset[:, None, None]
    y = v + b if slope is None else torch.addcmul(b, v, slope.to(b.dtype)[:, :, None, None])
    if shortcut is not None:
        assert decay is not None
        y = torch.addcmul(y, shortcut, decay.to(y.dtype)[:, None, None])
    y = y.to(x.dtype)
    if relu:
        y = y.relu_()
    if scale is not None:
        return torch.addcmul(x, y, _broadcast(scale, y))
    return x + y if torch.is_grad_enabled() else y.add_(x)  # a ReLU keeps its output for the backward


def _values(
    read: Tensor,
    value: Tensor | None,
    gate: Tensor | None,
    shortcut: Tensor | None,
    decay: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    y = read.to(dtype)
    if value is not None:
        y = _depthwise(y, value)
    if gate is not None:
        y = y * _broadcast(gate, y)
    if shortcut is not None:
        assert decay is not None
        y = torch.addcmul(y, shortcut.to(dtype), decay.to(dtype)[:, None, None])
    return y


def _scale(gain: Tensor | None, drop: Tensor | None) -> Tensor | None:
    """The product of both, broadcastable to ``(B, C)``."""
    if gain is None or drop is None:
        return drop[:, None] if drop is not None else None if gain is None else gain[None]
    return drop[:, None] * gain


def _broadcast(per_sample_channel: Tensor, like: Tensor) -> Tensor:
    return per_sample_channel.to(like.dtype)[:, :, None, None]


class _Attend(torch.autograd.Function):
    """`attend_plain` that saves its inputs and recomputes: one depth-wise convolution and two passes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        read: Tensor,
        value: Tensor | None,
        gate: Tensor | None,
        gain: Tensor | None,
        drop: Tensor | None,
        shortcut: Tensor | None,
        decay: Tensor | None,
        relu: bool,
        norm: Norm,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        y = None
        if norm.training:
            y = _values(read, value, gate, shortcut, decay, x.dtype)
            if y.numel() == y.shape[1]:  # torch.nn.functional.batch_norm's own check; the kernel would write NaN
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {y.shape}")
            stats = (norm.running_mean, norm.running_var)
            y, mean, inv_std = torch.native_batch_norm(y, weight, bias, *stats, True, norm.momentum, norm.eps)
        else:
            assert norm.running_mean is not None and norm.running_var is not None
            mean, inv_std = norm.running_mean.clone(), torch.rsqrt(norm.running_var + norm.eps)
        ctx.save_for_backward(x, read, value, gate, gain, drop, shortcut, decay, weight, bias, mean, inv_std)
        ctx.relu, ctx.norm = relu, norm._replace(running_mean=None, running_var=None)
        scale = _scale(gain, drop)
        if y is None:
            slope = weight * inv_std
            rest = {"shortcut": shortcut, "decay": None if decay is None else decay * slope}
            offset = bias - mean * slope
            slope = slope[None] if gate is None else gate * slope
            return attend_folded(x, read, value, slope, offset, relu=relu, scale=scale, **rest)
        if relu:
            y = y.relu_()
        return y.add_(x) if scale is None else torch.addcmul(x, y, _broadcast(scale, y), out=y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        with no_autocast(grad.device):
            return _plain_backward(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


_ARGUMENTS = ("x", "read", "value", "gate", "gain", "drop", "shortcut", "decay", "relu", "norm", "weight", "bias")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, read, value, gate, gain, drop, shortcut, decay, weight, bias, mean, inv_std = ctx.saved_tensors
    needs = dict(zip(_ARGUMENTS, ctx.needs_input_grad, strict=True))

    source = read.to(x.dtype)
    v = source if value is None else _depthwise(source, value)
    z = v if gate is None else v * _broadcast(gate, v)
    if shortcut is not None:
        assert decay is not None
        z = torch.addcmul(z, shortcut.to(z.dtype), decay.to(z.dtype)[:, None, None])

    grads_out: dict[str, Tensor | None] = dict.fromkeys(_ARGUMENTS)
    grads_out["x"] = grad
    dy = grad
    if ctx.relu:
        dy = torch.ops.aten.threshold_backward(grad, _affine(z, weight, bias, mean, inv_std), 0)
    if drop is not None:
        dy = dy * _broadcast(drop[:, None], dy)
    # The gain is part of the slope: with y = weight * z' + bias, its gradient follows from theirs.
    slope = weight if gain is None else weight * gain.to(weight.dtype)
    if ctx.norm.training:
        dz, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
            dy, z, slope, None, None, mean, inv_std, True, ctx.norm.eps, [True, True, True]
        )
    else:
        total = dy.sum((0, 2, 3), dtype=mean.dtype)
        d_weight, d_bias = (_sum_over_space(dy, z).sum(0) - total * mean) * inv_std, total
        dz = dy * (slope * inv_std).to(dy.dtype)[:, None, None]
    if gain is not None:
        grads_out["gain"] = (weight * d_weight + bias * d_bias).to(gain.dtype)
        d_weight, d_bias = d_weight * gain, d_bias * gain
    grads_out["weight"], grads_out["bias"] = d_weight.to(weight.dtype), d_bias.to(bias.dtype)

    if shortcut is not None:
        assert decay is not None
        grads_out["shortcut"] = dz * decay.to(dz.dtype)[:, None, None]
        grads_out["decay"] = _sum_over_space(dz, shortcut).sum(0).to(decay.dtype)
    if gate is not None:
        grads_out["gate"] = _sum_over_space(dz, v).to(gate.dtype)
        dz = dz.mul_(_broadcast(gate, dz))
    if value is None:
        grads_out["read"] = dz.to(read.dtype)
    else:
        kernel, pad = value.to(dz.dtype), value.shape[-1] // 2
        dm, dk, _ = torch.ops.aten.convolution_backward(
            dz, source, kernel, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], len(value),
            [needs["read"], needs["value"], False],
        )  # fmt: skip
        grads_out["read"] = None if dm is None else dm.to(read.dtype)
        grads_out["value"] = None if dk is None else dk.to(value.dtype)
    return tuple(grads_out[name] if needs[name] else None for name in _ARGUMENTS)


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The backward as a differentiable graph, for second derivatives."""
    # Aliases: an argument may be computed from another or be the same tensor, and each gets its own gradient only.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
    x, read, value, gate, gain, drop, shortcut, decay, weight, bias, mean, inv_std = aliases
    norm = ctx.norm._replace(weight=weight, bias=bias)
    if not norm.training:
        norm = norm._replace(running_mean=mean, running_var=inv_std.pow(-2) - norm.eps)
    rest = {"gain": gain, "drop": drop, "shortcut": shortcut, "decay": decay}
    out = attend_plain(x, read, value, gate, norm, relu=ctx.relu, **rest)
    inputs = (x, read, value, gate, gain, drop, shortcut, decay, None, None, weight, bias)
    needed = ctx.needs_input_grad
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def _depthwise(x: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(x, kernel.to(x.dtype), padding=kernel.shape[-1] // 2, groups=len(kernel))


def _affine(z: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
    """Batch normalisation with given statistics, as one multiply-add a value."""
    slope = weight * inv_std
    return torch.addcmul((bias - mean * slope)[:, None, None], z, slope[:, None, None]).to(z.dtype)


def _sum_over_space(a: Tensor, b: Tensor) -> Tensor:
    # The product too in single precision: where the sums cancel, half precision would leave nothing.
    return (a.to(torch.promote_types(a.dtype, torch.float32)) * b).sum((2, 3))
