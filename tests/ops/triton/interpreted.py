"""KCLA's Triton kernels on the CPU, in Triton's interpreter: `test_kcla.py` runs each group in a process of its own.

An interpreter once chosen stays chosen, so this is no test module: ``python -m tests.ops.triton.interpreted GROUP``.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from typing import Any

import torch
from torch import Tensor

SHAPES = [(2, 6, 4, 5, 2), (1, 5, 1, 9, 1), (3, 4, 7, 1, 4), (2, 33, 2, 3, 3), (4, 8, 1, 1, 2)]  # B, C, H, W, heads
PASTS = (None, 0, 1, 3)  # maps since the last kept mean; None at the start of a chain

# A mean of values about zero cancels; and so do some gradients, which may differ by this, or by twice as much as
# PyTorch's own do in single precision.
DELICATE = {"batch_mean": 1e-5, "query": 5e-4, "key": 5e-4, "mixing": 5e-4}


def last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def orders(x: Tensor) -> tuple[bool, bool]:
    return x.is_contiguous(), x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def draw(seed: int, shape: tuple[int, ...], past: int | None, training: bool) -> dict[str, Any]:
    """All arguments of a layer, its past, and what comes back in the backward."""
    torch.manual_seed(seed)
    choice = random.Random(seed).choice
    b, c, h, w, heads = shape

    def either() -> Tensor:
        return choice((last(b, c, h, w), torch.randn(b, c, h, w)))

    given: dict[str, Any] = dict.fromkeys(("mean", "log_norm", "base", "base_log_norm")) | {"maps": [], "scores": []}
    if past is not None:
        given |= {"base": last(b, c, h, w), "base_log_norm": torch.randn(b, heads)}
        given |= {"maps": [either() for _ in range(past)], "scores": [torch.randn(b, heads) for _ in range(past)]}
        scores = torch.stack([given["base_log_norm"], *given["scores"]]).double()
        shares = scores.softmax(0).repeat_interleave(c // heads, 2)[..., None, None]
        mean = (shares * torch.stack([given["base"], *given["maps"]])).sum(0).float()
        given |= {"mean": mean.to(memory_format=torch.channels_last), "log_norm": scores.logsumexp(0).float()}
    given |= {"x": either(), "value": torch.randn(c, 1, 3, 3), "inv_temperature": torch.rand(heads) + 0.5}
    given |= {"query": torch.randn(1, 1, choice((1, 3, 5))), "key": torch.randn(1, 1, choice((3, 5)))}
    given |= {"mixing": choice((None, torch.randn(heads, heads))), "gate_eps": choice((0.0, 0.3))}
    given |= {"running_mean": torch.randn(c), "running_var": torch.rand(c) + 0.5, "bias": torch.randn(c)}
    given["weight"] = torch.randn(c) if training or choice((True, False)) else None
    given |= {"gain": choice((None, torch.randn(c))), "drop": choice((None, torch.linspace(1.25, 0, b)))}
    given |= {"relu": choice((True, True, False)), "training": training, "clamp": choice((None, 1.0))}
    # But for it, a norm undoes the gate of a single sample, and the only tap that a map of one position sees.
    given["norm_eps"] = 0.1 if b == 1 or h * w == 1 else 1e-5
    maybe = [None if choice((True, False)) else torch.randn(b, heads) for _ in range(2)]
    # At the start of a chain the mean is x itself, and has no gradient of its own.
    given["grads"] = [either(), None if past is None else choice((None, either())), *maybe]
    return given


def arguments(given: dict[str, Any]) -> list[Any]:
    """Those of `forward`."""
    names = "x mean log_norm query key inv_temperature mixing value weight bias running_mean running_var gain drop relu"
    return [given[name] for name in [*names.split(), "training", "clamp", "gate_eps", "norm_eps"]]


def run(kernels: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """What a module of kernels finds for a layer."""
    found = kernels.forward(*arguments(given))
    names = ("out", "mean", "log_norm", "score", "pooled", "batch_mean", "batch_var")
    results = dict(zip(names, found, strict=True))
    norm = found[5:] if given["training"] else (given["running_mean"], given["running_var"])
    past = [given[name] for name in ("x", "base", "base_log_norm", "maps", "scores", "log_norm")]
    parameters = arguments(given)[3:]
    answers = kernels.backward(*given["grads"], *past, found[2], found[4], *parameters[:7], *norm, *parameters[9:])
    names = ("x", "mean", "log_norm", "query", "key", "mixing", "value", "weight", "bias", "gain")
    return results | {f"grad of {name}": grad for name, grad in zip(names, answers, strict=True)}


def plain(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by PyTorch's operators and its differentiation."""
    from lineattn.ops.depth import Norm
    from lineattn.ops.kcla import Form, Weights, kcla_plain

    def convert(t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) else t

    wanted = ("x", "mean", "log_norm", "query", "key", "mixing", "value", "weight", "bias", "gain")
    free = {name: given[name].to(dtype).requires_grad_() for name in wanted if given[name] is not None}
    at = {name: convert(t) for name, t in given.items()} | free
    statistics = at["running_mean"].clone(), at["running_var"].clone()
    outputs = kcla_plain(
        at["x"], at["mean"], at["log_norm"],
        weights=Weights(*(at[name] for name in ("query", "key", "inv_temperature", "mixing", "value"))),
        form=Form(at["clamp"], at["gate_eps"], at["relu"]),
        norm=Norm(at["weight"], at["bias"], *statistics, training=at["training"], momentum=1.0, eps=at["norm_eps"]),
        gain=at["gain"], drop=at["drop"],
    )  # fmt: skip
    found = dict(zip(("out", "mean", "log_norm", "score"), outputs, strict=True)) | {"pooled": at["x"].mean((2, 3))}
    if given["mean"] is None:
        del found["mean"]
    if given["training"]:
        count = given["x"].numel() // given["x"].shape[1]
        found |= {"batch_mean": statistics[0], "batch_var": statistics[1] * ((count - 1) / count)}
    known = [(out, convert(grad)) for out, grad in zip(outputs, given["grads"], strict=True) if grad is not None]
    results, cotangents = zip(*known, strict=True)
    grads = torch.autograd.grad(results, list(free.values()), cotangents, allow_unused=True)
    return {name: t.detach() for name, t in found.items()} | {
        f"grad of {name}": torch.zeros_like(free[name]) if grad is None else grad
        for name, grad in zip(free, grads, strict=True)
    }


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found.double() - expected).norm() / expected.double().norm().clamp_min(1e-12)).item()


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], eager: dict[str, Tensor], what: Any) -> None:
    for name, tensor in found.items():
        if name not in expected:
            assert tensor.numel() == 0, (what, name)
            continue
        kind = name.removeprefix("grad of ")
        allowed = DELICATE.get(kind, 1e-6 if kind == name else 1e-5)
        if kind != name and kind in DELICATE:
            allowed = max(allowed, 2 * error(eager[name], expected[name]))
        assert error(tensor, expected[name]) <= allowed, (what, name, error(tensor, expected[name]), allowed)


