from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import pytest

from lineattn.bench import depth, layers
from lineattn.cli.bench import _OF_DEPTH, _add_depth
from lineattn.cli.main import main
from lineattn.ops import native

LAYER = {"part": "layer", "size": "8x256x56x56", "mode": "evaluation", "name": "published", "cpu_ms": 9, "wall_ms": 5}


@pytest.fixture
def measured(monkeypatch):
    """Instead of measuring, one row a table; and the environment as it is when no file was written yet."""

    def measure(network, methods, **settings):
        return [{"network": network, "method": "none", "mode": "evaluation", "cpu_ms": 1.0, "cpu_ratio": 1.0}]

    def measure_layers(*, rounds, against, tick):
        return [LAYER | {"name": name, "cpu_ratio": 4.2} for name in ("published", *against)]

    taken = []

    def environment(seed, *, native):
        taken.append(seed)
        return {"git": f"asked {len(taken)} times", "native": native}

    monkeypatch.setattr(depth, "measure", measure)
    monkeypatch.setattr(layers, "measure", measure_layers)
    monkeypatch.setattr("lineattn.measure.environment", environment)


def bench(*args):
    return main(["bench", *args[:1], "--allocator", "default", *map(str, args[1:])])


def test_what_is_recorded_is_the_command_and_the_commit_at_its_start(measured, tmp_path, capsys):
    assert bench("depth", "--network", "resnet18,resnet8_cifar", "--out", tmp_path) == 0
    for name in ("bench_depth_resnet18", "bench_depth_resnet8_cifar", "bench_depth"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["command"].startswith("lineattn bench depth --allocator default --network resnet18,resnet8_cifar")
        assert found["environment"] == {"git": "asked 1 times", "native": native.status()}
        assert found["setting"]["allocator"] == "default" and found["setting"]["rounds"] == 7
    shown = capsys.readouterr().out
    assert "resnet18, batch 8, 224 pixels" in shown and "plain" in shown
    assert "4.20x" in shown and "≥ 4 met" in shown


def test_the_operators_have_a_file_each(measured, monkeypatch, tmp_path, capsys):
    rows = [{"length": 2048, "mode": "forward", "name": "softmax", "cpu_ms": 1234.5, "wall_ms": 2, "cpu_ratio": 12.0}]
    bench_of_scan = SimpleNamespace(SETTING={"heads": 4}, calls=lambda rounds: rounds, measure=lambda **_: rows)
    monkeypatch.setitem(sys.modules, "lineattn.bench.scan", bench_of_scan)
    assert bench("scan", "--rounds", 3, "--out", tmp_path) == 0
    found = json.loads((tmp_path / "bench_scan.json").read_text())
    assert found["rows"] == rows and found["setting"]["heads"] == 4 and found["setting"]["rounds"] == 3
    shown = capsys.readouterr().out
    assert "2,048 tokens, forward" in shown and "1,234.50" in shown and "12.00x" in shown


AGAINST = {
    "import nothing_of_this_name": "running it failed (ModuleNotFoundError",
    "x = 1": "it defines no build",
    "def build(channels): pass": "build(64, 16) failed (TypeError",
    "def build(channels, head_dim): return 3": "build returned a int",
    "from torch import nn\ndef build(channels, head_dim): return nn.ReLU()": "forward(x, None) failed (TypeError",
    "from torch import nn\nclass M(nn.Module):\n def forward(self, x, state): return x\n"
    "def build(channels, head_dim): return M()": "must return (out, state)",
    "from torch import nn\nclass M(nn.Module):\n def forward(self, x, state): return x.sum(1), None\n"
    "def build(channels, head_dim): return M()": "turned a map (2, 64, 4, 4) into (2, 4, 4)",
}


@pytest.mark.parametrize("code", AGAINST)
def test_a_module_that_can_not_be_timed_is_one_line(measured, tmp_path, capsys, code):
    path = tmp_path / "theirs.py"
    path.write_text(code)
    assert bench("depth", "--network", "none", "--against", path, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"--against {path}: " in said and AGAINST[code] in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_module_is_timed_beside_ours(measured, tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(
        "from torch import nn\nclass Theirs(nn.Module):\n    def forward(self, x, state):\n        return x, state\n\n"
        "def build(channels, head_dim):\n    return Theirs()\n"
    )
    assert bench("depth", "--network", "none", "--against", path, "--out", tmp_path) == 0
    rows = json.loads((tmp_path / "bench_depth.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["published", "theirs.py"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["scan", "--network", "resnet18"],
            "--network: an option of `lineattn bench depth`; `bench scan` doesn't take it",
        ),
        (["memory", "--against=x.py"], "--against: an option of `lineattn bench depth`; `bench memory` doesn't"),
        (["depth", "--rounds", "0"], "--rounds 0: at least 1"),
        (["depth", "--threads", "0"], "--threads 0: at least 1"),
        (["depth", "--attn", "kcal"], "unknown depth method 'kcal'"),
        (["depth", "--network", "resnet19"], "resnet19"),
        (["depth", "--against", "none.py"], "--against none.py: no such file"),
    ],
)
def test_bad_options_are_one_line(measured, capsys, args, said):
    assert bench(*args) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("args", [["width"], ["scan", "--lenghts", "3"], []])
def test_what_no_subject_knows_shows_the_usage(capsys, args):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *args])
    assert stop.value.code == 2 and "usage: lineattn bench" in capsys.readouterr().err


def test_every_option_of_depth_is_known_to_be():
    """What the other subjects refuse by name is what depth's own parser takes beside the shared options."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_depth(parser)
    assert set(parser._option_string_actions) == set(_OF_DEPTH)
