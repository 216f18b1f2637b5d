"""Cost against depth: counts by formula, published forms that compute what ours do, and exponents that are known."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lineattn import create_model
from lineattn.analysis.depth_cost import count_depth_cost
from lineattn.bench import profile
from lineattn.bench.published_mixing import PublishedLayerSoftmax, PublishedMRLABase
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.layer_softmax import LayerSoftmax
from lineattn.nn.depth.mrla import MRLABase

NAME, WIDTH, SIDE, BLOCKS = "resnet29_bottleneck_cifar", 4, 16, 3
# Channels and side of each stage's maps.
STAGES = [(4 * WIDTH, SIDE), (8 * WIDTH, SIDE // 2), (16 * WIDTH, SIDE // 4)]
PAIRS = [(LayerSoftmax, PublishedLayerSoftmax), (MRLABase, PublishedMRLABase)]


def cost(attn, name=NAME):
    extra = {} if attn == "none" else {"attn": attn, "init": "paper"}
    net = create_model(name, num_classes=100, width=WIDTH, **extra).eval()
    return count_depth_cost(net, torch.zeros(1, 3, SIDE, SIDE))


def expected_macs(attn):
    """What section 2.7 of the specification says a method adds, of what is counted; heads are 16 wide."""
    total, before = 0, None
    for c, side in STAGES:
        heads, maps = c // 16, c * side**2
        layer = 9 * maps
        if attn == "kcla":  # its H x H gate is computed elementwise
            total += 0 if before is None else before * c // heads * side**2
        if attn == "dla_light":
            narrow = max(8, c // 16)
            layer += 9 * maps + 4 * 4 * c * narrow  # E; the cell's two bottlenecks, for its step and for refreshing
        total, before = total + BLOCKS * layer, c
    return total


@pytest.mark.medium
@pytest.mark.parametrize("attn", ["kcla", "mrla_base", "mrla_light", "layer_softmax", "dla_light"])
def test_macs_that_a_method_adds_are_those_of_its_formula(attn):
    assert cost(attn).macs - cost("none").macs == expected_macs(attn)


@pytest.mark.medium
def test_mixing_is_t_maps_at_the_t_th_layer_or_one():
    one = sum(c * side**2 for c, side in STAGES)
    all_so_far = one * BLOCKS * (BLOCKS + 1) // 2
    expected = {"none": 0, "se": 0, "mrla_base": all_so_far, "layer_softmax": all_so_far, "attnres": all_so_far}
    expected |= {"mrla_light": BLOCKS * one, "dla_light": BLOCKS * one}
    expected["kcla"] = BLOCKS * one - STAGES[0][0] * SIDE**2  # the first layer's mean is its own map
    expected["kcla_bank"] = 2 * expected["kcla"]
    expected["kcla_corrected"] = 2 * expected["kcla"] - STAGES[0][0] * SIDE**2  # its second map begins one layer later
    assert {attn: cost(attn).mixing for attn in expected} == expected


class Multiplies(TorchDispatchMode):
    """Counts multiply-adds of whole maps as they are called for."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        shapes = {(c, side, side) for c, side in STAGES}
        if function.overloadpacket.__name__ in ("mul", "addcmul", "addcmul_", "lerp") and out.shape[1:] in shapes:
            self.total += out.numel()
        return out


