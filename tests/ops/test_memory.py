from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lineattn.ops.memory import double_normalisation, external_attention
from tests.oracles import memory as oracle

B, N, C, M = 2, 7, 5, 3


def arguments() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, requires_grad=True) for shape in ((B, N, C), (M, C), (M, C)))


def test_external_attention_is_the_two_step_formula():
    given = arguments()
    found, expected = external_attention(*given), oracle.external_attention(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(out, given, cotangent) for out in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(external_attention(*given), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check):
    assert check(external_attention, arguments())


def test_what_sums_to_one_and_what_leaves_it_unchanged():
    logits = torch.randn(B, N, M)
    alpha = double_normalisation(logits)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(B, N))
    # A constant a slot is cancelled by the sum over positions; a constant a position is not.
    torch.testing.assert_close(double_normalisation(logits + torch.randn(M)), alpha)
    assert (double_normalisation(logits + torch.randn(N, 1)) - alpha).abs().max() > 1e-3
    twice = double_normalisation(torch.cat([logits, logits], 1))
    torch.testing.assert_close(twice, torch.cat([alpha, alpha], 1))


@pytest.mark.parametrize("scale", [1, 100, 1e6])
def test_large_logits_in_single_precision(scale: float):
    """Where the two-step form loses whole positions to underflow, each still sums to one and has a finite gradient."""
    logits = (scale * torch.randn(1, 200, 16)).float().requires_grad_()
    alpha = double_normalisation(logits)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(1, 200, dtype=torch.float32))
    (grad,) = torch.autograd.grad(alpha.square().sum(), logits)
    assert grad.isfinite().all()


def test_half_precision_is_normalised_in_single():
    logits = torch.randn(1, 4096, 16).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        alpha = double_normalisation(logits)
    exact = oracle.double_normalisation(logits.double())
    assert alpha.dtype == torch.bfloat16
    assert (alpha - exact).abs().max() <= 2**-9  # one rounding, at the end
    alpha.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_keeps_one_map_of_the_memory_width():
    query, keys, values = (t.detach().float().requires_grad_() for t in arguments())
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in (query.data_ptr(), keys.data_ptr(), values.data_ptr()):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = external_attention(query, keys, values)
    assert out.requires_grad and sum(kept.values()) == 4 * B * N * (M + 1)
