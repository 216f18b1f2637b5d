"""Masks from disk as class numbers: how pixel values become classes, and one line for each that fits no class."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from PIL import ImageOps
from PIL.PngImagePlugin import PngImageFile

from lineattn.errors import InputError, unknown
from lineattn.tasks.data.legend import BINARY, IGNORE, Legend
from lineattn.tasks.data.reading import UnreadableImage, open_image

RuleName = Literal["index", "binary", "threshold", "colour"]
_LOOK = 32  # masks that are looked at before training to find the rule
_MIDDLE = 127
_FORM = "one name a line, in the order of the values"
_PAINTED = "one line a class: NAME R G B"
# Pillow stretches grey values of two and four bits to 0..255, class numbers among them.
_STRETCHED = {"L;2": 85, "L;4": 17}


class Stored(NamedTuple):
    """A mask as the file has it.

    Attributes:
        values: Numbers, (H, W), bool in a file of one bit; or colours, (H, W, 3).
        palette: The colour of each number, (n, 3), in a palette file.
        lossy: The format changes values a little.
    """

    values: np.ndarray
    palette: np.ndarray | None
    lossy: bool


def read_mask(file: Path) -> Stored:
    """Decodes a mask without a change of its values: of a palette the numbers, of 16 bits all; painted greys as grey.

    Raises:
        UnreadableImage: The file is missing, no image, or broken.
    """
    with open_image(file) as image:
        lossy = image.format in ("JPEG", "MPO")
        # Before the pixels are loaded, which forgets it.
        tiles = image.tile if isinstance(image, PngImageFile) else []
        stretch = _STRETCHED.get(str(tiles[0].args), 1) if tiles else 1
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        palette = None
        if image.mode in ("LA", "PA"):
            image = image.getchannel(0)
        elif image.mode == "P":
            palette = np.array(image.getpalette("RGB"), dtype=np.uint8).reshape(-1, 3)
        elif image.mode not in ("1", "L", "I", "I;16", "I;16B", "I;16L", "F"):
            image = image.convert("RGB")
        values = np.array(image)
    if values.dtype.kind == "f":
        raise UnreadableImage(f"cannot read the mask {file} (fractions instead of classes): store it as PNG")
    if values.ndim == 3:
        spread = values.max(axis=2) - values.min(axis=2)
        if spread.max(initial=0) <= (16 if lossy else 0):
            values = values[..., 1]
    elif values.dtype not in (np.bool_, np.uint8):
        values = np.where(values == 65535, 255, values)  # all bits set means the same in eight and in sixteen
    return Stored(values // stretch if stretch > 1 else values, palette, lossy)


@dataclass(frozen=True)
class MaskRule:
    """How what a mask holds becomes class numbers.

    Args:
        kind: ``index``: values are numbers of entries in the legend, and 255 is ignored; ``binary``: 0 is background,
            255 foreground; ``threshold``: what is above 127 is foreground; ``colour``: by the legend's colours.
        legend: What the values stand for.

    Raises:
        InputError: The legend does not suit the kind.

    Example:
        >>> rule = MaskRule("index", Legend(("void", "road", "car")))
        >>> rule.classes(Stored(np.array([[0, 1], [2, 255]], dtype=np.uint8), None, False), Path("a.png")).tolist()
        [[255, 0], [1, 255]]
    """

    kind: RuleName
    legend: Legend

    def __post_init__(self) -> None:
        if self.kind not in get_args(RuleName):
            raise unknown("rule of masks", self.kind, get_args(RuleName))
        if self.kind in ("binary", "threshold") and len(self.legend.entries) != 2:
            names = len(self.legend.entries)
            raise InputError(
                f"--data.masks {self.kind} is for two classes, and {names} are named: pass index or colour"
            )
        if self.kind == "colour" and self.legend.colours is None:
            raise InputError(f"--data.masks colour needs the colours of the classes: list them, {_PAINTED}")

    def classes(self, mask: Stored, file: Path) -> np.ndarray:
        """The class of each pixel, (H, W), uint8.

        Raises:
            InputError: The mask holds what is no class; `file` is named.
        """
        if self.kind == "colour":
            return self._by_colour(mask, file)
        if mask.values.ndim == 3:
            raise InputError(
                f"the mask {file} is in colour, and no colours are known: list the classes in classes.txt, {_PAINTED}"
            )
        return self._by_value(mask, file) if self.kind == "index" else self._by_side(mask, file)

    def _by_value(self, mask: Stored, file: Path) -> np.ndarray:
        if mask.lossy:
            raise InputError(f"the mask {file} is a JPEG, which changes values: store class numbers as PNG")
        table = np.full(IGNORE + 2, -1, dtype=np.int16)
        table[: len(self.legend.entries)] = self.legend.targets
        table[IGNORE] = IGNORE
        inside = (mask.values >= 0) & (mask.values <= IGNORE)
        found = table[np.where(inside, mask.values, IGNORE + 1)]
        if (found < 0).any():
            strange = int(mask.values[found < 0].min())
            highest = len(self.legend.entries) - 1
            raise InputError(
                f"the mask {file} has the value {strange}, which is no class (0 to {highest}, and {IGNORE} for what is "
                "ignored): mend it, or name its class in classes.txt"
            )
        return found.astype(np.uint8)

    def _by_side(self, mask: Stored, file: Path) -> np.ndarray:
        values = _grey(mask.values)
        if self.kind == "binary" and not mask.lossy and (strange := values[(values != 0) & (values != 255)]).size:
            raise InputError(
                f"the mask {file} has the value {strange.flat[0]} where the others have 0 and 255: mend it, or pass "
                f"--data.masks threshold to take what is above {_MIDDLE} as {self.legend.entries[1]}"
            )
        return (values > _MIDDLE).astype(np.uint8)

    def _by_colour(self, mask: Stored, file: Path) -> np.ndarray:
        if mask.lossy:
            raise InputError(f"the mask {file} is a JPEG, which changes colours: store it as PNG")
        pixels = _painted(mask)
        codes = _codes(np.array(self.legend.colours, dtype=np.uint8))
        order = np.argsort(codes)
        place = np.searchsorted(codes[order], _codes(pixels)).clip(max=len(codes) - 1)
        known = codes[order][place] == _codes(pixels)
        if not known.all():
            red, green, blue = pixels[~known][0].tolist()
            raise InputError(
                f"the mask {file} has the colour {red} {green} {blue}, which is of no class: mend it, or add a line "
                f"'NAME {red} {green} {blue}' to the class names (the name void ignores it)"
            )
        return np.array(self.legend.targets, dtype=np.uint8)[order][place]


def find_rule(
    masks: Sequence[Path], legend: Legend | None, kind: RuleName | None, others: Sequence[Path] = ()
) -> tuple[MaskRule, list[str]]:
    """The rule of a data set, from what is stated and what some of its masks hold; and notices for the user.

    Args:
        masks: The masks of the training split.
        legend: What is known of the classes; without it, the masks must be of background and foreground.
        kind: The rule, where the user states it.
        others: The masks of the other splits.

    Raises:
        InputError: The masks don't tell: they need class names, or colours.
    """
    if kind is not None:
        if kind == "index" and legend is None:
            raise InputError(f"--data.masks index needs class names: list them in classes.txt, {_FORM}")
        return MaskRule(kind, legend or BINARY), []
    seen = _look(masks, legend)
    meant = legend or BINARY
    entries = len(meant.entries)
    if legend and legend.colours and (seen.painted or seen.matching):
        return MaskRule("colour", legend), []
    if seen.painted:
        raise InputError(f"the mask {seen.painted} is in colour: list the classes in classes.txt, {_PAINTED}")
    if seen.lossy:
        if entries != 2:
            raise InputError(
                f"the mask {seen.lossy} is a JPEG, which changes values: store the numbers of {entries} classes as PNG"
            )
        notice = (
            f"masks are JPEG, {seen.between:.2%} of their pixels neither 0 nor 255: above {_MIDDLE} is "
            f"{meant.entries[1]}, the rest {meant.entries[0]}"
        )
        return MaskRule("binary", meant), [notice] if seen.between else []
    strange = {value: file for value, file in seen.values.items() if value not in (0, IGNORE)}
    if legend is None and (more := strange.keys() - {1}):
        raise InputError(
            f"the mask {strange[max(more)]} has the value {max(more)}, and there are no class names: list them in "
            f"classes.txt, {_FORM}; or pass --data.masks threshold to take what is above {_MIDDLE} as foreground"
        )
    if entries == 2 and IGNORE in seen.values and strange.keys() != {1}:
        return MaskRule("binary", meant), [f"masks hold 0 and 255: taken as {' and '.join(meant.entries)}"]
    return MaskRule("index", meant), _ignored(seen, others, legend) if entries <= IGNORE else []


def _ignored(seen: _Seen, others: Sequence[Path], legend: Legend | None) -> list[str]:
    """A notice, where masks that hold classes hold what is ignored too: it may be what another program calls white."""
    with suppress(UnreadableImage):  # said where it is read
        values = _look(others, legend).values | seen.values
        if IGNORE in values:
            return [
                f"masks hold {', '.join(map(str, sorted(values)))}, taken as classes: {IGNORE}, as in "
                f"{values[IGNORE]}, is ignored; where it means a class, write that one's number"
            ]
    return []


def nearest_rule(masks: Sequence[Path], legend: Legend | None) -> MaskRule:
    """The rule under which most of some masks have classes, where `find_rule` finds none."""
    meant = legend or BINARY
    rules = [MaskRule("colour", meant)] if meant.colours is not None else []
    rules += [MaskRule("binary", meant)] if len(meant.entries) == 2 else []
    rules += [MaskRule("index", meant)]  # last: masks of 0 and 255 fit it too, with all that is 255 ignored
    fitting = [0] * len(rules)
    for file in masks[:: max(1, len(masks) // _LOOK)][:_LOOK]:
        for place, rule in enumerate(rules):
            with suppress(InputError):
                rule.classes(read_mask(file), file)
                fitting[place] += 1
    return rules[fitting.index(max(fitting))]


@dataclass
class _Seen:
    """What some masks hold, each kind with a file that has it."""

    values: dict[int, Path] = field(default_factory=dict)
    painted: Path | None = None
    lossy: Path | None = None
    matching: bool = True  # all colours are of classes, greys and those of palettes too
    between: float = 0.0  # part of the pixels that is neither 0 nor 255


def _look(masks: Sequence[Path], legend: Legend | None) -> _Seen:
    """Evenly spaced masks; more than a few only as long as all are blank, which says nothing."""
    seen = _Seen()
    step = max(1, len(masks) // _LOOK)
    order = [*masks[::step], *(mask for place, mask in enumerate(masks) if place % step)]
    shares: list[float] = []
    broken: UnreadableImage | None = None
    for count, file in enumerate(order):
        if count >= _LOOK and (seen.values.keys() != {0} or seen.painted):
            break
        try:
            mask = read_mask(file)
        except UnreadableImage as error:
            broken = error
            continue
        seen.matching &= not mask.lossy and legend is not None and _all_known(mask, legend)
        if mask.lossy:
            seen.lossy = seen.lossy or file
            shares.append(float(((mask.values != 0) & (mask.values != 255)).mean()))
        if mask.values.ndim == 3:
            seen.painted = seen.painted or file
        elif not mask.lossy:
            for value in np.unique(mask.values).tolist():
                seen.values.setdefault(int(value), file)
    if broken is not None and not (seen.values or seen.painted or seen.lossy):
        raise broken
    seen.between = sum(shares) / len(shares) if shares else 0.0
    return seen


def _all_known(mask: Stored, legend: Legend) -> bool:
    colours = np.array(legend.colours or (), dtype=np.uint8).reshape(-1, 3)
    return bool(np.isin(_codes(_painted(mask)), _codes(colours)).all())


def _painted(mask: Stored) -> np.ndarray:
    """The colours of a mask, (H, W, 3); numbers without a palette are greys."""
    if mask.palette is not None:
        # A file may be cut short of the last colours; Pillow shows them as black.
        full = np.zeros((256, 3), dtype=np.uint8)
        full[: len(mask.palette)] = mask.palette
        return full[mask.values]
    return mask.values if mask.values.ndim == 3 else np.repeat(_grey(mask.values)[..., None], 3, axis=2)


def _grey(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint8) * 255 if values.dtype == np.bool_ else values


def _codes(colours: np.ndarray) -> np.ndarray:
    """One number a colour, of the last axis."""
    red, green, blue = np.moveaxis(colours.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue
