from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys

import pytest
from PIL import Image

from lineattn.cli.demo import cls, lm, seg
from lineattn.cli.demo.base import SEEDS, Seen
from lineattn.cli.demo.cls import CLS, Digit
from lineattn.cli.demo.pictures import draw
from lineattn.cli.demo.report import write_report
from lineattn.cli.demo.result import Method, Results
from lineattn.cli.demo.seg import SEG, Legend, Scene
from lineattn.cli.main import main

FLOORS = {"cls": {"chance": 10.0}, "seg": {"all background": 28.4, "ink, class guessed": 55.6}}
LEGEND = Legend(["ground", "even <2>", "odd"], [(0, 0, 0), (255, 0, 0), (0, 0, 255)])


def make_results(demo=CLS, shift=0.0):
    """Results in which the others are ``shift`` points from plain, give or take."""
    methods = []
    for place, name in enumerate(demo.methods):
        noise = [0.0, 0.3, -0.2] if place else [0.1, 0.0, 0.0]
        scores = [97.0 + number + (shift if place else 0.0) + noise[number] for number in range(len(SEEDS))]
        summaries = [
            {
                "last": {f"test/{demo.metric}": score},
                "params": 44_226,
                "macs": 1_660_000,
                "seconds_per_epoch": 1.5,
                "epochs": 2,
            }
            for score in scores
        ]
        curve = [{"epoch": epoch, "train/loss": 2.0 - epoch, f"val/{demo.metric}": 50.0 + epoch} for epoch in range(2)]
        methods.append(Method(demo, name, summaries, [curve] * len(SEEDS)))
    environment = {"versions": {"torch": "2"}, "cores": 2, "git": None, "machine": "<any>"}
    return Results(demo, methods, FLOORS[demo.task], environment, 42.0)


def make_scenes(scores):
    """Scenes of 2x2 pixels in which KCLA has these scores and finds one odd pixel, and plain nothing."""
    grey, truth, found, nothing = bytes([100] * 4), bytes([0, 1, 2, 0]), bytes([0, 0, 2, 0]), bytes(4)
    return [
        Scene(place, 2, grey, truth, {"none": (nothing, 25.0), "kcla": (found, score)})
        for place, score in enumerate(scores)
    ]


def written(results, seen, out):
    """The page, which is checked to need nothing beside it."""
    for name, dark in (("curves.png", False), ("curves-dark.png", True)):
        draw(results, out / name, dark=dark)
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    write_report(results, seen, out)
    page = (out / "report.html").read_text()
    assert set(re.findall(r'(?:src|srcset|href)="([^"]{5})', page)) == {"data:"}
    assert "http" not in page and "url(" not in page
    return page


def pictures(page):
    """The pictures of the sections."""
    return re.findall(r'<img src="data:image/png;base64,([^"]*)"', page)


def test_the_sentence_is_no_stronger_than_its_intervals():
    assert make_results().sentence().count("within noise") == 2
    assert make_results(shift=5.0).sentence().count("better here") == 2
    assert make_results(shift=-5.0).sentence().count("worse here") == 2
    assert "MRLA-light +5.00 points (95 % interval +4.34 to +5.66), better here" in make_results(shift=5.0).sentence()
    worse = "KCLA -5.00 points (95 % interval -5.66 to -4.34), worse here."
    assert make_results(SEG, shift=-5.0).sentence() == f"Test mean IoU against plain, paired over 3 seeds: {worse}"


def test_the_table_ends_with_what_takes_no_training():
    rows = make_results().rows()
    assert [row["method"] for row in rows] == ["plain", "MRLA-light", "KCLA", "chance"]
    assert rows[0]["test accuracy, %"] == "98.03 ± 0.95" and rows[-1]["test accuracy, %"] == "10"
    rows = make_results(SEG).rows()
    assert [(row["method"], row["test mean IoU, %"]) for row in rows[2:]] == [
        ("all background", "28"),
        ("ink, class guessed", "56"),
    ]


def test_the_numbers_of_the_first_demo_keep_their_names(tmp_path):
    make_results().write(tmp_path / "results.json")
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == ["sentence", "chance", "seconds", "environment", "methods"]
    assert found["chance"] == 10 and list(found["methods"][0]) == ["name", "title", "test/acc1", "runs"]


@pytest.mark.medium
def test_the_report_holds_all_it_shows(tmp_path):
    results = make_results()
    digits = [Digit(bytes(range(256)), 16, 3, 3, 0.99), Digit(bytes(256), 16, 4, 9, 0.6)]
    page = written(results, Seen(results.floors, 2, cls.sections(digits)), tmp_path)
    assert results.sentence() in page and "98.03 ± 0.95" in page
    assert "1 of 2 test images" in page and "is 4" in page and "&lt;any&gt;" in page
    assert len(pictures(page)) == 2 + 1


@pytest.mark.medium
def test_the_report_of_segmentation_holds_all_it_shows(tmp_path):
    results = make_results(SEG)
    scores = [50.0, 99.4, 40.0, 10.0, 70.0, 60.0, 5.0]
    page = written(results, Seen(results.floors, 7, seg.sections(make_scenes(scores), LEGEND)), tmp_path)
    assert results.sentence() in page and "98.03 ± 0.95" in page and ">28</td>" in page and "7 scenes are for" in page
    assert "even &lt;2&gt;" in page and "rgb(0, 0, 255)" in page and "unpainted: ground" in page
    shown = [int(number) for number in re.findall(r"<span>scene (\d+)</span>", page)]
    assert shown == [1, 2, 3, 4, 5, 6, 2, 5, 7, 4]  # the first, the best and the worst
    assert "KCLA <b>99 %</b>" in page and "plain <b>25 %</b>" in page
    assert all(f"lineattn {verb} seg" in page for verb in ("fit", "test", "predict")) and "lineattn demo seg\n" in page


