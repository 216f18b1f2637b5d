from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from lineattn.cli.demo import train
from lineattn.cli.demo.pictures import draw
from lineattn.cli.demo.report import write_report
from lineattn.cli.demo.result import Method, Results
from lineattn.cli.demo.train import METHODS, SEEDS, Digit
from lineattn.cli.main import main


def make_results(shift=0.0):
    """Results in which MRLA-light and KCLA are ``shift`` points from plain, give or take."""
    methods = []
    for place, (name, title) in enumerate(METHODS.items()):
        noise = [0.0, 0.3, -0.2] if place else [0.1, 0.0, 0.0]
        accuracies = [97.0 + number + (shift if place else 0.0) + noise[number] for number in range(len(SEEDS))]
        summaries = [
            {
                "last": {"test/acc1": accuracy},
                "params": 44_226,
                "macs": 1_660_000,
                "seconds_per_epoch": 1.5,
                "epochs": 2,
            }
            for accuracy in accuracies
        ]
        curve = [{"epoch": epoch, "train/loss": 2.0 - epoch, "val/acc1": 50.0 + epoch} for epoch in range(2)]
        methods.append(Method(name, title, summaries, [curve] * len(SEEDS)))
    return Results(methods, {"versions": {"torch": "2"}, "cores": 2, "git": None, "machine": "<any>"}, 42.0)


def test_the_sentence_is_no_stronger_than_its_intervals():
    assert make_results().sentence().count("within noise") == 2
    assert make_results(shift=5.0).sentence().count("better here") == 2
    assert make_results(shift=-5.0).sentence().count("worse here") == 2
    assert "MRLA-light +5.00 points (95 % interval +4.34 to +5.66), better here" in make_results(shift=5.0).sentence()


def test_the_table_ends_with_chance():
    rows = make_results().rows()
    assert [row["method"] for row in rows] == ["plain", "MRLA-light", "KCLA", "chance"]
    assert rows[0]["test accuracy, %"] == "98.03 ± 0.95" and rows[-1]["test accuracy, %"] == "10"


@pytest.mark.medium
def test_the_report_holds_all_it_shows(tmp_path):
    results = make_results()
    for name, dark in (("curves.png", False), ("curves-dark.png", True)):
        draw(results, tmp_path / name, dark=dark)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    digits = [Digit(bytes(range(256)), 16, 3, 3, 0.99), Digit(bytes(256), 16, 4, 9, 0.6)]
    write_report(results, digits, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert results.sentence() in page and "98.03 ± 0.95" in page
    assert "1 of 2 test images" in page and "is 4" in page and "&lt;any&gt;" in page
    sources = re.findall(r'(?:src|srcset|href)="([^"]{5})', page)
    assert len(sources) == 2 + 2 + 1 and set(sources) == {"data:"}
    assert "http" not in page and "url(" not in page


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").touch()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.medium
def test_the_parent_of_the_runs_stays_light():
    names = "pictures, report, result, train"
    code = f"import sys; from lineattn.cli.demo import {names}; import lineattn.cli.progress; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rich.progress" in shown and not {"torch", "lightning"} & set(shown)


@pytest.mark.slow
def test_the_demo_trains_well_above_chance(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    found = json.loads((tmp_path / "demo" / "results.json").read_text())
    for method in found["methods"]:
        assert len(method["test/acc1"]) == len(SEEDS) and min(method["test/acc1"]) > 90
    assert sum(found["methods"][0]["test/acc1"]) / len(SEEDS) >= 95
    assert "report.html" in capsys.readouterr().out
    assert len({run["seed"] for run in found["methods"][0]["runs"]}) == len(SEEDS)
    assert train.folder(tmp_path / "demo", "kcla", 1).is_dir()
