"""Trainable parameters of the networks that KCLA is compared with: section 6 of the specification."""

from __future__ import annotations

import pytest
import torch

from lineattn import create_model

pytestmark = pytest.mark.medium
CIFAR = {"num_classes": 100}
NETS = ("resnet20_bottleneck_cifar", "resnet56_bottleneck_cifar", "resnet110_bottleneck_cifar")
# A batch norm of 256 channels that the published network has and never calls.
UNUSED = 512
COUNTS = {
    ("layer_linear", ()): (253_416, 644_176, 1_230_316),
    ("layer_hydra", ()): (253_416, 644_176, 1_230_316),
    ("layer_performer", ()): (253_416, 644_176, 1_230_316),
    ("layer_focused", ()): (255_208, 649_552, 1_241_068),
    ("dla_light", (("reduction", 4),)): (433_800 - UNUSED, 826_352 - UNUSED, 1_415_180 - UNUSED),
    ("dla_base", (("reduction", 4),)): (428_360, 819_120, 1_405_260),
    # Published without its projection: of a stage's t-th layer two matrices (t, 2) from the third layer on.
    ("layer_linformer", ()): (
        253_416,
        644_176 + 3 * 2 * 2 * sum(range(3, 7)),
        1_230_316 + 3 * 2 * 2 * sum(range(3, 13)),
    ),
}


def count(name: str, **arguments: object) -> int:
    with torch.device("meta"):
        net = create_model(name, init="paper", **arguments)
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "attn", "arguments", "expected"),
    [
        pytest.param(name, attn, dict(arguments), expected, id=f"{name}-{attn}")
        for (attn, arguments), row in COUNTS.items()
        for name, expected in zip(NETS, row, strict=True)
    ],
)
def test_cifar(name: str, attn: str, arguments: dict, expected: int) -> None:
    assert count(name, attn=attn, **arguments, **CIFAR) == expected


def test_imagenet() -> None:
    assert count("resnet50", attn="dla_light", reduction=16) == 28_581_812
    assert count("resnet101", attn="dla_light", reduction=16) == 47_783_006
