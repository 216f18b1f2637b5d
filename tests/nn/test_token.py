"""What every method of the token axis owes: the contract, and its formula in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves, tree_map

from lineattn import registry
from lineattn.errors import InputError
from lineattn.nn.token.base import TokenMixer
from lineattn.nn.token.mamba import Mamba
from lineattn.nn.token.recurrent import Recurrent
from lineattn.nn.token.s4d import S4D
from tests.oracles import token as oracle

B, T, C, HEADS = 2, 11, 8, 2
FORMS = ["auto", "parallel", "chunked", "loop"]


class Case(NamedTuple):
    """A method with arguments."""

    method: str
    arguments: Mapping[str, Any] = MappingProxyType({})

    def make(self) -> TokenMixer:
        return registry.get(self.method, axis="token").cls(C, **{"heads": HEADS, **self.arguments})

    def __str__(self) -> str:
        return "-".join([self.method, *(f"{key}={value}" for key, value in self.arguments.items())])


CASES = [
    Case("metala"),
    Case("metala", {"conv": 2, "key_width": 8, "heads": 4, "tau": 1.0, "scale": 0.5}),
    Case("metala", {"conv": 0, "key": True, "norm": False, "gate": False}),
    Case("metala", {"augmentation": "gated", "conv": 1}),
    Case("metala", {"augmentation": "linear"}),
    Case("metala", {"augmentation": "official", "norm": False}),
    Case("metala", {"augmentation": "none"}),
    Case("gla", {"rank": 3}),
    Case("retention"),
    Case("retention", {"heads": 4, "value_width": 24}),
    Case("linear_attention"),
    Case("hgrn2"),
    Case("hgrn2", {"heads": 4, "lower_bound": 0.7}),
    Case("s4d", {"heads": C, "state_width": 4}),
    Case("s4d", {"state_width": 6}),
    Case("mamba2", {"state_width": 5}),
    Case("mamba2", {"heads": 4, "state_width": 3, "expand": 1, "conv": 0}),
    Case("mamba", {"heads": 2 * C, "state_width": 3}),
    Case("mamba", {"state_width": 2, "expand": 1, "rank": 3, "conv": 0}),
    Case("rwkv6", {"mix_rank": 2, "decay_rank": 3}),
    Case("rwkv6", {"heads": 1, "mix_rank": 1, "decay_rank": 1}),
    Case("softmax_attention"),
    Case("softmax_attention", {"rotary": False}),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
graphs = pytest.mark.parametrize(  # a graph takes seconds: the first form of each method
    "case", list({case.method: case for case in reversed(CASES)}.values()), ids=str
)
forms = pytest.mark.parametrize("form", FORMS)


def shaken(module: TokenMixer) -> TokenMixer:
    """Away from its start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (1 if parameter.ndim == 1 else C**-0.5))
    return module


def tokens(length: int = T) -> Tensor:
    return torch.randn(B, length, C)


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_every_registered_method_is_tested_here():
    assert {case.method for case in CASES} == set(registry.list_methods("token"))


@cases
@forms
def test_values_and_gradients_are_those_of_the_formula(case: Case, form: str):
    module, x = shaken(case.make()), tokens().requires_grad_()
    inputs = [x, *module.parameters()]
    expected = getattr(oracle, case.method)(module, x)
    cotangent = torch.randn_like(expected)
    found, _ = module(x, form=form)
    close(found, expected)
    close(torch.autograd.grad(found, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent))


@cases
@forms
def test_forms_agree_to_rounding_in_double_precision(case: Case, form: str):
    """Over chunks, and from a state that is there."""
    module = shaken(case.make())
    with torch.no_grad():
        _, state = module(tokens())
        x = tokens(150)
        expected, end = module(x, state, form="loop")
        found, reached = module(x, state, form=form)
    close(found, expected, 1e-12)
    close(reached, end, 1e-12)


