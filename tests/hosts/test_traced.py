"""Plans that are derived, for networks that no other knows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import densenet, mnasnet, shufflenetv2, squeezenet, vgg

from lineattn import attach
from lineattn.errors import InputError
from lineattn.hosts import plans
from lineattn.hosts.plans.traced import ExperimentalPlan
from lineattn.hosts.weights import load_trunk
from tests.hosts.nets import HandWritten, Mean, Wide, image, shake


def _vgg(batch_norm: bool) -> nn.Module:
    net = vgg.VGG(vgg.make_layers([8, "M", 8, 16, "M", 16], batch_norm), init_weights=False)
    net.classifier = nn.Sequential(nn.Linear(16 * 7 * 7, 5))  # the published one is wide
    return net


class Stage(nn.Module):
    """A stage with a forward of its own, as timm has them."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(before, width, 2, 2)
        self.blocks = nn.Sequential(Wide(width, width), Wide(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.down(x))


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(3, 8), Stage(8, 16))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x))


class Normed(nn.Module):
    """Layer norms, an activation in place behind each block, and a parameter in the head."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 4, 4)]
        for _ in range(3):
            layers += [nn.Sequential(nn.Conv2d(8, 8, 1)), Plus(8), nn.ReLU(inplace=True)]
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x).mean((2, 3)) * self.scale))


class Plus(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


# The network, how many sites, and the levels of its maps: channels and reduction.
KNOWN: dict[str, tuple[Callable[[], nn.Module], int, list[tuple[int, int]]]] = {
    "hand-written": (HandWritten, 4, [(16, 2), (32, 4)]),
    "stages with blocks": (Staged, 4, [(8, 2), (16, 4)]),
    "layer norm": (Normed, 3, [(8, 4)]),
    "VGG": (lambda: _vgg(False), 4, [(8, 1), (8, 2), (16, 2), (16, 4)]),
    "VGG with batch norm": (lambda: _vgg(True), 4, [(8, 1), (8, 2), (16, 2), (16, 4)]),
    "ShuffleNetV2": (
        lambda: shufflenetv2.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=5), 6,
        [(16, 8), (32, 16), (64, 32)],
    ),
    "MNASNet": (
        lambda: mnasnet.MNASNet(0.1, num_classes=5, dropout=0.0), 16,
        [(8, 4), (8, 8), (8, 16), (16, 16), (24, 32), (32, 32)],
    ),
    "SqueezeNet": (
        lambda: squeezenet.SqueezeNet("1_1", num_classes=5), 8, [(128, 4), (256, 9), (384, 21), (512, 21)]
    ),
    "DenseNet": (lambda: densenet.DenseNet(4, (2, 2), 8, num_classes=5), 2, [(16, 4), (16, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_chains_of_blocks_are_walked(name: str) -> None:
    torch.manual_seed(0)
    build, sites, levels = KNOWN[name]
    net = shake(build().eval())
    keys = list(net.state_dict())
    with pytest.warns(ExperimentalPlan, match=r"no plan knows .* experimental: sites behind \d+ blocks"):
        host = attach(net, Mean)
    x = image()
    assert len(host.sites) == sites
    assert [(info["num_chs"], info["reduction"]) for info in host.feature_info] == levels
    assert [k.removeprefix("backbone.") for k in host.state_dict() if k.startswith("backbone.")] == keys
    with torch.no_grad():
        assert torch.equal(host(x), net(x))
        shake(host)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(host)))
        before = twin(x)
        assert torch.equal(before, host(x)) and not torch.equal(before, net(x))
        for parameter in host.parameters():
            parameter.zero_()
        assert torch.equal(twin(x), before)
        kept = [m.clone() for m in twin.features(x)]
        twin(x)
        assert all(torch.equal(a, b) for a, b in zip(kept, twin.features(x), strict=True))


def test_maps_are_not_changed_by_what_comes_behind() -> None:
    """A ReLU in place behind a block belongs to it: the map is what the next block reads."""
    host = attach(Normed().eval(), Mean)
    assert list(host.sites) == ["layers_3", "layers_6", "layers_9"]
    assert {module.site.norm for module in host.sites.values()} == {"layer"}
    with torch.no_grad():
        maps = host.features(image())
        assert torch.equal(maps[-1], host.forward_features(image())) and (maps[-1] >= 0).all()


def test_training_uses_the_flags_of_the_modules() -> None:
    host = attach(Staged(), Mean).train()
    with torch.no_grad():
        assert not torch.equal(host(image()), host(image()))  # dropout in the head


def test_classifier_and_trunk() -> None:
    net = HandWritten()
    host = attach(net.eval(), Mean)
    host.reset_classifier(3)
    assert host.num_classes == 3 and host(image()).shape == (2, 3)
    report = load_trunk(host, HandWritten().state_dict())
    assert [key for key, _ in report.dropped] == ["fc.weight", "fc.bias"]
    squeeze = attach(squeezenet.SqueezeNet("1_1", num_classes=5).eval(), Mean)
    with pytest.raises(InputError, match=r"classifier 'classifier\.1' is a Conv2d"):
        squeeze.reset_classifier(3)


def test_the_error_lists_what_stands_behind_any_block() -> None:
    with pytest.raises(InputError, match=r"'stages\.0\.0' can't be split .*which mrla_light needs; .*kcla"):
        attach(HandWritten().eval(), "mrla_light")


def changed(forward: Callable[[HandWritten, Tensor], object]) -> nn.Module:
    return type("Changed", (HandWritten,), {"forward": forward})()


def _skips(net: HandWritten, x: Tensor) -> Tensor:
    x = net.stages[0](y := net.stem(x))
    return net.fc(net.stages[1](x + y).mean((2, 3)))


def _reads_early(net: HandWritten, x: Tensor) -> Tensor:
    y = net.stem(x)
    return net.fc(net.stages[1](net.stages[0](y)).mean((2, 3))) + y.mean()


def _pools_otherwise(net: HandWritten, x: Tensor) -> Tensor:
    x = net.stages[1](net.stages[0](net.stem(x))).mean((2, 3))
    return net.fc(F.dropout(x, 0.5, net.training))


def _branches(net: HandWritten, x: Tensor) -> Tensor:
    return net.fc(net.stages[1](net.stages[0](net.stem(x))).mean((2, 3))) if x.sum() > 0 else x


def _two(net: HandWritten, x: Tensor) -> tuple[Tensor, Tensor]:
    x = net.stages[1](net.stages[0](net.stem(x)))
    return net.fc(x.mean((2, 3))), x


def _twice(net: HandWritten, x: Tensor) -> Tensor:
    return net.fc(net.stages[1](net.stages[0](net.stages[0](net.stem(x)))).mean((2, 3)))


def _without(net: HandWritten, x: Tensor) -> Tensor:
    return net.stages[1](net.stages[0](net.stem(x))).mean((2, 3))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_skips, r"it is no chain of blocks: 'add' reads 'stages_0_1' and 'stem_1'"),
        (_reads_early, r"it is no chain of blocks: 'mean_1' of the head reads 'stem_1'"),
        (_pools_otherwise, r"its forward is another one in training \(use modules"),
        (_branches, r"torch\.fx can't trace it \("),
        (_two, r"it returns more than one tensor"),
        (_twice, r"its forward calls 'stages\.0\.0' twice"),
        (_without, r"there is no classifier behind its last block"),
    ],
)
def test_other_networks_are_refused_with_the_reason(
    forward: Callable[[HandWritten, Tensor], object], message: str
) -> None:
    net = changed(forward).train()
    with pytest.raises(InputError, match=rf"no plan for .*Changed: {message}.*; supported families: CIFAR ResNet, "):
        plans.find(net)
    assert all(module.training and not module._forward_hooks for module in net.modules())


def test_networks_without_maps_or_repeated_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="no class of block repeats"):
        plans.find(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    tokens = nn.TransformerEncoderLayer(8, 1, 8, batch_first=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2), nn.Linear(64, 8), tokens, copy.deepcopy(tokens))
    with pytest.raises(InputError, match=r"none of its repeated blocks puts out a map \(B, C, H, W\)"):
        plans.find(net)
    big = nn.Sequential(Plus(3), Plus(3), nn.Flatten(), nn.Linear(3, 2))
    with pytest.raises(InputError, match="on images neither of 64x64 nor of 224x224"):
        plans.find(big)
