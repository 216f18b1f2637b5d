"""What a user can get wrong: one line that names it, exit code 2, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lineattn.cli.main import main
from lineattn.cli.task import run
from lineattn.tasks.cls import Classifier
from tests.tasks.helpers import contents, fails, fit, make_small

SMALL = ("--data.name", "digits", "--data.batch_size", "40", "--trainer.max_epochs", "1")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        out = tmp_path_factory.mktemp("trained") / "run"
        fit(out, *SMALL)
        return out


@pytest.fixture
def images(tmp_path):
    """Two classes of four images in two splits."""
    root = tmp_path / "images"
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number in range(4):
                image = Image.fromarray(np.full((20, 20, 3), 30 * number, dtype=np.uint8))
                image.save(root / split / name / f"{number}.jpg")
    return root


def fit_args(images: Path, out: Path, *more: str):
    small = ("--data.image_size", "16", "--trainer.max_epochs", "1", "--out", str(out))
    return ("fit", "cls", "--data.root", str(images), *small, *more)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("fit", "cls", "--data.root", "nowhere"), "--data.root nowhere does not exist"),
        (("fit", "cls", "--data.name", "digit"), "did you mean 'digits'"),
        (("fit", "cls", "--optim.name", "momentun"), "did you mean 'momentum'"),
        (("fit", "cls", "--model.nam", "x"), "did you mean '--model.name'"),
        (("fit", "cls", "--model.name", "resunet"), "resunet is a network for segmentation: choose another"),
        (("fit", "cls", "--model.name", "retinanet_resnet50"), "is a network for detection: choose another"),
        (("fit", "cls", "--trainer.max_epochs", "many"), "--trainer.max_epochs many: expected int"),
        (("fit", "cls", "--data.augment", "cropp"), "--data.augment cropp"),
        (("fit", "cls", "--config", "absent.yaml"), "absent.yaml"),
        (("fit", "cls", "--data.name", "digits", "--trainer.accelerator", "abacus"), "abacus"),
        (("fit", "cls", "--data.name", "digits", "--trainer.max_steps", "9"), "--trainer.max_epochs gives the length"),
        (("fit", "cls", "--ckpt_path", "absent.ckpt"), "no checkpoint at absent.ckpt"),
        (("fit", "cls", "--ckpt_path", "last"), "--ckpt_path last needs --out"),
        (("test", "cls"), "--ckpt_path is missing"),
        (("fit", "clss"), "did you mean 'cls'"),
    ],
)
def test_wrong_options(args, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in fails(capsys, *args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("data.batch_size", "0"), ("data.num_workers", "-1"), ("data.image_size", "0"), ("data.channels", "0")),
        *(("data.crop", "0"), ("data.crop", "1.5"), ("data.erasing", "1.5"), ("data.mixup", "-1"), ("data.std", "[0]")),
        *(("data.cutmix", "-0.1"), ("data.val_fraction", "1"), ("data.mean", "[]"), ("optim.label_smoothing", "1.1")),
        *(("optim.lr", "0"), ("optim.lr", ".nan"), ("optim.weight_decay", "-1"), ("optim.ema_decay", "1")),
    ],
)
def test_numbers_out_of_range(option, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"--{option} " in fails(capsys, "fit", "cls", "--data.name", "digits", f"--{option}={value}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "name"), [("--model.name", "resnet20_cifra"), ("--model.attn", "kcal")])
def test_unknown_networks_and_methods_with_the_nearest_name(option, name, capsys, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real networks
    monkeypatch.chdir(tmp_path)
    near = {"--model.name": "resnet20_cifar", "--model.attn": "kcla"}[option]
    line = fails(capsys, "fit", "cls", "--data.name", "digits", option, name)
    assert f"'{name}'" in line and f"'{near}'" in line
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_in_a_recipe(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {nam: resnet20_cifar}\n")
    assert "nam" in fails(capsys, "fit", "cls", "--config", str(recipe))


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.medium)])
def test_a_broken_image_in_training(images, tmp_path, capsys, workers):
    broken = images / "train" / "dog" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:150])
    args = fit_args(images, tmp_path / "run", "--data.num_workers", workers)
    assert str(broken) in fails(capsys, *args)
    assert main([*args, "--data.on_error", "skip"]) == 0
    out = capsys.readouterr().out
    assert out.count(str(broken)) == 1 and "1 images could not be read" in out


def test_a_skipped_image_is_not_counted_as_evaluated(images, tmp_path):
    fit(tmp_path / "run", *fit_args(images, tmp_path)[2:-2])
    (images / "test" / "dog" / "2.jpg").write_text("hello")
    ckpt = ("--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    run("test", "cls", [*ckpt, "--data.on_error", "skip"], quiet=True)
    assert json.loads((tmp_path / "run" / "test.json").read_text())["images"] == 7


def test_an_empty_class_and_a_hidden_folder(images, tmp_path, capsys):
    (images / "train" / ".cache").mkdir()
    assert main(list(fit_args(images, tmp_path / "run"))) == 0
    assert ".cache" in capsys.readouterr().out
    (images / "train" / "cow").mkdir()
    assert "cow holds no images" in fails(capsys, *fit_args(images, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_grey_images_train_a_colour_network(images, tmp_path):
    for file in images.rglob("*.jpg"):
        Image.open(file).convert("L").save(file)
    assert fit(tmp_path / "run", *fit_args(images, tmp_path)[2:-2])["classes"] == 2


def test_another_number_of_classes_than_the_checkpoint(images, trained, tmp_path, capsys):
    ckpt = str(trained / "checkpoints" / "last.ckpt")
    where = ("--data.name", "folder", "--data.root", str(images), "--data.channels", "1")
    line = fails(capsys, "test", "cls", "--ckpt_path", ckpt, *where, "--out", str(tmp_path / "out"))
    assert ckpt in line and "10 classes" in line and "has 2" in line
    assert not (tmp_path / "out").exists()


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize(
    "kind",
    [
        "code",
        "cut",
        *(
            pytest.param(kind, marks=pytest.mark.medium)
            for kind in ("bare pickle with code", "text", "weights", "folder")
        ),
    ],
)
def test_checkpoints_that_are_none(kind, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, good = tmp_path / "x.ckpt", trained / "checkpoints" / "last.ckpt"
    if kind == "code":
        torch.save({"state_dict": Bomb()}, path)
    elif kind == "bare pickle with code":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "cut":
        path.write_bytes(good.read_bytes()[:-3000])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "weights":
        torch.save({"conv.weight": torch.zeros(1)}, path)
    else:
        path.mkdir()
    before = set(tmp_path.iterdir())
    for verb in (("fit", "cls", *SMALL), ("test", "cls"), ("predict", "cls", "--input", "x.jpg")):
        line = fails(capsys, *verb, "--ckpt_path", str(path))
        assert str(path) in line and ("code" in line) == ("code" in kind)
    assert set(tmp_path.iterdir()) == before


def test_weights_that_do_not_fit(trained, tmp_path, capsys, monkeypatch):
    found = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    found["state_dict"]["net.0.weight"] = torch.zeros(1)
    torch.save(found, tmp_path / "x.ckpt")
    assert "net.0.weight" in fails(capsys, "test", "cls", "--ckpt_path", str(tmp_path / "x.ckpt"))


def test_a_run_folder_is_not_overwritten(trained, capsys):
    before = contents(trained)["rows"]
    assert "holds a run already" in fails(capsys, "fit", "cls", *SMALL, "--out", str(trained))
    assert contents(trained)["rows"] == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.medium
def test_a_full_disk_leaves_the_last_checkpoint_whole(code, tmp_path, capsys, monkeypatch):
    plain, writes = torch.save, []

    def filling(content, file):
        writes.append(content)
        if len(writes) == 3:  # best and last of the first epoch are written
            file.write(b"half a")
            raise RuntimeError("writer failed") from OSError(code, os.strerror(code))
        plain(content, file)

    monkeypatch.setattr(torch, "save", filling)
    out = tmp_path / "run"
    line = fails(capsys, "fit", "cls", *SMALL, "--trainer.max_epochs", "3", "--out", str(out))
    assert "no room on the disk" in line and "checkpoints" in line
    monkeypatch.setattr(torch, "save", plain)
    assert sorted(file.name for file in (out / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    fit(out, *SMALL, "--trainer.max_epochs", "3", "--ckpt_path", "last")
    assert len(contents(out)["rows"]) == 3


@pytest.mark.medium
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs a file system of its own")
def test_a_disk_that_really_is_full(trained, tmp_path):
    from lineattn.errors import InputError
    from lineattn.tasks.checkpoint import CheckpointIO

    if os.system(f"mount -t tmpfs -o size=64k none {tmp_path} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        path = tmp_path / "last.ckpt"
        CheckpointIO().save_checkpoint({"weights": torch.zeros(100)}, path)
        old = path.read_bytes()
        with pytest.raises(InputError, match="no room on the disk"):
            CheckpointIO().save_checkpoint({"weights": torch.zeros(100_000)}, path)
        assert path.read_bytes() == old and [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    finally:
        os.system(f"umount {tmp_path}")


@pytest.mark.parametrize(("name", "step"), [("loss", 4), ("optimizer_step", 5)])
def test_a_loss_or_a_weight_that_is_no_number_stops_and_keeps_the_checkpoint(name, step, tmp_path, capsys, monkeypatch):
    plain, done = getattr(Classifier, name), [0]

    def diverging(self, *args, **kwargs):
        done[0] += 1
        found = plain(self, *args, **kwargs)
        if done[0] == 5 and name == "optimizer_step":
            with torch.no_grad():
                next(self.net.parameters()).fill_(float("nan"))
        return (found[0] * float("inf"), found[1]) if done[0] == 5 and name == "loss" else found

    monkeypatch.setattr(Classifier, name, diverging)
    out = tmp_path / "run"
    args = (*SMALL, "--trainer.max_epochs", "4", "--checkpoint_every", "1", "--out", str(out))
    line = fails(capsys, "fit", "cls", *args)
    assert f"step {step}" in line and "--optim.lr" in line
    last = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 4
    assert all(bool(tensor.isfinite().all()) for tensor in last["state_dict"].values() if tensor.is_floating_point())


def test_nothing_to_predict(trained, tmp_path, capsys):
    ckpt = str(trained / "checkpoints" / "last.ckpt")
    for args, says in (
        ((), "--input is missing"),
        (("--input", str(tmp_path)), "no images at --input"),
        (("--input", str(tmp_path / "*.png")), "no images at --input"),
    ):
        assert says in fails(capsys, "predict", "cls", "--ckpt_path", ckpt, *args)


def test_a_checkpoint_is_a_zip_that_any_reader_can_check(trained):
    with zipfile.ZipFile(trained / "checkpoints" / "last.ckpt") as archive:
        assert archive.testzip() is None
