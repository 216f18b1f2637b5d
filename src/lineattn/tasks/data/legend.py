"""What the values and colours of masks stand for, as a file of class names says it, and of the known data sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lineattn.errors import InputError

Colour = tuple[int, int, int]
IGNORE = 255  # the class of pixels that neither loss nor score counts
_VOID = frozenset({"void", "ignore"})
_LINE = re.compile(r"(?P<name>.*?\S)(?:[\s,]+(?P<rgb>\d+[\s,]+\d+[\s,]+\d+))?")


@dataclass(frozen=True)
class Legend:
    """The entry at place `v` is what a pixel of value `v` shows; those named void or ignore are no classes.

    Args:
        entries: A name for each value.
        colours: A colour for each value, in masks that are painted and in what is drawn.

    Example:
        >>> legend = Legend(("void", "road", "car"))
        >>> legend.classes, legend.targets
        (['road', 'car'], [255, 0, 1])
    """

    entries: tuple[str, ...]
    colours: tuple[Colour, ...] | None = None

    @property
    def classes(self) -> list[str]:
        return [name for name in self.entries if name.lower() not in _VOID]

    @property
    def palette(self) -> list[Colour] | None:
        """The colour of each class."""
        if self.colours is None:
            return None
        return [colour for colour, target in zip(self.colours, self.targets, strict=True) if target != IGNORE]

    @property
    def targets(self) -> list[int]:
        """The class of each value."""
        classes = iter(range(len(self.entries)))
        return [IGNORE if name.lower() in _VOID else next(classes) for name in self.entries]


def has_background(classes: Sequence[str]) -> bool:
    """Whether the first class is what the others stand out from, and not as good as they.

    Example:
        >>> has_background(["skin", "lesion"]), has_background(["road", "car", "sky"])
        (True, False)
    """
    return len(classes) == 2 or classes[0].lower() == "background"


def read_legend(file: Path) -> Legend:
    """Reads names, one a line in the order of the values, each with its colour as R G B after it or none.

    A line ``void`` or ``ignore`` holds the place of a value, or names a colour, that is no class. Empty lines are
    passed over, and lines that begin with #.

    Raises:
        InputError: The file cannot be read, or a line is not of that form, or a name or a colour is there twice.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the class names of {file}: {error}") from error
    names: list[str] = []
    colours: list[Colour] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        assert found is not None  # any text is a name
        names.append(found["name"])
        if found["rgb"]:
            red, green, blue = map(int, re.split(r"[\s,]+", found["rgb"]))
            if max(red, green, blue) > 255:
                raise InputError(f"{file}, line {number}: a colour is three numbers from 0 to 255, not {found['rgb']}")
            colours.append((red, green, blue))
        if colours and len(colours) != len(names):
            raise InputError(f"{file}, line {number}: give each name a colour (NAME R G B) or none")
        for what, given in (("name", [name for name in names if name.lower() not in _VOID]), ("colour", colours)):
            if len(set(given)) != len(given):
                raise InputError(f"{file}, line {number}: the {what} {given[-1]} is there twice")
    legend = Legend(tuple(names), tuple(colours) or None)
    if not 2 <= len(legend.classes) <= len(names) <= IGNORE:
        raise InputError(f"{file} has {len(legend.classes)} classes: from 2 to {IGNORE} are possible")
    return legend


def colour_map(count: int) -> list[Colour]:
    """PASCAL VOC's colours for up to 256 classes: the bits of the number, dealt to red, green and blue.

    Example:
        >>> colour_map(4)
        [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
    """

    def channel(number: int, shift: int) -> int:
        return sum((number >> (3 * bit + shift) & 1) << (7 - bit) for bit in range(3))

    return [(channel(number, 0), channel(number, 1), channel(number, 2)) for number in range(count)]


def _named(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _painted(entries: Sequence[tuple[str, Colour]]) -> Legend:
    return Legend(tuple(name for name, _ in entries), tuple(colour for _, colour in entries))


BINARY = Legend(("background", "foreground"))

_VOC = _named(
    "background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog, horse, "
    "motorbike, person, pottedplant, sheep, sofa, train, tvmonitor"
)
VOC = Legend(_VOC, tuple(colour_map(len(_VOC))))

ADE20K = Legend(
    _named(
        # 0 is what has no label.
        "void, wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, "
        "earth, door, table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, "
        "rug, field, armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, "
        "signboard, chest of drawers, counter, sand, sink, skyscraper, fireplace, refrigerator, grandstand, path, "
        "stairs, runway, case, pool table, pillow, screen door, stairway, river, bridge, bookcase, blind, "
        "coffee table, toilet, flower, book, hill, bench, countertop, stove, palm, kitchen island, computer, "
        "swivel chair, boat, bar, arcade machine, hovel, bus, towel, light, truck, tower, chandelier, awning, "
        "streetlight, booth, television receiver, airplane, dirt track, apparel, pole, land, bannister, escalator, "
        "ottoman, bottle, buffet, poster, stage, van, ship, fountain, conveyer belt, canopy, washer, plaything, "
        "swimming pool, stool, barrel, basket, waterfall, tent, bag, minibike, cradle, oven, ball, food, step, tank, "
        "trade name, microwave, pot, animal, bicycle, lake, dishwasher, screen, blanket, sculpture, hood, sconce, "
        "vase, traffic light, tray, ashcan, fan, pier, crt screen, plate, monitor, bulletin board, shower, radiator, "
        "glass, clock, flag"
    )
)

# By the ids of gtFine's labelIds; those that the benchmark leaves out are void.
_LEFT_OUT = ("void", (0, 0, 0))
CITYSCAPES = _painted(
    [
        *[_LEFT_OUT] * 7,
        ("road", (128, 64, 128)),
        ("sidewalk", (244, 35, 232)),
        *[_LEFT_OUT] * 2,
        ("building", (70, 70, 70)),
        ("wall", (102, 102, 156)),
        ("fence", (190, 153, 153)),
        *[_LEFT_OUT] * 3,
        ("pole", (153, 153, 153)),
        _LEFT_OUT,
        ("traffic light", (250, 170, 30)),
        ("traffic sign", (220, 220, 0)),
        ("vegetation", (107, 142, 35)),
        ("terrain", (152, 251, 152)),
        ("sky", (70, 130, 180)),
        ("person", (220, 20, 60)),
        ("rider", (255, 0, 0)),
        ("car", (0, 0, 142)),
        ("truck", (0, 0, 70)),
        ("bus", (0, 60, 100)),
        *[_LEFT_OUT] * 2,
        ("train", (0, 80, 100)),
        ("motorcycle", (0, 0, 230)),
        ("bicycle", (119, 11, 32)),
    ]
)