@pytest.mark.medium
@pytest.mark.parametrize("attn", ["kcla", "mrla_base", "layer_softmax"])
def test_mixing_is_what_is_really_multiplied(attn):
    """Run in PyTorch's operators; besides the mixing, each layer multiplies its map once, by gate and norm."""
    net = create_model(NAME, num_classes=100, width=WIDTH, attn=attn, init="paper").double().eval()
    with torch.no_grad(), Multiplies() as counted:
        net(torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64))
    assert counted.total - BLOCKS * sum(c * side**2 for c, side in STAGES) == cost(attn).mixing


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("ours", "published"), PAIRS, ids=["layer_softmax", "mrla_base"])
def test_published_forms_compute_what_ours_do(ours, published, training):
    channels, depth = 32, 4
    entries = ["start"] + ["continue"] * (depth - 1)
    a = nn.ModuleList(ours(Site(channels, entry=entry), head_dim=8, init="paper") for entry in entries)
    b = nn.ModuleList(published(channels, 8) for _ in entries)
    for one, other in zip(a, b, strict=True):
        for tensor in one.parameters():
            nn.init.normal_(tensor)
        other.load_state_dict(one.state_dict())
    xs = torch.randn(depth, 3, channels, 6, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for chain, rest in ((a, (None,)), (b, ())):
        torch.manual_seed(1)  # drop path
        state, outs = None, []
        for layer, x in zip(chain.double().train(training), xs, strict=True):
            out, state = layer(x, *rest, state)
            outs.append(out)
        outs = torch.stack(outs)
        weights = torch.linspace(-1, 1, outs.numel(), dtype=torch.float64).view_as(outs)
        grads = torch.autograd.grad((outs * weights).sum(), (xs, *chain.parameters()), allow_unused=True)
        found.append((outs, *grads))
    for ours_has, theirs in zip(*found, strict=True):
        theirs = torch.zeros_like(ours_has) if theirs is None else theirs
        torch.testing.assert_close(ours_has, theirs, rtol=0, atol=1e-9)


@pytest.mark.medium
def test_published_forms_keep_what_grows():
    """Of T layers a stage: MRLA-base keeps T (T + 1) / 2 maps, standard attention twice that, and KCLA is linear."""
    batch = profile.draw((2, 3, 32, 32), 10, "cpu")
    map_mb = 2 * 4 * (16 * 32**2 + 32 * 16**2 + 64 * 8**2) / 1e6
    for method, curvature in (("kcla", 0), ("mrla_base", 1), ("layer_softmax", 2)):
        saved = []
        for depth in (11, 20, 29):
            arguments = {"name": f"resnet{depth}_bottleneck_cifar", "num_classes": 10, "width": WIDTH}
            saved.append(profile.published_memory(arguments, method, batch))
        second = saved[2] - 2 * saved[1] + saved[0]
        assert second / map_mb == pytest.approx(curvature, rel=0.05, abs=0.001), method


def rows_of(**columns):
    """A profile of four depths, the plain network's figures being 100."""
    rows = []
    for place, blocks in enumerate((2, 4, 8, 16)):
        for method in ("none", "kcla"):
            row = {"depth": 9 * blocks + 2, "blocks": blocks, "method": method}
            added = {name: 0 if method == "none" else values[place] for name, values in columns.items()}
            rows.append(row | {name: 100 + value for name, value in added.items()})
    return rows


def test_exponents_are_of_what_is_added_at_the_deepest_three():
    (fit,) = profile.growth(rows_of(saved_mb=[500, 12, 24, 48], mmac=[9, 1, 4, 16], training_ms=[1, 1, 1, 1]))
    assert fit == {"method": "kcla", "saved_mb": 1, "mmac": 2, "training_ms": 0}


def test_a_constant_hides_in_one_exponent_and_not_in_the_other():
    rows = rows_of(saved_mb=[500, 44, 48, 56], mmac=[9, 16 + 40, 64 + 40, 256 + 40], training_ms=[1, 4, 8, 16])
    (whole,), (by_block,) = profile.growth(rows), profile.growth_by_block(rows)
    assert whole["saved_mb"] == pytest.approx(log(56 / 44, 4), abs=0.01) and whole["mmac"] < 1.3
    assert by_block == {"method": "kcla", "saved_mb": 1, "mmac": 2}


def test_there_is_no_exponent_of_what_is_not_positive_or_not_measured():
    rows = rows_of(saved_mb=[1, 2, 3, 4], training_ms=[1, 2, -1, 8])
    assert set(profile.growth(rows)[0]) == {"method", "saved_mb"}
    assert profile.growth(rows[:2]) == profile.growth_by_block(rows[:4]) == [{"method": "kcla"}]
    assert profile.growth_by_block(rows_of(saved_mb=[1, 2, 2, 4])) == [{"method": "kcla"}]


@pytest.mark.medium
def test_times_are_of_evaluation_and_of_training():
    net, ticks = nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), []
    batch = profile.draw((2, 3, 4, 4), 10, "cpu")
    found = profile.times({"none": net}, batch, rounds=2, tick=lambda: ticks.append(1))
    assert len(ticks) == 4 and set(found["none"]) == {"evaluation_ms", "training_ms"}
    assert net[1].weight.grad is not None and net.training
