"""Segmentation as a user runs it: train, resume, evaluate, predict, on images and masks of several sizes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lineattn.cli.restore import restore
from lineattn.cli.task import run
from lineattn.tasks import seg_predict
from lineattn.tasks.record import Record
from lineattn.tasks.seg import Segmenter
from lineattn.tasks.seg_loss import predict, probabilities
from lineattn.tasks.seg_meter import SegMeter
from tests.tasks.helpers import Killed, assert_equal, contents, fails

TINY = ("--model.width", "8", "--optim.name", "adamw", "--optim.lr", "0.01", "--data.num_workers", "0")
SIZES = ((33, 21), (40, 40), (26, 47))


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "plot", lambda self: None)


def scenes(root: Path, *, values: tuple[int, ...] = (0, 255), sizes=SIZES, count: int = 6) -> Path:
    """Bright squares on dark ground; a mask value each, in turn."""
    draws = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for index in range(count):
            height, width = sizes[index % len(sizes)]
            image = draws.integers(0, 60, (height, width, 3), dtype=np.uint8)
            mask = np.full((height, width), values[0], dtype=np.uint8)
            for place, value in enumerate(values[1:]):
                rows, columns = slice(4 + 9 * place, 12 + 9 * place), slice(3, 15)
                image[rows, columns] += np.uint8(70 * (place + 1))
                mask[rows, columns] = value
            Image.fromarray(image).save(root / split / "images" / f"{split}{index}.png")
            Image.fromarray(mask).save(root / split / "masks" / f"{split}{index}.png")
    return root


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


def seg(verb: str, *args: str):
    return run(verb, "seg", list(args), quiet=True)


def fit(out: Path, root: Path, *args: str):
    return seg("fit", "--out", str(out), "--data.root", str(root), "--data.image_size", "32", *TINY, *args)


def test_a_foreground_is_learned_evaluated_and_predicted_in_the_size_of_the_image(tmp_path: Path) -> None:
    """Case 3: masks of 0 and 255 are two classes. Case 13: any size in, the same size out."""
    root, out = scenes(tmp_path / "data"), tmp_path / "run"
    found = fit(out, root, "--trainer.max_epochs", "12", "--data.batch_size", "3")
    assert found["task"] == "seg" and found["metric"] == "iou_fg" and found["classes"] == 2
    assert found["best"]["val/iou_fg"] > 60 and {"test/dsc_fg", "test/boundary_f", "test/miou"} <= found["last"].keys()
    with (out / "metrics.csv").open() as file:
        assert {"train/loss", "val/iou_fg", "val/dsc_fg"} <= next(csv.DictReader(file)).keys()

    last = str(out / "checkpoints" / "last.ckpt")
    again = seg("test", "--ckpt_path", last)
    assert again == pytest.approx({key: value for key, value in found["last"].items() if key.startswith("test/")})
    grey = tmp_path / "new" / "grey.png"
    grey.parent.mkdir()
    Image.fromarray(np.full((19, 57), 90, dtype=np.uint8)).save(grey)
    pixels = seg("predict", "--ckpt_path", last, "--input", str(grey.parent), "--probabilities", "true")
    mask, overlay = (opened(out / "predictions" / kind / "grey.png") for kind in ("masks", "overlays"))
    assert mask.size == (57, 19) and mask.mode == "P" and overlay.height > 19
    kept = np.load(out / "predictions" / "probabilities" / "grey.npy")
    assert kept.shape == (2, 19, 57) and np.abs(kept.sum(0) - 1).max() < 1e-2
    counted = np.bincount(np.asarray(mask).ravel(), minlength=2)
    assert pixels == {str(grey): {"background": counted[0], "foreground": counted[1]}}
    assert (out / "predictions.csv").read_text().startswith("image,mask,pixels(background),pixels(foreground)\n")


def test_classes_with_names_and_colours(tmp_path: Path) -> None:
    root, out = scenes(tmp_path / "data", values=(0, 1, 2)), tmp_path / "run"
    (root / "classes.txt").write_text("ground 10 20 30\nlow 255 0 0\nhigh 0 255 0\n")
    found = fit(out, root, "--model.class_weights", "[1, 2, 2]", "--trainer.max_epochs", "1")
    assert found["metric"] == "miou" and found["classes"] == 3
    trained = restore(out / "checkpoints" / "last.ckpt")
    assert trained.classes == ["ground", "low", "high"] and trained.task == "seg"
    assert trained.net(torch.zeros(1, 3, 21, 18)).shape == (1, 3, 21, 18)
    image = root / "test" / "images" / "test0.png"
    seg("predict", "--ckpt_path", str(out / "checkpoints" / "last.ckpt"), "--input", str(image))
    palette = opened(out / "predictions" / "masks" / "test0.png").getpalette()
    assert palette is not None and palette[:9] == [10, 20, 30, 255, 0, 0, 0, 255, 0]


def test_images_of_a_size_are_evaluated_as_they_would_be_alone(tmp_path: Path) -> None:
    root, out = scenes(tmp_path / "data"), tmp_path / "run"
    together = fit(out, root, "--trainer.max_epochs", "1", "--data.batch_size", "6")["last"]
    alone = seg("validate", "--ckpt_path", str(out / "checkpoints" / "last.ckpt"), "--data.batch_size", "1")
    shared = together.keys() & alone.keys()
    assert len(shared) > 4
    assert [alone[key] for key in shared] == pytest.approx([together[key] for key in shared], rel=1e-5)


def test_resized_to_a_square_as_the_papers_do(tmp_path: Path) -> None:
    root, out = scenes(tmp_path / "data"), tmp_path / "run"
    fit(out, root, "--data.fit", "resize", "--data.rotate", "90", "--data.outside", "0", "--trainer.max_epochs", "1")
    image = root / "test" / "images" / "test2.png"
    seg("predict", "--ckpt_path", str(out / "checkpoints" / "last.ckpt"), "--input", str(image))
    assert opened(out / "predictions" / "masks" / "test2.png").size == opened(image).size


@pytest.mark.medium
def test_a_resumed_run_equals_the_one_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = scenes(tmp_path / "data")
    recipe = ("--trainer.max_epochs", "3", "--data.batch_size", "2", "--checkpoint_every", "2", "--data.rotate", "30")
    fit(tmp_path / "alone", root, *recipe)
    plain, done = Segmenter.training_step, [0]

    def stopping(self, batch, batch_idx):
        if done[0] == 5:
            raise Killed
        done[0] += 1
        return plain(self, batch, batch_idx)

    with monkeypatch.context() as inner:
        inner.setattr(Segmenter, "training_step", stopping)
        with pytest.raises(Killed):
            fit(tmp_path / "stopped", root, *recipe)
    fit(tmp_path / "stopped", root, *recipe, "--ckpt_path", "last")
    assert_equal(contents(tmp_path / "stopped"), contents(tmp_path / "alone"))


def test_attention_and_a_trunk_in_the_encoder(tmp_path: Path) -> None:
    root = scenes(tmp_path / "data", count=3)
    fit(tmp_path / "plain", root, "--trainer.max_epochs", "1")
    trunk = ("--model.trunk", str(tmp_path / "plain" / "checkpoints" / "last.ckpt"), "--model.freeze_trunk", "true")
    attn = ("--model.attn", "kcla", "--model.attn_args", "{head_dim: 8}")
    found = fit(tmp_path / "kcla", root, *attn, *trunk, "--trainer.max_epochs", "1", "--optim.ema_decay", "0.5")
    plain = json.loads((tmp_path / "plain" / "summary.json").read_text())
    assert found["start"]["val/iou_fg"] == pytest.approx(plain["last"]["val/iou_fg"])
    assert 0 < found["trainable_params"] < found["params"] > plain["params"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model.loss", "bce_dice"), "--model.loss bce_dice is for two classes, and there are 3"),
        (("--model.class_weights", "[1, 2]"), "--model.class_weights [1.0, 2.0]: must be 3 numbers, one a class"),
        (("--data.fit", "stretch"), "fit"),
        (("--data.scale", "[2, 1]"), "--data.scale"),
        (("--data.masks", "index"), "for the data set folder, not digits"),
        (("--model.name", "resnet18"), "it is none for segmentation"),
        (("--model.name", "mask_rcnn_resnet50"), "is a network for detection: choose another"),
        (("--optim.label_smoothing", "0.1"), "label_smoothing is for classification"),
    ],
    ids=["loss", "weights", "fit", "scale", "masks", "network", "detector", "smoothing"],
)
def test_what_does_not_fit_is_one_line(args, message, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--data.image_size", "16", "--data.num_workers", "0", "--trainer.max_epochs", "1")
    assert message in fails(capsys, "fit", "seg", "--out", str(tmp_path / "run"), *options, *args)


def test_a_checkpoint_of_another_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "run", scenes(tmp_path / "data", count=3), "--trainer.max_epochs", "1")
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    line = fails(capsys, "validate", "cls", "--ckpt_path", str(path))
    assert "is of the task seg: lineattn validate seg" in line


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_corrupt_mask_is_named(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 7."""
    root = scenes(tmp_path / "data")
    broken = root / "train" / "masks" / "train2.png"
    broken.write_bytes(broken.read_bytes()[:60])
    args = ("--out", str(tmp_path / "run"), "--data.root", str(root), "--data.image_size", "32", *TINY)
    if policy == "stop":
        assert str(broken) in fails(capsys, "fit", "seg", *args, "--trainer.max_epochs", "1")
    else:
        assert (
            fit(tmp_path / "run", root, "--data.on_error", "skip", "--trainer.max_epochs", "1")["skipped_images"] == 1
        )