@cases
@forms
def test_single_precision(case: Case, form: str):
    """Outputs to 5e-6, gradients to 1e-5, against the same in float64; in units of the largest.

    S4D's to 1e-4: what an angle's gradient sums grows with the position, and cancels but for the distances.
    """
    exact = shaken(case.make())
    module = copy.deepcopy(exact).float()
    exact = copy.deepcopy(module).double()  # of the weights that there are in float32
    x = tokens(100).float()
    cotangent, found, grads = torch.randn(B, 100, C), [], []
    for net, kind in ((exact, "loop"), (module, form)):
        dtype = next(net.parameters()).dtype
        inputs = [x.to(dtype).requires_grad_(), *net.parameters()]
        out, _ = net(inputs[0], form=kind)
        found.append(out)
        grads.append(torch.autograd.grad(out, inputs, cotangent.to(dtype)))
    assert distance(*found) < 5e-6
    assert max(map(distance, *grads)) < (1e-4 if case.method == "s4d" else 1e-5)


def distance(exact: Tensor, found: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1)).item()


@cases
def test_a_step_is_one_more_token(case: Case):
    module, x = shaken(case.make()), tokens()
    whole, end = module(x)
    state, outs = None, []
    for t in range(T):
        out, state = module.step(x[:, t], state)
        outs.append(out)
    close(torch.stack(outs, 1), whole, 1e-12)
    close(state, end, 1e-12)


@cases
@pytest.mark.parametrize("pieces", [(5, 1, 5), (1, 10), (2, 0, 9), (0, 11)], ids=str)
def test_pieces_are_the_whole(case: Case, pieces: tuple[int, ...]):
    """Published, pieces of more than one token began with an empty convolution."""
    module, x = shaken(case.make()), tokens()
    whole, end = module(x)
    state, outs = None, []
    for piece in x.split(list(pieces), 1):
        out, state = module(piece, state)
        outs.append(out)
    close(torch.cat(outs, 1), whole, 1e-12)
    close(state, end, 1e-12)


OFFSETS = {"some": [0, 1, 6, 6, 9, T], "none at the ends": [0, 0, 4, T, T]}


@cases
@forms
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("begun", [False, True], ids=["from the start", "from a state"])
def test_packed_sequences_are_as_each_alone(case: Case, form: str, offsets: str, begun: bool):
    """Values, states and gradients, also those of the parameters: nothing goes from one sequence to another."""
    module, x = in_small_pieces(shaken(case.make())), tokens()[:1].requires_grad_()
    at = torch.tensor(OFFSETS[offsets])
    before = None
    if begun:
        there = torch.rand(len(at) - 1, 5) > 0.4  # of different lengths
        _, before = module(torch.randn(len(at) - 1, 5, C), mask=there)
        before = tree_map(Tensor.detach, before)
    found, state = module(x, before, cu_seqlens=at, form=form)
    outs, ends, later = [], [], []
    for n, (start, end) in enumerate(pairwise(OFFSETS[offsets])):
        alone = None if before is None else tree_map(lambda t, n=n: t[n : n + 1], before)
        out, after = module(x[:, start:end], alone, form=form)
        outs.append(out)
        ends.append(after)
        later.append(module.step(x[:, 0], after)[0])
    expected = torch.cat(outs, 1)
    close(found, expected, 1e-12)
    after = module.step(x[:, 0].expand(len(ends), -1), state)[0]
    close(after, torch.cat(later), 1e-12)
    if isinstance(module, Recurrent):
        close(state, tree_map(lambda *t: torch.cat(t), *ends), 1e-12)
    inputs, cotangent, other = [x, *module.parameters()], torch.randn_like(found), torch.randn_like(after)
    total, alone = (
        (a * cotangent).sum() + (b * other).sum() for a, b in ((found, after), (expected, torch.cat(later)))
    )
    close(torch.autograd.grad(total, inputs), torch.autograd.grad(alone, inputs))


@cases
def test_offsets_that_do_not_fit_are_refused(case: Case):
    module, x = case.make(), tokens()[:1]
    at = torch.tensor([0, 4, T])
    for wrong, message in (
        (at[1:], "from 0 to"),
        (at[:-1], "from 0 to"),
        (at.double(), "cu_seqlens"),
        (at[[0, 2, 1, 2]], "smaller than"),
    ):
        with pytest.raises(InputError, match=message):
            module(x, cu_seqlens=wrong)
    with pytest.raises(InputError, match="batch of 1"):
        module(tokens(), cu_seqlens=at)
    with pytest.raises(InputError, match="no padding"):
        module(x, None, torch.ones(1, T, dtype=torch.bool), cu_seqlens=at)
    with pytest.raises(InputError, match="state"):
        module(x, module(x)[1], cu_seqlens=at)


