"""What dynamic layer attention has beside its oracle: the leak of the published code, and the cell of a stage."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lineattn.errors import InputError
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.dla import Cell, DLABase, DLALight
from tests.nn.chain import Case, build, draw, run, run_with_states, worst
from tests.oracles import dla as oracle

LEAK = {"reduction": 2, "leak_sample0": True}
LEAKING = [
    Case("dla_base", partial(oracle.base, leak_sample0=True), LEAK),
    Case("dla_light", partial(oracle.light, leak_sample0=True), LEAK, reads_shortcut=True),
]
leaking = pytest.mark.parametrize("case", LEAKING, ids=lambda case: case.method)


@leaking
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_leak_is_the_published_one(case: Case, training: bool):
    """Spec 1.4 and bug 21b: every sample is refreshed with the state of the first."""
    chain, (outs, shortcuts) = build(case).train(training), draw()
    inputs = [*outs, *chain.parameters()]
    cotangents = [torch.randn_like(x) for x in outs]
    found, expected = run(chain, outs, shortcuts), case.expected(chain, outs, shortcuts)
    assert worst(found, expected) < 1e-12
    gradients = [
        torch.autograd.grad(results, inputs, cotangents, allow_unused=True, materialize_grads=True)
        for results in (found, expected)
    ]
    assert worst(*gradients) < 1e-10


@leaking
def test_leak_reaches_the_other_samples(case: Case):
    """As it does not without the argument, which `test_samples_do_not_see_each_other` shows."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    before = run(chain, outs, shortcuts)
    with torch.no_grad():
        for x in (*outs, *shortcuts):
            x[0] += torch.randn_like(x[0])
        after = run(chain, outs, shortcuts)
        for module in chain:
            module.leak_sample0 = False
        tight = run(chain, outs, shortcuts)
    seen = [(a[1:] - b[1:]).abs().max().item() for a, b in zip(after, before, strict=True)]
    first = [module.site.entry == "start" for module in chain]
    if case.method == "dla_base":  # at its first site there is nothing to refresh
        assert all((difference == 0) == start for difference, start in zip(seen, first, strict=True))
    else:
        assert min(seen) > 1e-6
    assert worst([y[:1] for y in after], [y[:1] for y in tight]) < 1e-14, "the first sample leaks into itself"


@pytest.mark.parametrize("cls", [DLABase, DLALight])
def test_cell_belongs_to_the_first_site(cls: type):
    """Once in the state dict, though all sites of the stage compute with it."""
    first, second = cls(Site(32)), cls(Site(32, index=1, entry="continue"))
    shared = {name for name in first.state_dict() if name not in second.state_dict()}
    cell = {f"cell.{name}" for name in Cell(32, 2).state_dict()}
    assert shared == cell | ({"extract.weight"} if cls is DLALight else set())
    assert set(second.state_dict()) < set(first.state_dict())


@pytest.mark.parametrize("case", LEAKING, ids=lambda case: case.method)
def test_factors_shrink_and_stay_positive(case: Case):
    stage = (("", 8, (5, 6), 5),)
    chain, (outs, shortcuts) = build(case, stages=stage).eval(), draw(stages=stage)
    states = run_with_states(chain, outs, shortcuts)[1]
    cells = [state.cell for state in states]
    assert all(((cell.h > 0) & (cell.h < 1)).all() for cell in cells)
    if case.method == "dla_base":
        factors = states[-1].factors
        assert (factors[:, -1] == 1).all() and (factors > 0).all()
        assert (factors[:, :-1] <= states[-2].factors).all()


@pytest.mark.parametrize(("channels", "reduction", "width"), [(256, 16, 16), (256, 20, 12), (64, 4, 16), (8, 16, 8)])
def test_width_of_the_cell(channels: int, reduction: int, width: int):
    cell = Cell(channels, reduction)
    assert cell.input[0].out_features == cell.hidden[0].out_features == width
    assert sum(p.numel() for p in cell.parameters()) == 2 * (4 * channels * width + width + 3 * channels)


@pytest.mark.parametrize("cls", [DLABase, DLALight])
def test_bad_reduction(cls: type):
    with pytest.raises(InputError, match="reduction is 0; it must be at least 1"):
        cls(Site(32), reduction=0)
