"""What holds for every method of the depth axis."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lineattn import registry
from lineattn.errors import InputError
from lineattn.nn.depth.base import Site
from tests.nn.chain import CASES, Case, build, draw, run, run_with_states, worst

TWO_STAGES = (("", 8, (5, 6), 3), ("", 16, (3, 3), 3))
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
methods = pytest.mark.parametrize(  # where the published scores of KCLA change nothing
    "case", [c for c in CASES if c.arguments.get("variant") not in ("ref-cls", "ref-det0")], ids=lambda case: case.id
)
normed = pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.has_norm and c.arguments.get("variant") not in ("ref-cls", "ref-det0")],
    ids=lambda case: case.id,
)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def test_every_registered_method_is_tested_here():
    assert {case.method for case in CASES} == set(registry.list_methods("depth"))


@cases
@both_modes
def test_identity_at_start(case: Case, training: bool):
    chain, (outs, shortcuts) = build(case, drop_path=0.2).train(training), draw()
    with torch.no_grad():
        for module in chain:
            module.gain.zero_()
    assert all(map(torch.equal, run(chain, outs, shortcuts), outs))


@methods
def test_constructed_gain_is_zero(case: Case):
    assert torch.equal(case.make(Site(8)).gain, torch.zeros(8))
    assert case.make(Site(8), init="paper").gain is None


@cases
def test_samples_do_not_see_each_other(case: Case):
    chain, (outs, shortcuts) = build(case).eval(), draw()
    before = run(chain, outs, shortcuts)
    with torch.no_grad():
        for x in (*outs, *shortcuts):
            x[0] += torch.randn_like(x[0])
    after = run(chain, outs, shortcuts)
    assert worst([y[1:] for y in after], [y[1:] for y in before]) < 1e-14
    assert all((a[0] - b[0]).abs().max() > 1e-3 for a, b in zip(after, before, strict=True))


@cases
@both_modes
def test_no_dead_parameter(case: Case, training: bool):
    chain, (outs, shortcuts) = build(case, stages=TWO_STAGES).train(training), draw(stages=TWO_STAGES)
    loss = sum((y * torch.randn_like(y)).sum() for y in run(chain, outs, shortcuts))
    loss.backward()
    excused = {name for name, _reason in registry.get(case.method).no_gradient}
    dead = []
    for module in chain:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, f"{name} at {module.site} is never called"
            rounding = 1e-12 if name in excused else 0  # what may be left of a zero that is a difference
            if parameter.grad.abs().max() <= rounding:
                dead.append((module.site.entry, name))
    assert set(dead) == {("start", name) for name in excused - set(case.learns)}
    assert excused >= set(case.learns)


@cases
@both_modes
def test_zero_maps(case: Case, training: bool):
    """A block may put out nothing but zeros; a key then has no direction."""
    chain, (outs, shortcuts) = build(case).train(training), draw()
    outs, shortcuts = ([torch.zeros_like(x).requires_grad_() for x in maps] for maps in (outs, shortcuts))
    results = run(chain, outs, shortcuts)
    sum(y.sum() for y in results).backward()
    gradients = [x.grad for x in (*outs, *chain.parameters()) if x.grad is not None]
    assert all(t.isfinite().all() for t in (*results, *gradients))


@cases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both_modes
def test_half_precision(case: Case, dtype: torch.dtype, training: bool):
    chain, (outs, shortcuts) = build(case, stages=TWO_STAGES).train(training), draw(stages=TWO_STAGES)
    if case.method in ("layer_linear", "layer_focused"):
        for module in chain:  # shares without a denominator grow with the query, here beyond float16
            module.query.weight.data.mul_(0.05)
    expected = run(copy.deepcopy(chain), outs, shortcuts)
    halves = [[x.detach().to(dtype).requires_grad_() for x in maps] for maps in (outs, shortcuts)]
    found = run(chain.to(dtype), *halves)
    sum(y.float().mean() for y in found).backward()
    assert all(y.dtype == dtype for y in found)
    assert all(p.grad is None or p.grad.isfinite().all() for p in chain.parameters())
    assert worst([y.double() for y in found], expected) < 40 * torch.finfo(dtype).eps


@methods
def test_autocast_keeps_float32_where_it_was(case: Case):
    """Nothing leaves float32 that stood there: keys, scores and the state's normaliser."""
    chain, (outs, shortcuts) = build(case).eval().float(), draw()
    outs, shortcuts = ([x.detach().float() for x in maps] for maps in (outs, shortcuts))
    expected = run(chain, outs, shortcuts)
    with torch.autocast("cpu", torch.bfloat16):
        found, states = run_with_states(chain, outs, shortcuts)
        exposed = chain[0].weights(outs[0], shortcuts[0], None)
    assert all(t.dtype == torch.float32 for t in (*found, *exposed.values()))
    assert case.method != "kcla" or all(s.mean.dtype == s.log_norm.dtype == torch.float32 for s in states)
    assert worst(found, expected) < 40 * torch.finfo(torch.bfloat16).eps


