"""Faults of images and masks, found before training: each makes its line, its path and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lineattn.cli.main import main
from lineattn.tasks.data import survey

SQUARE = np.zeros((18, 20), dtype=np.uint8)
SQUARE[3:9, 4:14] = 255  # a sixth of it


def put(root: Path, split: str, name: str, values=SQUARE, *, size: tuple[int, int] = (20, 18), kind: str = "") -> None:
    """An image of its own, or of one colour where its name says so, and its mask."""
    for folder in ("images", "masks"):
        (root / split / folder).mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(list(f"{split}{name}".encode()))
    pixels = draws.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(np.full_like(pixels, 7) if kind == "plain" else pixels).save(
        root / split / "images" / f"{name}.png"
    )
    Image.fromarray(np.asarray(values, dtype=np.uint8)).save(root / split / "masks" / f"{name}_mask.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """12 images to train on and 10 to validate with; nothing is wrong."""
    for split, count in (("train", 12), ("val", 10)):
        for number in range(count):
            put(tmp_path / "scans", split, f"{number:02}")
    return tmp_path / "scans"


def check(root: Path, *options: str):
    """The exit code, and what was found by kind."""
    report = root.parent / "report.json"
    code = main(["check-data", "--task", "seg", "--root", str(root), "--out", str(report), *options])
    content = json.loads(report.read_text())
    assert len({finding["kind"] for finding in content["findings"]}) == len(content["findings"])
    return code, {finding["kind"]: finding for finding in content["findings"]}, content


@pytest.mark.parametrize("workers", [False, True])
def test_a_clean_folder(root, capsys, monkeypatch, workers) -> None:
    monkeypatch.setattr(survey, "_SLOW", 1 if workers else 1000)
    code, found, content = check(root)
    assert code == 0 and found.keys() == {"notice"}
    assert content["classes"] == ["background", "foreground"] and content["counts"] == {"train": 12, "val": 10}
    assert content["pixels"]["val"] == {"background": 3000, "foreground": 600}
    assert content["images"]["train"] == {"background": 12, "foreground": 12}
    assert content["modes"] == {"RGB": 22} and content["mask_modes"] == {"L": 22}
    assert content["sizes"] == [[20, 18]] * 3 and content["ignored"] == {"train": 0, "val": 0}
    shown = capsys.readouterr().out
    assert "12 train, 10 val; 2 classes" in shown and "16.67% in 12" in shown and "nothing is wrong with it" in shown
    assert len(shown.splitlines()) < 30


def test_images_and_masks_that_make_no_pairs_are_all_named(root) -> None:
    put(root, "val", "one_more")
    (root / "train" / "masks" / "03_mask.png").unlink()
    (root / "train" / "masks" / "05_mask.png").unlink()
    (root / "train" / "images" / "04.png").unlink()
    (root / "val" / "masks" / "01_mask.png").unlink()
    for end in ("", "_seg"):
        Image.fromarray(SQUARE).save(root / "val" / "masks" / f"02{end}.png")
    Image.fromarray(np.full((18, 20, 3), 9, dtype=np.uint8)).save(root / "val" / "images" / "03.jpg")
    code, found, content = check(root)
    assert code == 1 and found.keys() == {"no_mask", "no_image", "several_masks", "same_name", "notice"}
    missing = [root / "train" / "images" / "03.png", root / "train" / "images" / "05.png", root / "val/images/01.png"]
    assert found["no_mask"]["items"] == list(map(str, missing)) and "no mask for 3 images" in found["no_mask"]["text"]
    assert found["no_image"]["items"] == [str(root / "train" / "masks" / "04_mask.png")]
    assert found["several_masks"]["items"][0].count("/masks/02") == 3
    assert "03.jpg and " in found["same_name"]["items"][0]
    assert content["counts"] == {"train": 9, "val": 10}


@pytest.mark.parametrize("kind", ["text", "empty", "truncated"])
def test_what_cannot_be_read_is_named(root, capsys, kind) -> None:
    broken = [root / "train" / "images" / "00.png", root / "val" / "masks" / "01_mask.png"]
    for path in broken:
        whole = path.read_bytes()
        path.write_bytes({"text": b"hello", "empty": b"", "truncated": whole[: len(whole) * 2 // 3]}[kind])
    code, found, content = check(root)
    assert code == 1 and found.keys() == {"unreadable", "notice"}
    assert [item.split(" (")[0] for item in found["unreadable"]["items"]] == list(map(str, broken))
    assert content["images"] == {
        "train": {"background": 11, "foreground": 11},
        "val": {"background": 9, "foreground": 9},
    }
    shown = capsys.readouterr().out
    assert "problem: 2 files unreadable" in shown and all(str(path) in shown for path in broken)


def test_masks_of_another_size_or_with_what_is_no_class(root) -> None:
    put(root, "train", "small", SQUARE[:5])
    put(root, "val", "grey", np.where(SQUARE == 0, 0, 128))
    code, found, _ = check(root)
    assert code == 1 and found.keys() == {"size", "value", "notice"}
    mask, image = root / "train" / "masks" / "small_mask.png", root / "train" / "images" / "small.png"
    assert found["size"]["items"] == [f"{mask} (20x5) is not of the size of its image {image} (20x18)"]
    assert found["value"]["items"] == [
        f"{root / 'val' / 'masks' / 'grey_mask.png'} has the value 128 where the others have 0 and 255"
    ]
    assert check(root, "--masks", "threshold")[1].keys() == {"size"}


def test_masks_that_do_not_tell_what_they_hold_are_read_all_the_same(root) -> None:
    for number in (3, 4):
        put(root, "train", f"{number:02}", np.where(SQUARE == 0, 0, 128))
    code, found, content = check(root)
    assert code == 1 and found.keys() == {"layout", "value"}
    assert "has the value 128, and there are no class names" in found["layout"]["text"]
    assert len(found["value"]["items"]) == 2 and content["images"]["train"]["foreground"] == 10


def test_a_camera_that_was_turned_is_no_fault(root) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(root / "train" / "images" / "00.png") as image:
        image.save(root / "train" / "images" / "00.png", exif=exif)
    assert check(root)[0] == 0 and check(root, "--fast")[0] == 0


def test_empty_and_ignored_masks_are_notes(root) -> None:
    (root / "classes.txt").write_text("background\nlow\nhigh\n")
    for split, count in (("train", 12), ("val", 10)):
        for number in range(count):
            put(root, split, f"{number:02}", SQUARE // 255 + 2 * (np.indices(SQUARE.shape)[0] > 12))
    put(root, "train", "empty", SQUARE * 0)
    put(root, "train", "ignored", SQUARE * 0 + 255)
    put(root, "train", "half", np.where(SQUARE == 0, 0, 255))
    code, found, content = check(root)
    assert code == 0 and found.keys() == {"empty_mask", "ignored_mask", "notice"}
    assert [Path(item).name for item in found["empty_mask"]["items"]] == ["empty_mask.png", "half_mask.png"]
    assert found["ignored_mask"]["text"] == "1 mask wholly ignored"
    assert content["ignored"]["train"] == 360 + 60


def test_classes_that_are_nowhere_or_only_in_one_split(root, capsys) -> None:
    (root / "classes.txt").write_text("sky\nroad\ncar\ntram\n")
    for split, count, value in (("train", 12, 1), ("val", 10, 2)):
        for number in range(count):
            put(root, split, f"{number:02}", SQUARE // 255 * value)
    code, found, content = check(root)
    assert code == 1 and found.keys() == {"untrained_class", "absent_class", "missing_class"}
    assert found["untrained_class"]["items"] == ["car"] and found["absent_class"]["items"] == ["tram"]
    assert found["missing_class"]["items"] == ["road"] and not found["missing_class"]["serious"]
    assert content["images"]["val"] == {"sky": 10, "road": 0, "car": 10, "tram": 0}
    for number in range(12):
        put(root, "train", f"{number:02}", SQUARE * 0)
    assert "train hold sky alone" in check(root)[1]["one_class"]["text"]


@pytest.mark.parametrize(
    ("places", "values", "kind", "code"),
    [
        ((("train", "a"), ("val", "a")), (SQUARE, SQUARE), "leak", 1),
        ((("train", "a"), ("train", "b")), (SQUARE, 255 - SQUARE), "two_masks", 1),
        ((("train", "a"), ("train", "b")), (SQUARE, SQUARE), "twice", 0),
    ],
)
def test_the_same_image_twice(root, places, values, kind, code) -> None:
    for (split, name), mask in zip(places, values, strict=True):
        put(root, split, name, mask, kind="plain")
    found_code, found, _ = check(root)
    assert found_code == code and found.keys() == {kind, "notice"}
    assert found[kind]["items"] == [" = ".join(str(root / split / "images" / f"{name}.png") for split, name in places)]


def test_lists_that_share_a_name_or_name_what_is_not_there(tmp_path) -> None:
    root = tmp_path / "scans"
    for number in range(22):
        put(root, "", f"{number:02}")
    for split, names in (("train", range(12)), ("test", [*range(12, 21), 3, 3])):
        (root / f"{split}.txt").write_text("\n".join([f"{number:02}.png" for number in names] + [f"no_{split}"]))
    shared = str(root / "images" / "03.png")
    for options in ((), ("--fast",)):
        code, found, content = check_many(root, *options)
        kinds = [finding["kind"] for finding in found]
        assert code == 1 and kinds == ["listed_twice", "no_file", "no_file", "leak", *["notice"] * 3]
        assert found[3]["items"] == [f"{shared} in train and test"] and content["counts"] == {"train": 12, "test": 10}


def check_many(root: Path, *options: str):
    """As `check`, of findings of which there may be several of a kind."""
    report = root.parent / "report.json"
    code = main(["check-data", "--task", "seg", "--root", str(root), "--out", str(report), *options])
    content = json.loads(report.read_text())
    return code, content["findings"], content


def test_fast_reads_headers_alone(root, capsys) -> None:
    path = root / "train" / "images" / "00.png"
    path.write_bytes(path.read_bytes()[:-200])
    put(root, "val", "grey", np.where(SQUARE == 0, 0, 128))
    (root / "val" / "masks" / "01_mask.png").write_text("hello")
    put(root, "train", "small", SQUARE[:5])
    code, found, content = check(root, "--fast")
    assert code == 1 and found.keys() == {"unreadable", "size", "notice"}
    assert len(found["unreadable"]["items"]) == 1 and "01_mask.png" in found["unreadable"]["items"][0]
    assert not content["pixels"]["train"]["foreground"] and "share of pixels" not in capsys.readouterr().out


def test_sizes_and_few_images(root, monkeypatch) -> None:
    monkeypatch.setattr(survey, "_HUGE", 4000)
    put(root, "train", "tiny", SQUARE[:5, :5], size=(5, 5))
    put(root, "train", "huge", np.kron(SQUARE, np.ones((5, 5), dtype=np.uint8)), size=(100, 90))
    put(root, "test", "one")
    code, found, content = check(root)
    assert code == 1 and found.keys() == {"tiny", "huge", "few", "notice"}
    assert content["sizes"] == [[5, 5], [20, 18], [100, 90]] and "test has 1 images" in found["few"]["text"]


def test_other_layouts_and_class_names(tmp_path, capsys) -> None:
    base = tmp_path / "VOC2012"
    for number in range(4):
        put(base, "", f"{number}", SQUARE // 255 * number)
    (base / "images").rename(base / "JPEGImages")
    (base / "masks").rename(base / "SegmentationClass")
    (base / "ImageSets" / "Segmentation").mkdir(parents=True)
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text("0\n1\n2\n3\n")
    (tmp_path / "names").write_text("ground\nlow\nhigh\n")
    code, found, content = check(tmp_path / "VOC2012", "--name", "voc", "--classes-file", str(tmp_path / "names"))
    assert code == 1 and found.keys() == {"value"} and "has the value 3" in found["value"]["items"][0]
    assert content["classes"] == ["ground", "low", "high"]
    assert check(base, "--name", "voc")[1].keys() == {"absent_class", "empty_mask"}
    assert "the largest and smallest of 21" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--task", "seg", "--root", "absent"), "--root absent does not exist"),
        (("--task", "seg", "--root", "."), "no images/ and masks/"),
        (("--task", "seg", "--root", ".", "--name", "isic", "--masks", "index"), "--masks index: for the data set"),
        (("--task", "seg", "--root", ".", "--classes-file", "none"), "none"),
        (("--root", ".", "--classes-file", "none"), "--classes-file is for --task seg"),
    ],
)
def test_what_is_no_data_set_is_bad_input(tmp_path, monkeypatch, capsys, options, says) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check-data", *options]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and says in line and "--data." not in line


def test_real_images(shared_data, tmp_path) -> None:
    """Masks in JPEG, whose greys are no fault."""
    assert main(["check-data", "--task", "seg", "--root", str(shared_data("isic2018_3pairs"))]) == 0
