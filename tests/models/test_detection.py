"""Detectors: equal to torchvision's, with any method in the trunk, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import lineattn
from lineattn import create_model
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.freeze import freeze_stages
from lineattn.models.detection import Detector
from lineattn.models.encoder import load_encoder

SMALL = {"min_size": 64, "max_size": 96, "fpn_channels": 16}
TWO_STAGE = {
    "rpn_batch_size_per_image": 32,
    "box_width": 32,
    "box_batch_size_per_image": 16,
    "rpn_post_nms_top_n_train": 20,
    "anchor_scale": 8,
}
OURS = {"faster_rcnn": "fasterrcnn", "mask_rcnn": "maskrcnn", "retinanet": "retinanet"}


def small(kind: str, trunk: str = "resnet18", **arguments: Any) -> Any:
    sizes = SMALL if kind == "retinanet" else SMALL | TWO_STAGE
    torch.manual_seed(0)
    return create_model(f"{kind}:{trunk}", num_classes=3, net_args=sizes, **arguments)


def images(*sizes: tuple[int, int], channels: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.rand(channels, *size, generator=draw) for size in sizes]


def targets(*counts: int) -> list[dict[str, Tensor]]:
    """Objects in images of 64 x 64 pixels."""
    found = []
    for count in counts:
        corner = torch.arange(count)[:, None] * torch.tensor([[9.0, 7.0]]) + 2
        masks = torch.zeros(count, 64, 64, dtype=torch.uint8)
        for i, (x, y) in enumerate(corner.long().tolist()):
            masks[i, y : y + 20, x : x + 24] = 1
        boxes = torch.cat([corner, corner + torch.tensor([24.0, 20.0])], 1)
        found.append({"boxes": boxes, "labels": torch.arange(count) % 3 + 1, "masks": masks})
    return found


def shake(net: nn.Module) -> None:
    """Statistics and gains that show what is lost of them."""
    draw = torch.Generator().manual_seed(2)
    for name, value in net.state_dict().items():
        if name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=draw))
        elif name.endswith(("running_mean", "gain")):
            value.copy_(0.1 * torch.randn(value.shape, generator=draw))


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.medium
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("attn", ["none", "kcla", "external"])
def test_published_detectors_load_and_compute_what_they_did(kind: str, attn: str) -> None:
    build = getattr(torchvision.models.detection, f"{OURS[kind]}_resnet50_fpn")
    theirs = build(weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=96).eval()
    shake(theirs)
    place = {"at": "layer4"} if attn == "external" else {}
    sizes = {"min_size": 64, "max_size": 96}
    net = create_model(f"{kind}_resnet50", num_classes=3, net_args=sizes, **({"attn": attn} | place)).eval()
    report = load_encoder(net, theirs.state_dict())
    assert not report.unexpected and not report.dropped
    assert all(".sites." in name or ".external." in name for name in report.new if "num_batches" not in name)
    x = images((50, 70), (64, 48))
    with torch.no_grad():
        found, wanted = net(x), theirs(x)
    assert all(len(one["boxes"]) for one in wanted) and same(found, wanted)


def test_weights_published_without_eps_compute_what_they_did(tmp_path: Any) -> None:
    theirs = torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4)
    shake(theirs)
    for module in theirs.modules():
        if hasattr(module, "running_var"):
            module.eps = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    published = torchvision.models.detection.RetinaNet_ResNet50_FPN_Weights.COCO_V1.url.rpartition("/")[2]
    torch.save(theirs.state_dict(), tmp_path / published)
    net = create_model("retinanet_resnet50", num_classes=3, trunk=tmp_path / published, tell=lambda _: None).eval()
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    maps, wanted = net.backbone(x), theirs.eval().backbone(x)
    for a, b in zip(maps.values(), wanted.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_names_of_the_first_published_pyramids_are_converted() -> None:
    net, other = small("faster_rcnn"), small("faster_rcnn")
    shake(other)
    nn.init.normal_(other.backbone.fpn.inner_blocks[0][0].weight)
    old = {key.replace("_blocks.0.0.", "_blocks.0."): value for key, value in other.state_dict().items()}
    assert "backbone.fpn.inner_blocks.0.weight" in old
    old |= {
        key.replace("conv.0.0.", "conv."): old.pop(key) for key in list(old) if key.startswith("rpn.head.conv.0.0.")
    }
    report = load_encoder(net, {f"module.{key}": value for key, value in old.items()})
    assert not report.unexpected
    assert torch.equal(net.backbone.fpn.inner_blocks[0][0].weight, other.backbone.fpn.inner_blocks[0][0].weight)
    assert torch.equal(net.rpn.head.conv[0][0].weight, other.rpn.head.conv[0][0].weight)


def test_weights_that_do_not_fit_leave_the_detector_as_it_was() -> None:
    net, other = small("faster_rcnn"), small("faster_rcnn", "resnet34")
    nn.init.ones_(other.rpn.head.cls_logits.weight)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match="deeper"):
        load_encoder(net, other.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_head_for_other_classes_stays_new() -> None:
    net = small("mask_rcnn")
    other = create_model("mask_rcnn:resnet18", num_classes=7, net_args=SMALL | TWO_STAGE)
    report = load_encoder(net, other.state_dict())
    dropped = {name for name, _ in report.dropped}
    heads = ("box_predictor.", "mask_fcn_logits.")
    assert dropped == {name for name in net.state_dict() if any(head in name for head in heads)}
    assert dropped <= set(report.new)


@pytest.mark.medium
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("attn", [*lineattn.list_methods("depth"), "external"])
def test_every_method_stands_in_a_detector(kind: str, attn: str) -> None:
    """Nothing changes at the start, and every parameter gets a gradient, with objects in the images and without."""
    place = {"at": "layer4"} if attn == "external" else {}
    plain, net = small(kind).eval(), small(kind, attn=attn, **place).eval()
    load_encoder(net, plain.state_dict())
    x = images((64, 64), (64, 64))
    with torch.no_grad():
        assert same(net(x), plain(x))
    card = lineattn.registry.get(attn)
    excused = {name for name, _ in (*card.no_gradient, *card.no_gradient_alone)}
    for counts in ((2, 3), (0, 0)):
        net.train().zero_grad()
        losses = net(x, targets(*counts))
        assert set(losses) == set(net.losses)
        torch.stack(list(losses.values())).sum().backward()
        bare = [name for name, p in net.named_parameters() if p.grad is None]
        assert not [name for name in bare if name.rpartition(".")[2] not in excused and name not in excused]


@pytest.mark.parametrize("trunk", ["resnet20_cifar", "timm/test_resnet", "timm/test_convnext", "timm/regnetx_002"])
def test_other_trunks(trunk: str) -> None:
    net = small("faster_rcnn", trunk, attn="kcla")
    assert isinstance(net.get_encoder(), DepthHost) and isinstance(net, Detector)
    assert not [name for name, _ in net.named_parameters() if ".fc." in name or "classifier" in name]
    losses = net(images((64, 64)), targets(2))
    torch.stack(list(losses.values())).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_arguments_of_the_trunk() -> None:
    narrow = {"trunk_args": {"channels": [16, 24, 32, 40]}}
    net = create_model("mask_rcnn:timm/resnet18", net_args=SMALL | TWO_STAGE | narrow, in_chans=1)
    assert [info["num_chs"] for info in net.get_encoder().feature_info][-4:] == [16, 24, 32, 40]
    assert net.backbone.strides == [4, 8, 16, 32]


def test_a_copy_is_independent() -> None:
    net = small("mask_rcnn", attn="kcla").eval()
    other = copy.deepcopy(net)
    x = images((64, 64))
    with torch.no_grad():
        before = net(x)
        for parameter in other.parameters():
            parameter.zero_()
        assert same(net(x), before)


def test_frozen_stages() -> None:
    net = small("faster_rcnn", attn="kcla")
    frozen = freeze_stages(net.get_encoder(), 1)
    still = {name for name, p in net.named_parameters() if not p.requires_grad}
    body = "backbone.body."
    assert {name.split(".")[3] for name in still if name.startswith(f"{body}backbone.")} == {"conv1", "bn1", "layer1"}
    assert all(name.startswith(f"{body}sites.layer1_") for name in still if ".sites." in name)
    assert any(".sites." in name for name in still) and len(frozen) == 8
    assert freeze_stages(net.get_encoder(), 0) == []
    with pytest.raises(InputError, match="5 frozen stages: the network has 4"):
        freeze_stages(net.get_encoder(), 5)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("faster_rcnn:timm/test_vit", {}, "a feature pyramid needs each coarser"),
        ("faster_rcnn_resnet51", {}, "unknown model"),
        ("faster_rcnn_resnet50", {"net_args": {"box_widht": 3}}, "did you mean 'box_width'"),
        ("retinanet_resnet50", {"net_args": {"box_width": 3}}, "unknown argument of retinanet 'box_width'"),
        ("faster_rcnn_resnet50", {"net_args": {"rpn_head": 3}}, "unknown argument of faster_rcnn 'rpn_head'"),
        ("faster_rcnn_resnet50", {"attn": "external"}, "give one of them"),
        ("faster_rcnn_resnet50", {"width": 3}, "width is for"),
    ],
)
def test_what_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message), torch.device("meta"):
        create_model(name, **arguments)
