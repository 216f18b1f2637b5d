from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import lineattn
from lineattn.cli.main import main
from lineattn.cli.restore import restore
from tests.tasks.helpers import few_digits, fit


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A run of one epoch of a small network with KCLA and averaged weights."""
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    options = ["--model.name", "resnet8_cifar", "--model.width", "8", "--model.attn", "kcla", "--data.name", "digits"]
    options += ["--model.init", "paper", "--model.attn_args", "{drop_path: 0.1}", "--optim.ema_decay", "0.5"]
    fit(tmp_path / "run", *options, "--trainer.max_epochs", "1", "--test_after_fit", "false")
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.medium
def test_safetensors_and_the_json_rebuild_the_network(checkpoint, capsys, monkeypatch):
    assert main(["export", "--ckpt_path", str(checkpoint)]) == 0
    folder = checkpoint.parents[1] / "export"
    assert str(folder / "model.safetensors") in capsys.readouterr().out
    description = json.loads((folder / "model.json").read_text())
    net = lineattn.create_model(**description["create_model"])
    net.load_state_dict(load_file(folder / "model.safetensors"))
    images = torch.randn(2, 1, 16, 16)
    trained = restore(checkpoint).net
    torch.testing.assert_close(net.eval()(images), trained(images), rtol=1e-5, atol=1e-6)
    monkeypatch.chdir(folder)
    names = {}
    exec(description["use"], names)
    torch.testing.assert_close(names["net"](images), trained(images))
    assert description["classes"] == [str(digit) for digit in range(10)]
    assert description["input"]["shape"] == ["batch", 1, 16, 16]


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_equals_torch(checkpoint, tmp_path, capsys, monkeypatch):
    assert (
        main(["export", "--ckpt_path", str(checkpoint), "--to", "onnx", "--check", "--out", str(tmp_path / "o")]) == 0
    )
    shown = capsys.readouterr().out
    error = float(shown.split("largest absolute difference from torch over 3 random images: ")[1].split()[0])
    assert error < 1e-4
    assert (tmp_path / "o" / "model.onnx").exists() and (tmp_path / "o" / "model.json").exists()
    monkeypatch.chdir(tmp_path / "o")
    names = {}
    exec(json.loads((tmp_path / "o" / "model.json").read_text())["use"], names)
    assert names["session"].get_inputs()[0].name == "images"


@pytest.mark.parametrize(("missing", "option"), [("onnxscript", "--to onnx"), ("onnxruntime", "--check")])
def test_a_missing_extra_is_said_before_anything_is_written(missing, option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lineattn.cli.export.find_spec", lambda name: None if name == missing else name)
    assert main(["export", "--ckpt_path", str(tmp_path / "last.ckpt"), "--to", "onnx", "--check"]) == 2
    assert f"{option} needs the export extra" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_options_are_one_line(tmp_path, capsys):
    assert main(["export", "--ckpt_path", str(tmp_path / "gone.ckpt")]) == 2
    assert "no checkpoint at" in capsys.readouterr().err
    assert main(["export", "--ckpt_path", str(tmp_path / "gone.ckpt"), "--check"]) == 2
    assert "--check is for --to onnx" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