@pytest.mark.parametrize("case", [case for case in CASES if getattr(case.make(), "piece", None)], ids=str)
@forms
@pytest.mark.parametrize("mask", ["right", None])
def test_in_pieces_of_its_own_a_method_is_the_same(case: Case, form: str, mask: str | None):
    """And keeps nothing for the gradients that is as wide as its parts, but a state a piece."""
    module, x = shaken(case.make()), tokens(16).requires_grad_()
    there = None if mask is None else torch.tensor([[1] * 9 + [0] * 7, [1] * 3 + [0] * 13]).bool()
    found, sizes = [], []
    for piece in (None, 4):
        module.piece = piece
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            out, state = module(x, None, there, form=form)
        found.append((out, state, torch.autograd.grad(out.sin().sum() + state.memory.sin().sum(), x)))
        sizes.append(sum(saved))
    close(found[1], found[0], 1e-12)
    assert sizes[1] < sizes[0] / 2


@cases
def test_gradients_go_through_the_state(case: Case):
    """Published, the kernel cut them there."""
    module, x = shaken(case.make()), tokens().requires_grad_()
    cotangent = torch.randn(B, T, C)
    (expected,) = torch.autograd.grad(module(x)[0], x, cotangent)
    first, state = module(x[:, :6])
    second, _ = module(x[:, 6:], state)
    (found,) = torch.autograd.grad(torch.cat([first, second], 1), x, cotangent)
    close(found, expected)


@cases
@forms
def test_nothing_sees_what_comes_later(case: Case, form: str):
    module, x = shaken(case.make()), tokens()
    other = x.clone()
    other[:, 6:] += 1
    (out, _), (changed, _) = module(x, form=form), module(other, form=form)
    close(changed[:, :6], out[:, :6], 1e-12)
    assert (changed[:, 6:] - out[:, 6:]).abs().amax((0, 2)).min() > 1e-4


MASKS = {
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * T],
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
    "interior": [[1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0]],
    "none there": [[0] * T, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]],
}
masks = pytest.mark.parametrize("mask", MASKS)


@cases
@masks
@pytest.mark.parametrize("begun", [False, True], ids=["from the start", "from a state"])
def test_padding_is_as_if_it_were_not_there(case: Case, mask: str, begun: bool):
    """Left, right and interior; published, padding behind or between tokens went on decaying the state."""
    module, x, there = shaken(case.make()), tokens(), torch.tensor(MASKS[mask]).bool()
    before = module(tokens(5))[1] if begun else None
    found, state = module(x, before, there)
    for b in range(B):
        alone = None if before is None else tree_map(lambda t, b=b: t[b : b + 1], before)
        out, end = module(x[b : b + 1, there[b]], alone)
        close(found[b : b + 1, there[b]], out, 1e-12)
        own = tree_map(lambda t, b=b: t[b : b + 1], state)
        if isinstance(module, Recurrent):
            close(own, end, 1e-12)
        close(module.step(x[:1, 0], own)[0], module.step(x[:1, 0], end)[0], 1e-12)
        assert not found[b, ~there[b]].any()


@cases
def test_padding_has_no_gradient_and_spoils_nothing(case: Case):
    module, x, there = shaken(case.make()), tokens(), torch.tensor(MASKS["interior"]).bool()
    x[~there] = torch.nan
    x.requires_grad_()
    out, state = module(x, mask=there)
    total = out.square().sum() + sum(t.square().sum() for t in tree_leaves(state) if t.is_floating_point())
    grad, *rest = torch.autograd.grad(total, [x, *module.parameters()])
    assert not grad[~there].any() and grad[there].abs().amax(-1).min() > 0
    assert all(g.isfinite().all() for g in rest)


@cases
def test_a_full_mask_is_none(case: Case):
    """Published, a mask with a one or a zero in it could be refused, depending on the number of the padding token."""
    module, x = shaken(case.make()), tokens()
    close(module(x, mask=torch.ones(B, T, dtype=torch.bool)), module(x), 1e-12)


@cases
def test_samples_are_independent(case: Case):
    module, x = shaken(case.make()), tokens()
    whole, state = module(x)
    alone, own = module(x[:1])
    close(whole[:1], alone, 1e-12)
    close(tree_map(lambda t: t[:1], state), own, 1e-12)


