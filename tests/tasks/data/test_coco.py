"""COCO's format: layouts, ids, masks, frames, and what is cleaned, refused or named."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lineattn.errors import InputError
from lineattn.tasks.data import coco
from lineattn.tasks.data.coco_json import read_annotations
from lineattn.tasks.data.reading import UnreadableImage
from tests.tasks.data.coco_files import box, content, own_score, runs, write


def load(root, *, channels=3, masks=None):
    return coco.load(str(root), channels=channels, masks=masks)


def refused(call, *parts: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("ids", [(7, 42), (0, 1), (90, 3)])
def test_any_ids_become_labels_from_1_in_the_order_of_the_ids_and_truth_has_the_original_ones(tmp_path, ids):
    write(tmp_path, "train", content(ids=ids))
    splits = load(tmp_path)
    assert splits.category_ids == sorted(ids) and splits.classes == [f"kind {own}" for own in sorted(ids)]
    image, target = splits.train.read(0)
    assert image.shape == (3, 30, 40) and image.dtype == torch.uint8
    assert target["labels"].tolist() == [1 + sorted(ids).index(own) for own in ids]
    assert target["boxes"].tolist() == [[2, 3, 12, 11], [14, 3, 24, 11]]
    assert target["masks"].dtype == torch.uint8 and target["masks"].sum((1, 2)).tolist() == [80, 80]
    assert target["masks"][0, 3:11, 2:12].all() and target["image_id"].item() == 1
    truth = splits.train.truth()
    assert [one["category_id"] for one in truth["annotations"]] == [*ids] * 4
    assert [one["id"] for one in truth["annotations"]] == list(range(1, 9))
    assert truth["categories"] == [{"id": own, "name": f"kind {own}"} for own in sorted(ids)]


def test_images_without_objects_stay_and_crowds_are_in_the_truth_alone(tmp_path):
    given = content(3)
    given["annotations"] = [one for one in given["annotations"] if one["image_id"] != 2]
    given["annotations"].append({**given["annotations"][0], "image_id": 2, "iscrowd": 1, "id": 9})
    given["annotations"][-1]["segmentation"] = runs(30, 40, rows=5)
    write(tmp_path, "train", given)
    train = load(tmp_path).train
    assert len(train) == 3 and [train.empty(i) for i in range(3)] == [False, True, False]
    _, target = train.read(1)
    assert {key: tuple(value.shape) for key, value in target.items()} == {
        "boxes": (0, 4), "labels": (0,), "masks": (0, 30, 40), "image_id": ()
    }  # fmt: skip
    assert [one["iscrowd"] for one in train.truth()["annotations"]] == [0, 0, 1, 0, 0]
    part = train.subset([2, 1])
    assert [image["id"] for image in part.truth()["images"]] == [3, 2] and part.aspect(0) == 40 / 30


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_run_lengths(tmp_path, packed):
    from lineattn.tasks.data import rle

    given = content(1)
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[:5] = 1
    given["annotations"][0]["segmentation"] = rle.encode(mask) if packed else runs(30, 40, rows=5)
    write(tmp_path, "train", given)
    assert torch.equal(load(tmp_path).train.read(0)[1]["masks"][0], torch.from_numpy(mask))


FLAWS = {
    "degenerate": ([5, 5, 0, 8], None, "1 box without area dropped: 001.png (annotation 107)"),
    "upside down": ([5, 5, -4, 8], None, "1 box without area dropped"),
    "not a number": ([float("nan"), 5, 4, 8], None, "1 box without area dropped"),
    "outside": ([41, 5, 4, 8], None, "1 box outside of the image dropped: 001.png (annotation 107)"),
    "clipped": ([-3, 25, 10, 8], [0, 25, 7, 5], "1 box reaching out of the image clipped: 001.png (annotation 107)"),
    "rounded": ([30, 5, 10.2, 8], [30, 5, 10, 8], None),
    "duplicate": ([14, 3, 10, 8], None, "1 box there more than once, one of each kept: 001.png (annotation"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_boxes_that_would_stop_training_are_dropped_or_clipped_and_named(tmp_path, flaw):
    bbox, wanted, notice = FLAWS[flaw]
    given = content(2)
    given["annotations"][0]["bbox"] = bbox
    if flaw == "duplicate":
        given["annotations"][0]["category_id"] = 42
    write(tmp_path, "train", given)
    splits = load(tmp_path)
    boxes = splits.train.read(0)[1]["boxes"]
    assert len(boxes) == (1 if wanted is None else 2) and bool((boxes[:, 2:] > boxes[:, :2]).all())
    truth = [one["bbox"] for one in splits.train.truth()["annotations"] if one["image_id"] == 1]
    assert truth == ([wanted] if wanted else []) + [[14, 3, 10, 8]]
    assert len(splits.notices) == (notice is not None)
    assert notice is None or notice in splits.notices[0]


def test_a_duplicate_of_another_category_is_none(tmp_path):
    given = content(1)
    given["annotations"][0]["bbox"] = given["annotations"][1]["bbox"]
    write(tmp_path, "train", given)
    assert load(tmp_path).notices == [] and len(load(tmp_path).train.read(0)[1]["boxes"]) == 2


def _spoil(key, value):
    def spoil(given):
        given["annotations"][0][key] = value

    return spoil


SPOILT = {
    "category": (_spoil("category_id", 99), "annotation 107 (of the category 99, which is not listed)"),
    "image": (_spoil("image_id", 99), "annotation 107 (of the image 99, which is not listed)"),
    "bbox": (_spoil("bbox", [1, 2, 3]), "annotation 107 (with a bbox that is not x, y, width, height)"),
    "missing": (lambda given: given["annotations"][0].pop("bbox"), "annotation 107 (without bbox)"),
    "size": (_spoil("segmentation", runs(40, 30, rows=2)), "annotation 107 (a mask of 30x40 for the image 001.png"),
    "polygon": (_spoil("segmentation", [1, 2, 3, 4, 5, 6]), "neither polygons nor run lengths"),
    "twice": (lambda given: given["images"].append(given["images"][0]), "image 1 (001.png) listed twice"),
    "no size": (lambda given: given["images"][0].pop("width"), "image 1 without id, file_name, width and height"),
    "no images": (lambda given: given.update(images=[]), "lists no images"),
    "no list": (lambda given: given.pop("annotations"), "no list 'annotations'"),
    "no objects": (lambda given: given.update(annotations=[]), "no objects to learn"),
    "same name": (lambda given: given["categories"][0].update(name="kind 7"), "is there twice by id or name"),
    "no name": (lambda given: given["categories"][0].pop("name"), "category 42 lacks an id or a name"),
    "no categories": (lambda given: given.update(categories=[]), "has no categories"),
    "leads out": (lambda given: given["images"][0].update(file_name="../001.png"), "image 1 (../001.png) outside"),
    "absolute": (lambda given: given["images"][0].update(file_name="C:\\001.png"), "outside of the data set"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_no_annotation_is_one_line_with_its_file_and_id(tmp_path, what):
    spoil, text = SPOILT[what]
    given = content(2)
    file = write(tmp_path, "train", given)
    spoil(given)
    file.write_text(json.dumps(given))
    refused(lambda: load(tmp_path), str(file), text)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '"images"'])
def test_what_is_no_json_of_coco(tmp_path, text):
    file = tmp_path / "train.json"
    file.write_bytes(text.encode("latin-1"))
    refused(lambda: read_annotations(file), str(file), "export it")
    refused(lambda: read_annotations(tmp_path / "none.json"), str(tmp_path / "none.json"), "No such file")


@pytest.mark.parametrize(
    "segmentation",
    [{"size": [30, 40], "counts": "zzzz"}, {"size": [30, 40], "counts": [7]}, [[1, 1, float("nan"), 4, 5, 6]]],
)
def test_a_broken_mask_is_named_when_it_is_read(tmp_path, segmentation):
    given = content(1)
    given["annotations"][0]["segmentation"] = segmentation
    write(tmp_path, "train", given)
    refused(lambda: load(tmp_path).train.read(0), "annotation 107 of 001.png", "mend or remove it")


def test_masks_are_read_where_every_object_has_one(tmp_path):
    given = content(2)
    given["annotations"][1]["segmentation"] = []
    write(tmp_path, "train", given)
    splits = load(tmp_path)
    assert not splits.train.with_masks and "masks" not in splits.train.read(0)[1]
    assert "1 of 4 objects have no mask (annotation 142 of 001.png)" in splits.notices[0]
    refused(lambda: load(tmp_path, masks=True), "annotation 142 of 001.png", "--data.masks false")
    for one in given["annotations"]:
        del one["segmentation"], one["area"], one["iscrowd"]
    write(tmp_path, "train", given)
    assert load(tmp_path).notices == [] and load(tmp_path).train.truth()["annotations"][0]["area"] == 80


def test_masks_without_pycocotools_are_one_line(tmp_path, monkeypatch):
    write(tmp_path, "train", content(1))
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    refused(lambda: load(tmp_path).train.read(0), "pip install 'lineattn[detection]'")
    assert len(load(tmp_path, masks=False).train.read(0)[1]["boxes"]) == 2


def test_images_are_taken_in_the_frame_of_their_annotations(tmp_path):
    write(tmp_path, "train", content(3))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    stored = np.zeros((30, 40, 3), dtype=np.uint8)
    stored[:, :10] = 200
    Image.fromarray(stored).save(tmp_path / "train/001.png", exif=exif)
    upright = Image.fromarray(np.rot90(stored).copy())
    upright.save(tmp_path / "train/002.png", exif=exif)
    Image.fromarray(stored[:, :20]).save(tmp_path / "train/003.png")
    train = load(tmp_path).train
    assert torch.equal(train.read(0)[0][0], torch.from_numpy(stored[..., 0]))
    assert train.read(1)[0].shape == (3, 30, 40)
    refused(lambda: train.read(2), str(tmp_path / "train/003.png"), "20x30", "40x30")


def test_grey_images_serve_one_channel_and_three(tmp_path):
    write(tmp_path, "train", content(1))
    Image.fromarray(np.full((30, 40), 90, dtype=np.uint8)).save(tmp_path / "train/001.png")
    for channels in (1, 3):
        image = load(tmp_path, channels=channels).train.read(0)[0]
        assert image.shape == (channels, 30, 40) and bool((image == 90).all())


@pytest.mark.parametrize("broken", ["missing", "text"])
def test_an_unreadable_image_is_named(tmp_path, broken):
    write(tmp_path, "train", content(1))
    file = tmp_path / "train/001.png"
    file.unlink() if broken == "missing" else file.write_text("no image")
    with pytest.raises(UnreadableImage, match=re.escape(str(file))):
        load(tmp_path).train.read(0)


LAYOUTS = {
    "coco": ("annotations/instances_train2017.json", "train2017", "annotations/instances_val2017.json", "val2017"),
    "coco in images": ("annotations/instances_train2014.json", "images/train2014", "annotations/instances_val2014.json",
                       "images/val2014"),
    "plain": ("annotations/train.json", "train", "annotations/valid.json", "val"),
    "instances": ("annotations/instances_train.json", "images/train", "annotations/instances_val.json", "images/val"),
    "one folder": ("annotations/train.json", "images", "annotations/val.json", "images"),
    "roboflow": ("train/_annotations.coco.json", "train", "valid/_annotations.coco.json", "valid"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    train, images, val, val_images = LAYOUTS[layout]
    write(tmp_path, "train", content(3), annotations=train, images=images)
    write(tmp_path, "val", content(2, first=10), annotations=val, images=val_images)
    splits = load(tmp_path)
    assert splits.val is not None and splits.test is None and splits.notices == []
    for split, count in ((splits.train, 3), (splits.val, 2)):
        assert len([split.read(index) for index in range(len(split))]) == count


def test_names_with_folders_and_of_several_years_the_last(tmp_path):
    given = content(2)
    for image in given["images"]:
        image["file_name"] = f"train/{image['file_name']}"
    write(tmp_path, "train", given, images="images")
    assert load(tmp_path).train.read(1)[0].shape == (3, 30, 40)
    for year, count in ((2014, 2), (2017, 3)):
        write(
            tmp_path / "two",
            "train",
            content(count),
            annotations=f"annotations/instances_train{year}.json",
            images=f"train{year}",
        )
    splits = load(tmp_path / "two")
    assert len(splits.train) == 3 and "ignored instances_train2014.json" in splits.notices[0]


def test_what_is_missing_is_said_with_what_was_looked_for(tmp_path):
    refused(
        lambda: load(tmp_path), "no annotations of COCO's format", "annotations/train.json", "_annotations.coco.json"
    )
    write(tmp_path, "val", content(1))
    refused(lambda: load(tmp_path), "annotations of val but none of train")
    refused(lambda: coco.load(None, channels=3, masks=None), "--data.root is missing")
    file = write(tmp_path / "alone", "train", content(1), images="elsewhere")
    file.rename(file.with_name("instances_train2017.json"))
    refused(lambda: load(tmp_path / "alone").train.read(0), "001.png")


def test_splits_must_agree_on_categories(tmp_path):
    write(tmp_path, "train", content(2))
    given = content(2, ids=(7, 43))
    write(tmp_path, "val", given)
    refused(lambda: load(tmp_path), "train.json has the category 42 (kind 42)", "val.json has no category 42")
    given["categories"] = [{"id": 7, "name": "kind 7"}, {"id": 42, "name": "other"}]
    given["annotations"] = []
    write(tmp_path, "val", given)
    refused(lambda: load(tmp_path), "has the category 42 (kind 42)", "has the category 42 (other)")


def test_the_truth_scores_1_against_itself_after_cleaning(tmp_path):
    given = content(4)
    given["annotations"][0]["bbox"] = [35, 3, 10, 8]
    given["annotations"][0]["segmentation"] = [box(35, 3, 10, 8)]
    write(tmp_path, "train", given)
    truth = load(tmp_path).train.truth()
    assert own_score(truth, "bbox") == own_score(truth, "segm") == 1.0


@pytest.mark.medium
def test_coco_itself(shared_data):
    splits = load(shared_data("coco_mini"))
    assert splits.notices == [] and splits.val is not None and splits.train.with_masks
    assert (len(splits.train), len(splits.val)) == (45, 47) and len(splits.classes) == 80
    assert splits.category_ids[0] == 1 and splits.category_ids[-1] == 90
    truth = splits.val.truth()
    assert (len(truth["annotations"]), sum(one["iscrowd"] for one in truth["annotations"])) == (469, 7)
    assert own_score(truth, "bbox") == own_score(truth, "segm") == 1.0
    objects = 0
    for index in range(len(splits.val)):
        image, target = splits.val.read(index)
        objects += len(target["boxes"])
        assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])
        for mask, (left, top, right, bottom) in zip(target["masks"], target["boxes"].tolist(), strict=True):
            ys, xs = mask.nonzero(as_tuple=True)
            assert xs.min() > left - 2 and xs.max() < right + 1 and ys.min() > top - 2 and ys.max() < bottom + 1
    assert objects == 462
