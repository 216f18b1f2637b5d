"""What is wrong with a data set of images and masks, found before training is: nothing stops at the first fault."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lineattn.errors import InputError
from lineattn.tasks.data import seg_layouts
from lineattn.tasks.data.legend import IGNORE, has_background
from lineattn.tasks.data.masks import MaskRule, RuleName, read_mask
from lineattn.tasks.data.pairs import FilePairs, Pairs, SegSplits, fitted
from lineattn.tasks.data.reading import UnreadableImage, read_header
from lineattn.tasks.data.survey import (
    Entry,
    Finding,
    Look,
    by_kind,
    by_weight,
    counted,
    digest,
    extremes,
    faults,
    few,
    look,
    modes,
    read_all,
    sizes,
    twins,
    unreadable,
)

_TORN = "two_masks", "with more than one mask of other content"


@dataclass(frozen=True)
class SegSurvey:
    """A data set for segmentation as it is found; pixels and masks are those of pairs without a fault.

    Attributes:
        classes: Their names.
        counts: Pairs of each split; those that can't be read count too.
        pixels: Pixels of each class of each split; all 0 where headers alone were read.
        images: Masks of each split that each class is in.
        ignored: Pixels of each split that don't count.
        modes: How many images are of which of Pillow's modes.
        mask_modes: The same of the masks.
        sizes: Width and height of the smallest, the median and the largest image, by area; empty if none was read.
        findings: What is wrong, serious faults first.
    """

    classes: list[str]
    counts: dict[str, int]
    pixels: dict[str, dict[str, int]]
    images: dict[str, dict[str, int]]
    ignored: dict[str, int]
    modes: dict[str, int]
    mask_modes: dict[str, int]
    sizes: list[tuple[int, int]]
    findings: list[Finding]

    def share(self, split: str, name: str) -> float:
        """The part of a split's pixels that are of a class, of those that count; 0 where none does."""
        return self.pixels[split][name] / max(sum(self.pixels[split].values()), 1)


class _Look(NamedTuple):
    """What an image and its mask are; pixels of each class, and of what is ignored, where nothing is wrong."""

    image: Look
    mask: Look
    value: str
    size: str
    pixels: dict[int, int] | None


class _Pair(NamedTuple):
    """A pair by its files and split, and what it is."""

    image: Path
    mask: Path
    split: str
    look: _Look


