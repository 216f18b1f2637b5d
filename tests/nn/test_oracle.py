"""Every method against its oracle: outputs, states and gradients, over all kinds of stage changes."""

import pytest
import torch
from torch import Tensor

from tests.nn.chain import CASES, KCLA_CASES, Case, build, draw, run, run_with_states, worst
from tests.oracles import depth as oracle

HEADS = {"heads of 4": 4, "one channel a head": 1, "one head": None}
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
kcla_cases = pytest.mark.parametrize("case", KCLA_CASES, ids=lambda case: case.id)


@pytest.mark.parametrize(
    ("case", "head_dim"),
    [
        pytest.param(case, width, id=f"{case.id}-{name}")
        for case in CASES
        for name, width in (HEADS.items() if case.takes("head_dim") else [("its own heads", 4)])
    ],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_outputs(case: Case, head_dim: int | None, training: bool):
    chain, (outs, shortcuts) = build(case, head_dim=head_dim).train(training), draw()
    assert worst(run(chain, outs, shortcuts), case.expected(chain, outs, shortcuts)) < 1e-12


@cases
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradients(case: Case, training: bool):
    chain, (outs, shortcuts) = build(case).train(training), draw()
    inputs = {f"out {t}": x for t, x in enumerate(outs)} | {f"shortcut {t}": x for t, x in enumerate(shortcuts)}
    inputs |= dict(chain.named_parameters())
    cotangents = [torch.randn_like(x) for x in outs]

    def gradients(results: list[Tensor]) -> dict[str, Tensor]:
        loss = sum((result * c).sum() for result, c in zip(results, cotangents, strict=True))
        found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        return {name: torch.zeros_like(inputs[name]) if g is None else g for name, g in zip(inputs, found, strict=True)}

    found = gradients(run(chain, outs, shortcuts))
    expected = gradients(case.expected(chain, outs, shortcuts))
    scale = {name: max(g.abs().max().item(), 0.1) for name, g in expected.items()}  # a sharp softmax has small ones
    errors = {name: (found[name] - g).abs().max().item() / scale[name] for name, g in expected.items()}
    assert {name: error for name, error in errors.items() if error > 1e-10} == {}


@kcla_cases
def test_state_is_the_published_one(case: Case):
    """``U = m exp(l)``, ``Z = exp(l)``: spec 2.2 and 2.4."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    states = run_with_states(chain, outs, shortcuts)[1]
    expected = oracle.kcla_states(chain, outs, **case.arguments)
    for state, (u, z) in zip(states, expected, strict=True):
        assert worst([state.log_norm.exp()], [z]) < 1e-12
        assert worst([state.mean * oracle.on_maps(z, u.shape[1])], [u]) < 1e-12


@pytest.mark.parametrize("case", KCLA_CASES[1:], ids=lambda case: case.id)
def test_published_clamp_is_met(case: Case):
    """The draws of these tests lie on both sides of 10, else the clamp would go untested."""
    chain, (outs, _) = build(case).eval(), draw()
    state, scores = None, []
    for module, x in zip(chain, outs, strict=True):
        scores.append(module.weights(x, None, state)["score"].flatten())
        state = module(x, None, state)[1]
    scores = torch.cat(scores)
    assert scores.max() == 10 and 0 < (scores == 10).double().mean() < 1


@pytest.mark.parametrize("case", [c for c in CASES if c.takes("drop_path")], ids=lambda case: case.id)
def test_drop_path(case: Case):
    """A sample's attention is left out or divided by the rest; the state and the batch norm see every sample."""
    chain, (outs, shortcuts) = build(case, init="paper", drop_path=0.4).train(), draw(batch=6)
    results = run(chain, outs, shortcuts)
    dropped = [(result == x).flatten(1).all(1) for result, x in zip(results, outs, strict=True)]
    assert 0 < torch.stack(dropped).double().mean() < 1, "both must occur"
    assert len({tuple(d.tolist()) for d in dropped}) > 1, "each site draws for itself"
    keeps = [torch.where(d, 0.0, 1 / 0.6) for d in dropped]
    assert worst(results, case.expected(chain, outs, shortcuts, keeps=keeps)) < 1e-12
