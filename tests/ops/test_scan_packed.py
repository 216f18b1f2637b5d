"""Packed sequences come out as if each were alone, and padding leaves no trace, in every form of the recurrence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from lineattn.errors import InputError
from lineattn.ops import native
from lineattn.ops.scan import mask_padding, scan, scan_chunked, scan_loop, scan_step
from tests.ops.scans import (
    NAMES,
    TOLERANCE,
    apply,
    check,
    decays,
    directions,
    error,
    expected,
    forms,
    inputs,
    kernels,
    results,
    settings,
)

# Empty ones at both ends and between, one token, less and more than a block, more than a chunk.
LENGTHS = (0, 5, 1, 0, 0, 70, 8, 3, 130, 0)
EXACT = dict.fromkeys(NAMES, 1e-12)


def offsets(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def packed(lengths: tuple[int, ...] = LENGTHS, *, initial: bool = True, **options: Any) -> list[Tensor]:
    """Inputs in one row of tokens, and a state a sequence."""
    given = inputs(t=sum(lengths), initial=False, **options)
    if initial:
        q, _, v, _ = given
        given.append(v.detach().new_empty(len(lengths), *q.shape[2:], v.shape[3]).normal_().requires_grad_())
    return given


def ways(given: list[Tensor], lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Cotangents for the output and the final states."""
    q, _, v = given[:3]
    return torch.randn_like(v), v.detach().new_empty(len(lengths), *q.shape[2:], v.shape[3]).normal_()


def pack(form: Any, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.int64) -> Any:
    """The form, for packed sequences."""
    return lambda *tensors, **options: form(*tensors, cu_seqlens=offsets(lengths, dtype), **options)


def alone(given: list[Tensor], cotangents: tuple[Tensor, Tensor], lengths: tuple[int, ...], run: Any) -> list[Tensor]:
    """What `run` gives for each sequence by itself, packed."""
    parts = []
    for n, (start, end) in enumerate(itertools.pairwise(offsets(lengths).tolist())):
        piece = [t.detach()[:, start:end].requires_grad_() for t in given[:4]]
        piece += [t.detach()[n : n + 1].requires_grad_() for t in given[4:]]
        parts.append(run(piece, (cotangents[0][:, start:end], cotangents[1][n : n + 1])))
    out, state, q, k, v, g, *initial = zip(*parts, strict=True)
    return [torch.cat(out, 1), torch.cat(state), *(torch.cat(t, 1) for t in (q, k, v, g)), *map(torch.cat, initial)]


@forms
@decays
@pytest.mark.parametrize("heads", [True, False])
def test_packed_sequences_are_the_definition_of_each(form: Any, decay: str, heads: bool):
    for lengths, initial in ((LENGTHS, True), ((5, 1, 70), False)):
        given = packed(lengths, decay=decay, heads=heads, initial=initial)
        cotangents = ways(given, lengths)
        exact = alone(given, cotangents, lengths, expected)
        check(results(pack(form, lengths), given, cotangents), exact, EXACT)


@forms
@pytest.mark.parametrize("heads", [True, False])
def test_packed_in_single_precision(form: Any, heads: bool):
    given = packed(k=16, v=24, heads=heads, dtype=torch.float32)
    cotangents = ways(given)
    check(results(pack(form), given, cotangents), alone(given, cotangents, LENGTHS, expected), TOLERANCE)


@kernels
@pytest.mark.parametrize(("heads", "initial"), list(itertools.product((True, False), repeat=2)))
def test_the_kernels_give_a_packed_sequence_the_bits_that_it_has_alone(heads: bool, initial: bool):
    given = packed(h=3, k=9, v=40, heads=heads, initial=initial, dtype=torch.float32)
    cotangents = ways(given)
    for instructions, threads in itertools.product(range(len(native.instructions())), (1, 2)):
        with settings(threads, instructions):
            found = results(pack(scan), given, cotangents)
            # One token alone is a step, which rounds in another order.
            exact = alone(given, cotangents, LENGTHS, lambda *args: results(native_kernels, *args))
            assert all(map(torch.equal, found, exact))
            with torch.no_grad():
                assert all(map(torch.equal, apply(pack(scan), given), exact))


