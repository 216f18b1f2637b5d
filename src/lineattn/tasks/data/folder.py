"""A folder of images, one subfolder a class; with train/, val/ and test/ above the classes, or without."""

from __future__ import annotations

from pathlib import Path

from lineattn.errors import InputError
from lineattn.tasks.data.reading import EXTENSIONS
from lineattn.tasks.data.source import Defaults, Files, Splits

DEFAULTS = Defaults(
    image_size=224, channels=3, augment="resized_crop", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_EXAMPLE = "expected ROOT/train/CLASS/image.jpg, or ROOT/CLASS/image.jpg"


def load(root: str | None, *, channels: int) -> Splits:
    """Lists the images; none is opened.

    Hidden folders and files that are no images by their names are left out with a notice.

    Raises:
        InputError: The folder is missing, a class is empty, or a split has a class that training doesn't have.
    """
    places = find_splits(root)
    notices: list[str] = []
    classes = [entry.name for entry in _classes(places["train"], notices)]
    if not classes:
        raise InputError(f"no class folders in {places['train']}: {_EXAMPLE}")
    splits = {
        split: _split(place, classes, channels, notices, training=split == "train") for split, place in places.items()
    }
    return Splits(classes, splits["train"], splits.get("val"), splits.get("test"), notices)


def find_splits(root: str | None) -> dict[str, Path]:
    """The folder of each split; a folder of classes alone is the training split.

    Raises:
        InputError: There is no such folder, or no training split in it.
    """
    folder = find_root(root, _EXAMPLE)
    places = find_parts(folder)
    if places and "train" not in places:
        found = next(iter(places.values()))
        raise InputError(f"--data.root {folder} has {found.name}/ but no train/: {_EXAMPLE}")
    return places or {"train": folder}


def find_root(root: str | None, example: str) -> Path:
    """The folder of a data set.

    Raises:
        InputError: None is named, or there is no such folder; `example` says what was expected.
    """
    if root is None:
        raise InputError(f"--data.root is missing: name the folder of the data ({example})")
    folder = Path(root)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"--data.root {folder} {what}: {example}")
    return folder


def find_parts(folder: Path, ending: str = "") -> dict[str, Path]:
    """What a folder has for each split under one of its usual names: a folder, or a file with that `ending`."""
    there = Path.is_file if ending else Path.is_dir
    return {
        split: place
        for split, names in _SPLITS.items()
        if (place := next((place for name in names if there(place := folder / f"{name}{ending}")), None))
    }


def find_classes(place: Path) -> tuple[list[Path], list[Path]]:
    """The folders of the classes, and hidden ones, which are none."""
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir())
    hidden = [entry for entry in folders if entry.name.startswith(".")]
    return [entry for entry in folders if entry not in hidden], hidden


def find_images(entry: Path) -> tuple[list[Path], list[Path]]:
    """The images of a class by their names, at any depth, and its other files; what is hidden is left out."""
    files = sorted(file for file in entry.rglob("*") if file.is_file() and not _hidden(file, entry))
    images = [file for file in files if file.suffix.lower() in EXTENSIONS]
    return images, [file for file in files if file.suffix.lower() not in EXTENSIONS]


def _classes(place: Path, notices: list[str]) -> list[Path]:
    classes, hidden = find_classes(place)
    if hidden:
        notices.append(f"ignored hidden folders in {place}: {', '.join(entry.name for entry in hidden)}")
    return classes


def _split(place: Path, classes: list[str], channels: int, notices: list[str], *, training: bool) -> Files:
    paths: list[Path] = []
    labels: list[int] = []
    strange = 0
    for entry in _classes(place, [] if training else notices):
        if entry.name not in classes:
            raise InputError(f"{place} has the class {entry.name!r}, which the training folder does not have")
        images, others = find_images(entry)
        strange += len(others)
        if not images and training:
            raise InputError(f"the class folder {entry} holds no images: add some or remove it")
        paths += images
        labels += [classes.index(entry.name)] * len(images)
    if strange:
        notices.append(f"ignored {strange} files in {place} that are no images by their names")
    if not paths:
        raise InputError(f"no images in {place}: add some or remove the folder")
    return Files(paths, labels, channels)


def _hidden(file: Path, entry: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(entry).parts)
