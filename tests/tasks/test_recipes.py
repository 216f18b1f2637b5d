"""Every recipe is what it says, builds, and takes a step; the smoke recipes train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from lineattn.tasks.data.source import Pixels, Splits
from lineattn.tasks.record import Record
from tests.tasks.helpers import fit

ROOT = Path(__file__).parents[2]
PAPER = sorted((ROOT / "recipes" / "kcla_table1").glob("*.yaml"))
SMOKE = sorted((ROOT / "recipes" / "smoke").glob("*.yaml"))


def test_the_table_is_complete():
    cells = {
        f"cifar{classes}_resnet{depth}_{attn}"
        for classes in (10, 100)
        for depth in (20, 56, 110)
        for attn in ("none", "layer_softmax", "mrla_base", "mrla_light", "kcla")
    }
    assert {path.stem for path in PAPER} == cells
    assert {path.stem for path in SMOKE} == {"cifar_kcla", "digits_none", "digits_mrla_light", "digits_kcla"}


@pytest.mark.parametrize("path", PAPER + SMOKE, ids=lambda path: path.stem)
def test_the_header_says_what_to_expect_and_how_to_run_it(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Expected: ") for line in header)
    command = next(line for line in header if line.startswith("# Command: "))
    assert f"lineattn fit cls --config {path.relative_to(ROOT)}" in command


def test_the_papers_recipes_differ_in_network_and_data_alone():
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in PAPER}
    assert len({str((recipe["optim"], recipe["trainer"])) for recipe in recipes.values()}) == 1
    for name, recipe in recipes.items():
        data, network, attn = name.split("_", 2)
        assert recipe["data"]["name"] == data and recipe["model"]["attn"] == attn
        assert recipe["model"]["name"] == f"{network}_bottleneck_cifar"
        assert recipe["model"].get("init") == (None if attn == "none" else "paper")
        assert "val_fraction" not in recipe["data"]  # the paper trains on all of them


def sizes(path):
    return () if "cifar100_resnet20" in path.stem else pytest.mark.medium


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=sizes(path)) for path in PAPER])
@pytest.mark.medium
def test_a_recipe_builds_and_takes_a_step(path, tmp_path, monkeypatch):
    def load(root, *, classes, image_size, channels, download):
        pixels = Pixels(torch.zeros(2, channels, image_size, image_size, dtype=torch.uint8), [0, 1])
        return Splits([str(number) for number in range(classes)], pixels)

    monkeypatch.setattr("lineattn.tasks.data.cifar.load", load)
    monkeypatch.setattr(Record, "plot", lambda self: None)
    found = fit(tmp_path / "run", "--config", str(path), "--data.image_size", "8", "--trainer.max_epochs", "1")
    assert found["epochs"] == 1 and found["best"] is None
    assert found["classes"] == int(path.stem.split("_")[0].removeprefix("cifar"))


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in SMOKE if "digits" in path.stem], ids=lambda path: path.stem)
def test_the_digits_are_learnt(path, tmp_path):
    assert fit(tmp_path / "run", "--config", str(path))["last"]["test/acc1"] > 95


@pytest.mark.slow
def test_a_folder_of_small_photographs_is_learnt(tmp_path, shared_data):
    root = shared_data("cifar10") / "imagefolder"
    recipe = ROOT / "recipes" / "smoke" / "cifar_kcla.yaml"
    found = fit(tmp_path / "run", "--config", str(recipe), "--data.root", str(root))
    assert found["last"]["test/acc1"] > 20 and found["best"] is not None
