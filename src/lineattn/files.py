"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lineattn.errors import InputError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Writes a binary file so that a reader finds the old one or the new one, never a part.

    Args:
        path: Where it shall stand; its folder is made.
        write: Is given the open file.

    Raises:
        InputError: There is no room; the old file, if any, is untouched.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*.part"):
            if not _alive(left.suffixes[-2]):
                left.unlink(missing_ok=True)  # by a process that was killed while it wrote
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        # torch wraps a write that failed in a RuntimeError; what happened stands in the chain behind it.
        if any(isinstance(cause, OSError) and cause.errno in _NO_ROOM for cause in causes(error)):
            raise InputError(f"no room on the disk to write {path}: free some, then run the command again") from error
        raise


def _alive(number: str) -> bool:
    """Whether the process of a number behind a dot still runs, here; others may write the same file now."""
    try:
        os.kill(int(number.removeprefix(".")), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def need_folder(path: Path | None) -> None:
    """Says before long work that its results can't stand there.

    Raises:
        InputError: The path is a file.
    """
    if path is not None and path.exists() and not path.is_dir():
        raise InputError(f"--out {path} is a file; name a folder, which is made where it is missing")


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def load_torch(path: str | Path) -> Any:
    """What `torch.save` wrote, on the CPU; code in the file is never run.

    Raises:
        InputError: The file is missing, damaged, or holds more than plain data and tensors.
    """
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pickles that are refused anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; give one that torch.save wrote") from error
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: no weights file, or one with Python objects beside the tensors, which could run code and are "
            "never loaded; use a checkpoint of this library, or save the state_dict() alone, best as safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, OSError) as error:
        raise InputError(f"{path}: no whole weights file ({type(error).__name__}); give another one") from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it, as a traceback would show them."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
