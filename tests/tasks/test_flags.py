"""An explicit flag wins over what a checkpoint holds, or is an error; it is never ignored."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lineattn.cli.main import main
from lineattn.cli.task import run
from tests.tasks.helpers import Killed, fails, fit, killed_at, make_small

RECIPE = ("--data.name", "digits", "--data.batch_size", "40", "--trainer.max_epochs", "1", "--model.width", "8")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture
def trained(tmp_path):
    fit(tmp_path / "run", *RECIPE)
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    "verb", ["fit", "test", *(pytest.param(v, marks=pytest.mark.medium) for v in ("validate", "predict"))]
)
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--model.width", "16"), ("--model.attn", "kcla"), ("--model.scope", "carry"), ("--data.channels", "3")),
        *(("--model.swap", "blocks.*.attn"), ("--model.at", "layer4"), ("--model.net_args", "{'img_size': 64}")),
    ],
)
def test_a_flag_against_the_network_of_the_checkpoint_is_an_error(trained, capsys, verb, flag, value):
    line = fails(capsys, verb, "cls", "--ckpt_path", str(trained), flag, value)
    assert f"{flag} {value} contradicts {trained}" in line


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--optim.lr", "0.5"), ("--data.batch_size", "8"), ("--seed_everything", "3")),
        *(
            ("--data.augment", "pad_crop"),
            ("--model.trunk", "other.pth"),
            ("--model.freeze_trunk", "True"),
            ("--model.channels_last", "False"),
        ),
        *(("--trainer.devices", "2"), ("--trainer.num_nodes", "2"), ("--trainer.limit_train_batches", "2")),
        *(("--trainer.overfit_batches", "2"), ("--trainer.gradient_clip_algorithm", "value")),
    ],
)
def test_a_flag_that_would_change_a_run_in_its_middle_is_an_error(trained, capsys, flag, value):
    assert f"{flag} {value} contradicts" in fails(capsys, "fit", "cls", "--ckpt_path", str(trained), flag, value)


def test_repeating_what_the_checkpoint_holds_is_no_contradiction(trained, tmp_path):
    found = fit(
        tmp_path / "run", *RECIPE, "--ckpt_path", "last", "--data.image_size", "16", "--trainer.max_epochs", "2"
    )
    assert found["epochs"] == 2


def test_dictionaries_of_the_checkpoint_are_taken_whole(tmp_path):
    arguments = "{block_args: {attn_layer: se}, stages: [1, 2]}"
    fit(tmp_path / "run", *RECIPE, "--model.net_args", arguments)
    found = fit(tmp_path / "run", "--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert found["recipe"]["model"]["net_args"] == yaml.safe_load(arguments)


def test_without_flags_the_settings_and_the_folder_are_the_checkpoints(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run("fit", "cls", ["--ckpt_path", str(trained), "--trainer.max_epochs", "3"], quiet=True)
    assert found["epochs"] == 3 and found["recipe"]["model"]["width"] == 8
    assert not (tmp_path / "runs").exists()


def test_a_flag_wins_in_evaluation_where_it_can(trained, tmp_path):
    run(
        "test",
        "cls",
        ["--ckpt_path", str(trained), "--data.batch_size", "7", "--out", str(tmp_path / "out")],
        quiet=True,
    )
    assert json.loads((tmp_path / "out" / "test.json").read_text())["images"] == 41


@pytest.mark.medium
def test_a_flag_wins_over_a_recipe_and_a_later_recipe_over_an_earlier(tmp_path):
    for name, lr in (("a", 0.5), ("b", 0.25)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"optim": {"lr": lr, "schedule": "none"}}))
    recipes = ("--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert fit(tmp_path / "1", *RECIPE, *recipes)["recipe"]["optim"]["lr"] == 0.25
    flag = ("--optim.lr", "0.125")
    for name, args in (("after", (*recipes, *flag)), ("before", (*flag, *recipes))):
        assert fit(tmp_path / name, *RECIPE, *args)["recipe"]["optim"]["lr"] == 0.125


def test_the_settings_of_a_run_are_a_recipe_for_the_next(trained, tmp_path):
    first = fit(tmp_path / "1", "--config", str(trained.parent.parent / "config.yaml"))
    assert first["recipe"]["model"]["width"] == 8 and first["epochs"] == 1


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_help_lists_the_options_with_their_meaning(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        run(verb, "cls", ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "--data.on_error" in text and "unreadable" in text
    assert ("--input" in text) == (verb == "predict")


def test_print_config_is_a_recipe(capsys, tmp_path):
    with pytest.raises(SystemExit):
        run("fit", "cls", [*RECIPE, "--print_config"])
    (tmp_path / "x.yaml").write_text(capsys.readouterr().out)
    assert fit(tmp_path / "run", "--config", str(tmp_path / "x.yaml"))["recipe"]["model"]["width"] == 8
    assert (tmp_path / "run" / "summary.json").exists()


def test_several_processes_need_one_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two = ("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp")
    assert "--out is missing" in fails(capsys, "fit", "cls", *two)
    assert not list(tmp_path.iterdir())


def test_last_of_an_empty_folder_starts_nothing(tmp_path, capsys):
    line = fails(capsys, "fit", "cls", *RECIPE, "--ckpt_path", "last", "--out", str(tmp_path / "new"))
    assert "no checkpoint at" in line and not (tmp_path / "new").exists()


@pytest.mark.medium
def test_last_of_a_run_without_a_checkpoint_starts_that_run_anew(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as inner:
        killed_at(inner, 0)
        with pytest.raises(Killed):
            fit(tmp_path, *RECIPE, "--optim.lr", "0.5")
    before = (tmp_path / "config.yaml").read_text()
    found = fit(tmp_path, "--ckpt_path", "last", quiet=False)
    assert "starting from the beginning" in capsys.readouterr().out
    assert found["recipe"]["optim"]["lr"] == 0.5 and found["recipe"]["model"]["width"] == 8
    assert (tmp_path / "config.yaml").read_text() == before


@pytest.mark.medium
def test_a_checkpoint_of_another_run_overwrites_none(trained, tmp_path, capsys):
    fit(tmp_path / "other", *RECIPE)
    before = (tmp_path / "other" / "config.yaml").read_text()
    line = fails(capsys, "fit", "cls", "--ckpt_path", str(trained), "--out", str(tmp_path / "other"))
    assert "holds a run that" in line
    assert (tmp_path / "other" / "config.yaml").read_text() == before
    again = fit(tmp_path / "third", "--ckpt_path", str(trained), "--trainer.max_epochs", "2")
    assert again["epochs"] == 2


class Spy(Callback):
    """What a checkpoint would have the parser call."""

    made: ClassVar[list[object]] = []

    def __init__(self, word: str = "") -> None:
        self.made.append(word)


SPY = {"class_path": "tests.tasks.test_flags.Spy", "init_args": {"word": "run"}}


@pytest.mark.parametrize("verb", ["fit", pytest.param("test", marks=pytest.mark.medium)])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.callbacks", [SPY]),
        ("trainer.callbacks", SPY),
        ("trainer.logger", SPY),
        ("trainer.plugins", [SPY]),
        ("trainer.profiler", SPY),
        ("trainer.strategy", SPY),
        ("trainer.strategy", "tests.tasks.test_flags.Spy"),
        ("trainer.max_epochs", SPY),
        ("trainer.max_epochs", "many"),
        ("trainer.devices", [SPY]),
        ("model.attn_args", SPY),
        ("model.attn_args", {"norm": SPY}),
        ("model.net_args", SPY),
        ("model.net_args", {"block_args": SPY}),
        ("model.width", [SPY]),
        ("data.mean", [SPY]),
        ("data.root", SPY),
        ("optim", SPY),
        ("optim.milestones", [SPY]),
        ("seed_everything", SPY),
    ],
)
def test_a_checkpoint_names_no_code_that_is_run(trained, tmp_path, capsys, monkeypatch, verb, key, value):
    found = torch.load(trained, weights_only=True)
    section, _, name = key.partition(".")
    if name:
        found["lineattn"]["config"][section][name] = value
    else:
        found["lineattn"]["config"][section] = value
    torch.save(found, trained)
    monkeypatch.setattr(Spy, "made", [])
    code = main([verb, "cls", "--ckpt_path", str(trained), "--trainer.max_epochs", "2"])
    out, errors = capsys.readouterr()
    assert Spy.made == [] and code in (0, 2) and errors.count("\n") == (code == 2)
    if verb == "fit" and name in ("callbacks", "logger", "plugins", "profiler"):
        assert code == 0 and f"--trainer.{name}" in out


def test_a_value_of_another_type_in_a_checkpoint_is_one_line(trained, capsys):
    found = torch.load(trained, weights_only=True)
    found["lineattn"]["config"]["optim"]["lr"] = "much"
    torch.save(found, trained)
    line = fails(capsys, "fit", "cls", "--ckpt_path", str(trained))
    assert f"{trained} is damaged" in line and "optim.lr" in line and "much" in line
