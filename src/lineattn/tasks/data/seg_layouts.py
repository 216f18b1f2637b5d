"""Segmentation data sets in the folders that they come in: ISIC, PASCAL VOC, ADE20K, Cityscapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lineattn.errors import InputError, unknown
from lineattn.tasks.data import seg_folder
from lineattn.tasks.data.faults import OnFault, stop
from lineattn.tasks.data.folder import find_root
from lineattn.tasks.data.legend import ADE20K, BINARY, CITYSCAPES, IGNORE, VOC, read_legend
from lineattn.tasks.data.masks import MaskRule, RuleName, read_mask
from lineattn.tasks.data.pairs import FilePairs, SegSplits, by_name, match, of_files
from lineattn.tasks.data.seg_folder import match_folders, read_list, settled

_ISIC = "expected ISIC2018_Task1-2_Training_Input and ISIC2018_Task1_Training_GroundTruth in ROOT"
_VOC = "expected ROOT/VOCdevkit/VOC2012 with JPEGImages, SegmentationClass and ImageSets/Segmentation/train.txt"
_ADE20K = "expected ROOT/ADEChallengeData2016 with images/training and annotations/training"
_CITYSCAPES = "expected ROOT/leftImg8bit/train/CITY and ROOT/gtFine/train/CITY"
NAMES = ("folder", "isic", "voc", "ade20k", "cityscapes")


def load(
    name: str,
    root: str | None,
    *,
    channels: int,
    classes_file: str | None = None,
    masks: RuleName | None = None,
    on_fault: OnFault = stop,
) -> SegSplits:
    """A data set on disk by the name of its layout; what the others are is said where each is loaded.

    Args:
        name: One of `NAMES`.
        root: The folder.
        channels: 1 or 3; images are converted.
        classes_file: For ``folder`` and ``voc``.
        masks: For ``folder``.
        on_fault: What to do where images and masks make no pairs.

    Raises:
        InputError: No such layout, an argument that is for others, or the folder isn't of that form.
    """
    refuse_misplaced(name, classes_file=classes_file, masks=masks)
    if name == "folder":
        return seg_folder.load(root, channels=channels, classes_file=classes_file, masks=masks, on_fault=on_fault)
    if name == "voc":
        return load_voc(root, channels=channels, classes_file=classes_file, on_fault=on_fault)
    others: dict[str, Callable[..., SegSplits]] = {
        "isic": load_isic,
        "ade20k": load_ade20k,
        "cityscapes": load_cityscapes,
    }
    if name not in others:
        raise unknown("data set", name, NAMES)
    return others[name](root, channels=channels, on_fault=on_fault)


def refuse_misplaced(name: str, *, classes_file: str | None, masks: RuleName | None) -> None:
    """Raises `InputError` for an option that the layout has no use for."""
    for option, value, names in (("classes_file", classes_file, ("folder", "voc")), ("masks", masks, ("folder",))):
        if value is not None and name not in names:
            raise InputError(f"--data.{option} {value}: for the data set {' and '.join(names)}, not {name}")


def load_isic(root: str | None, *, channels: int, on_fault: OnFault = stop) -> SegSplits:
    """Lesion boundaries of ISIC 2016 to 2018: the folders of images and of masks as they are unpacked.

    Args:
        root: The folder above them.
        channels: 1 or 3; images are converted.
        on_fault: What to do where images and masks make no pairs.

    Raises:
        InputError: A folder is missing.
    """
    folder = find_root(root, _ISIC)
    splits: dict[str, FilePairs] = {}
    notices: list[str] = []
    for split, name in (("train", "Training"), ("val", "Validation"), ("test", "Test")):
        images, masks = _isic_folder(folder, f"{name}*_Input", f"{name}*_Data"), _isic_masks(folder, name)
        if images and masks:
            # In 2017 the superpixels lie beside the images.
            there, theirs = (by_name(place, on_fault=on_fault) for place in (images, masks))
            files = {key: file for key, file in there.items() if not key.endswith("_superpixels")}
            splits[split] = match(files, theirs, place=images, on_fault=on_fault)
        elif images:
            notices.append(f"{images} has no folder of masks beside it: left out")
    if "train" not in splits:
        raise InputError(f"no images with masks to train on in {folder}: {_ISIC}")
    rule, more = settled(splits, BINARY, None, on_fault)
    return of_files(splits, rule, channels=channels, notices=[*notices, *more])


def _isic_folder(folder: Path, *patterns: str) -> Path | None:
    return next((entry for pattern in patterns for entry in sorted(folder.glob(f"IS*_{pattern}"))), None)


def _isic_masks(folder: Path, name: str) -> Path | None:
    # The other tasks of the challenge come in folders of like names.
    found = [entry for entry in sorted(folder.glob(f"IS*_{name}*_GroundTruth")) if "Task2" not in entry.name]
    return next((entry for entry in found if not any(part in entry.name for part in ("Part2", "Part3"))), None)


def load_voc(
    root: str | None, *, channels: int, classes_file: str | None = None, on_fault: OnFault = stop
) -> SegSplits:
    """PASCAL VOC, or another set in its folders: lists of names, palette masks, void 255.

    Args:
        root: The folder with VOCdevkit, or one in it.
        channels: 1 or 3; images are converted.
        classes_file: Names of the classes (see `read_legend`); by default classes.txt in the root or beside JPEGImages
            where there is one, and else VOC's 21 classes.
        on_fault: What to do where images and masks make no pairs.

    Raises:
        InputError: A folder or a list is missing, or the class names are wrong.
    """
    folder = find_root(root, _VOC)
    places = [
        *sorted(folder.glob("VOCdevkit/VOC20*"), reverse=True),
        *sorted(folder.glob("VOC20*"), reverse=True),
        folder,
    ]
    base = next((place for place in places if (place / "SegmentationClass").is_dir()), None)
    if base is None:
        raise InputError(f"no SegmentationClass in {folder}: {_VOC}")
    lists = {split: base / "ImageSets" / "Segmentation" / f"{split}.txt" for split in ("train", "val", "test")}
    if not lists["train"].is_file() or not (base / "JPEGImages").is_dir():
        raise InputError(f"no {lists['train']}, or no JPEGImages: {_VOC}")
    given = [Path(classes_file)] if classes_file else [folder / "classes.txt", base / "classes.txt"]
    file = next((file for file in given if classes_file or file.is_file()), None)
    rule = MaskRule("index", read_legend(file) if file else VOC)
    images, masks = (by_name(base / kind, on_fault=on_fault) for kind in ("JPEGImages", "SegmentationClass"))
    notices: list[str] = []
    splits: dict[str, FilePairs] = {}
    for split, file in lists.items():
        names = read_list(file, on_fault=on_fault) if file.is_file() else []
        if split == "test" and not masks.keys() & names:
            if names:
                notices.append(f"the images of {file} have no masks: there is no test split")
        elif names:
            splits[split] = match(images, masks, names, place=file, on_fault=on_fault)
    if "train" not in splits:
        raise InputError(f"{lists['train']} names no images: {_VOC}")
    return of_files(splits, rule, channels=channels, notices=notices)


def load_ade20k(root: str | None, *, channels: int, on_fault: OnFault = stop) -> SegSplits:
    """ADE20K as in its scene parsing challenge: 150 classes, pixels without a label ignored.

    Args:
        root: The folder with ADEChallengeData2016, or that one.
        channels: 1 or 3; images are converted.
        on_fault: What to do where images and masks make no pairs.

    Raises:
        InputError: A folder is missing.
    """
    folder = find_root(root, _ADE20K)
    base = next(
        (place for place in (folder / "ADEChallengeData2016", folder) if (place / "annotations").is_dir()), None
    )
    if base is None or not (base / "annotations" / "training").is_dir():
        raise InputError(f"no annotations/training in {folder}: {_ADE20K}")
    splits = {
        split: match_folders(base / "images" / name, base / "annotations" / name, on_fault)
        for split, name in (("train", "training"), ("val", "validation"))
        if (base / "annotations" / name).is_dir()
    }
    return of_files(splits, MaskRule("index", ADE20K), channels=channels, notices=[])


def load_cityscapes(root: str | None, *, channels: int, on_fault: OnFault = stop) -> SegSplits:
    """Cityscapes with fine labels: the 19 classes of its benchmark, all others ignored.

    Args:
        root: The folder with leftImg8bit and gtFine.
        channels: 1 or 3; images are converted.
        on_fault: What to do where images and masks make no pairs.

    Raises:
        InputError: A folder is missing.
    """
    folder = find_root(root, _CITYSCAPES)
    if not (folder / "leftImg8bit" / "train").is_dir() or not (folder / "gtFine" / "train").is_dir():
        raise InputError(f"no leftImg8bit/train or no gtFine/train in {folder}: {_CITYSCAPES}")
    rule = MaskRule("index", CITYSCAPES)
    splits: dict[str, FilePairs] = {}
    for split in ("train", "val", "test"):
        images, masks = folder / "leftImg8bit" / split, folder / "gtFine" / split
        if images.is_dir() and masks.is_dir():
            splits[split] = match(
                by_name(images, "_leftImg8bit", on_fault=on_fault),
                by_name(masks, "_gtFine_labelIds", on_fault=on_fault),
                place=images,
                on_fault=on_fault,
            )
    notices: list[str] = []
    if splits.get("test") and _withheld(splits["test"][0][1], rule):
        del splits["test"]
        notices.append("the labels of Cityscapes' test images are withheld: there is no test split")
    return of_files(splits, rule, channels=channels, notices=notices)


def _withheld(mask: Path, rule: MaskRule) -> bool:
    try:
        return bool((rule.classes(read_mask(mask), mask) == IGNORE).all())
    except InputError:  # which whoever reads the split will meet
        return False
