"""KCLA by the fastest means there are: native kernels as operators, which autograd and compilers see, or PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lineattn.ops import native, triton
from lineattn.ops.channels import per_channel
from lineattn.ops.depth import Norm
from lineattn.ops.kcla import Form, Past, Weights, kcla_plain
from lineattn.ops.native import kcla as kernels

# How many maps pile up before a mean is kept: saved is an eighth of a map a layer, and the backward reads five on
# average to make a mean again.
KEEP_EVERY = 8


def kcla(
    x: Tensor,
    mean: Tensor | None = None,
    log_norm: Tensor | None = None,
    past: Past | None = None,
    *,
    weights: Weights,
    form: Form,
    norm: Norm,
    gain: Tensor | None = None,
    drop: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Past | None]:
    r"""One layer of Key-Correlated Layer Attention.

    Native kernels compute it where they can (float32 on the CPU, and by Triton on a GPU where that is switched on);
    else, and under a tracer, PyTorch's operators, with the same results. The kernels keep no mean for the backward but
    every eighth: the block's output is kept by the network in any case, and the mean is made again from those.

    Args:
        x: ``(B, C, H, W)``, the block's output.
        mean: :math:`m`, ``(B, C, H, W)``, or ``None`` at the start of a chain.
        log_norm: :math:`\ell`, ``(B, h)``, or ``None``.
        past: What the last call returned for it, or ``None``.
        weights: The layer's parameters.
        form: The layer's constants.
        norm: Batch normalisation; in training its running statistics are updated in place.
        gain: Factor of a channel of the output, ``(C,)``, or ``None``.
        drop: Factor of a sample of the output, ``(B,)``, or ``None``.

    Returns:
        :math:`\tilde x`, :math:`m'`, :math:`\ell'`, and the past for the next call.

    Raises:
        ValueError: In training, there is only one value a channel.
    """
    if not _native(x, mean, log_norm, weights, norm, gain, drop):
        out, mean, log_norm, _ = kcla_plain(
            x, mean, log_norm, weights=weights, form=form, norm=norm, gain=gain, drop=drop
        )
        return out, mean, log_norm, None
    return _kcla_native(x, mean, log_norm, past, weights, form, norm, gain, drop)


def _native(
    x: Tensor,
    mean: Tensor | None,
    log_norm: Tensor | None,
    weights: Weights,
    norm: Norm,
    gain: Tensor | None,
    drop: Tensor | None,
) -> bool:
    if weights.value.shape[-2:] != (3, 3) or x.numel() == 0:
        return False
    if weights.inv_temperature.requires_grad or (drop is not None and drop.requires_grad):
        return False  # the kernels have no gradient for these
    given = (x, mean, log_norm, *weights, *norm[:4], gain, drop)
    return native.usable(*given) or triton.usable(*given)


def _kernels(x: Tensor) -> Any:
    """The kernels for the device that a map is on."""
    if x.is_cuda:
        from lineattn.ops.triton import kcla as on_cuda  # imports Triton

        return on_cuda
    return kernels


def _kcla_native(
    x: Tensor,
    mean: Tensor | None,
    log_norm: Tensor | None,
    past: Past | None,
    weights: Weights,
    form: Form,
    norm: Norm,
    gain: Tensor | None,
    drop: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Past | None]:
    values = x.numel() // x.shape[1]
    if norm.training and values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    x, mean = _dense(x), None if mean is None else _dense(mean)
    log_norm = None if log_norm is None else log_norm.contiguous()
    parameters: list[Any] = [None if t is None else t.contiguous() for t in (*weights, norm.weight, norm.bias)]
    statistics = [None if t is None or norm.training else t.contiguous() for t in norm[2:4]]
    factors = [None if t is None else t.contiguous() for t in (gain, drop)]
    constants = (form.relu, norm.training, form.clamp, form.gate_eps, norm.eps)

    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, mean, log_norm, *parameters, gain)
    )
    if differentiable:  # a training step before the backward would write into what has been saved
        statistics = [None if t is None else t.clone() for t in statistics]
    rest: tuple[Any, ...] = (*parameters, *statistics, *factors, *constants)
    if differentiable or torch.compiler.is_compiling():
        if mean is not None and log_norm is not None and not _describes(past, mean, log_norm):
            past = Past(mean, log_norm, _version(mean), mean, log_norm)  # a state from elsewhere: its mean is kept
        kept = (None, None, [], []) if past is None else (past.base, past.base_log_norm, [*past.maps], [*past.scores])
        found = torch.ops.lineattn.kcla(x, mean, log_norm, *kept, *rest)
    else:
        found = _kernels(x).forward(x, mean, log_norm, *rest)
    out, after, total, score, _, batch_mean, batch_var = found
    if norm.training and norm.running_mean is not None and norm.running_var is not None:
        with torch.no_grad():
            norm.running_mean.lerp_(batch_mean, norm.momentum)
            norm.running_var.lerp_(batch_var * (values / (values - 1)), norm.momentum)
    after = x if mean is None else after
    if not differentiable:
        past = None
    elif mean is None or past is None or len(past.maps) + 1 == KEEP_EVERY:
        past = Past(after, total, _version(after), after, total)
    else:
        maps, scores = (*past.maps, x), (*past.scores, score)
        past = Past(after, total, _version(after), past.base, past.base_log_norm, maps, scores)
    return out, after, total, past


def _describes(past: Past | None, mean: Tensor, log_norm: Tensor) -> bool:
    """Whether the state is the one that ``past`` came with."""
    return past is not None and past.mean is mean and past.log_norm is log_norm and past.version == _version(mean)


def _version(mean: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or mean.is_inference() else mean._version


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


@torch.library.custom_op("lineattn::kcla", mutates_args=(), device_types=("cpu", "cuda"))
def _operator(
    x: Tensor,
    mean: Tensor | None,
    log_norm: Tensor | None,
    base: Tensor | None,
    base_log_norm: Tensor | None,
    maps: Sequence[Tensor],
    scores: Sequence[Tensor],
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
    # What the mean can be made from again is an argument for the backward alone.
    return _kernels(x).forward(
        x, mean, log_norm, query, key, inv_temperature, mixing, value, weight, bias, running_mean, running_var,
        gain, drop, relu, training, clamp, gate_eps, norm_eps,
    )  # fmt: skip


@_operator.register_fake
def _(x, mean, log_norm, *arguments):  # noqa: ANN001, ANN002, ANN202
    training, heads = arguments[16], len(arguments[6])
    state = x.new_empty(0) if mean is None else torch.empty_like(x, memory_format=torch.channels_last)
    of_head, of_channel = (x.shape[0], heads), x.shape[1] if training else 0
    small = (x.new_empty(of_head), x.new_empty(of_head), x.new_empty(x.shape[:2]))
    return torch.empty_like(x), state, *small, x.new_empty(of_channel), x.new_empty(of_channel)


@torch.library.custom_op(
    "lineattn::kcla_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=torch.library.infer_schema(kernels.backward, mutates_args=()),
)
def _backward_operator(  # the arguments of the kernels' backward, whose gradients may have any strides here
    grad_out: Tensor,
    grad_mean: Tensor | None,
    grad_log_norm: Tensor | None,
    grad_score: Tensor | None,
    x: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    grad_mean = None if grad_mean is None else _dense(grad_mean)
    of_heads = (None if t is None else t.contiguous() for t in (grad_log_norm, grad_score))
    return _kernels(x).backward(_dense(grad_out), grad_mean, *of_heads, x, *rest)


@_backward_operator.register_fake
def _(grad_out, grad_mean, grad_log_norm, grad_score, x, base, base_log_norm, *rest):  # noqa: ANN001, ANN002, ANN202
    query, key, _, mixing, value, weight, bias, _, _, gain = rest[5:15]
    of_mean = x.new_empty(0) if base is None else torch.empty_like(x, memory_format=torch.channels_last)
    like = (base_log_norm, query, key, mixing, value, weight, bias, gain)
    return torch.empty_like(x), of_mean, *(x.new_empty(0) if t is None else torch.empty_like(t) for t in like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    x, mean, log_norm, base, base_log_norm, maps, scores, *parameters = inputs
    parameters, statistics, factors, constants = parameters[:7], parameters[7:9], parameters[9:11], parameters[11:]
    _, _, log_norm_out, _, pooled, *batch = output
    training = constants[1]
    ctx.constants, ctx.past = constants, len(maps)
    ctx.first = mean is None
    ctx.save_for_backward(
        x, base, base_log_norm, log_norm, log_norm_out, pooled, *parameters,
        *(batch if training else statistics), *factors, *maps, *scores,
    )  # fmt: skip
    ctx.mark_non_differentiable(pooled, *batch)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    grad_out, grad_mean, grad_log_norm, grad_score, *_ = grads
    if ctx.first:
        grad_mean = None
    saved = ctx.saved_tensors
    x, base, base_log_norm, before, log_norm, pooled = saved[:6]
    parameters, statistics, factors = saved[6:13], saved[13:15], saved[15:17]
    maps, scores = list(saved[17 : 17 + ctx.past]), list(saved[17 + ctx.past :])
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        mean = None if base is None else _mean([base, *maps], [base_log_norm, *scores], before)
        arguments = (x, mean, before, *parameters, *factors)
        found = _second_order(ctx, (grad_out, grad_mean, grad_log_norm, grad_score), arguments, statistics)
    else:
        if grad_out is None:
            grad_out = torch.zeros_like(x)
        found = torch.ops.lineattn.kcla_backward(
            grad_out, grad_mean, grad_log_norm, grad_score, x, base, base_log_norm, maps, scores, before, log_norm,
            pooled, *parameters, *statistics, *factors, *ctx.constants,
        )  # fmt: skip
        query, _, _, mixing, _, weight, *_ = parameters
        there = (x, base, before, query, query, mixing, query, weight, query, factors[0])
        found = [None if t is None else grad for t, grad in zip(there, found, strict=True)]
    of_x, of_mean, of_log_norm, of_query, of_key, of_mixing, of_value, of_weight, of_bias, of_gain = found
    return (
        of_x, of_mean, of_log_norm, None, None, [None] * ctx.past, [None] * ctx.past,
        of_query, of_key, None, of_mixing, of_value, of_weight, of_bias, None, None, of_gain, None,
        None, None, None, None, None,
    )  # fmt: skip


def _mean(maps: Sequence[Tensor], scores: Sequence[Tensor], log_norm: Tensor) -> Tensor:
    """The mean as `Past` says, in PyTorch's operators."""
    parts = [
        per_channel((score - log_norm).exp(), x.shape[1])[:, :, None, None] * x
        for x, score in zip(maps, scores, strict=True)
    ]
    return torch.stack(parts).sum(0)


