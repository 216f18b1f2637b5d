"""What the network gets of images with objects: lists, targets, flips, groups, and the options behind them."""

from __future__ import annotations

import json

import pytest
import torch

from lineattn.errors import InputError
from lineattn.tasks.data.detection import DetectionData
from tests.tasks.data.coco_files import content, write


@pytest.fixture
def root(tmp_path):
    """Wide and tall images by turns, the last of each without objects."""
    wide, tall = content(7, size=(40, 30)), content(5, size=(30, 40), first=20)
    given = {key: wide[key] + tall[key] for key in ("images", "annotations")}
    given["annotations"] = [one for one in given["annotations"] if one["image_id"] not in (7, 24)]
    write(tmp_path, "train", {**given, "categories": wide["categories"]})
    write(tmp_path, "val", content(3, first=50))
    return tmp_path


def batches(data, **options):
    data = DetectionData(root=str(data), **options)
    return list(data.train_dataloader()), data


def test_a_batch_is_a_list_of_images_and_a_list_of_targets(root):
    data = DetectionData(root=str(root), batch_size=2)
    loader = data.val_dataloader()
    assert not isinstance(loader, list)
    first, last = loader
    assert [image.shape for image in first.inputs] == [(3, 30, 40)] * 2 and len(last.inputs) == 1
    image, target = data.splits.val.read(0)
    assert first.inputs[0].dtype == torch.float32 and torch.allclose(first.inputs[0], image / 255)
    assert first.targets[0].keys() == {"boxes", "labels", "masks", "image_id"}
    assert all(torch.equal(first.targets[0][key], target[key]) for key in target)
    assert [one["image_id"].item() for one in first.targets] == [50, 51] and first.index.tolist() == [0, 1]


def test_training_batches_are_of_wide_or_tall_images_and_the_order_knows_no_workers(root):
    found, data = batches(root, batch_size=3)
    sizes = [{tuple(image.shape) for image in batch.inputs} for batch in found]
    assert len(found) == 4 and all(len(kinds) == 1 for kinds in sizes[:3])
    assert sorted(index for batch in found for index in batch.index.tolist()) == list(range(12))
    empty = [target for batch in found for target in batch.targets if not len(target["boxes"])]
    assert len(empty) == 2 and all(target["boxes"].shape == (0, 4) for target in empty)
    assert data.facts == {"category_ids": [7, 42]} and data.classes == ["kind 7", "kind 42"]


@pytest.mark.medium
def test_workers_change_nothing(root):
    alone, _ = batches(root, batch_size=3, num_workers=0, seed=3)
    helped, _ = batches(root, batch_size=3, num_workers=2, seed=3)
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.index, other.index)
        assert all(map(torch.equal, one.inputs, other.inputs))
        assert all(torch.equal(a[key], b[key]) for a, b in zip(one.targets, other.targets, strict=True) for key in a)


def test_a_flip_takes_boxes_and_masks_along(root):
    found, data = batches(root, batch_size=3, flip=1.0)
    for batch in found:
        for index, image, target in zip(batch.index.tolist(), batch.inputs, batch.targets, strict=True):
            stored, wanted = data.splits.train.read(index)
            assert torch.allclose(image, stored.flip(2) / 255)
            assert torch.equal(target["masks"], wanted["masks"].flip(2))
            boxes, width = wanted["boxes"], stored.shape[2]
            flipped = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
            assert torch.equal(target["boxes"], flipped) and torch.equal(target["labels"], wanted["labels"])
            assert type(image) is type(target["boxes"]) is type(target["masks"]) is torch.Tensor


def test_half_of_the_images_are_flipped_by_default_and_none_in_evaluation(root):
    flipped = 0
    for seed in range(4):
        found, data = batches(root, batch_size=12, seed=seed)
        pairs = [(batch.inputs[i], data.splits.train.read(int(index))[0] / 255)
                 for batch in found for i, index in enumerate(batch.index)]  # fmt: skip
        flipped += sum(not torch.allclose(image, stored) for image, stored in pairs)
    assert 12 < flipped < 36


