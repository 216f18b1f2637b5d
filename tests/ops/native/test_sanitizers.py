"""The kernels under the sanitizers, without Python and PyTorch: driver.cpp runs them over sizes drawn at random."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lineattn.ops import native

DRIVER = Path(__file__).parent / "driver.cpp"
SOURCES = Path(native.__file__).parent / "csrc"

# Memory starts as NaN, so that a value that was never written shows in the results.
OPTIONS = {"ASAN_OPTIONS": "max_malloc_fill_size=1073741824:malloc_fill_byte=255"}


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "whole"])
@pytest.mark.parametrize(("sanitizers", "cases"), [("address,undefined", 200), ("thread", 100)])
def test_clean(sanitizers: str, cases: int, whole: bool, tmp_path: Path) -> None:
    options = ["-std=c++17", "-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-exceptions"]
    options += ["-DLINEATTN_STREAMED=20000"]  # so that maps of the driver's sizes go both ways
    # AVX-512 is the same source for wider vectors, takes a minute to compile, and may not run here.
    known = [name for name in native.instructions() if whole or name != "avx512"]
    if "avx512" not in known:
        options += ["-DLINEATTN_NO_AVX512"]
    options += ["-fno-rtti", "-fno-math-errno", "-Wno-psabi", "-pthread", f"-I{SOURCES}"]
    driver = tmp_path / "driver"
    subprocess.run(["g++", *options, str(DRIVER), str(SOURCES / "kernels.cpp"), "-o", str(driver)], check=True)
    done = subprocess.run([driver, str(cases)], env=os.environ | OPTIONS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if native.enabled:
        assert done.stdout.split() == known
