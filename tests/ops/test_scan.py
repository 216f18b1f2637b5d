"""The forms of the gated linear recurrence agree with its definition; the native kernels do at every size and decay."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from lineattn.errors import InputError
from lineattn.measure import SavedBytes
from lineattn.ops import native
from lineattn.ops.scan import scan, scan_chunked, scan_loop, scan_step
from tests.ops.scans import (
    DECAYS,
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


@forms
@decays
@pytest.mark.parametrize("heads", [True, False])
def test_every_form_is_the_definition(form: Any, decay: str, heads: bool):
    for tokens, initial in ((1, True), (7, False), (8, True), (37, False), (130, True)):
        given = inputs(2, tokens, decay=decay, heads=heads, initial=initial)
        cotangents = directions(given)
        check(results(form, given, cotangents), expected(given, cotangents), dict.fromkeys(NAMES, 1e-12))


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("derivative", [gradcheck, pytest.param(gradgradcheck, marks=pytest.mark.medium)])
def test_derivatives(derivative: Any, heads: bool):
    given = inputs(t=19, h=2, k=3, v=2, heads=heads)
    assert derivative(lambda *tensors: apply(scan, list(tensors)), given, fast_mode=True)


def test_without_decay_it_is_causal_linear_attention():
    q, k, v, g = inputs(t=70, decay="none", initial=False)
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    torch.testing.assert_close(scan(q, k, v, g, scale=1.0)[0], torch.einsum("bhts,bshv->bthv", scores, v))


def test_with_keys_that_complement_the_decay_ones_are_averaged():
    """MetaLA's keys: the weights of all tokens sum to 1 minus what is left of the empty start."""
    g = DECAYS["mixed"](1, 100, 2, 4)
    ones = torch.ones(1, 100, 2, 1)
    out, _ = scan(torch.eye(4)[:, None, None].expand(4, 100, 2, 4), -torch.expm1(g).expand(4, -1, -1, -1),
                  ones.expand(4, -1, -1, -1), g.expand(4, -1, -1, -1), scale=1.0)  # fmt: skip
    torch.testing.assert_close(out[..., 0].permute(1, 2, 0), 1 - g.cumsum(1).exp()[0])