def test_empty_images_can_be_left_out_of_training(root):
    found, data = batches(root, batch_size=2, drop_empty=True)
    assert len(data.splits.train) == 10 and all(len(t["boxes"]) for batch in found for t in batch.targets)
    assert data.splits.notices == ["left 2 training images without objects out"] and len(data.splits.val) == 3


def test_a_part_is_held_out_where_there_is_no_validation(root):
    (root / "annotations/val.json").unlink()
    data = DetectionData(root=str(root))
    assert (len(data.splits.train), len(data.splits.val)) == (10, 2)
    ids = [{image["id"] for image in part.truth()["images"]} for part in (data.splits.train, data.splits.val)]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 12
    assert DetectionData(root=str(root), val_fraction=0.0).splits.val is None


def test_masks_can_be_left_alone(root):
    found, _ = batches(root, masks=False)
    assert "masks" not in found[0].targets[0]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_an_unreadable_image_stops_or_is_skipped(root, policy):
    (root / "val/050.png").write_text("no image")
    data = DetectionData(root=str(root), on_error=policy, batch_size=3)
    (batch,) = data.val_dataloader()
    if policy == "stop":
        assert batch.error is not None and "050.png" in batch.error and batch.inputs == []
    else:
        assert batch.error is None and len(batch.inputs) == 2 and "050.png" in batch.skipped[0]


def test_a_wrong_size_stops_whatever_the_policy(root):
    file = root / "annotations/val.json"
    given = json.loads(file.read_text())
    given["images"][1].update(width=50, height=60)
    file.write_text(json.dumps(given))
    (batch,) = DetectionData(root=str(root), on_error="skip", batch_size=3).val_dataloader()
    assert batch.error is not None and "051.png" in batch.error


def test_what_defaults_come_to(root):
    data = DetectionData(root=str(root))
    assert {key: getattr(data, key) for key in data.resolved} == {
        "name": "coco", "min_size": [800], "max_size": 1333, "flip": 0.5, "channels": 3,
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    assert data.for_model(data.classes) == {
        "classes": 2, "in_chans": 3, "min_size": [800], "max_size": 1333,
        "mean": data.mean, "std": data.std,
    }  # fmt: skip
    several = DetectionData(root=str(root), min_size=[480, 640], channels=1)
    assert several.image_size == 640 and several.example().shape == (1, 1, 640, 640)
    assert len(several.mean) == 1 and several.train_dataloader().dataset[0, 0].inputs[0].shape[0] == 1


def test_digits_need_no_folder():
    pytest.importorskip("sklearn")
    data = DetectionData(batch_size=4)
    assert (data.name, data.min_size, data.max_size, data.flip, data.channels) == ("digits", [96], 96, 0.0, 1)
    assert data.example().shape == (1, 1, 96, 96) and data.facts == {"category_ids": list(range(10))}
    batch = next(iter(data.train_dataloader()))
    assert [image.shape for image in batch.inputs] == [(1, 96, 96)] * 4 and "masks" in batch.targets[0]
    assert DetectionData(image_size=64).min_size == [64]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "voc"}, "unknown data set 'voc'"),
        ({"image_size": 8}, "--data.image_size 8"),
        ({"name": "coco", "image_size": 96}, "use --data.min_size"),
        ({"min_size": 0}, "--data.min_size 0"),
        ({"min_size": []}, "--data.min_size []"),
        ({"min_size": 96, "max_size": 90}, "--data.max_size 90"),
        ({"flip": 1.5}, "--data.flip 1.5"),
        ({"channels": 2}, "--data.channels 2"),
        ({"std": [0.0]}, "--data.std [0.0]"),
        ({"val_fraction": 1.0}, "--data.val_fraction 1.0"),
        ({"mean": [0.1, 0.2, 0.3], "channels": 3, "std": [0.1, 0.2]}, "--data.std has 2 values for 3 channels"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(InputError) as error:
        DetectionData(**options)
    assert said in str(error.value)
