from __future__ import annotations

import csv
import json
import re

import pytest
from PIL import Image

from lineattn.cli.analyze import KINDS
from lineattn.cli.main import main
from lineattn.nn.token.retention import Retention
from tests.tasks.helpers import few_digits, fit


@pytest.fixture
def checkpoint(tmp_path, monkeypatch, request):
    """A run of one epoch of a small network with the method."""
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    options = ["--model.name", "resnet14_cifar", "--model.width", "8", "--model.attn", request.param]
    options += ["--data.name", "digits", "--model.init", "paper", "--trainer.max_epochs", "1"]
    fit(tmp_path / "run", *options, "--test_after_fit", "false")
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


def read(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.medium
@pytest.mark.parametrize("checkpoint", ["kcla", "mrla_light", "layer_softmax"], indirect=True)
def test_every_kind_of_a_run(checkpoint, capsys, monkeypatch):
    drawn = {}
    for name in ("draw_similarity", "draw_decay", "draw_map"):
        draw = getattr(__import__("lineattn.analysis.pictures", fromlist=[name]), name)

        def keep(*args, draw=draw, name=name):
            drawn[name] = args
            draw(*args)

        monkeypatch.setattr(f"lineattn.analysis.pictures.{name}", keep)
    for kind in ("similarity", "decay", "depth-map"):
        assert main(["analyze", kind, "--ckpt_path", str(checkpoint), "--images", "8"]) == 0
        assert "wrote" in capsys.readouterr().out
    out = checkpoint.parents[1] / "analysis"
    pictures = {"similarity": "draw_similarity", "decay": "draw_decay", "depth_map": "draw_map"}
    for name, draw in pictures.items():
        # What is drawn is what the file says.
        written = read(out / f"{name}.csv")
        assert written == [{k: str(v) for k, v in row.items()} for row in drawn[draw][0]]
        with Image.open(out / f"{name}.png") as picture:
            assert picture.width == 800
        assert "8 images" in drawn[draw][-2]
    assert read(out / "similarity_histogram.csv") == [
        {k: str(v) for k, v in row.items()} for row in drawn["draw_similarity"][1]
    ]


@pytest.mark.medium
@pytest.mark.parametrize("checkpoint", ["none"], indirect=True)
def test_a_run_without_attention(checkpoint, capsys):
    assert main(["analyze", "decay", "--ckpt_path", str(checkpoint)]) == 2
    assert "no attention over depth" in capsys.readouterr().err


def test_the_help_lists_the_kinds(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["analyze", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {kind} " in shown for kind in KINDS)


def test_a_trained_network_needs_a_checkpoint(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", "decay"])
    assert "--ckpt_path" in capsys.readouterr().err


@pytest.mark.medium
def test_conditions(tmp_path, capsys, monkeypatch):
    """Without a checkpoint: tables, and three files of the same rows."""
    monkeypatch.setattr("lineattn.analysis.conditions.TOKENS", (4, 8))
    arguments = ["analyze", "conditions", "--methods", "metala,softmax_attention", "--out", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"metala .* query, value, decay *│ ✓ *│ ✓ *│ ✓ *│ ✓", shown)
    assert re.search(r"softmax_attention *│ not shown *│ ✗ *│ ✓ *│ ✓ *│ ✗", shown)
    assert "not about what is learned" in shown and "metala: zero is the limit of its decays: 0." in shown
    found = json.loads((tmp_path / "conditions.json").read_text())
    assert found["environment"]["seed"] == 0 and found["command"].startswith("lineattn analyze conditions --methods")
    rows = read(tmp_path / "conditions.csv")
    for row, written in zip(found["rows"], rows, strict=True):
        assert {key: str(row[key]) for key in ("method", "linear", "least", "growth")}.items() <= written.items()
        assert float(written["error_4"]) == row["fits"]["4"]
        assert [written["state_64"], written["state_1024"]] == list(map(str, row["state"]))
    with Image.open(tmp_path / "conditions.png") as picture:
        assert picture.width == 800


@pytest.mark.medium
def test_a_method_that_is_not_what_it_says_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lineattn.analysis.conditions.TOKENS", (4, 4))
    monkeypatch.setattr(Retention, "row", Retention.row._replace(decay="input"))
    assert main(["analyze", "conditions", "--methods", "retention", "--out", str(tmp_path)]) == 1
    assert "fault: retention: its row says decay: input, and measured is decay: fixed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["similarities", "--ckpt_path", "x"], "did you mean 'similarity'"),
        (["decay", "--ckpt_path", "x", "--images", "0"], "--images is 0; it must be at least 1"),
        (["decay", "--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt"),
        (["decay", "--ckpt_path", "nowhere.ckpt", "--out", __file__], "is a file; name a folder"),
        (["conditions", "--methods", "metalla"], "did you mean 'metala'"),
        (["conditions", "--methods", "kcla"], "unknown token method 'kcla'"),
        (["conditions", "--out", __file__], "is a file; name a folder"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    assert main(["analyze", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.medium
@pytest.mark.parametrize("checkpoint", ["kcla"], indirect=True)
def test_images_of_ones_own(checkpoint, capsys, tmp_path):
    for i in range(3):
        Image.new("RGB", (20 + i, 30), (80 * i, 40, 200)).save(tmp_path / f"{i}.png")
    arguments = ["analyze", "depth-map", "--ckpt_path", str(checkpoint), "--input", str(tmp_path / "*.png")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert len(read(tmp_path / "out" / "depth_map.csv")) == 3 + 2 * 5
    (tmp_path / "3.png").write_bytes(b"no image")
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "3.png" in error and "repair or remove it" in error and "--data" not in error
