"""What the methods that mix maps by shares have beside their oracles."""

from __future__ import annotations

import pytest
import torch

from lineattn.errors import InputError
from lineattn.nn.depth.attnres import AttnRes
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.focused import LayerFocused
from lineattn.nn.depth.linear import LayerLinear
from lineattn.nn.depth.linformer import LayerLinformer
from lineattn.nn.depth.performer import LayerPerformer
from tests.nn.chain import CASES, Case, build, draw, run_with_states

ONE_STAGE = (("", 8, (5, 6), 5),)
LATER = Site(8, index=4, entry="continue")


def case_of(method: str, **arguments: object) -> Case:
    return next(case for case in CASES if case.method == method and case.arguments == arguments)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id)
        for case in CASES
        if case.method
        in ("layer_softmax", "layer_linear", "layer_hydra", "layer_focused", "layer_linformer", "attnres")
    ],
)
def test_the_past_is_kept_without_copies(case: Case):
    chain, (outs, shortcuts) = build(case, stages=ONE_STAGE), draw(stages=ONE_STAGE)
    kept = run_with_states(chain, outs, shortcuts)[1][-1].maps
    blocks = outs if case.arguments.get("block") is None else outs[:: case.arguments["block"]]
    assert all(ours is theirs for ours, theirs in zip(kept, blocks, strict=True))


def test_normalised_shares_add_up_to_one():
    module = LayerLinear(LATER, head_dim=4, normalise=True)
    share = module._shares(torch.randn(3, 8), torch.randn(3, 5, 8))
    assert share.shape == (3, 2, 5) and (share > 0).all()
    assert torch.allclose(share.sum(-1), torch.ones(3, 2))
    # The kernel of such keys is zero, and so is their sum.
    assert module._shares(torch.randn(3, 8), torch.full((3, 5, 8), -1e4)).eq(0).all()


def test_focused_lets_positive_maps_through():
    modules = [LayerFocused(Site(16), head_dim=4) for _ in range(20)]
    shares = [module.weights(torch.rand(2, 16, 4, 4), None, None)["share"] for module in modules]
    assert all((share > 1e-3).all() for share in shares)


def test_linformer_projects_where_there_are_more_layers_than_slots():
    shapes = [LayerLinformer(Site(8, index=i, entry="continue"), head_dim=4, rank=3).key_slots for i in range(1, 5)]
    assert [None if slots is None else tuple(slots.shape) for slots in shapes] == [None, None, (3, 4), (3, 5)]
    module = LayerLinformer(LATER, head_dim=4)
    share = module._shares(torch.randn(3, 8), torch.randn(3, 5, 8))
    assert share.shape == (3, 2, 5) and torch.linalg.matrix_rank(share.flatten(0, 1)) == 2


def test_linformer_needs_whole_stages():
    with pytest.raises(InputError, match="starts at block 2; use scope='per_stage'"):
        LayerLinformer(Site(8, index=2, entry="start"), head_dim=4)
    with pytest.raises(InputError, match="rank is 1; it must be at least 2"):
        LayerLinformer(Site(8), head_dim=4, rank=1)


def test_performer_approximates_a_kernel_of_the_distance():
    module = LayerPerformer(LATER, head_dim=4, features=20_000)
    query, keys = torch.randn(2, 2, 4), torch.randn(2, 2, 5, 4)
    expected = torch.exp(-(query[:, :, None] - keys).square().sum(-1) / 8)
    assert (module._share(query, keys) - expected).abs().max() < 0.05


def test_performer_keeps_its_frequencies_in_the_state_dict():
    ours, theirs = LayerPerformer(LATER, head_dim=4), LayerPerformer(LATER, head_dim=4)
    assert not torch.equal(ours.frequencies, theirs.frequencies)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.frequencies, theirs.frequencies)
    assert "frequencies" not in dict(ours.named_parameters())


@pytest.mark.parametrize("features", [0, 3])
def test_performer_needs_pairs_of_features(features: int):
    with pytest.raises(InputError, match=f"features is {features}; it must be even"):
        LayerPerformer(Site(8), head_dim=4, features=features)


def test_attention_residuals_start_as_a_mean():
    chain = build(case_of("attnres"), stages=ONE_STAGE, init="paper")
    with torch.no_grad():
        for module in chain:
            module.query.zero_()
    outs, shortcuts = draw(stages=ONE_STAGE)
    results = run_with_states(chain, outs, shortcuts)[0]
    for t, result in enumerate(results):
        assert torch.allclose(result, torch.stack(outs[: t + 1]).mean(0))


def test_attention_residuals_ignore_the_length_of_a_map():
    module = AttnRes(LATER)
    with torch.no_grad():
        module.query.normal_()
    x = torch.randn(2, 8, 3, 3)
    scores = [module.weights(scale * x, None, None)["score"] for scale in (1, 1000)]
    assert torch.allclose(*scores, rtol=1e-5)


@pytest.mark.parametrize(("block", "kept"), [(1, 5), (2, 3), (3, 2), (5, 1)])
def test_attention_residuals_keep_the_ends_of_blocks(block: int, kept: int):
    sites = [Site(8, index=i, entry="continue" if i else "start") for i in range(5)]
    state = None
    for site in sites:
        state = AttnRes(site, block=block)(torch.randn(2, 8, 3, 3), None, state)[1]
    assert len(state.maps) == len(state.inverse_rms) == kept


def test_bad_block():
    with pytest.raises(InputError, match="block is 0; it must be at least 1"):
        AttnRes(Site(8), block=0)
