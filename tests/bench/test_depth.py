"""The rows of `lineattn bench depth`: complete, relative to the plain network, and saved bytes that can be foretold."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lineattn.bench import depth
from lineattn.bench.timing import take_turns
from lineattn.measure import SavedBytes, environment
from lineattn.ops import native


@pytest.mark.medium
def test_rows_cover_every_mode_and_method_against_plain():
    ticks = []
    rows = depth.measure(
        "resnet20_bottleneck_cifar",
        ["kcla"],
        batch_size=2,
        image_size=16,
        rounds=1,
        tick=lambda: ticks.append(1),
    )
    assert [(row["mode"], row["method"]) for row in rows] == [
        (mode, method)
        for mode in ("evaluation", "evaluation, trunk folded", "training step", "saved")
        for method in ("none", "kcla")
    ]
    assert len(ticks) == depth.calls(["kcla"], rounds=1) == 6
    for row in rows:
        ratio = row.get("cpu_ratio", row.get("saved_ratio"))
        assert ratio == 1 if row["method"] == "none" else ratio > 0
        assert row.get("native") == (None if row["method"] == "none" else native.status())
    plain, kcla = (row["saved_mb"] for row in rows[-2:])
    assert 1 < kcla / plain <= 2


def test_calls_take_turns_in_an_order_that_is_drawn():
    order = []
    timings = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=20)
    rounds = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert rounds[0] == ("a", "b") and set(rounds) == {("a", "b"), ("b", "a")}
    assert len(timings["a"].wall_ms) == len(timings["b"].cpu_ms) == 20


def test_nothing_is_collected_in_a_turn():
    seen = []
    take_turns({"a": lambda: seen.append(gc.isenabled())}, rounds=1)
    assert seen == [True, False] and gc.isenabled()  # the first call warms up


def test_saved_bytes_count_each_storage_once_and_leave_parameters_and_inputs_out():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Tanh())
    x = torch.randn(3, 4, dtype=torch.float32, requires_grad=True)
    saved = SavedBytes()
    with saved.counting(net.float(), x):
        out = net(x)
    assert saved.total == 2 * 3 * 8 * 4  # the outputs of both tanh, 4 bytes a number
    assert out.shape == (3, 8)


def test_a_method_without_kernels_says_so():
    assert depth.ran("mrla_light") == {"native": "no kernels"} and depth.ran("kcla") == {"native": native.status()}


def test_environment_names_versions_and_threads():
    found = environment(seed=3, native="on: avx2")
    assert found["seed"] == 3 and found["native"] == "on: avx2" and found["threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] in torch.__version__
