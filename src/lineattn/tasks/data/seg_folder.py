"""A folder of images and masks: with split folders above or below images/ and masks/, with lists, or without splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lineattn.errors import InputError
from lineattn.tasks.data.faults import Fault, OnFault, stop
from lineattn.tasks.data.folder import find_parts, find_root
from lineattn.tasks.data.legend import Legend, read_legend
from lineattn.tasks.data.masks import MaskRule, RuleName, find_rule, nearest_rule
from lineattn.tasks.data.pairs import FilePairs, SegSplits, by_name, match, of_files
from lineattn.tasks.data.reading import EXTENSIONS

_EXAMPLE = "expected ROOT/images/NAME.jpg and ROOT/masks/NAME.png, or the two in ROOT/train, ROOT/val, ROOT/test"


def load(
    root: str | None,
    *,
    channels: int,
    classes_file: str | None = None,
    masks: RuleName | None = None,
    on_fault: OnFault = stop,
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
        on_fault: What to do where images and masks make no pairs, or need class names.

    Raises:
        InputError: The folder is missing or not of that form, or the class names are wrong.
    """
    folder = find_root(root, _EXAMPLE)
    names = Path(classes_file) if classes_file else folder / "classes.txt"
    legend = read_legend(names) if classes_file or names.exists() else None
    notices: list[str] = []
    splits = _by_list(folder, notices, on_fault) or _by_folder(folder, notices, on_fault)
    if "train" not in splits:
        raise InputError(f"--data.root {folder} has {next(iter(splits))} images but none to train on: {_EXAMPLE}")
    rule, more = settled(splits, legend, masks, on_fault)
    return of_files(splits, rule, channels=channels, notices=[*notices, *more])


def settled(
    splits: Mapping[str, FilePairs], legend: Legend | None, kind: RuleName | None, on_fault: OnFault
) -> tuple[MaskRule, list[str]]:
    """The rule of `find_rule`, and its notices; after a fault that didn't stop, the rule that fits most masks."""
    masks = {split: [mask for _, mask in pairs] for split, pairs in splits.items()}
    files = masks.pop("train")
    try:
        return find_rule(files, legend, kind, [mask for other in masks.values() for mask in other])
    except InputError as error:
        if kind is not None:  # stated, and no fault of the masks
            raise
        on_fault(error)
        return nearest_rule(files, legend), []


def read_list(file: Path, *, on_fault: OnFault = stop) -> list[str]:
    """Names of images, one a line, each once, else it is a fault; an image's format after the name is taken off."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the names of images in {file}: {error}; save it as UTF-8") from error
    names = [_bare(line.strip()) for line in lines if line.strip()]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        on_fault(Fault("listed_twice", f"{file} names ", twice, "image", " twice: take one out"))
    return list(dict.fromkeys(names))


def _bare(name: str) -> str:
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in EXTENSIONS else name


def _by_list(folder: Path, notices: list[str], on_fault: OnFault) -> dict[str, FilePairs]:
    lists = find_parts(folder, ".txt")
    if not lists or not _holds_pairs(folder):
        return {}
    images, masks = (by_name(folder / kind, on_fault=on_fault) for kind in ("images", "masks"))
    names = {split: read_list(file, on_fault=on_fault) for split, file in lists.items()}
    if unlisted := images.keys() - {name for split in names.values() for name in split}:
        notices.append(f"{len(unlisted):,} images of {folder / 'images'} are in no list: left out")
    for split in ("val", "test"):
        if common := set(names.get("train", [])) & set(names.get(split, [])):
            notices.append(f"{len(common):,} images are in {lists['train'].name} and in {lists[split].name}")
    return {split: match(images, masks, names[split], place=lists[split], on_fault=on_fault) for split in lists}


def _by_folder(folder: Path, notices: list[str], on_fault: OnFault) -> dict[str, FilePairs]:
    if not _holds_pairs(folder):
        parts = find_parts(folder)
        for part in parts.values():
            if not _holds_pairs(part):
                on_fault(InputError(f"no images/ and masks/ in {part}: {_EXAMPLE}"))
        if not any(map(_holds_pairs, parts.values())):
            raise InputError(f"no images/ and masks/ in {folder}, and no train/: {_EXAMPLE}")
        places = {split: (part / "images", part / "masks") for split, part in parts.items() if _holds_pairs(part)}
    else:
        images, masks = find_parts(folder / "images"), find_parts(folder / "masks")
        if images and images.keys() == {"test"} | masks.keys() != masks.keys():
            notices.append(f"{images.pop('test')} has no masks: there is no test split")
        if images and (strange := sorted(images.keys() ^ masks.keys())):
            whose = f"{folder / 'images'} and {folder / 'masks'} differ in the folder of "
            on_fault(Fault("no_folder", whose, strange, "split", ""))
        places = {split: (images[split], masks[split]) for split in images if split in masks}
        places = places if images else {"train": (folder / "images", folder / "masks")}
    return {split: match_folders(*pair, on_fault) for split, pair in places.items()}


def match_folders(images: Path, masks: Path, on_fault: OnFault) -> FilePairs:
    """All images of a folder with their masks of another."""
    found = by_name(images, on_fault=on_fault)
    return match(found, by_name(masks, on_fault=on_fault), place=images, on_fault=on_fault)


def _holds_pairs(folder: Path) -> bool:
    return (folder / "images").is_dir() and (folder / "masks").is_dir()
