"""KCLA's native kernels and operators against the O(L²) oracle, in the forms that PyTorch meets them in."""

from __future__ import annotations

import copy
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lineattn.nn.depth.kcla import KCLA, KCLAState
from lineattn.ops import native
from lineattn.ops.depth import Norm
from lineattn.ops.kcla import Form, Weights, kcla_plain
from lineattn.ops.kcla_operator import KEEP_EVERY, kcla
from tests.nn.chain import Case, build, draw, run_with_states
from tests.oracles import depth as oracle

pytestmark = pytest.mark.skipif(not native.enabled, reason="the native kernels are off")

CANCELLING = ("query.weight", "key.weight", "gate.weight")  # their gradients nearly cancel
VARIANTS = ("paper", "ref-cls", "ref-seg")


@contextmanager
def plain() -> Iterator[None]:
    """PyTorch's operators instead of the kernels."""
    native.enabled = False
    try:
        yield
    finally:
        native.enabled = True


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    expected = expected.detach().double()
    return ((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def chain(
    variant: str, channels: int, size: tuple[int, int], sites: int, batch: int, head_dim: int, **arguments: object
) -> tuple[nn.ModuleList, list[Tensor]]:
    stages = (("", channels, size, sites),)
    modules = build(Case("kcla", oracle.kcla, {"variant": variant}), head_dim=head_dim, stages=stages, **arguments)
    return modules.float(), [x.detach().float() for x in draw(batch=batch, stages=stages)[0]]


def differentiate(modules: nn.ModuleList, outs: list[Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, last state, and the gradients of everything, from a loss that reads all of them."""
    outs = [x.detach().requires_grad_() for x in outs]
    found, states = run_with_states(modules, outs, outs)
    state: KCLAState = states[-1]
    results = {"out": torch.stack(found), "mean": state.mean, "log_norm": state.log_norm}
    loss = sum((result * weight.to(result)).sum() for result, weight in zip(results.values(), weights, strict=True))
    modules.zero_grad()
    loss.backward()
    results["x"] = torch.stack([x.grad for x in outs])
    results |= {name: p.grad for name, p in modules.named_parameters()}
    return results | {name: b.clone() for name, b in modules.named_buffers() if "running" in name}


def loss_weights(modules: nn.ModuleList, outs: list[Tensor]) -> list[Tensor]:
    shape = outs[0].shape
    return [torch.randn(len(outs), *shape), torch.randn(shape), torch.randn(len(outs[0]), modules[0].head_count)]


FUZZ = random.Random(0)
SHAPES = [(2, 1, (1, 9), 1), (3, 13, (5, 6), 13), (9, 24, (4, 4), 4), (2, 40, (17, 3), 8), (8, 6, (2, 1), 2)] + [
    (FUZZ.randint(1, 10), h * d, (FUZZ.randint(1, 19), FUZZ.randint(2, 19)), d)
    for h, d in [(FUZZ.randint(1, 5), FUZZ.randint(1, 17)) for _ in range(10)]
]


@pytest.mark.medium
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("batch", "channels", "size", "head_dim"), SHAPES, ids=str)
def test_fuzz(batch: int, channels: int, size: tuple[int, int], head_dim: int, training: bool):
    """Values and gradients of a chain that keeps a mean on its way, in float64 and in PyTorch's float32."""
    draws = random.Random(repr((batch, channels, size, training)))
    variant, init = draws.choice(VARIANTS), draws.choice(("identity", "paper"))
    layout = draws.choice((torch.channels_last, torch.contiguous_format))
    modules, outs = chain(variant, channels, size, KEEP_EVERY + 3, batch, head_dim, init=init)
    with torch.no_grad():  # no value is so near to zero that rounding decides whether the ReLU lets it through
        for module in modules:
            module.norm.bias.copy_(torch.where(torch.rand(channels) < 0.7, 50.0, -50.0))
    outs = [x.to(memory_format=layout) for x in outs]
    modules.train(training)
    weights = loss_weights(modules, outs)
    exact, eager = copy.deepcopy(modules).double(), copy.deepcopy(modules)
    found = differentiate(modules, outs, weights)
    expected = differentiate(exact, [x.double() for x in outs], weights)
    with plain():
        usual = differentiate(eager, outs, weights)
    for name, value in expected.items():
        error, other = distance(found[name], value), distance(usual[name], value)
        bound = 1e-6 if name in ("out", "mean", "log_norm") or "running" in name else 1e-5
        if name.endswith(CANCELLING):
            if batch == 1 and training:
                continue  # the norm of a single sample takes its gate out: what is left of the gradient is rounding
            bound = 5e-4
        assert error <= max(bound, 2 * other), f"{name}: {error:.1e}, eager {other:.1e} ({variant}, {init}, {layout})"
    with torch.no_grad():
        direct = torch.stack(run_with_states(modules.eval(), outs, outs)[0])
        reference = torch.stack(run_with_states(exact.eval(), [x.double() for x in outs], outs)[0])
    assert distance(direct, reference) < 2e-6


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_oracle(variant: str, training: bool):
    """Values and gradients against the oracle that forms every weighted mean anew."""
    modules, outs = chain(variant, 24, (5, 4), 10, 3, 8, init="paper")
    modules.train(training)
    exact, outs = copy.deepcopy(modules).double(), [x.requires_grad_() for x in outs]
    doubles = [x.detach().double().requires_grad_() for x in outs]
    expected = oracle.kcla(exact, doubles, variant=variant)
    found, _ = run_with_states(modules, outs, outs)
    assert max(distance(f, e) for f, e in zip(found, expected, strict=True)) < 1e-6
    sum(x.sin().sum() for x in found).backward()
    sum(x.sin().sum() for x in expected).backward()
    assert max(distance(f.grad, e.grad) for f, e in zip(outs, doubles, strict=True)) < 1e-5
    for (name, f), e in zip(modules.named_parameters(), exact.parameters(), strict=True):
        assert distance(f.grad, e.grad) < (5e-4 if name.endswith(CANCELLING) else 1e-5), name


@pytest.mark.parametrize("batch", [1, 9], ids=["bands of rows", "whole images"])
def test_threads_and_instructions(batch: int):
    """One thread or two: the same bits. Another instruction set: the same numbers."""
    modules, outs = chain("paper", 40, (18, 6), 3, batch, 8, init="paper")
    modules.train()
    weights = loss_weights(modules, outs)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = differentiate(copy.deepcopy(modules), outs, weights)
        torch.set_num_threads(2)
        two = differentiate(copy.deepcopy(modules), outs, weights)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[name], two[name]) for name in one)
    for i in range(len(native.instructions())):
        native.library().lineattn_choose(i)
        try:
            other = differentiate(copy.deepcopy(modules), outs, weights)
        finally:
            native.library().lineattn_choose(0)
        for name, value in one.items():
            assert distance(other[name], value) < (1e-3 if name.endswith(CANCELLING) else 1e-5), name


def cut(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=3)[..., : x.shape[3]]


def spread(x: Tensor) -> Tensor:
    return torch.stack([x, -x], dim=-1)[..., 0]


@pytest.mark.parametrize("strided", [cut, spread, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)])
def test_strides(strided: Callable[[Tensor], Tensor]):
    modules, outs = chain("paper", 8, (5, 5), 3, 2, 4, init="paper")
    expected, _ = run_with_states(modules.eval(), outs, outs)
    odd = [strided(x) for x in outs]
    assert not any(x.is_contiguous() for x in odd)
    found, _ = run_with_states(modules, odd, odd)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_layout_is_kept():
    modules, outs = chain("paper", 8, (5, 4), 2, 2, 4, init="paper")
    for layout in (torch.channels_last, torch.contiguous_format):
        maps = [x.to(memory_format=layout).requires_grad_() for x in outs]
        found, _ = run_with_states(modules, maps, maps)
        assert all(x.is_contiguous(memory_format=layout) for x in found)
        sum(x.square().sum() for x in found).backward()
        assert all(x.grad.is_contiguous(memory_format=layout) for x in maps)


def test_far_from_zero():
    """A batch far from zero has the variance that it has: sums of squares would have lost it."""
    modules, outs = chain("paper", 8, (9, 8), 1, 9, 4, init="paper")
    outs = [x + 3000 for x in outs]
    expected = copy.deepcopy(modules).double().train()
    run_with_states(modules.train(), outs, outs)
    run_with_states(expected, [x.double() for x in outs], outs)
    with plain():
        usual = copy.deepcopy(modules)
        run_with_states(usual, outs, outs)
    error = distance(modules[0].norm.running_var, expected[0].norm.running_var)
    assert error < 1e-3


def test_nan_stays_nan():
    modules, outs = chain("paper", 8, (5, 4), 2, 3, 4, init="paper")
    outs[0][1, 2, 3, 3] = float("nan")
    with torch.no_grad():
        found, _ = run_with_states(modules.eval(), outs, outs)
    assert found[0][1].isnan().any() and found[1][1].isnan().any()
    assert found[0][[0, 2]].isfinite().all()


def test_empty_and_single():
    modules, _ = chain("paper", 8, (5, 4), 1, 1, 4)
    assert modules.eval()[0](torch.zeros(0, 8, 5, 4), None, None)[0].shape == (0, 8, 5, 4)
    with pytest.raises(ValueError, match="more than 1 value"):
        modules.train()[0](torch.zeros(1, 8, 1, 1), None, None)


def test_retained_graph_and_checkpointing():
    """A second backward through a kept graph, and one through graphs made anew, give the first one's gradients."""
    modules, outs = chain("paper", 8, (6, 5), KEEP_EVERY + 2, 3, 4, init="paper")
    modules.eval()  # in training the running statistics would be counted twice here
    leaves = [x.requires_grad_() for x in outs]

    def loss(again: bool) -> Tensor:
        total, state = torch.zeros(()), None
        for module, x in zip(modules, leaves, strict=True):
            out, state = checkpoint(module, x, None, state, use_reentrant=False) if again else module(x, None, state)
            total = total + (out * out.detach().cos()).sum()
        return total

    def gradients(value: Tensor, **kw: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, [*leaves, *modules.parameters()], **kw)

    kept = loss(again=False)
    first, second = gradients(kept, retain_graph=True), gradients(kept)
    anew = gradients(loss(again=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, anew, strict=True))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_second_derivatives(training: bool):
    """Through the state too: the mean before is rebuilt from what has been kept, and stays part of the graph."""
    modules, outs = chain("paper", 8, (4, 3), 4, 3, 4, init="paper")
    modules.train(training)

    def penalty(net: nn.ModuleList, maps: list[Tensor]) -> tuple[Tensor, ...]:
        maps = [x.detach().requires_grad_() for x in maps]
        found, states = run_with_states(net, maps, maps)
        value = found[-1].sin().sum() + states[-1].mean.square().sum()
        grads = torch.autograd.grad(value, maps, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), [*maps, *net.parameters()], allow_unused=True)

    expected = penalty(copy.deepcopy(modules).double(), [x.double() for x in outs])
    found = penalty(modules, outs)
    for f, e in zip(found, expected, strict=True):
        e = torch.zeros_like(f, dtype=torch.float64) if e is None else e
        assert distance(f, e) < 5e-4 or (f.double() - e).norm() < 1e-5


