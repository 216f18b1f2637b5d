"""The four verbs, what a run leaves behind, and what is trained how."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from lineattn.cli.task import run
from lineattn.errors import InputError
from lineattn.ops import native
from lineattn.tasks.cls import Classifier
from lineattn.tasks.data.source import Splits
from lineattn.tasks.meter import Meter
from lineattn.tasks.optim import Optim, Schedule, optimizer
from lineattn.tasks.record import Record
from tests.tasks.helpers import few_digits, fit, make_small

RECIPE = ("--data.name", "digits", "--data.batch_size", "20", "--trainer.max_epochs", "4", "--optim.lr", "0.2")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        plot = Record.plot
        make_small(monkeypatch)
        monkeypatch.setattr(Record, "plot", plot)
        out = tmp_path_factory.mktemp("trained") / "run"
        return out, fit(out, *RECIPE)


def test_a_run_folder_holds_the_whole_record(trained):
    out, found = trained
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files == {
        *("config.yaml", "env.json", "metrics.csv", "classes.json", "summary.json", "curves.png"),
        *("checkpoints/last.ckpt", "checkpoints/best.ckpt"),
    }
    assert json.loads((out / "summary.json").read_text()) == found
    assert json.loads((out / "classes.json").read_text()) == [str(digit) for digit in range(10)]
    env = json.loads((out / "env.json").read_text())
    assert env["versions"]["torch"] == torch.__version__.split("+")[0] and env["seed"] == 0
    assert env["native"] == native.status()
    with Image.open(out / "curves.png") as curves:
        assert curves.size[0] > 500
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"] and rows[-1]["step"] == "24"
    assert all(all(row.values()) for row in rows)


def test_the_summary_says_what_was_trained_and_how_well(trained):
    _, found = trained
    assert found["status"] == "done" and found["task"] == "cls" and found["classes"] == 10
    assert found["params"] == found["trainable_params"] == 6 * 9 + 6 + 12 + 250
    assert found["macs"] == 8 * 8 * 54 + 240
    assert found["peak_memory_mib"] > 0 and found["seconds_per_epoch"] > 0
    assert {"seed_everything", "out"}.isdisjoint(found["recipe"]) and "attn" not in found["recipe"]["model"]
    assert found["last"]["test/acc1"] > 20


def test_best_is_the_best_epoch_of_validation(trained):
    out, found = trained
    with (out / "metrics.csv").open() as file:
        accuracies = [float(row["val/acc1"]) for row in csv.DictReader(file)]
    assert found["best"]["val/acc1"] == max(accuracies)
    assert found["best"]["epoch"] == accuracies.index(max(accuracies))
    assert "test/acc1" in found["best"]


def test_without_validation_there_is_no_best_and_the_test_split_chooses_nothing(tmp_path, monkeypatch):
    def no_val(**kwargs):
        splits = few_digits(**kwargs)
        return Splits(splits.classes, splits.train, None, splits.test)

    monkeypatch.setattr("lineattn.tasks.data.digits.load", no_val)
    found = fit(tmp_path / "run", *RECIPE)
    assert found["best"] is None and found["last"].keys() == {"test/loss", "test/acc1", "test/acc5"}
    assert not (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()


@pytest.mark.medium
def test_validate_and_test_repeat_what_fit_found(trained, tmp_path):
    out, found = trained
    for which in ("last", "best"):
        for verb, split in (("validate", "val"), ("test", "test")):
            args = ["--ckpt_path", which, "--out", str(out)]
            metrics = run(verb, "cls", args, quiet=True)
            assert metrics[f"{split}/acc1"] == found[which][f"{split}/acc1"]
            (out / f"{split}.json").unlink()


def test_predict_needs_the_checkpoint_and_images_only(trained, tmp_path, capsys, monkeypatch):
    out, _ = trained
    images = few_digits(image_size=16, channels=1).train
    for number in range(3):
        Image.fromarray(images.read(number)[0].numpy()).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("hello")
    monkeypatch.setattr("lineattn.tasks.data.digits.load", None)  # the data set is gone
    args = ["--ckpt_path", str(out / "checkpoints" / "last.ckpt"), "--out", str(tmp_path)]
    for given, count in ((str(tmp_path), 3), (str(tmp_path / "[01].png"), 2), (str(tmp_path / "2.png"), 1)):
        found = run("predict", "cls", [*args, "--input", given])
        assert len(found) == count
        assert all(abs(sum(values.values()) - 1) < 1e-5 and len(values) == 10 for values in found.values())
        with (tmp_path / "predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["image"] for row in rows] == list(found)
        for row, values in zip(rows, found.values(), strict=True):
            assert values[row["class"]] == max(values.values())
        assert "2.png" in capsys.readouterr().out or count == 2


def test_predict_skips_what_it_cannot_read_and_says_so(trained, tmp_path, capsys):
    out, _ = trained
    Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("hello")
    args = ["--ckpt_path", str(out / "checkpoints" / "last.ckpt"), "--out", str(tmp_path), "--input", str(tmp_path)]
    found = run("predict", "cls", [*args, "--data.on_error", "skip"])
    assert list(found) == [str(tmp_path / "good.png")]
    assert "bad.png" in capsys.readouterr().out


def rates(config, epochs, steps=1):
    made = optimizer(config, torch.nn.Linear(2, 2))
    schedule = Schedule(config, made, epochs=epochs, steps_per_epoch=steps)
    found = []
    for step in range(epochs * steps):
        schedule.at(step // steps, step)
        found.append(made.param_groups[0]["lr"])
    return found


def test_the_papers_schedule():
    config = Optim(lr=0.1, schedule="multistep", milestones=[100, 150], warmup_epochs=10, warmup_lr=0.001)
    found = rates(config, 180)
    assert found[:10] == pytest.approx([0.001 + 0.0099 * epoch for epoch in range(10)])
    assert found[10:] == pytest.approx([0.1] * 90 + [0.01] * 50 + [0.001] * 30)


@pytest.mark.parametrize("steps", [3, 7, 391])
def test_milestones_by_step_fall_at_the_same_place(steps):
    config = Optim(lr=0.1, schedule="multistep", milestones=[2, 3], per_step=True)
    assert rates(config, 4, steps) == pytest.approx([0.1] * (2 * steps) + [0.01] * steps + [0.001] * steps)


def test_cosine_and_constant():
    assert rates(Optim(lr=1.0, schedule="none"), 3) == [1.0] * 3
    assert rates(Optim(lr=1.0, schedule="cosine"), 4) == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_cosine_with_a_period_goes_up_again(steps):
    """As torch's does behind its `T_max`."""
    found = rates(Optim(lr=0.1, schedule="cosine", period=4, min_lr=0.01, per_step=steps > 1), 9, steps)
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=2 * steps, eta_min=0.01)
    wanted = []
    for _ in found:
        wanted.append(sgd.param_groups[0]["lr"])
        sgd.step()
        annealed.step()
    assert found == pytest.approx(wanted)
    assert found[2 * steps] == pytest.approx(0.01) and found[4 * steps] == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [{"period": 5}, {"period": 4, "schedule": "poly"}, {"period": 4, "warmup_epochs": 1}])
