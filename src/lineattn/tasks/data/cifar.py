"""CIFAR-10 and CIFAR-100 in their python layout, whole or a part of it.

The files are pickles, which can hold code; they are read by an unpickler that admits plain containers and NumPy
arrays only.
"""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from lineattn.errors import InputError
from lineattn.tasks.data.source import Defaults, Pixels, Splits

DEFAULTS = Defaults(
    image_size=32, channels=3, augment="pad_crop", mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)
)


@dataclass(frozen=True)
class _Layout:
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    reader: str


_LAYOUTS = {
    10: _Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        "labels",
        "label_names",
        "CIFAR10",
    ),
    100: _Layout("cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names", "CIFAR100"),
}
_FULL = {"train": 50_000, "test": 10_000}


def load(root: str | None, *, classes: int, image_size: int, channels: int, download: bool) -> Splits:
    """Reads the set into memory. A part of it is taken as it is, with a notice.

    Args:
        root: The folder with the files, or the one above it; ``data`` where nothing is given.
        classes: 10 or 100.
        image_size: The images are scaled to it.
        channels: 3, or 1 for grey.
        download: Fetch the set where it is missing.

    Raises:
        InputError: The files are missing, damaged, or hold anything but arrays.
    """
    layout = _LAYOUTS[classes]
    folder = _find(Path(root or "data"), layout, download)
    names = _entry(_unpickle(folder / layout.meta), layout.names, folder / layout.meta)
    parts = [folder / name for name in layout.train if (folder / name).is_file()]
    train = _pixels(parts, layout, len(names))
    test = _pixels([folder / layout.test], layout, len(names)) if (folder / layout.test).is_file() else None
    notices = [
        f"{folder} is a part of the set: {len(split)} of {_FULL[kind]:,} {kind} images"
        for kind, split in (("train", train), ("test", test))
        if split is not None and len(split) < _FULL[kind]
    ]
    return Splits(
        [str(name) for name in names],
        train.resized(image_size).with_channels(channels),
        test=test.resized(image_size).with_channels(channels) if test else None,
        notices=notices,
    )


def find(root: Path) -> int | None:
    """Number of classes of the set in a folder, or in the one below it; ``None`` where there is none."""
    return next((classes for classes, layout in _LAYOUTS.items() if _folder(root, layout)), None)


def _folder(root: Path, layout: _Layout) -> Path | None:
    for folder in (root, root / layout.folder):
        if (folder / layout.meta).is_file() and any((folder / name).is_file() for name in layout.train):
            return folder
    return None


def _find(root: Path, layout: _Layout, download: bool) -> Path:
    if folder := _folder(root, layout):
        return folder
    if download:
        return _download(root, layout)
    raise InputError(
        f"no CIFAR files in {root}: put {layout.folder}/ with {layout.train[0]} and {layout.meta} there, name its "
        "place with --data.root, or pass --data.download true"
    )


def _download(root: Path, layout: _Layout) -> Path:
    from torchvision import datasets
    from torchvision.datasets.utils import download_and_extract_archive

    # Only their address and checksum: torchvision's reader would run code in the files.
    reader = getattr(datasets, layout.reader)
    try:
        download_and_extract_archive(reader.url, str(root), filename=reader.filename, md5=reader.tgz_md5)
    except (OSError, RuntimeError) as error:
        (root / reader.filename).unlink(missing_ok=True)
        reason = " ".join(str(error).split())
        raise InputError(
            f"cannot download {layout.reader} ({reason}): without a network, unpack {reader.filename} in {root} by hand"
        ) from error
    return root / layout.folder


def _pixels(files: list[Path], layout: _Layout, classes: int) -> Pixels:
    images: list[np.ndarray] = []
    labels: list[int] = []
    for file in files:
        content = _unpickle(file)
        data, marks = _entry(content, "data", file), _entry(content, layout.labels, file)
        if not isinstance(data, np.ndarray) or data.shape != (len(marks), 3072) or data.dtype != np.uint8:
            raise InputError(f"{file} is no CIFAR batch: expected uint8 rows of 3072 with one label each")
        if not all(isinstance(mark, int) and 0 <= mark < classes for mark in marks):
            raise InputError(f"{file} has labels outside 0..{classes - 1}: the wrong set, or a damaged file")
        images.append(data)
        labels += marks
    return Pixels(torch.from_numpy(np.concatenate(images)).reshape(-1, 3, 32, 32), labels)


def _entry(content: Any, key: str, file: Path) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise InputError(f"{file} is no CIFAR file: it has no entry {key!r}")
    return content[key]


def _unpickle(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            return _Unpickler(stream, file).load()
    except FileNotFoundError as error:
        raise InputError(f"{file} does not exist: is the set complete?") from error
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise InputError(f"{file} is damaged ({type(error).__name__}): fetch it again") from error


class _Unpickler(pickle.Unpickler):
    """Admits what NumPy arrays are made of, under the names of old and new versions, and nothing else."""

    _ADMITTED = frozenset({("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("", "ndarray"), ("", "dtype")})

    def __init__(self, stream: IO[bytes], file: Path) -> None:
        super().__init__(stream, encoding="latin1")
        self.file = file

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("_codecs", "encode"):
            return _latin1
        package, _, rest = module_name.partition(".")
        inner = rest.removeprefix("_core").removeprefix("core").lstrip(".")
        if package == "numpy" and (inner, global_name) in self._ADMITTED:
            return getattr(importlib.import_module("numpy._core.multiarray" if inner else "numpy"), global_name)
        raise InputError(
            f"{self.file} asks for {module_name}.{global_name}, which is code and not data: don't open it, get the set "
            "from a source you trust"
        )


def _latin1(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes: as text, and a call that encodes it."""
    return text.encode("latin1")
