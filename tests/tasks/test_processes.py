"""What only real processes show: `kill -9`, Ctrl-C at a terminal, and two processes that train together."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from tests.tasks.helpers import assert_equal, contents

RECIPE = [
    *("--data.name", "digits", "--data.image_size", "8", "--data.augment", "pad_crop", "--model.width", "4"),
    *("--model.attn", "kcla", "--trainer.max_epochs", "3", "--checkpoint_every", "3", "--data.batch_size", "32"),
    *("--optim.ema_decay", "0.9", "--data.num_workers", "2", "--trainer.enable_progress_bar", "false"),
]


def command(*args):
    return [sys.executable, "-m", "lineattn", *args]


def start(*args):
    """A run in a process group of its own, of whose output each line comes as it is printed."""
    return subprocess.Popen(
        command("fit", "cls", *RECIPE, *args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def await_training(run):
    for line in run.stdout:
        if line.startswith("network"):
            return
    pytest.fail(run.stderr.read())


def finish(run, timeout=300):
    try:
        _, errors = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 0, errors


@pytest.mark.parametrize(
    ("kills", "epochs"), [pytest.param(2, 2, marks=pytest.mark.medium), pytest.param(10, 12, marks=pytest.mark.slow)]
)
def test_killed_at_random_moments_equals_left_alone(kills, epochs, tmp_path):
    length = ("--trainer.max_epochs", str(epochs))
    alone = start("--out", str(tmp_path / "alone"), *length)
    resume: tuple[str, ...] = ()
    moments, killed = random.Random(0), 0
    for _ in range(kills):
        run = start("--out", str(tmp_path / "killed"), *length, *resume)
        await_training(run)
        time.sleep(moments.uniform(0.2, 3.0))
        killed += run.poll() is None
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        resume = ("--ckpt_path", "last")
    finish(alone)
    assert killed == kills  # none of them got to its end before
    finish(start("--out", str(tmp_path / "killed"), *length, *resume))
    assert_equal(contents(tmp_path / "killed"), contents(tmp_path / "alone"))
    left = [json.loads((tmp_path / name / "summary.json").read_text())["last"] for name in ("alone", "killed")]
    assert left[0] == left[1]
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


@pytest.mark.medium
def test_ctrl_c_at_a_terminal_is_one_line_exit_code_130_and_a_checkpoint(tmp_path):
    run = start("--out", str(tmp_path), "--trainer.max_epochs", "1000")
    await_training(run)
    time.sleep(2)
    os.killpg(run.pid, signal.SIGINT)  # to the workers too, as a terminal does
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors.count("\n") == 1 and f"--ckpt_path last --out {tmp_path}" in errors
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


@pytest.mark.medium
def test_two_processes_go_on_where_one_can_read_nothing_of_its_batch(tmp_path):
    for number in range(8):
        place = tmp_path / "images" / "train" / str(number % 2) / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(place)
    place.write_text("hello")
    run = start(
        *("--out", str(tmp_path / "run"), "--data.name", "folder", "--data.root", str(tmp_path / "images")),
        *("--data.batch_size", "1", "--data.val_fraction", "0", "--data.on_error", "skip", "--data.num_workers", "0"),
        *("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp"),
        *("--trainer.max_epochs", "1"),
    )
    finish(run, timeout=60)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"


@pytest.mark.medium
def test_two_processes_train_and_count_each_image_once(tmp_path):
    both = ("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp")
    short = ("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4", "--data.num_workers", "0")
    run = start("--out", str(tmp_path), *short, *both)
    finish(run)
    found = json.loads((tmp_path / "summary.json").read_text())["last"]
    alone = subprocess.run(
        command("test", "cls", "--ckpt_path", str(tmp_path / "checkpoints" / "last.ckpt")),
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    again = json.loads((tmp_path / "test.json").read_text())
    assert again["test/acc1"] == found["test/acc1"]
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-5)