def arguments(training: bool, start: bool) -> tuple:
    """What the operator takes, for a map of 2x8x5x4."""
    modules, outs = chain("paper", 8, (5, 4), 3, 2, 4, init="identity")
    module: KCLA = modules[1]
    x, base, old = (t.to(memory_format=torch.channels_last).detach().requires_grad_() for t in outs)
    log_norm, before, score = (torch.rand(2, 2, dtype=torch.float32) for _ in range(3))
    state = (None, None, None, None, [], []) if start else (base, log_norm, base, before, [old], [score])
    statistics = (None, None) if training else (module.norm.running_mean, module.norm.running_var)
    weights = (module.query.weight, module.key.weight, module.inv_temperature, module.gate.weight, module.value.weight)
    return (x, *state, *weights, module.norm.weight, module.norm.bias, *statistics, module.gain,
            torch.tensor([0.0, 1.25], dtype=torch.float32), True, training, None, 0.0, 1e-5)  # fmt: skip


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own copies
@pytest.mark.parametrize("start", [True, False], ids=["start", "later"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_opcheck(training: bool, start: bool):
    torch.library.opcheck(torch.ops.lineattn.kcla, arguments(training, start))


@pytest.mark.medium
@pytest.mark.parametrize("start", [True, False], ids=["start", "later"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_opcheck_of_the_backward(training: bool, start: bool):
    x, mean, log_norm, *rest = pytree.tree_map_only(Tensor, Tensor.detach, list(arguments(training, start)))
    kept, parameters, statistics, factors, constants = rest[:4], rest[4:11], rest[11:13], rest[13:15], rest[15:]
    with torch.no_grad():
        found = torch.ops.lineattn.kcla(x, mean, log_norm, *kept, *parameters, *statistics, *factors, *constants)
    _, after, total, _, pooled, *batch = found
    grads = (torch.randn_like(x), None if start else torch.randn_like(after), torch.randn_like(total), None)
    known = (x, *kept, log_norm, total, pooled)
    statistics = batch if training else statistics
    given = (*grads, *known, *parameters, *statistics, *factors, *constants)
    torch.library.opcheck(torch.ops.lineattn.kcla_backward, given)


@pytest.mark.parametrize("missing", ["log_norm", "statistics", "scores", "base_log_norm", "norm_mean"])
def test_arguments_that_go_together(missing: str):
    """The operators refuse what the kernels would read through a null pointer."""
    given = pytree.tree_map_only(Tensor, Tensor.detach, list(arguments(training=False, start=False)))
    x, mean, log_norm, base, base_log_norm, maps, scores = given[:7]
    parameters, statistics, rest = given[7:14], given[14:16], given[16:]
    if missing in ("log_norm", "statistics"):
        before = None if missing == "log_norm" else log_norm
        statistics = [None, None] if missing == "statistics" else statistics
        with pytest.raises(ValueError, match=r"go together|has statistics"):
            torch.ops.lineattn.kcla(x, mean, before, base, base_log_norm, maps, scores, *parameters, *statistics, *rest)
        return
    scores = [] if missing == "scores" else scores
    base_log_norm = None if missing == "base_log_norm" else base_log_norm
    statistics = [None, statistics[1]] if missing == "norm_mean" else statistics
    small = (log_norm, log_norm, x.new_zeros(2, 8))
    known = (x, base, base_log_norm, maps, scores, *small)
    with pytest.raises(ValueError, match=r"go together|has statistics|have 0 scores"):
        torch.ops.lineattn.kcla_backward(x, None, None, None, *known, *parameters, *statistics, *rest)


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str):
    """The whole chain is one graph, with our operator in it, and trains as without a compiler."""
    modules, outs = chain("paper", 16, (6, 5), 3, 3, 8, init="paper")
    modules.train()
    weights = loss_weights(modules, outs)
    expected = differentiate(copy.deepcopy(modules), outs, weights)
    compiled = nn.ModuleList(copy.deepcopy(modules))

    def whole(maps: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        found, states = run_with_states(compiled, maps, maps)
        return found, states[-1].mean, states[-1].log_norm

    torch._dynamo.reset()
    maps = [x.requires_grad_() for x in outs]
    found, mean, log_norm = torch.compile(whole, fullgraph=True, backend=backend)(maps)
    results = torch.stack(found), mean, log_norm
    sum((result * weight.to(result)).sum() for result, weight in zip(results, weights, strict=True)).backward()
    assert distance(torch.stack(found), expected["out"]) < 1e-6
    assert distance(torch.stack([x.grad for x in maps]), expected["x"]) < 1e-5
    for name, parameter in compiled.named_parameters():
        assert distance(parameter.grad, expected[name]) < (1e-3 if name.endswith(CANCELLING) else 1e-5), name
    for name, buffer in compiled.named_buffers():
        if "running" in name:
            assert distance(buffer, expected[name]) < 1e-6


@pytest.mark.medium
def test_export_has_no_operator_of_ours():
    modules, outs = chain("paper", 8, (5, 4), 2, 2, 4, init="paper")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = modules

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return run_with_states(self.chain, [a, b], [a, b])[0][-1]

    net = Net().eval()
    program = torch.export.export(net, tuple(outs))
    assert not [node for node in program.graph.nodes if "lineattn" in str(node.target)]
    with torch.no_grad():
        assert distance(program.module()(*outs), net(*outs)) < 1e-6


def test_a_state_from_elsewhere():
    """What a transition or a caller made has no past; the mean itself is kept then."""
    modules, outs = chain("paper", 8, (5, 4), 2, 2, 4, init="paper")
    state = KCLAState(outs[0].detach().requires_grad_(), torch.rand(2, 2, dtype=torch.float32).requires_grad_())
    expected = KCLAState(*(t.detach().double().requires_grad_() for t in state[:2]))
    out, after = modules[1].eval()(outs[1], None, state)
    reference, _ = copy.deepcopy(modules[1]).double()(outs[1].double(), None, expected)
    out.sin().sum().backward()
    reference.sin().sum().backward()
    assert after.past is not None and after.past.base is state.mean
    assert distance(out, reference) < 1e-6
    assert distance(state.mean.grad, expected.mean.grad) < 1e-5
    assert distance(state.log_norm.grad, expected.log_norm.grad) < 1e-5


def replaced(state: KCLAState) -> KCLAState:
    return state._replace(mean=state.mean * 3)


def shifted(state: KCLAState) -> KCLAState:
    return state._replace(log_norm=state.log_norm - 2)


def overwritten(state: KCLAState) -> KCLAState:
    with torch.no_grad():
        state.mean.mul_(3)
    return state


@pytest.mark.parametrize("change", [replaced, shifted, overwritten])
def test_a_changed_state(change: Callable[[KCLAState], KCLAState]):
    """The past belongs to the state that it came with: where somebody changes that, the mean itself is kept."""
    modules, outs = chain("paper", 8, (5, 4), 4, 2, 4, init="paper")

    def gradients(net: nn.ModuleList, maps: list[Tensor]) -> list[Tensor]:
        maps = [x.detach().requires_grad_() for x in maps]
        _, states = run_with_states(net[:3], maps[:3], maps[:3])
        out, _ = net[3](maps[3], None, change(states[-1]))
        return list(torch.autograd.grad(out.sin().sum(), maps[3:] if change is overwritten else maps))

    expected = gradients(copy.deepcopy(modules).double().eval(), [x.double() for x in outs])
    found = gradients(modules.eval(), outs)
    assert max(distance(f, e) for f, e in zip(found, expected, strict=True)) < 1e-5


def test_evaluation_before_training():
    """A training step between an evaluation and its backward writes the statistics, not what has been saved."""
    modules, outs = chain("paper", 8, (5, 4), 2, 3, 4, init="paper")

    def gradients(net: nn.ModuleList, maps: list[Tensor]) -> list[Tensor]:
        maps = [x.detach().requires_grad_() for x in maps]
        loss = sum(run_with_states(net.train(mode), maps, maps)[0][-1].sin().sum() for mode in (False, True))
        return list(torch.autograd.grad(loss, maps))

    expected = gradients(copy.deepcopy(modules).double(), [x.double() for x in outs])
    found = gradients(modules, outs)
    assert max(distance(f, e) for f, e in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["key.weight", "value.weight", "norm.bias", "gate.weight"])
def test_second_derivatives_of_one_argument(name: str):
    """Results that hang on frozen arguments alone have no graph, and are left out."""
    modules, outs = chain("paper", 8, (4, 3), 3, 3, 4, init="paper")

    def penalty(net: nn.ModuleList, maps: list[Tensor]) -> Tensor:
        net.eval().requires_grad_(False)
        parameter = net[1].get_parameter(name).requires_grad_()
        found, states = run_with_states(net, maps, maps)
        value = found[-1].sin().sum() + found[1].sin().sum() + states[-1].mean.square().sum()
        (grad,) = torch.autograd.grad(value, parameter, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), parameter)[0]

    expected = penalty(copy.deepcopy(modules).double(), [x.double() for x in outs])
    assert distance(penalty(modules, outs), expected) < 5e-4


def test_gradients_that_the_kernels_lack():
    """A learned temperature goes through PyTorch."""
    draw32 = lambda *shape: torch.randn(*shape, dtype=torch.float32)  # noqa: E731
    parameters = (draw32(1, 1, 3), draw32(1, 1, 3), draw32(2).exp(), None, draw32(4, 1, 3, 3))
    norm = Norm(None, draw32(4), None, None, training=False, momentum=0.0, eps=0.0)
    x, mean, log_norm = draw32(2, 4, 5, 5), draw32(2, 4, 5, 5), draw32(2, 2)

    def gradient(dtype: torch.dtype) -> Tensor:
        weights = Weights(*(None if w is None else w.to(dtype) for w in parameters))
        weights.inv_temperature.requires_grad_()
        offset = norm._replace(bias=norm.bias.to(dtype))
        out, *_ = kcla(*(t.to(dtype) for t in (x, mean, log_norm)), weights=weights, form=Form(), norm=offset)
        return torch.autograd.grad(out.sin().sum(), weights.inv_temperature)[0]

    assert distance(gradient(torch.float32), gradient(torch.float64)) < 1e-5


@pytest.mark.parametrize("kernel", [1, 5])
def test_other_kernels_go_through_torch(kernel: int):
    """A value that is not 3x3 is none of the native kernels'."""
    x = torch.randn(2, 4, 6, 6, dtype=torch.float32)
    weights = Weights(
        torch.randn(1, 1, 3), torch.randn(1, 1, 3), torch.ones(2), None, torch.randn(4, 1, kernel, kernel)
    )
    weights = Weights(*(None if w is None else w.float() for w in weights))
    norm = Norm(None, torch.zeros(4, dtype=torch.float32), None, None, training=False, momentum=0.0, eps=0.0)
    out, *_ = kcla(x, weights=weights, form=Form(), norm=norm)
    expected, *_ = kcla_plain(x, None, None, weights=weights, form=Form(), norm=norm, gain=None, drop=None)
    assert torch.equal(out, expected)


@pytest.mark.medium
def test_memory_is_flat():
    modules, outs = chain("paper", 16, (12, 12), 2, 9, 16, init="paper")
    modules.train()
    leaves = [x.requires_grad_() for x in outs]

    def steps(count: int) -> int:
        for _ in range(count):
            run_with_states(modules, leaves, leaves)[0][-1].sum().backward()
            with torch.no_grad():
                run_with_states(modules, leaves, leaves)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = steps(100)
    assert steps(1000) - before < 4 * 1024  # KiB
