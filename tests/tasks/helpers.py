"""A small network with dropout and batch norm, small data, and runs that end where a test wants."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import nn

from lineattn.cli.main import main
from lineattn.cli.task import run
from lineattn.tasks.base import Task
from lineattn.tasks.data.source import Pixels, Splits
from lineattn.tasks.record import Record


class Killed(Exception):
    """The process is gone."""


def tiny_net(name, *, num_classes, in_chans=3, **_):
    """What stands in for `create_model`: random in training, stateful in evaluation."""
    return nn.Sequential(
        nn.Conv2d(in_chans, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, num_classes),
    )


def few_digits(*, image_size, channels):
    """What stands in for the digits: 120, 30 and 41 images of noise around the mean of their class."""
    generator = torch.Generator().manual_seed(0)

    def split(count):
        labels = [index % 10 for index in range(count)]
        noise = torch.randint(0, 90, (count, channels, image_size, image_size), generator=generator)
        return Pixels((noise + 15 * torch.tensor(labels)[:, None, None, None]).to(torch.uint8), labels)

    return Splits([str(digit) for digit in range(10)], split(120), split(30), split(41))


def make_small(monkeypatch):
    """Small network, small data, no plot: a run takes a fraction of a second."""
    monkeypatch.setattr("lineattn.tasks.image.create_model", tiny_net)
    monkeypatch.setattr("lineattn.tasks.data.digits.load", few_digits)
    monkeypatch.setattr(Record, "plot", lambda self: None)


def fit(out: Path, *args: str, task: str = "cls", quiet: bool = True):
    return run("fit", task, ["--out", str(out), *args], quiet=quiet)


def fails(capsys, *args: str) -> str:
    """The one line that a command ends with, having changed nothing for the better or worse."""
    assert main(list(args)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("lineattn: ") and "Traceback" not in line, line
    return line


def killed_at(monkeypatch, step: int):
    """Lets `training_step` number `step` of the process end it."""
    plain, done = Task.training_step, [0]

    def stopping(self, batch, batch_idx):
        if done[0] == step:
            raise Killed
        done[0] += 1
        return plain(self, batch, batch_idx)

    monkeypatch.setattr(Task, "training_step", stopping)


def contents(folder: Path):
    """What a run left behind and what must not depend on interruptions."""
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    with (folder / "metrics.csv").open() as file:
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]
    best = folder / "checkpoints" / "best.ckpt"
    return {
        "weights": last["state_dict"],
        "optimizer": last["optimizer_states"],
        "loops": last["loops"]["fit_loop"],
        "rows": rows,
        "best": torch.load(best, weights_only=True)["state_dict"] if best.exists() else None,
    }


def assert_equal(left, right, place=""):
    """Bit for bit, whatever is nested in what."""
    assert type(left) is type(right), place
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), place
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), place
        for key in left:
            assert_equal(left[key], right[key], f"{place}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), place
        for number, (mine, yours) in enumerate(zip(left, right, strict=True)):
            assert_equal(mine, yours, f"{place}[{number}]")
    else:
        assert left == right, f"{place}: {left} != {right}"
