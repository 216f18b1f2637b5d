"""Every recipe is what it says, builds, and takes a step; the smoke recipes train."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from lineattn import create_model
from lineattn.cli import sweep
from lineattn.tasks.checkpoint import Checkpoints
from lineattn.tasks.data.source import Pixels, Splits
from lineattn.tasks.optim import Optim, Schedule
from lineattn.tasks.record import Record
from tests.tasks.helpers import fit

ROOT = Path(__file__).parents[2]
# Those of lm_eval are tasks of lm-evaluation-harness, see test_lm_harness.
ALL = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if path.parent.name != "lm_eval"]
SEG = [path for path in ALL if "lineattn fit seg" in path.read_text()]  # see test_seg_recipes
TOKENS = [path for path in ALL if re.search("lineattn fit (lm|mqar)", path.read_text())]  # see test_token_recipes
CIFAR, IMAGENET = (sorted((ROOT / "recipes" / table).glob("*.yaml")) for table in ("kcla_table1", "kcla_table2"))
EAMLP = sorted((ROOT / "recipes" / "imagenet").glob("*.yaml"))
SMOKE = [path for path in sorted((ROOT / "recipes" / "smoke").glob("*.yaml")) if path not in [*SEG, *TOKENS]]
ABLATION = ROOT / "recipes" / "kcla_ablation" / "cifar100_resnet56.yaml"
ROWS = [shlex.split(options) for options in re.findall(r"^#   .* (--model\..*)$", ABLATION.read_text(), re.M)]


def test_the_tables_are_complete():
    cells = {
        f"cifar{classes}_resnet{depth}_{attn}"
        for classes in (10, 100)
        for depth in (20, 56, 110)
        for attn in ("none", "layer_softmax", "mrla_base", "mrla_light", "kcla")
    }
    assert {path.stem for path in CIFAR} == cells
    assert {path.stem for path in IMAGENET} == {
        f"imagenet_resnet{depth}_{attn}" for depth in (50, 101) for attn in ("none", "mrla_light", "dla_light", "kcla")
    }
    assert {path.stem for path in EAMLP} == {"eamlp_7_384", "eamlp_14", "eamlp_19"}
    networks = {f"{data}_{network}" for data in ("digits", "imagenet_folder") for network in ("eamlp", "vit_external")}
    digits = {"digits_none", "digits_mrla_light", "digits_kcla"}
    assert {path.stem for path in SMOKE} == {"cifar_kcla", "imagenet_folder_kcla", *digits, *networks}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_header_says_what_to_expect_and_how_to_run_it(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Expected: ") for line in header)
    command = next(line for line in header if line.startswith("# Command: "))
    task = "seg" if path in SEG else "(lm|mqar)" if path in TOKENS else "cls"
    assert re.search(f"lineattn fit {task} --config {path.relative_to(ROOT)}", command)
    if path in [*CIFAR, *IMAGENET, ABLATION]:
        assert any(line.startswith("# Paper: KCLA, arXiv 2606.28405, table ") for line in header)
        assert any(line.startswith("# Hardware and hours: ") for line in header)


def test_the_papers_recipes_for_cifar_differ_in_network_and_data_alone():
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in CIFAR}
    assert len({str((recipe["optim"], recipe["trainer"])) for recipe in recipes.values()}) == 1
    for name, recipe in recipes.items():
        data, network, attn = name.split("_", 2)
        assert recipe["data"]["name"] == data and recipe["model"]["attn"] == attn
        assert recipe["model"]["name"] == f"{network}_bottleneck_cifar"
        assert recipe["model"].get("init") == (None if attn == "none" else "paper")
        assert "val_fraction" not in recipe["data"]  # the paper trains on all of them


def test_the_papers_recipes_for_imagenet_differ_in_network_and_milestones_alone():
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in IMAGENET}
    for name, recipe in recipes.items():
        _, network, attn = name.split("_", 2)
        assert recipe["optim"].pop("milestones") == ([40, 70, 90] if attn == "kcla" else [30, 60, 90])
        arguments = {} if attn == "none" else {"attn_args": {"head_dim": 32, "drop_path": 0.2}}
        assert recipe.pop("model") == {"name": network, "attn": attn, "init": "paper", **arguments}
        assert recipe["data"]["batch_size"] == 256 and recipe["trainer"]["devices"] == 1
    assert len({str(recipe) for recipe in recipes.values()}) == 1


def test_the_recipes_of_eamlp_differ_in_network_and_size_alone():
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in EAMLP}
    for name, recipe in recipes.items():
        _, depth, *size = name.split("_")
        arguments = {"net_args": {"img_size": int(*size)}} if size else {}
        assert recipe.pop("model") == {"name": f"timm/eamlp_{depth}", **arguments, "channels_last": False}
        assert recipe["data"].pop("image_size") == int(*size or ["224"])
    assert len({str(recipe) for recipe in recipes.values()}) == 1


def test_the_warm_up_for_imagenet_is_the_papers():
    optim = Optim(**yaml.safe_load(IMAGENET[0].read_text())["optim"])
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optim.lr)
    schedule, rates = Schedule(optim, sgd, epochs=100, steps_per_epoch=1), []
    for epoch in (0, 1, 2, 3, optim.milestones[0] - 1, *optim.milestones):
        schedule.at(epoch, epoch)
        rates.append(sgd.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-4, 0.0333, 0.0667, 0.1, 0.1, 0.01, 0.001, 0.0001], rel=0.01)


def test_the_ablations_sweeps_are_its_rows():
    """Every row once with five seeds, no two of them in one folder, and nothing else."""
    cells = []
    for command in re.findall(r"^# Sweep: lineattn sweep (.*)$", ABLATION.read_text(), re.M):
        options, shared = sweep._parser().parse_known_args(shlex.split(command))
        assert options.config == [str(ABLATION.relative_to(ROOT))] and options.out == ["runs/kcla_ablation"]
        assert shared == ["--data.root", "data", "--data.download", "true"]
        cells += sweep.grid(options.grid, sweep._seeds(options.seeds), Path(options.out[0]))
    assert len({cell.folder for cell in cells}) == len(cells) == 5 * len(ROWS) == 70
    seeds = [["--seed_everything", str(seed)] for seed in range(1, 6)]
    assert sorted(list(cell.options) for cell in cells) == sorted([*row, *seed] for row in ROWS for seed in seeds)


def test_the_ablations_base_is_the_tables_cell():
    cell = next(path for path in CIFAR if path.stem == "cifar100_resnet56_kcla")
    assert yaml.safe_load(ABLATION.read_text()) == yaml.safe_load(cell.read_text())


def test_the_ablations_row_of_one_temperature_has_it():
    """``p = 1`` leaves the square root of a head's width to every head."""
    (arguments,) = (yaml.safe_load(value) for _, value in ROWS if "p:" in value)
    net = create_model("resnet20_bottleneck_cifar", num_classes=5, attn="kcla", **arguments)
    found = [module.head_temperatures() for module in net.sites.values()]
    assert len(found) == 6 and all(torch.allclose(t, torch.full_like(t, 4.0)) for t in found)


