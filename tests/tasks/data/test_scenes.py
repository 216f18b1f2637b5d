"""What the network gets of an image: the same in evaluation and in prediction, and from 0 to 255 where asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from lineattn.tasks.data.pairs import PixelPairs
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.data.transforms import normalise, spread


def image(low: int, high: int, size: tuple[int, int] = (21, 34)) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    pixels = torch.randint(low + 1, high, (3, *size), generator=draws)
    pixels[0, 0, 0], pixels[2, -1, -1] = low, high
    return pixels.to(torch.uint8)


def samples(data: SceneData, *images: Tensor, training: bool) -> list[Tensor]:
    source = PixelPairs(torch.stack(images), torch.zeros(len(images), *images[0].shape[1:], dtype=torch.uint8))
    return [data.samples(source, training=training)[0, index].inputs[0] for index in range(len(images))]


def data(**options) -> SceneData:
    return SceneData(**{"name": "digits", "channels": 3, "image_size": 16} | options)


def test_an_image_is_spread_over_the_whole_range_by_all_of_its_channels():
    found = spread(torch.tensor([[[10, 60]], [[20, 35]]], dtype=torch.uint8))
    assert found.tolist() == [[[0, 255]], [[51, 128]]] and found.dtype == torch.uint8
    assert torch.equal(spread(found), found)


@pytest.mark.parametrize("value", [0, 7, 255])
@pytest.mark.parametrize("training", [False, True])
def test_an_image_of_one_value_is_black_and_no_nan(value, training):
    plain = torch.full((3, 20, 20), value, dtype=torch.uint8)
    assert torch.equal(spread(plain), torch.zeros_like(plain))
    (found,) = samples(data(rescale=True, rotate=90, jitter=0.2), plain, training=training)
    assert found.isfinite().all() and not found.any()


@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_the_network_gets_0_to_255_whatever_the_exposure(fit):
    dark, same = image(10, 60), 2 * image(10, 60) + 30
    first, second = samples(data(rescale=True, fit=fit), dark, same, training=False)
    assert (first - second).abs().max() < 1e-3
    if fit == "crop":
        assert first.min() == 0 and first.max() == pytest.approx(255)
    (plain,) = samples(data(fit=fit), dark, training=False)
    assert plain.max() < 0


def test_mean_and_deviation_that_are_given_count():
    (found,) = samples(data(rescale=True, mean=[0.5], std=[0.25]), image(10, 60), training=False)
    assert (found.min(), found.max()) == (-2, 2)
    assert data(rescale=True).mean == [0, 0, 0] and data(rescale=True).std == [1 / 255] * 3


def test_a_crop_keeps_the_range_of_its_image():
    """Not each crop its own: images are evaluated whole."""
    halves = torch.cat([torch.full((3, 40, 40), 30), torch.full((3, 40, 40), 80)], 2).to(torch.uint8)
    halves[0, 0, 0], halves[0, 0, 1] = 0, 255
    options = data(rescale=True, scale=[1.0, 1.0], flips=[])
    values: set[float] = set()
    for epoch in range(20):
        source = PixelPairs(halves[None], torch.zeros(1, 40, 80, dtype=torch.uint8))
        values |= set(options.samples(source, training=True)[epoch, 0].inputs[0][1].flatten().round().tolist())
    assert values == {30, 80}


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_prediction_sees_an_image_as_evaluation_does(fit, rescale):
    options = data(fit=fit, rescale=rescale, rotate=90, jitter=0.5)
    pixels = image(40, 90)
    (evaluated,) = samples(options, pixels, training=False)
    predicted = options.rescaled(pixels)
    if fit == "resize":
        predicted = v2.functional.resize(predicted, [16, 16], antialias=True)
    assert torch.equal(normalise(predicted[None], options.mean, options.std)[0], evaluated)
    assert evaluated.shape == ((3, 16, 16) if fit == "resize" else (3, 21, 34))
