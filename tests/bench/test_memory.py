"""The rows of `lineattn bench memory`: the forms compute the same, and what each saves can be foretold."""

from __future__ import annotations

import pytest
import torch

from lineattn.bench import memory
from tests.oracles import memory as oracle


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(memory, "CHANNELS", 16)
    monkeypatch.setattr(memory, "SLOTS", 4)
    monkeypatch.setattr(memory, "SOFTMAX_UP_TO", 32)


@pytest.mark.medium
def test_rows_cover_every_length_mode_and_form(small):
    ticks = []
    rows = memory.measure(rounds=1, tick=lambda: ticks.append(1), positions=(32, 64))
    names = {32: list(memory.FORMS), 64: [name for name in memory.FORMS if not name.startswith("softmax")]}
    timed = [row for row in rows if "positions" in row]
    assert [(row["positions"], row["mode"], row["name"]) for row in timed] == [
        (n, mode, name) for n in (32, 64) for mode in ("forward", "forward + backward") for name in names[n]
    ]
    assert len(ticks) == len(timed) == 22
    assert all(row["cpu_ratio"] == 1 for row in timed if row["name"] == "ours")
    saved = {row["name"]: round(row["saved_mb"] * 1e6) for row in timed if row["positions"] == 64 and "saved_mb" in row}
    one_map = 64 * 4 * 4
    assert saved["two products"] == saved["ours"] == saved["ours, B C N"] == one_map
    assert saved["two linear layers"] >= 2 * one_map
    fits = [row for row in rows if "exponent" in row]
    assert [(row["mode"], row["name"]) for row in fits] == [
        (f"exponent, {what}", name) for what in ("forward", "forward + backward", "saved bytes") for name in names[64]
    ]
    for row in fits:
        if "saved" in row["mode"]:
            assert row["exponent"] == pytest.approx(1, abs=0.01)


def test_a_bar_ends_where_it_was_said_to():
    assert memory.calls(rounds=3) == 3 * 2 * (6 + 6 + 6 + 5 + 5)


def test_the_published_forms_are_external_attention():
    x, keys, values = torch.randn(2, 9, 16), torch.randn(4, 16), torch.randn(4, 16)
    expected = oracle.external_attention(x.double(), keys.double(), values.double()).float()
    for name in ("ours", "two linear layers"):
        torch.testing.assert_close(memory.FORMS[name](x, keys, values), expected)
    for name in ("ours, B C N", "published, B C N"):
        torch.testing.assert_close(memory.FORMS[name](x.mT, keys, values).mT, expected)
