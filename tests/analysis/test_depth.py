"""What is read off attention over depth, against what is written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import lineattn
from lineattn.analysis.keys import histogram_rows, key_similarity, similarity_rows
from lineattn.analysis.reach import decay_products, decay_rows, head_rows, map_rows, shares
from lineattn.analysis.record import Stretch, influence, record
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from tests.hosts.nets import image, shake

NET = "resnet20_cifar"  # three layers in each of three stages


def host(method: str, **arguments: object) -> DepthHost:
    torch.manual_seed(0)
    net = lineattn.create_model(NET, attn=method, width=8, num_classes=5, **({"init": "paper"} | arguments))
    assert isinstance(net, DepthHost)
    return net.double()


def recorded(method: str, **arguments: object) -> list[Stretch]:
    return record(shake(host(method, head_dim=4, **arguments)), image(2, 32).double())


def test_what_passed_is_kept_and_the_host_left_as_it_was():
    net = host("kcla").train()
    images = image(2, 32).double()
    found = record(net, images)
    assert [len(stretch.passages) for stretch in found] == [3, 3, 3]
    assert [stretch.summed_up for stretch in found] == [False, True, True]
    assert found[1].sources == ["earlier", "1", "2", "3"]
    assert net.training and not any(module._forward_hooks for module in net.modules())
    first, second = found[0].passages[:2]
    with torch.no_grad():
        after, state = first.method(first.out, first.shortcut, first.state)
    assert torch.equal(after, first.after) and torch.equal(state.mean, second.state.mean)


def test_a_network_without_attention_and_one_that_diverged():
    with pytest.raises(InputError, match="no attention over depth"):
        record(lineattn.create_model(NET), image(2, 32))
    net = host("kcla")
    next(net.parameters()).data.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        record(net, image(2, 32).double())


@pytest.mark.parametrize("method", ["kcla", "kcla_temperature", "kcla_write"])
def test_kclas_shares_are_the_softmax_of_its_scores(method):
    stretch = recorded(method)[0]
    scores = torch.stack([passage.weights()["score"] for passage in stretch.passages], dim=-1)
    found = shares(stretch)
    for t in range(3):
        torch.testing.assert_close(found[:, :, t, : t + 1], scores[..., : t + 1].softmax(-1))
        assert not found[:, :, t, t + 1 :].any()


@pytest.mark.parametrize("method", ["kcla", "kcla_decay"])
def test_shares_make_the_mean_in_the_state(method):
    """Behind a transition too, where all before is one layer more."""
    for stretch in recorded(method):
        found, last = shares(stretch), stretch.passages[-1]
        maps = [passage.out for passage in stretch.passages]
        if stretch.summed_up:
            first = stretch.passages[0]
            maps.insert(0, first.method._enter(first.out, first.state).mean)
        share = found[:, :, -1].repeat_interleave(last.out.shape[1] // found.shape[1], dim=1)
        mean = sum(share[..., s, None, None] * x for s, x in enumerate(maps))
        after = last.method(last.out, None, last.state)[1]
        torch.testing.assert_close(mean, after.mean)


@pytest.mark.parametrize("method", ["layer_softmax", "mrla_base"])
def test_shares_of_softmax_attention_are_its_own(method):
    stretch = recorded(method)[1]
    found = shares(stretch)
    torch.testing.assert_close(found[:, :, 2], stretch.passages[2].weights()["share"])
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


def test_dla_base_wears_its_shares_down():
    weights = (stretch := recorded("dla_base")[1]).passages[2].weights()
    factor = torch.stack([weights["factor"][..., 4 * h : 4 * h + 4].mean(-1) for h in range(4)], dim=1)
    torch.testing.assert_close(shares(stretch)[:, :, 2], weights["share"] * factor)


def test_a_stage_in_parts_says_so():
    found = record(host("kcla", scope="every=2"), image(2, 32).double())
    assert [stretch.stage for stretch in found] == ["1.1", "1.2", "2.1", "2.2", "3.1", "3.2"]
    rows = head_rows(found)
    assert {(row["stage"], row["layer"], row["site"]) for row in rows} >= {("2.2", 1, "stages_1_2")}


def test_who_has_no_shares():
    for method in ("mrla_light", "kcla_bank"):
        assert shares(recorded(method)[1]) is None


@pytest.mark.parametrize("method", ["kcla", "layer_softmax"])
def test_similarity_is_the_cosine(method):
    stretch = recorded(method)[1]
    found = key_similarity(stretch)
    if method == "kcla":
        keys = [passage.weights()["key"] for passage in stretch.passages]
    else:
        keys = list(stretch.passages[-1].weights()["keys"].unbind(2))
    for s in range(3):
        for t in range(3):
            torch.testing.assert_close(found[..., s, t], torch.cosine_similarity(keys[s], keys[t], dim=-1))
    rows = similarity_rows([stretch])
    assert len(rows) == found.shape[1] * 3
    row = next(row for row in rows if (row["head"], row["layer"], row["other"]) == (2, 3, 1))
    assert row["cosine"] == pytest.approx(found[:, 1, 2, 0].mean().item())
    bins = histogram_rows([stretch], bins=4)
    assert sum(row["fraction"] for row in bins) == pytest.approx(1)
    pairs = torch.stack([found[..., 1, 0], found[..., 2, 0], found[..., 2, 1]])
    assert bins[-1]["fraction"] == pytest.approx((pairs >= 0.5).double().mean().item())


def test_methods_without_keys_say_so():
    with pytest.raises(InputError, match="AttnRes has no key"):
        similarity_rows(record(host("attnres"), image(2, 32).double()))


def test_a_layer_alone_is_left_out():
    """Of this method it has no key at all."""
    alone = lineattn.create_model("resnet8_cifar", attn="kcla_no_gate", scope="per_stage", width=8, num_classes=5)
    with pytest.raises(InputError, match="two layers whose keys"):
        similarity_rows(record(alone, image(2, 32)))


def test_products_of_decays():
    stretch = recorded("mrla_light")[1]
    methods = [passage.method for passage in stretch.passages]
    decays = [method.decay.detach().abs() for method in methods]
    found = decay_products(stretch)
    torch.testing.assert_close(found["decay"][:, 2, 0], decays[1] * decays[2])
    torch.testing.assert_close(found["decay"][:, 2, 1], decays[2])
    assert torch.equal(found["decay"][:, 1, 1], torch.ones(16, dtype=torch.float64))
    assert not found["decay"][:, 0, 1].any()
    scale = [m.norm.weight.detach().abs() / (m.norm.running_var + m.norm.eps).sqrt() for m in methods]
    torch.testing.assert_close(found["decay and norm"][:, 2, 0], decays[1] * scale[0] * decays[2] * scale[1])
    assert "decay and norm" not in decay_products(recorded("mrla_light", source="attention")[1])
    assert not decay_products(recorded("kcla")[1]) and not decay_products(recorded("dla_light")[1])


def test_the_gain_is_a_part_of_the_way():
    net = shake(host("mrla_light", init="identity"))
    stretch = record(net, image(2, 32).double())[0]
    first = stretch.passages[0].method
    plain = decay_products(record(shake(host("mrla_light")), image(2, 32).double())[0])
    with torch.no_grad():
        first.gain.fill_(0.5)
        first.norm.weight.fill_(1)
        first.norm.running_var.fill_(1 - first.norm.eps)
        stretch.passages[1].method.decay.fill_(3)
    torch.testing.assert_close(decay_products(stretch)["decay and norm"][:, 1, 0], torch.full((8,), 1.5).double())
    assert plain.keys() == {"decay", "decay and norm"}


@pytest.mark.parametrize("source", ["attention", "shortcut"])
def test_influence_of_a_constant_decay_is_its_power(source):
    net = host("mrla_light", source=source)
    for module in net.sites.values():
        module.norm.weight.data.fill_(1)
        module.norm.running_var.fill_(1 - module.norm.eps)
        if module.decay is not None:
            module.decay.data.fill_(0.25)
    stretch = record(net, image(2, 32).double())[1]
    found = influence(stretch)
    torch.testing.assert_close(found[:, 1, 0] / found[:, 0, 0], torch.full((2,), 0.25).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[:, 2, 0] / found[:, 0, 0], torch.full((2,), 0.0625).double(), rtol=1e-6, atol=0)
    rows = [row for row in decay_rows([stretch]) if row["measure"] == "influence" and row["distance"] == 2]
    assert [row["mean"] for row in rows] == [pytest.approx(0.0625)]


def test_influence_is_the_derivative():
    """Along the noise, of what KCLA adds at the third layer to the map of the first, by autograd."""
    stretch = recorded("kcla")[0]
    found = influence(stretch)
    outs = [passage.out for passage in stretch.passages]
    draws = torch.Generator().manual_seed(0)
    noise = torch.randn(outs[0].shape, generator=draws, dtype=torch.float64)
    noise *= outs[0].square().mean((1, 2, 3), keepdim=True).sqrt()

    def added(step: float) -> torch.Tensor:
        state = None
        for passage, out in zip(stretch.passages, [outs[0] + step * noise, *outs[1:]], strict=True):
            with torch.no_grad():
                after, state = passage.method(out, None, state)
        return after - out

    slope = (added(1e-6) - added(-1e-6)) / 2e-6
    expected = slope.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
    torch.testing.assert_close(found[:, 2, 0], expected, rtol=1e-2, atol=0)
    assert not found[:, 0, 1].any() and not found[:, 1, 2].any()


def test_no_influence_where_attention_does_not_look_back():
    found = influence(recorded_without_heads("eca")[1])
    assert not found.tril(-1).any()


def test_influence_of_a_gate_of_the_branch_is_what_it_lets_through():
    """Of a gate that is open for good, all of it."""
    net = host("se")
    for module in net.sites.values():
        for linear in [part for part in module.modules() if isinstance(part, torch.nn.Linear)]:
            linear.weight.data.zero_()
            linear.bias.data.fill_(40)
    found = influence(record(net, image(2, 32).double())[1])
    torch.testing.assert_close(found, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))


def recorded_without_heads(method: str) -> list[Stretch]:
    return record(shake(host(method)), image(2, 32).double())


def test_at_zero_gain_there_is_nothing_to_see():
    with pytest.raises(InputError, match="zero gain"):
        decay_rows(record(host("kcla_bank", init="identity"), image(2, 32).double()))
    with pytest.raises(InputError, match="zero gain"):
        map_rows(record(host("mrla_light", init="identity"), image(2, 32).double()))
    rows = decay_rows(record(host("kcla", init="identity"), image(2, 32).double()))
    assert {row["measure"] for row in rows} == {"share"}


def test_rows_of_the_map_and_of_the_heads():
    found = recorded("kcla")
    rows = map_rows(found)
    assert len(rows) == 6 + 2 * 9
    row = next(row for row in rows if (row["stage"], row["layer"], row["source"]) == ("2", 1, "earlier"))
    assert row["measure"] == "share" and row["mean"] == pytest.approx(shares(found[1])[:, :, 0, 0].mean().item())
    assert {row["measure"] for row in map_rows(recorded("mrla_light"))} == {"influence"}
    heads = head_rows(found)
    assert len(heads) == 3 * (2 + 4 + 8)
    method = found[0].passages[0].method
    assert [row["temperature"] for row in heads[:2]] == pytest.approx([0.7 * 2, 2 / 0.7])
    assert method.inv_temperature.tolist() == pytest.approx([1 / row["temperature"] for row in heads[:2]])
    assert head_rows(recorded("mrla_light"))[0]["temperature"] is None
    assert head_rows(recorded_without_heads("eca")) == []
