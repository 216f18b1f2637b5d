"""Every recipe for segmentation is what it says, builds, and takes a step; the smoke recipes train."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from lineattn.cli.task import run
from lineattn.tasks.checkpoint import Checkpoints
from lineattn.tasks.record import Record
from tests.tasks.test_recipes import ROOT, SEG, least

MEDICAL = [path for path in SEG if path.parent.name == "kcla_seg"]
EANET = [path for path in SEG if path.parent.name == "eanet"]
SMOKE = [path for path in SEG if path.parent.name == "smoke"]


def fit(out: Path, *args: str):
    return run("fit", "seg", ["--out", str(out), *args], quiet=True)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def write(root: Path, layout: str) -> Path:
    """Two images and masks in each split that a layout has."""
    draws = np.random.default_rng(0)
    places = {
        "isic17": ("ISIC-2017_{Part}_Data/{n}.jpg", "ISIC-2017_{Part}_Part1_GroundTruth/{n}_segmentation.png"),
        "isic18": (
            "ISIC2018_Task1-2_{Part}_Input/{n}.jpg",
            "ISIC2018_Task1_{Part}_GroundTruth/{n}_segmentation.png",
        ),
        "kvasir": ("images/{split}{n}.jpg", "masks/{split}{n}.jpg"),
        "folder": ("{split}/images/{n}.jpg", "{split}/masks/{n}.png"),
        "voc": ("VOCdevkit/VOC2012/JPEGImages/{split}{n}.jpg", "VOCdevkit/VOC2012/SegmentationClass/{split}{n}.png"),
        "ade20k": (
            "ADEChallengeData2016/images/{whole}/{split}{n}.jpg",
            "ADEChallengeData2016/annotations/{whole}/{split}{n}.png",
        ),
        "cityscapes": (
            "leftImg8bit/{split}/town/town_{n}_leftImg8bit.png",
            "gtFine/{split}/town/town_{n}_gtFine_labelIds.png",
        ),
    }[layout]
    values = (0, 255) if layout in ("isic17", "isic18", "kvasir", "folder") else (7, 8, 11)
    for split, part in {"train": "Training", "val": "Validation", "test": "Test"}.items():
        whole = part.lower()
        for n in range(2):
            image, mask = (place.format(split=split, Part=part, whole=whole, n=n) for place in places)
            save(root / image, draws.integers(0, 255, (40, 50, 3)))
            save(root / mask, np.repeat(draws.choice(values, (40, 5)), 10, axis=1))
        lists = {"kvasir": root, "voc": root / "VOCdevkit" / "VOC2012" / "ImageSets" / "Segmentation"}
        if layout in lists:
            lists[layout].mkdir(parents=True, exist_ok=True)
            (lists[layout] / f"{split}.txt").write_text(f"{split}0\n{split}1\n")
    return root


def layout(path: Path) -> str:
    recipe = yaml.safe_load(path.read_text())
    return path.stem.split("_")[0] if path in MEDICAL else recipe["data"]["name"]


def test_the_tables_are_complete() -> None:
    methods = ("none", "mrla_light", "dla_light", "kcla")
    cells = {f"{data}_resunet_{attn}" for data in ("isic17", "isic18", "kvasir") for attn in methods}
    assert {path.stem for path in MEDICAL} == cells
    assert {path.stem for path in EANET} == {"voc_resnet101", "ade20k_resnet101", "cityscapes_resnet50"}
    assert len([path for path in SEG if path.parent.name == "study"]) == 1 and len(SMOKE) == 4


@pytest.mark.parametrize("path", [*MEDICAL, *EANET], ids=lambda path: path.stem)
def test_the_header_says_where_the_figures_are_from_and_what_they_are(path: Path) -> None:
    text = path.read_text()
    paper = "2606.28405" if path in MEDICAL else "2105.02358"
    assert re.search(rf"^# Paper: .*arXiv {paper}", text, re.M) and "# Hardware and hours: " in text
    assert re.search(r"^# Expected: .*%", text, re.M) and "Not run here" in text
    assert ("foreground IoU" in text and "foreground Dice" in text) if path in MEDICAL else "mIoU over classes" in text


def test_the_papers_medical_recipes_differ_in_data_and_attention_alone() -> None:
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in MEDICAL}
    for name, recipe in recipes.items():
        data, _, attn = name.split("_", 2)
        assert recipe["data"].pop("name") == ("folder" if data == "kvasir" else "isic")
        model = recipe.pop("model")
        assert model["name"] == "resunet" and model["attn"] == attn
        assert model.get("init") == (None if attn == "none" else "paper")
    assert len({str(recipe) for recipe in recipes.values()}) == 1


@pytest.mark.parametrize("path", SEG, ids=lambda path: path.stem)
@pytest.mark.medium
def test_a_recipe_builds_and_takes_a_step(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    monkeypatch.setattr(Checkpoints, "_save", lambda *_: None)  # hundreds of megabytes
    name = layout(path)
    data = [] if name == "digits" else ["--data.root", str(write(tmp_path / "data", name))]
    small = ["--data.image_size", "32", "--data.batch_size", "2", "--data.num_workers", "0"]
    limits = [part for split in ("train", "val", "test") for part in (f"--trainer.limit_{split}_batches", "1")]
    # One process: the batch norms over all of several are Lightning's.
    once = ["--trainer.max_epochs", "1", "--trainer.sync_batchnorm", "false"]
    found = fit(tmp_path / "run", "--config", str(path), *data, *small, *limits, *once)
    classes = {"voc": 21, "ade20k": 150, "cityscapes": 19, "digits": 3}.get(name, 2)
    assert found["epochs"] == 1 and found["classes"] == classes
    assert found["metric"] == ("iou_fg" if classes == 2 else "miou")


@pytest.mark.slow
def test_scenes_of_digits_are_learnt(tmp_path: Path) -> None:
    (path,) = (path for path in SMOKE if "digits" in path.stem)
    assert fit(tmp_path / "run", "--config", str(path))["last"]["test/miou"] > least(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "folder", "metric"),
    [
        ("medical_resunet_kcla", "kvasir_seg_mini", "test/iou_fg"),
        ("camvid_eanet", "camvid_voc", "test/pixel_acc"),
        ("few_resunet_mrla_light", "isic2018_3pairs", "train/iou_fg"),
    ],
)
def test_a_folder_is_learnt(stem: str, folder: str, metric: str, tmp_path: Path, shared_data) -> None:
    path = ROOT / "recipes" / "smoke" / f"{stem}.yaml"
    found = fit(tmp_path / "run", "--config", str(path), "--data.root", str(shared_data(folder)))
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    last = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True)) | found["last"]
    assert float(last[metric]) > least(path)
