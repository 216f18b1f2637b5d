"""Segmentation losses and their gradients against the plain formulas, and against numbers found by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lineattn.errors import InputError
from lineattn.tasks.seg_loss import BceDice, CrossEntropy, predict, probabilities
from tests.oracles import segmentation as oracle

WEIGHTS = [0.5, 2.0, 0.0, 1.5]


def drawn(classes, channels, ignored=0.2):
    logits = 2 * torch.randn(3, channels, 5, 7, dtype=torch.float64)
    target = torch.randint(0, classes, (3, 5, 7))
    return logits, torch.where(torch.rand(target.shape) < ignored, 255, target)


def assert_same(loss, plain, logits):
    """Values and gradients, in double precision and in single."""
    x, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, expected = loss(x), plain(reference)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(x.grad, reference.grad)
    torch.testing.assert_close(loss(logits.float()), expected.detach().float())


@pytest.mark.parametrize("ignored", [0, 0.3])
def test_bce_dice(ignored):
    logits, target = drawn(2, 1, ignored)
    assert_same(lambda x: BceDice()(x, target), lambda x: oracle.bce_dice(x, target), logits)


@pytest.mark.parametrize("case", ["empty mask", "full mask", "an image ignored", "one pixel", "bytes"])
def test_bce_dice_corner(case):
    logits, target = drawn(2, 1)
    if case == "one pixel":
        logits, target = logits[:1, :, :1, :1], torch.ones(1, 1, 1, dtype=torch.long)
    target[0] = {"empty mask": 0, "an image ignored": 255}.get(case, 1)
    given = target.byte() if case == "bytes" else target
    assert_same(lambda x: BceDice()(x, given), lambda x: oracle.bce_dice(x, target), logits)


def test_bce_dice_by_hand():
    """Probabilities 1/2, 3/4 / 1/4, 1/2 of a mask 1, 1 / 0, -."""
    logits = torch.tensor([[[[0, math.log(3)], [-math.log(3), 0]]]])
    bce = (math.log(2) + 2 * math.log(4 / 3)) / 3
    dice = (2 * (1 / 2 + 3 / 4) + 1) / (3 / 2 + 2 + 1)
    found = BceDice()(logits, torch.tensor([[[1, 1], [0, 255]]]))
    assert float(found) == pytest.approx(bce + 1 - dice, rel=1e-6)


def test_bce_dice_is_the_mean_of_its_images():
    logits, target = drawn(2, 1, 0.4)
    each = [BceDice()(logits[i : i + 1], target[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(BceDice()(logits, target), torch.stack(each).mean())


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("over", ["valid", "all"])
@pytest.mark.parametrize("ignored", [0, 0.3])
def test_cross_entropy(weights, over, ignored):
    logits, target = drawn(4, 4, ignored)
    loss = CrossEntropy(4, weights=weights, over=over)
    plain = [1.0] * 4 if weights is None else weights
    assert_same(lambda x: loss(x, target), lambda x: oracle.cross_entropy(x, target, plain, over), logits)


def test_cross_entropy_by_hand():
    """Probabilities of class 1 of 1/2, 3/4 / 1/4, 1/2 and a mask 0, 1 / 0, -."""
    ones = torch.tensor([[[0, math.log(3)], [-math.log(3), 0]]])
    logits, target = torch.stack([torch.zeros_like(ones), ones], 1), torch.tensor([[[0, 1], [0, 255]]])
    total = math.log(2) + 2 * math.log(4 / 3)
    assert float(CrossEntropy(2)(logits, target)) == pytest.approx(total / 3, rel=1e-6)
    assert float(CrossEntropy(2, over="all")(logits, target)) == pytest.approx(total / 4, rel=1e-6)
    weighted = math.log(2) + math.log(4 / 3) + 3 * math.log(4 / 3)
    assert float(CrossEntropy(2, weights=[1, 3])(logits, target)) == pytest.approx(weighted / 5, rel=1e-6)


ALL = {
    "bce_dice": (BceDice(), 1),
    "cross_entropy": (CrossEntropy(4), 4),
    "over all": (CrossEntropy(4, over="all"), 4),
    "weights": (CrossEntropy(4, weights=WEIGHTS), 4),
}


@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_ignored_pixels_has_a_loss_and_a_gradient_of_0(name):
    loss, channels = ALL[name]
    logits = torch.randn(2, channels, 3, 4, requires_grad=True)
    value = loss(logits, torch.full((2, 3, 4), 255))
    value.backward()
    assert value == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_pixels_of_classes_without_weight_alone_are_as_ignored_ones():
    logits = torch.randn(2, 4, 3, 4, requires_grad=True)
    value = CrossEntropy(4, weights=WEIGHTS)(logits, torch.full((2, 3, 4), 2))
    value.backward()
    assert value == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("name", ALL)
def test_what_is_ignored_has_no_gradient(name):
    loss, channels = ALL[name]
    logits, target = drawn(channels if channels > 1 else 2, channels)
    x = logits.clone().requires_grad_()
    loss(x, target).backward()
    assert not x.grad[(target == 255)[:, None].expand_as(x)].any() and x.grad.any()


@pytest.mark.parametrize("name", ALL)
def test_autocast_does_not_lower_the_loss(name):
    loss, channels = ALL[name]
    logits, target = drawn(channels if channels > 1 else 2, channels)
    half = logits.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(half, target)
    value.backward()
    assert value.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    assert torch.equal(value, loss(half.float(), target))


@pytest.mark.parametrize("name", ALL)
def test_far_logits_have_a_finite_loss(name):
    loss, channels = ALL[name]
    logits, target = drawn(channels if channels > 1 else 2, channels)
    x = (1e4 * logits).float().requires_grad_()
    value = loss(x, target)
    value.backward()
    assert value.isfinite() and x.grad.isfinite().all()


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, math.nan, 1.0], []])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(InputError, match=r"^--model.class_weights \[.*\]: must be [^\n]*$"):
        CrossEntropy(3, weights=weights)


def test_weights_are_no_part_of_a_checkpoint():
    assert not CrossEntropy(4, weights=WEIGHTS).state_dict()


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_predictions_are_the_likeliest_classes(channels):
    logits = torch.randn(2, channels, 3, 5, dtype=torch.float64)
    p = probabilities(logits)
    assert p.shape == (2, max(channels, 2), 3, 5)
    torch.testing.assert_close(p.sum(1), torch.ones_like(p[:, 0]))
    assert torch.equal(predict(logits), p.argmax(1)) and predict(logits).dtype == torch.int64
    if channels == 1:
        torch.testing.assert_close(p[:, 1], 1 / (1 + torch.exp(-logits[:, 0])))


def test_a_logit_of_0_is_background_and_halves_become_floats():
    logits = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    assert not predict(logits).any() and probabilities(logits).dtype == torch.float32