def _second_order(
    ctx: Any, grads: Sequence[Tensor | None], arguments: Sequence[Tensor | None], statistics: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients as a differentiable graph in PyTorch's operators."""
    # Aliases: an argument may be computed from another or be the same tensor, and each gets its own gradient only.
    aliases: list[Any] = [None if t is None else t.view_as(t) for t in arguments]
    x, mean, log_norm, query, key, inv_temperature, mixing, value, weight, bias, gain, drop = aliases
    relu, training, clamp, gate_eps, eps = ctx.constants
    running = (None, None) if training else statistics
    results = kcla_plain(
        x, mean, log_norm,
        weights=Weights(query, key, inv_temperature, mixing, value), form=Form(clamp, gate_eps, relu),
        norm=Norm(weight, bias, *running, training=training, momentum=0.0, eps=eps), gain=gain, drop=drop,
    )  # fmt: skip
    # What is behind frozen arguments alone has no graph.
    known = [(r, grad) for r, grad in zip(results, grads, strict=True) if grad is not None and r.requires_grad]
    wanted = (x, mean, log_norm, query, key, mixing, value, weight, bias, gain)
    asked = [t for t in wanted if t is not None and t.requires_grad]
    outputs, given = zip(*known, strict=True)
    answers = torch.autograd.grad(outputs, asked, given, create_graph=True, allow_unused=True)
    found = iter(answers)
    return [next(found) if t is not None and t.requires_grad else None for t in wanted]


_operator.register_autograd(_gradients, setup_context=_save)
