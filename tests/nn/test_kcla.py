from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.kcla import KCLA, VARIANTS, KCLAState
from lineattn.nn.depth.key_correlated import temperatures
from lineattn.nn.depth.layer_softmax import LayerSoftmax
from tests.nn.chain import CASES, KCLA_CASES, Case, build, draw, run_with_states, worst
from tests.oracles import depth as oracle

ONE_STAGE = (("", 8, (5, 6), 6),)
kcla_cases = pytest.mark.parametrize("case", KCLA_CASES, ids=lambda case: case.id)


def test_variants_are_those_of_the_oracle():
    assert VARIANTS.keys() == oracle.KCLA_FORMS.keys()


@kcla_cases
def test_order_of_the_past_does_not_matter(case: Case):
    chain, (outs, shortcuts) = build(case, stages=ONE_STAGE).eval(), draw(stages=ONE_STAGE)
    expected = run_with_states(chain, outs, shortcuts)[1][-1]
    order = [3, 0, 4, 2, 1, 5]
    shuffled = nn.ModuleList(chain[i] for i in order)
    shuffled[0].site, shuffled[1].site = chain[0].site, chain[3].site
    found = run_with_states(shuffled, [outs[i] for i in order], shortcuts)[1][-1]
    assert worst([found.mean, found.log_norm], [expected.mean, expected.log_norm]) < 1e-13


def test_first_layer_reads_itself():
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(KCLA(Site(8), head_dim=4)(x, None, None)[1].mean, x)


@pytest.mark.parametrize("head_dim", [1, 4, 8])
def test_parallel_keys_make_it_softmax_attention(head_dim: int):
    """Spec 2.3 (i): with keys ``k_s = n_s u``, softmax attention weighs by ``exp(n_s <q, u> / sqrt(D))``.

    That is KCLA's mean for the temperature ``1 / D_h = <q_h, u_h> / sqrt(D)``. Maps whose channel means are multiples
    of one another have such keys, where all layers share the key convolution.
    """
    size, shape = 5, (1, 8, 4, 4)
    lengths = torch.rand(size) + 0.5
    maps = torch.randn(size, *shape)
    maps = maps - maps.mean((-2, -1), keepdim=True) + lengths.reshape(-1, 1, 1, 1, 1) * torch.randn(8, 1, 1)

    case = next(case for case in CASES if case.method == "layer_softmax")
    stage = (("", 8, shape[2:], size),)
    softmax = build(case, head_dim=head_dim, stages=stage).eval()
    results, states = run_with_states(softmax, list(maps), [None] * size)
    last = softmax[-1].weights(maps[-1], None, states[-2])
    key = last["keys"][:, :, -1]
    temperature = (last["query"] * key).sum(-1) / key.norm(dim=-1) / math.sqrt(head_dim)

    kcla = build(KCLA_CASES[0], head_dim=head_dim, stages=stage).eval()
    for module in kcla:
        module.inv_temperature.copy_(temperature[0])
        module.key.load_state_dict(softmax[-1].key.state_dict())
    state = run_with_states(kcla, list(maps), [None] * size)[1][-1]
    share = oracle.on_maps(last["share"].flatten(0, 1).T, 8)
    assert last["share"].std() > 1e-2, "else any mean would do"
    assert worst([state.mean], [(maps[:, 0] * share).sum(0, keepdim=True)]) < 1e-13
    mean_as_only_layer = LayerSoftmax(Site(8), head_dim=head_dim).eval()
    mean_as_only_layer.load_state_dict(softmax[-1].state_dict())
    read_out = mean_as_only_layer(state.mean, None, None)[0] - state.mean
    assert worst([read_out], [results[-1] - maps[-1]]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.medium)], ids=["", "backward"])
@pytest.mark.medium
def test_thousand_layers_in_half_precision(dtype: torch.dtype, backward: bool):
    """With scores whose exponentials overflow every type; the published sums are infinite at the third layer."""
    module = KCLA(Site(8, entry="continue"), head_dim=4, init="paper").eval().to(dtype)
    with torch.no_grad():
        module.key.weight.mul_(300)
    outs = [(4 * torch.randn(2, 8, 3, 3)).relu().to(dtype).requires_grad_() for _ in range(1000)]
    state: KCLAState | None = None
    results = []
    with torch.set_grad_enabled(backward):
        for x in outs:
            out, state = module(x, None, state)
            results.append(out)
    assert all(y.isfinite().all() for y in results)
    if backward:
        torch.stack(results).float().square().mean().backward()
        assert all(t.grad.isfinite().all() for t in (*outs, *module.parameters()))

    scores = module.weights(torch.cat(outs), None, None)["score"].reshape(1000, 2, 2).double()
    assert scores.max() > 1000
    weights = torch.softmax(scores, 0).repeat_interleave(4, dim=2)[..., None, None]
    exact = (weights * torch.stack(outs).double()).sum(0)
    assert (state.mean - exact).abs().max() < 1e-4, "the mean and its normaliser are float32"


