"""Segmentation metrics against their definitions, pixel by pixel, and against numbers found by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lineattn.errors import InputError
from lineattn.tasks.seg_meter import NAMES, SegMeter
from tests.oracles.segmentation import metrics

CPU = torch.device("cpu")
ZERO = torch.tensor(0.0)
IGNORED = torch.full((4, 5), 255)
EMPTY, FULL = torch.zeros(4, 5, dtype=torch.long), torch.ones(4, 5, dtype=torch.long)
DOT = EMPTY.clone().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(1))


def measured(pairs, classes=2):
    meter = SegMeter(classes)
    for prediction, mask in pairs:
        meter.update(ZERO, prediction[None], mask[None])
    found = meter.compute("val", CPU) | meter.per_class("val", CPU)
    return {key.removeprefix("val/"): value for key, value in found.items() if key != "val/loss"}


def assert_as_defined(pairs, classes=2):
    found = measured(pairs, classes)
    assert found == pytest.approx(metrics([(p.numpy(), t.numpy()) for p, t in pairs], classes), abs=1e-12)
    assert all(math.isfinite(value) for value in found.values())
    return found


def drawn(classes, height, width, seed, size=1):
    """A prediction that errs in some pixels, and a mask with some ignored, in blocks of `size`."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, classes, (-(-height // size), -(-width // size)))
    mask = blocks.repeat(size, 0).repeat(size, 1)[:height, :width]
    noise = random.integers(0, classes, mask.shape)
    prediction = np.where(random.random(mask.shape) < 0.2, noise, np.roll(mask, 1, 1))
    mask = np.where(random.random(mask.shape) < 0.1, 255, mask)
    return torch.tensor(prediction), torch.tensor(mask)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (13, 17)])
def test_random_images(classes, shape):
    assert_as_defined([drawn(classes, *shape, seed) for seed in range(3)], classes)


def near_and_far(height, width, shift):
    mask = torch.zeros(height, width, dtype=torch.long)
    mask[4:9, 3:10] = 1
    return mask.roll((0, shift), (0, 1)), mask


@pytest.mark.parametrize(
    ("height", "width", "shift", "full"),
    [(240, 320, 2, True), (240, 320, 3, False), (240, 321, 3, True), (20, 24, 1, False)],
    ids=["nearer", "just as far", "a larger diagonal", "small"],
)
def test_the_tolerance_is_a_share_of_the_diagonal(height, width, shift, full):
    """The diagonal of 240 x 320 is 400, of which 0.75 % are 3: only what is nearer counts."""
    pair = near_and_far(height, width, shift)
    assert (assert_as_defined([pair])["boundary_f"] == 100) is full


def test_blocks_of_many_classes_within_the_tolerance():
    assert 0 < assert_as_defined([drawn(4, 12, 150, seed, size=6) for seed in range(2)], 4)["boundary_f"] < 100


@pytest.mark.parametrize(
    ("prediction", "mask", "score"),
    [(EMPTY, EMPTY, 100), (DOT, EMPTY, 0), (EMPTY, DOT, 0), (FULL, FULL, 100), (FULL, EMPTY, 0), (FULL, DOT, None)],
    ids=["both empty", "empty mask", "empty prediction", "both full", "full for empty", "full"],
)
def test_masks_without_foreground_or_background(prediction, mask, score):
    found = assert_as_defined([(prediction, mask)])
    if score is not None:
        assert (found["iou_fg_image"], found["dsc_fg_image"], found["boundary_f"]) == (score,) * 3
    assert ("iou_fg" in found) == ("dsc_fg" in found) == bool((prediction | mask).any())
    assert ("sensitivity" in found) == bool(mask.any()) and ("specificity" in found) == (not mask.all())


def test_classes_that_are_not_there_are_left_out():
    found = assert_as_defined([(torch.tensor([[0, 2, 2, 2]]), torch.tensor([[0, 2, 2, 0]]))], 5)
    assert found["miou"] == pytest.approx((50 + 200 / 3) / 2)
    assert [key for key in found if key.startswith("iou/")] == ["iou/0", "iou/2"]


@pytest.mark.parametrize("classes", [2, 3])
def test_an_image_of_ignored_pixels_counts_nowhere(classes):
    assert measured([(DOT, IGNORED)], classes) == {}
    assert measured([(DOT, IGNORED), (DOT, FULL)], classes) == measured([(DOT, FULL)], classes)
    meter = SegMeter(classes)
    meter.update(torch.tensor(2.0), torch.stack([DOT, DOT]), torch.stack([FULL, IGNORED]))
    assert meter.count(CPU) == 1 and meter.compute("val", CPU)["val/loss"] == 2


def test_an_empty_epoch_has_no_metrics():
    meter = SegMeter(2)
    assert (meter.compute("val", CPU), meter.per_class("val", CPU), meter.count(CPU)) == ({}, {}, 0)


def test_numbers_by_hand():
    """Masks 01/11 and 00/0-, found as 11/01 and 01/00."""
    meter = SegMeter(2)
    masks = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [0, 255]]], dtype=torch.uint8)
    meter.update(torch.tensor(0.25), torch.tensor([[[1, 1], [0, 1]], [[0, 1], [0, 0]]]), masks)
    meter.update(torch.tensor(1.0), torch.tensor([[[0]]]), torch.tensor([[[0]]]))
    # TP 2, FP 2, FN 1, TN 3. The first image's boundaries are (0,0), (1,1), found, and (0,1), (1,0), true: no match.
    assert meter.compute("val", CPU) == pytest.approx(
        {
            "val/loss": 1.5 / 3,
            "val/miou": 100 * (2 / 5 + 3 / 6) / 2,
            "val/pixel_acc": 100 * 5 / 8,
            "val/class_acc": 100 * (3 / 5 + 2 / 3) / 2,
            "val/iou_fg": 40,
            "val/dsc_fg": 100 * 4 / 7,
            "val/sensitivity": 100 * 2 / 3,
            "val/specificity": 60,
            "val/iou_fg_image": 100 * (2 / 4 + 0 + 1) / 3,
            "val/dsc_fg_image": 100 * (4 / 6 + 0 + 1) / 3,
            "val/boundary_f": 100 * (0 + 0 + 1) / 3,
        }
    )
    assert meter.per_class("val", CPU) == pytest.approx({"val/iou/0": 50, "val/iou/1": 40})


