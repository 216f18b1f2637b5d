from __future__ import annotations

import pytest
import torch
from timm.layers import BatchNormAct2d, Conv2dSame, ConvNormAct, StdConv2d
from torch import Tensor, nn

from lineattn import attach
from lineattn.hosts.fold import fold_batch_norms
from lineattn.hosts.step import Step
from tests.hosts.nets import Mean, image, shake, small


class Shared(nn.Module):
    """One convolution before two norms, one norm behind two convolutions, one output used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm_a, self.norm_b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.conv_c, self.conv_d, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv_e, self.norm_e = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv_f, self.norm_f = nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3, affine=False)
        self.conv_g, self.norm_g = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_b(self.twice(self.norm_a(self.twice(x))))
        x = self.norm(self.conv_c(x)) + self.norm(self.conv_d(x))
        y = self.conv_e(x)
        return self.norm_g(self.conv_g(self.norm_f(self.conv_f(y + self.norm_e(y)))))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def test_only_pairs_are_folded() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), Shared(), Untraceable(), nn.BatchNorm2d(3)).double()
    for norm in [m for m in net.modules() if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None]:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    net.eval()
    x = image(dtype=torch.float64)
    with torch.no_grad():
        before = net(x)
        fold_batch_norms([Step(str(i), module) for i, module in enumerate(net)], net)
        torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-10)
    gone = [name for name, module in net.named_modules() if isinstance(module, nn.Identity)]
    assert gone == ["1", "2.norm_f"]


def folded(net: nn.Sequential, **steps: bool) -> tuple[list[str], nn.Module]:
    """The names of the batch norms that are left, after a comparison of the outputs."""
    shake(net.double().eval())
    x = image(dtype=torch.float64)
    with torch.no_grad():
        before = net(x)
        fold_batch_norms([Step(str(i), module, **steps) for i, module in enumerate(net)], net)
        torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-10)
    return [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)], net


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
def test_activations_in_a_norm_stay(act: type[nn.Module]) -> None:
    inner = nn.Sequential(nn.Conv2d(8, 8, 3), BatchNormAct2d(8, act_layer=act))
    left, net = folded(nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act_layer=act), inner))
    assert left == []
    assert [name for name, module in net.named_modules() if isinstance(module, act)] == ["1.1", "2.1.1"]


def test_convolutions_with_their_norm_are_seen_into() -> None:
    block = nn.Sequential(ConvNormAct(8, 8, 3, stride=2, padding="same"), ConvNormAct(8, 8, 1, apply_act=False))
    left, net = folded(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 1)), nn.BatchNorm2d(8), block))
    assert left == []
    assert isinstance(net[2][0].conv, Conv2dSame)


def test_a_convolution_that_changes_its_weight_is_left() -> None:
    """Standardised anew at each call, its weight forgets what was multiplied into it."""
    assert folded(nn.Sequential(StdConv2d(3, 8, 3), nn.BatchNorm2d(8)))[0] == ["1"]


@pytest.mark.parametrize("place", ["site", "feature"])
def test_what_is_read_between_the_two_is_left(place: str) -> None:
    """There a method stands, or the map is one of the pyramid's."""
    assert folded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), **{place: True})[0] == ["1"]


@pytest.mark.parametrize(
    "family", ["timm_resnet", "timm_regnet", "torchvision_regnet", "timm_efficientnet", "timm_mobilenet", "traced"]
)
@pytest.mark.parametrize("of", ["out", "shortcut"])
def test_whole_networks_of_both_libraries(family: str, of: str) -> None:
    if of == "shortcut" and family == "traced":
        pytest.skip("has no split")
    host = shake(attach(small(family).double(), Mean, of=of))
    x = image(dtype=torch.float64)
    with torch.no_grad():
        fused = host.fuse()
        torch.testing.assert_close(fused(x), host(x), rtol=1e-10, atol=1e-10)
        for a, b in zip(fused.features(x), host.features(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.backbone.modules())