def test_a_period_that_means_nothing(wrong):
    with pytest.raises(InputError, match=r"optim\.period"):
        Optim(**wrong)


def test_poly_falls_with_the_steps():
    found = rates(Optim(lr=0.5, schedule="poly", decay_rate=0.9, per_step=True), 5, 4)
    assert found == pytest.approx([0.5 * (1 - step / 20) ** 0.9 for step in range(20)])


@pytest.mark.parametrize(("per_step", "expected"), [("false", [1.0, 0.5]), ("true", [0.629, 0.017])])
def test_a_run_follows_its_schedule(per_step, expected, tmp_path):
    recipe = ("--data.name", "digits", "--data.batch_size", "20", "--optim.lr", "1", "--optim.per_step", per_step)
    fit(tmp_path, *recipe, "--trainer.max_epochs", "2")
    with (tmp_path / "metrics.csv").open() as file:
        assert [float(row["lr"]) for row in csv.DictReader(file)] == pytest.approx(expected, abs=1e-3)


def test_an_epoch_of_an_odd_number_of_batches_ends_with_a_step_of_its_own(tmp_path):
    recipe = ("--data.name", "digits", "--data.batch_size", "24", "--optim.lr", "1", "--optim.per_step", "true")
    fit(tmp_path, *recipe, "--trainer.max_epochs", "1", "--trainer.accumulate_grad_batches", "2")
    with (tmp_path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    # Five batches are three steps, the last of them two thirds down the cosine.
    assert row["step"] == "3" and float(row["lr"]) == pytest.approx(0.25)


@pytest.mark.parametrize(("decay_all", "groups"), [(True, {1e-4}), (False, {0.0, 1e-4})])
def test_norms_and_biases_decay_only_if_asked(decay_all, groups):
    made = optimizer(Optim(decay_all=decay_all), torch.nn.Linear(2, 2))
    assert {group["weight_decay"] for group in made.param_groups} == groups


def test_the_default_optimiser_is_plain_momentum_as_in_the_papers():
    made = optimizer(Optim(), torch.nn.Linear(2, 2))
    assert isinstance(made, torch.optim.SGD)
    assert made.param_groups[0]["momentum"] == 0.9 and not made.param_groups[0]["nesterov"]


def test_the_meter_counts_hits_of_uneven_batches():
    meter = Meter()
    logits = torch.arange(8.0).expand(8, 8)  # the largest are classes 7, 6, 5, 4, 3
    meter.update(torch.tensor(2.0), logits, torch.tensor([7, 7, 6, 5, 3, 2, 1, 0]))
    meter.update(torch.tensor(5.0), logits[:2], torch.tensor([7, 0]))
    found = meter.compute("x", torch.device("cpu"))
    assert found == {"x/loss": pytest.approx((8 * 2 + 2 * 5) / 10), "x/acc1": 30.0, "x/acc5": 60.0}


def test_the_moving_average_is_what_is_evaluated():
    module = Classifier(classes=3, in_chans=1, optim=Optim(ema_decay=0.5))
    assert module.ema is not None
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.add_(1.0)
    images = torch.rand(2, 1, 16, 16)
    module.eval()
    module.net.eval()
    assert torch.equal(module(images), module.ema.module(images))
    assert not torch.equal(module(images), module.net(images))
    assert not any(parameter.requires_grad for parameter in module.ema.parameters())


def test_two_networks_of_one_seed_start_equal_whatever_was_drawn_before():
    first = Classifier(classes=3, seed=4).state_dict()
    torch.rand(3)
    second, other = Classifier(classes=3, seed=4).state_dict(), Classifier(classes=3, seed=5).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["net.0.weight"], other["net.0.weight"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.medium
def test_half_precision_trains(precision, tmp_path):
    found = fit(tmp_path / "run", *RECIPE, "--trainer.precision", precision)
    assert found["last"]["test/acc1"] > 30


@pytest.mark.medium
def test_everything_at_once_trains(tmp_path):
    extras = ("--data.mixup", "0.2", "--data.cutmix", "1.0", "--data.rand_augment", "true", "--data.erasing", "0.2")
    extras = (*extras, "--data.augment", "pad_crop")
    more = (
        "--optim.label_smoothing",
        "0.1",
        "--optim.name",
        "adamw",
        "--optim.lr",
        "0.01",
        "--data.augment",
        "pad_crop",
    )
    found = fit(tmp_path / "run", *RECIPE[:-2], *extras, *more)
    assert found["last"]["test/acc1"] > 15
