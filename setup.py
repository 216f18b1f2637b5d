"""Builds the native kernels, where there is a compiler for them; everything else is in pyproject.toml.

The kernels are a plain shared library: no header of Python or PyTorch, so one build serves every version of both.
Without a compiler the package installs as well, and computes everything in PyTorch.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/lineattn/ops/native/csrc")


class BuildLibrary(build_ext):
    """Names the library for itself instead of for one Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols  # not PyInit_...: it is no Python module


class PlatformWheel(bdist_wheel):
    """One wheel a platform, for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "lineattn.ops.native._kernels",
            sources=[str(SOURCES / "kernels.cpp")],
            depends=[str(path) for path in sorted(SOURCES.iterdir())],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",  # Python's own flags ask for debugging symbols, which make it five times as large
                "-fvisibility=hidden",
                "-fno-exceptions",
                "-fno-rtti",
                "-fno-math-errno",
                "-Wno-psabi",
            ],
            language="c",  # linked as C: nothing of the C++ library is used
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
