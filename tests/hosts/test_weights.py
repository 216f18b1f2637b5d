from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lineattn import attach, create_model
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.weights import load_published, load_trunk
from tests.hosts.nets import Mean, image, shake, small


@pytest.fixture
def plain() -> nn.Module:
    return shake(small("cifar_basic"))


@pytest.fixture
def host() -> DepthHost:
    return attach(small("cifar_basic"), Mean)


def same_trunk(host: nn.Module, plain: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(host(image(size=32)), plain(image(size=32)))


def test_report_of_a_host(host: DepthHost, plain: nn.Module) -> None:
    report = load_trunk(host, plain.state_dict())
    assert same_trunk(host, plain)
    assert set(report.loaded) == set(plain.state_dict())
    assert set(report.new) == {key for key in host.state_dict() if key.startswith("sites.")}
    assert str(report) == (
        f"state dict: {len(report.loaded)} tensors loaded\n"
        f"new, as they were: {', '.join(report.new[:4])}, ... {len(report.new)} in all"
    )


def test_a_plain_network_loads_too(plain: nn.Module) -> None:
    net = small("cifar_basic")
    assert load_trunk(net, plain.state_dict()).new == ()
    assert same_trunk(net, plain)


@pytest.mark.parametrize(
    "form", ["pth", "safetensors", "wrapped", "ddp", "compiled", "lightning", "host", "shaken_host"]
)
def test_forms_of_a_trunk(form: str, host: DepthHost, plain: nn.Module, tmp_path: Path) -> None:
    state: dict[str, Tensor] = plain.state_dict()
    path = tmp_path / f"trunk.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        save_file(state, path)
    elif form == "pth":
        torch.save(OrderedDict(state), path)
    elif form == "wrapped":
        torch.save({"epoch": 3, "state_dict": state, "optimizer": {"state": {}}}, path)
    elif form == "ddp":
        torch.save({f"module.{key}": value for key, value in state.items()}, path)
    elif form == "compiled":
        torch.save({f"module._orig_mod.{key}": value for key, value in state.items()}, path)
    else:
        other = attach(plain, Mean)
        prefix = "model." if form == "lightning" else ""
        torch.save({"state_dict": {prefix + key: value for key, value in other.state_dict().items()}}, path)
    report = load_trunk(host, path)
    assert same_trunk(host, plain)
    assert report.source == str(path) and report.unexpected == ()
    assert {reason for _, reason in report.dropped} <= {"not of the trunk"}
    assert bool(report.dropped) == ("host" in form or form == "lightning")


def test_other_class_count_is_dropped_with_a_word(host: DepthHost, plain: nn.Module) -> None:
    host.reset_classifier(9)
    fc = host.get_classifier().weight.clone()
    report = load_trunk(host, plain.state_dict())
    assert torch.equal(host.get_classifier().weight, fc)
    assert torch.equal(host.backbone.conv1.weight, plain.conv1.weight)
    assert "dropped fc.weight: (5, 32) there, (9, 32) here (another class count?)" in str(report)
    with pytest.raises(InputError, match=r"fc.weight has shape \(5, 32\); the network's is \(9, 32\)"):
        load_trunk(host, plain.state_dict(), strict_head=True)


def test_a_trunk_without_a_head(host: DepthHost, plain: nn.Module) -> None:
    state = {key: value for key, value in plain.state_dict().items() if not key.startswith("fc.")}
    assert {"fc.weight", "fc.bias"} < set(load_trunk(host, state).new)
    with pytest.raises(InputError, match=r"trunk's 'fc\.weight' is missing"):
        load_trunk(host, state, strict_head=True)


def test_a_renamed_key_is_an_error_and_nothing_is_loaded(host: DepthHost, plain: nn.Module) -> None:
    state = plain.state_dict()
    state["stages.1.0.convolution1.weight"] = state.pop("stages.1.0.conv1.weight")
    before = host.backbone.conv1.weight.clone()
    with pytest.raises(
        InputError, match=r"'stages\.1\.0\.conv1\.weight' is missing; it has 'stages\.1\.0\.convolution1\.weight'"
    ):
        load_trunk(host, state)
    assert torch.equal(host.backbone.conv1.weight, before)


def test_a_trunk_of_another_shape_is_an_error(host: DepthHost) -> None:
    other = create_model("resnet14_cifar", num_classes=5, width=16)
    with pytest.raises(InputError, match=r"conv1.weight has shape \(16, 3, 3, 3\); the network's is \(8, 3, 3, 3\)"):
        load_trunk(host, other.state_dict())


def test_what_has_no_place_is_reported(host: DepthHost, plain: nn.Module) -> None:
    state = plain.state_dict() | {"neck.weight": torch.ones(1)}
    assert load_trunk(host, state).unexpected == ("neck.weight",)
    assert str(load_trunk(host, state)).endswith("no place for: neck.weight")


def test_older_files_count_no_batches(host: DepthHost, plain: nn.Module) -> None:
    state = {key: value for key, value in plain.state_dict().items() if not key.endswith("num_batches_tracked")}
    load_trunk(host, state)
    assert same_trunk(host, plain)


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.mark,))


