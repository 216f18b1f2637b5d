"""The tables that tools/readme_tables.py makes of the benches' files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "readme_tables.py"
ENVIRONMENT = {"git": "1234567890abc", "versions": {"torch": "2", "python": "3"}, "processor": "P", "threads": 2}


@pytest.fixture
def tool(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("readme_tables", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    return module


def write(tool, name, rows):
    content = {
        "command": "lineattn bench",
        "environment": ENVIRONMENT | {"native": "on: avx2"},
        "setting": {"allocator": "tuned", "rounds": 7},
        "rows": rows,
    }
    (tool.ROOT / "results" / f"{name}.json").write_text(json.dumps(content))


def cells(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_an_operator_has_a_column_a_form_and_a_row_a_figure(tool):
    common = {"length": 2048, "mode": "forward"}
    rows = [
        common | {"name": "ours", "cpu_ms": 4.0, "cpu_ratio": 1.0, "saved_mb": 0.0},
        common | {"name": "loop", "cpu_ms": 86.0, "cpu_ratio": 21.5},
    ]
    write(tool, "bench_scan", rows)
    table = tool.operator("scan")
    assert cells(table) == [
        ["", "ours", "loop"],
        ["2,048 tokens, forward, processor time", "4.0 ms", "86.0 ms (21.50x)"],
        ["2,048 tokens, forward, saved for the backward", "0.0 MB", ""],
    ]
    assert "native kernels on: avx2" in table and "commit 1234567890," in table


def test_the_layer_leaves_out_the_single_points_of_growth(tool):
    rows = [
        {"part": "layer", "size": "8x8", "mode": "evaluation", "name": "ours", "cpu_ms": 2.0, "cpu_ratio": 1.0},
        {"part": "layer", "size": "8x8", "mode": "evaluation", "name": "published", "cpu_ms": 9.0, "cpu_ratio": 4.5},
        {"part": "chain", "size": "64 layers", "mode": "saved", "name": "ours", "saved_mb": 7.0, "saved_maps": 0.114},
        {"part": "growth", "size": "2x2", "mode": "training step", "name": "ours, 125 layers", "cpu_ms": 1.0},
        {"part": "growth", "size": "125 to 1000 layers", "mode": "exponent", "name": "saved bytes", "exponent": 1.01},
    ]
    write(tool, "bench_depth", rows)
    assert cells(tool.layer()) == [
        ["", "ours", "published"],
        ["8x8, evaluation, processor time", "2.0 ms", "9.0 ms (4.50x)"],
        ["64 layers, maps saved a layer", "0.11", ""],
        ["125 to 1000 layers, exponent of saved bytes", "1.01", ""],
    ]


def test_tables_are_written_and_compared(tool, capsys, monkeypatch):
    monkeypatch.setattr(tool, "PAGES", {"README.md": {"scan": lambda: tool.operator("scan")}})
    readme = tool.ROOT / "README.md"
    readme.write_text("<!-- table: scan -->\n<!-- end -->\n")
    assert tool.main(check=True) == 1 and "bench_scan.json is missing" in capsys.readouterr().err
    write(tool, "bench_scan", [{"length": 1, "mode": "forward", "name": "ours", "cpu_ms": 4.0}])
    assert tool.main(check=True) == 1
    assert tool.main(check=False) == 0 and "4.0 ms" in readme.read_text()
    assert tool.main(check=True) == 0
    readme.write_text("")
    assert tool.main(check=True) == 1 and "marker" in capsys.readouterr().err
