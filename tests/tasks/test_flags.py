"""An explicit flag wins over what a checkpoint holds, or is an error; it is never ignored."""

from __future__ import annotations

import json

import pytest
import yaml

from lineattn.cli.task import run
from tests.tasks.helpers import fails, fit, make_small

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
    [("--model.width", "16"), ("--model.attn", "kcla"), ("--model.scope", "carry"), ("--data.channels", "3")],
)
def test_a_flag_against_the_network_of_the_checkpoint_is_an_error(trained, capsys, verb, flag, value):
    line = fails(capsys, verb, "cls", "--ckpt_path", str(trained), flag, value)
    assert f"{flag} {value} contradicts {trained}" in line


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--optim.lr", "0.5"), ("--data.batch_size", "8"), ("--seed_everything", "3"), ("--data.augment", "pad_crop")],
)
def test_a_flag_that_would_change_a_run_in_its_middle_is_an_error(trained, capsys, flag, value):
    assert f"{flag} {value} contradicts" in fails(capsys, "fit", "cls", "--ckpt_path", str(trained), flag, value)


def test_repeating_what_the_checkpoint_holds_is_no_contradiction(trained, tmp_path):
    found = fit(
        tmp_path / "run", *RECIPE, "--ckpt_path", "last", "--data.image_size", "16", "--trainer.max_epochs", "2"
    )
    assert found["epochs"] == 2


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


def test_starting_with_last_in_an_empty_folder_starts_anew(tmp_path):
    assert fit(tmp_path / "new", *RECIPE, "--ckpt_path", "last")["epochs"] == 1


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
