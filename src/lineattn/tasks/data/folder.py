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
    if root is None:
        raise InputError(f"--data.root is missing: name the folder of images ({_EXAMPLE})")
    folder = Path(root)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"--data.root {folder} {what}: {_EXAMPLE}")
    notices: list[str] = []
    places = {
        split: next((folder / name for name in names if (folder / name).is_dir()), None)
        for split, names in _SPLITS.items()
    }
    if not any(places.values()):
        places = {"train": folder, "val": None, "test": None}
    train = places["train"]
    if train is None:
        found = next(place for place in places.values() if place)
        raise InputError(f"--data.root {folder} has {found.name}/ but no train/: {_EXAMPLE}")
    classes = [entry.name for entry in _classes(train, notices)]
    if not classes:
        raise InputError(f"no class folders in {train}: {_EXAMPLE}")
    splits = {
        split: _split(place, classes, channels, notices, training=split == "train")
        for split, place in places.items()
        if place is not None
    }
    return Splits(classes, splits["train"], splits.get("val"), splits.get("test"), notices)


def _classes(place: Path, notices: list[str]) -> list[Path]:
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir())
    hidden = [entry for entry in folders if entry.name.startswith(".")]
    if hidden:
        notices.append(f"ignored hidden folders in {place}: {', '.join(entry.name for entry in hidden)}")
    return [entry for entry in folders if entry not in hidden]


def _split(place: Path, classes: list[str], channels: int, notices: list[str], *, training: bool) -> Files:
    paths: list[Path] = []
    labels: list[int] = []
    strange = 0
    for entry in _classes(place, [] if training else notices):
        if entry.name not in classes:
            raise InputError(f"{place} has the class {entry.name!r}, which the training folder does not have")
        files = sorted(file for file in entry.rglob("*") if file.is_file() and not _hidden(file, entry))
        images = [file for file in files if file.suffix.lower() in EXTENSIONS]
        strange += len(files) - len(images)
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
