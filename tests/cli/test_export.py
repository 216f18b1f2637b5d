from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import lineattn
from lineattn.cli import export
from lineattn.cli.main import main
from lineattn.cli.restore import restore
from lineattn.errors import InputError
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
    description = json.loads((folder / "model.safetensors.json").read_text())
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
@pytest.mark.parametrize("dynamic", [False, True], ids=["batch", "batch and size"])
@pytest.mark.parametrize(("kind", "name"), [("onnx", "model.onnx"), ("torch", "model.pt2")])
def test_graphs_equal_torch(checkpoint, tmp_path, capsys, monkeypatch, kind, name, dynamic):
    options = ["--to", kind, "--check", "--out", str(tmp_path / "o"), *["--dynamic"] * dynamic]
    assert main(["export", "--ckpt_path", str(checkpoint), *options]) == 0
    shown = capsys.readouterr().out
    size = "16x80" if dynamic else "16x16"
    error = float(shown.split(f"largest absolute difference from torch over 3 random images of {size}: ")[1].split()[0])
    assert error < 1e-4
    monkeypatch.chdir(tmp_path / "o")
    assert sorted(path.name for path in tmp_path.joinpath("o").iterdir()) == [name, f"{name}.json"]
    description = json.loads((tmp_path / "o" / f"{name}.json").read_text())
    assert description["input"]["shape"] == ["batch", 1, *(["height", "width"] if dynamic else [16, 16])]

    names = {}
    exec(description["use"], names)
    trained = restore(checkpoint).net
    images = torch.randn(4, 1, *([21, 48] if dynamic else [16, 16]))  # an odd size, too
    if kind == "onnx":
        assert names["session"].get_inputs()[0].shape == description["input"]["shape"]
        found = torch.from_numpy(names["session"].run(["logits"], {"images": images.numpy()})[0])
    else:
        found = names["net"](images)
        _has_no_batch_norm_and_no_parameter_to_train(names["net"])
    torch.testing.assert_close(found, trained(images), rtol=1e-4, atol=1e-5)


def _has_no_batch_norm_and_no_parameter_to_train(net):
    assert not any("batch_norm" in str(node.target) for node in net.graph.nodes)
    assert not any(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.medium
def test_a_program_needs_torch_alone(checkpoint, tmp_path):
    assert main(["export", "--ckpt_path", str(checkpoint), "--to", "torch", "--out", str(tmp_path)]) == 0
    code = f"""
import sys, torch
net = torch.export.load({str(tmp_path / "model.pt2")!r}).module()
assert net(torch.zeros(5, 1, 16, 16)).shape == (5, 10)
assert "lineattn" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.medium
def test_a_plain_network_is_folded_too(tmp_path, monkeypatch):
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    options = ["--model.name", "resnet8_cifar", "--model.width", "8", "--data.name", "digits"]
    fit(tmp_path / "run", *options, "--trainer.max_epochs", "1", "--test_after_fit", "false")
    trained = restore(tmp_path / "run" / "checkpoints" / "last.ckpt")
    program = export._program(trained, dynamic=False).module()
    _has_no_batch_norm_and_no_parameter_to_train(program)
    images = torch.randn(3, 1, 16, 16)
    torch.testing.assert_close(program(images), trained.net(images), rtol=1e-5, atol=1e-6)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in trained.net.modules())


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["onnx", "torch"])
@pytest.mark.parametrize(
    "model",
    [
        {
            "name": "timm/vit_tiny_patch16_224",
            "net_args": "{img_size: 16, patch_size: 4, embed_dim: 64, depth: 2, num_heads: 4}",
            "attn": "external_multihead",
            "swap": "blocks.*.attn",
            "attn_args": "{coef: 1, slots: 8}",
        },
        {"name": "timm/eamlp_7", "net_args": "{img_size: 16, embed_dim: 32, depth: 2, heads: 2}"},
        {"name": "timm/eamlp_7", "net_args": "{img_size: 16, embed_dim: 32, depth: 2, heads: 2}", "attn": "kcla"},
        {"name": "resnet8_cifar", "width": "8", "attn": "external", "at": "stages.2"},
    ],
    ids=["swapped", "eamlp", "eamlp with kcla", "inserted"],
)
def test_attention_over_positions(tmp_path, monkeypatch, capsys, kind, model):
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    options = [part for key, value in model.items() for part in (f"--model.{key}", value)]
    fit(tmp_path / "run", *options, "--data.name", "digits", "--trainer.max_epochs", "1", "--test_after_fit", "false")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert main(["export", "--ckpt_path", str(checkpoint), "--to", kind, "--check"]) == 0
    shown = capsys.readouterr().out
    error = float(shown.split("largest absolute difference from torch over 3 random images of 16x16: ")[1].split()[0])
    assert error < 1e-4


def test_memories_are_folded_where_that_is_cheaper():
    net = lineattn.create_model("resnet8_cifar", in_chans=1, width=8, attn="external", at="stages.2", slots=4).eval()
    folded = export._folded(net)
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(folded(images), net(images), rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in folded.parameters()) < sum(p.numel() for p in net.parameters())


def _trained(net, side=16):
    return SimpleNamespace(net=net.eval(), visual=SimpleNamespace(channels=1, image_size=side))


class _Fixed(torch.nn.Module):
    def forward(self, x):
        if x.shape[-2] != 16:
            raise AssertionError("Input height doesn't match model")
        return x.mean((2, 3))


class _Custom(torch.nn.Module):
    def forward(self, x):
        return torch.ops.lineattn_test.double(x).mean((2, 3))


def test_a_network_of_one_size_is_said(tmp_path):
    with pytest.raises(InputError, match=r"--dynamic: this network takes images of 16x16 alone"):
        export._program(_trained(_Fixed()), dynamic=True)


def test_an_operator_of_ours_is_refused():
    with torch.library._scoped_library("lineattn_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("double", torch.empty_like, "Meta")
        with pytest.raises(InputError, match=r"operators that other programs don't know: lineattn_test.double"):
            export._program(_trained(_Custom()), dynamic=False)


@pytest.mark.parametrize(("missing", "option"), [("onnxscript", "--to onnx"), ("onnxruntime", "--check")])
def test_a_missing_extra_is_said_before_anything_is_written(missing, option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lineattn.errors.find_spec", lambda name: None if name == missing else name)
    assert main(["export", "--ckpt_path", str(tmp_path / "last.ckpt"), "--to", "onnx", "--check"]) == 2
    assert f"{option} needs the export extra" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_options_are_one_line(tmp_path, capsys):
    assert main(["export", "--ckpt_path", str(tmp_path / "gone.ckpt")]) == 2
    assert "no checkpoint at" in capsys.readouterr().err
    for option in ("--check", "--dynamic"):
        assert main(["export", "--ckpt_path", str(tmp_path / "gone.ckpt"), option]) == 2
        assert f"{option} is for --to onnx or torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