def survey(
    name: str,
    root: str,
    *,
    classes_file: str | None = None,
    masks: RuleName | None = None,
    fast: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> SegSurvey:
    """Reads every image and mask of a data set.

    Args:
        name: Its layout, one of `lineattn.tasks.data.seg_layouts.NAMES`.
        root: Its folder.
        classes_file: See `lineattn.tasks.data.seg_layouts.load`.
        masks: See there.
        fast: Read the headers alone: broken pixels, what masks hold, and images that are there twice in other files are
            not found; of sizes only what turning an image doesn't mend.
        tell: Is told how many pairs are done, and of how many.

    Raises:
        InputError: There is no data set of that layout at ``root``, or its class names are wrong.
    """
    found: list[InputError] = []
    splits = seg_layouts.load(name, root, channels=3, classes_file=classes_file, masks=masks, on_fault=found.append)
    files: list[tuple[Path, Path, str]] = []
    rule: MaskRule | None = None
    for split, part in (("train", splits.train), ("val", splits.val), ("test", splits.test)):
        if part is not None:
            assert isinstance(part, Pairs)
            rule = part.rule
            files += [(image, mask, split) for image, mask in zip(part.images, part.masks, strict=True)]
    assert rule is not None
    pairs: list[_Pair] = []
    for seen in read_all(_Files([(image, mask) for image, mask, _ in files], rule, fast)):
        pairs.append(_Pair(*files[len(pairs)], seen))
        tell(len(pairs), len(files))
    notes = [Finding("notice", False, notice, []) for notice in splits.notices]
    return _judge(pairs, splits, [*by_kind(found), *notes], fast=fast)


class _Files(Dataset[_Look]):
    def __init__(self, files: FilePairs, rule: MaskRule, fast: bool) -> None:
        self.files, self.rule, self.fast = files, rule, fast

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> _Look:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata; the pixels count
            file, mask_file = self.files[index]
            image, pixels = look(file, self.fast)
            if self.fast:
                mask = look(mask_file, True)[0]
                # What is known of a file by its header is where it lies: lists may name it twice.
                image = image._replace(digest=str(file).encode() if image.size else None)
                return _Look(image, mask, "", _differing(image, mask, file, mask_file), None)
            return self._compared(image, pixels, file, mask_file)

    def _compared(self, image: Look, pixels: Tensor | None, file: Path, mask_file: Path) -> _Look:
        try:
            mode, size = read_header(mask_file)
            stored = read_mask(mask_file)
        except UnreadableImage as error:
            return _Look(image, unreadable(error), "", "", None)
        mask, value, differing = Look(mode, size, None, ""), "", ""
        classes: np.ndarray | None = None
        try:
            classes = self.rule.classes(stored, mask_file)
        except InputError as error:
            value = f"{mask_file} {str(error).removeprefix(f'the mask {mask_file} ').split(': ', 1)[0]}"
        if pixels is not None:
            try:
                upright = stored.values[..., 0] if stored.values.ndim == 3 else stored.values
                classes = fitted(upright if classes is None else classes, pixels.shape[1:], mask_file, file)
            except InputError as error:
                differing = str(error).removeprefix("the mask ").split(": store it", 1)[0]
        if pixels is None or classes is None or value or differing:
            return _Look(image, mask, value, differing, None)
        mask = mask._replace(digest=digest(torch.from_numpy(classes.copy())))
        numbers, counts = np.unique(classes, return_counts=True)
        return _Look(image, mask, "", "", dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def _differing(image: Look, mask: Look, file: Path, mask_file: Path) -> str:
    """Of headers, which don't say whether a camera was turned."""
    if image.size is None or mask.size is None or sorted(image.size) == sorted(mask.size):
        return ""
    (width, height), (other, another) = image.size, mask.size
    return f"{mask_file} ({other}x{another}) is not of the size of its image {file} ({width}x{height})"


def _judge(pairs: Sequence[_Pair], splits: SegSplits, findings: list[Finding], *, fast: bool) -> SegSurvey:
    parts = [split for split in ("train", "val", "test") if getattr(splits, split) is not None]
    names = splits.classes
    pixels = {split: dict.fromkeys(names, 0) for split in parts}
    images = {split: dict.fromkeys(names, 0) for split in parts}
    ignored = dict.fromkeys(parts, 0)
    for pair in pairs:
        for number, count in (pair.look.pixels or {}).items():
            if number == IGNORE:
                ignored[pair.split] += count
            else:
                pixels[pair.split][names[number]] += count
                images[pair.split][names[number]] += 1
    totals = Counter(pair.split for pair in pairs)
    looks = [pair.look for pair in pairs]
    entries = [Entry(str(pair.image), pair.split, _label(pair.look.mask), pair.look.image) for pair in pairs]
    found = SegSurvey(
        names,
        {split: totals[split] for split in parts},
        pixels,
        images,
        ignored,
        modes([one.image for one in looks]),
        modes([one.mask for one in looks]),
        sizes([one.image for one in looks]),
        [],
    )
    findings += faults([*entries, *(Entry(str(pair.mask), pair.split, None, pair.look.mask) for pair in pairs)])
    findings += _mask_faults(pairs, names)
    findings += [] if fast else _class_faults(found)
    findings += [*few(found.counts, len(names)), *twins(entries, _TORN), *extremes(entries)]
    found.findings.extend(by_weight(findings))
    return found


def _label(mask: Look) -> str | None:
    return None if mask.digest is None else mask.digest.hex()


def _mask_faults(pairs: Sequence[_Pair], names: Sequence[str]) -> Iterator[Finding]:
    if wrong := [pair.look.size for pair in pairs if pair.look.size]:
        yield Finding("size", True, counted(wrong, "mask") + " of another size than the image: training stops", wrong)
    if strange := [pair.look.value for pair in pairs if pair.look.value]:
        yield Finding(
            "value",
            True,
            counted(strange, "mask") + " with what is no class: mend it, name it in --data.classes_file, or say by "
            "--data.masks what values are",
            strange,
        )
    if ignored := [str(pair.mask) for pair in pairs if pair.look.pixels and pair.look.pixels.keys() == {IGNORE}]:
        yield Finding("ignored_mask", False, counted(ignored, "mask") + " wholly ignored", ignored)
    if has_background(names):
        whole = [(pair.mask, pair.look.pixels.keys() - {IGNORE}) for pair in pairs if pair.look.pixels is not None]
        if empty := [str(mask) for mask, classes in whole if classes == {0}]:
            yield Finding("empty_mask", False, f"{counted(empty, 'mask')} of {names[0]} alone", empty)


def _class_faults(found: SegSurvey) -> Iterator[Finding]:
    there = {split: [name for name, count in classes.items() if count] for split, classes in found.pixels.items()}
    for split, classes in there.items():
        if found.counts[split] and len(classes) < 2:
            what = f"{classes[0]} alone" if classes else "no class"
            yield Finding("one_class", True, f"the masks of {split} hold {what}: there is nothing to tell apart", [])
    anywhere = {name for classes in there.values() for name in classes}
    if untrained := [name for name in found.classes if name in anywhere and name not in there["train"]]:
        text = counted(untrained, "class") + " in masks of other splits and in none of train: not to be learnt"
        yield Finding("untrained_class", True, text, untrained)
    if absent := [name for name in found.classes if name not in anywhere]:
        yield Finding("absent_class", False, counted(absent, "class") + " in no mask", absent)
    for split, classes in there.items():
        if missing := [name for name in there["train"] if name not in classes]:
            text = f"{counted(missing, 'class')} of train in no mask of {split}: not scored there"
            yield Finding("missing_class", False, text, missing)