def test_an_overlay_paints_all_but_the_background():
    views = [
        Image.open(io.BytesIO(base64.b64decode(data))) for data in pictures(seg.sections(make_scenes([1.0]), LEGEND))
    ]
    image, truth, plain, kcla = ([view.getpixel((k % 2, k // 2)) for k in range(4)] for view in views[:4])
    grey, red, blue = (100, 100, 100), pytest.approx((193, 40, 40), abs=1), pytest.approx((40, 40, 193), abs=1)
    assert image == plain == [grey] * 4
    assert truth == [grey, red, blue, grey] and kcla == [grey, grey, blue, grey]


@pytest.mark.parametrize("demo", [CLS, SEG])
def test_only_attention_has_options_of_its_own(demo, tmp_path):
    plain, kcla = (demo.options(attn, 2, tmp_path) for attn in ("none", "kcla"))
    assert not any("attn" in part for part in plain[::2]) and kcla[kcla.index("--model.attn") + 1] == "kcla"
    assert plain[-1] == str(tmp_path / "none-2") and plain[plain.index("--seed_everything") + 1] == "2"


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "mine.txt").touch()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert main(["demo", "set"]) == 2
    assert "unknown task 'set': did you mean 'seg'?" in capsys.readouterr().err


@pytest.mark.medium
def test_the_parent_of_the_runs_stays_light():
    names = "cls, pictures, report, result, seg, train"
    code = f"import sys; from lineattn.cli.demo import {names}; import lineattn.cli.progress; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rich.progress" in shown and not {"torch", "lightning"} & set(shown)


@pytest.mark.slow
def test_the_demo_trains_well_above_chance(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    found = json.loads((tmp_path / "demo" / "results.json").read_text())
    for method in found["methods"]:
        assert len(method["test/acc1"]) == len(SEEDS) and min(method["test/acc1"]) > 90
    assert found["chance"] == 10 and sum(found["methods"][0]["test/acc1"]) / len(SEEDS) >= 95
    assert "report.html" in capsys.readouterr().out
    assert len({run["seed"] for run in found["methods"][0]["runs"]}) == len(SEEDS)
    assert CLS.folder(tmp_path / "demo", "kcla", 1).is_dir()


@pytest.mark.slow
def test_the_demo_of_segmentation_trains_well_above_guessing(tmp_path, capsys):
    assert main(["demo", "seg", "--out", str(tmp_path / "demo")]) == 0
    found = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert 20 < found["all background"] < 33.3 and 50 < found["ink, class guessed"] < 60
    for method in found["methods"]:
        assert len(method["test/miou"]) == len(SEEDS) and min(method["test/miou"]) > 60
    page = (tmp_path / "demo" / "report.html").read_text()
    overlays = [Image.open(io.BytesIO(base64.b64decode(data))) for data in pictures(page)]
    assert len(overlays) == 4 * (6 + 2 + 2) and {view.size for view in overlays} == {(48, 48)}
    coloured = [view.tobytes()[0::3] != view.tobytes()[2::3] for view in overlays]
    assert coloured[:2] == [False, True] and sum(coloured) >= 3 * 8  # an empty scene might be the best
    assert "report.html" in capsys.readouterr().out


@pytest.mark.medium
def test_the_demo_of_language_models_shows_what_it_promises(tmp_path, capsys, monkeypatch):
    small = {"data.length": "32", "model.width": "16", "model.depth": "1", "trainer.limit_train_batches": "2"}
    limits = {f"trainer.limit_{split}_batches": "2" for split in ("val", "test")}
    monkeypatch.setattr(lm, "RECIPE", lm.RECIPE | small | limits)
    monkeypatch.setattr(lm, "CONTEXTS", (8, 32))
    assert main(["demo", "lm", "--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert shown.count(lm.PROMPT) == 2 and "bytes by their frequency" in shown and "One more token" in shown
    found = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert 20 < found["frequencies"] < 40
    states = {name: [row["state"] for row in one["decode"]] for name, one in found["methods"].items()}
    assert states["metala"][0] == states["metala"][1] and states["softmax_attention"][1] == 32 * (2 * 16 + 1)
    with Image.open(tmp_path / "demo" / "curves.png") as picture:
        assert picture.size == (1100, 370)


@pytest.mark.slow
def test_the_demo_of_language_models_learns(tmp_path):
    assert main(["demo", "lm", "--out", str(tmp_path / "demo")]) == 0
    found = json.loads((tmp_path / "demo" / "results.json").read_text())
    for method in found["methods"].values():
        assert method["run"]["last"]["test/byte_ppl"] < 0.5 * found["frequencies"]
    metala, softmax = (found["methods"][name]["decode"] for name in ("metala", "softmax_attention"))
    assert metala[-1]["ms"] < 3 * metala[0]["ms"] and softmax[-1]["ms"] > 3 * softmax[0]["ms"]
