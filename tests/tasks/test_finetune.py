"""Starting from weights: of a plain network, of timm, of another run; slower or frozen where they are good already."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from lineattn import create_model
from lineattn.cli.main import main
from lineattn.cli.restore import restore
from lineattn.cli.task import run
from lineattn.errors import InputError
from lineattn.hosts.weights import load_trunk
from lineattn.tasks.cls import Classifier
from lineattn.tasks.optim import Optim, optimizer
from lineattn.tasks.record import Record
from tests.tasks.helpers import few_digits, fit, tiny_net

RECIPE = ("--data.name", "digits", "--data.batch_size", "40", "--data.image_size", "8", "--trainer.max_epochs", "1")
TINY = ("--model.name", "resnet14_cifar", "--model.width", "8", "--model.attn_args", "{head_dim: 8}")
STILL = ("--optim.lr", "1e-12", "--optim.weight_decay", "0")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    monkeypatch.setattr(Record, "plot", lambda self: None)


def last(folder: Path) -> dict[str, Tensor]:
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {key.removeprefix("net."): value for key, value in state.items()}


def test_a_plain_network_starts_one_with_attention(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain = create_model("resnet14_cifar", num_classes=10, in_chans=1, width=8)
    torch.save(plain.state_dict(), tmp_path / "trunk.pth")
    trunk = ("--model.trunk", str(tmp_path / "trunk.pth"))
    fit(tmp_path / "run", *RECIPE, *TINY, "--model.attn", "kcla", *trunk, *STILL, quiet=False)
    assert f"{tmp_path / 'trunk.pth'}: {len(plain.state_dict())} tensors loaded" in capsys.readouterr().out
    weights = last(tmp_path / "run")
    for key, value in plain.named_parameters():
        torch.testing.assert_close(weights[f"backbone.{key}"], value, atol=1e-6, rtol=0)


@pytest.mark.medium
def test_a_network_of_timm_from_a_file_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = timm.create_model("resnet18")  # for 1000 classes and colours
    torch.save(plain.state_dict(), "resnet18.pth")
    model = ("--model.name", "timm/resnet18", "--model.attn", "kcla", "--model.trunk", "resnet18.pth")
    run("fit", "cls", [*RECIPE, *model, *STILL], quiet=True)
    (folder,) = Path("runs/cls").iterdir()
    assert folder.name.endswith("-timm-resnet18-kcla")
    weights = last(folder)
    torch.testing.assert_close(weights["backbone.conv1.weight"], plain.conv1.weight.sum(1, keepdim=True))
    torch.testing.assert_close(weights["backbone.layer4.1.conv2.weight"], plain.layer4[1].conv2.weight)
    assert weights["backbone.fc.weight"].shape == (10, 512)
    assert run("test", "cls", ["--ckpt_path", "last", "--out", str(folder)], quiet=True)["test/acc1"] >= 0


@pytest.mark.medium
@pytest.mark.parametrize("ema", ["0", "0.9"])
def test_a_run_is_the_trunk_of_the_next(tmp_path: Path, ema: str) -> None:
    """Train a classifier, go on from its checkpoint by path with other classes, as a feature extractor, in timm."""
    fit(tmp_path / "first", *RECIPE, *TINY, "--model.attn", "kcla", "--optim.ema_decay", ema)
    path = tmp_path / "first" / "checkpoints" / "last.ckpt"
    prefix = "ema.module." if ema != "0" else ""
    trained = {key.removeprefix(prefix): v for key, v in last(tmp_path / "first").items() if key.startswith(prefix)}

    args: dict[str, Any] = {"attn": "kcla", "in_chans": 1, "width": 8, "head_dim": 8}
    net: Any = create_model("resnet14_cifar", num_classes=3, trunk=path, **args)
    own = net.state_dict()
    assert all(torch.equal(own[key], trained[key]) for key in own if ".fc." not in key)
    assert [m.shape[1] for m in net.eval().features(torch.randn(1, 1, 8, 8))] == [8, 16, 32]

    same = load_trunk(create_model("resnet14_cifar", num_classes=10, **args), path)
    assert same.new == same.dropped == same.unexpected == ()
    other = load_trunk(create_model("resnet14_cifar", num_classes=10, **(args | {"attn": "mrla_base"})), path)
    assert {reason for _, reason in other.dropped} == {"of kcla; the network has mrla_base"}


@pytest.mark.medium
def test_a_frozen_trunk_stays_as_it_is_and_the_rest_learns(tmp_path: Path) -> None:
    plain = create_model("resnet14_cifar", num_classes=10, in_chans=1, width=8)
    torch.save(plain.state_dict(), tmp_path / "trunk.pth")
    trunk = ("--model.trunk", str(tmp_path / "trunk.pth"), "--model.freeze_trunk", "true", "--model.attn", "kcla")
    found = fit(tmp_path / "run", *RECIPE, *TINY, *trunk, "--trainer.max_epochs", "2")
    weights = last(tmp_path / "run")
    for key, value in plain.state_dict().items():
        assert torch.equal(weights[f"backbone.{key}"], value) == (not key.startswith("fc.")), key
    sites = {key: value for key, value in weights.items() if key.startswith("sites.")}
    assert all(value.abs().max() > 0 for key, value in sites.items() if key.endswith(("gain", "running_mean")))
    assert found["trainable_params"] == found["params"] - sum(
        p.numel() for key, p in plain.named_parameters() if not key.startswith("fc.")
    )


@pytest.mark.parametrize("attn", ["none", "kcla"])
def test_frozen_means_evaluation(attn: str) -> None:
    args = {} if attn == "none" else {"head_dim": 8}
    module = Classifier("resnet14_cifar", attn=attn, attn_args=args, width=8, freeze_trunk=True, classes=3)
    trunk: Any = module.net if attn == "none" else module.net.backbone
    for mode in (True, False, True):
        module.train(mode)
        assert not any(m.training for m in trunk.modules())
        if attn != "none":
            assert module.net.sites["stages_0_0"].norm.training == mode
    learning = {key for key, p in trunk.named_parameters() if p.requires_grad}
    assert learning == {"fc.weight", "fc.bias"}


VIT: dict[str, Any] = {
    "name": "timm/vit_tiny_patch16_224",
    "net_args": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
}
SWAP = {"attn": "external_multihead", "swap": "blocks.*.attn", "attn_args": {"coef": 1, "slots": 4}}
EAMLP = {
    "name": "timm/eamlp_7",
    "net_args": {"img_size": 16, "embed_dim": 16, "depth": 2, "heads": 2, "stem_drop": 0.1},
}


def flags(model: dict[str, Any]) -> list[str]:
    return [part for key, value in model.items() for part in (f"--model.{key}", str(value))]


@pytest.mark.parametrize(
    ("model", "added"),
    [
        ({**VIT, **SWAP}, ("blocks.0.attn.", "blocks.1.attn.")),
        ({"name": "resnet14_cifar", "width": 8, "attn": "external", "at": "stages.2"}, ("stages.2.external.",)),
        (EAMLP, ()),
    ],
)
def test_frozen_means_all_but_what_was_put_in(model: dict[str, Any], added: tuple[str, ...]) -> None:
    module = Classifier(**model, freeze_trunk=True, classes=3)
    learning = {key for key, p in module.net.named_parameters() if p.requires_grad}
    assert learning == {key for key, _ in module.net.named_parameters() if key.startswith((*added, "fc.", "head."))}
    for mode in (True, False, True):
        module.train(mode)
        training = {f"{name}." for name, m in module.net.named_modules() if m.training}
        assert all(name.startswith(added) for name in training) and bool(training) == bool(mode and added)


@pytest.mark.medium
@pytest.mark.parametrize("model", [{**VIT, **SWAP}, EAMLP], ids=["swapped", "eamlp"])
def test_a_run_of_attention_over_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture, model: dict[str, Any]
) -> None:
    """From a plain network's weights, frozen; gone on with, evaluated and rebuilt from its checkpoint alone."""
    plain = create_model(model["name"], net_args=model["net_args"], num_classes=10, in_chans=1)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    size = ("--data.image_size", str(model["net_args"]["img_size"]))
    trunk = ("--model.trunk", str(tmp_path / "plain.pth"), "--model.freeze_trunk", "true")
    options = (*RECIPE, *flags(model), *size, *trunk, "--optim.layer_decay", "0.8", "--optim.ema_decay", "0.5")
    fit(tmp_path / "run", *options, quiet=False)
    said = capsys.readouterr().out
    assert ("external_multihead in the place of 2 modules" in said) == ("swap" in model)
    assert "tensors loaded" in said and "before the first step" in said
    found = fit(tmp_path / "run", "--ckpt_path", "last", "--trainer.max_epochs", "2", quiet=False)
    assert found["epochs"] == 2 and "in the place of" not in capsys.readouterr().out
    assert ("swap" in found["recipe"]["model"]) is False and found["recipe"]["model"]["net_args"] == model["net_args"]
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert run("test", "cls", ["--ckpt_path", str(checkpoint)], quiet=True)["test/acc1"] == found["last"]["test/acc1"]
    weights = last(tmp_path / "run")
    for key, value in plain.state_dict().items():
        if "swap" not in model or ".attn." not in key:
            assert torch.equal(weights[key], value) == (not key.startswith("head.")), key
    trained = restore(checkpoint)
    assert create_model(**trained.arguments, tell=lambda report: None).load_state_dict(trained.net.state_dict())