def test_every_metric_has_a_name():
    meter = SegMeter(2)
    meter.update(ZERO, DOT[None], DOT[None])
    assert list(meter.compute("val", CPU)) == [f"val/{key}" for key in NAMES]
    assert meter.compute("val", CPU)["val/boundary_f"] == 100


def test_without_the_boundary_the_rest_is_the_same():
    with_it, without = SegMeter(3), SegMeter(3, boundary=False)
    for meter in (with_it, without):
        meter.update(ZERO, *(part[None] for part in drawn(3, 9, 8, 0)))
    results = with_it.compute("val", CPU)
    del results["val/boundary_f"]
    assert without.compute("val", CPU) == results


SIZES = [(16, 12), (5, 20), (14, 3), (1, 1)]


def padded(pairs):
    """One batch; what is predicted in the padding, and where it lies, makes no difference."""
    predictions, masks = torch.ones(len(pairs), 18, 23, dtype=torch.long), torch.full((len(pairs), 18, 23), 255)
    for row, (prediction, mask) in enumerate(pairs):
        place = (row, slice(row, row + mask.shape[0]), slice(1, 1 + mask.shape[1]))
        predictions[place], masks[place] = prediction, mask
    return predictions, masks


@pytest.mark.parametrize("classes", [2, 4])
def test_one_batch_with_padding_is_as_one_image_after_the_other(classes):
    pairs = [drawn(classes, *shape, seed, size=3) for seed, shape in enumerate(SIZES)]
    whole, single = SegMeter(classes), SegMeter(classes)
    whole.update(torch.tensor(0.3), *padded(pairs))
    for prediction, mask in pairs:
        single.update(torch.tensor(0.3), prediction[None], mask[None])
    torch.testing.assert_close(whole.sums, single.sums, rtol=1e-14, atol=0)


def test_images_of_one_batch_have_tolerances_of_their_own():
    """3 pixels off: as far as the tolerance of the smaller image, within that of the larger."""
    small, large = near_and_far(240, 320, 3), near_and_far(240, 321, 3)
    predictions, masks = torch.zeros(2, 240, 321, dtype=torch.long), torch.full((2, 240, 321), 255)
    for row, (prediction, mask) in enumerate([small, large]):
        predictions[row, :, : mask.shape[1]], masks[row, :, : mask.shape[1]] = prediction, mask
    meter = SegMeter(2)
    meter.update(ZERO, predictions, masks)
    each = [measured([pair])["boundary_f"] for pair in (small, large)]
    assert meter.compute("val", CPU)["val/boundary_f"] == pytest.approx(np.mean(each)) and each[0] < each[1] == 100


def four_batches():
    batches = [[part[None] for part in drawn(3, 11, 10, seed)] for seed in range(4)]
    return list(zip(torch.tensor([0.1, 0.7, 0.3, 0.9]), batches, strict=True))


def test_an_interrupted_epoch_goes_on_bit_for_bit():
    whole, first, second = SegMeter(3), SegMeter(3), SegMeter(3)
    for loss, batch in four_batches():
        whole.update(loss, *batch)
    for loss, batch in four_batches()[:2]:
        first.update(loss, *batch)
    second.restore(first.total(CPU).tolist())
    for loss, batch in four_batches()[2:]:
        second.update(loss, *batch)
    assert torch.equal(second.sums, whole.sums)
    second.reset()
    assert second.compute("val", CPU) == {}


def test_processes_add_up(monkeypatch):
    whole, mine, other = SegMeter(3), SegMeter(3), SegMeter(3)
    for number, (loss, batch) in enumerate(four_batches()):
        whole.update(loss, *batch)
        (mine, other)[number % 2].update(loss, *batch)
    monkeypatch.setattr("lineattn.tasks.meter.is_initialized", lambda: True)
    monkeypatch.setattr("lineattn.tasks.meter.all_reduce", lambda sums: sums.add_(other.sums))
    before = mine.sums.clone()
    found = mine.compute("val", CPU), mine.per_class("val", CPU), mine.count(CPU)
    assert torch.equal(mine.sums, before)
    monkeypatch.undo()
    assert found[0] == pytest.approx(whole.compute("val", CPU), rel=1e-14)
    assert found[1:] == (whole.per_class("val", CPU), 4)


@pytest.mark.parametrize("wrong", [3, 200])
def test_a_class_that_is_none_is_refused(wrong):
    mask = torch.tensor([[[0, 1, 255]], [[wrong, 1, 2]]])
    with pytest.raises(InputError, match=f"a mask has class {wrong}, but the classes are 0 to 2"):
        SegMeter(3).update(ZERO, torch.zeros_like(mask), mask)


def test_another_class_may_be_the_ignored_one():
    meter = SegMeter(2, ignore=-1, boundary=False)
    meter.update(ZERO, torch.tensor([[[1, 0]]]), torch.tensor([[[1, -1]]]))
    assert meter.compute("val", CPU)["val/pixel_acc"] == 100