def fuzz(training: bool) -> None:
    """Outputs and gradients of single layers, against PyTorch in double precision and against the CPU's kernels."""
    from triton import next_power_of_2

    from lineattn.ops import native
    from lineattn.ops.native import kcla as of_the_cpu
    from lineattn.ops.triton import kcla as kernels

    sizes = kernels.TILE, kernels.PROGRAMS
    for seed, (shape, past) in enumerate(zip(itertools.cycle(SHAPES), 2 * PASTS)):
        few = 8 * min(kernels.CHANNELS, next_power_of_2(shape[1])), 1  # eight positions a tile, many tiles a program
        kernels.TILE, kernels.PROGRAMS = sizes if seed % 2 else few
        given = draw(seed, shape, past, training)
        what = (shape, past, {name: v for name, v in given.items() if not isinstance(v, Tensor | list)})
        found, expected, eager = run(kernels, given), plain(given, torch.float64), plain(given, torch.float32)
        compare(found, expected, eager, what)
        if native.enabled:
            other = run(of_the_cpu, given)
            assert found.keys() == other.keys()
            assert all(orders(found[name]) == orders(other[name]) for name in found), what
            compare(found, {name: t.double() for name, t in other.items() if t.numel()}, eager, what)


def corners() -> None:
    """A mean far larger than the deviation, a NaN, and what is no argument for a kernel."""
    from lineattn.ops.triton import kcla as kernels

    given = draw(0, (2, 4, 6, 5, 2), 1, training=True) | {"value": torch.zeros(4, 1, 3, 3)}
    given["value"][:, :, 1, 1] = 1.0  # no tap that sees the border, where a large mean ends
    far = {name: given[name] + 1000 for name in ("x", "mean", "base")} | {"maps": [given["maps"][0] + 1000]}
    found, expected = run(kernels, given | far), plain(given | far, torch.float64)
    assert error(found["out"], expected["out"]) <= 1e-6
    assert error(found["batch_var"], expected["batch_var"]) <= 1e-3  # the mean of the squares has no digits left

    for training in (False, True):
        given = draw(1, (2, 4, 3, 3, 2), 1, training) | {"relu": True}
        given["x"][0, 1, 1, 1] = float("nan")
        found, expected = run(kernels, given), plain(given, torch.float64)
        for name in ("out", "mean", "batch_var", "grad of x")[: 4 if training else 2]:
            assert torch.equal(found[name].isnan(), expected[name].isnan()), name

    for wrong in ({"mean": torch.randn(2, 4, 3, 4)}, {"x": given["x"].double()}, {"bias": torch.randn(5)}):
        try:
            kernels.forward(*arguments(given | wrong))
        except ValueError as found_wrong:
            assert next(iter(wrong)) in str(found_wrong)
        else:
            raise AssertionError(f"{wrong} was taken")


