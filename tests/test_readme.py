"""What the README and CONTRIBUTING show works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lineattn import registry
from lineattn.cli.main import TASK_VERBS, TASKS, VERBS
from lineattn.nn.depth.base import Site

ROOT = Path(__file__).parents[1]


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.medium
def test_the_python_of_the_readme_runs():
    names = {}
    for block in blocks("README.md", "python"):
        exec(block, names)
    assert names["logits"].shape == (2, 1000)


def test_the_commands_of_the_readme_exist():
    lines = [
        line for block in blocks("README.md", "bash") for line in block.splitlines() if line.startswith("lineattn ")
    ]
    assert len(lines) > 5
    for _, verb, task, *_ in map(str.split, lines):
        assert verb in VERBS or (verb in TASK_VERBS and task in TASKS), verb


def test_the_make_targets_of_the_texts_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(
        r"^make ([a-z-]+)", "\n".join(blocks("README.md", "bash") + blocks("CONTRIBUTING.md", "bash")), re.M
    )
    assert named and set(named) <= targets


def test_missing_results_are_one_line(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "readme_tables.py", tmp_path / "tools")
    shutil.copy(ROOT / "README.md", tmp_path)
    command = [sys.executable, str(tmp_path / "tools" / "readme_tables.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "demo.json is missing" in done.stderr
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_clean_removes_what_was_built_and_nothing_else(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    built = ["src/a package.egg-info/x", "tests/b c/__pycache__/x", "build/x"]
    kept = ["src/package/x.py", "runs/mine/x", "tests/b c/x.py", "tools/x"]
    for name in [*built, *kept]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, check=True)
    assert not any((tmp_path / name).exists() for name in built) and all((tmp_path / name).exists() for name in kept)


def test_the_method_of_contributing_keeps_the_contract(monkeypatch):
    registry.list_methods()
    monkeypatch.setattr(registry, "_CARDS", dict(registry._CARDS))
    (code,) = blocks("CONTRIBUTING.md", "python")
    exec(code, {"__name__": "running_mean"})
    method = registry.get("running_mean", axis="depth").cls
    x, y = torch.randn(2, 2, 4, 5, 5)
    attention = method(Site(channels=4))
    out, state = attention(x, None, None)
    assert torch.equal(out, x)
    torch.nn.init.normal_(attention.gain)
    out, state = attention(y, None, state)
    scale = (attention.weight * attention.gain)[:, None, None]
    torch.testing.assert_close(out, y + scale * (x + y) / 2)
    attention.fold_gain()
    torch.testing.assert_close(attention(y, None, method(Site(channels=4))(x, None, None)[1])[0], out)
