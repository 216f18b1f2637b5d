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


VIT = {"name": "timm/vit_tiny_patch16_224", "num_classes": 5}
SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWAPPED = {**VIT, "net_args": SIZES, "attn": "external_multihead", "swap": "blocks.*.attn", "coef": 1, "slots": 8}


def test_attention_in_the_place_of_the_networks_own(capsys: pytest.CaptureFixture) -> None:
    plain = create_model(**VIT, net_args=SIZES)
    net = create_model(**SWAPPED, trunk=plain.state_dict())
    assert [type(block.attn.attention).__name__ for block in net.blocks] == ["MultiHeadExternalAttention"] * 2
    assert torch.equal(net.blocks[1].mlp.fc1.weight, plain.blocks[1].mlp.fc1.weight)
    said = capsys.readouterr().out
    assert "external_multihead in the place of 2 modules" in said and "MMACs at 17 positions" in said
    assert "of other attention than stands there now" in said
    reports: list[object] = []
    create_model(**SWAPPED, trunk=plain.state_dict(), tell=reports.append)
    assert not capsys.readouterr().out and [type(one).__name__ for one in reports] == ["SwapReport", "LoadReport"]


def test_a_block_behind_a_module_of_a_trained_network() -> None:
    plain = create_model("resnet14_cifar", width=8).eval()
    net = create_model("resnet14_cifar", width=8, attn="external", at="stages.2", slots=8, trunk=plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), plain(x))
    assert net.stages[2].external.memory.keys.shape == (8, 32)


def test_arguments_of_the_constructor() -> None:
    net = create_model("timm/vit_tiny_patch16_224", num_classes=3, in_chans=1, net_args=SIZES)
    assert net(torch.randn(2, 1, 32, 32)).shape == (2, 3) and len(net.blocks) == 2
    host = create_model("timm/eamlp_7", attn="kcla", net_args={"img_size": 32, "embed_dim": 32, "depth": 2, "heads": 2})
    assert host(torch.randn(2, 3, 32, 32)).shape == (2, 1000)
    dilated = create_model("resnet50", net_args={"replace_stride_with_dilation": [False, False, True]})
    assert dilated.layer4[0].conv2.stride == (1, 1)


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
        ({"name": "timm/resnet18", "width": 8}, "width is for CIFAR networks and resunet; timm/resnet18 has none"),
        ({"name": "resnet20_cifar", "attn": "kcal"}, "unknown method 'kcal': did you mean 'kcla'"),
        ({"name": "resnet20_cifar", "attn": "kcla", "head": 2}, "unknown argument of kcla 'head'"),
        ({"name": "resnet20_cifar", "head_dim": 2}, "head_dim: for a method, and attn is not given"),
        ({"name": "resnet20_cifar", "attn": "none", "scope": "carry"}, "scope: for a method"),
        ({"name": "resnet20_cifar", "attn": "mrla_base", "scope": "carry"}, "use 'per_stage'"),
        ({"name": "resnet20_cifar", "attn": "kcla", "scope": "net"}, "scope is 'net'"),
        ({"name": "resnet20_cifar", "at": "stages.2"}, "at: for a method, and attn is not given"),
        ({"name": "resnet20_cifar", "attn": "none", "swap": "*"}, "swap: for a method, and attn is not given"),
        ({"name": "resnet20_cifar", "attn": "external"}, r"swap='blocks\.\*\.attn': give one of them$"),
        ({**SWAPPED, "at": "blocks.1"}, "give one of them, not both"),
        ({"name": "resnet20_cifar", "attn": "kcla", "swap": "*"}, "swap: for a method of the sample axis; kcla"),
        ({"name": "resnet20_cifar", "attn": "kcla", "at": "stages.2"}, "at: for a method of the sample axis; kcla"),
        ({"name": "resnet20_cifar", "attn": "metala"}, "attn='metala' is of the token axis, a layer for sequences"),
        ({"name": "resnet20_cifar", "attn": "metala", "at": "stages.2"}, "attn='metala' is of the token axis"),
        ({**SWAPPED, "init": "paper"}, "init='paper': for what is added to a network"),
        ({**SWAPPED, "scope": "carry"}, "scope='carry': for attention over depth"),
        ({**SWAPPED, "coeff": 1}, "did you mean 'coef'"),
        ({**SWAPPED, "swap": "block.*"}, "no module 'block.*'; its attention: blocks.0.attn"),
        ({"name": "resnet20_cifar", "net_args": {"depth": 8}}, "resnet20_cifar has none; width= is its only choice"),
        ({**VIT, "net_args": {"img_sise": 32}}, "timm/vit_tiny_patch16_224 can't be built .*'img_sise'"),
        ({**VIT, "net_args": {"num_heads": 7}}, "can't be built with net_args={'num_heads': 7}: "),
        ({**VIT, "net_args": {"pretrained": True}}, "can't have 'pretrained': trunk= loads weights"),
        ({"name": "resnet18", "net_args": {"img_size": 32}}, "resnet18 can't be built .*'img_size'"),
        ({"name": "timm/eamlp_7", "net_args": {"img_size": 40}}, "^img_size is 40; both sides must be multiples of 16"),
    ],
)
def test_bad_arguments(args: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        create_model(**args)
    assert "\n" not in str(caught.value)
