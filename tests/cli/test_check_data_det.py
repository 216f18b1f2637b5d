"""Faults of images with boxes, found before training: each makes its line, its names and its exit code."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from lineattn.cli.main import main
from tests.tasks.data.coco_files import content, runs, write


@pytest.fixture
def root(tmp_path):
    """12 images to train on and 10 to validate with; nothing is wrong."""
    root = tmp_path / "street"
    write(root, "train", content(12))
    write(root, "val", content(10, first=50))
    return root


def check(root, *options):
    """The exit code, and what was found by kind."""
    report = root.parent / "report.json"
    code = main(["check-data", "--task", "det", "--root", str(root), "--out", str(report), *options])
    found = json.loads(report.read_text())
    return code, {finding["kind"]: finding for finding in found["findings"]}, found


def edit(root, split, change):
    file = root / f"annotations/{split}.json"
    given = json.loads(file.read_text())
    change(given)
    file.write_text(json.dumps(given))


def test_a_clean_data_set(root, capsys):
    for options in ((), ("--fast",)):
        code, found, all_of_it = check(root, *options)
        assert code == 0 and found == {}
        assert all_of_it["objects"]["val"] == {"kind 7": 10, "kind 42": 10}
        assert all_of_it["counts"] == {"train": 12, "val": 10} and all_of_it["masks"] == {"train": 24, "val": 20}
        assert "nothing is wrong with it" in capsys.readouterr().out


def first(**values):
    return lambda given: given["annotations"][0].update(values)


NOTES = {
    "degenerate": first(bbox=[5, 5, 0, 3]),
    "outside": first(bbox=[90, 5, 3, 3]),
    "clipped": first(bbox=[35, 5, 30, 3]),
    "duplicate": first(category_id=42, bbox=[14, 3, 10, 8]),
    "tiny_box": first(bbox=[5, 5, 1, 3]),
    "no_mask": first(segmentation=[]),
    "blank_mask": first(segmentation=[[90, 90, 95, 90, 95, 95]]),
}
SERIOUS = {
    "unknown_category": first(category_id=5),
    "unknown_image": first(image_id=5000),
    "broken_box": first(bbox=[1, 2, 3]),
    "mask": first(segmentation=runs(40, 30, rows=3)),
    "broken_mask": first(segmentation={"size": [30, 40], "counts": "zzzz"}),
}


@pytest.mark.parametrize("kind", [*NOTES, *SERIOUS])
def test_a_fault_of_an_annotation_is_named(root, kind):
    edit(root, "train", {**NOTES, **SERIOUS}[kind])
    code, found, _ = check(root)
    assert kind in found and code == int(kind in SERIOUS) == found[kind]["serious"]
    named = "142" if kind == "duplicate" else "107"
    assert named in found[kind]["items"][0] and len(found[kind]["items"]) == 1


def test_images_without_objects_and_crowds_are_counted(root):
    def change(given):
        given["annotations"] = [one for one in given["annotations"] if one["image_id"] != 51]
        given["annotations"][0]["iscrowd"] = 1

    edit(root, "val", change)
    code, found, all_of_it = check(root)
    assert code == 0 and found["empty_image"]["items"] == ["051.png"]
    assert all_of_it["empty"] == {"train": 0, "val": 1} and all_of_it["crowds"] == {"train": 0, "val": 1}
    assert all_of_it["objects"]["val"] == {"kind 7": 8, "kind 42": 9}


def test_categories_without_objects(root):
    def without(own):
        return lambda given: given.update(annotations=[a for a in given["annotations"] if a["category_id"] != own])

    edit(root, "val", without(42))
    code, found, _ = check(root)
    assert code == 0 and found["missing_class_val"]["items"] == ["kind 42"]
    edit(root, "train", without(42))
    code, found, _ = check(root)
    assert code == 0 and found["absent_class"]["items"] == ["kind 42"]
    edit(root, "train", without(7))
    code, found, _ = check(root)
    assert code == 1 and "no_objects" in found


def test_a_category_that_train_never_shows(root):
    edit(
        root,
        "train",
        lambda given: [a.update(category_id=7, bbox=[a["id"] % 20, 1, 9, 9]) for a in given["annotations"]],
    )
    code, found, _ = check(root)
    assert code == 1 and found["untrained_class"]["items"] == ["kind 42"]


def test_files_that_are_broken_missing_or_of_another_size(root):
    (root / "train/001.png").unlink()
    (root / "train/002.png").write_text("no image")
    data = (root / "train/003.png").read_bytes()
    (root / "train/003.png").write_bytes(data[: len(data) // 2])
    Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(root / "val/050.png")
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(root / "val/051.png")
    code, found, _ = check(root)
    assert code == 1
    names = ["001.png", "002.png", "003.png"]
    assert all(name in item for name, item in zip(names, found["unreadable"]["items"], strict=True))
    assert [item.split("/")[-1].split(" ")[0] for item in found["size"]["items"]] == ["050.png", "051.png"]
    code, found, _ = check(root, "--fast")
    assert code == 1 and len(found["unreadable"]["items"]) == 2 and len(found["size"]["items"]) == 1


def test_an_image_in_two_splits(root):
    shutil.copy(root / "train/004.png", root / "val/053.png")
    code, found, _ = check(root)
    assert code == 1 and "004.png" in found["leak"]["items"][0] and "053.png" in found["leak"]["items"][0]


def test_splits_that_disagree_and_images_listed_twice_are_all_reported(root):
    edit(root, "val", lambda given: given["categories"][0].update(name="other"))
    edit(root, "train", lambda given: given["images"].append(given["images"][0]))
    code, found, _ = check(root)
    assert (
        code == 1 and "(other)" in found["layout"]["text"] and found["listed_twice"]["items"] == ["image 1 (001.png)"]
    )


def test_what_is_no_data_set_is_one_line(root, capsys):
    assert main(["check-data", "--task", "det", "--root", str(root / "train")]) == 2
    assert "--root" in capsys.readouterr().err
    assert main(["check-data", "--task", "det", "--root", str(root), "--masks", "index"]) == 2
    assert "--masks is for --task seg" in capsys.readouterr().err


@pytest.mark.medium
def test_coco_itself(shared_data, tmp_path):
    root = tmp_path / "coco"
    root.symlink_to(shared_data("coco_mini"))
    code, found, all_of_it = check(root)
    assert code == 1 and [kind for kind in found if found[kind]["serious"]] == ["untrained_class"]  # 45 images alone
    assert all_of_it["crowds"] == {"train": 6, "val": 7} and all_of_it["modes"] == {"RGB": 92}
