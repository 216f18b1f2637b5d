from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lineattn.errors import InputError
from lineattn.ops import native, triton

ROOT = Path(__file__).parents[3]

pytest.importorskip("triton", reason="PyTorch for the CPU alone comes without it")


def python(*arguments: str, **environment: str) -> str:
    """What a process of its own prints: how Triton runs, once chosen, stays chosen."""
    kept = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.medium
@pytest.mark.parametrize("group", ["evaluation", "training", "operators"])
def test_in_the_interpreter(group: str):
    python("-m", "tests.ops.triton.interpreted", group, LINEATTN_TRITON="on")


@pytest.mark.medium
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path):
    """To machine code: the interpreter takes much that the compiler does not."""
    printed = python("-m", "tests.ops.triton.compiled", TRITON_CACHE_DIR=str(tmp_path))
    assert set(printed.split()) == {"pool", "emit", "moments", "recall", "values", "spread", "finish"}


@pytest.mark.medium
def test_triton_is_off_and_not_imported_unless_it_is_switched_on():
    look = "import lineattn.ops.kcla_operator, lineattn.ops.triton as t, sys; print('triton' in sys.modules, t.enabled)"
    assert python("-c", look).split() == ["False", "False"]


def test_the_switch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LINEATTN_TRITON", raising=False)
    assert triton.mode() == "off"
    monkeypatch.setenv("LINEATTN_TRITON", "maybe")
    with pytest.raises(InputError, match="LINEATTN_TRITON=maybe: it must be one of off, on"):
        triton.mode()
    monkeypatch.setenv("LINEATTN_TRITON", "on")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match=r"Triton can't be imported .*: install it, or unset it"):
        triton._find()


def test_takes_nothing_of_the_cpu(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(2, 3, dtype=torch.float32)
    monkeypatch.setattr(triton, "enabled", True)
    assert not triton.usable(x, None)
    assert native.plain([x, None], "cpu") and not native.plain([x.double()], "cpu")