@pytest.mark.medium
def test_a_sweep_holds_the_plain_network_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What is of the method has no effect without one, and the runs count as of one recipe."""
    shared = [*RECIPE, *flags({**VIT, **SWAP, "attn": "none"})]
    axis = ["--grid", "model.attn=none,external_multihead"]
    assert main(["sweep", *axis, "--out", str(tmp_path), *shared]) == 0, capsys.readouterr()
    assert main(["compare", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "none" in said and "external_multihead" in said
    trained = restore(tmp_path / "none-1" / "checkpoints" / "last.ckpt")
    assert not {"swap", "coef", "slots"} & trained.arguments.keys()
    assert "blocks.0.attn.qkv.weight" in create_model(**trained.arguments).state_dict()


def test_what_has_no_plan_cannot_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineattn.tasks.image.create_model", tiny_net)
    monkeypatch.setattr("lineattn.hosts.weights.find", unknown_family)
    with pytest.raises(InputError, match="no plan"):
        Classifier(freeze_trunk=True, classes=3)


def unknown_family(net: nn.Module) -> Any:
    raise InputError("no plan")


@pytest.mark.parametrize("attn", ["none", "kcla"])
@pytest.mark.parametrize("decay_all", [True, False])
def test_layer_decay(attn: str, decay_all: bool) -> None:
    args = {} if attn == "none" else {"head_dim": 8}
    net: Any = create_model("resnet14_cifar", attn=attn, width=8, **args)
    config = Optim(lr=1.0, weight_decay=0.1, layer_decay=0.5, decay_all=decay_all)
    groups = optimizer(config, net).param_groups
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    names = {name: found.pop(id(p)) for name, p in net.named_parameters()}
    assert not found
    prefix = "" if attn == "none" else "backbone."
    assert names[f"{prefix}fc.weight"] == (1.0, 0.1)
    assert names[f"{prefix}stages.2.1.conv1.weight"] == (0.5, 0.1)
    assert names[f"{prefix}stages.0.0.conv1.weight"] == (0.5**6, 0.1)
    assert names[f"{prefix}conv1.weight"] == (0.5**7, 0.1)
    assert names[f"{prefix}bn1.weight"] == (0.5**7, 0.1 if decay_all else 0.0)
    if attn == "kcla":
        assert names["sites.stages_0_0.value.weight"] == (0.5**6, 0.1)
        assert names["sites.stages_2_1.gain"] == (0.5, 0.1 if decay_all else 0.0)


def test_the_schedule_keeps_the_layers_apart(tmp_path: Path) -> None:
    layers = ("--optim.layer_decay", "0.5", "--optim.schedule", "none", "--optim.lr", "0.2")
    found = fit(tmp_path / "run", *RECIPE, *TINY, "--model.attn", "kcla", *layers)
    assert found["epochs"] == 1
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]
    assert sorted(group["lr"] for group in state["param_groups"]) == pytest.approx(
        [0.2 * 0.5**i for i in range(7, -1, -1)]
    )
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1].split(",")[2] == "0.2"


@pytest.mark.parametrize("layer_decay", [0.0, 1.5, -1.0])
def test_layer_decay_out_of_range(layer_decay: float) -> None:
    with pytest.raises(InputError, match="layer_decay"):
        Optim(layer_decay=layer_decay)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_args": {"swap": "blocks.*.attn"}}, "attn_args has 'swap', which is no argument of a method"),
        ({"attn_args": {"tell": 3}}, "attn_args has 'tell', which is no argument of a method"),
        ({"attn_args": {"trunk": "x.pth"}}, "attn_args has 'trunk'"),
        ({"attn_args": {"example": 3}}, "attn_args has 'example'"),
        ({"attn_args": {"coef": "one"}}, "external_multihead can't be built with {'coef': 'one'}"),
        ({"net_args": VIT["net_args"] | {"num_classes": 3}}, "can't have 'num_classes'"),
        ({"net_args": [1, 2]}, "net_args is a list"),
    ],
    ids=["swap", "tell", "trunk", "example", "kind", "classes", "list"],
)
def test_arguments_that_are_none_are_one_line(change: dict[str, Any], message: str) -> None:
    options = VIT | {"attn": "external_multihead", "swap": "blocks.*.attn"} | change
    with pytest.raises(InputError, match=re.escape(message)):
        Classifier(**options, classes=3)
