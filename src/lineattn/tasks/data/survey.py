"""What is wrong with a data set of images, found before training is: nothing stops at the first fault."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lineattn.errors import InputError
from lineattn.tasks.data import cifar, folder
from lineattn.tasks.data.faults import Fault
from lineattn.tasks.data.reading import EXTENSIONS, UnreadableImage, read_header, read_image
from lineattn.tasks.data.source import Pixels

_FEW = 10  # images of a split, below which its accuracy says little
_UNEVEN = 10.0  # largest class over smallest
_TINY, _HUGE = 16, 50_000_000  # pixels: of the shorter side, of the whole image
_CHUNK = 16  # images that a worker reads before it reports
_SLOW = 200  # images that are worth starting workers for

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Finding:
    """One kind of fault.

    Attributes:
        kind: Its name, for programs.
        serious: Training would stop at it, or its figures would mislead; what is not serious is good to know.
        text: One line.
        items: The files, folders or classes that it is about.
    """

    kind: str
    serious: bool
    text: str
    items: list[str]


@dataclass(frozen=True)
class Survey:
    """A data set as it is found.

    Attributes:
        counts: Images of each class of each split; those that can't be read count too.
        modes: How many images are of which of Pillow's modes.
        sizes: Width and height of the smallest, the median and the largest image, by area; empty if none was read.
        findings: What is wrong, serious faults first.
    """

    counts: dict[str, dict[str, int]]
    modes: dict[str, int]
    sizes: list[tuple[int, int]]
    findings: list[Finding]

    @property
    def totals(self) -> dict[str, int]:
        """Images of each class over all splits, most first."""
        total: Counter[str] = Counter()
        for classes in self.counts.values():
            total.update(classes)
        return dict(total.most_common())

    @property
    def imbalance(self) -> float:
        """Images of the largest class of the training split over those of the smallest that has any."""
        found = [count for count in self.counts["train"].values() if count]
        return max(found) / min(found) if found else 1.0


class Look(NamedTuple):
    """What one file is; without ``size`` it could not be read, and ``fault`` says why."""

    mode: str
    size: tuple[int, int] | None
    digest: bytes | None
    fault: str


class Entry(NamedTuple):
    """An image by name and split, what it is labelled with, if that is known, and what it is."""

    name: str
    split: str
    label: str | None
    look: Look


def survey(root: str, *, fast: bool = False, tell: Callable[[int, int], None] = lambda done, total: None) -> Survey:
    """Reads every image of a folder or of a CIFAR set.

    Args:
        root: The folder, in one of the layouts of `lineattn.tasks.data.folder`, or the one of a CIFAR set.
        fast: Read the headers alone: broken pixels and images that are there twice are not found.
        tell: Is told how many images are done, and of how many.

    Raises:
        InputError: There is no data set at ``root``.
    """
    classes = cifar.find(Path(root))
    return _of_cifar(root, classes) if classes else _of_folder(root, fast, tell)


def _of_cifar(root: str, classes: int) -> Survey:
    found = cifar.load(root, classes=classes, image_size=32, channels=3, download=False)
    splits = {"train": found.train} | ({"test": found.test} if found.test else {})
    entries: list[Entry] = []
    for split, pixels in splits.items():
        assert isinstance(pixels, Pixels)
        entries += [
            Entry(f"{split}[{i}]", split, found.classes[label], Look("RGB", (32, 32), digest(image), ""))
            for i, (image, label) in enumerate(zip(pixels.images, pixels.labels, strict=True))
        ]
    notes = [Finding("part", False, notice, []) for notice in found.notices]
    return _judge(entries, {split: found.classes for split in splits}, notes)


def _of_folder(root: str, fast: bool, tell: Callable[[int, int], None]) -> Survey:
    places = folder.find_splits(root)
    classes: dict[str, list[str]] = {}
    files: list[tuple[Path, str, str]] = []
    hidden: list[str] = []
    others: list[str] = []
    strays: list[str] = []
    for split, place in places.items():
        inside, out_of_sight = folder.find_classes(place)
        hidden += map(str, out_of_sight)
        strays += sorted(str(file) for file in place.iterdir() if file.suffix.lower() in EXTENSIONS and file.is_file())
        classes[split] = [entry.name for entry in inside]
        for entry in inside:
            images, strange = folder.find_images(entry)
            others += map(str, strange)
            hidden += (str(path) for path in entry.rglob(".*") if path.is_dir())
            files += [(path, split, entry.name) for path in images]
    if not classes["train"]:
        raise InputError(f"no class folders in {places['train']}: expected CLASS/image.jpg there")
    notes = [
        Finding("hidden", False, counted(hidden, "hidden folder") + ": ignored", hidden),
        Finding("other_files", False, counted(others, "file") + " without the name of an image: ignored", others),
        Finding("stray", False, counted(strays, "image") + " beside the class folders, of no class: ignored", strays),
    ]
    looks: list[Look] = []
    for found in read_all(_Files([path for path, _, _ in files], fast)):
        looks.append(found)
        tell(len(looks), len(files))
    entries = [Entry(str(path), split, label, look) for (path, split, label), look in zip(files, looks, strict=True)]
    return _judge(entries, classes, [note for note in notes if note.items])


class _Files(Dataset[Look]):
    def __init__(self, paths: Sequence[Path], fast: bool) -> None:
        self.paths, self.fast = paths, fast

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Look:
        return look(self.paths[index], self.fast)[0]


def look(path: Path, fast: bool) -> tuple[Look, Tensor | None]:
    """What a file is, and its pixels as RGB, unless the header alone is read, or can't be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata; the pixels count
        try:
            mode, size = read_header(path)
            pixels = None if fast else read_image(path, 3)
        except UnreadableImage as error:
            return unreadable(error), None
    return Look(mode, size, None if pixels is None else digest(pixels), ""), pixels