@cases
def test_rows_of_a_state_can_be_chosen(case: Case):
    """As a beam search does; published, this broke."""
    module, x, rows = shaken(case.make()), tokens(), torch.tensor([1, 1, 0])
    _, state = module(x[:, :6])
    found, _ = module(x[rows, 6:], tree_map(lambda t: t[rows], state))
    close(found, module(x)[0][rows, 6:], 1e-12)


@cases
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_is_changed_in_place(case: Case, grad: bool, dtype: torch.dtype):
    """A state can be used twice; published, a step changed it, and the mask the layer before."""
    module = shaken(case.make()).to(dtype)
    x, there = tokens().to(dtype), torch.tensor(MASKS["interior"]).bool()
    with torch.set_grad_enabled(grad):
        _, state = module(x[:, :6])
        kept = copy.deepcopy((x, tree_map(Tensor.detach, state)))
        first, _ = module.step(x[:, 6], state)
        module(x, state, there)
        second, _ = module.step(x[:, 6], state)
    assert torch.equal(first, second)
    assert torch.equal(kept[0], x)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(kept[1]), tree_leaves(state), strict=True))
    assert {key: value for key, value in vars(module).items() if torch.is_tensor(value)} == {}


@cases
def test_the_size_of_the_state_is_what_is_kept(case: Case):
    module = case.make()
    for length in (1, 7, 70):
        with torch.no_grad():
            _, state = module(tokens(length))
            _, state = module.step(tokens()[:, 0], state)
        leaves = tree_leaves(state)
        assert sum(t.numel() for t in leaves) == B * module.state_size(length + 1)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in leaves)  # and holds on to nothing larger
    if isinstance(module, Recurrent):
        assert module.state_size(1) == module.state_size(1 << 20)


@cases
def test_every_parameter_gets_a_gradient(case: Case):
    for module in (case.make(), shaken(case.make())):
        (module(tokens())[0] * torch.randn(B, T, C)).sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-12, name


@cases
def test_copies_are_independent(case: Case):
    module, x = shaken(case.make()), tokens()
    before, twin = module(x)[0], copy.deepcopy(module)
    twin.load_state_dict({key: torch.randn_like(t) for key, t in module.state_dict().items()})
    assert torch.equal(module(x)[0], before) and not torch.equal(twin(x)[0], before)


@cases
def test_weights_are_what_is_computed_with(case: Case):
    """The map is causal and applied to the values gives what the recurrence reads; the row says what is what."""
    module, x = shaken(case.make()), tokens()
    found = module.weights(x)
    assert found["attention"].shape == (B, module.heads, T, T)
    assert not found["attention"].triu(1).any()
    if not isinstance(module, Recurrent):
        assert found["attention"].sum(-1).allclose(torch.ones(()))
        return
    q, k, v, g = (found[name] for name in "qkvg")
    expected = 0
    if case.method == "rwkv6":  # what is written can be read one token later, and decays from then on
        expected = ((q * module.bonus.view(module.heads, -1) * k).sum(-1, keepdim=True) * v).transpose(1, 2)
        k, v, g = (torch.cat([torch.zeros_like(t[:, :1]), t[:, :-1]], 1) for t in (k, v, g))
    read = []
    for h in range(module.heads):
        decays = g[:, :, h] if g.ndim == 4 else g[:, :, h, None].expand(-1, -1, q.shape[-1])
        rows = (oracle.recurrence(*(t[b] for t in (q[:, :, h], k[:, :, h], v[:, :, h], decays.exp())), module.scale)
                for b in range(B))  # fmt: skip
        read.append(torch.stack([torch.stack(row) for row in rows]))
    expected = expected + torch.stack(read, 1)
    if case.method == "linear_attention":
        assert found["attention"].sum(-1).allclose(torch.ones(()))
        expected = expected / (q.transpose(1, 2) * k.cumsum(1).transpose(1, 2)).sum(-1, keepdim=True)
    close(found["attention"] @ found["v"].transpose(1, 2), expected)


@cases
def test_the_row_is_what_the_parts_depend_on(case: Case):
    """Measured: a part is of the input where two inputs have two of it."""
    module = shaken(case.make())
    if not isinstance(module, Recurrent):
        return
    first, second = module.weights(tokens()), module.weights(tokens())
    moves = {name: not torch.allclose(first[name], second[name]) for name in "qkvg"}
    for name, origin in zip("qkvg", module.row, strict=True):
        assert moves[name] == (origin in ("input", "decay")), name
    g = first["g"] if first["g"].ndim == 4 else first["g"][..., None]
    assert torch.allclose(first["k"], (1 - g.exp()).expand_as(first["k"])) == (module.row.key == "decay")
    assert (not first["g"].any()) == (module.row.decay == "one")