def test_temperatures():
    factors = temperatures(8, 0.7)
    assert factors[0].item() == pytest.approx(0.7, rel=1e-14)
    assert torch.allclose(factors * factors.flip(0), torch.ones(8), rtol=1e-14)
    assert torch.allclose(factors[1:] / factors[:-1], factors[1] / factors[0])
    assert temperatures(1, 0.7).tolist() == [1.0]
    assert torch.equal(KCLA(Site(8), head_dim=4, p=1.0).inv_temperature, torch.full((2,), 0.5))


def test_no_temperature_is_saved():
    """It follows from the arguments, and the parameter counts of the papers are those of trainable ones."""
    assert not any("temperature" in name for name in KCLA(Site(8), head_dim=4).state_dict())


@pytest.mark.parametrize(
    ("variant", "head_dim", "stages", "published", "idle"),
    [
        # spec 6: what the code adds to a network, and of that what its first stage never calls
        ("ref-cls", 16, [(64, 2), (128, 2), (256, 2)], 258_637 - 243_508, 643),
        ("ref-cls", 64, [(256, 3), (512, 4), (1024, 6), (2048, 3)], 25_859_078 - 25_557_032, 8_709),
        ("ref-det0", 32, [(256, 3), (512, 4), (1024, 6), (2048, 3)], 23_763_610 - 23_508_032, 4_613),
        ("ref-seg", 16, [(32, 2), (64, 2), (128, 2), (128, 2)], 1_546_989 - 1_534_241, 16 * 32 // 2 + 32 + 64),
    ],
    ids=["cifar", "imagenet", "detection", "segmentation"],
)
def test_parameter_counts(variant: str, head_dim: int, stages: list[tuple], published: int, idle: int):
    """The published code counts temperatures as parameters; the last stage of segmentation keeps its resolution."""
    sizes = [(8, 8), (4, 4), (2, 2), (2, 2) if variant == "ref-seg" else (1, 1)]
    chain = build(
        Case("kcla", oracle.kcla, {"variant": variant}),
        head_dim=head_dim,
        stages=[("", channels, size, count) for (channels, count), size in zip(stages, sizes, strict=False)],
        init="paper",
    )
    temperatures = sum(count * channels // head_dim for channels, count in stages)
    assert sum(p.numel() for p in chain.parameters()) == published - idle - temperatures


def test_initial_values():
    """Spec 2.2: Xavier-uniform for the channel convolutions and the gate, normal with fan-out for the others."""
    drawn = [KCLA(Site(128, 1, 0, "transition", 64, 2), head_dim=16) for _ in range(40)]
    for name, fan in {"query": 5, "key": 5, "transition.key": 5, "gate": 8}.items():
        values, bound = _values(drawn, name), math.sqrt(3 / fan)
        assert 0.97 * bound < values.abs().max() <= bound
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    for name, fan_out in {"value": 9 * 128, "transition.conv": 128}.items():
        assert _values(drawn, name).std() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)


def _values(modules: list[KCLA], name: str) -> Tensor:
    return torch.cat([module.get_submodule(name).weight.detach().flatten() for module in modules])


def test_transition_builds_only_what_it_calls():
    same = KCLA(Site(8, 1, 0, "transition", 8, 1), head_dim=4)
    assert same.transition.conv is None
    narrower = KCLA(Site(8, 1, 0, "transition", 12, 2), head_dim=1).transition.conv
    assert (narrower.groups, narrower.stride) == (4, (2, 2))
    assert KCLA(Site(8), head_dim=4).transition is None
    with pytest.raises(InputError, match="width of the previous site"):
        KCLA(Site(8, entry="transition"), head_dim=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"variant": "ref-clss"}, "did you mean 'ref-cls'"), ({"p": 0.0}, "p is 0.0"), ({"p": 1.5}, "p is 1.5")],
)
def test_bad_arguments(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        KCLA(Site(8), head_dim=4, **arguments)


@kcla_cases
def test_weights(case: Case):
    """What the analyses read is what the forward uses."""
    chain, (outs, shortcuts) = build(case).eval(), draw()
    states = run_with_states(chain, outs, shortcuts)[1]
    for module, x, before, after in zip(chain, outs, [None, *states[:-1]], states, strict=True):
        found = module.weights(x, None, before)
        assert worst([found["share"]], [(found["score"] - after.log_norm).exp()]) < 1e-14
        assert found["query"].shape == found["key"].shape == (3, module.head_count, 4)
        assert torch.equal(found["gate"], module.update(x, before)[1])
