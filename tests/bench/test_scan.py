"""The rows of `lineattn bench scan` and `bench decode`: every form is the recurrence, and what it keeps is known."""

from __future__ import annotations

import pytest
import torch

from lineattn.bench import decode, scan
from lineattn.ops import native
from tests.oracles import scan as oracle


@pytest.mark.medium
def test_rows_cover_every_length_mode_and_form():
    ticks = []
    rows = scan.measure(rounds=1, tick=lambda: ticks.append(1), lengths=(8, 32))
    names = ["ours", "python loop", "causal softmax (SDPA, d=128)", "chunked (PyTorch)"]
    assert [(row["length"], row["mode"], row["name"]) for row in rows] == [
        (length, mode, name)
        for length in (8, 32)
        for mode in ("forward", "forward + backward", "saved")
        for name in names
    ]
    assert len(ticks) == 16 == scan.calls(rounds=1)
    for row in rows:
        if row["mode"] != "saved":
            assert row["cpu_ratio"] == 1 if row["name"] == "ours" else row["cpu_ratio"] > 0
    saved = {row["name"]: round(row["saved_mb"] * 1e6) for row in rows[-4:]}
    if native.enabled:
        assert saved["ours"] == 0
    states = 31 * 4 * 64 * 128 * 4  # every state but the first, 4 bytes a number
    assert saved["python loop"] >= states
    assert saved["causal softmax (SDPA, d=128)"] >= 32 * 4 * 128 * 4  # at least the output


def test_every_form_is_the_recurrence():
    inputs, _ = scan._inputs(19, torch.Generator().manual_seed(0))
    exact, _ = oracle.scan(*(t.detach().double() for t in inputs), scale=scan.KEYS**-0.5)
    for form in (scan.ours, scan.indexing_loop, scan.unbinding_loop, scan.chunked):
        with torch.no_grad():
            torch.testing.assert_close(form(*inputs), exact.float())


def test_a_step_is_compared_with_caches_of_every_length(monkeypatch):
    monkeypatch.setattr(decode, "STEPS", 2)
    ticks, contexts = [], (16, 64, 128)
    rows = decode.measure(rounds=1, tick=lambda: ticks.append(1), contexts=contexts)
    softmax, layer = "softmax over a cache (SDPA, d=128)", "MetaLA, the layer"
    assert [(row["context"], row["name"]) for row in rows] == [
        (context, name) for context in contexts for name in ("ours", layer, softmax)
    ]
    assert len(ticks) == 9 == decode.calls(rounds=1)
    memory = 4 * 64 * 128 * 4
    assert [round(row["state_mb"] * 1e6) for row in rows] == [
        size for context in contexts for size in (memory, memory + 3 * 512 * 4, 2 * 4 * context * 128 * 4)
    ]
    assert all(row["cpu_us"] > 0 and row["cpu_ratio"] > 0 for row in rows)
