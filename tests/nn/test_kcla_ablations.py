"""What each ablation of KCLA takes away, and that the rest is KCLA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lineattn.nn.depth.base import Site
from lineattn.nn.depth.kcla_no_exp import KCLANoExp
from lineattn.nn.depth.kcla_no_gate import KCLANoGate
from tests.nn.chain import CASES, Case, build, draw, run, run_with_states, worst
from tests.oracles.depth import depthwise_3x3, on_maps

ABLATIONS = [case for case in CASES if case.method in ("kcla_no_exp", "kcla_no_gate", "kcla_static_value")]
ablations = pytest.mark.parametrize("case", ABLATIONS, ids=lambda case: case.id)
PAPER = next(case for case in CASES if case.arguments.get("variant") == "paper")
ONE_STAGE = (("", 8, (5, 6), 6),)


def named(method: str) -> Case:
    return next(case for case in ABLATIONS if case.method == method)


def beside_kcla(method: str, **stages: tuple) -> tuple[nn.ModuleList, nn.ModuleList, set[str]]:
    """KCLA's chain and the ablation's with the same numbers, in evaluation; and which of KCLA's parts that has not."""
    kcla = build(PAPER, **stages).eval()
    ours = build(named(method), **stages).eval()
    missing, unexpected = ours.load_state_dict(kcla.state_dict(), strict=False)
    assert not missing
    return kcla, ours, {name.split(".", 1)[1] for name in unexpected}


def test_no_exp_is_kcla_with_the_lengths_for_scores():
    kcla, ours, gone = beside_kcla("kcla_no_exp")
    (outs, _), before, state = draw(), None, None
    for theirs, module, x in zip(kcla, ours, outs, strict=True):
        scores = module.weights(x, None, state)["score"]
        if module.site.entry != "transition":
            # Without the temperatures, which differ between the heads of one and not of the other.
            lengths = theirs.weights(x, None, before)["score"] * theirs.head_temperatures()
            assert worst([scores.exp() * module.head_temperatures()], [lengths]) < 1e-12
        before, state = theirs(x, None, before)[1], module(x, None, state)[1]
    assert not gone


def test_no_exp_knows_no_unit():
    """Keys of another length, all alike, leave the shares: neither a temperature nor a gain could change them."""
    chain, (outs, shortcuts) = build(named("kcla_no_exp")).eval(), draw()
    expected = run(chain, outs, shortcuts)
    with torch.no_grad():
        for module in chain:
            module.key.weight.mul_(7)
            if module.transition is not None:
                module.transition.key.weight.mul_(7)
    assert worst(run(chain, outs, shortcuts), expected) < 1e-12


@pytest.mark.parametrize("zeros", [1, 3], ids=["the first layer's key", "all keys"])
def test_no_exp_of_keys_without_length(zeros: int):
    """A layer without a key weighs next to nothing beside others; where no layer has one, all weigh the same."""
    first, later = KCLANoExp(Site(8), head_dim=4, init="paper"), KCLANoExp(Site(8, entry="continue"), head_dim=4)
    outs = [torch.zeros(2, 8, 3, 3) if t < zeros else torch.randn(2, 8, 3, 3) + 1 for t in range(3)]
    outs = [x.requires_grad_() for x in outs]
    _, state = first(outs[0], None, None)
    for x in outs[1:]:
        share = later.weights(x, None, state)["share"]
        result, state = later(x, None, state)
    assert torch.allclose(share, torch.full_like(share, 1 / 3)) == (zeros == 3)
    (result.square().sum() + state.log_norm.sum() + state.mean.square().sum()).backward()
    assert all(x.grad.isfinite().all() for x in outs)
    assert later.key.weight.grad.isfinite().all() and first.key.weight.grad.isfinite().all()


def test_no_gate_is_kcla_with_open_gates():
    """A gate of zeros is open by half, so values of half the size are what is read without one."""
    kcla, ours, gone = beside_kcla("kcla_no_gate")
    with torch.no_grad():
        for theirs, module in zip(kcla, ours, strict=True):
            theirs.gate.weight.zero_()
            module.value.weight.mul_(0.5)
    outs, shortcuts = draw()
    assert worst(run(ours, outs, shortcuts), run(kcla, outs, shortcuts)) < 1e-12
    assert gone == {"query.weight", "gate.weight"}


