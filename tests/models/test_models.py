from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lineattn import create_model, list_models
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost

CIFAR = {"num_classes": 100}


def trainable(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "args", "count"),
    [
        ("resnet20_bottleneck_cifar", {"attn": "kcla", **CIFAR}, 257_938),
        ("resnet56_bottleneck_cifar", {"attn": "kcla", **CIFAR}, 650_042),
        ("resnet110_bottleneck_cifar", {"attn": "kcla", **CIFAR}, 1_238_198),
        ("resnet20_bottleneck_cifar", {"attn": "mrla_light", **CIFAR}, 254_312),
        ("resnet20_bottleneck_cifar", {"attn": "mrla_base", **CIFAR}, 253_416),
        ("resnet20_bottleneck_cifar", {"attn": "layer_softmax", **CIFAR}, 253_416),
        ("resnet56_bottleneck_cifar", {"attn": "mrla_light", **CIFAR}, 646_864),
        ("resnet56_bottleneck_cifar", {"attn": "layer_softmax", **CIFAR}, 644_176),
        ("resnet50", {"attn": "kcla"}, 25_807_525),
        ("resnet50", {"attn": "kcla", "head_dim": 64}, 25_850_133),
        ("resnet50", {"attn": "mrla_light"}, 25_738_452),
        ("resnet101", {"attn": "kcla"}, 45_008_719),
        ("resnet101", {"attn": "kcla", "head_dim": 64}, 45_038_271),
        ("resnet101", {"attn": "mrla_light"}, 44_939_646),
    ],
)
@pytest.mark.medium
def test_trainable_parameters_of_the_papers_networks(name: str, args: dict, count: int) -> None:
    with torch.device("meta"):
        net = create_model(name, init="paper", **args)
    assert trainable(net) == count
    assert net.feature_info[-1]["num_chs"] == net.get_classifier().in_features


def test_published_reset_of_resnet101_counts_its_used_parameters() -> None:
    net = create_model("resnet110_bottleneck_cifar", attn="kcla", init="paper", scope="anchors=11", num_classes=100)
    # One site a stage of twelve blocks: a batch norm and a channel convolution each.
    assert trainable(net) == 1_238_198 + sum(2 * c + k for c, k in ((64, 3), (128, 5), (256, 5)))


@pytest.mark.parametrize("attn", [None, "none"])
def test_plain_networks(attn: str | None) -> None:
    net = create_model("resnet20_cifar", attn=attn)
    assert not isinstance(net, DepthHost) and net.fc.out_features == 10
    assert create_model("resnet18").fc.out_features == 1000


@pytest.mark.parametrize("name", ["resnet14_cifar", "resnet18"])
def test_channels_and_classes(name: str) -> None:
    net = create_model(name, attn="kcla", num_classes=3, in_chans=1).eval()
    assert net(torch.randn(2, 1, 32, 32)).shape == (2, 3)


def test_width() -> None:
    assert create_model("resnet14_cifar", width=8).conv1.out_channels == 8
    with pytest.raises(InputError, match="resnet18"):
        create_model("resnet18", width=8)


def test_paper_start_of_imagenet_networks_zeroes_the_branches() -> None:
    assert create_model("resnet50", init="paper").layer1[0].bn3.weight.eq(0).all()
    assert create_model("resnet50").layer1[0].bn3.weight.eq(1).all()


def test_same_seed_same_network() -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(7)
        nets.append(create_model("resnet14_cifar", attn="kcla", width=8))
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.medium
def test_networks_of_timm(capsys: pytest.CaptureFixture) -> None:
    plain = create_model("timm/resnet18", num_classes=5, in_chans=1)
    host = create_model("timm/resnet18", attn="kcla", num_classes=5, in_chans=1, trunk=plain.state_dict(), head_dim=16)
    assert type(plain).__module__ == type(host.backbone).__module__ == "timm.models.resnet"
    x = torch.randn(2, 1, 33, 47)
    with torch.no_grad():
        assert torch.equal(host.eval()(x), plain.eval()(x))
    assert create_model("timm/resnet18").num_classes == 1000
    assert f"state dict: {len(plain.state_dict())} tensors loaded" in capsys.readouterr().out


def test_a_trunk_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain = create_model("resnet18", num_classes=5)
    torch.save(plain.state_dict(), tmp_path / "trunk.pth")
    for attn in (None, "kcla"):
        net = create_model("resnet18", attn=attn, num_classes=2, in_chans=4, trunk=tmp_path / "trunk.pth")
        trunk = net if attn is None else net.backbone
        assert torch.equal(trunk.layer4[1].conv2.weight, plain.layer4[1].conv2.weight)
        said = capsys.readouterr().out
        assert "adapted conv1.weight: for 3 channels there, for 4 here" in said and "dropped fc.weight" in said


def test_names() -> None:
    assert "resnet56_bottleneck_cifar" in list_models() and "resnet50" in list_models()
    assert list_models("*_bottleneck_cifar") == [n for n in list_models() if n.endswith("bottleneck_cifar")]
    assert list_models("no*") == []


@pytest.mark.medium
@pytest.mark.parametrize("name", list_models())
def test_every_listed_model_builds(name: str) -> None:
    with torch.device("meta"):
        host = create_model(name, num_classes=2, attn="kcla")
    assert host.num_classes == 2 and host(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"name": "resnet50_cifar_bottleneck"}, "unknown model 'resnet50_cifar_bottleneck': did you mean"),
        ({"name": "resnet21_cifar"}, "depth 21: it must be 6n"),
        ({"name": "convnext_tiny"}, "unknown model 'convnext_tiny': did you mean 'timm/convnext_tiny'"),
        ({"name": "timm/resnt50"}, "unknown model 'timm/resnt50': did you mean 'timm/resnet50'"),
        (
            {"name": "timm/resnet50.a1_in1k"},
            r"are weights: the network is timm/resnet50, and trunk='timm/resnet50\.a1_in1k' loads them",
        ),
        ({"name": "timm/resnet18", "width": 8}, "width is for CIFAR networks; timm/resnet18 has none"),
        ({"name": "resnet20_cifar", "attn": "kcal"}, "unknown method 'kcal': did you mean 'kcla'"),
        ({"name": "resnet20_cifar", "attn": "kcla", "head": 2}, "unknown argument of kcla 'head'"),
        ({"name": "resnet20_cifar", "head_dim": 2}, "head_dim: for a method, and attn is not given"),
        ({"name": "resnet20_cifar", "attn": "none", "scope": "carry"}, "scope: for a method"),
        ({"name": "resnet20_cifar", "attn": "mrla_base", "scope": "carry"}, "use 'per_stage'"),
        ({"name": "resnet20_cifar", "attn": "kcla", "scope": "net"}, "scope is 'net'"),
    ],
)
def test_bad_arguments(args: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_model(**args)
