"""Networks of segmentation_models_pytorch by name; as an encoder of ours is used there by itself: tests/test_smp.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import timm
import torch

from lineattn import create_model
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.models import task_of
from tests.hosts.nets import shake


def images(size: tuple[int, int] = (65, 97)) -> torch.Tensor:
    return torch.randn(2, 4, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "method", "net_args"),
    [
        ("smp/unet:resnet18", "kcla", {"decoder_channels": (64, 48, 32, 24, 16)}),
        ("smp/unet:resnet18", "mrla_light", {"encoder_depth": 3, "decoder_channels": (64, 48, 32)}),
        ("smp/fpn:convnext_atto", "kcla", {}),
        ("smp/deeplabv3plus:resnet18", "kcla", {"encoder_output_stride": 16}),
    ],
)
def test_any_architecture_and_size(name: str, method: str, net_args: dict[str, Any]) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    plain: Any = create_model(name, num_classes=3, in_chans=4, net_args=net_args)
    net: Any = create_model(
        name, attn=method, num_classes=3, in_chans=4, net_args=net_args, trunk=plain.state_dict(), tell=lambda _: None
    )
    assert isinstance(net.get_encoder(), DepthHost) and task_of(name) == "seg"
    with torch.no_grad():
        for size in ((65, 97), (70, 25)):
            found = net.eval()(images(size))
            assert found.shape == (2, 3, *size) and torch.equal(found, plain.eval()(images(size)))
        shake(net.get_encoder().sites)
        assert not torch.equal(net(images(size)), found)
    net.train()(images()).square().mean().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.medium
def test_weights_of_a_classifier() -> None:
    pytest.importorskip("segmentation_models_pytorch")
    plain = timm.create_model("resnet18")
    reports: list[Any] = []
    net: Any = create_model("smp/unet:resnet18", trunk=plain.state_dict(), tell=reports.append)
    assert torch.equal(net.get_encoder().layer4[1].conv2.weight, plain.layer4[1].conv2.weight)
    assert [key.rpartition("model.")[2] for key, _ in reports[0].dropped] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smp/unet", "smp/unet names no encoder: smp/ARCHITECTURE:NAME"),
        ("smp/unit:resnet18", "unknown architecture of segmentation_models_pytorch 'unit': did you mean 'unet'"),
        ("smp/unet:resnt18", "unknown encoder 'resnt18': did you mean 'resnet18'"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(InputError, match=message):
        create_model(name)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(InputError, match=r"^segmentation_models_pytorch is not installed: pip install .*\]'$"):
        create_model("smp/unet:resnet18")
