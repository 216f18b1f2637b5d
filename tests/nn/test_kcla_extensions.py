"""What each extension of KCLA adds, and that it is KCLA where it adds nothing."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.kcla import KCLA
from lineattn.nn.depth.kcla_bank import KCLABank
from lineattn.nn.depth.kcla_decay import KCLADecay
from lineattn.nn.depth.kcla_write import KCLAWrite
from tests.nn.chain import CASES, Case, build, draw, run, run_with_states, sites, worst
from tests.oracles import kcla_extensions as oracle
from tests.oracles.depth import on_maps

ONE_STAGE = (("", 8, (5, 6), 6),)
ABLATIONS = ("kcla_no_exp", "kcla_no_gate", "kcla_static_value")  # see test_kcla_ablations.py
EXTENSIONS = [case for case in CASES if case.method.startswith("kcla_") and case.method not in ABLATIONS]
extensions = pytest.mark.parametrize("case", EXTENSIONS, ids=lambda case: case.id)
NEW = ("log_temperature", "temper", "decay", "correction", "choice")


def named(method: str, **arguments: object) -> Case:
    return next(case for case in EXTENSIONS if case.method == method and case.arguments == arguments)


def beside_kcla(case: Case, **stages: tuple) -> tuple[nn.ModuleList, nn.ModuleList]:
    """KCLA's chain and the extension's, equal but for what the extension adds, which is as it starts."""
    kcla = build(next(case for case in CASES if case.arguments.get("variant") == "paper"), **stages)
    ours = nn.ModuleList(case.cls(module.site, head_dim=4, drop_path=0.0, **case.arguments) for module in kcla)
    missing, unexpected = ours.load_state_dict(kcla.state_dict(), strict=False)
    assert not unexpected and all(name.split(".")[1].startswith(NEW) for name in missing)
    return kcla, ours


@pytest.mark.parametrize("case", [c for c in EXTENSIONS if c.arguments.get("copies", 1) == 1], ids=lambda case: case.id)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_starts_as_kcla(case: Case, training: bool):
    """Outputs and gradients, through every kind of transition."""
    kcla, ours = beside_kcla(case)
    (outs, shortcuts), names = draw(), [name for name, _ in kcla.named_parameters()]

    def both(chain: nn.ModuleList) -> tuple[list[Tensor], list[Tensor]]:
        results = run(chain.train(training), outs, shortcuts)
        parameters = dict(chain.named_parameters())
        inputs = [*outs, *(parameters[name] for name in names)]
        return results, list(torch.autograd.grad(sum(y.square().mean() for y in results), inputs))

    (found, found_grads), (expected, expected_grads) = both(ours), both(kcla)
    assert worst(found, expected) < 1e-12
    assert worst(found_grads, expected_grads) < 1e-12


@extensions
def test_what_is_added_has_a_gradient_at_the_start(case: Case):
    """A network that starts as KCLA must be able to leave it."""
    _, ours = beside_kcla(case)
    outs, shortcuts = draw()
    sum((y * torch.randn_like(y)).sum() for y in run(ours.train(), outs, shortcuts)).backward()
    added = {name: p for name, p in ours.named_parameters() if name.split(".")[1].startswith(NEW)}
    assert all(p.grad is not None and p.grad.any() for p in added.values())
    assert bool(added) == (case.arguments.get("copies") != 1)


@extensions
def test_weights(case: Case):
    """What the analyses read is what the forward uses: the share is how far this layer moves what is read."""
    if case.method == "kcla_corrected":
        pytest.skip("its share is that in the mean before the correction, see below")
    chain, (outs, shortcuts) = build(case).eval(), draw()
    states = run_with_states(chain, outs, shortcuts)[1]
    for module, x, before in zip(chain, outs, [None, *states[:-1]], strict=True):
        found = module.weights(x, None, before)
        assert all(found[name].shape == (3, module.head_count) for name in ("score", "share", "gate"))
        assert all(found[name].shape == (3, module.head_count, 4) for name in ("query", "key"))
        entered = module._enter(x, before)
        x = x.detach()
        # The pooled map decides the weights, so that a change that leaves it alone moves the read by its share.
        change = torch.randn_like(x)
        change = change - change.mean((2, 3), keepdim=True)
        moved = module._read(x + change, entered).map - module._read(x, entered).map
        assert worst([moved], [change * on_maps(found["share"], x.shape[1])]) < 1e-10


def test_weights_of_the_correction():
    chain, (outs, shortcuts) = build(named("kcla_corrected")).eval(), draw()
    states = run_with_states(chain, outs, shortcuts)[1]
    for module, x, before, after in zip(chain, outs, [None, *states[:-1]], states, strict=True):
        found = module.weights(x, None, before)
        assert worst([found["share"]], [(found["score"] - after.log_norm).exp()]) < 1e-14
        assert ("correction" in found) == (module.site.entry != "start")
        if "correction" in found:
            assert found["correction"].abs().max() <= 0.25


def test_write_temperature_is_bounded():
    module = KCLAWrite(Site(8), head_dim=4)
    with torch.no_grad():
        module.temper.weight.normal_().mul_(1e3)
    x = torch.randn(64, 8, 3, 3) + torch.randn(64, 8, 1, 1)
    plain = KCLA(Site(8), head_dim=4)
    plain.load_state_dict(module.state_dict(), strict=False)
    ratio = module.weights(x, None, None)["score"] / plain.weights(x, None, None)["score"]
    assert 1 / math.e - 1e-12 <= ratio.min() < 0.4 and 2.6 < ratio.max() <= math.e + 1e-12


def test_decay_leads_to_an_exponential_mean():
    """With equal scores and decays, a layer ``j`` steps back weighs ``exp(-j δ)``."""
    delta = 0.3
    chain = build(named("kcla_decay"), stages=(("", 8, (5, 6), 60),)).eval()
    with torch.no_grad():
        for module in chain:
            module.key.weight.zero_()  # all keys are zero, and all scores with them
            if module.decay is not None:
                module.decay.fill_(-delta)  # its size counts
    outs, _ = draw(stages=(("", 8, (5, 6), 60),))
    before, state = run_with_states(chain, outs, [None] * 60)[1][-2:]
    weights = torch.exp(-delta * torch.arange(59, -1, -1.0))
    exact = sum(x * w for x, w in zip(outs, weights / weights.sum(), strict=True))
    assert worst([state.mean], [exact]) < 1e-13
    share = chain[-1].weights(outs[-1], None, before)["share"].detach()
    assert torch.allclose(share, torch.full_like(share, 1 - math.exp(-delta)), rtol=1e-6)


def test_decay_is_built_where_there_is_a_past():
    assert KCLADecay(Site(8), head_dim=4).decay is None
    assert torch.equal(KCLADecay(Site(8, entry="continue"), head_dim=4).decay, torch.zeros(2))


def test_correction_is_off_by_the_second_order():
    """Against the mean at the reader's own temperature: half the correction leaves a quarter of the error."""
    chain, (outs, _) = build(named("kcla_corrected"), stages=ONE_STAGE).eval(), draw(stages=ONE_STAGE)
    outs = [x.detach() for x in outs]
    errors, effects = [], []
    for epsilon in (0.04, 0.02, 0.01, 0.005):
        with torch.no_grad():
            for module in chain:
                module.gain.fill_(1)
                if module.correction is not None:
                    module.correction.weight.zero_()
                    module.correction.bias.fill_(math.atanh(4 * epsilon))
        found = run(chain, outs, [None] * len(outs))
        exact = oracle.corrected(chain, outs, exact=True)
        errors.append(max((a - b).abs().max().item() for a, b in zip(found, exact, strict=True)))
        with torch.no_grad():
            for module in chain:
                if module.correction is not None:
                    module.correction.bias.zero_()
        plain = run(chain, outs, [None] * len(outs))
        effects.append(max((a - b).abs().max().item() for a, b in zip(plain, exact, strict=True)))
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert all(order == pytest.approx(2, abs=0.15) for order in orders), orders
    assert all(math.log2(a / b) == pytest.approx(1, abs=0.15) for a, b in pairwise(effects))
    assert errors[-1] < 0.1 * effects[-1]


