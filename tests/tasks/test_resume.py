"""A run that is stopped anywhere and resumed equals the run left alone, bit for bit."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from lightning.pytorch import Callback

from lineattn.cli.task import run
from lineattn.tasks.checkpoint import load
from lineattn.tasks.cls import Classifier
from tests.tasks.helpers import Killed, assert_equal, contents, fit, killed_at, make_small

# Six batches an epoch with augmentation, mixup, EMA, a rate that changes each step, momentum and dropout.
RECIPE = [
    *("--data.name", "digits", "--data.batch_size", "20", "--data.augment", "pad_crop", "--data.mixup", "0.2"),
    *("--data.cutmix", "1.0", "--optim.ema_decay", "0.9", "--optim.per_step", "true", "--optim.warmup_epochs", "1"),
    *("--trainer.max_epochs", "3", "--checkpoint_every", "2", "--seed_everything", "7"),
]
RESUME = ("--ckpt_path", "last")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run left alone, with no worker."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        out = tmp_path_factory.mktemp("alone")
        fit(out, *RECIPE, "--data.num_workers", "0")
        return contents(out), torch.get_rng_state()


@pytest.mark.parametrize(
    "steps",
    [(9,), *(pytest.param(steps, marks=pytest.mark.medium) for steps in [(2,), (5,), (6,), (12,), (1, 3, 4, 1, 5)])],
)
def test_resumed_run_equals_the_one_left_alone(alone, steps, tmp_path, monkeypatch):
    make_small(monkeypatch)
    resume = ()
    for step in steps:
        with monkeypatch.context() as inner:
            killed_at(inner, step)
            with pytest.raises(Killed):
                fit(tmp_path, *RECIPE, *resume, "--data.num_workers", "0")
        resume = RESUME
    fit(tmp_path, *RECIPE, *RESUME, "--data.num_workers", "0")
    expected, generator = alone
    assert_equal(contents(tmp_path), expected)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.medium
def test_workers_change_nothing_resumed_or_not(alone, tmp_path, monkeypatch):
    make_small(monkeypatch)
    fit(tmp_path / "straight", *RECIPE, "--data.num_workers", "2")
    with monkeypatch.context() as inner:
        killed_at(inner, 9)
        with pytest.raises(Killed):
            fit(tmp_path / "resumed", *RECIPE, "--data.num_workers", "2")
    fit(tmp_path / "resumed", *RECIPE, *RESUME, "--data.num_workers", "2")
    for name in ("straight", "resumed"):
        assert_equal(contents(tmp_path / name), alone[0])


def interrupt_at(monkeypatch, step: int, times: int = 1):
    """Presses Ctrl-C in the middle of step number `step` of the process."""
    plain, done = Classifier.training_step, [0]

    def pressing(self, batch, batch_idx):
        done[0] += 1
        for _ in range(times if done[0] == step + 1 else 0):
            signal.raise_signal(signal.SIGINT)
        return plain(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", pressing)


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.medium) for step in (0, 5, 8))])
def test_ctrl_c_finishes_the_step_and_the_run_goes_on_from_there(alone, step, tmp_path, monkeypatch):
    make_small(monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as inner:
        interrupt_at(inner, step)
        with pytest.raises(KeyboardInterrupt, match=f"--ckpt_path last --out {tmp_path}"):
            fit(tmp_path, *RECIPE, "--checkpoint_every", "0")
    assert signal.getsignal(signal.SIGINT) is before
    assert load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == step + 1
    fit(tmp_path, *RECIPE, *RESUME)
    assert_equal(contents(tmp_path), alone[0])


@pytest.mark.medium
def test_a_second_ctrl_c_stops_at_once_and_keeps_the_checkpoint_before(alone, tmp_path, monkeypatch):
    make_small(monkeypatch)
    with monkeypatch.context() as inner:
        interrupt_at(inner, 4, times=2)
        with pytest.raises(KeyboardInterrupt, match="stopped at once"):
            fit(tmp_path, *RECIPE)
    assert load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 4
    fit(tmp_path, *RECIPE, *RESUME)
    assert_equal(contents(tmp_path), alone[0])


def test_ctrl_c_outside_of_training_is_an_interruption_too(tmp_path, monkeypatch):
    make_small(monkeypatch)
    # What started the tests may have it ignored, as shells do for what runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Classifier, "test_step", lambda *args: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, *RECIPE, "--trainer.max_epochs", "1")
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.medium
def test_a_run_killed_after_its_last_epoch_is_only_evaluated(alone, tmp_path, monkeypatch):
    make_small(monkeypatch)
    with monkeypatch.context() as inner:
        inner.setattr(Classifier, "test_step", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path, *RECIPE)
    with monkeypatch.context() as inner:
        killed_at(inner, 0)
        found = fit(tmp_path, *RECIPE, *RESUME)
    assert found["epochs"] == 3 and found["status"] == "done" and "test/acc1" in found["best"]
    assert_equal(contents(tmp_path), alone[0])


@pytest.mark.medium
@pytest.mark.parametrize("extra", [("--trainer.accumulate_grad_batches", "2"), ("--trainer.limit_train_batches", "4")])
def test_uneven_steps_resume_exactly_too(extra, tmp_path, monkeypatch):
    make_small(monkeypatch)
    recipe = (*RECIPE, "--checkpoint_every", "1", *extra)
    fit(tmp_path / "alone", *recipe)
    for step, resume in ((3, ()), (4, RESUME), (1, RESUME)):
        with monkeypatch.context() as inner:
            killed_at(inner, step)
            with pytest.raises(Killed):
                fit(tmp_path / "killed", *recipe, *resume)
    fit(tmp_path / "killed", *recipe, *RESUME)
    assert_equal(contents(tmp_path / "killed"), contents(tmp_path / "alone"))


class StopAt(Callback):
    """What `--trainer.max_time` does, at a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == self.step


@pytest.mark.parametrize("step", [16, *(pytest.param(step, marks=pytest.mark.medium) for step in (8, 12))])
@pytest.mark.medium
def test_a_run_that_was_given_too_little_time_goes_on_exactly(alone, step, tmp_path, monkeypatch):
    make_small(monkeypatch)
    run(
        "fit", "cls", ["--out", str(tmp_path), *RECIPE, "--checkpoint_every", "0"], quiet=True, callbacks=[StopAt(step)]
    )
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped"
    assert fit(tmp_path, *RECIPE, *RESUME)["status"] == "done"
    assert_equal(contents(tmp_path), alone[0])
