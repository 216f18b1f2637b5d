"""What is wrong with a data set of images, found before training is: nothing stops at the first fault."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lineattn.errors import InputError
from lineattn.tasks.data import cifar, folder
from lineattn.tasks.data.reading import EXTENSIONS, UnreadableImage, read_header, read_image
from lineattn.tasks.data.source import Pixels

_FEW = 10  # images of a split, below which its accuracy says little
_UNEVEN = 10.0  # largest class over smallest
_TINY, _HUGE = 16, 50_000_000  # pixels: of the shorter side, of the whole image
_CHUNK = 16  # images that a worker reads before it reports
_SLOW = 200  # images that are worth starting workers for


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


class _Look(NamedTuple):
    """What one file is; without ``size`` it could not be read, and ``fault`` says why."""

    mode: str
    size: tuple[int, int] | None
    digest: bytes | None
    fault: str


class _Entry(NamedTuple):
    """An image by name, split and class, and what it is."""

    name: str
    split: str
    label: str
    look: _Look


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
    entries: list[_Entry] = []
    for split, pixels in splits.items():
        assert isinstance(pixels, Pixels)
        entries += [
            _Entry(f"{split}[{i}]", split, found.classes[label], _Look("RGB", (32, 32), _digest(image), ""))
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
        Finding("hidden", False, _count(hidden, "hidden folder") + ": ignored", hidden),
        Finding("other_files", False, _count(others, "file") + " without the name of an image: ignored", others),
        Finding("stray", False, _count(strays, "image") + " beside the class folders, of no class: ignored", strays),
    ]
    looks: list[_Look] = []
    for look in _read([path for path, _, _ in files], fast):
        looks.append(look)
        tell(len(looks), len(files))
    entries = [_Entry(str(path), split, label, look) for (path, split, label), look in zip(files, looks, strict=True)]
    return _judge(entries, classes, [note for note in notes if note.items])


class _Files(Dataset[_Look]):
    def __init__(self, paths: Sequence[Path], fast: bool) -> None:
        self.paths, self.fast = paths, fast

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> _Look:
        path = self.paths[index]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata; the pixels count
            try:
                mode, size = read_header(path)
                return _Look(mode, size, None if self.fast else _digest(read_image(path, 3)), "")
            except UnreadableImage as error:
                return _Look("", None, None, str(error).removeprefix("cannot read the image ").split(": repair", 1)[0])


def _read(paths: Sequence[Path], fast: bool) -> Iterator[_Look]:
    workers = 0 if len(paths) < _SLOW else (os.cpu_count() or 1)
    loader = DataLoader(
        _Files(paths, fast),
        batch_size=_CHUNK,
        num_workers=workers,
        collate_fn=list,  # pyright: ignore[reportArgumentType] - plain values, not tensors
    )
    for looks in loader:
        yield from looks


def _digest(pixels: Tensor) -> bytes:
    """The same for the same pixels, in whatever format they are stored."""
    found = blake2b(str(tuple(pixels.shape)).encode(), digest_size=16)
    found.update(pixels.contiguous().numpy().tobytes())
    return found.digest()


def _judge(entries: Sequence[_Entry], classes: dict[str, list[str]], notes: list[Finding]) -> Survey:
    counts = {split: dict.fromkeys(names, 0) for split, names in classes.items()}
    for entry in entries:
        counts[entry.split][entry.label] += 1
    good = [entry for entry in entries if entry.look.size is not None]
    areas = sorted(((entry.look.size or (0, 0)) for entry in good), key=lambda size: (size[0] * size[1], size))
    found = Survey(
        counts,
        dict(Counter(entry.look.mode for entry in good).most_common()),
        [areas[0], areas[len(areas) // 2], areas[-1]] if areas else [],
        [],
    )
    findings = [*_faults(entries), *_class_faults(counts), *_twins(good), *_extremes(good, found), *notes]
    found.findings.extend(sorted(findings, key=lambda finding: not finding.serious))
    return found


def _faults(entries: Sequence[_Entry]) -> Iterator[Finding]:
    if broken := [entry.look.fault for entry in entries if entry.look.size is None]:
        yield Finding("unreadable", True, _count(broken, "file") + " unreadable: training stops there", broken)


def _class_faults(counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    train = counts["train"]
    if empty := [
        f"{split}/{name}" for split, classes in counts.items() for name, count in classes.items() if not count
    ]:
        yield Finding("empty_class", True, _count(empty, "class folder") + " without images", empty)
    if len(train) == 1:
        yield Finding("one_class", True, "one class alone: there is nothing to tell apart", list(train))
    for split, classes in counts.items():
        if strange := sorted(classes.keys() - train.keys()):
            yield Finding("unknown_class", True, f"{_count(strange, 'class')} of {split} unknown to train", strange)
        if missing := sorted(train.keys() - classes.keys()):
            yield Finding("missing_class", True, f"{_count(missing, 'class')} of train missing in {split}", missing)
        total = sum(classes.values())
        if split != "train" and total < max(_FEW, len(train)):
            yield Finding("few", True, f"{split} has {total} images for {len(train)} classes: too few to tell", [])


def _twins(entries: Sequence[_Entry]) -> Iterator[Finding]:
    groups: dict[bytes, list[_Entry]] = {}
    for entry in entries:
        if entry.look.digest is not None:
            groups.setdefault(entry.look.digest, []).append(entry)
    leaks: list[str] = []
    torn: list[str] = []
    rest: list[str] = []
    for group in groups.values():
        if len(group) > 1:
            across = len({entry.split for entry in group}) > 1
            same = len({entry.label for entry in group}) == 1
            (leaks if across else rest if same else torn).append(" = ".join(entry.name for entry in group))
    if leaks:
        yield Finding(
            "leak",
            True,
            _count(leaks, "image") + " in more than one split: accuracy on them is not of unseen images",
            leaks,
        )
    if torn:
        yield Finding("two_classes", True, _count(torn, "image") + " in more than one class", torn)
    if rest:
        yield Finding("twice", False, _count(rest, "image") + " there more than once", rest)


def _extremes(entries: Sequence[_Entry], found: Survey) -> Iterator[Finding]:
    sized = [(entry.name, *(entry.look.size or (0, 0))) for entry in entries]
    if tiny := [f"{name} ({width}x{height})" for name, width, height in sized if min(width, height) < _TINY]:
        yield Finding("tiny", False, f"{_count(tiny, 'image')} with a side below {_TINY} pixels", tiny)
    if huge := [f"{name} ({width}x{height})" for name, width, height in sized if width * height > _HUGE]:
        yield Finding(
            "huge", False, f"{_count(huge, 'image')} above {_HUGE // 1_000_000} million pixels: slow to read", huge
        )
    if found.imbalance > _UNEVEN:
        yield Finding("uneven", False, f"the largest class is {found.imbalance:.0f} times the smallest", [])


def _count(items: Sequence[str], of: str) -> str:
    plural = {"class": "classes"}.get(of, f"{of}s")
    return f"{len(items):,} {of if len(items) == 1 else plural}"
