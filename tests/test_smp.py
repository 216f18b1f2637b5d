"""Segmentation networks of segmentation_models_pytorch on our names, as ``tu-resnet50_kcla``."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import lineattn.timm  # noqa: F401  (registers the names)

smp: Any = pytest.importorskip("segmentation_models_pytorch")

pytestmark = pytest.mark.medium

NETWORKS = [
    pytest.param("Unet", {}, [2, 4, 8, 16, 32], id="Unet"),
    pytest.param("FPN", {}, [2, 4, 8, 16, 32], id="FPN"),
    pytest.param("DeepLabV3Plus", {"encoder_output_stride": 16}, [2, 4, 8, 16, 16], id="DeepLabV3Plus-16"),
    pytest.param("DeepLabV3Plus", {"encoder_output_stride": 8}, [2, 4, 8, 8, 8], id="DeepLabV3Plus-8"),
]


def build(kind: str, encoder: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return getattr(smp, kind)(encoder, encoder_weights=None, in_channels=4, classes=1, **arguments)


def picture(multiple: int) -> Tensor:
    """65x97 pixels, padded at the right and below as the network asks for."""
    x = torch.randn(2, 4, 65, 97, generator=torch.Generator().manual_seed(1))
    return pad(x, (0, -97 % multiple, 0, -65 % multiple))


def randomise_gains(net: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("gain"):
                parameter.normal_(0, 0.1)


@pytest.mark.parametrize(("kind", "arguments", "reductions"), NETWORKS)
def test_networks(kind: str, arguments: dict[str, Any], reductions: list[int]) -> None:
    trunk = timm.create_model("resnet18", in_chans=4, num_classes=0)
    net = build(kind, "tu-resnet18_kcla", trunk=trunk.state_dict(), **arguments).eval()
    assert net.encoder.model.feature_info.reduction() == reductions

    plain = build(kind, "tu-resnet18", **arguments).eval()
    plain.encoder.model.load_state_dict(trunk.state_dict())
    plain.decoder.load_state_dict(net.decoder.state_dict())
    plain.segmentation_head.load_state_dict(net.segmentation_head.state_dict())
    x = picture(1 if kind == "Unet" else arguments.get("encoder_output_stride", 32))
    with torch.no_grad():
        expected = plain(x)
        assert expected.shape == (2, 1, *x.shape[2:])
        assert torch.equal(net(x), expected)
        randomise_gains(net)
        found = net(x)
    assert found.isfinite().all() and not torch.equal(found, expected)


def test_training_uses_every_parameter() -> None:
    for depth in (5, 3):
        net = build("Unet", "tu-resnet18_kcla", encoder_depth=depth, decoder_channels=(64, 48, 32, 24, 16)[:depth])
        net(picture(32)).square().sum().backward()
        assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", ["convnext_tiny", "efficientnet_b0", "resnet18"])
def test_other_families_and_methods(name: str) -> None:
    method = "mrla_light" if name == "resnet18" else "kcla"
    net = build("Unet", f"tu-{name}_{method}").eval()
    randomise_gains(net)
    with torch.no_grad():
        found = net(picture(1))
    assert found.shape == (2, 1, 65, 97) and found.isfinite().all()