def test_what_is_trained_is_what_is_measured() -> None:
    """The loss falls as the score rises, of a network that puts out its input."""
    module = Segmenter(width=8, classes=2, in_chans=1)
    module.net = torch.nn.Identity()
    target = torch.randint(0, 2, (2, 9, 7))
    good, bad = (4.0 * (2 * target[:, None] - 1) * sign for sign in (1, -1))
    for logits, score in ((good, 100), (bad, 0)):
        loss, outputs = module.loss(logits, target)
        meter = SegMeter(2)
        module.note(meter, loss, outputs, target)
        assert meter.compute("val", torch.device("cpu"))["val/iou_fg"] == score
        assert torch.equal(predict(outputs), probabilities(outputs).argmax(1))
        assert (loss < 0.1) == (score == 100)


def test_a_mask_of_another_size_stops_the_run_from_a_worker_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = scenes(tmp_path / "data", count=3)
    wrong = root / "train" / "masks" / "train1.png"
    Image.fromarray(np.zeros((5, 5), dtype=np.uint8)).save(wrong)
    args = ("--out", str(tmp_path / "run"), "--data.root", str(root), "--data.image_size", "32", "--model.width", "8")
    line = fails(capsys, "fit", "seg", *args, "--data.num_workers", "1", "--data.on_error", "skip")
    assert str(wrong) in line and "is not of the size of its image" in line


