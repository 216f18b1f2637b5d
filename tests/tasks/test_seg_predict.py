"""Flips and scales of an image beside an explicit loop over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from lineattn.tasks.data.pairs import PixelPairs
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.data.transforms import normalise
from lineattn.tasks.seg_loss import probabilities
from lineattn.tasks.seg_predict import class_probabilities

SIZE = (23, 34)


def net(outputs: int) -> nn.Module:
    """Neither side of it is like the other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.Conv2d(6, outputs, 3, padding=1)).eval()


def image() -> Tensor:
    return torch.randint(0, 256, (3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def data(**arguments: Any) -> SceneData:
    return SceneData(channels=3, image_size=20, **arguments)


@torch.no_grad()
def looped(network: nn.Module, whole: SceneData, mirrored: list[list[int]], sizes: Sequence[tuple[int, int]]) -> Tensor:
    found = []
    for size in sizes:
        for axes in mirrored:
            seen = v2.functional.resize(image(), list(size), antialias=True) if size != SIZE else image()
            logits = network(normalise(torch.flip(seen, axes)[None], whole.mean, whole.std))
            logits = v2.functional.resize(logits, list(SIZE)) if size != SIZE else logits
            found.append(probabilities(torch.flip(logits, axes))[0])
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize(
    ("flips", "mirrored"),
    [
        ([], [[]]),
        (["horizontal"], [[], [2]]),
        (["vertical", "vertical"], [[], [1]]),
        (["horizontal", "vertical"], [[], [2], [1], [1, 2]]),
    ],
    ids=["none", "horizontal", "vertical", "both"],
)
def test_flips_and_scales_are_the_mean_of_probabilities(flips: Any, mirrored: Any, outputs: int) -> None:
    network = net(outputs)
    # Axes are counted from the end: an image has one less than its logits.
    axes = [[axis - 3 for axis in some] for some in mirrored]
    for scales, sizes in (([1.0], [SIZE]), ([0.5, 1, 1.25], [(12, 17), SIZE, (29, 42)])):
        found = class_probabilities(network, image(), data(), flips=flips, scales=scales)
        torch.testing.assert_close(found, looped(network, data(), axes, sizes))
        torch.testing.assert_close(found.sum(0), torch.ones(SIZE))


def test_what_is_seen_as_a_square_is_scaled_as_one() -> None:
    network = net(2)
    found = class_probabilities(network, image(), data(fit="resize"), flips=["horizontal"], scales=[1, 1.5])
    torch.testing.assert_close(found, looped(network, data(), [[], [-1]], [(20, 20), (30, 30)]))


def test_a_small_scale_leaves_a_row() -> None:
    assert class_probabilities(net(2), image(), data(), scales=[0.05]).shape == (2, *SIZE)


@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_the_network_sees_in_prediction_what_it_sees_in_evaluation(fit: Any) -> None:
    """Each image from its own darkest to its brightest value, too."""
    seen: list[Tensor] = []

    def network(images: Tensor) -> Tensor:
        seen.append(images)
        return torch.zeros(1, 2, *images.shape[2:])

    whole, dark = data(rescale=True, fit=fit), image() // 3
    class_probabilities(network, dark, whole)
    source = PixelPairs(dark[None], torch.zeros(1, *SIZE, dtype=torch.uint8))
    assert torch.equal(seen[0], whole.samples(source, training=False)[0, 0].inputs)
    if fit == "crop":
        assert [seen[0].min().item(), seen[0].max().item()] == pytest.approx([0, 255])
