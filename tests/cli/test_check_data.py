"""Faults that users met, found before training: each makes its line, its path and its exit code."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from PIL import Image

from lineattn.cli.main import main
from lineattn.tasks.data import survey


def put(path, value=None, size=(24, 20), mode="RGB", seed=[0]):  # noqa: B006 - a counter
    """An image of its own, or of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed[0] += 1
    pixels = np.random.default_rng(seed[0]).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels if value is None else np.full_like(pixels, value))
    if mode == "I;16":
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(path)
    else:
        image.convert(mode).save(path)


@pytest.fixture
def root(tmp_path):
    """Two classes, 12 images each to train on and 6 to validate with; nothing is wrong."""
    for split, count in (("train", 12), ("val", 6)):
        for label in ("cat", "dog"):
            for number in range(count):
                put(tmp_path / "photos" / split / label / f"{number}.png")
    return tmp_path / "photos"


def check(root, tmp_path, *options):
    """The exit code, and what was found by kind."""
    report = tmp_path / "report.json"
    code = main(["check-data", "--root", str(root), "--out", str(report), *options])
    content = json.loads(report.read_text())
    return code, {finding["kind"]: finding for finding in content["findings"]}, content


def test_a_clean_folder(root, tmp_path, capsys):
    code, found, content = check(root, tmp_path)
    assert (code, found) == (0, {})
    assert content["counts"] == {"train": {"cat": 12, "dog": 12}, "val": {"cat": 6, "dog": 6}}
    assert content["modes"] == {"RGB": 36} and content["sizes"] == [[24, 20]] * 3
    shown = capsys.readouterr().out
    assert "24 train, 12 val" in shown and "nothing is wrong with it" in shown and len(shown.splitlines()) < 30


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("kind", ["text", "empty", "truncated"])
def test_what_cannot_be_read_is_named(root, tmp_path, capsys, monkeypatch, kind, workers):
    monkeypatch.setattr(survey, "_SLOW", 1 if workers else 1000)
    path = root / "train" / "cat" / "bad.jpg"
    put(path, size=(64, 64))
    whole = path.read_bytes()
    path.write_bytes({"text": b"hello", "empty": b"", "truncated": whole[: len(whole) // 2]}[kind])
    code, found, _ = check(root, tmp_path)
    assert code == 1 and found.keys() == {"unreadable"}
    (item,) = found["unreadable"]["items"]
    reason = {"text": "no image", "empty": "an empty file", "truncated": "truncated"}[kind]
    assert item.startswith(str(path)) and reason in item
    shown = capsys.readouterr().out
    assert "problem: 1 file unreadable" in shown and str(path) in shown


def test_fast_reads_headers_alone(root, tmp_path):
    path = root / "train" / "cat" / "bad.jpg"
    put(path, size=(64, 64))
    path.write_bytes(path.read_bytes()[:-200])
    put(root / "train" / "cat" / "a.png", 7)
    put(root / "val" / "cat" / "a.png", 7)
    (root / "train" / "cat" / "text.jpg").write_text("hello")
    code, found, _ = check(root, tmp_path, "--fast")
    assert code == 1 and found.keys() == {"unreadable"} and "text.jpg" in found["unreadable"]["items"][0]
    assert check(root, tmp_path)[1].keys() == {"unreadable", "leak"}


def test_empty_unknown_and_missing_classes(root, tmp_path):
    (root / "train" / "cow").mkdir()
    for number in range(3):
        put(root / "val" / "bird" / f"{number}.png")
    code, found, _ = check(root, tmp_path)
    assert code == 1 and found.keys() == {"empty_class", "unknown_class", "missing_class"}
    assert found["empty_class"]["items"] == ["train/cow"]
    assert found["unknown_class"]["items"] == ["bird"] and found["missing_class"]["items"] == ["cow"]


def test_what_training_ignores_is_a_note(root, tmp_path, capsys):
    put(root / "train" / ".ipynb_checkpoints" / "x.png")
    put(root / "train" / "cat" / ".thumbs" / "x.png")
    (root / "train" / "cat" / "notes.txt").write_text("hello")
    put(root / "train" / "stray.png")
    code, found, content = check(root, tmp_path)
    assert code == 0 and {kind: len(finding["items"]) for kind, finding in found.items()} == {
        "hidden": 2,
        "other_files": 1,
        "stray": 1,
    }
    assert content["counts"]["train"] == {"cat": 12, "dog": 12}
    assert "note: 2 hidden folders: ignored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "second", "kind", "code"),
    [
        ("train/cat/a.png", "val/cat/a.png", "leak", 1),
        ("train/cat/a.png", "train/dog/a.bmp", "two_classes", 1),
        ("train/cat/a.png", "train/cat/b.bmp", "twice", 0),
    ],
)
def test_the_same_pixels_twice(root, tmp_path, first, second, kind, code):
    put(root / first, 7)
    put(root / second, 7)
    found_code, found, _ = check(root, tmp_path)
    assert found_code == code and found.keys() == {kind}
    assert set(found[kind]["items"][0].split(" = ")) == {str(root / first), str(root / second)}


def test_modes_and_sizes(root, tmp_path, capsys):
    for mode, name in (("L", "a.png"), ("RGBA", "b.png"), ("P", "c.png"), ("CMYK", "d.jpg"), ("I;16", "e.png")):
        put(root / "train" / "cat" / name, mode=mode)
    put(root / "train" / "dog" / "small.png", size=(5, 40))
    code, found, content = check(root, tmp_path)
    assert code == 0 and found.keys() == {"tiny"} and "5x40" in found["tiny"]["items"][0]
    assert content["modes"] == {"RGB": 37, "L": 1, "RGBA": 1, "P": 1, "CMYK": 1, "I;16": 1}
    assert "5x40 to 24x20, median 24x20" in capsys.readouterr().out


def test_huge_images_are_told(root, tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "_HUGE", 4000)
    put(root / "train" / "dog" / "large.png", size=(100, 50))
    assert check(root, tmp_path)[1].keys() == {"huge"}


def test_balance_and_a_small_validation_split(tmp_path, capsys):
    for number in range(33):
        put(tmp_path / "train" / "cat" / f"{number}.png")
    for number in range(3):
        put(tmp_path / "train" / "dog" / f"{number}.png")
        put(tmp_path / "val" / "cat" / f"{number}.png")
        put(tmp_path / "val" / "dog" / f"{number}.png")
    code, found, _ = check(tmp_path, tmp_path)
    assert code == 1 and found.keys() == {"few", "uneven"}
    assert "11 times" in found["uneven"]["text"] and "val has 6 images" in found["few"]["text"]


def test_one_class_is_no_task(tmp_path):
    put(tmp_path / "photos" / "cat" / "a.png")
    assert check(tmp_path / "photos", tmp_path)[1].keys() == {"one_class"}


def test_many_classes_stay_on_one_screen(tmp_path, capsys):
    for number in range(40):
        for image in range(number // 10 + 1):
            (tmp_path / f"class{number:02}").mkdir(exist_ok=True)
            (tmp_path / f"class{number:02}" / f"{image}.png").write_text("broken")
    assert main(["check-data", "--root", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "the largest and smallest of 40" in shown and "and 97 more; --out FILE writes all" in shown
    assert len(shown.splitlines()) < 35


def test_cifar(tmp_path, capsys):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (30, 3072), dtype=np.uint8)
    pixels[29] = pixels[0]
    names = [f"name{label}" for label in range(10)]
    for name, content in (
        ("batches.meta", {"label_names": names}),
        ("data_batch_1", {"data": pixels[:20], "labels": [n % 10 for n in range(20)]}),
        ("test_batch", {"data": pixels[20:], "labels": [n % 10 for n in range(10)]}),
    ):
        (folder / name).write_bytes(pickle.dumps(content))
    code, found, content = check(tmp_path, tmp_path)
    assert code == 1 and found["leak"]["items"] == ["train[0] = test[9]"]
    assert found.keys() == {"leak", "part"} and content["counts"]["test"]["name3"] == 1


@pytest.mark.parametrize(("name", "says"), [("absent", "does not exist"), ("empty", "no class folders")])
def test_no_data_set_is_bad_input(tmp_path, capsys, name, says):
    (tmp_path / "empty").mkdir()
    assert main(["check-data", "--root", str(tmp_path / name)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and says in line and "--data.root" not in line


def test_a_folder_is_no_place_for_the_findings(tmp_path, capsys):
    assert main(["check-data", "--root", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "is a folder: name a JSON file" in capsys.readouterr().err