@normed
@pytest.mark.parametrize("momentum", [0.1, None, 0.0], ids=["0.1", "cumulative", "0"])
def test_running_statistics(case: Case, momentum: float | None):
    """Each training step moves them once, as PyTorch's own module does; evaluation leaves them alone."""
    chain = build(case, stages=TWO_STAGES)
    for norm in (m for m in chain.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = momentum
    reference = _plainly_normed(chain)
    for step in range(3):
        outs, shortcuts = draw(stages=TWO_STAGES)
        found, expected = run(chain.train(), outs, shortcuts), run(reference.train(), outs, shortcuts)
        assert worst(found, expected) < 1e-12
        sum(y.sum() for y in found).backward()  # the recomputation must not count
        run(chain.eval(), outs, shortcuts)
        ours, theirs = dict(chain.named_buffers()), dict(reference.named_buffers())
        assert {int(b) for name, b in ours.items() if name.endswith("num_batches_tracked")} == {step + 1}
        assert all(torch.allclose(ours[name], b, rtol=1e-12, atol=1e-12) for name, b in theirs.items())


class _OtherBatchNorm(nn.BatchNorm2d):
    """Not the class that is computed with its data: called as a module."""


def _plainly_normed(chain: nn.ModuleList) -> nn.ModuleList:
    chain = copy.deepcopy(chain)
    for norm in (m for m in chain.modules() if type(m) is nn.BatchNorm2d):
        norm.__class__ = _OtherBatchNorm
    return chain


@normed
@both_modes
def test_another_norm_is_called_as_it_is(case: Case, training: bool):
    chain, (outs, shortcuts) = build(case).train(training), draw()
    expected = run(chain, outs, shortcuts)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(chain))
    assert type(synchronised[0].norm) is nn.SyncBatchNorm
    assert worst(run(synchronised, outs, shortcuts), expected) < 1e-12
    for module in chain:
        module.norm = nn.GroupNorm(2, module.site.channels)
    grouped = run(chain, outs, shortcuts)
    assert all(y.isfinite().all() for y in grouped) and worst(grouped, expected) > 1e-3


