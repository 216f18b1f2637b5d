from __future__ import annotations

import json
from pathlib import Path

import pytest

from lineattn.cli.main import main
from lineattn.cli.sweep import grid
from lineattn.errors import InputError
from tests.tasks.helpers import make_small


@pytest.fixture
def calls(monkeypatch):
    """Instead of training, records each run and leaves what a finished one leaves."""
    made = []

    def run(verb, task, args, *, quiet, callbacks):
        made.append((verb, task, args))
        out = args[args.index("--out") + 1]
        if "broken" in args:
            raise InputError("unknown method 'broken'")
        if "raising" in args:
            raise ZeroDivisionError("no luck")
        if "stopping" in args:
            raise KeyboardInterrupt("stopped at step 3")
        (Path(out) / "summary.json").write_text(json.dumps({"status": "done"}))
        return {}

    monkeypatch.setattr("lineattn.cli.task.run", run)
    return made


def test_every_cell_once_and_none_again(tmp_path, calls, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {max_epochs: 1}\n")
    command = ["sweep", "cls", "--config", str(recipe), "--grid", "model.attn=none,kcla", "--seeds", "1,2"]
    command += ["--out", str(tmp_path / "out"), "--data.name", "digits"]
    assert main(command) == 0
    assert [Path(args[args.index("--out") + 1]).name for _, _, args in calls] == [
        "none-1",
        "none-2",
        "kcla-1",
        "kcla-2",
    ]
    verb, task, args = calls[2]
    assert (verb, task) == ("fit", "cls")
    assert args[:4] == ["--config", str(recipe), "--data.name", "digits"]
    assert args[4:8] == ["--model.attn", "kcla", "--seed_everything", "1"] and "--ckpt_path" not in args
    assert main(command) == 0
    assert len(calls) == 4
    assert "4 of them finished already" in capsys.readouterr().out


def test_an_interrupted_cell_goes_on(tmp_path, calls):
    last = tmp_path / "none-1" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    assert main(["sweep", "--grid", "model.attn=none", "--out", str(tmp_path)]) == 0
    assert calls[0][2][-2:] == ["--ckpt_path", str(last)]


def test_a_failed_cell_is_reported_and_the_rest_go_on(tmp_path, calls, capsys):
    assert main(["sweep", "--grid", "model.attn=broken,raising,kcla", "--out", str(tmp_path)]) == 1
    assert len(calls) == 3
    shown = capsys.readouterr().out
    assert "2 of 3 runs failed" in shown
    assert "unknown method 'broken'" in shown and "ZeroDivisionError: no luck" in shown
    assert "Traceback" in (tmp_path / "raising-1" / "error.txt").read_text()
    assert main(["sweep", "--grid", "model.attn=broken,raising,kcla", "--out", str(tmp_path)]) == 1
    assert len(calls) == 5


def test_an_interrupt_ends_the_sweep(tmp_path, calls, capsys):
    assert main(["sweep", "--grid", "model.attn=stopping,kcla", "--out", str(tmp_path)]) == 130
    assert len(calls) == 1
    assert "the same command goes on" in capsys.readouterr().err


def test_a_folder_of_other_settings_is_not_taken_for_this_one(tmp_path, calls, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optim: {lr: 0.1}\n")
    command = ["sweep", "--config", str(recipe), "--grid", "model.attn=none", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    recipe.write_text("optim: {lr: 0.2}\n")
    assert main(command) == 2
    assert "was run with other settings" in capsys.readouterr().err
    assert len(calls) == 1


def test_a_run_that_failed_at_once_takes_mended_settings(tmp_path, calls):
    out = tmp_path / "out"
    command = ["sweep", "--grid", "model.attn=none", "--out", str(out), "--data.name"]
    assert main([*command, "broken"]) == 1
    assert main([*command, "digits"]) == 0
    assert "digits" in json.loads((out / "none-1" / "sweep.json").read_text())["options"]
    (out / "none-1" / "summary.json").unlink()
    (out / "none-1" / "checkpoints").mkdir()
    (out / "none-1" / "checkpoints" / "last.ckpt").touch()
    assert main([*command, "cifar10"]) == 2
    assert len(calls) == 2


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("summary", ['{"status": "stopped"}', "[]", "{"])
def test_only_what_is_done_is_skipped(summary, checkpoint, tmp_path, calls):
    folder = tmp_path / "none-1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "summary.json").write_text(summary)
    if checkpoint:
        (folder / "checkpoints" / "last.ckpt").touch()
    assert main(["sweep", "--grid", "model.attn=none", "--out", str(tmp_path)]) == 0
    assert ("--ckpt_path" in calls[0][2]) is checkpoint


def test_commas_inside_brackets_do_not_split():
    cells = grid(["model.attn_args={p: 0.5, drop_path: 0},{p: 0.7}", "optim.lr=0.1"], [3], Path("out"))
    assert [cell.options[1] for cell in cells] == ["{p: 0.5, drop_path: 0}", "{p: 0.7}"]
    assert cells[0].options[2:] == ("--optim.lr", "0.1", "--seed_everything", "3")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--grid", "model.attn"], "key=value,value"),
        (["--grid", "model.attn=kcla,kcla"], "a value stands there twice"),
        (["--seeds", "1,two"], "whole numbers"),
        (["--config", "gone.yaml"], "gone.yaml"),
        (["--ckpt_path", "last"], "--ckpt_path is no option of a sweep"),
        (["--seed_everything=3"], "give the seeds as --seeds"),
        (["--grid", "seed_everything=1,2"], "give the seeds as --seeds"),
        (["--grid", "out=a,b"], "--out is no option of a sweep"),
        (["--out", "elsewhere"], "--out is given 2 times"),
    ],
)
def test_bad_options_are_one_line(args, part, tmp_path, capsys):
    assert main(["sweep", *args, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.medium
def test_a_real_sweep_and_its_comparison(tmp_path, monkeypatch, capsys):
    make_small(monkeypatch)
    command = ["sweep", "--grid", "model.attn=none,kcla", "--seeds", "1,2", "--out", str(tmp_path)]
    command += ["--data.name", "digits", "--trainer.max_epochs", "1"]
    assert main(command) == 0
    assert main(["compare", str(tmp_path)]) == 0
    assert "kcla" in capsys.readouterr().out and (tmp_path / "compare.csv").exists()