def test_images_in_tiles_mirrored_and_at_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles with the overlap of the receptive field say what the whole image says, of every view."""
    fit(tmp_path / "run", scenes(tmp_path / "data", count=3), "--trainer.max_epochs", "1")
    wide = tmp_path / "wide.png"
    draws = np.random.default_rng(1)
    Image.fromarray(draws.integers(0, 255, (21, 401, 3), dtype=np.uint8)).save(wide)
    shared = ("--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt"), "--input", str(wide))
    views = ("--flips", "[horizontal, vertical]", "--scales", "[1, 0.9]")

    def found(name: str, *args: str) -> np.ndarray:
        out = tmp_path / name
        run("predict", "seg", ["--out", str(out), "--probabilities", "true", *shared, *args])
        assert opened(out / "predictions" / "masks" / "wide.png").size == (401, 21)
        return np.load(out / "predictions" / "probabilities" / "wide.npy").astype(np.float64)

    plain, mean = found("whole"), found("views", *views)
    tiled = found("tiled", *views, "--tile", "328", "--overlap", "144")
    assert "note: tiles of 328 pixels, overlapping by 144: the same as of the whole image" in capsys.readouterr().out
    assert np.abs(tiled - mean).max() < 1e-3 < np.abs(mean - plain).max()  # of half precision
    for args, message in (
        (("--tile", "4"), "--tile 4: must be at least 8"),
        (("--overlap", "8"), "--overlap 8 is that of tiles"),
        (("--tile", "64", "--overlap", "32"), "--overlap 32 on both sides leaves nothing of --tile 64"),
        (("--tile", "64", "--data.fit", "resize"), "--tile 64: this network sees images resized to squares"),
        (("--scales", "[1, 0]"), "--scales [1.0, 0.0]: must be one or more factors above 0"),
        (("--scales", "[]"), "--scales []: must be one or more factors above 0"),
        (("--flips", "[diagonal]"), "flips"),
    ):
        assert message in fails(capsys, "predict", "seg", *shared, *args)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "plot", lambda self: None)
        fit(folder / "run", scenes(folder / "data", count=3), "--trainer.max_epochs", "1")
    return folder / "run"


@pytest.mark.parametrize(
    "change",
    [("--model.class_weights", "[1, 20]"), ("--model.over", "all"), ("--model.loss", "cross_entropy")],
    ids=["weights", "over", "loss"],
)
def test_what_is_minimised_does_not_change_at_a_resume(
    done: Path, change: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (done / "config.yaml").read_text()
    line = fails(capsys, "fit", "seg", "--ckpt_path", "last", "--out", str(done), "--trainer.max_epochs", "2", *change)
    assert f"{change[0]} " in line and "contradicts" in line
    assert (done / "config.yaml").read_text() == settings


@pytest.mark.parametrize("command", [["profile"], ["analyze", "similarity"]], ids=" ".join)
def test_what_is_for_classifiers_refuses_by_one_line(
    done: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, *command, "--ckpt_path", str(done / "checkpoints" / "last.ckpt"))
    assert f"is of the task seg: {' '.join(command)} is for classifiers so far" in line


def test_prediction_skips_what_it_cannot_read_and_says_so(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 7. Names of images can't hide the results of others, either."""
    for name in ("a", "a_overlay"):
        Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:30])
    args = ("--ckpt_path", str(done / "checkpoints" / "last.ckpt"), "--out", str(tmp_path / "out"))
    args += ("--input", str(tmp_path / "*.png"))
    assert "b.png" in fails(capsys, "predict", "seg", *args)
    found = run("predict", "seg", [*args, "--data.on_error", "skip"])
    assert list(found) == [str(tmp_path / "a.png"), str(tmp_path / "a_overlay.png")]
    assert "1 images could not be read" in capsys.readouterr().out
    for kind in ("masks", "overlays"):
        written = [file.name for file in sorted((tmp_path / "out" / "predictions" / kind).iterdir())]
        assert written == ["a.png", "a_overlay.png"]


