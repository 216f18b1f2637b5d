from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import resnet

import lineattn
from lineattn import attach
from lineattn.errors import InputError
from lineattn.hosts.attach import as_host
from lineattn.models import create_model
from lineattn.models.cifar_resnet import BasicBlock, CifarResNet
from lineattn.nn.token.metala import MetaLA
from tests.hosts.nets import Mean, image, shake, small


class Between(resnet.ResNet):
    """Something between two stages that the family doesn't have."""

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = self.layer4(self.layer3(x * 1.01))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class OtherHead(resnet.ResNet):
    def _forward_impl(self, x: Tensor) -> Tensor:
        return super()._forward_impl(x).softmax(-1)


class NoPool(resnet.ResNet):
    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer4(self.layer3(self.layer2(x)))), 1))


@pytest.mark.parametrize("method", ["metala", MetaLA])
def test_a_method_of_the_token_axis_is_refused(method: str | type) -> None:
    with pytest.raises(InputError, match=r"^metala is of the token axis .* lineattn\.nn\.token\.metala\.MetaLA$"):
        attach(small("cifar_basic"), method)


class ZeroGated(resnet.ResNet):
    """Its extra layer shows in no output before training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = nn.Conv2d(64, 64, 1)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer4(self.layer3(self.layer2(x + 0 * self.extra(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class SquaredBlock(resnet.BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Between, r"Between: 'layer3\.0' is the first step that puts out other numbers \(by up to"),
        (OtherHead, r"OtherHead: after the last step, the head puts out other numbers"),
        (NoPool, r"NoPool: its forward never calls 'maxpool', which a torchvision ResNet does"),
        (ZeroGated, r"ZeroGated: its forward calls 'extra', which a torchvision ResNet has not"),
    ],
)
def test_the_first_step_that_differs_is_named(cls: type[resnet.ResNet], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attach(cls(resnet.BasicBlock, [1, 1, 1, 1], num_classes=5), Mean)


def test_a_changed_classifier_shape_is_named() -> None:
    net = small("torchvision_basic")
    net.register_forward_hook(lambda _module, _args, out: out[:, :3])
    with pytest.raises(InputError, match=r"after the last step, the head puts out shape \(2, 3\), not \(2, 5\)"):
        attach(net, Mean)


def test_a_hook_on_a_stage_is_found() -> None:
    net = small("cifar_basic")
    net.stages[1].register_forward_hook(lambda _module, _args, out: 2 * out)
    with pytest.raises(InputError, match=r"'stages\.2\.0' is the first step"):
        attach(net, Mean)


def test_a_block_with_a_forward_of_its_own_only_matters_where_it_is_split() -> None:
    net = resnet.ResNet(SquaredBlock, [1, 1, 1, 1], num_classes=5).eval()
    host = attach(net, Mean)
    assert torch.equal(host(image()), net(image()))
    with pytest.raises(InputError, match=r"'layer1\.0' is the first step"):
        attach(net, Mean, of="shortcut")


def test_parameters_that_a_step_or_a_block_reads_itself_are_no_extra_layers() -> None:
    """Positions are added between two steps, and a layer scale is the block's own, which isn't called when split."""
    for family in ("torchvision_vit", "torchvision_convnext", "timm_convnext"):
        net = small(family)
        host = attach(net, Mean, of="shortcut")
        x = image(size=host.plan.probe_side(net))
        with torch.no_grad():
            assert torch.equal(host(x), net(x))


def test_modules_inside_a_stage_are_passed_and_have_no_site() -> None:
    net = small("cifar_basic")
    net.stages[1].insert(1, nn.AvgPool2d(3, 1, 1))
    host = attach(net, Mean)
    assert list(host.sites) == ["stages_0_0", "stages_0_1", "stages_1_0", "stages_1_2", "stages_2_0", "stages_2_1"]
    assert torch.equal(host(image()), net(image()))


def test_a_difference_is_found_at_the_first_block_after_it() -> None:
    net = small("cifar_basic")
    net.stages.insert(1, nn.Sequential(nn.BatchNorm2d(8)))  # a stage more is a step more, not a difference
    assert "stages_2_0" in attach(net, Mean).sites


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("of", ["out", "shortcut"])
def test_the_network_is_left_as_it_was(training: bool, of: str) -> None:
    net = shake(small("torchvision_basic")).train(training)
    net.layer2.train(not training)
    before = copy.deepcopy(net.state_dict())
    flags = [module.training for module in net.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    host = attach(net, Mean, of=of)
    assert torch.equal(torch.rand(3), expected)  # `Mean` itself draws nothing
    assert host.backbone is net
    assert host.training is host.sites.training is training
    assert [module.training for module in net.modules()] == flags
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())


def test_hooks_and_flags_are_restored_after_an_error() -> None:
    net = OtherHead(resnet.BasicBlock, [1, 1, 1, 1]).train()
    with pytest.raises(InputError):
        attach(net, Mean)
    assert all(module.training and not module._forward_hooks for module in net.modules())


def test_random_layers_do_not_disturb_the_proof() -> None:
    class Noisy(CifarResNet):
        def __init__(self) -> None:
            super().__init__(BasicBlock, 8)
            self.relu.register_forward_hook(lambda _module, _args, out: out + torch.rand_like(out))

    assert len(attach(Noisy(), Mean).sites) == 3


def test_copy() -> None:
    net = small("cifar_basic")
    host = attach(net, Mean, copy=True)
    host.backbone.fc.weight.data.zero_()
    assert net.fc.weight.abs().sum() > 0


def test_type_of_numbers_follows_the_network() -> None:
    host = attach(small("cifar_basic").double(), Mean)
    assert {p.dtype for p in host.parameters()} == {torch.float64}
    assert host(image(dtype=torch.float64)).dtype == torch.float64


def test_head_dim_is_the_familys_and_divides_the_width() -> None:
    def widths(family: str, **args: Any) -> list[int]:
        return [module.head_dim for module in attach(small(family), Mean, **args).sites.values()]

    assert widths("cifar_basic") == [8, 8, 16, 16, 16, 16]  # 8, 16 and 32 channels
    assert widths("torchvision_basic") == [8, 8, 16, 32, 32, 32]  # 32 behind the last two stages' 32 and 64
    assert set(widths("cifar_basic", head_dim=4)) == {4}


def test_names_of_methods_and_arguments() -> None:
    net = small("cifar_basic")
    with pytest.raises(InputError, match="unknown method 'kcal': did you mean 'kcla'"):
        attach(net, "kcal")
    with pytest.raises(InputError, match="unknown argument of kcla 'headdim': did you mean 'head_dim'"):
        attach(net, "kcla", headdim=4)
    with pytest.raises(InputError, match="must be 'identity' or 'paper'"):
        attach(net, "kcla", init="zero")
    with pytest.raises(InputError, match=r"already has attention over depth .Mean can.t be attached a second time"):
        attach(attach(net, Mean), Mean)


def test_paper_start_has_no_gain() -> None:
    host = attach(small("cifar_basic"), "kcla", init="paper")
    assert not any(name.endswith("gain") for name, _ in host.named_parameters())
    with torch.no_grad():
        assert not torch.equal(host(image()), host.backbone(image()))


def test_scope_reaches_the_sites() -> None:
    host = attach(small("cifar_basic"), "kcla", scope="every=1")
    entries = [module.site.entry for module in host.sites.values()]
    assert entries == ["start", *["transition"] * 5]
    assert {module.site.entry for module in attach(small("cifar_basic"), "mrla_base").sites.values()} == {
        "start",
        "continue",
    }


def test_public_name() -> None:
    assert lineattn.attach is attach


def test_seeds_of_accelerators_are_left_alone(monkeypatch) -> None:
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    attach(create_model("resnet20_bottleneck_cifar", width=4), "kcla", head_dim=4)
    assert not seeded


def test_what_is_no_network_of_images_is_one_line() -> None:
    with pytest.raises(InputError, match="the network is a str"):
        attach("resnet50", "kcla")


def test_maps_instead_of_pooled_features() -> None:
    """timm's ``global_pool=""``: the classifier reads channels, whatever the map's width is."""
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet18", num_classes=0, global_pool="")
    assert attach(net, "eca").head_hidden_size == 512


def test_a_network_without_a_place_for_attention_is_one_line() -> None:
    net = timm.create_model("test_efficientnet")
    with pytest.raises(InputError, match="no block that attention over depth could stand behind"):
        attach(net, "kcla")


def test_a_host_without_attention_has_the_maps_of_the_network() -> None:
    host = as_host(create_model("resnet20_cifar").eval())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(host(x), host.backbone(x)) and not list(host.sites)
    assert torch.equal(host.features(x)[-1], host.forward_features(x)) and as_host(host) is host