def native_kernels(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return scan(*tensors, **options, backend="native")


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_packed_sequences_do_not_hear_of_each_other(form: Any, dtype: torch.dtype, bad: float):
    lengths = (6, 11, 9)
    given = packed(lengths, dtype=dtype)
    cotangents = ways(given, lengths)
    clean = results(pack(form, lengths), given, cotangents)
    hurt = [t.detach().clone() for t in given]
    for t in hurt[:3]:
        t[:, 10] = bad
    found = results(pack(form, lengths), [t.requires_grad_() for t in hurt], cotangents)
    assert not found[0][:, 10].isfinite().any()
    for name, f, c in zip(NAMES, found, clean, strict=True):
        kept = [0, 2] if "state" in name else [*range(6), *range(17, 26)]
        assert torch.equal(*(t[kept] if "state" in name else t[:, kept] for t in (f, c)))


@forms
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (1,), (13,)], ids=str)
@pytest.mark.parametrize("offset_type", [torch.int32, torch.int64])
def test_packs_of_nothing_and_of_one(form: Any, lengths: tuple[int, ...], offset_type: torch.dtype):
    given = packed(lengths)
    cotangents = ways(given, lengths)
    found = results(pack(form, lengths, offset_type), given, cotangents)
    if len(lengths) == 1:
        check(found, expected(given, cotangents), EXACT)
    else:
        assert found[0].shape == (1, 0, 2, 6) and torch.equal(found[1], given[4])
        assert torch.equal(found[-1], cotangents[1])
    initial = apply(pack(form, lengths), given[:4])[1]
    assert initial.shape == (len(lengths), 2, 4, 6)


@pytest.mark.parametrize("heads", [True, False])
def test_derivatives_of_packed_sequences(heads: bool):
    lengths = (9, 0, 1, 4)
    given = packed(lengths, h=2, k=3, v=2, heads=heads)
    assert gradcheck(lambda *tensors: apply(pack(scan, lengths), list(tensors)), given)


@kernels
def test_second_derivatives_of_packed_sequences():
    lengths = (9, 0, 1, 4)
    given = packed(lengths, dtype=torch.float32)

    def penalty(form: Any, tensors: list[Tensor]) -> list[Tensor]:
        loss = sum(t.sin().sum() for t in apply(pack(form, lengths), tensors))
        grads = torch.autograd.grad(loss, tensors, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), tensors))

    exact = penalty(scan_loop, [t.detach().double().requires_grad_() for t in given])
    assert max(map(error, penalty(scan, given), exact)) < 1e-5


@torch.no_grad()
def test_packed_prompts_are_continued_in_a_batch():
    given = packed()
    _, state = apply(pack(scan), given)
    more = [t.detach()[0] for t in inputs(t=len(LENGTHS), initial=False)]
    out, after = scan_step(*more, state)
    for n, (start, end) in enumerate(itertools.pairwise(offsets(LENGTHS).tolist())):
        whole = [torch.cat([t[:, start:end], m[None, n : n + 1]], 1) for t, m in zip(given[:4], more, strict=True)]
        one, final = scan(*whole, initial_state=given[4][n : n + 1])
        assert error(out[n], one[0, -1]) < 1e-6 and error(after[n], final[0]) < 1e-12


@forms
def test_packed_half_precision(form: Any):
    half = [t.detach().bfloat16() for t in packed(initial=False)]
    out, state = apply(pack(form), half)
    wide = apply(pack(form), [t.float() for t in half])
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, wide[0].bfloat16()) and torch.equal(state, wide[1])


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("batch", "given", "message"),
    [
        (1, [1, 4, 9], "from 0 to the 9 tokens are expected, not from 1 to 9"),
        (1, [0, 4, 8], "not from 0 to 8"),
        (1, [0, 4, 10], "not from 0 to 10"),
        (1, [0, 5, 3, 9], "offset 2 is smaller"),
        (1, [0, -1, 9], "offset 1 is smaller"),
        (1, [0], "not from 0 to 0"),
        (2, [0, 9], "in a batch of 1, not of 2"),
        (1, [0.0, 9.0], "int32 or int64"),
        (1, [[0, 9]], "int32 or int64"),
        (1, torch.tensor([], dtype=torch.int64), "int32 or int64"),
    ],
    ids=str,
)
def test_offsets_that_are_none(form: Any, dtype: torch.dtype, batch: int, given: Any, message: str):
    tensors = inputs(batch, 9, initial=False, dtype=dtype)
    with pytest.raises(InputError, match=rf"cu_seqlens: .*{message}"):
        form(*tensors, cu_seqlens=torch.as_tensor(given))


