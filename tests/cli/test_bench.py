from __future__ import annotations

import json

import pytest

from lineattn.bench import depth
from lineattn.cli.main import main


@pytest.fixture
def measured(monkeypatch):
    """Instead of measuring, one row a network; and the environment as it is when no file was written yet."""

    def measure(network, methods, **settings):
        return [{"network": network, "method": "none", "mode": "evaluation", "cpu_ms": 1.0, "cpu_ratio": 1.0}]

    taken = []

    def environment(seed):
        taken.append(seed)
        return {"git": f"asked {len(taken)} times"}

    monkeypatch.setattr(depth, "measure", measure)
    monkeypatch.setattr("lineattn.measure.environment", environment)


def test_what_is_recorded_is_the_command_and_the_commit_at_its_start(measured, tmp_path, capsys):
    args = ["bench", "depth", "--allocator", "default", "--network", "resnet18,resnet8_cifar", "--out", str(tmp_path)]
    assert main(args) == 0
    for network in ("resnet18", "resnet8_cifar"):
        found = json.loads((tmp_path / f"bench_depth_{network}.json").read_text())
        assert found["command"].startswith("lineattn bench depth --allocator default --network resnet18,resnet8_cifar")
        assert found["environment"] == {"git": "asked 1 times"}
    assert "resnet18, batch 8, 224 pixels" in capsys.readouterr().out
