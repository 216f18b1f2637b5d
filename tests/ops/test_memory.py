"""External attention and its double normalisation; T1 ... T17 are the tests of the specification."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lineattn.errors import InputError
from lineattn.ops import memory
from lineattn.ops.memory import double_normalisation, external_attention, slot_log_sums
from tests.oracles import memory as oracle

B, N, H, C, M = 2, 7, 2, 5, 3
EPSILONS = {"log": 0.0, "official": 1e-9}
# Shapes of the query and of both memories: one head, heads with one memory, heads with their own.
FORMS = {
    "one head": ((B, N, C), (M, C)),
    "shared": ((B, N, H, C), (M, C)),
    "own": ((B, N, H, C), (H, M, C)),
    "map": ((B, N, C), (M, C)),
}
cases = pytest.mark.parametrize(
    ("form", "norm", "tile", "masked"), list(product(FORMS, EPSILONS, (None, 3), (False, True)))
)


def arguments(form: str = "one head", positions: int = N) -> tuple[Tensor, Tensor, Tensor]:
    shape, memories = FORMS[form]
    query = torch.randn(shape)[:, :positions]
    if form == "map":  # positions side by side
        query = query.mT.contiguous().mT
    return query.requires_grad_(), torch.randn(memories).requires_grad_(), torch.randn(memories).requires_grad_()


def some_positions() -> Tensor:
    """Of one sample some positions, of the other none."""
    return torch.arange(N) < torch.tensor([[N - 2], [0]])


@cases
def test_values_and_gradients_are_those_of_the_two_step_formula(form: str, norm: str, tile: int | None, masked: bool):
    given, mask = arguments(form), some_positions() if masked else None
    found = external_attention(*given, mask=mask, norm=norm, tile=tile)
    expected = oracle.external_attention(*given, mask, EPSILONS[norm])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(out, given, cotangent) for out in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(external_attention(*given, mask=mask, norm=norm, tile=tile), found)
    assert (found.stride(1) == 1) == (form == "map")  # in memory as the query is


@cases
def test_parts_that_share_their_sums_are_the_whole(form: str, norm: str, tile: int | None, masked: bool):
    """Values, and gradients, which go through what is shared too."""
    query, keys, values = given = arguments(form)
    mask = some_positions() if masked else None
    spans = [slice(0, 2), slice(2, N)]
    there = [None if mask is None else mask[:, at] for at in spans]
    sums = [slot_log_sums(query[:, at], keys, mask=some, tile=tile) for at, some in zip(spans, there, strict=True)]
    if masked:  # of no positions the sums are those of as many as there are, so that they are finite
        sums = [slot_log_sums(query, keys, mask=mask, tile=tile)]
    total = sums[0] if masked else torch.logaddexp(*sums)
    found = torch.cat(
        [
            external_attention(query[:, at], keys, values, mask=some, norm=norm, tile=tile, log_sums=total)
            for at, some in zip(spans, there, strict=True)
        ],
        1,
    )
    expected = external_attention(*given, mask=mask, norm=norm)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(out, given, cotangent) for out in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@cases
def test_derivatives(form: str, norm: str, tile: int | None, masked: bool):
    def attention(*given: Tensor) -> Tensor:
        return external_attention(*given, mask=some_positions()[:, 2:6] if masked else None, norm=norm, tile=tile)

    assert gradcheck(attention, arguments(form, 4))
    assert gradgradcheck(attention, arguments(form, 4), fast_mode=True)


@pytest.mark.parametrize("norm", EPSILONS)
def test_weights_and_their_gradient(norm: str):
    logits, mask = torch.randn(B, N, H, M, requires_grad=True), some_positions()
    found = double_normalisation(logits, mask=mask, norm=norm)
    expected = oracle.double_normalisation(logits, mask, EPSILONS[norm])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    cotangent = torch.randn_like(found)
    a, b = (torch.autograd.grad(out, logits, cotangent)[0] for out in (found, expected))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def check_axes(normalise: Callable[[Tensor], Tensor] = double_normalisation) -> None:
    """T1-T4: over which axis is summed, and with what a constant is cancelled."""
    logits = torch.randn(B, N, M)
    alpha = normalise(logits)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(B, N), rtol=0, atol=1e-12)  # T2
    # Divided by its row of the softmax over the positions, every column has the same sum, one: T1.
    row = (logits - logits.logsumexp(1, keepdim=True)).exp().sum(-1, keepdim=True)
    torch.testing.assert_close((alpha * row).sum(1), torch.ones(B, M), rtol=0, atol=1e-12)
    torch.testing.assert_close(normalise(logits + torch.randn(M)), alpha)  # T3
    assert (normalise(logits + torch.randn(N, 1)) - alpha).abs().max() > 1e-3  # T4


def check_samples_are_independent(normalise: Callable[[Tensor], Tensor] = double_normalisation) -> None:
    logits = torch.randn(B, N, M)  # T6
    torch.testing.assert_close(normalise(logits)[:1], normalise(logits[:1]), rtol=0, atol=1e-14)


def check_large_logits_in_half(
    dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = external_attention
) -> None:
    """Case 14, T17: 65,536 positions whose logits have a standard deviation of 30: the weights sum to one."""
    query = 30 * torch.randn(1, 2**16, 4, dtype=torch.float32)
    keys, values = torch.eye(4).float(), torch.ones(4, 1).float()
    out = attend(query.to(dtype), keys.to(dtype), values.to(dtype))
    assert out.isfinite().all()
    torch.testing.assert_close(out.float(), torch.ones_like(out).float(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_axes():
    check_axes()


def test_samples_are_independent():
    check_samples_are_independent()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", [None, 5000])
def test_large_logits_in_half(dtype: torch.dtype, tile: int | None):
    check_large_logits_in_half(dtype, lambda *given: external_attention(*given, tile=tile))


# What implementations in circulation do, each seen by the check above that is there for it.
MISTAKES = {
    "over the slots twice": lambda logits: logits.softmax(-1) / logits.softmax(-1).sum(-1, keepdim=True),
    "axes swapped": lambda logits: logits.softmax(-1) / logits.softmax(-1).sum(1, keepdim=True),
    "one step": lambda logits: logits.softmax(1),
    "over the batch": lambda logits: logits.softmax(0) / logits.softmax(0).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_axes_are_seen(name: str):
    with pytest.raises(AssertionError):
        check_axes(MISTAKES[name])


def test_a_softmax_over_the_batch_is_seen():
    with pytest.raises(AssertionError):
        check_samples_are_independent(MISTAKES["over the batch"])


def two_steps(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    alpha = (query @ keys.mT).softmax(1)
    return alpha / (1e-9 + alpha.sum(2, keepdim=True)) @ values  # in half precision nothing is left of 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_epsilon_lost_in_half_precision_is_seen(dtype: torch.dtype):
    with pytest.raises(AssertionError):
        check_large_logits_in_half(dtype, two_steps)


def test_positions_are_exchangeable_and_see_each_other():
    query, keys, values = (t.detach() for t in arguments())
    out = external_attention(query, keys, values)
    order = torch.randperm(N)
    torch.testing.assert_close(external_attention(query[:, order], keys, values), out[:, order])  # T5
    twice = external_attention(torch.cat([query, query], 1), keys, values)
    torch.testing.assert_close(twice, torch.cat([out, out], 1))  # T8
    changed = query.clone()
    changed[:, 0] += 1
    assert (external_attention(changed, keys, values) - out)[:, 1:].abs().max() > 1e-3  # T7


def test_a_masked_position_is_as_if_it_were_not_there():
    """T16, and what it would do if it were: the mask is needed."""
    query, keys, values = (t.detach() for t in arguments())
    mask = torch.arange(N).expand(B, -1) < N - 2
    alone = external_attention(query[:, : N - 2], keys, values)
    found = external_attention(query, keys, values, mask=mask)
    torch.testing.assert_close(found[:, : N - 2], alone, rtol=0, atol=1e-15)
    assert not found[:, N - 2 :].any()
    assert (external_attention(query, keys, values)[:, : N - 2] - alone).abs().max() > 1e-3


def test_a_sample_without_a_position_is_zero_and_has_no_gradient():
    given = arguments()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0] = False
    out = external_attention(*given, mask=mask)
    assert not out[0].any() and out.isfinite().all()
    gradients = torch.autograd.grad(out.square().sum(), given)
    assert all(gradient.isfinite().all() for gradient in gradients) and not gradients[0][0].any()


@pytest.mark.parametrize("scale", [1, 100, 1e6])
def test_large_logits_in_single_precision(scale: float):
    """Where the two-step form loses whole positions to underflow, each still sums to one and has a finite gradient."""
    logits = (scale * torch.randn(1, 200, 16)).float().requires_grad_()
    alpha = double_normalisation(logits)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(1, 200, dtype=torch.float32))
    (grad,) = torch.autograd.grad(alpha.square().sum(), logits)
    assert grad.isfinite().all()


def test_the_published_form_loses_positions_and_says_so_by_its_sums():
    logits = (60 * torch.randn(1, 4096, 64)).float()
    sums = double_normalisation(logits, norm="official").sum(-1)
    assert sums.isfinite().all() and (sums < 0.5).double().mean() > 0.9  # specification, 6.4: 95 %


@pytest.mark.parametrize("tile", [None, 100])
def test_autocast_lowers_the_products_alone(tile: int | None):
    query, keys, values = (torch.randn(s).float().requires_grad_() for s in ((1, 512, 32), (16, 32), (16, 32)))
    with torch.autocast("cpu", torch.bfloat16):
        out = external_attention(query, keys, values, tile=tile)
        alpha = double_normalisation(torch.randn(1, 4096, 16).bfloat16())
    assert out.dtype == alpha.dtype == torch.bfloat16
    torch.testing.assert_close(alpha.float().sum(-1), torch.ones(1, 4096).float(), rtol=0, atol=2**-7)
    out.float().square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (query, keys, values)]
    wanted = oracle.external_attention(*exact)
    wanted.square().sum().backward()
    assert (out - wanted).norm() < 0.01 * wanted.norm()
    for ours, theirs in zip((query, keys, values), exact, strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm()


def test_half_precision_is_normalised_in_single():
    logits = torch.randn(1, 4096, 16).bfloat16()
    alpha = double_normalisation(logits)
    assert alpha.dtype == torch.bfloat16
    assert (alpha - oracle.double_normalisation(logits.double())).abs().max() <= 2**-9  # one rounding, at the end


@pytest.mark.parametrize(("tile", "positions"), [(None, N), (3, 1)])
def test_keeps_its_arguments_and_a_number_a_slot_of_a_position_or_in_tiles_of_a_sample(
    tile: int | None, positions: int
):
    query, keys, values = (t.detach().float().requires_grad_() for t in arguments())
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in (query.data_ptr(), keys.data_ptr(), values.data_ptr()):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = external_attention(query, keys, values, tile=tile)
    assert out.requires_grad and sum(kept.values()) == 4 * B * positions * M


@pytest.mark.parametrize("norm", EPSILONS)
def test_compiles_as_one_graph(norm: str):
    given = arguments("own")
    compiled = torch.compile(
        lambda *given: external_attention(*given, mask=some_positions(), norm=norm), fullgraph=True, backend="aot_eager"
    )
    expected = external_attention(*given, mask=some_positions(), norm=norm)
    found = compiled(*given)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(out, given, cotangent) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "l1"}, "norm is 'l1'"),
        ({"tile": 0}, "tile is 0"),
        ({"query": torch.zeros(B, N, H, H, C)}, "must be"),
        ({"query": torch.zeros(B, N, C + 1)}, "differ in width"),
        ({"keys": torch.zeros(H, M, C)}, "must be"),
        ({"values": torch.zeros(M + 1, C)}, "not as many"),
        ({"mask": torch.ones(B, N)}, "of torch.bool"),
        ({"mask": torch.ones(N, B, dtype=torch.bool)}, "one a position"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_fit_is_said(change: dict, message: str):
    query, keys, values = arguments()
    given = {"query": query, "keys": keys, "values": values} | change
    with pytest.raises(InputError, match=message):
        memory.external_attention(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "slots"}, "norm is 'slots'"),
        ({"logits": torch.zeros(N, M)}, "logits"),
        ({"mask": torch.ones(1, N, dtype=torch.bool)}, "one a position"),
    ],
    ids=["norm", "logits", "mask"],
)
def test_what_is_not_normalised_is_said(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        double_normalisation(**({"logits": torch.zeros(B, N, M)} | change))


def test_double_precision_stays_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert external_attention(*arguments()).dtype == torch.float64


@pytest.mark.parametrize("tile", [1, 3])
def test_a_map_in_tiles_lies_in_memory_as_the_map_does(tile: int):
    query, keys, values = arguments("map")
    assert (
        external_attention(query, keys, values, tile=tile).stride() == external_attention(query, keys, values).stride()
    )


PEAK = """
import torch
from lineattn.ops.memory import external_attention
def peak():  # of this program: what getrusage says, a program inherits from the larger one that started it
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
keys, values = torch.randn(64, 64), torch.randn(64, 64)
external_attention(torch.randn(1, 9999, 64), keys, values, tile=4096)  # what is loaded at the first call
x = torch.randn(1, 262144, 64)
before = peak()
with torch.no_grad():
    out = external_attention(x, keys, values, tile={tile})
print(peak() - before)
"""


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read where Linux shows it")
def test_262144_positions_in_tiles_need_memory_for_a_tile_and_the_result():
    """MiB beyond the input: the result has 64, a tile's logits have 1; without tiles they have 64 more, a few times."""
    grown = []
    for tile in (4096, None):
        done = subprocess.run(
            [sys.executable, "-c", PEAK.format(tile=tile)], capture_output=True, text=True, check=True
        )
        grown.append(float(done.stdout))
    assert 60 < grown[0] < 64 + 16 < 64 + 64 < grown[1]


@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("form", FORMS)
def test_no_sample_gives_none(form: str, tile: int | None):
    query, keys, values = arguments(form)
    empty = query[:0].detach().requires_grad_()
    out = external_attention(empty, keys, values, tile=tile)
    assert out.shape == query[:0].shape
    out.sum().backward()
    assert empty.grad is not None and empty.grad.shape == empty.shape
