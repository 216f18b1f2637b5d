from __future__ import annotations

import csv
import json

import pytest
import yaml
from scipy import stats

from lineattn.cli.main import main

RECIPE = {"trainer": {"max_epochs": 5}, "optim": {"lr": 0.1, "milestones": []}, "model": {"name": "resnet20_cifar"}}


STEP = "saved tensors, parameters, gradients"
STEP_COLUMN = "step memory MiB (saved+params+grads)"


def make_run(folder, attn, seed, accuracy, *, lr=0.1, attn_args=None, progress=False, best=None, memory=STEP):
    """A run folder as a finished fit leaves it."""
    folder.mkdir(parents=True)
    recipe = {**RECIPE, "optim": {"lr": lr, "milestones": []}}
    recipe["trainer"] = {"max_epochs": 5, "enable_progress_bar": progress}
    model = {**RECIPE["model"], "attn": attn, **({"attn_args": attn_args} if attn_args else {})}
    (folder / "config.yaml").write_text(yaml.safe_dump({**recipe, "model": model, "seed_everything": seed}))
    summary = {"status": "done", "params": 1000 + len(attn), "macs": 2_500_000, "peak_memory_mib": 10.0 + seed}
    summary["peak_memory_of"] = memory
    summary |= {"seconds_per_epoch": 2.0 * seed, "seed": seed, "last": {"test/acc1": accuracy}, "recipe": recipe}
    (folder / "summary.json").write_text(json.dumps(summary | {"best": best}))


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_mean_spread_and_cost_of_each_method(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for seed, (plain, kcla) in enumerate([(90.0, 91.0), (92.0, 93.5), (91.0, 92.0)], start=1):
        make_run(tmp_path / f"none-{seed}", "none", seed, plain)
        make_run(tmp_path / f"kcla-{seed}", "kcla", seed, kcla, progress=seed == 1)
    (tmp_path / "kcla-4").mkdir()
    (tmp_path / "kcla-4" / "config.yaml").write_text("{}")
    assert main(["compare", str(tmp_path)]) == 0
    rows = table(tmp_path / "compare.csv")
    assert [row["method"] for row in rows] == ["none", "kcla"]
    assert rows[0]["test/acc1"] == "91.00 ± 1.00" and rows[0]["n"] == "3"
    assert rows[1]["test/acc1"] == "92.17 ± 1.26" and rows[1]["params"] == "1004"
    assert rows[0]["MMACs"] == "2.5" and rows[0][STEP_COLUMN] == "12.0" and rows[0]["s/epoch"] == "4.0"
    shown = capsys.readouterr().out
    assert "92.17 ± 1.26" in shown and "kcla-4" in shown and "compare.csv" in shown


def test_differences_are_paired_and_tested_from_five_seeds_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plain = [90.0, 92.0, 91.0, 90.5, 91.5]
    for seed, value in enumerate(plain, start=1):
        make_run(tmp_path / f"none-{seed}", "none", seed, value)
        make_run(tmp_path / f"kcla-{seed}", "kcla", 6 - seed, plain[5 - seed] + 1 + 0.1 * (seed % 2))
        make_run(tmp_path / f"eca-{seed}", "eca", seed, value + (-1) ** seed)
        make_run(tmp_path / f"se-{seed}", "se", seed + 1, value)
    assert main(["compare", str(tmp_path)]) == 0
    rows = {row["method"]: row["vs none"] for row in table(tmp_path / "compare.csv")}
    centre, (low, high) = 1.06, stats.t.interval(0.95, 4, 1.06, stats.sem([1.1, 1.0, 1.1, 1.0, 1.1]))
    assert rows["kcla"] == f"{centre:+.2f} ({low:+.2f} to {high:+.2f}), better here"
    assert rows["eca"].endswith("within noise")
    assert rows["se"] == rows["none"] == ""  # four seeds in common, and itself
    assert main(["compare", str(tmp_path), "--against", "kcla"]) == 0
    rows = {row["method"]: row["vs kcla"] for row in table(tmp_path / "compare.csv")}
    assert rows["none"].startswith("-1.06") and rows["none"].endswith("worse here")
    assert main(["compare", str(tmp_path), "--against", "kclaa"]) == 2
    assert "did you mean 'kcla'" in capsys.readouterr().err


@pytest.mark.parametrize("metric", ["test/loss", "test/bpb", "test/byte_ppl"])
def test_of_a_loss_less_is_better(tmp_path, metric):
    for seed in range(1, 6):
        for attn, loss in (("none", 1.0 + 0.01 * seed), ("kcla", 1.5 + 0.02 * seed)):
            make_run(tmp_path / f"{attn}-{seed}", attn, seed, 90.0)
            summary = json.loads((path := tmp_path / f"{attn}-{seed}" / "summary.json").read_text())
            path.write_text(json.dumps(summary | {"last": {metric: loss}}))
    assert main(["compare", str(tmp_path), "--metric", metric]) == 0
    assert table(tmp_path / "compare.csv")[1]["vs none"].endswith("worse here")


def test_on_a_narrow_terminal_names_and_differences_can_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for seed in range(1, 6):
        make_run(tmp_path / f"none-{seed}", "none", seed, 90.0 + seed, best={"test/acc1": 92.5})
        make_run(tmp_path / f"soft-{seed}", "layer_softmax", seed, 91.0 + seed * seed, best={"test/acc1": 92.5})
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "layer_softmax" in shown and "within" in shown and "…" not in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80


def test_under_five_seeds_it_is_said_that_nothing_is_tested(tmp_path, capsys):
    for seed in range(1, 5):
        make_run(tmp_path / f"none-{seed}", "none", seed, 90.0 + seed)
        make_run(tmp_path / f"kcla-{seed}", "kcla", seed, 91.0)
    assert main(["compare", str(tmp_path)]) == 0
    assert "vs none" not in table(tmp_path / "compare.csv")[0]
    assert "no difference from none is tested under 5 common seeds" in capsys.readouterr().out


def test_best_weights_have_a_column_of_their_own(tmp_path):
    make_run(tmp_path / "a", "kcla", 1, 90.0, best={"test/acc1": 92.5, "epoch": 3})
    assert main(["compare", str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 0
    (row,) = table(tmp_path / "t.csv")
    assert row["test/acc1"] == "90.00" and row["test/acc1 (best)"] == "92.50"


def test_different_recipes_are_refused_by_name(tmp_path, capsys):
    make_run(tmp_path / "a", "none", 1, 90.0)
    make_run(tmp_path / "b", "kcla", 1, 91.0, lr=0.2)
    assert main(["compare", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "optim.lr: 0.1, 0.2" in shown and "--allow_different_recipes" in shown and shown.count("\n") == 1
    assert not (tmp_path / "compare.csv").exists()
    assert main(["compare", str(tmp_path), "--allow_different_recipes"]) == 0
    assert len(table(tmp_path / "compare.csv")) == 2


def test_two_kinds_of_memory_are_not_mixed(tmp_path, capsys):
    make_run(tmp_path / "a", "none", 1, 90.0)
    make_run(tmp_path / "b", "kcla", 1, 91.0, memory="allocator")
    assert main(["compare", str(tmp_path)]) == 2
    assert "peak_memory_of: allocator, saved tensors" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), "--allow_different_recipes"]) == 0
    plain, kcla = table(tmp_path / "compare.csv")
    assert (plain[STEP_COLUMN], plain["peak MiB (allocator)"]) == ("11.0", "")
    assert (kcla[STEP_COLUMN], kcla["peak MiB (allocator)"]) == ("", "11.0")


def test_brackets_in_a_label_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    make_run(tmp_path / "a", "kcla", 1, 90.0, attn_args={"variant": "[bold]"})
    make_run(tmp_path / "b", "kcla", 1, 91.0)
    assert main(["compare", str(tmp_path)]) == 0
    assert "{'variant': '[bold]'}" in capsys.readouterr().out


def test_rows_of_one_method_say_what_tells_them_apart(tmp_path):
    make_run(tmp_path / "a", "kcla", 1, 90.0, attn_args={"p": 0.5})
    make_run(tmp_path / "b", "kcla", 1, 91.0, attn_args={"p": 0.7})
    make_run(tmp_path / "c", "none", 1, 89.0)
    assert main(["compare", str(tmp_path)]) == 0
    assert [row["method"] for row in table(tmp_path / "compare.csv")] == [
        "none",
        "kcla attn_args={'p': 0.5}",
        "kcla attn_args={'p': 0.7}",
    ]


def test_markdown_is_the_table_alone(tmp_path, capsys):
    make_run(tmp_path / "a", "none", 1, 90.0)
    assert main(["compare", str(tmp_path), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| method | test/acc1 | n | params | MMACs | {STEP_COLUMN} | s/epoch |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2:] == ["| none | 90.00 | 1 | 1,004 | 2.5 | 11.0 | 2.0 |"]


def _missing(folder):
    return [folder / "gone"]


def _empty(folder):
    return [folder]


def _twice(folder):
    make_run(folder / "a", "none", 1, 90.0)
    make_run(folder / "b", "none", 1, 91.0)
    return [folder]


def _damaged(folder):
    make_run(folder / "a", "none", 1, 90.0)
    (folder / "a" / "summary.json").write_text("{")
    return [folder]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_missing, "no such folder"),
        (_empty, "no finished run"),
        (_twice, "same settings and seed"),
        (_damaged, "is no whole run folder"),
    ],
)
def test_bad_folders_are_one_line(make, part, tmp_path, capsys):
    assert main(["compare", *map(str, make(tmp_path))]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1


def test_an_unknown_metric_names_the_known_ones(tmp_path, capsys):
    make_run(tmp_path / "a", "none", 1, 90.0)
    assert main(["compare", str(tmp_path), "--metric", "test/acc"]) == 2
    assert "they have test/acc1" in capsys.readouterr().err
