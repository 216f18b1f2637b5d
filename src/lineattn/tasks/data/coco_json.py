"""A file of annotations as COCO writes them: read, checked, and cleaned of boxes that would mislead training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from lineattn.errors import InputError
from lineattn.tasks.data.faults import Fault, OnFault, some, stop
from lineattn.tasks.data.rle import Segmentation, checked

_LEAST = 0.01  # pixels; a side below that is none, also after it is scaled in single precision
_ROUNDING = 0.5  # pixels that a box may stick out before that is worth saying; COCO rounds its boxes
_FLAWS = {
    "degenerate": "without area dropped",
    "outside": "outside of the image dropped",
    "clipped": "reaching out of the image clipped",
    "duplicate": "there more than once, one of each kept",
}


class CocoObject(NamedTuple):
    """An annotation after cleaning; `label` counts from 1, `box` is x, y, width, height."""

    id: int
    label: int
    box: tuple[float, float, float, float]
    area: float
    crowd: bool
    segmentation: Segmentation | None


class CocoImage(NamedTuple):
    """An image as the file describes it."""

    id: int
    file_name: str
    width: int
    height: int
    objects: list[CocoObject]


@dataclass(frozen=True)
class Annotations:
    """What a file says.

    Attributes:
        path: The file.
        categories: The names of the categories by id, in the order of the ids.
        images: Its images, in its order; those without objects too.
        flaws: Boxes that were dropped or clipped, by the kind of flaw, each with its image.
    """

    path: Path
    categories: dict[int, str]
    images: list[CocoImage]
    flaws: dict[str, list[str]]

    @property
    def notices(self) -> list[str]:
        """One line a kind of flaw."""
        return [f"{self.path}: {flaw_text(kind, items)}: {some(items)}" for kind, items in self.flaws.items() if items]


def flaw_text(kind: str, items: Sequence[str]) -> str:
    """How many boxes have a flaw, and what became of them."""
    return f"{len(items):,} {'box' if len(items) == 1 else 'boxes'} {_FLAWS[kind]}"


def read_annotations(path: Path, *, on_fault: OnFault = stop) -> Annotations:
    """Reads and cleans a file; no image is opened.

    Boxes without area, outside of their image, or there twice in one category are dropped, those that reach out of
    their image are clipped.

    Args:
        path: The file.
        on_fault: What to do with what is no flaw but a fault. Where it doesn't stop, what it is about is left out.

    Raises:
        InputError: It is missing, or not what COCO writes.
    """
    content = _content(path)
    images = _images(path, content["images"], on_fault)
    categories = _categories(path, content["categories"])
    flaws: dict[str, list[str]] = {kind: [] for kind in _FLAWS}
    faults: dict[str, list[str]] = {}
    labels = {own: label for label, own in enumerate(categories, start=1)}
    seen: set[tuple[Any, ...]] = set()
    for place, given in enumerate(content["annotations"]):
        name, image, wrong = f"number {place}", None, ("broken", "no object of JSON")
        if isinstance(given, dict):
            name = f"annotation {given.get('id', f'number {place}')}"
            image, wrong = images.get(_whole(given.get("image_id"))), _fault(given, images, labels)
        segmentation = None
        if wrong is None and image is not None:
            segmentation, fault = checked(given.get("segmentation"), image.height, image.width)
            wrong = ("mask", f"{fault} for the image {image.file_name}, which is {image.width}x{image.height}")
            wrong = wrong if fault else None
        if wrong is not None or image is None:
            kind, text = wrong or ("broken", "")
            faults.setdefault(kind, []).append(f"{name} ({text})")
            continue
        box, flaw = _fitted(given["bbox"], image)
        label, crowd = labels[given["category_id"]], bool(given.get("iscrowd", 0))
        if box is not None and (key := (image.id, label, crowd, box)) in seen:
            box, flaw = None, "duplicate"
        elif box is not None:
            seen.add(key)
        if flaw:
            flaws[flaw].append(f"{image.file_name} ({name})")
        if box is not None:
            area = _area(given.get("area"), box, cut=flaw == "clipped")
            image.objects.append(CocoObject(given.get("id", place), label, box, area, crowd, segmentation))
    for kind, items in faults.items():
        before = f"{path}: {kind.replace('_', ' ')}: "
        on_fault(Fault(kind, before, items, "annotation", ": mend or remove it"))
    return Annotations(path, categories, list(images.values()), flaws)


def _content(path: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check its name") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}): export it again") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise InputError(f"{path} is no file of COCO's: it has no list {key!r}; export it as COCO JSON")
    return content


def _images(path: Path, given: Iterable[Any], on_fault: OnFault) -> dict[int, CocoImage]:
    """The images by id."""
    found: dict[int, CocoImage] = {}
    names: set[str] = set()
    broken: list[str] = []
    strange: list[str] = []
    twice: list[str] = []
    for place, image in enumerate(given):
        values = image if isinstance(image, dict) else {}
        own, width, height = (_whole(values.get(key)) for key in ("id", "width", "height"))
        name = values.get("file_name")
        if own is None or not width or not height or min(width, height) < 1 or not (isinstance(name, str) and name):
            broken.append(f"image {values.get('id', f'number {place}')}")
        elif _leads_out(name):
            strange.append(f"image {own} ({name})")
        elif own in found or name in names:
            twice.append(f"image {own} ({name})")
        else:
            names.add(name)
            found[own] = CocoImage(own, name, width, height, [])
    if broken:
        after = " without id, file_name, width and height as COCO has them: add them"
        on_fault(Fault("broken_image", f"{path}: ", broken, "image", after))
    if strange:
        on_fault(Fault("path", f"{path}: ", strange, "image", " outside of the data set: name files inside of it"))
    if twice:
        on_fault(Fault("listed_twice", f"{path}: ", twice, "image", " listed twice by id or file_name: keep one"))
    if not found and not (broken or strange or twice):
        on_fault(InputError(f"{path} lists no images: add some, or remove the file"))
    return found


def _categories(path: Path, given: Iterable[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for place, category in enumerate(given):
        values = category if isinstance(category, dict) else {}
        own, name = _whole(values.get("id")), values.get("name")
        if own is None or not (isinstance(name, str) and name):
            raise InputError(f"{path}: category {values.get('id', f'number {place}')} lacks an id or a name: add it")
        if own in found or name in found.values():
            raise InputError(f"{path}: category {own} ({name}) is there twice by id or name: keep one")
        found[own] = name
    if not found:
        raise InputError(f"{path} has no categories: add those that its annotations are of")
    return dict(sorted(found.items()))


def _fault(given: dict[str, Any], images: dict[int, CocoImage], labels: dict[int, int]) -> tuple[str, str] | None:
    """What keeps an annotation from being one: its kind, and in words."""
    if missing := [key for key in ("image_id", "category_id", "bbox") if key not in given]:
        return "missing_key", f"without {' and '.join(missing)}"
    if _whole(given["image_id"]) not in images:
        return "unknown_image", f"of the image {given['image_id']}, which is not listed"
    if _whole(given["category_id"]) not in labels:
        return "unknown_category", f"of the category {given['category_id']}, which is not listed"
    box = given["bbox"]
    if not (isinstance(box, list) and len(box) == 4 and all(isinstance(value, (int, float)) for value in box)):
        return "broken_box", "with a bbox that is not x, y, width, height"
    return None


def _fitted(given: Sequence[float], image: CocoImage) -> tuple[tuple[float, float, float, float] | None, str]:
    """A box inside of its image, or none; and its flaw, if it has one."""
    x, y, width, height = map(float, given)
    if not all(map(math.isfinite, given)) or min(width, height) < _LEAST:
        return None, "degenerate"
    left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + width, image.width), min(y + height, image.height)
    if min(right - left, bottom - top) < _LEAST:
        return None, "outside"
    out = max(left - x, top - y, x + width - right, y + height - bottom)
    inside = (x, y, width, height) if out <= 0 else (left, top, right - left, bottom - top)
    return inside, "clipped" if out > _ROUNDING else ""


def _area(given: Any, box: Sequence[float], *, cut: bool) -> float:
    """The area that sizes are told by: as given where that can be."""
    whole = box[2] * box[3]
    if not isinstance(given, (int, float)) or not given > 0:
        return whole
    return min(float(given), whole) if cut else float(given)


def _whole(value: Any) -> Any:
    """A whole number, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _leads_out(name: str) -> bool:
    """Whether a path is no plain one below a folder, on any system."""
    windows, posix = PureWindowsPath(name), PurePosixPath(name)
    return posix.is_absolute() or bool(windows.anchor) or ".." in windows.parts