def operators() -> None:
    """A chain of layers through `kcla` with these kernels behind its operators, forward and backward."""
    from lineattn.ops import kcla_operator as ops
    from lineattn.ops import native
    from lineattn.ops.depth import Norm
    from lineattn.ops.kcla import Form, Weights
    from lineattn.ops.triton import enabled
    from lineattn.ops.triton import kcla as kernels

    assert enabled  # the switch is on in this process
    native.enabled, ops.kernels, ops.KEEP_EVERY = True, kernels, 2
    given = draw(0, (2, 4, 3, 4, 2), None, training=True)
    names = ("query", "key", "value", "weight", "bias")

    def chain(dtype: torch.dtype, grad: bool, **constants: Any) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(1)
        maps = [last(2, 4, 3, 4).to(dtype).requires_grad_(grad) for _ in range(4)]
        free = {name: given[name].to(dtype).requires_grad_(grad) for name in names}
        weights = Weights(free["query"], free["key"], given["inv_temperature"].to(dtype), None, free["value"])
        norm = Norm(free["weight"], free["bias"], torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype), **constants)
        mean = log_norm = past = out = None
        for x in maps:
            x = x if out is None else x + out / 2
            out, mean, log_norm, past = ops.kcla(
                x, mean, log_norm, past, weights=weights, form=Form(gate_eps=0.1), norm=norm
            )
        assert out is not None and mean is not None
        results = [out, mean, norm.running_mean, norm.running_var]
        leaves = [*maps, *free.values()]
        return results, list(torch.autograd.grad(out.square().sum() + mean.sum(), leaves)) if grad else []

    for grad, training in ((False, False), (False, True), (True, True)):
        constants = {"training": training, "momentum": 0.1, "eps": 1e-5}
        results, grads = chain(torch.float32, grad, **constants)
        expected, expected_grads = chain(torch.float64, grad, **constants)
        assert all(error(f, e) <= 2e-6 for f, e in zip(results, expected, strict=True))
        for i, (found, wanted) in enumerate(zip(grads, expected_grads, strict=True)):
            assert error(found, wanted) <= (DELICATE["query"] if i in (4, 5) else 2e-5), i

    given = draw(2, (2, 4, 3, 4, 2), 1, training=True)
    x, mean, log_norm, *rest = arguments(given)
    rest = [t.requires_grad_() if isinstance(t, Tensor) and i < 7 and i != 2 else t for i, t in enumerate(rest)]
    kept = [given[name] for name in ("base", "base_log_norm", "maps", "scores")]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops._operator, (x.requires_grad_(), mean, log_norm, *kept, *rest), test_utils=checks)


GROUPS = {
    "evaluation": [lambda: fuzz(training=False)],
    "training": [lambda: fuzz(training=True)],
    "operators": [corners, operators],
}

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, and in this process alone
    torch.set_num_threads(1)
    for check in GROUPS[sys.argv[1]]:
        check()
