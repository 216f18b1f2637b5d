"""Weights of the published networks give the published outputs: spec section 9, point 9."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

import lineattn
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.published import load_published
from tests.published.networks import Cifar, ImageNet
from tests.published.relatives import Cifar as relatives_cifar
from tests.published.relatives import DLABaseStage, DLALightStage, MRLABaseStage, MRLALightStage
from tests.published.relatives import ImageNet as relatives_imagenet

R50, R101 = [3, 4, 6, 3], [3, 4, 23, 3]
SHORT = [2, 1, 13, 2]  # with a twelfth block in the third stage
published = {"variant": "ref-cls", "init": "paper", "drop_path": 0.0}


def fill(net: nn.Module) -> nn.Module:
    """Seeded weights of a size that keeps the network alive; norms and their statistics too."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.ndim > 1:
                tensor.normal_(generator=draws).mul_((1.5 / tensor[0].numel()) ** 0.5)
            elif name.endswith(("weight", "running_var")):
                tensor.uniform_(0.5, 1.5, generator=draws)
            elif name.endswith(("bias", "running_mean")):
                tensor.normal_(generator=draws).mul_(0.1)
    return net


def cifar() -> tuple[nn.Module, DepthHost]:
    return Cifar(20, 7), lineattn.create_model("resnet20_bottleneck_cifar", attn="kcla", num_classes=7, **published)


def imagenet() -> tuple[nn.Module, DepthHost]:
    net = ResNet(Bottleneck, SHORT, 7, width_per_group=4)
    host = lineattn.attach(net, "kcla", head_dim=64, scope="anchors=11", **published)
    return ImageNet(SHORT, 7, base_width=4), host


@pytest.mark.parametrize(
    ("networks", "size"), [(cifar, (17, 22)), pytest.param(imagenet, (45, 37), marks=pytest.mark.medium)]
)
def test_outputs(networks, size: tuple[int, int]):
    theirs, ours = networks()
    fill(theirs)
    report = load_published(ours, theirs.state_dict())
    assert {name.rpartition(".")[0] for name, _ in report.dropped} >= {
        name for name, module in theirs.named_modules() if hasattr(module, "norm_d")
    }, "temperatures follow from p"
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, ours = theirs.double(), ours.double()
    sharpen(theirs, ours)
    for training in (False, True, False):  # the last with the statistics that the step in between has left
        found, expected = ours.train(training)(x), theirs.train(training)(x)
        assert expected.std() > 0.1
        assert (found - expected).abs().max() < 1e-11 * expected.abs().max()


SHALLOW = [2, 2, 3, 2]


RELATIVES = {
    "mrla_light": (MRLALightStage, {"head_dim": 32}),
    "mrla_base": (MRLABaseStage, {"head_dim": 16}),
    "dla_light": (DLALightStage, {"head_dim": 32}),
    "dla_base": (DLABaseStage, {"head_dim": 32}),
}
REDUCTION = {"cifar": 4, "imagenet": 16}


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["cifar", "imagenet"])
@pytest.mark.parametrize("method", RELATIVES)
def test_outputs_of_mrla_and_dla(method: str, layout: str):
    build, args = RELATIVES[method]
    if method.startswith("dla"):
        stage = partial(build, reduction=REDUCTION[layout], **args)
        args = args | {"reduction": REDUCTION[layout], "leak_sample0": True}
        if method == "dla_light" and layout == "cifar":
            stage = partial(stage, extract="excite")
    else:
        stage = partial(build, **args)
    start = {"init": "paper", "drop_path": 0.0}
    if layout == "cifar":
        theirs: nn.Module = relatives_cifar(29, 7, stage)
        ours = lineattn.create_model("resnet29_bottleneck_cifar", attn=method, num_classes=7, **start, **args)
    else:
        theirs = relatives_imagenet(SHALLOW, 7, stage, base_width=4)
        net = ResNet(Bottleneck, SHALLOW, 7, width_per_group=4)
        ours = lineattn.attach(net, method, **start, **args)
    fill(theirs)
    report = load_published(ours, {f"module.{key}": value for key, value in theirs.state_dict().items()})
    assert report.dropped == () and len(report.loaded) == len(theirs.state_dict())
    x = torch.randn(3, 3, 37, 45, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, ours = theirs.double(), ours.double()
    for training in (False, True, False):  # the last with the statistics that the step in between has left
        found, expected = ours.train(training)(x), theirs.train(training)(x)
        assert expected.std() > 0.1
        assert (found - expected).abs().max() < 1e-11 * expected.abs().max()


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: Cifar(20, 100), 258_637),
        (lambda: Cifar(56, 100), 650_853),
        (lambda: Cifar(110, 100), 1_239_177),
        (lambda: Cifar(20, 100, head_dim=64), 268_717),
        (lambda: ImageNet(R50, 1000), 25_859_078),
        (lambda: ImageNet(R50, 1000, head_dim=32), 25_812_610),
        (lambda: ImageNet(R101, 1000), 45_082_309),
        (lambda: ImageNet(R101, 1000, head_dim=32), 45_032_785),
        (lambda: relatives_cifar(20, 100, partial(MRLABaseStage, head_dim=16)), 253_416),
        (lambda: relatives_cifar(56, 100, partial(MRLALightStage, head_dim=32)), 646_864),
        # Theirs has one more batch norm of 256 channels, which is never called.
        (lambda: relatives_cifar(20, 100, partial(DLALightStage, head_dim=32, reduction=4)), 433_800 - 512),
        (lambda: relatives_cifar(110, 100, partial(DLABaseStage, head_dim=32, reduction=4)), 1_405_260),
        (lambda: relatives_imagenet(R101, 1000, partial(MRLALightStage, head_dim=32)), 44_939_646),
        (lambda: relatives_imagenet(R50, 1000, partial(DLALightStage, head_dim=32, reduction=16)), 28_581_812),
    ],
)
def test_our_copy_has_as_many_parameters_as_the_published_code(build, count: int):
    """Spec section 6, official totals: with temperatures and with what is never called."""
    with torch.device("meta"):
        assert sum(p.numel() for p in build().parameters()) == count


@pytest.mark.medium
def test_another_form_is_seen():
    """The paper's score on the code's weights is another function, and another scope has other modules."""
    theirs = fill(Cifar(20, 7)).eval()
    ours = lineattn.create_model("resnet20_bottleneck_cifar", attn="kcla", num_classes=7, init="paper").eval()
    load_published(ours, theirs.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert (ours(x) - theirs(x)).abs().max() > 1e-2

    theirs = ImageNet(SHORT, 7, base_width=4)
    carried = lineattn.attach(ResNet(Bottleneck, SHORT, 7, width_per_group=4), "kcla", head_dim=64, **published)
    with pytest.raises(InputError, match=r"layer3\.attention\.11.*another method or depth"):
        load_published(carried, theirs.state_dict())


def sharpen(theirs: nn.Module, ours: DepthHost) -> None:
    """Temperatures in float64 on both sides: as built they are float32, good to 1e-7."""
    for module in theirs.modules():
        if hasattr(module, "norm_d"):
            heads = len(module.norm_d)
            module.norm_d.copy_(0.7 ** (1 - 2 * torch.arange(heads, dtype=torch.float64) / (heads - 1)))
    for site in ours.sites.values():
        steps = torch.arange(site.head_count, dtype=torch.float64) / (site.head_count - 1)
        site.inv_temperature.copy_(0.7 ** (1 - 2 * steps))
