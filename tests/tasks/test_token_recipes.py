"""Every recipe for sequences is what it says, builds, and takes a step; the smoke recipes train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from lineattn.models.language import LanguageModel
from lineattn.tasks.record import Record
from tests.tasks.helpers import fit

ROOT = Path(__file__).parents[2] / "recipes"
MODELS, RECALL = (sorted((ROOT / folder).glob("*.yaml")) for folder in ("metala_lm", "metala_mqar"))
SMOKE = [ROOT / "smoke" / f"{stem}.yaml" for stem in ("pydoc_metala", "mqar_metala")]
ONE_PROCESS = ("--trainer.strategy", "auto", "--trainer.devices", "1", "--trainer.num_nodes", "1")
SMALL = ("--model.width", "32", "--model.depth", "1", "--model.hidden", "32", "--trainer.precision", "32-true")
LIMITS = [part for split in ("train", "val", "test") for part in (f"--trainer.limit_{split}_batches", "1")]


def test_the_tables_are_complete():
    assert [path.stem for path in MODELS] == ["1b3", "1b4", "360m"]
    assert [path.stem for path in RECALL] == ["length256_pairs16", "length512_pairs64", "length512_pairs80"]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_models_have_the_papers_parameters_and_steps(path: Path):
    header, recipe = path.read_text(), yaml.safe_load(path.read_text())
    (millions,) = re.findall(r"give the ([\d,.]+)M parameters", header)
    model = recipe["model"]
    with torch.device("meta"):
        net = LanguageModel(
            50304, model["width"], model["depth"], mixer_args={**model["attn_args"], "init_std": None},
            hidden=model["hidden"], tied=model["tied"],
        )  # fmt: skip
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(float(millions.replace(",", "")), abs=0.6)
    trainer = recipe["trainer"]
    tokens = recipe["data"]["batch_size"] * 2048 * trainer["devices"] * trainer["num_nodes"]
    (stated,) = re.findall(r"(\d+)B tokens", header)
    assert tokens * trainer["limit_train_batches"] == pytest.approx(float(stated) * 1e9, rel=1e-4)
    assert tokens * trainer["accumulate_grad_batches"] == (2**19 if path.stem == "360m" else 2**21)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    for split in ("train", "val"):
        (tmp_path / "pile" / split).mkdir(parents=True)
        (tmp_path / "pile" / split / "00.jsonl").write_text('{"text": "all work and no play", "meta": {}}\n' * 40)
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_recipe_of_a_language_model_builds_and_takes_a_step(path: Path, out: Path):
    data = ("--data.root", str(out / "pile"), "--data.length", "16", "--data.batch_size", "2")
    accumulate = ("--trainer.accumulate_grad_batches", "1")
    found = fit(
        out / "run", "--config", str(path), *data, *SMALL, *LIMITS, *ONE_PROCESS, *accumulate, task="lm"
    )  # fmt: skip
    assert found["epochs"] == 1 and found["last"]["val/bpb"] > 0


@pytest.mark.medium
@pytest.mark.parametrize("path", RECALL, ids=lambda path: path.stem)
def test_a_recipe_of_recall_builds_and_takes_a_step(path: Path, out: Path):
    few = ("--data.train_examples", "2", "--data.examples", "2", "--trainer.max_epochs", "1")
    found = fit(out / "run", "--config", str(path), *few, task="mqar")
    assert found["epochs"] == 1 and found["params"] > 8192 * 64


@pytest.mark.slow
@pytest.mark.parametrize("path", SMOKE, ids=lambda path: path.stem)
def test_what_the_smoke_recipes_learn(path: Path, tmp_path: Path):
    header = path.read_text()
    (number,) = re.findall(r"^# Expected: (?:under|over) ([\d.]+) ", header, re.M)
    last = fit(tmp_path / "run", "--config", str(path), task="lm" if "pydoc" in path.stem else "mqar")["last"]
    if "under" in header:
        assert last["test/bpb"] < float(number)
    else:
        assert last["test/acc"] > float(number)
