"""`lineattn profile`: what is printed, written and drawn is one thing; what can't be measured is one line."""

from __future__ import annotations

import csv
import json
from math import log
from types import SimpleNamespace

import pytest

from lineattn.bench import profile as measuring
from lineattn.cli.main import main
from lineattn.cli.profile_picture import PANELS, lines, panels
from tests.tasks.helpers import few_digits, fit

SMALL = ["--width", "4", "--image_size", "8", "--batch", "2", "--rounds", "1"]


def profile(*args):
    return main(["profile", *map(str, args)])


def table(path):
    """The CSV, numbers as such."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = ("network", "method")
    return [
        {key: value if key in texts else float(value) if value else None for key, value in row.items()} for row in rows
    ]


@pytest.mark.medium
def test_what_is_printed_written_and_drawn_is_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert profile(*SMALL, "--depths", "29,11,20", "--attn", "layer_softmax,mrla_light", "--out", tmp_path) == 0
    rows, found = table(tmp_path / "profile.csv"), json.loads((tmp_path / "profile.json").read_text())
    assert rows == found["rows"]
    methods = ["none", "layer_softmax", "mrla_light"]
    assert [(row["depth"], row["blocks"], row["method"]) for row in rows] == [
        (depth, blocks, method) for depth, blocks in ((11, 1), (20, 2), (29, 3)) for method in methods
    ]
    assert [row["saved_published_mb"] is None for row in rows[:3]] == [False, False, True]
    assert all(row["evaluation_ms"] > 0 and row["training_ms"] > 0 for row in rows)
    assert all(row["memory_mb"] > row["saved_mb"] > 0 for row in rows)
    assert found["exponents"] == measuring.growth(rows)
    assert found["exponents_by_block"] == measuring.growth_by_block(rows)
    assert found["setting"]["batch"] == 2 and found["environment"]["versions"] and "--width 4" in found["command"]

    shown = capsys.readouterr().out
    for row in rows:
        assert f"{row['saved_mb']:,.1f}" in shown and f"{row['training_ms']:,.1f}" in shown
    assert f"{found['exponents'][0]['mixing_mmac']:.2f}" in shown and "…" not in shown

    drawn = panels(rows, "title").axes
    for axes, column in zip(drawn, PANELS, strict=False):
        for line, (method, expected) in zip(axes.lines, lines(rows, column).items(), strict=True):
            of = {row["depth"]: row[column] for row in rows if row["method"] == method}
            plain = {row["depth"]: row[column] for row in rows if row["method"] == "none"}
            assert list(line.get_xdata()) == expected[0] == list(of)
            assert list(line.get_ydata()) == [(of[d] - plain[d]) * PANELS[column][2] for d in of]
    assert [text.get_text() for text in drawn[len(PANELS)].get_legend().get_texts()] == methods[1:]
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.medium
def test_costs_grow_as_the_methods_say(tmp_path):
    """Of 3, 5 and 7 blocks a stage.

    A published form keeps three maps a layer (what its norm and its ReLU read, and its sum with the block's output)
    besides those that it mixes, so that of T blocks MRLA-base keeps T (T + 1) / 2 + 3 T and standard attention
    T (T + 1) + 3 T; what one more keeps, at 4 and 6, is T + 3.5 and 2 T + 4.
    """
    options = ["--width", "4", "--image_size", "16", "--batch", "1", "--no_time", "--depths", "29,47,65"]
    assert profile(*options, "--attn", "kcla,mrla_base,layer_softmax", "--out", tmp_path) == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    kcla, *squares = found["exponents_by_block"]
    assert all(kcla[name] == pytest.approx(1, abs=0.01) for name in measuring.COUNTED)
    for square, kept in zip(squares, (9.5 / 7.5, 16 / 12), strict=True):
        assert square["mmac"] == pytest.approx(1, abs=0.01)
        assert square["mixing_mmac"] == pytest.approx(1 + log(6.5 / 4.5, 6 / 4), abs=0.01)
        assert square["saved_mb"] == pytest.approx(1, abs=0.15)
        assert square["saved_published_mb"] == pytest.approx(1 + log(kept, 6 / 4), abs=0.03)
    kcla, *squares = found["exponents"]
    assert kcla["saved_published_mb"] == pytest.approx(1, abs=0.01) and 0.6 < kcla["saved_mb"] < 1.05
    for square in squares:
        assert square["mixing_mmac"] == pytest.approx(log(7 * 8 / (3 * 4), 7 / 3), abs=0.01)
    assert not {"training_ms", "evaluation_ms"} & (set(kcla) | set(found["rows"][0]))


@pytest.mark.medium
def test_a_run_is_profiled_by_its_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    options = ["--model.name", "resnet8_cifar", "--model.width", "8", "--model.attn", "kcla", "--data.name", "digits"]
    fit(tmp_path / "run", *options, "--model.attn_args", "{head_dim: 4}", "--trainer.max_epochs", "1")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert profile("--ckpt_path", checkpoint, "--depths", "14", "--rounds", 1, "--out", tmp_path / "p") == 0
    rows = table(tmp_path / "p" / "profile.csv")
    assert [(row["network"], row["method"]) for row in rows] == [
        (f"resnet{depth}_cifar", method) for depth in (8, 14) for method in ("none", "kcla")
    ]
    setting = json.loads((tmp_path / "p" / "profile.json").read_text())["setting"]
    assert setting["image_size"] == 16 and setting["methods"]["kcla"]["head_dim"] == 4
    assert rows[1]["params"] == json.loads((tmp_path / "run" / "summary.json").read_text())["params"]
    assert (tmp_path / "p" / "profile.png").exists()
    assert profile("--ckpt_path", checkpoint, "--attn", "mrla_light") == 2
    assert "--attn with --ckpt_path: the run says which" in capsys.readouterr().err


@pytest.mark.medium
def test_a_run_of_another_network_is_profiled_alone(tmp_path, monkeypatch, capsys):
    arguments = {"name": "resnet18", "attn": "mrla_light", "init": "paper", "num_classes": 3, "in_chans": 1}
    trained = SimpleNamespace(task="cls", arguments=arguments, visual=SimpleNamespace(image_size=32))
    monkeypatch.setattr("lineattn.cli.restore.restore", lambda path: trained)
    assert profile("--ckpt_path", "x.ckpt", "--no_time", "--out", tmp_path) == 0
    rows = table(tmp_path / "profile.csv")
    assert [(row["network"], row["depth"], row["method"]) for row in rows] == [
        ("resnet18", None, "none"),
        ("resnet18", None, "mrla_light"),
    ]
    assert json.loads((tmp_path / "profile.json").read_text())["exponents"] == [{"method": "mrla_light"}]
    assert not (tmp_path / "profile.png").exists()
    assert profile("--ckpt_path", "x.ckpt", "--depths", "20") == 2
    assert "--depths 20: resnet18 comes in no other depths" in capsys.readouterr().err
    assert profile("--ckpt_path", "x.ckpt", "--batch", "1", "--no_time", "--out", tmp_path) == 2
    assert "give --batch 2" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert profile("--out", tmp_path / "file") == 2
    assert "is a file; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--attn", "kcal"], "unknown depth method 'kcal': did you mean 'kcla'"),
        (["--depths", "20,21"], "no Bottleneck CIFAR ResNet has depth 21: it must be 9n + 2"),
        (["--depths", "20,,29"], "--depths 20,,29: give whole numbers"),
        (["--depths", "-20"], "--depths -20: give whole numbers"),
        (["--batch", "0"], "--batch 0: at least 1"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--width", "1"], "width=1 is too narrow"),
        (["--image_size", "4"], "--image_size 4: at least 8"),
        (["--ckpt_path", "none.ckpt"], "none.ckpt"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, args, said):
    out = tmp_path / "out"
    assert profile(*[f"{args[0]}={args[1]}"], "--out", out) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not out.exists()
