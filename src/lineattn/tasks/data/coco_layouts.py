"""Where data sets of COCO's format have their annotations and images: COCO's own layout, a plain one, Roboflow's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lineattn.errors import InputError
from lineattn.tasks.data.coco_json import Annotations
from lineattn.tasks.data.folder import find_parts, find_root

_EXAMPLE = (
    "expected ROOT/annotations/train.json or instances_train.json with images in ROOT/train, ROOT/images/train or "
    "ROOT/images; ROOT/annotations/instances_train2017.json with ROOT/train2017; or ROOT/train/_annotations.coco.json"
)
_NAME = re.compile(r"(?:instances_)?(train|val|valid|validation|test)(\d{4})?\.json")
_ALIASES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_ROBOFLOW = "_annotations.coco.json"
_LOOKED_FOR = 20  # images that tell which folder is theirs


class Place(NamedTuple):
    """A split's file of annotations, and the folders that may have its images."""

    annotations: Path
    folders: list[Path]


def find_splits(root: str | None) -> tuple[dict[str, Place], list[str]]:
    """What there is of each split, and notices; of several years, the last that has a training split.

    Raises:
        InputError: There is no such folder, or no training split in it.
    """
    folder = find_root(root, _EXAMPLE)
    places = _annotations_folder(folder)
    notices = []
    if places:
        year = max((year for split, year in places if split == "train"), default="")
        if others := sorted(place.annotations.name for (_, other), place in places.items() if other != year):
            notices.append(f"{folder / 'annotations'}: ignored {', '.join(others)}")
        found = {split: place for (split, other), place in places.items() if other == year}
    else:
        parts = {split: part for split, part in find_parts(folder).items() if (part / _ROBOFLOW).is_file()}
        found = {split: Place(part / _ROBOFLOW, [part]) for split, part in parts.items()}
    if "train" not in found:
        what = f"annotations of {' and '.join(found)} but none of train" if found else "no annotations of COCO's format"
        raise InputError(f"--data.root {folder} has {what}: {_EXAMPLE}")
    return {split: found[split] for split in ("train", "val", "test") if split in found}, notices


def images_folder(place: Place, annotations: Annotations) -> Path:
    """The folder that has most of the first images.

    Raises:
        InputError: No such folder is there.
    """
    there = [folder for folder in place.folders if folder.is_dir()]
    if not there:
        raise InputError(f"no folder of images for {place.annotations}: looked for {_or(place.folders)}")
    names = [image.file_name for image in annotations.images[:_LOOKED_FOR]]
    return max(there, key=lambda folder: sum((folder / name).is_file() for name in names))  # of equals, the first


def agreed(files: dict[str, Annotations]) -> dict[int, str]:
    """The categories, which all splits must have.

    Raises:
        InputError: They differ; what differs is named.
    """
    train = files["train"]
    for other in files.values():
        if other.categories != train.categories:
            pairs = train.categories.items() ^ other.categories.items()
            own = min(key for key, _ in pairs)
            texts = [f"{file.path} has {_named(own, file.categories)}" for file in (train, other)]
            raise InputError(f"{' and '.join(texts)}: all splits need the same categories")
    return train.categories


def _annotations_folder(root: Path) -> dict[tuple[str, str], Place]:
    """What ``annotations/`` has of each split and year."""
    folder = root / "annotations"
    if not folder.is_dir():
        return {}
    found: dict[tuple[str, str], Place] = {}
    for file in sorted(folder.iterdir()):
        if (parts := _NAME.fullmatch(file.name)) is None or not file.is_file():
            continue
        name, year = parts[1], parts[2] or ""
        split = "val" if name.startswith("val") else name
        if (earlier := found.get((split, year))) is not None:
            raise InputError(f"{earlier.annotations} and {file} are of one split: keep one")
        names = [f"{name}{year}", *(f"{other}{year}" for other in _ALIASES[split] if other != name)]
        folders = [place / one for place in (root, root / "images") for one in names]
        found[split, year] = Place(file, [*folders, root / "images", root])
    return found


def _named(own: int, categories: dict[int, str]) -> str:
    return f"the category {own} ({categories[own]})" if own in categories else f"no category {own}"


def _or(folders: Sequence[Path]) -> str:
    return " or ".join(map(str, folders))
