"""KCLA's native kernels, from tensors to tensors.

Maps are dense, in channels_last or in contiguous order; the kernels know the first, and the others are copied to it
and back. An operator has no optional results, so what is absent at the start of a chain (the mean, which is the map
itself) comes back as an empty tensor; so does a gradient without an argument.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lineattn.ops import native

_SIZES = ("batch", "channels", "height", "width", "heads", "query_taps", "key_taps")
_FLAGS = ("relu", "training", "threads")
_NUMBERS = ("clamp", "gate_eps", "norm_eps")


def _structure(integers: Sequence[str], pointers: str) -> type[ctypes.Structure]:
    fields = [(name, ctypes.c_int64) for name in integers]
    fields += [(name, ctypes.c_double) for name in _NUMBERS]
    fields += [(name, ctypes.c_void_p) for name in pointers.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


# In the order of csrc/kcla.h.
_Forward = _structure(
    [*_SIZES, *_FLAGS],
    "x mean log_norm query key inv_temperature mixing value weight bias running_mean running_var gain drop "
    "out mean_out log_norm_out score pooled batch_mean batch_var",
)
_Backward = _structure(
    [*_SIZES, "past", *_FLAGS],
    "grad_out grad_mean grad_log_norm grad_score x base base_log_norm maps scores log_norm_before log_norm "
    "pooled query key inv_temperature mixing value weight bias norm_mean norm_var gain drop "
    "grad_x grad_mean_before grad_log_norm_before grad_query grad_key grad_mixing grad_value grad_weight grad_bias "
    "grad_gain",
)
native.check_mirror("KclaForward", _Forward)
native.check_mirror("KclaBackward", _Backward)


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
    """`lineattn.ops.kcla.kcla_plain` in one call.

    Returns:
        ``out``, in the order of ``x``; ``mean`` in channels_last order (empty at the start of a chain); ``log_norm``
        and ``score``, ``(B, h)``; the pooled map, ``(B, C)``; in training the batch's mean and biased variance,
        ``(C,)``, else empty.
    """
    sizes = _sizes(x, query, key, inv_temperature)
    b, c, h = sizes["batch"], sizes["channels"], sizes["heads"]
    contiguous = not x.is_contiguous(memory_format=torch.channels_last)
    x, mean = native.channels_last(x), None if mean is None else native.channels_last(mean)
    out, mean_out = torch.empty_like(x), x.new_empty(0) if mean is None else torch.empty_like(x)
    log_norm_out, score, pooled = x.new_empty(b, h), x.new_empty(b, h), x.new_empty(b, c)
    batch_mean, batch_var = (x.new_empty(c if training else 0) for _ in range(2))
    of_channel = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    _together("mean and log_norm", mean, log_norm)
    _norm_is_whole(weight, training, running_mean, running_var)
    arguments = _Forward(
        **sizes, relu=relu, training=training, threads=native.threads(), **_numbers(clamp, gate_eps, norm_eps),
        **_maps(x.shape, x=x, mean=mean, out=out, mean_out=None if mean is None else mean_out),
        **_dense((b, h), log_norm=log_norm, log_norm_out=log_norm_out, score=score),
        **_parameters(sizes, query, key, inv_temperature, mixing, value),
        **_dense((c,), **of_channel, gain=gain),
        **_dense((c,), **({"batch_mean": batch_mean, "batch_var": batch_var} if training else {})),
        **_dense((b,), drop=drop), **_dense((b, c), pooled=pooled),
    )  # fmt: skip
    native.check(native.library().lineattn_kcla_forward(ctypes.byref(arguments)))
    out = native.contiguous(out) if contiguous else out
    return out, mean_out, log_norm_out, score, pooled, batch_mean, batch_var


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
    """The gradients of `forward`.

    Returns:
        Gradients of ``x`` (in its order), ``mean`` (in channels_last order), ``log_norm``, ``query``, ``key``,
        ``mixing``, ``value``, ``weight``, ``bias``, ``gain``; empty where there is no such argument.
    """
    sizes = _sizes(x, query, key, inv_temperature)
    b, c, h = sizes["batch"], sizes["channels"], sizes["heads"]
    contiguous = not x.is_contiguous(memory_format=torch.channels_last)
    grad_out, x = native.channels_last(grad_out), native.channels_last(x)
    grad_mean = None if grad_mean is None else native.channels_last(grad_mean)
    base = None if base is None else native.channels_last(base)
    found = {"grad_x": x, "grad_mean_before": base, "grad_log_norm_before": base_log_norm, "grad_query": query}
    found |= {"grad_key": key, "grad_mixing": mixing, "grad_value": value, "grad_weight": weight}
    found |= {"grad_bias": bias, "grad_gain": gain}
    grads = {name: None if like is None else torch.empty_like(like) for name, like in found.items()}
    of_mean = {name: grads[name] for name in ("grad_x", "grad_mean_before")}
    of_channel = {name: grads[name] for name in ("grad_weight", "grad_bias", "grad_gain")}
    maps = [native.channels_last(one) for one in maps]
    _together("base, base_log_norm and log_norm_before", base, base_log_norm, log_norm_before)
    _norm_is_whole(weight, False, norm_mean, norm_var)
    if len(maps) != len(scores):
        raise ValueError(f"{len(maps)} maps have {len(scores)} scores")
    past = [native.address("maps", one, x.shape, channels_last=True) for one in maps]
    weighed = [native.address("scores", one, (b, h)) for one in scores]
    arguments = _Backward(
        **sizes, past=len(past), relu=relu, training=training, threads=native.threads(),
        **_numbers(clamp, gate_eps, norm_eps),
        **_maps(x.shape, grad_out=grad_out, grad_mean=grad_mean, x=x, base=base, **of_mean),
        **_dense((b, h), grad_log_norm=grad_log_norm, grad_score=grad_score, base_log_norm=base_log_norm),
        **_dense((b, h), log_norm_before=log_norm_before, log_norm=log_norm),
        **_dense((b, h), grad_log_norm_before=grads["grad_log_norm_before"]),
        maps=ctypes.cast((ctypes.c_void_p * len(past))(*past), ctypes.c_void_p),
        scores=ctypes.cast((ctypes.c_void_p * len(past))(*weighed), ctypes.c_void_p),
        **_parameters(sizes, query, key, inv_temperature, mixing, value),
        **_parameters(
            sizes, grads["grad_query"], grads["grad_key"], None, grads["grad_mixing"], grads["grad_value"],
            prefix="grad_",
        ),
        **_dense((c,), weight=weight, bias=bias, norm_mean=norm_mean, norm_var=norm_var, gain=gain, **of_channel),
        **_dense((b,), drop=drop), **_dense((b, c), pooled=pooled),
    )  # fmt: skip
    native.check(native.library().lineattn_kcla_backward(ctypes.byref(arguments)))
    gx, gm, gl, gq, gk, gmix, gv, gw, gb, gg = (x.new_empty(0) if g is None else g for g in grads.values())
    gx = native.contiguous(gx) if contiguous else gx
    return gx, gm, gl, gq, gk, gmix, gv, gw, gb, gg


def _sizes(x: Tensor, query: Tensor, key: Tensor, inv_temperature: Tensor) -> dict[str, int]:
    batch, channels, height, width = x.shape
    if min(x.shape) == 0 or channels % len(inv_temperature):
        raise ValueError(f"a map of shape {tuple(x.shape)} can't be cut into {len(inv_temperature)} heads")
    taps = query.numel(), key.numel()
    return dict(zip(_SIZES, (batch, channels, height, width, len(inv_temperature), *taps), strict=True))


def _together(names: str, *tensors: Tensor | None) -> None:
    if len({t is None for t in tensors}) > 1:
        raise ValueError(f"{names} go together: all are given, or none")


def _norm_is_whole(weight: Tensor | None, training: bool, mean: Tensor | None, var: Tensor | None) -> None:
    if weight is None and training:
        raise ValueError("a norm without a weight has no statistics to train")
    if weight is not None and not training and (mean is None or var is None):
        raise ValueError("a norm with a weight has statistics")


def _numbers(clamp: float | None, gate_eps: float, norm_eps: float) -> dict[str, float]:
    return {"clamp": float("inf") if clamp is None else clamp, "gate_eps": gate_eps, "norm_eps": norm_eps}


def _parameters(
    sizes: dict[str, int],
    query: Tensor | None,
    key: Tensor | None,
    inv_temperature: Tensor | None,
    mixing: Tensor | None,
    value: Tensor | None,
    prefix: str = "",
) -> dict[str, int | None]:
    h = sizes["heads"]
    found = {
        "query": (query, (1, 1, sizes["query_taps"])),
        "key": (key, (1, 1, sizes["key_taps"])),
        "inv_temperature": (inv_temperature, (h,)),
        "mixing": (mixing, (h, h)),
        "value": (value, (sizes["channels"], 1, 3, 3)),
    }
    if prefix:
        del found["inv_temperature"]
    return {prefix + name: native.address(prefix + name, *pair) for name, pair in found.items()}


def _maps(shape: tuple[int, ...], **tensors: Tensor | None) -> dict[str, int | None]:
    return {name: native.address(name, t, shape, channels_last=True) for name, t in tensors.items()}


def _dense(shape: tuple[int, ...], **tensors: Tensor | None) -> dict[str, int | None]:
    return {name: native.address(name, t, shape) for name, t in tensors.items()}
