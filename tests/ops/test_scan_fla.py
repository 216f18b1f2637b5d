"""What computes the recurrence is chosen by the tensors and by what is installed; fla-core is called as it documents.

A stand-in with the interface of fla-core 0.6 takes its place, on the CPU: nothing here has seen a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.ops import native, scan_fla
from lineattn.ops.scan import scan, scan_loop
from tests.ops.scans import TOLERANCE, apply, check, directions, inputs, kernels, results

CALLS: list[dict[str, Any]] = []


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What fla-core asks for, and the formula."""
    assert q.shape == k.shape == g.shape and v.shape[:3] == q.shape[:3]
    assert g.isfinite().all()  # it subtracts sums of logarithms
    assert initial_state is None or initial_state.dtype == torch.float32
    assert isinstance(scale, float) and output_final_state and not state_v_first
    if cu_seqlens is not None:
        assert len(q) == 1 and cu_seqlens.dtype == torch.int64
        assert all(start < end for start, end in pairwise(cu_seqlens.tolist()))
    CALLS.append({"type": q.dtype, "packed": cu_seqlens is not None})
    return scan_loop(q, k, v, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


@pytest.fixture
def module() -> Any:
    return SimpleNamespace(chunk_gla=chunk_gla)


@pytest.fixture(autouse=True)
def stand_in(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """fla-core is there, and so is its device; the native kernels are not."""
    monkeypatch.setitem(sys.modules, "fla.ops.gla", module)
    monkeypatch.setattr(scan_fla, "DEVICE", "cpu")
    monkeypatch.setattr(native, "enabled", False)
    scan_fla.kernel.cache_clear()
    CALLS.clear()
    yield
    scan_fla.kernel.cache_clear()


def single(**options: Any) -> list[Tensor]:
    return inputs(**{"t": 20, "k": 16} | options, dtype=torch.float32)


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("decay", ["weak", "at once"])
def test_its_results_and_gradients_arrive(heads: bool, initial: bool, decay: str):
    given = single(b=2, heads=heads, initial=initial, decay=decay)
    cotangents = directions(given)
    exact = [t.double() for t in results(scan_loop, given, cotangents)]
    check(results(scan, given, cotangents), exact, TOLERANCE)
    (call,) = CALLS
    assert call == {"type": torch.float32, "packed": False}


@pytest.mark.parametrize("lengths", [(9, 4, 7), (0, 9, 0, 11, 0)], ids=str)
@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences_some_of_them_empty(lengths: tuple[int, ...], initial: bool):
    given = single(initial=False)
    given += [torch.randn(len(lengths), 2, 16, 6, dtype=torch.float32, requires_grad=True)] if initial else []
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()

    def packed(form: Any) -> Any:
        return lambda *tensors, **options: form(*tensors, cu_seqlens=cu_seqlens, **options)

    cotangents = torch.randn_like(given[2]), torch.randn(len(lengths), 2, 16, 6, dtype=torch.float32)
    exact = [t.double() for t in results(packed(scan_loop), given, cotangents)]
    check(results(packed(scan), given, cotangents), exact, TOLERANCE)
    (call,) = CALLS
    assert call == {"type": torch.float32, "packed": True}
    with pytest.raises(InputError, match="cu_seqlens: offsets from 0"):
        scan(*given[:4], cu_seqlens=cu_seqlens + 1)


def test_half_precision_is_handed_over_in_single():
    out, state = scan(*(t.bfloat16() for t in single(initial=False)))
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert CALLS[0]["type"] == torch.float32


@pytest.mark.parametrize("sizes", [{"k": 8}, {"t": 1}, {"t": 0}, {"b": 0}, {"v": 0}], ids=str)
def test_what_it_is_not_asked_for(sizes: dict[str, int]):
    given = single(**sizes)
    torch.testing.assert_close(apply(scan, given), apply(scan_loop, given))
    apply(scan, inputs(k=16))  # float64
    assert not CALLS


@kernels
def test_the_native_kernels_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "enabled", True)
    apply(scan, single())
    assert not CALLS


def head_first(q: Any, k: Any, v: Any, g: Any, scale: Any = None, head_first: bool = True) -> None:
    """As fla-core had it until 2025."""
    raise AssertionError("called")


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(chunk_gla=head_first)],
                         ids=["not installed", "without the function", "of an older interface"])  # fmt: skip
def test_without_it_pytorch_computes(module: Any):
    given = single()
    torch.testing.assert_close(apply(scan, given), apply(scan_loop, given))
    with pytest.raises(InputError, match=r"backend fla: .*pip install 'lineattn\[fla\]'"):
        scan(*given[:4], backend="fla")


@pytest.mark.medium
def test_a_compiler_does_not_meet_it():
    torch._dynamo.reset()
    given = single()
    found = apply(torch.compile(scan, fullgraph=True, backend="aot_eager"), given)
    torch.testing.assert_close(found, apply(scan_loop, given))
    assert not CALLS


def test_a_backend_can_be_asked_for():
    given = single()
    for backend, calls in (("fla", 1), ("chunked", 1), ("loop", 1)):
        out = scan(*given[:4], backend=backend)[0]
        torch.testing.assert_close(out, scan_loop(*given[:4])[0])
        assert len(CALLS) == calls
    with pytest.raises(InputError, match=r"backend native: .* not torch\.float32 on cpu \(native kernels: off"):
        scan(*given[:4], backend="native")
    with pytest.raises(InputError, match=r"backend fla: .* not torch\.float64 on cpu"):
        scan(*(t.double() for t in given[:4]), backend="fla")
