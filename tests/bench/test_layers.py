"""The rows of KCLA by itself: complete, and saved bytes that can be foretold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lineattn.bench import layers, scan
from lineattn.bench.targets import TARGETS, find
from lineattn.ops import native

SHAPE = (2, 64, 6, 6)


class Nothing(nn.Module):
    def __init__(self, *_):
        super().__init__()

    def forward(self, x, state):
        return x, state


@pytest.mark.medium
def test_rows_of_layer_chain_and_growth():
    ticks = []
    rows = layers.measure(
        rounds=1,
        against={"theirs": Nothing},
        tick=lambda: ticks.append(1),
        single=[SHAPE],
        chain=(SHAPE, 4),
        growth=(SHAPE, (2, 4)),
    )
    assert [(row["part"], row["mode"], row["name"]) for row in rows] == [
        *(("layer", mode, n) for mode in ("evaluation", "training step") for n in ("ours", "published", "theirs")),
        ("chain", "saved", "ours"),
        ("chain", "saved", "published"),
        *(("growth", "training step", f"ours, {depth} layers") for depth in (2, 4)),
        ("growth", "exponent", "processor time"),
        ("growth", "exponent", "saved bytes"),
    ]
    assert len(ticks) == 2 * 3 + 2
    assert all(row["cpu_ratio"] == 1 for row in rows if row["name"] == "ours" and row["part"] == "layer")
    assert all(row["native"] == native.status() for row in rows if row["name"].startswith("ours"))


def test_a_bar_ends_where_it_was_said_to():
    assert layers.calls(rounds=3, against={"theirs": Nothing}) == 3 * (2 * 2 * 3 + 4)


def saved_maps(name, build, first, depth):
    torch.manual_seed(0)
    shape = (4, 64, 16, 16)
    return layers._chain_row(name, layers._chain(first, build, shape, depth), shape, depth)["saved_maps"]


def test_what_a_chain_saves():
    """Blocks alone keep nothing that is counted; the published form five maps a layer; ours far less than one."""
    assert saved_maps("nothing", Nothing, Nothing, 8) == 0
    published = saved_maps("published", layers.PublishedKCLA, layers.PublishedKCLA, 8)
    assert 5 <= published < 5.2
    assert saved_maps("ours", layers.Ours, layers._ours_first, 8) < (0.15 if native.enabled else 1)


def test_targets_meet_the_rows_that_they_are_for():
    row = {"part": "layer", "size": "8x256x56x56", "mode": "training step", "name": "published", "cpu_ratio": 3.5}
    target = find("depth", row)
    assert target.verdict(row) == "≥ 3 met"
    assert target.verdict(row | {"cpu_ratio": 4.0}) == "≥ 4 met (stretch)"
    assert target.verdict(row | {"cpu_ratio": 2.9}) == "≥ 3 MISSED"
    assert find("depth", row | {"size": "8x1024x14x14"}) is None and find("scan", row) is None
    row = {"length": 2048, "mode": "forward", "name": scan.SOFTMAX, "cpu_ratio": 7.9}
    assert find("scan", row).verdict(row) == "≥ 8 MISSED" and find("scan", row | {"length": 512}) is None
    assert len({str(target.where) + target.figure for target in TARGETS}) == len(TARGETS)
