from __future__ import annotations

import subprocess
import sys

import pytest

import lineattn


def test_import_brings_nothing_heavy() -> None:
    code = "import sys, lineattn; print([m for m in ('torch', 'torchvision', 'timm', 'lightning') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names() -> None:
    assert set(lineattn.__all__) <= set(dir(lineattn))
    assert all(getattr(lineattn, name) for name in lineattn.__all__)
    assert "kcla" in lineattn.list_methods("depth")
    with pytest.raises(AttributeError, match="no attribute 'attack'"):
        _ = lineattn.attack


@pytest.mark.medium
def test_models_need_no_torchvision() -> None:
    code = (
        "import sys, lineattn; lineattn.create_model('resnet20_cifar', attn='kcla'); "
        "print([m for m in ('torchvision', 'timm', 'lightning') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
