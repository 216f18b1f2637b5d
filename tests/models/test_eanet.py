"""EANet against the figures of its paper's code, and on trunks of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from lineattn import attach, create_model, list_models
from lineattn.analysis.cost import count_macs, count_params
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.models.eanet import EANet, dilated_resnet
from lineattn.models.encoder import load_encoder
from lineattn.nn.sample.external import ExternalAttention
from tests.hosts.nets import shake

SIZES = [(33, 49), (70, 25), (64, 64), (1, 1), (9, 2)]


def images(batch: int = 2, size: tuple[int, int] = (33, 49), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def trunk(output_stride: int = 8, **arguments: Any) -> nn.Module:
    """timm's, narrow, of one block a stage."""
    return ResNet(
        Bottleneck, (1, 1, 1, 1), num_classes=0, output_stride=output_stride, stem_type="deep", stem_width=8,
        channels=(4, 8, 8, 16), **arguments,
    )  # fmt: skip


def small(encoder: nn.Module | None = None, **arguments: Any) -> EANet:
    return EANet(encoder or trunk(), **{"num_classes": 5, "width": 16, "slots": 8} | arguments)


@pytest.mark.parametrize(
    ("depth", "count", "giga"),
    [(50, 34_846_933, 157.24), pytest.param(101, 53_839_061, 237.26, marks=pytest.mark.medium)],
)
def test_published_figures(depth: int, count: int, giga: float) -> None:
    with torch.device("meta"):
        net: Any = create_model(f"eanet_resnet{depth}").eval()
        x = torch.empty(1, 3, 513, 513)
    assert count_params(net) == count and count_params(net.attention) == 591_360
    assert count_params(net.before) == 9_438_208 and count_params(net.behind) == 1_180_160
    assert round(count_macs(net, x) / 1e9, 2) == giga
    assert net(torch.empty(1, 3, 65, 97, device="meta")).shape == (1, 21, 65, 97)


@pytest.mark.parametrize(("stride", "third", "fourth"), [(8, [1, 2, 2, 2, 2, 2], [2, 8, 16]), (16, [1] * 6, [1, 4, 8])])
def test_dilations(stride: int, third: list[int], fourth: list[int]) -> None:
    with torch.device("meta"):
        net: Any = create_model("eanet_resnet50", net_args={"output_stride": stride})
        widths = [m.out_channels for m in net.encoder.conv1 if isinstance(m, nn.Conv2d)]
        maps = net.encoder.forward_features(torch.empty(1, 3, 65, 97))
    for stage, expected in ((net.encoder.layer3, third), (net.encoder.layer4, fourth)):
        convs = [block.conv2 for block in stage]
        assert [conv.dilation for conv in convs] == [conv.padding for conv in convs] == [(d, d) for d in expected]
    assert widths == [64, 64, 128] and net.stride == stride
    assert maps.shape[2:] == (64 // stride + 1, 96 // stride + 1)


@pytest.mark.parametrize("size", SIZES)
def test_output_is_as_large_as_the_image_at_another_stride(size: tuple[int, int]) -> None:
    net = small(trunk(16)).eval()
    with torch.no_grad():
        assert net(images(size=size)).shape == (2, 5, *size)


def test_against_the_formula() -> None:
    """At 8k + 1 pixels; another image is that with zeros at the right and below."""
    net = shake(small(norm="official")).double().eval()
    x = images(size=(33, 49), dtype=torch.float64)
    with torch.no_grad():
        y = net.before(net.encoder.forward_features(x))
        assert y.shape[2:] == (5, 7)
        attention: Any = net.attention
        query = y.flatten(2).mT @ attention.query.weight.mT + attention.query.bias
        alpha = (query @ attention.memory.keys.mT).softmax(1)
        alpha = alpha / (1e-9 + alpha.sum(2, keepdim=True))
        out = attention.norm((alpha @ attention.memory.values @ attention.project.weight.mT).mT).unflatten(2, (5, 7))
        y = net.head(net.behind((out + y).relu()))
        expected = F.interpolate(y, (33, 49), mode="bilinear", align_corners=True)
        assert (net(x) - expected).abs().max() < 1e-10
        x[:, :, :, 45:] = 0
        assert torch.equal(net(x[:, :, :, :45]), net(x)[:, :, :, :45])


@pytest.mark.parametrize("method", ["kcla", "mrla_light"])
def test_a_host_as_the_encoder(method: str) -> None:
    """Before the network is built, or afterwards."""
    plain = shake(small()).eval()
    net = copy.deepcopy(plain)
    net.set_encoder(attach(net.get_encoder(), method))
    assert isinstance(net.encoder, DepthHost) and net.encoder.feature_info[-1]["reduction"] == 8
    with torch.no_grad():
        assert torch.equal(net(images()), plain(images()))
    again = EANet(attach(trunk(), method), num_classes=5, width=16, slots=8)
    assert again.stride == 8 and again(images()).shape == (2, 5, 33, 49)


@pytest.mark.medium
def test_weights_of_a_classifier() -> None:
    """Of the same trunk with strides: where its convolutions are dilated, the weights are the same."""
    plain = timm.create_model("resnet50s")
    reports: list[Any] = []
    net: Any = create_model("eanet_resnet50", attn="kcla", trunk=plain.state_dict(), tell=reports.append)
    (report,) = reports
    assert [name for name, _ in report.dropped] == ["encoder.fc.weight", "encoder.fc.bias"]
    assert report.unexpected == () and {"head.weight", "attention.memory.keys"} <= set(report.new)
    assert all(name.startswith(("encoder.sites.", "before.", "attention.", "behind.", "head.")) for name in report.new)
    assert torch.equal(net.encoder.backbone.layer4[2].conv2.weight, plain.layer4[2].conv2.weight)


def test_weights_of_the_whole() -> None:
    trained = shake(small(num_classes=3))
    net = small(attach(trunk(), "kcla"))
    report = load_encoder(net, trained.state_dict())
    assert {name for name in report.new if not name.startswith("encoder.sites.")} == {"head.weight", "head.bias"}
    assert torch.equal(net.attention.memory.keys, trained.attention.memory.keys)


def test_on_other_networks_of_timm() -> None:
    net = small(timm.create_model("regnety_002", num_classes=0)).eval()
    assert net.stride == 32 and isinstance(net.attention, ExternalAttention)
    with torch.no_grad():
        assert net(images()).shape == (2, 5, 33, 49)


def test_names() -> None:
    assert list_models(task="seg") == ["resunet", "eanet_resnet50", "eanet_resnet101"]
    assert not set(list_models(task="seg")) & set(list_models())
    assert list_models("eanet*") == [] and len(list_models("eanet*", task="seg")) == 2
    with pytest.raises(InputError, match="task is 'gan'; it must be 'cls', 'seg' or 'det'"):
        list_models(task="gan")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "eanet_resnet50", "width": 8}, "width is for CIFAR networks and resunet"),
        ({"name": "eanet_resnet34"}, "unknown model 'eanet_resnet34': did you mean 'eanet_resnet"),
        ({"name": "eanet_resnet50", "net_args": {"output_stride": 32}}, "^output_stride is 32; it must be 8 or 16"),
        ({"name": "eanet_resnet50", "net_args": {"slot": 8}}, "can't be built with net_args={'slot': 8}"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message), torch.device("meta"):
        create_model(**arguments)


def test_depths() -> None:
    with pytest.raises(InputError, match="depth is 34"):
        dilated_resnet(34)