@pytest.fixture
def take_a_step(tmp_path, monkeypatch):
    """Trains a recipe with more options, on two images that are zero."""

    def zeros(classes, channels, size):
        return Splits(
            [str(number) for number in range(classes)],
            Pixels(torch.zeros(2, channels, size, size, dtype=torch.uint8), [0, 1]),
        )

    monkeypatch.setattr(
        "lineattn.tasks.data.cifar.load",
        lambda root, *, classes, image_size, channels, download: zeros(classes, channels, image_size),
    )
    monkeypatch.setattr("lineattn.tasks.data.folder.load", lambda root, *, channels: zeros(1000, channels, 32))
    monkeypatch.setattr(
        "lineattn.tasks.data.digits.load", lambda *, image_size, channels: zeros(10, channels, image_size)
    )
    monkeypatch.setattr(Record, "plot", lambda self: None)
    monkeypatch.setattr(Checkpoints, "_save", lambda *_: None)  # hundreds of megabytes

    def step(path, *options):
        small = ["--data.val_fraction", "0"]
        if path in [*CIFAR, *IMAGENET, ABLATION]:  # the other networks are of one size
            small += ["--data.image_size", "32" if path in IMAGENET else "8"]
        return fit(tmp_path / "run", "--config", str(path), *small, "--trainer.max_epochs", "1", *options)

    return step


@pytest.mark.parametrize("path", [*CIFAR, *IMAGENET, *EAMLP, *SMOKE], ids=lambda path: path.stem)
@pytest.mark.medium
def test_a_recipe_builds_and_takes_a_step(path, take_a_step):
    found = take_a_step(path)
    assert found["epochs"] == 1 and found["best"] is None
    cifar = path.stem.split("_")[0].removeprefix("cifar") if path in CIFAR else 1000
    assert found["classes"] == (10 if "digits" in path.stem else int(cifar))


@pytest.mark.parametrize("options", ROWS, ids=" ".join)
@pytest.mark.medium
def test_a_row_of_the_ablation_builds_and_takes_a_step(options, take_a_step):
    found = take_a_step(ABLATION, *options)
    assert found["epochs"] == 1 and found["classes"] == 100


def least(path: Path) -> float:
    """What the recipe's header says to expect more than, in per cent."""
    (figure,) = re.findall(r"^# Expected: over (\d+) %", path.read_text(), re.M)
    return float(figure)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in SMOKE if "digits" in path.stem], ids=lambda path: path.stem)
def test_the_digits_are_learnt(path, tmp_path):
    assert fit(tmp_path / "run", "--config", str(path))["last"]["test/acc1"] > least(path)


@pytest.mark.slow
def test_a_folder_of_small_photographs_is_learnt(tmp_path, shared_data):
    root = shared_data("cifar10") / "imagefolder"
    recipe = ROOT / "recipes" / "smoke" / "cifar_kcla.yaml"
    found = fit(tmp_path / "run", "--config", str(recipe), "--data.root", str(root))
    assert found["last"]["test/acc1"] > 20 and found["best"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in SMOKE if "folder" in path.stem], ids=lambda path: path.stem)
def test_a_folder_in_imagenets_layout_is_learnt(path, tmp_path, shared_data):
    root = shared_data("tiny_imagenet100")
    found = fit(tmp_path / "run", "--config", str(path), "--data.root", str(root))
    assert found["last"]["val/acc1"] > least(path) and found["classes"] == 100
