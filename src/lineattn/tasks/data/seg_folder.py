"""A folder of images and masks: with split folders above or below images/ and masks/, with lists, or without splits."""

from __future__ import annotations

from pathlib import Path

from lineattn.errors import InputError
from lineattn.tasks.data.folder import find_parts, find_root
from lineattn.tasks.data.legend import read_legend
from lineattn.tasks.data.masks import RuleName, find_rule
from lineattn.tasks.data.pairs import FilePairs, SegSplits, by_name, match, of_files
from lineattn.tasks.data.reading import EXTENSIONS

_EXAMPLE = "expected ROOT/images/NAME.jpg and ROOT/masks/NAME.png, or the two in ROOT/train, ROOT/val, ROOT/test"


def load(
    root: str | None, *, channels: int, classes_file: str | None = None, masks: RuleName | None = None
) -> SegSplits:
    """Lists images and masks; some masks are opened, to find what their values mean.

    The splits are folders in ROOT or in both ROOT/images and ROOT/masks, or lists of names ROOT/{train,val,test}.txt;
    without any, all is for training. Kvasir-SEG is such a folder as it comes.

    Args:
        root: The folder.
        channels: 1 or 3; images are converted.
        classes_file: Names of the classes, and perhaps colours (see `read_legend`); by default ROOT/classes.txt where
            it exists, and else the classes are background and foreground.
        masks: How values become classes (see `MaskRule`); by default what suits the masks.

    Raises:
        InputError: The folder is missing or not of that form, an image lacks a mask or has two, a mask lacks an image,
            or the masks need class names.
    """
    folder = find_root(root, _EXAMPLE)
    names = Path(classes_file) if classes_file else folder / "classes.txt"
    legend = read_legend(names) if classes_file or names.exists() else None
    notices: list[str] = []
    splits = _by_list(folder, notices) or _by_folder(folder, notices)
    if "train" not in splits:
        raise InputError(f"--data.root {folder} has {next(iter(splits))} images but none to train on: {_EXAMPLE}")
    rule, more = find_rule([mask for _, mask in splits["train"]], legend, masks)
    return of_files(splits, rule, channels=channels, notices=[*notices, *more])


def read_list(file: Path) -> list[str]:
    """Names of images, one a line; an image's format after the name is taken off.

    Raises:
        InputError: A name is there twice.
    """
    names = [_bare(line.strip()) for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if len(set(names)) != len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise InputError(f"{file} names {twice} twice: take one out")
    return names


def _bare(name: str) -> str:
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in EXTENSIONS else name


def _by_list(folder: Path, notices: list[str]) -> dict[str, FilePairs]:
    lists = find_parts(folder, ".txt")
    if not lists or not _holds_pairs(folder):
        return {}
    images, masks = by_name(folder / "images"), by_name(folder / "masks")
    names = {split: read_list(file) for split, file in lists.items()}
    if unlisted := images.keys() - {name for split in names.values() for name in split}:
        notices.append(f"{len(unlisted):,} images of {folder / 'images'} are in no list: left out")
    for split in ("val", "test"):
        if common := set(names.get("train", [])) & set(names.get(split, [])):
            notices.append(f"{len(common):,} images are in {lists['train'].name} and in {lists[split].name}")
    return {split: match(images, masks, names[split], place=lists[split]) for split in lists}


def _by_folder(folder: Path, notices: list[str]) -> dict[str, FilePairs]:
    if not _holds_pairs(folder):
        parts = find_parts(folder)
        for part in parts.values():
            if not _holds_pairs(part):
                raise InputError(f"no images/ and masks/ in {part}: {_EXAMPLE}")
        if not parts:
            raise InputError(f"no images/ and masks/ in {folder}, and no train/: {_EXAMPLE}")
        return {split: _pairs(part / "images", part / "masks") for split, part in parts.items()}
    images, masks = find_parts(folder / "images"), find_parts(folder / "masks")
    if not images:
        return {"train": _pairs(folder / "images", folder / "masks")}
    if images.keys() == {"test"} | masks.keys() != masks.keys():
        notices.append(f"{images.pop('test')} has no masks: there is no test split")
    if strange := images.keys() ^ masks.keys():
        raise InputError(f"{folder / 'images'} and {folder / 'masks'} differ in the folder of {', '.join(strange)}")
    return {split: _pairs(images[split], masks[split]) for split in images}


def _holds_pairs(folder: Path) -> bool:
    return (folder / "images").is_dir() and (folder / "masks").is_dir()


def _pairs(images: Path, masks: Path) -> FilePairs:
    return match(by_name(images), by_name(masks), place=images)