def test_the_states_of_packed_sequences_are_one_a_sequence():
    with pytest.raises(InputError, match=r"state: shape \(3, 2, 4, 6\) is expected"):
        scan(*inputs(t=9, initial=False), initial_state=torch.zeros(1, 2, 4, 6), cu_seqlens=offsets((4, 0, 5)))


@kernels
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch's own check
def test_the_operators_for_packed_sequences_keep_the_rules_of_pytorch():
    lengths = (4, 0, 5)
    given = packed(lengths, dtype=torch.float32)
    torch.library.opcheck(torch.ops.lineattn.scan_forward, (*given, offsets(lengths), 0.3))
    plain = [t.detach() for t in given]
    arguments = (*ways(given, lengths), *plain, offsets(lengths), 0.3)
    torch.library.opcheck(torch.ops.lineattn.scan_backward, arguments)


@kernels
@pytest.mark.medium
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_packed_and_compiled_without_a_break(backend: str):
    torch._dynamo.reset()
    given = packed(dtype=torch.float32)
    cotangents = ways(given)
    cu_seqlens = offsets(LENGTHS, torch.int32)
    compiled = torch.compile(scan, fullgraph=True, backend=backend)

    def form(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return compiled(*tensors, **options, cu_seqlens=cu_seqlens)

    assert all(map(torch.equal, results(form, given, cotangents), results(pack(scan), given, cotangents)))
    cu_seqlens = cu_seqlens.flip(0)
    with pytest.raises(InputError, match="cu_seqlens: offsets from 0"):
        apply(form, given)


# Where padding stands among ten tokens.
MASKS = {"left": "0001111111", "right": "1111110000", "inside": "1101001011", "ends": "0011111100", "none": "1" * 10,
         "nothing else": "0" * 10}  # fmt: skip


def stepped(*tensors: Tensor, scale: float, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    *tokens, mask = tensors
    outs, state = [], initial_state
    for t in range(mask.shape[1]):
        out, state = scan_step(*mask_padding(*(x[:, t] for x in tokens), mask[:, t]), state, scale=scale)
        outs.append(out)
    return torch.stack(outs, 1), state


def padded(form: Any) -> Any:
    if form is scan_step:
        return stepped
    return lambda *tensors, **options: form(*mask_padding(*tensors), **options)


@pytest.mark.parametrize("form", [scan, scan_loop, scan_chunked, scan_step])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [True, False])
def test_padding_leaves_no_trace(form: Any, dtype: torch.dtype, heads: bool):
    there = torch.tensor([list(map(int, mask)) for mask in MASKS.values()])
    given = inputs(len(there), 10, decay="mixed", heads=heads, dtype=dtype)
    with torch.no_grad():  # whatever stands at padding
        for t in given[:4]:
            t[there == 0] = torch.tensor([torch.nan, torch.inf, -7.0], dtype=dtype)[torch.randint(3, (1,))]
    cotangents = directions(given)
    with_mask = [*given[:4], there, given[4]]
    found = padded(form)(*with_mask[:5], scale=0.3, initial_state=given[4])
    found = [*found, *torch.autograd.grad(found, given, cotangents)]
    tolerance = TOLERANCE if dtype == torch.float32 else EXACT
    for n, row in enumerate(there.bool()):
        assert all((t[n, ~row] == 0).all() for t in (found[0], *found[2:6]))
        tokens = [t.detach()[n : n + 1, row].requires_grad_() for t in given[:4]]
        tokens.append(given[4].detach()[n : n + 1].requires_grad_())
        exact = expected(tokens, (cotangents[0][n : n + 1, row], cotangents[1][n : n + 1]))
        mine = [t[n : n + 1] if "state" in name else t[n : n + 1, row] for name, t in zip(NAMES, found, strict=True)]
        check(mine, exact, tolerance)


def test_padding_in_steps_leaves_the_bits_of_the_state():
    q, k, v, g, state = inputs(3, 1)
    after = scan_step(*mask_padding(*(t[:, 0] for t in (q, k, v, g)), torch.tensor([False, True, False])), state)[1]
    assert torch.equal(after[::2], state[::2]) and not torch.equal(after[1], state[1])


def test_a_mask_of_another_shape():
    with pytest.raises(InputError, match=r"mask: shape \(1, 13\) is expected"):
        mask_padding(*inputs(initial=False), torch.ones(1, 12))