def unreadable(error: UnreadableImage) -> Look:
    """What a file is that can't be read."""
    return Look("", None, None, error.fault.removeprefix("cannot read the image "))


def read_all(files: Dataset[_Kind]) -> Iterator[_Kind]:
    """The items of a sized data set in order, read by a worker a core where there are many."""
    count = len(files)  # pyright: ignore[reportArgumentType] - all of ours have a length
    loader = DataLoader(
        files,
        batch_size=_CHUNK,
        num_workers=0 if count < _SLOW else (os.cpu_count() or 1),
        collate_fn=list,  # pyright: ignore[reportArgumentType] - plain values, not tensors
    )
    for items in loader:
        yield from items


def digest(pixels: Tensor) -> bytes:
    """The same for the same pixels, in whatever format they are stored."""
    found = blake2b(str(tuple(pixels.shape)).encode(), digest_size=16)
    found.update(pixels.contiguous().numpy().tobytes())
    return found.digest()


def _judge(entries: Sequence[Entry], classes: dict[str, list[str]], notes: list[Finding]) -> Survey:
    counts = {split: dict.fromkeys(names, 0) for split, names in classes.items()}
    for entry in entries:
        assert entry.label is not None
        counts[entry.split][entry.label] += 1
    found = Survey(counts, modes([entry.look for entry in entries]), sizes([entry.look for entry in entries]), [])
    torn = "two_classes", "in more than one class"
    findings = [*faults(entries), *_class_faults(counts), *twins(entries, torn), *extremes(entries)]
    if found.imbalance > _UNEVEN:
        text = f"the largest class is {found.imbalance:.0f} times the smallest"
        findings.append(Finding("uneven", False, text, []))
    found.findings.extend(by_weight([*findings, *notes]))
    return found


def by_kind(found: Sequence[InputError]) -> Iterator[Finding]:
    """What keeps the files from being a data set: that of one kind together, and all names."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for fault in found:
        if isinstance(fault, Fault):
            groups.setdefault((fault.kind, fault.before, fault.of, fault.after), []).extend(fault.items)
        else:
            yield Finding("layout", True, str(fault), [])
    for (kind, before, of, after), items in groups.items():
        yield Finding(kind, True, f"{before}{counted(items, of)}{after}", items)


def by_weight(findings: Sequence[Finding]) -> list[Finding]:
    """Serious ones first."""
    return sorted(findings, key=lambda finding: not finding.serious)


def modes(looks: Sequence[Look]) -> dict[str, int]:
    """How many of what was read are of which mode, most first."""
    return dict(Counter(look.mode for look in looks if look.size is not None).most_common())


def sizes(looks: Sequence[Look]) -> list[tuple[int, int]]:
    """Width and height of the smallest, the median and the largest of what was read, if anything was."""
    found = sorted((look.size for look in looks if look.size is not None), key=lambda size: (size[0] * size[1], size))
    return [found[0], found[len(found) // 2], found[-1]] if found else []


def faults(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Files that can't be read."""
    if broken := [entry.look.fault for entry in entries if entry.look.size is None]:
        yield Finding("unreadable", True, counted(broken, "file") + " unreadable: training stops there", broken)