@forms
def test_the_default_scale_is_that_of_attention(form: Any):
    given = inputs(k=16)
    torch.testing.assert_close(form(*given[:4])[0], form(*given[:4], scale=0.25)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [True, False])
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(dtype: torch.dtype, heads: bool):
    given = inputs(2, 20, k=9, v=21, heads=heads, dtype=dtype)
    out, final = apply(scan, given)
    parts, state = [], given[4]
    for piece in (slice(0, 11), slice(11, 12), slice(12, 20)):
        part, state = apply(scan, [*(t[:, piece] for t in given[:4]), state])
        parts.append(part)
    tokens, steps = given[4], []
    for i in range(20):
        before = tokens.clone()
        one, after = scan_step(*(t[:, i] for t in given[:4]), tokens, scale=0.3)
        assert torch.equal(tokens, before)
        steps.append(one)
        tokens = after
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    for found in ((torch.cat(parts, 1), state), (torch.stack(steps, 1), tokens)):
        assert error(found[0], out.double()) < tolerance and error(found[1], final.double()) < tolerance
    one, state = scan_step(*(t[:, 0] for t in given[:4]), None)
    torch.testing.assert_close((one, state), scan_step(*(t[:, 0] for t in given[:4]), torch.zeros_like(given[4])))


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_is_computed_in_single(form: Any, dtype: torch.dtype, autocast: bool):
    half = [t.detach().to(dtype) for t in inputs(t=40)]
    half[4] = half[4].float()
    wide = apply(form, [t.float() for t in half])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, state = apply(form, half)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)
    assert torch.equal(out, wide[0].to(dtype)) and torch.equal(state, wide[1])


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [{"b": 0}, {"t": 0}, {"h": 0}, {"k": 0}, {"v": 0}], ids=str)
def test_empty_tensors(form: Any, dtype: torch.dtype, sizes: dict[str, int]):
    given = inputs(**sizes, dtype=dtype)
    cotangents = directions(given)
    check(results(form, given, cotangents), expected(given, cotangents), dict.fromkeys(NAMES, 1e-6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 2, 4)}, "q: shape"),
        ({"k": torch.zeros(1, 3, 2, 5)}, "k: shape"),
        ({"v": torch.zeros(1, 2, 2, 6)}, "v: shape"),
        ({"g": torch.zeros(1, 3, 2, 1)}, "g: shape"),
        ({"initial_state": torch.zeros(1, 2, 6, 4)}, "state: shape"),
        ({"initial_state": torch.zeros(1, 2, 4, 6, dtype=torch.int64)}, "state: a floating-point type"),
        ({"k": torch.zeros(1, 3, 2, 4, dtype=torch.complex64)}, "k: a floating-point type"),
        ({"backend": "chunks"}, "unknown backend 'chunks': did you mean 'chunked'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_belong_together(change: dict[str, Any], message: str):
    given = dict(zip(("q", "k", "v", "g", "initial_state"), inputs(t=3), strict=True))
    with pytest.raises(InputError, match=message):
        scan(**given | change)


@pytest.mark.parametrize("form", [scan_loop, scan_chunked])
@decays
@pytest.mark.parametrize("heads", [True, False])
def test_pytorchs_operators_are_accurate_in_single_precision(form: Any, decay: str, heads: bool):
    given = inputs(1, 140, 2, 16, 24, decay=decay, heads=heads, dtype=torch.float32)
    cotangents = directions(given)
    check(results(form, given, cotangents), expected(given, cotangents), TOLERANCE)


@kernels
@decays
@pytest.mark.parametrize("heads", [True, False])
def test_the_kernels_are_accurate(decay: str, heads: bool):
    given = inputs(1, 256, 2, 64, 64, decay=decay, heads=heads, dtype=torch.float32)
    cotangents = directions(given)
    exact = expected(given, cotangents)
    for instructions in range(len(native.instructions())):
        with settings(1, instructions):
            check(results(scan, given, cotangents), exact, TOLERANCE)


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same values with other strides."""
    if kind == "sliced":
        return torch.stack([tensor.detach(), torch.full_like(tensor, torch.nan)], -1)[..., 0].requires_grad_()
    if kind == "transposed":
        return tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    return tensor


@kernels
@pytest.mark.medium
@pytest.mark.parametrize("seed", range(40))
def test_the_kernels_at_any_size_layout_and_number_of_threads(seed: int):
    draw = random.Random(seed)
    sizes = [draw.choice(c) for c in ((0, 1, 1, 2, 3), (0, 1, 2, 7, 8, 9, 16, 33, 70), (1, 2, 3))]
    widths = [draw.choice((1, 2, 3, 5, 8, 12, 17, 32, 65)) for _ in range(2)]
    options = {
        "decay": draw.choice(list(DECAYS)),
        "heads": draw.random() < 0.4,
        "initial": sizes[1] == 0 or draw.random() < 0.6,
    }
    given = [strided(t, draw.choice(("dense", "sliced", "transposed")))
             for t in inputs(*sizes, *widths, **options, dtype=torch.float32)]  # fmt: skip
    cotangents = tuple(strided(t, draw.choice(("dense", "sliced"))).detach() for t in directions(given))
    exact = expected(given, cotangents)
    # A sum of a few products of random signs may be far smaller than they are.
    tolerance = {name: 10 * value for name, value in TOLERANCE.items()}
    for instructions in range(len(native.instructions())):
        found = []
        for threads in (1, 2):
            with settings(threads, instructions):
                found.append(results(scan, given, cotangents))
                with torch.no_grad():
                    found[-1] += apply(scan, given)
        check(found[0], exact, tolerance)
        check(found[0][-2:], exact[:2], tolerance)
        assert all(map(torch.equal, *found))


@kernels
def test_nothing_that_is_not_finite_travels_back_in_time_or_to_its_neighbours():
    for name, bad in itertools.product("qkvg", (torch.nan, torch.inf)):
        given = inputs(2, 21, 2, 5, 20, dtype=torch.float32)
        cotangents = directions(given)
        clean = results(scan, given, cotangents)
        place = "qkvg".index(name)
        hurt = [t.detach().clone().requires_grad_() for t in given]
        with torch.no_grad():
            hurt[place][1, 10, 1, 3] = bad
        found = results(scan, hurt, cotangents)
        assert torch.equal(found[0][0], clean[0][0]) and torch.equal(found[0][1, :, 0], clean[0][1, :, 0])
        assert torch.equal(found[0][1, :10], clean[0][1, :10])
        if name == "v":
            assert torch.equal(found[0][..., 4:], clean[0][..., 4:]) and torch.equal(
                found[0][..., :3], clean[0][..., :3]
            )
        if bad != bad or name != "g":
            assert not found[0][1, 10, 1].isfinite().all()
        for hurt_grad, clean_grad in zip(found[2:], clean[2:], strict=True):
            assert torch.equal(hurt_grad[0], clean_grad[0])


@kernels
@pytest.mark.parametrize("heads", [True, False])
def test_nothing_but_the_inputs_is_kept(heads: bool):
    given = inputs(1, 64, 2, 16, 32, heads=heads, dtype=torch.float32)
    saved = SavedBytes()
    with saved.counting(nn.Module(), *given):
        out, state = apply(scan, given)
    assert saved.total == 0
    cotangents = directions(given)
    first = torch.autograd.grad((out, state), given, cotangents, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad((out, state), given, cotangents)))


@pytest.mark.parametrize("wanted", range(5))
def test_one_gradient_alone(wanted: int):
    given = inputs(t=20, dtype=torch.float32)
    cotangents = directions(given)
    whole = results(scan, given, cotangents)[2:]
    alone = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(given)]
    loss = sum((t * c).sum() for t, c in zip(apply(scan, alone), cotangents, strict=True))
    (found,) = torch.autograd.grad(loss, [alone[wanted]])
    assert torch.equal(found, whole[wanted])


@pytest.mark.parametrize("heads", [True, False])
def test_second_derivatives_of_the_kernels(heads: bool):
    """Of an argument that another comes from too."""
    given = inputs(t=20, heads=heads, dtype=torch.float32)
    cotangents = directions(given)

    def penalty(form: Any, tensors: list[Tensor]) -> list[Tensor]:
        q, _, *rest = tensors
        grads = torch.autograd.grad(apply(form, [q, q.sin(), *rest]), [q, *rest], cotangents[:2], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), [q, *rest]))

    found = penalty(scan, given)
    cotangents = [t.double() for t in cotangents]
    exact = penalty(scan_loop, [t.detach().double().requires_grad_() for t in given])
    for f, e in zip(found, exact, strict=True):
        assert error(f, e) < 1e-5


@kernels
def test_second_derivatives_of_the_queries_alone():
    """The final state has no graph then."""
    q, k, v, g = (t.detach() for t in inputs(t=9, heads=True, dtype=torch.float32)[:4])

    def penalty(form: Any, *tensors: Tensor) -> Tensor:
        q, k, v, g = tensors
        q = q.detach().requires_grad_()
        (grad,) = torch.autograd.grad(form(q, k, v, g)[0].sin().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), q)[0]

    assert error(penalty(scan, q, k, v, g), penalty(scan_loop, *(t.double() for t in (q, k, v, g)))) < 1e-5


@kernels
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch's own check
@pytest.mark.parametrize(("heads", "initial"), list(itertools.product((True, False), repeat=2)))
def test_the_operators_keep_the_rules_of_pytorch(heads: bool, initial: bool):
    given = inputs(t=9, heads=heads, initial=initial, dtype=torch.float32)
    arguments = (*given[:4], given[4] if initial else None)
    torch.library.opcheck(torch.ops.lineattn.scan_forward, (*arguments, None, 0.3))
    plain = [None if t is None else t.detach() for t in arguments]
    torch.library.opcheck(torch.ops.lineattn.scan_backward, (*directions(given), *plain, None, 0.3))


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("heads", [True, False])
def test_compiled_without_a_break(backend: str, heads: bool):
    torch._dynamo.reset()
    given = inputs(t=20, heads=heads, dtype=torch.float32)
    cotangents = directions(given)
    compiled = torch.compile(scan, fullgraph=True, backend=backend)
    check(results(compiled, given, cotangents), [t.double() for t in results(scan, given, cotangents)], TOLERANCE)
    with torch.no_grad():
        torch.testing.assert_close(apply(compiled, given), apply(scan, given))


@pytest.mark.medium
def test_exported_in_pytorchs_operators():
    class Net(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return scan(q, k, v, g, initial_state=state)

    given = tuple(t.detach() for t in inputs(t=20, dtype=torch.float32))
    program = torch.export.export(Net(), given)
    assert not [node for node in program.graph.nodes if "lineattn" in str(node.target)]
    torch.testing.assert_close(program.module()(*given), Net()(*given))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use of it
def test_transforms_of_functions():
    given = [t.detach() for t in inputs(b=3, dtype=torch.float32)]

    def loss(*tensors: Tensor) -> Tensor:
        return sum(t.square().sum() for t in apply(scan, list(tensors)))

    found = torch.func.grad(loss, tuple(range(5)))(*given)
    tracked = [t.requires_grad_() for t in given]
    for f, e in zip(found, torch.autograd.grad(loss(*tracked), tracked), strict=True):
        assert error(f, e.double()) < 1e-5
    alone = torch.func.vmap(lambda *one: apply(scan, [t[None] for t in one])[0][0])(*(t.detach() for t in given))
    torch.testing.assert_close(alone, apply(scan, given)[0])
    tangents = tuple(torch.randn_like(t) for t in given)
    _, moved = torch.func.jvp(loss, tuple(t.detach() for t in given), tangents)
    torch.testing.assert_close(moved, sum((f * t).sum() for f, t in zip(found, tangents, strict=True)))