@cases
@forms
@pytest.mark.parametrize("lowered", ["autocast", "weights"])
def test_half_precision_is_finite(case: Case, form: str, lowered: str):
    module, x = case.make().float(), tokens(64).float()
    module, x = (module.bfloat16(), x.bfloat16()) if lowered == "weights" else (module, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered == "autocast"):
        out, state = module(x, form=form)
        stepped, _ = module.step(x[:, 0], state)
    assert stepped.dtype == out.dtype
    if isinstance(module, Recurrent):
        assert state.memory.dtype == torch.float32
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def in_small_pieces(module: TokenMixer) -> TokenMixer:
    if getattr(module, "piece", None) is not None:
        module.piece = 4
    return module


@graphs
@pytest.mark.medium
def test_compiles_as_one_graph(case: Case):
    torch._dynamo.reset()
    module, x = in_small_pieces(shaken(case.make())).float(), tokens().float().requires_grad_()
    there = torch.tensor(MASKS["interior"]).bool()
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    for mask in (None, there):
        expected, state = module(x, mask=mask)
        found, reached = whole(x, mask=mask)
        torch.testing.assert_close((found, reached), (expected, state))
        grads = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    step = torch.compile(module.step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        given = x[:, 0].detach(), tree_map(Tensor.detach, state)
        torch.testing.assert_close(step(*given), module.step(*given))


@graphs
@pytest.mark.medium
def test_packed_sequences_compile_as_one_graph(case: Case):
    """As far as they are no longer than a piece, of methods that have pieces: where those begin is read."""
    torch._dynamo.reset()
    module, x = shaken(case.make()).float(), tokens()[:1].float().requires_grad_()
    at = torch.tensor(OFFSETS["some"])
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected, found = module(x, cu_seqlens=at), whole(x, cu_seqlens=at)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(out.square().sum(), x) for out, _ in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@graphs
@pytest.mark.medium
def test_exports(case: Case):
    module = in_small_pieces(shaken(case.make())).float().requires_grad_(False)
    batch = Dim("batch", max=64)
    program = export(module, (tokens().float(),), dynamic_shapes=({0: batch},))
    assert not [node.target for node in program.graph.nodes if "lineattn" in str(node.target)]
    x = torch.randn(3, T, C).float()
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-5, atol=1e-5)


@cases
def test_what_does_not_fit_is_refused(case: Case):
    module, x = case.make(), tokens()
    for wrong, message in (
        (x.mT, "tokens are"),
        (x[:, 0], "for step"),
        (torch.randn(B, T, C + 1), "tokens are"),
    ):
        with pytest.raises(InputError, match=message):
            module(wrong)
    with pytest.raises(InputError, match="one token is"):
        module.step(x)
    with pytest.raises(InputError, match="one a position"):
        module(x, mask=torch.ones(B, T))
    with pytest.raises(InputError, match="form is 'fast'"):
        module(x, form="fast")
    with pytest.raises(InputError, match="state"):
        module(x[:1], module(x)[1])
    with pytest.raises(InputError, match="heads is 3"):
        type(module)(C, heads=3)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("gla", {"rank": 0}), "rank is 0"),
        (Case("gla", {"tau": -1.0}), "tau is -1.0"),
        (Case("gla", {"key_width": 5}), "key_width is 5"),
        (Case("retention", {"heads": 8}), "no pairs to rotate"),
        (Case("retention", {"value_width": 3}), "value_width is 3"),
        (Case("softmax_attention", {"heads": 8}), "no pairs to rotate"),
        (Case("hgrn2", {"lower_bound": 1.0}), "lower_bound is 1.0"),
        (Case("s4d", {"state_width": 3}), "state_width is 3"),
        (Case("mamba2", {"state_width": 0}), "state_width is 0"),
        (Case("mamba2", {"expand": 0}), "expand is 0"),
        (Case("mamba", {"heads": 32}), "heads is 32; it must divide the 16 channels"),
        (Case("mamba", {"state_width": 0}), "state_width is 0"),
        (Case("mamba", {"rank": 0}), "rank is 0"),
        (Case("rwkv6", {"mix_rank": 0}), "mix_rank is 0"),
    ],
)
def test_arguments_are_checked(case: Case, message: str):
    with pytest.raises(InputError, match=message):
        case.make()


