"""The U-Net of the KCLA paper against its figures and its published decoder, and as a network with attention."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn import attach, create_model
from lineattn.analysis.cost import count_params
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.weights import load_trunk
from lineattn.models.encoder import load_encoder
from lineattn.models.resunet import ResUNet, ResUNetEncoder
from tests.hosts.nets import shake

# A batch norm of 512 channels that the published network has and never calls.
UNUSED = 1_024
# What the published cells have besides: a transition in front of the first stage, never called, and temperatures, which
# get no gradient.
FIRST, TEMPERATURES = 32 * 16 // 2 + 32 + 2 * 32, 2 * (2 + 4 + 8 + 8)
SIZES = [(33, 49), (70, 25), (64, 64), (1, 1), (2, 7)]


def images(batch: int = 2, size: tuple[int, int] = (33, 49), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def small(**arguments: Any) -> Any:
    return create_model("resunet", width=8, **arguments)


def test_published_count() -> None:
    with torch.device("meta"):
        plain = create_model("resunet")
        host = create_model("resunet", attn="kcla", variant="ref-seg", init="paper")
    assert count_params(plain) == 1_534_241 - UNUSED
    assert count_params(host) == 1_546_989 - UNUSED - FIRST - TEMPERATURES


@pytest.mark.parametrize("size", SIZES)
def test_output_is_as_large_as_the_image_as_published_too(size: tuple[int, int]) -> None:
    net = small(num_classes=3, net_args={"legacy_crop": True}).eval()
    with torch.no_grad():
        assert net(images(size=size)).shape == (2, 3, *size)
        assert [m.shape[2:] for m in net.encoder.features(images(size=(33, 50)))] == [
            (33, 50), (17, 25), (9, 13), (5, 7), (5, 7),
        ]  # fmt: skip


def published_decoder(net: ResUNet, maps: list[Tensor]) -> Tensor:
    """Of the widespread U-Net with bilinear upsampling: each map is doubled, then cut or filled to the one before."""
    x = maps[-1]
    for up, earlier in zip(net.decoder, maps[-2::-1], strict=True):
        x = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)(x)
        below, right = earlier.shape[2] - x.shape[2], earlier.shape[3] - x.shape[3]
        x = F.pad(x, [right // 2, right - right // 2, below // 2, below - below // 2])
        x = torch.cat([earlier, x], dim=1)
        conv1, norm1, _, conv2, norm2, _ = up.conv
        x = F.relu(norm2(conv2(F.relu(norm1(conv1(x))))))
    return net.head(x)


@pytest.mark.parametrize("size", [(64, 48), (33, 49)])
def test_legacy_crop_is_the_published_decoder(size: tuple[int, int]) -> None:
    net = shake(ResUNet(width=8, legacy_crop=True)).double().eval()
    mended = ResUNet(width=8).double().eval()
    mended.load_state_dict(net.state_dict())
    x = images(size=size, dtype=torch.float64)
    with torch.no_grad():
        found = net(x)
        assert (found - published_decoder(net, net.encoder.features(x))).abs().max() < 1e-12 * found.abs().max()
        assert (found - mended(x)).abs().max() > 1e-3 * found.std()


def test_of_the_deepest_map_the_published_decoder_sees_the_middle() -> None:
    x = images(size=(128, 128))
    for legacy_crop in (False, True):
        net = shake(ResUNet(width=8, legacy_crop=legacy_crop)).eval()
        *_, x4, x5 = net.encoder.features(x)
        x5 = x5.detach().requires_grad_()
        out = net.decoder[0](x5, x4)
        out[:, :, 4:-4, 4:-4].sum().backward()
        seen = (x5.grad != 0).any(0).any(0).any(0)
        assert seen.sum() == (8 if legacy_crop else 12)  # of 16 columns; two more on each side by the convolutions


@pytest.mark.parametrize("method", ["dla_light", "se"])
def test_attention_changes_nothing_at_the_start(method: str) -> None:
    torch.manual_seed(3)
    plain = shake(small()).eval()
    net = small(attn=method, tell=lambda report: None, trunk=plain.state_dict()).eval()
    assert isinstance(net.encoder, DepthHost) and len(net.encoder.sites) == 8
    x = images()
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))
        shake(net.encoder.sites)
        assert not torch.equal(net(x), plain(x))


def test_sites_follow_the_widths() -> None:
    host = attach(ResUNetEncoder(width=8), "kcla")
    assert [(info["num_chs"], info["reduction"]) for info in host.feature_info] == [
        (8, 1), (16, 2), (32, 4), (64, 8), (64, 8),
    ]  # fmt: skip
    sites = [site.site for site in host.sites.values()]
    assert [site.entry for site in sites] == ["start", "continue", *["transition", "continue"] * 3]
    assert [site.stride for site in sites if site.entry == "transition"] == [2, 2, 1]
    assert all(a.channels == b.channels for a, b in list(pairwise(sites))[::2])
    assert host.num_classes == 0 and host(images()).shape == (2, 64, 5, 7)
    host.reset_classifier(0)
    with pytest.raises(InputError, match="num_classes is 3; a ResUNet encoder has no classifier"):
        host.reset_classifier(3)


def test_weights_of_the_encoder_and_of_the_whole(tmp_path) -> None:
    whole = shake(small(num_classes=2))
    net = small(attn="kcla", num_classes=2)
    report = load_encoder(net, whole.encoder.state_dict())
    assert {"encoder.conv1.weight", "encoder.stages.3.1.bn2.running_var"} <= set(report.loaded)
    assert {"head.bias", "decoder.0.conv.0.weight"} <= set(report.new) and report.dropped == report.unexpected == ()
    assert torch.equal(net.encoder.backbone.conv1.weight, whole.encoder.conv1.weight)

    torch.save({"state_dict": {f"net.{key}": value for key, value in whole.state_dict().items()}}, tmp_path / "a.ckpt")
    report = load_encoder(net, tmp_path / "a.ckpt")
    assert all(name.startswith("encoder.sites.") for name in report.new) and report.unexpected == ()
    assert torch.equal(net.head.weight, whole.head.weight)
    trained = small(attn="kcla", num_classes=5)
    report = load_encoder(trained, shake(net).state_dict())
    assert report.new == ("head.weight", "head.bias") == tuple(name for name, _ in report.dropped)
    assert torch.equal(trained.encoder.sites.stages_0_0.gain, net.encoder.sites.stages_0_0.gain)

    before = copy.deepcopy(net.state_dict())
    torn = {key: value for key, value in whole.state_dict().items() if key != "encoder.stages.1.0.conv1.weight"}
    with pytest.raises(InputError, match=r"stages\.1\.0\.conv1\.weight' is missing"):
        load_encoder(net, torn)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    plain = ResUNetEncoder(width=8)
    assert load_trunk(plain, whole.encoder.state_dict()).new == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 7}, "width=7 is too narrow for a ResUNet"),
        ({"net_args": {"legacy": True}}, "resunet can't be built with net_args={'legacy': True}: .*'legacy'"),
        ({"attn": "external", "at": "layer4"}, "unknown module of ResUNetEncoder 'layer4'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_model("resunet", **arguments)


def test_attention_over_positions() -> None:
    net = small(attn="external", at="stages.3", slots=8).eval()
    assert net.encoder.stages[3].external.channels == 64
    assert net(images()).shape == (2, 1, 33, 49)
