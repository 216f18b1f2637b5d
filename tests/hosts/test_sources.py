from __future__ import annotations

import argparse
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models import resnet18

from lineattn.errors import InputError
from lineattn.hosts.sources import read
from tests.hosts.nets import small


@pytest.fixture(scope="module")
def trunk() -> dict[str, Tensor]:
    """ResNet-18's weights; timm's and torchvision's have the same names."""
    torch.manual_seed(3)
    return resnet18().state_dict()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def torch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of torch's hub, and no network."""

    def unplugged(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", unplugged)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def in_cache(hub: Path, repository: str) -> Path:
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_timm_by_name(hub: Path, trunk: dict[str, Tensor]) -> None:
    save_file(trunk, in_cache(hub, "timm/resnet18.a1_in1k") / "model.safetensors")
    found = read("timm/resnet18.a1_in1k")
    assert equal(found.tensors, trunk) and found.name == "timm/resnet18.a1_in1k"
    assert equal(read("timm/resnet18").tensors, trunk)  # its first tag


def test_any_repository_of_timm_networks(hub: Path, trunk: dict[str, Tensor]) -> None:
    folder = in_cache(hub, "somebody/pets")
    save_file(trunk, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": {}}')
    assert equal(read("hf-hub:somebody/pets").tensors, trunk)


@pytest.mark.parametrize("name", ["timm/resnet18.a1_in1k", "hf-hub:somebody/pets"])
def test_no_network_and_no_cache_is_one_line(hub: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        read(name)
    line = str(caught.value)
    assert line.startswith(f"{name}: the weights can't be fetched or read (") and "\n" not in line
    assert f"https://huggingface.co/{name.removeprefix('hf-hub:')}" in line and "--model.trunk PATH" in line


def test_a_damaged_file_in_the_cache_is_one_line(hub: Path) -> None:
    (in_cache(hub, "timm/resnet18.a1_in1k") / "model.safetensors").write_text("hello")
    with pytest.raises(InputError, match=r"timm/resnet18\.a1_in1k: the weights can't be fetched or read"):
        read("timm/resnet18.a1_in1k")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/resnt18.a1_in1k", r"unknown weights 'timm/resnt18\.a1_in1k': did you mean 'timm/resnet18\.a1_in1k'"),
        ("timm/resnet18.nope", r"has no such weights; those it has: .*timm/resnet18\.a1_in1k"),
        ("timm/resnet50t", r"has no such weights; it has none for this network"),
        ("torchvision/resnet19", r"unknown weights 'torchvision/resnet19': did you mean 'torchvision/resnet1"),
        ("torchvision/ResNet18_Weights.NOPE", r"unknown weights 'torchvision/ResNet18_Weights\.NOPE'"),
        ("resnet18.pth", r"resnet18\.pth: no such file; give a weights file .*timm/NAME or torchvision/NAME"),
    ],
)
def test_names_that_do_not_exist(hub: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["torchvision/resnet18", "torchvision/ResNet18_Weights.IMAGENET1K_V1"])
def test_torchvision_by_name(torch_home: Path, trunk: dict[str, Tensor], name: str) -> None:
    torch.save(trunk, torch_home / "resnet18-f37072fd.pth")
    assert equal(read(name).tensors, trunk)


def test_torchvision_without_a_network_is_one_line(torch_home: Path) -> None:
    with pytest.raises(InputError) as caught:
        read("torchvision/resnet18")
    line = str(caught.value)
    assert "URLError" in line and "https://download.pytorch.org/models/resnet18-f37072fd.pth" in line
    assert line.endswith(f"or put the file into {torch_home}") and "\n" not in line


def test_no_code_in_a_cached_file_runs(torch_home: Path, trunk: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(trunk | {"boom": Payload(tmp_path / "ran")}, torch_home / "resnet18-f37072fd.pth")
    with pytest.raises(InputError, match=r"torchvision/resnet18: the weights can't be fetched or read"):
        read("torchvision/resnet18")
    assert not (tmp_path / "ran").exists()


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("timm").mkdir()
    torch.save({"a": torch.ones(1)}, "timm/resnet18.a1_in1k")
    assert read("timm/resnet18.a1_in1k").tensors == {"a": torch.ones(1)}


def test_averaged_weights_of_timms_training_script() -> None:
    last, averaged = {"a": torch.zeros(1)}, {"a": torch.ones(1)}
    assert read({"state_dict": last, "state_dict_ema": averaged}).tensors == averaged


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.mark,))


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            read(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)

    plain = small("cifar_basic")
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