def test_no_gate_has_a_key_where_layers_are_weighed():
    alone = KCLANoGate(Site(8, alone=True), head_dim=4)
    first = KCLANoGate(Site(8), head_dim=4)
    x = torch.randn(2, 8, 3, 3)
    assert [name for name, _ in alone.named_parameters()] == ["gain", "value.weight", "norm.weight", "norm.bias"]
    assert {name for name, _ in first.named_parameters()} - {name for name, _ in alone.named_parameters()} == {
        "key.weight"
    }
    found = alone.weights(x, None, None)
    assert set(found) == {"score", "share", "gate"}
    assert torch.equal(found["share"], torch.ones(2, 2)) and torch.equal(found["gate"], torch.ones(2, 2))


def test_no_gate_starts_with_the_numbers_of_kcla():
    modules = []
    for case in (PAPER, named("kcla_no_gate")):
        torch.manual_seed(3)
        modules.append(nn.ModuleList(case.make(site) for site in (Site(8), Site(8, entry="continue", index=1))))
    theirs, ours = (module.state_dict() for module in modules)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_static_values_are_kcla_where_all_sites_share_a_value():
    """One linear map of all layers can be taken before their mean or after it."""
    kcla, ours, gone = beside_kcla("kcla_static_value", stages=ONE_STAGE)
    with torch.no_grad():
        for chain in (kcla, ours):
            for module in chain:
                module.value.weight.copy_(kcla[0].value.weight)
    outs, shortcuts = draw(stages=ONE_STAGE)
    assert worst(run(ours, outs, shortcuts), run(kcla, outs, shortcuts)) < 1e-12
    with torch.no_grad():
        ours[0].value.weight.normal_()
    found, expected = run(ours, outs, shortcuts), run(kcla, outs, shortcuts)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(found, expected, strict=True))
    assert not gone


@ablations
def test_weights(case: Case):
    """What the analyses read is what the forward uses: the share is how far this layer moves what is read."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    states = run_with_states(chain, outs, shortcuts)[1]
    for module, x, before in zip(chain, outs, [None, *states[:-1]], strict=True):
        found = module.weights(x, None, before)
        keys = {"key"} if case.method == "kcla_no_gate" else {"query", "key"}
        assert set(found) == {*keys, "score", "share", "gate"}
        assert all(found[name].shape == (3, module.head_count) for name in ("score", "share", "gate"))
        assert all(found[name].shape == (3, module.head_count, 4) for name in keys)
        entered = module._enter(x, before)
        x = x.detach()
        # The pooled map decides the weights, so that a change that leaves it alone moves the read by its share.
        change = torch.randn_like(x)
        change = change - change.mean((2, 3), keepdim=True)
        moved = module._read(x + change, entered).map - module._read(x, entered).map
        if case.method == "kcla_static_value":
            change = depthwise_3x3(change, module.value.weight)
        assert worst([moved], [change * on_maps(found["share"], x.shape[1])]) < 1e-10


@ablations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.medium
def test_many_layers_in_half_precision(case: Case, dtype: torch.dtype):
    """With keys so long that their exponentials overflow; forward and backward stay finite, states are float32."""
    first, later = (
        case.cls(Site(8, entry=entry), head_dim=4, init="paper").eval().to(dtype) for entry in ("start", "continue")
    )
    with torch.no_grad():
        for module in (first, later):
            module.key.weight.mul_(300)
    outs = [(4 * torch.randn(2, 8, 3, 3)).relu().to(dtype).requires_grad_() for _ in range(100)]
    state, results = None, []
    for x in outs:
        out, state = (first if state is None else later)(x, None, state)
        results.append(out)
    longest = max(later.weights(x, None, state)["key"].norm(dim=-1).max() for x in outs)
    kept: list[Tensor] = list(state)
    assert longest > 300 and all(t.dtype == torch.float32 and t.isfinite().all() for t in kept)
    assert all(y.isfinite().all() and y.dtype == dtype for y in results)
    torch.stack(results).float().square().mean().backward()
    assert all(t.grad is None or t.grad.isfinite().all() for t in (*outs, *first.parameters(), *later.parameters()))


@ablations
def test_carries_through_transitions(case: Case):
    """The first layer of all reaches the last one, past every change of width and resolution."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    (grad,) = torch.autograd.grad(run(chain, outs, shortcuts)[-1].sum(), outs[0])
    assert grad.any()
