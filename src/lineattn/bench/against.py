"""Somebody else's implementation of the layer, read from a Python file, to be timed beside ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lineattn.errors import InputError

Build = Callable[[int, int], nn.Module]  # channels, head_dim -> a module (x, state) -> (out, state)

_WANTED = "build(channels: int, head_dim: int) -> nn.Module with forward(x, state) -> (out, state)"


def load(path: Path) -> Build:
    """``build`` of a Python file, tried on two small maps; the file's code is run.

    Raises:
        InputError: The file is missing or fails, has no ``build``, or its module doesn't do what it must.
    """
    if not path.is_file():
        raise InputError(f"--against {path}: no such file; give a Python file that defines {_WANTED}")
    spec = importlib.util.spec_from_file_location("lineattn_against", path)
    if spec is None or spec.loader is None:
        raise InputError(f"--against {path}: no Python file; give one that defines {_WANTED}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(path, "running it", error) from error
    build: Build | None = getattr(module, "build", None)
    if not callable(build):
        raise InputError(f"--against {path}: it defines no {_WANTED}")
    _try(path, build)
    return build


def _try(path: Path, build: Build) -> None:
    try:
        layer = build(64, 16)
    except Exception as error:
        raise _failed(path, "build(64, 16)", error) from error
    if not isinstance(layer, nn.Module):
        raise InputError(f"--against {path}: build returned a {type(layer).__name__}; it must be an nn.Module")
    state = None
    for x in torch.randn(2, 2, 64, 4, 4):
        try:
            result = layer(x, state)
        except Exception as error:
            raise _failed(path, f"forward(x, {'None' if state is None else 'state'})", error) from error
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise InputError(f"--against {path}: forward must return (out, state), out a tensor")
        out, state = result
        if out.shape != x.shape:
            raise InputError(
                f"--against {path}: forward turned a map {tuple(x.shape)} into {tuple(out.shape)}; the shape must stay"
            )


def _failed(path: Path, what: str, error: Exception) -> InputError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return InputError(f"--against {path}: {what} failed ({reason}); it must define {_WANTED}")