def few(totals: Mapping[str, int], classes: int, *, least: int = _FEW) -> Iterator[Finding]:
    """Splits of too few images to say how good a network is; `totals` are the images of each."""
    for split, total in totals.items():
        if split != "train" and total < least:
            yield Finding("few", True, f"{split} has {total} images for {classes} classes: too few to tell", [])


def _class_faults(counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    train = counts["train"]
    if empty := [
        f"{split}/{name}" for split, classes in counts.items() for name, count in classes.items() if not count
    ]:
        yield Finding("empty_class", True, counted(empty, "class folder") + " without images", empty)
    if len(train) == 1:
        yield Finding("one_class", True, "one class alone: there is nothing to tell apart", list(train))
    for split, classes in counts.items():
        if strange := sorted(classes.keys() - train.keys()):
            yield Finding("unknown_class", True, f"{counted(strange, 'class')} of {split} unknown to train", strange)
        if missing := sorted(train.keys() - classes.keys()):
            yield Finding("missing_class", True, f"{counted(missing, 'class')} of train missing in {split}", missing)
    totals = {split: sum(classes.values()) for split, classes in counts.items()}
    yield from few(totals, len(train), least=max(_FEW, len(train)))


def twins(entries: Sequence[Entry], torn: tuple[str, str]) -> Iterator[Finding]:
    """Images that are there more than once.

    Args:
        entries: The images.
        torn: Kind and text of the finding about those with more than one label.
    """
    groups: dict[bytes, list[Entry]] = {}
    for entry in entries:
        if entry.look.digest is not None:
            groups.setdefault(entry.look.digest, []).append(entry)
    leaks: list[str] = []
    differing: list[str] = []
    rest: list[str] = []
    for group in groups.values():
        if len(group) > 1:
            across = len({entry.split for entry in group}) > 1
            same = len({entry.label for entry in group if entry.label is not None}) <= 1
            (leaks if across else rest if same else differing).append(_together(group))
    if leaks:
        yield Finding(
            "leak",
            True,
            counted(leaks, "image") + " in more than one split: accuracy on them is not of unseen images",
            leaks,
        )
    if differing:
        yield Finding(torn[0], True, f"{counted(differing, 'image')} {torn[1]}", differing)
    if rest:
        yield Finding("twice", False, counted(rest, "image") + " there more than once", rest)


def _together(group: Sequence[Entry]) -> str:
    names = dict.fromkeys(entry.name for entry in group)
    splits = dict.fromkeys(entry.split for entry in group)
    return " = ".join(names) if len(names) > 1 else f"{group[0].name} in {' and '.join(splits)}"


def extremes(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Images that are tiny or huge."""
    sized = [(entry.name, *entry.look.size) for entry in entries if entry.look.size is not None]
    if tiny := [f"{name} ({width}x{height})" for name, width, height in sized if min(width, height) < _TINY]:
        yield Finding("tiny", False, f"{counted(tiny, 'image')} with a side below {_TINY} pixels", tiny)
    if huge := [f"{name} ({width}x{height})" for name, width, height in sized if width * height > _HUGE]:
        yield Finding(
            "huge", False, f"{counted(huge, 'image')} above {_HUGE // 1_000_000} million pixels: slow to read", huge
        )


def counted(items: Sequence[str], of: str) -> str:
    """A number and what it is of."""
    plural = {"class": "classes", "box": "boxes", "category": "categories"}.get(of, f"{of}s")
    return f"{len(items):,} {of if len(items) == 1 else plural}"
