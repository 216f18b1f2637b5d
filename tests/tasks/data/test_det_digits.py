"""Scenes of digits: the same always, of digits of one split, with boxes and masks to the pixel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torchvision.ops import box_iou, masks_to_boxes

from lineattn.tasks.data import det_digits
from lineattn.tasks.data.source import Pixels
from tests.tasks.data.coco_files import own_score


@pytest.fixture(scope="module")
def splits():
    pytest.importorskip("sklearn")
    return det_digits.load(image_size=96, channels=1, masks=None)


def test_the_splits_and_their_classes(splits):
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [2000, 100, 500]
    assert splits.classes == [str(digit) for digit in range(10)] and splits.category_ids == list(range(10))


def test_no_digit_is_in_two_splits(splits):
    parts = [{bytes(image.numpy().tobytes()) for image in part.shapes.images}
             for part in (splits.train, splits.val, splits.test)]  # fmt: skip
    assert all(isinstance(part.shapes, Pixels) for part in (splits.train, splits.val, splits.test))
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1797


def test_a_scene_is_the_same_always_and_no_other(splits):
    image, target = splits.train.read(3)
    torch.manual_seed(5)
    again, same = det_digits.load(image_size=96, channels=1, masks=True).train.subset([9, 3]).read(1)
    assert torch.equal(image, again) and all(torch.equal(target[key], same[key]) for key in target)
    others = [splits.train.read(4)[0], splits.val.read(3)[0], splits.test.read(3)[0]]
    assert not any(torch.equal(one, other) for one, other in pairwise([image, *others]))


def test_boxes_and_masks_are_of_what_can_be_seen(splits):
    counts, sides, close = set(), [], 0
    for index in range(60):
        image, target = splits.train.read(index)
        boxes, masks = target["boxes"], target["masks"]
        assert image.shape == (1, 96, 96) and masks.dtype == torch.uint8
        assert 3 <= len(boxes) <= 8 and int(target["labels"].min()) >= 1 and int(target["labels"].max()) <= 10
        assert torch.equal(boxes, masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1]))
        assert int(masks.sum(0).max()) == 1  # a later digit hides what is behind it
        overlap = box_iou(boxes, boxes).fill_diagonal_(0)
        assert float(overlap.max()) <= 0.3
        close += int((overlap > 0.02).any())
        counts.add(len(boxes))
        sides += (boxes[:, 3] - boxes[:, 1]).tolist()
    assert counts == set(range(3, 9)) and close > 10
    assert min(sides) < 14 and max(sides) > 26


def test_ink_is_brighter_than_its_ground(splits):
    image, target = splits.train.read(0)
    ink = target["masks"].sum(0).bool()
    assert image[0][ink].float().mean() > image[0][~ink].float().mean() + 50


def test_the_label_is_of_the_digit_that_is_painted(splits):
    """A scene of one source digit a class: the nearest template of each mask is its label's, mostly."""
    shapes = splits.test.shapes
    templates = torch.stack([shapes.images[torch.tensor(shapes.labels) == k].float().mean(0) for k in range(10)])
    right = total = 0
    for index in range(25):
        image, target = splits.test.read(index)
        for box, label in zip(target["boxes"].int().tolist(), target["labels"].tolist(), strict=True):
            left, top, low, bottom = box
            patch = torch.nn.functional.interpolate(image[None, :, top:bottom, left:low].float(), (8, 5), mode="area")
            scores = [
                torch.corrcoef(torch.stack([patch.flatten(), _cropped(template).flatten()]))[0, 1]
                for template in templates
            ]
            right += int(torch.stack(scores).argmax()) == label - 1
            total += 1
    assert right > 0.4 * total  # 0.1 by chance; patches are cropped and partly hidden


def _cropped(template):
    return torch.nn.functional.interpolate(template[None, :, :, 1:7], (8, 5), mode="area")


def test_three_channels_another_side_and_no_masks():
    pytest.importorskip("sklearn")
    image, target = det_digits.load(image_size=64, channels=3, masks=False).train.read(0)
    assert image.shape == (3, 64, 64) and "masks" not in target and float(target["boxes"].max()) <= 64


def test_the_truth_scores_1_against_itself(splits):
    part = splits.test.subset(range(40))
    truth = part.truth()
    assert [image["id"] for image in truth["images"]] == list(range(40))
    _, target = part.read(0)
    mine = [one for one in truth["annotations"] if one["image_id"] == 0]
    assert [one["category_id"] for one in mine] == (target["labels"] - 1).tolist()
    assert own_score(truth, "bbox") == own_score(truth, "segm") == 1.0