@normed
def test_norm_without_running_statistics(case: Case):
    chain, (outs, shortcuts) = build(case).train(), draw()
    expected = run(chain, outs, shortcuts)
    for norm in (m for m in chain.eval().modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    assert worst(run(chain, outs, shortcuts), expected) < 1e-12


@normed
def test_frozen_norm_in_a_training_module(case: Case):
    """Detection keeps batch norms in evaluation while the rest trains."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    expected = run(chain, outs, shortcuts)
    for module in chain.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert worst(run(chain, outs, shortcuts), expected) == 0
    assert all(int(b) == 0 for name, b in chain.named_buffers() if name.endswith("num_batches_tracked"))


@cases
@both_modes
def test_fold_gain(case: Case, training: bool):
    """Where it can be folded; a method that multiplies or replaces has no form without a gain but that of gain one."""
    chain, (outs, shortcuts) = build(case).train(training), draw()
    with torch.no_grad():
        for module in chain:
            if not case.has_norm:
                module.gain.fill_(1)
            elif module.relu:
                module.gain.abs_()
    expected = run(copy.deepcopy(chain), outs, shortcuts)
    for module in chain:
        module.fold_gain()
    assert worst(run(chain, outs, shortcuts), expected) < 1e-13
    assert not any(name.endswith("gain") for name in chain.state_dict())
    build(case, init="paper").load_state_dict(chain.state_dict())
    chain[0].fold_gain()
    assert worst(run(chain, outs, shortcuts), expected) < 1e-13, "nothing is left to fold"


@methods
def test_fold_gain_refuses_what_would_change(case: Case):
    chain = build(case, stages=TWO_STAGES)
    before = copy.deepcopy(chain[0].state_dict())
    with torch.no_grad():
        before["gain"][2] = chain[0].gain[2] = -1.0
    if case.has_norm and not chain[0].relu:
        chain[0].fold_gain()
        return
    with pytest.raises(InputError, match=("gains are negative.*" if case.has_norm else "") + "init='identity'"):
        chain[0].fold_gain()
    assert all(torch.equal(before[name], t) for name, t in chain[0].state_dict().items())


@cases
@both_modes
def test_fuse_is_the_evaluation(case: Case, training: bool):
    chain, (outs, shortcuts) = build(case), draw()
    assert any((module.gain < 0).any() for module in chain) and any((module.gain > 0).any() for module in chain)
    expected = run(chain.eval(), outs, shortcuts)
    before = copy.deepcopy(chain.train(training).state_dict())
    fused = nn.ModuleList(module.fuse() for module in chain).eval()
    assert worst(run(fused, outs, shortcuts), expected) < 1e-12
    again = nn.ModuleList(module.fuse() for module in fused)
    assert worst(run(again, outs, shortcuts), expected) < 1e-12
    assert all(torch.equal(t, chain.state_dict()[name]) for name, t in before.items())


@methods
def test_weights_of_another_init(case: Case):
    for ours, theirs in (("identity", "paper"), ("paper", "identity")):
        chain = build(case, init=ours, stages=TWO_STAGES)
        with pytest.raises(InputError, match=rf"gain.*trained with init='{theirs}'.*module has init='{ours}'"):
            chain.load_state_dict(build(case, init=theirs, stages=TWO_STAGES).state_dict(), strict=False)


@methods
def test_loads_what_it_saves(case: Case):
    chain, (outs, shortcuts) = build(case).eval(), draw()
    other = build(case).eval()
    other.load_state_dict(chain.state_dict())
    assert worst(run(other, outs, shortcuts), run(chain, outs, shortcuts)) == 0


@methods
def test_two_forwards_before_one_backward(case: Case):
    """Nothing is written to the module that the second forward could overwrite for the first."""
    chain, first, second = build(case).train(), draw(), draw()

    def gradients(*losses: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(sum(losses), list(chain.parameters()), allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    def loss(drawn: tuple[list[Tensor], list[Tensor]]) -> Tensor:
        return sum(y.square().mean() for y in run(chain, *drawn))

    apart = [a + b for a, b in zip(gradients(loss(first)), gradients(loss(second)), strict=True)]
    assert worst(gradients(loss(first), loss(second)), apart) < 1e-12


@methods
def test_activation_checkpointing(case: Case):
    chain, (outs, shortcuts) = build(case, drop_path=0.3).train(), draw()

    def results(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(1)  # the same samples are dropped
        found, state = [], None
        for module, x, shortcut in zip(chain, outs, shortcuts, strict=True):
            state = None if module.site.entry == "start" else state
            if checkpointed:
                y, state = checkpoint(module, x, shortcut, state, use_reentrant=False)
            else:
                y, state = module(x, shortcut, state)
            found.append(y)
        return found

    def gradients(checkpointed: bool) -> list[Tensor]:
        chain.zero_grad()
        for x in (*outs, *shortcuts):
            x.grad = None
        sum(y.square().mean() for y in results(checkpointed)).backward()
        return [x.grad for x in (*outs, *chain.parameters()) if x.grad is not None]

    expected, found = gradients(False), gradients(True)
    assert len(found) == len(expected) and worst(found, expected) < 1e-12


@cases
def test_second_derivatives(case: Case):
    """The gradient that can be differentiated again is the gradient, through the whole chain."""
    chain, (outs, shortcuts) = build(case, stages=TWO_STAGES).train(), draw(stages=TWO_STAGES)
    inputs = [*outs, *chain.parameters()]

    def gradients(create_graph: bool) -> list[Tensor]:
        loss = sum(y.square().mean() for y in run(chain, outs, shortcuts))
        found = torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    first = gradients(create_graph=True)
    assert worst(first, gradients(create_graph=False)) < 1e-12
    reference = _plainly_normed(chain)
    loss = sum(y.square().mean() for y in run(reference, outs, shortcuts))
    plain = torch.autograd.grad(loss, outs, create_graph=True)
    second, expected = (
        torch.autograd.grad(sum(g.square().sum() for g in found), outs) for found in (first[: len(outs)], plain)
    )
    assert worst(second, expected) < 1e-10


@methods
def test_channels_last(case: Case):
    chain, (outs, shortcuts) = build(case).train(), draw()
    expected = run(chain, outs, shortcuts)
    outs, shortcuts = ([x.contiguous(memory_format=torch.channels_last) for x in maps] for maps in (outs, shortcuts))
    found, states = run_with_states(chain, outs, shortcuts)
    assert worst(found, expected) < 1e-12
    kept = [*found, *(s.mean for s in states if case.method == "kcla")]
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in kept)


@pytest.mark.parametrize(
    ("site", "arguments", "message"),
    [
        (Site(8), {"head_dim": 3}, "head_dim=3 does not divide the 8 channels"),
        (Site(8), {"head_dim": 0}, "head_dim=0"),
        (Site(8), {"drop_path": 1.0}, "drop_path is 1.0"),
        (Site(8), {"init": "zero"}, "init is 'zero'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@methods
def test_bad_arguments(case: Case, site: Site, arguments: dict, message: str):
    if not all(map(case.takes, arguments)):
        pytest.skip("the method has no such argument")
    with pytest.raises(InputError, match=message):
        case.make(site, **arguments)


@pytest.mark.parametrize("case", [c for c in CASES if not c.cls.carries], ids=lambda case: case.id)
def test_methods_of_one_stage_refuse_a_transition(case: Case):
    with pytest.raises(InputError, match="can't carry its state across stages; use scope='per_stage'"):
        case.make(Site(8, entry="transition", prev_channels=4))