def test_files_that_are_no_weights(host: DepthHost, plain: nn.Module, tmp_path: Path) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            load_trunk(host, tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)

    refused("missing.pth", "no such file")
    torch.save({"state_dict": plain.state_dict(), "boom": Payload(tmp_path / "ran")}, tmp_path / "code.pth")
    refused("code.pth", "could run code")
    assert not (tmp_path / "ran").exists()
    torch.save({"args": argparse.Namespace(lr=1), **plain.state_dict()}, tmp_path / "old.pth")
    refused("old.pth", "save the state_dict")
    whole = tmp_path / "whole.pth"
    torch.save(plain.state_dict(), whole)
    (tmp_path / "half.pth").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    refused("half.pth", "no whole weights file")
    (tmp_path / "empty.pth").touch()
    refused("empty.pth", "no whole weights file")
    (tmp_path / "text.pth").write_text("hello")
    refused("text.pth", "no whole weights file")
    (tmp_path / "text.safetensors").write_text("hello")
    refused("text.safetensors", "not a whole safetensors file")
    torch.save([1, 2], tmp_path / "list.pth")
    refused("list.pth", "holds no state dict")
    torch.save({"epoch": 1}, tmp_path / "epoch.pth")
    refused("epoch.pth", "holds no state dict")


def published(host: DepthHost, form: str) -> dict[str, Tensor]:
    """The host's weights under the published names, with the members that the published networks never call."""
    ours_to_theirs = {
        "query": "Wq", "key": "Wk", "value": "Wv", "norm": "bn", "gate": "head_att",
        "transition.conv": "adjust_channel", "transition.norm": "u_bn", "transition.key": "u_Wk", "decay": "lambda_t",
    }  # fmt: skip
    state: dict[str, Tensor] = {}
    for key, value in host.state_dict().items():
        room, _, rest = key.partition(".")
        if room == "backbone":
            if form == "imagenet" and rest.startswith("layer"):
                stage, tail = rest.split(".", 1)
                rest = f"{stage}.layers.{tail}"
            state[rest] = value
            continue
        site, _, rest = rest.partition(".")
        module = next(name for name in sorted(ours_to_theirs, key=len, reverse=True) if rest.startswith(name))
        theirs, path = ours_to_theirs[module] + rest.removeprefix(module), site.replace("_", ".")
        if form == "cifar":
            state[f"{path}.kcla.{theirs}"] = value
        elif form == "imagenet":
            stage, i = path.split(".")
            state[f"{stage}.attention.{i}.{theirs}"] = value
        elif theirs.startswith("bn"):
            state[f"{path}.bn_mrla{theirs.removeprefix('bn')}"] = value
        elif theirs == "lambda_t":
            state[f"{path}.mrla.lambda_t"] = value[:, None, None]
        else:
            state[f"{path}.mrla.mrla.{theirs}"] = value
    return state


@pytest.mark.parametrize("form", ["cifar", "imagenet", "mrla"])
def test_published_names(form: str) -> None:
    family = "cifar_bottleneck" if form == "cifar" else "torchvision_bottleneck"
    method, args = ("mrla_light", {}) if form == "mrla" else ("kcla", {"variant": "ref-cls"})
    trained, host = (attach(small(family), method, init="paper", **args) for _ in range(2))
    draws = torch.Generator().manual_seed(4)
    shake(trained)
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draws))
    state = {f"module.{key}": value for key, value in published(trained, form).items()}
    unused = {}
    if form != "mrla":
        first = "stages.0.0.kcla" if form == "cifar" else "layer1.attention.0"
        unused = {
            f"module.{first}.{name}": torch.ones(3) for name in ("adjust_channel.weight", "u_Wk.weight", "norm_d")
        }
    report = load_published(host, {"state_dict": state | unused})
    assert {key for key, _ in report.dropped} == set(unused)
    with torch.no_grad():
        assert torch.equal(host(image()), trained(image()))


@pytest.mark.medium
def test_published_resnet101_sums_up_at_block_11() -> None:
    """There a stage of more than eleven blocks has a transition in its midst, with a convolution that isn't called."""
    args = {"attn": "kcla", "init": "paper", "variant": "ref-cls", "num_classes": 5, "width": 4}
    trained = shake(create_model("resnet110_bottleneck_cifar", scope="anchors=11", **args))
    state = published(trained, "cifar") | {"stages.1.11.kcla.adjust_channel.weight": torch.ones(8, 4, 1, 1)}
    host = create_model("resnet110_bottleneck_cifar", scope="anchors=11", **args)
    assert [key for key, _ in load_published(host, state).dropped] == ["stages.1.11.kcla.adjust_channel.weight"]
    assert torch.equal(
        host.sites["stages_1_11"].transition.norm.weight, trained.sites["stages_1_11"].transition.norm.weight
    )
    with pytest.raises(InputError, match=r"no place for stages\.0\.11\.kcla\.u_bn"):
        load_published(create_model("resnet110_bottleneck_cifar", **args), state)


def test_published_weights_of_something_else() -> None:
    host = attach(small("cifar_bottleneck"), "kcla", init="paper")
    state = published(host, "cifar")
    with pytest.raises(InputError, match=r"no place for stages\.0\.0\.kcla\.Wz"):
        load_published(host, state | {"stages.0.0.kcla.Wz.weight": torch.ones(1)})
    lacking = {key: value for key, value in state.items() if key != "stages.0.0.kcla.Wq.weight"}
    with pytest.raises(InputError, match=r"nothing there for sites\.stages_0_0\.query\.weight"):
        load_published(host, lacking)
    with pytest.raises(InputError, match=r"is head_dim, width, num_classes or scope another"):
        load_published(attach(small("cifar_bottleneck"), "kcla", init="paper", head_dim=4), state)
    with pytest.raises(InputError, match=r"nothing there for .*gain.*init"):
        load_published(attach(small("cifar_bottleneck"), "kcla"), state)