def test_prediction_in_the_precision_that_is_asked_for(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(np.arange(400, dtype=np.uint8).reshape(20, 20)).save(tmp_path / "a.png")
    args = ("--ckpt_path", str(done / "checkpoints" / "last.ckpt"), "--input", str(tmp_path / "a.png"))
    for precision in ("32-true", "bf16-mixed"):
        out = ("--out", str(tmp_path / precision), "--probabilities", "true")
        seg("predict", *args, *out, "--trainer.precision", precision)
    exact, mixed = (
        np.load(tmp_path / precision / "predictions" / "probabilities" / "a.npy").astype(np.float64)
        for precision in ("32-true", "bf16-mixed")
    )
    assert 0 < np.abs(exact - mixed).max() < 0.1
    assert "masks are predicted in 32-true or a mixed one" in fails(
        capsys, "predict", "seg", *args, "--trainer.precision", "bf16-true"
    )


def test_a_run_that_sees_no_image_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = scenes(tmp_path / "data", count=2)
    for file in (root / "train" / "images").iterdir():
        file.write_bytes(b"\x89PNG")
    args = ("--out", str(tmp_path / "run"), "--data.root", str(root), "--data.image_size", "32", *TINY)
    line = fails(capsys, "fit", "seg", *args, "--data.on_error", "skip", "--trainer.max_epochs", "1")
    assert "epoch 1 has seen no image" in line and not (tmp_path / "run" / "summary.json").exists()


def test_a_first_class_that_is_no_background_is_painted() -> None:
    grey, mask = torch.full((1, 8, 200), 100, dtype=torch.uint8), torch.zeros(8, 200, dtype=torch.uint8)
    mask[:, 100:] = 1
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    streets, skin = (
        seg_predict._overlay(grey, mask, classes, colours)
        for classes in (["road", "car", "sky"], ["background", "naevus", "melanoma"])
    )
    assert streets.getpixel((5, 5)) == (150, 50, 50) and skin.getpixel((5, 5)) == (100, 100, 100)
    assert streets.getpixel((150, 5)) == skin.getpixel((150, 5)) == (50, 150, 50)
    assert streets.height == skin.height + 16  # a line more in the legend
