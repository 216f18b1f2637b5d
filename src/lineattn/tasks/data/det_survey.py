"""What is wrong with a data set of COCO's format, found before training is: nothing stops at the first fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import Dataset

from lineattn.errors import InputError
from lineattn.tasks.data.coco import bare, object_mask
from lineattn.tasks.data.coco_json import Annotations, CocoImage, CocoObject, flaw_text, read_annotations
from lineattn.tasks.data.coco_layouts import agreed, find_splits, images_folder
from lineattn.tasks.data.survey import (
    Entry,
    Finding,
    Look,
    by_kind,
    by_weight,
    counted,
    extremes,
    faults,
    few,
    look,
    modes,
    read_all,
    sizes,
    twins,
)

_TINY = 2.0  # pixels of a box's side; what is below is rarely meant
_TORN = "two_labels", "listed more than once with other objects"


@dataclass(frozen=True)
class DetSurvey:
    """A data set for detection as it is found; boxes that training drops are not counted.

    Attributes:
        classes: Their names.
        counts: Images of each split; those that can't be read count too.
        objects: Objects of each class of each split, without crowds.
        crowds: Crowds of each split.
        empty: Images of each split without objects.
        masks: Objects of each split that have a mask.
        modes: How many images are of which of Pillow's modes.
        sizes: Width and height of the smallest, the median and the largest image, by area; empty if none was read.
        findings: What is wrong, serious faults first.
    """

    classes: list[str]
    counts: dict[str, int]
    objects: dict[str, dict[str, int]]
    crowds: dict[str, int]
    empty: dict[str, int]
    masks: dict[str, int]
    modes: dict[str, int]
    sizes: list[tuple[int, int]]
    findings: list[Finding]


class _Item(NamedTuple):
    """An image by its file and split, and what is said of it."""

    path: Path
    split: str
    entry: CocoImage


class _Seen(NamedTuple):
    """What an image is; how its size differs, and which of its masks are broken or hold no pixel."""

    image: Look
    size: str
    broken: list[str]
    blank: list[str]


def survey(root: str, *, fast: bool = False, tell: Callable[[int, int], None] = lambda done, total: None) -> DetSurvey:
    """Reads all annotations, every image and every mask.

    Args:
        root: The folder, in one of the layouts of `lineattn.tasks.data.coco_layouts`.
        fast: Read the headers of images alone: broken pixels, broken masks, and images that are there twice in other
            files are not found; of sizes only what turning an image doesn't mend.
        tell: Is told how many images are done, and of how many.

    Raises:
        InputError: There is no data set of that format at ``root``, or a file of annotations can't be read.
    """
    found: list[InputError] = []
    places, notices = find_splits(root)
    files = {split: read_annotations(place.annotations, on_fault=found.append) for split, place in places.items()}
    items: list[_Item] = []
    try:
        agreed(files)
    except InputError as error:
        found.append(error)
    for split, file in files.items():
        try:
            folder = images_folder(places[split], file)
        except InputError as error:
            found.append(error)
            continue
        items += [_Item(folder / entry.file_name, split, entry) for entry in file.images]
    masked = not fast and find_spec("pycocotools") is not None
    if not fast and not masked:
        notices.append("masks were not read, which needs pycocotools: pip install 'lineattn[detection]'")
    seen: list[_Seen] = []
    for one in read_all(_Files(items, fast, masked)):
        seen.append(one)
        tell(len(seen), len(items))
    notes = [Finding("notice", False, notice, []) for notice in notices]
    return _judge(files, items, seen, [*by_kind(found), *notes])


class _Files(Dataset[_Seen]):
    def __init__(self, items: Sequence[_Item], fast: bool, masked: bool) -> None:
        self.items, self.fast, self.masked = items, fast, masked

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> _Seen:
        path, _, entry = self.items[index]
        image, pixels = look(path, self.fast)
        if self.fast and image.size is not None:
            # What is known of a file by its header is where it lies: two splits may list it.
            image = image._replace(digest=str(path.resolve()).encode())
        size = image.size if pixels is None else (pixels.shape[2], pixels.shape[1])
        differing = ""
        if size is not None and sorted(size) != sorted((entry.width, entry.height)):
            differing = f"{path} ({size[0]}x{size[1]}; its annotations say {entry.width}x{entry.height})"
        elif pixels is not None and image.size is not None and (entry.width, entry.height) not in (size, image.size):
            differing = f"{path} (on its side; its annotations say {entry.width}x{entry.height})"
        broken, blank = self._masks(entry) if self.masked else ([], [])
        return _Seen(image, differing, broken, blank)

    def _masks(self, entry: CocoImage) -> tuple[list[str], list[str]]:
        broken: list[str] = []
        blank: list[str] = []
        for found in entry.objects:
            if found.segmentation is None:
                continue
            try:
                if not object_mask(entry, found).any():
                    blank.append(_name(entry, found))
            except InputError as error:
                broken.append(str(error).split(": mend", 1)[0])
        return broken, blank


def _judge(
    files: Mapping[str, Annotations], items: Sequence[_Item], seen: Sequence[_Seen], findings: list[Finding]
) -> DetSurvey:
    looks = [one.image for one in seen]
    objects: dict[str, dict[str, int]] = {}
    for split, file in files.items():
        names = list(file.categories.values())
        labels = Counter(found.label for image in file.images for found in image.objects if not found.crowd)
        objects[split] = {name: labels[label] for label, name in enumerate(names, start=1)}
    totals = {split: len(file.images) for split, file in files.items()}
    empty = {split: [image.file_name for image in file.images if _empty(image)] for split, file in files.items()}
    without = {split: bare(file) for split, file in files.items()}
    survey = DetSurvey(
        list(files["train"].categories.values()),
        totals,
        objects,
        {split: sum(found.crowd for image in file.images for found in image.objects) for split, file in files.items()},
        {split: len(names) for split, names in empty.items()},
        {split: sum(objects[split].values()) - len(names) for split, names in without.items()},
        modes(looks),
        sizes(looks),
        [],
    )
    entries = [
        Entry(str(item.path), item.split, str(sorted(map(str, item.entry.objects))), image)
        for item, image in zip(items, looks, strict=True)
    ]
    findings += [*faults(entries), *_size_and_mask_faults(seen), *_box_faults(files)]
    findings += _class_faults(objects)
    if names := [name for part in empty.values() for name in part]:
        findings.append(Finding("empty_image", False, counted(names, "image") + " without objects: negatives", names))
    names = [name for part in without.values() for name in part]
    if names and any(survey.masks.values()):
        findings.append(
            Finding("no_mask", False, counted(names, "object") + " without a mask: masks are left out of all", names)
        )
    findings += [*few(totals, len(survey.classes)), *twins(entries, _TORN), *extremes(entries)]
    survey.findings.extend(by_weight(findings))
    return survey


def _size_and_mask_faults(seen: Sequence[_Seen]) -> Iterator[Finding]:
    if wrong := [one.size for one in seen if one.size]:
        yield Finding(
            "size", True, counted(wrong, "image") + " of another size than annotations say: training stops", wrong
        )
    if broken := [name for one in seen for name in one.broken]:
        yield Finding("broken_mask", True, counted(broken, "mask") + " broken: training with masks stops", broken)
    if blank := [name for one in seen for name in one.blank]:
        yield Finding("blank_mask", False, counted(blank, "mask") + " without a pixel", blank)


def _box_faults(files: Mapping[str, Annotations]) -> Iterator[Finding]:
    kinds = {kind for file in files.values() for kind in file.flaws}
    for kind in sorted(kinds):
        if flawed := [item for file in files.values() for item in file.flaws.get(kind, [])]:
            yield Finding(kind, False, flaw_text(kind, flawed), flawed)
    if tiny := [
        _name(image, found)
        for file in files.values()
        for image in file.images
        for found in image.objects
        if min(found.box[2:]) < _TINY
    ]:
        yield Finding("tiny_box", False, counted(tiny, "box") + f" with a side below {_TINY:.0f} pixels", tiny)


def _class_faults(objects: Mapping[str, dict[str, int]]) -> Iterator[Finding]:
    there = {split: {name for name, count in classes.items() if count} for split, classes in objects.items()}
    train, anywhere = there["train"], set().union(*there.values())
    if not train:
        yield Finding("no_objects", True, "train has no objects: there is nothing to learn", [])
    elif untrained := sorted(anywhere - train):
        text = counted(untrained, "category") + " with objects in other splits and none in train: not to be learnt"
        yield Finding("untrained_class", True, text, untrained)
    if absent := [name for name in objects["train"] if name not in anywhere]:
        yield Finding("absent_class", False, counted(absent, "category") + " without objects", absent)
    for split, classes in there.items():
        if missing := sorted(train - classes):
            text = f"{counted(missing, 'category')} of train without objects in {split}: not scored there"
            yield Finding(f"missing_class_{split}", False, text, missing)


def _empty(image: CocoImage) -> bool:
    return all(found.crowd for found in image.objects)


def _name(image: CocoImage, found: CocoObject) -> str:
    return f"{image.file_name} (annotation {found.id})"
