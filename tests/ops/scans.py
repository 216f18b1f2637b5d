"""What the tests of the gated linear recurrence share: inputs, their exact results, and how near is near enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineattn.ops import native
from lineattn.ops.scan import scan, scan_chunked, scan_loop
from tests.oracles import scan as oracle

# Logarithms of decays; the harder ones make exp(-sum) overflow within a chunk, or forget everything at each step.
DECAYS: dict[str, Callable[..., Tensor]] = {
    "weak": lambda *shape, **kw: -0.1 * torch.rand(*shape, **kw),
    "strong": lambda *shape, **kw: -1 - 5 * torch.rand(*shape, **kw),
    "mixed": lambda *shape, **kw: nn.functional.logsigmoid(20 * torch.randn(*shape, **kw)),
    "none": torch.zeros,
    "all": lambda *shape, **kw: torch.full(shape, -50.0, **kw),
    "at once": lambda *shape, **kw: torch.where(torch.rand(*shape) < 0.2, -torch.inf, -0.1 * torch.rand(*shape, **kw)),
}
decays = pytest.mark.parametrize("decay", DECAYS)
forms = pytest.mark.parametrize("form", [scan, scan_loop, scan_chunked])
kernels = pytest.mark.skipif(not native.enabled, reason="no native kernels")
NAMES = ("out", "state", "q", "k", "v", "g", "initial state")
TOLERANCE = dict(zip(NAMES, (5e-6, 5e-6, 1e-5, 1e-5, 1e-5, 2e-5, 1e-5), strict=True))


def inputs(b=1, t=13, h=2, k=4, v=6, *, decay="weak", heads=False, initial=True, **kw: Any) -> list[Tensor]:
    """``q, k, v, g`` and, if wanted, the initial state; all take gradients."""
    g = DECAYS[decay](*((b, t, h) if heads else (b, t, h, k)), **kw)
    found = [torch.randn(b, t, h, k, **kw), torch.randn(b, t, h, k, **kw), torch.randn(b, t, h, v, **kw), g]
    found += [torch.randn(b, h, k, v, **kw)] if initial else []
    return [tensor.requires_grad_() for tensor in found]


def apply(form: Any, given: list[Tensor], scale: float = 0.3) -> tuple[Tensor, Tensor]:
    return form(*given[:4], scale=scale, initial_state=given[4] if len(given) > 4 else None)


def results(form: Any, given: list[Tensor], cotangents: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Output, state, and the gradients of what was given."""
    found = apply(form, given)
    return [*found, *torch.autograd.grad(found, given, cotangents, materialize_grads=True)]


def expected(given: list[Tensor], cotangents: tuple[Tensor, Tensor], scale: float = 0.3) -> list[Tensor]:
    exact = [t.detach().double().requires_grad_() for t in given]
    found = oracle.scan(*exact[:4], scale, *exact[4:])
    cotangents = tuple(t.double() for t in cotangents)
    return [*found, *torch.autograd.grad(found, exact, cotangents, materialize_grads=True)]


def directions(given: list[Tensor]) -> tuple[Tensor, Tensor]:
    q, _, v = given[:3]
    return torch.randn_like(v), v.new_empty(q.shape[0], *q.shape[2:], v.shape[3]).normal_()


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm; what has none must come out as exactly nothing."""
    gap, norm = (found.double() - exact).norm().item(), exact.norm().item()
    return gap / norm if norm else gap


def check(found: list[Tensor], exact: list[Tensor], tolerance: dict[str, float]) -> None:
    for name, f, e in zip(NAMES, found, exact, strict=False):
        assert f.shape == e.shape and not (f.numel() and not error(f, e) <= tolerance[name]), (name, error(f, e))


@contextmanager
def settings(threads: int, instructions: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    native.library().lineattn_choose(instructions)
    try:
        yield
    finally:
        native.library().lineattn_choose(0)
        torch.set_num_threads(before)