@pytest.mark.parametrize("copies", [2, 3])
def test_bank_reads_within_its_layers(copies: int):
    """The mix is convex, whatever the reader chooses."""
    chain, (outs, _) = build(named("kcla_bank", copies=copies), stages=ONE_STAGE).eval(), draw(stages=ONE_STAGE)
    state = None
    for t, (module, x) in enumerate(zip(chain, outs, strict=True)):
        state, read, exposed = module._read(x, state)
        seen = torch.stack(outs[: t + 1])
        assert (read <= seen.amax(0) + 1e-12).all() and (read >= seen.amin(0) - 1e-12).all()
        assert "choice" not in exposed or torch.allclose(exposed["choice"].sum(-1), torch.ones(3, 2))
    assert len(state.means) == copies


def test_bank_arguments():
    with pytest.raises(InputError, match="copies is 0"):
        KCLABank(Site(8), head_dim=4, copies=0)
    factors = [KCLABank(Site(8), head_dim=4, copies=n).inv_factor.tolist() for n in (1, 2, 3)]
    assert [pytest.approx(f) for f in ([1], [2, 0.5], [2, 1, 0.5])] == factors


@extensions
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.medium
def test_many_layers_in_half_precision(case: Case, dtype: torch.dtype):
    """With scores whose exponentials overflow every type; forward and backward stay finite, states are float32."""
    first, later = (
        case.cls(Site(8, entry=entry), head_dim=4, init="paper", **case.arguments).eval().to(dtype)
        for entry in ("start", "continue")
    )
    with torch.no_grad():
        for module in (first, later):
            module.key.weight.mul_(300)
    outs = [(4 * torch.randn(2, 8, 3, 3)).relu().to(dtype).requires_grad_() for _ in range(100)]
    state, results = None, []
    for x in outs:
        out, state = (first if state is None else later)(x, None, state)
        results.append(out)
    assert max(later.weights(x, None, state)["score"].max() for x in outs) > 300
    kept = [t for part in state for t in (part if isinstance(part, tuple) else (part,)) if t is not None]
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in kept)
    assert all(y.isfinite().all() and y.dtype == dtype for y in results)
    torch.stack(results).float().square().mean().backward()
    assert all(t.grad is None or t.grad.isfinite().all() for t in (*outs, *first.parameters(), *later.parameters()))


@extensions
def test_carries_through_transitions(case: Case):
    """The first layer of all reaches the last one, past every change of width and resolution."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    assert [module.site.entry for module in chain].count("transition") == 5 == len(sites(carries=True)) - 6
    (grad,) = torch.autograd.grad(run(chain, outs, shortcuts)[-1].sum(), outs[0])
    assert grad.any()
