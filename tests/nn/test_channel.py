"""Gates over channels, beyond what every method owes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lineattn import registry
from lineattn.errors import InputError
from lineattn.nn.channel.dianet import DIANet
from lineattn.nn.channel.eca import ECA
from lineattn.nn.channel.se import SE
from lineattn.nn.depth.base import DepthAttention, Site
from lineattn.ops.channels import linear
from tests.nn.chain import CASES, Case, build, draw, run, run_with_states, worst

CHANNEL_CASES = [case for case in CASES if case.cls.position == "branch"]
cases = pytest.mark.parametrize("case", CHANNEL_CASES, ids=lambda case: case.id)


def test_these_are_the_branch_methods():
    assert {case.method for case in CHANNEL_CASES} == {"se", "eca", "dianet"}


def test_parameter_counts():
    """SE: two linear layers with biases. ECA: its kernel. DIANet: what the published code adds to a network."""
    assert _count(SE(Site(256), init="paper")) == 256 * 16 + 16 + 16 * 256 + 256
    assert [_count(ECA(Site(c), init="paper")) for c in (16, 128, 2048)] == [3, 5, 7]
    cells = [DIANet(Site(c, stage), init="paper") for stage, c in enumerate((64, 128, 256))]
    assert sum(map(_count, cells)) == 491_322 - 272_474  # with and without, ResNet-20 on CIFAR at these widths


def _count(module: DepthAttention) -> int:
    return sum(p.numel() for p in module.parameters())


def test_hidden_layers_have_a_least_width():
    assert SE(Site(8)).squeeze.out_features == SE(Site(128)).squeeze.out_features == 8
    assert SE(Site(32), reduction=2).squeeze.out_features == 16
    with pytest.raises(InputError, match="reduction is 0"):
        SE(Site(32), reduction=0)


@cases
def test_weights_is_what_the_branch_is_multiplied_by(case: Case):
    chain, (outs, shortcuts) = build(case, init="paper").eval(), draw()
    results, states = run_with_states(chain, outs, shortcuts)
    for module, x, before, result in zip(chain, outs, [None, *states[:-1]], results, strict=True):
        gate = module.weights(x, None, before)["gate"]
        assert worst([x * gate[:, :, None, None]], [result]) == 0
        assert ((gate >= 0) & (gate <= 1)).all() and gate.std() > 1e-2


@cases
def test_gain_leads_from_the_branch_to_the_published_one(case: Case):
    chain, (outs, shortcuts) = build(case).eval(), draw()
    paper = build(case, init="paper").eval()
    paper.load_state_dict({name: t for name, t in chain.state_dict().items() if not name.endswith("gain")})
    for value, expected in ((1.0, run(paper, outs, shortcuts)), (0.0, outs)):
        with torch.no_grad():
            for module in chain:
                module.gain.fill_(value)
        assert worst(run(chain, outs, shortcuts), expected) < 1e-14


@cases
def test_only_a_gain_of_one_folds(case: Case):
    chain, (outs, shortcuts) = build(case).eval(), draw()
    with torch.no_grad():
        for module in chain:
            module.gain.fill_(1)
    expected = run(chain, outs, shortcuts)
    refusing = copy.deepcopy(chain[0])
    with torch.no_grad():
        refusing.gain[3] = 0.5
    with pytest.raises(InputError, match=r"1 of 8 gains are not 1.*keep init='identity'"):
        refusing.fold_gain()
    assert refusing.gain is not None
    for module in chain:
        module.fold_gain()
    assert worst(run(chain, outs, shortcuts), expected) < 1e-15
    assert not any(name.endswith("gain") for name in chain.state_dict())


@cases
def test_start_as_published(case: Case):
    """The card says which gate a network starts with."""
    stages = (("", 64, (5, 4), 4),)
    chain, (outs, _) = _fresh(case, stages), draw(stages=stages)
    outs = [x / 10 for x in outs]  # as behind the norm that ends a branch, or a little more
    with torch.no_grad():
        results = run(chain, outs, [None] * len(outs))
    found = torch.stack([(y.abs().sum() / x.abs().sum()) for x, y in zip(outs, results, strict=True)])
    start = {"1/2": 0.5, "1/4": 0.25}[registry.get(case.method).start.rsplit(" ", 1)[1]]
    assert ((found - start).abs() < 0.15 * start).all()


def _fresh(case: Case, stages: tuple) -> torch.nn.ModuleList:
    chain = build(case, stages=stages, init="paper")
    return torch.nn.ModuleList(case.cls(module.site, init="paper", **case.arguments) for module in chain)


def test_dianet_cell_belongs_to_the_first_of_a_stage():
    first, second = DIANet(Site(16)), DIANet(Site(16, index=1, entry="continue"))
    assert {name for name, _ in second.named_parameters()} == {"gain"}
    state = first(torch.randn(2, 16, 3, 3), None, None)[1]
    assert state.input_gates.down is first.input_gates.down.weight
    assert DIANet(Site(16, index=1, entry="continue"), init="paper").state_dict() == {}
    with pytest.raises(InputError, match="can't carry its state"):
        DIANet(Site(16, entry="transition", prev_channels=8))


def test_dianet_layers_share_one_cell():
    """The gradient of the stage's cell comes from every layer of it, and from no other stage."""
    case = next(case for case in CHANNEL_CASES if case.method == "dianet")
    stages = (("", 8, (5, 6), 3), ("", 16, (3, 3), 2))
    chain, (outs, shortcuts) = build(case, stages=stages), draw(stages=stages)
    results = run(chain, outs, shortcuts)
    weights = [chain[0].input_gates.up.weight, chain[3].input_gates.up.weight]
    for t, result in enumerate(results):
        found = torch.autograd.grad(result.sum(), weights, retain_graph=True, allow_unused=True)
        assert [g is not None and bool(g.any()) for g in found] == [t < 3, t >= 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_stays_in_its_type(dtype: torch.dtype):
    y, weight, bias = (t.float() for t in (torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)))
    expected: Tensor = y @ weight.T + bias
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(y, weight).dtype == torch.bfloat16, "else there is nothing to turn off"
        found = linear(y, weight, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(linear(y, weight), expected - bias)
    assert linear(y, weight.to(dtype), bias.to(dtype)).dtype == torch.float32
    assert linear(y.to("meta"), weight.to("meta")).shape == (3, 4)