def test_parameters_of_the_kin():
    """GLA's decays cost 16 (C + C / 2) and a bias; RetNet's values are twice as wide."""
    counts = {
        "gla": 4 * C**2 + C + 24 * C + C // 2,
        "retention": 8 * C**2,
        "linear_attention": 4 * C**2,
        "softmax_attention": 4 * C**2,
        "hgrn2": 4 * C**2 + C,
        "mamba": 6 * C**2 + 2 * C * (1 + 2 * 16) + HEADS * (2 + 16) + 5 * 2 * C + 2 * C,
        "mamba2": 6 * C**2 + 2 * C * 128 + C * HEADS + 5 * (2 * C + 2 * 128) + 2 * C + 3 * HEADS,
        "rwkv6": 5 * C**2 + 448 * C + 10 * C,
        "s4d": 2 * C**2 + 3 * C + (2 * 64 + 1) * HEADS,
    }
    for method, expected in counts.items():
        assert sum(p.numel() for p in Case(method).make().parameters()) == expected, method


def test_a_fixed_decay_is_the_published_one():
    g = Case("retention", {"heads": 4}).make().weights(tokens())["g"]
    close(g.exp(), torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256]).expand_as(g), 1e-12)


def test_a_lower_bound_is_what_is_left_at_the_least():
    """And digits of a decay are not lost at either end: near the bound, and near one."""
    module = Case("hgrn2", {"lower_bound": 0.25}).make().float()
    torch.nn.init.zeros_(module.f_proj.weight)
    for logit, g, k in ((-200.0, math.log(0.25), 0.75), (30.0, -0.75 * math.exp(-30.0), 0.75 * math.exp(-30.0))):
        with torch.no_grad():
            module.f_proj.weight[:, 0] = logit
        parts = module.parts(torch.eye(1, C, dtype=torch.float32)[None])
        torch.testing.assert_close(parts.g, torch.full_like(parts.g, g), rtol=1e-5, atol=0)
        torch.testing.assert_close(parts.k, torch.full_like(parts.k, k), rtol=1e-5, atol=0)


def test_s4d_starts_as_published():
    """S4D-Lin, and steps between 0.001 and 0.1; the filter is that of the matrix."""
    module = S4D(C, state_width=6)
    rate, speed = module.log_A_real.exp(), module.A_imag
    close(rate, torch.full_like(rate, 0.5), 1e-6)
    close(speed, torch.tensor([0, math.pi, 2 * math.pi]).expand(C, 3), 1e-6)
    step = module.log_dt.exp()
    assert step.min() >= 0.001 and step.max() <= 0.1
    exact = (torch.exp(step[:, None] * torch.complex(-rate, speed)) - 1) / torch.complex(-rate, speed)
    close(module.parts(tokens(1)).k[0, 0].norm(dim=-1), exact.abs().square().sum(-1).sqrt())


def test_mamba2_forgets_a_head_as_a_whole():
    """One decay a head, between those of the start's slowest and fastest."""
    module = Case("mamba2").make()
    torch.nn.init.zeros_(module.in_proj.weight)
    g = module.weights(tokens())["g"]
    assert g.shape == (B, T, HEADS)
    assert g.min() >= -0.1 * 16 - 1e-6 and g.max() <= -0.001 * 1 + 1e-6


def test_mamba_starts_as_published():
    module = Mamba(C, state_width=3)
    close(module.A_log.exp(), torch.tensor([1.0, 2.0, 3.0]).expand(2 * C, 3), 1e-6)
    step = torch.nn.functional.softplus(module.dt_proj.bias)
    assert step.min() > 0.00099 and step.max() < 0.101


def test_rwkv6_reads_before_it_writes():
    """Without a bonus a token does not see itself; the one after reads it as it was written."""
    module = Case("rwkv6").make()
    torch.nn.init.zeros_(module.bonus)
    found = module.weights(tokens())
    q, k = (found[name].transpose(1, 2) for name in "qk")
    assert not found["attention"].triu(0).any()
    close(found["attention"].diagonal(-1, -2, -1), (q[:, :, 1:] * k[:, :, :-1]).sum(-1))
