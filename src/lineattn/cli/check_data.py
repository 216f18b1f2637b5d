"""`lineattn check-data`: what is wrong with a data set, before training finds out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineattn.errors import InputError

if TYPE_CHECKING:
    from lineattn.tasks.data.det_survey import DetSurvey
    from lineattn.tasks.data.seg_survey import SegSurvey
    from lineattn.tasks.data.survey import Finding, Survey

_SHOWN = 3  # files that are named of each finding
_ROWS = 10  # classes that are counted on the screen


def run(args: list[str]) -> int:
    """Prints what is in a data set and what is wrong with it; 1 where training would stop at it or mislead."""
    parser = argparse.ArgumentParser(
        prog="lineattn check-data",
        description="Reads every image of a data set and reports broken files, empty or missing classes, images that "
        "are in two splits, modes, sizes and class balance; with --task seg also masks that lack an image, are of "
        "another size, or hold what is no class; with --task det boxes that are none, and annotations that don't fit. "
        "Exit code 1 where training would stop or mislead.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", required=True, help="folder of images, of CIFAR's files, or of COCO's format")
    parser.add_argument(
        "--task", choices=("cls", "seg", "det"), default="cls", help="what the data is for (default: cls)"
    )
    parser.add_argument("--fast", action="store_true", help="headers alone: no broken pixels, no duplicates")
    parser.add_argument("--out", type=Path, help="a JSON file for all that was found")
    seg = parser.add_argument_group("with --task seg, as fit takes them behind --data.")
    layouts, rules = ("folder", "isic", "voc", "ade20k", "cityscapes"), ("index", "binary", "threshold", "colour")
    seg.add_argument("--name", choices=layouts, help="how the folder is laid out (default: folder)")
    seg.add_argument("--classes-file", help="class names, one a line, perhaps with a colour each: NAME R G B")
    seg.add_argument("--masks", choices=rules, help="what values of masks are (default: what suits the masks)")
    options = parser.parse_args(args)
    if options.out is not None and options.out.is_dir():
        raise InputError(f"--out {options.out} is a folder: name a JSON file")

    from lineattn.cli.progress import bars
    from lineattn.files import write_json
    from lineattn.tasks import console

    found: Any
    if options.task != "seg":
        _refuse_of_seg(options)
    look, show = {
        "cls": (_classification, _print_classes),
        "seg": (_segmentation, _print_masks),
        "det": (_detection, _print_objects),
    }[options.task]
    with bars() as progress:
        bar = progress.add_task("reading", note="")
        try:
            found = look(options, lambda done, total: progress.update(bar, completed=done, total=total))
        except InputError as error:
            raise InputError(_own_names(str(error))) from error
    show(options.root, found)
    for finding in found.findings:
        _print_finding(finding)
    serious = any(finding.serious for finding in found.findings)
    if not serious:
        console.say("nothing is wrong with it")
    if options.out is not None:
        write_json(options.out, {"root": options.root, "fast": options.fast, **asdict(found)})
        print(f"written: {options.out}")
    return int(serious)


def _own_names(text: str) -> str:
    """Names of options as they are here."""
    for option in ("root", "name", "classes_file", "masks"):
        text = text.replace(f"--data.{option}", f"--{option.replace('_', '-')}")
    return text


def _refuse_of_seg(options: argparse.Namespace) -> None:
    for option in ("name", "classes_file", "masks"):
        if getattr(options, option) is not None:
            raise InputError(_own_names(f"--data.{option} is for --task seg: leave it out, or add that"))


def _classification(options: argparse.Namespace, tell: Callable[[int, int], None]) -> Survey:
    from lineattn.tasks.data.survey import survey

    return survey(options.root, fast=options.fast, tell=tell)


def _segmentation(options: argparse.Namespace, tell: Callable[[int, int], None]) -> SegSurvey:
    from lineattn.tasks.data.seg_survey import survey

    return survey(
        options.name or "folder",
        options.root,
        classes_file=options.classes_file,
        masks=options.masks,
        fast=options.fast,
        tell=tell,
    )


def _detection(options: argparse.Namespace, tell: Callable[[int, int], None]) -> DetSurvey:
    from lineattn.tasks.data.det_survey import survey

    return survey(options.root, fast=options.fast, tell=tell)


def _print_classes(root: str, found: Survey) -> None:
    from lineattn.tasks import console

    totals = found.totals
    images = ", ".join(f"{sum(classes.values()):,} {split}" for split, classes in found.counts.items())
    console.facts(
        {
            "data": root,
            "images": f"{images}; {len(found.counts['train']):,} classes, the largest {found.imbalance:.1f} times the "
            "smallest",
            "modes": _modes(found.modes),
            "sizes": _sizes(found.sizes),
        }
    )
    names, chosen = _shown(list(totals))
    rows = [[name, *(f"{classes.get(name, 0):,}" for classes in found.counts.values())] for name in names]
    console.table(f"images a class{chosen}", ["class", *found.counts], rows)


def _print_masks(root: str, found: SegSurvey) -> None:
    from lineattn.tasks import console

    images = ", ".join(f"{count:,} {split}" for split, count in found.counts.items())
    console.facts(
        {
            "data": root,
            "images": f"{images}; {len(found.classes):,} classes",
            "modes": f"{_modes(found.modes)}; of masks {_modes(found.mask_modes)}",
            "sizes": _sizes(found.sizes),
        }
    )
    if not any(sum(pixels.values()) for pixels in found.pixels.values()):
        return
    names, chosen = _shown(sorted(found.classes, key=lambda name: -found.share("train", name)))
    rows = [
        [name, *(f"{found.share(split, name):.2%} in {found.images[split][name]:,}" for split in found.counts)]
        for name in names
    ]
    ignored = sum(found.ignored.values())
    pixels = ignored + sum(sum(classes.values()) for classes in found.pixels.values())
    left = f"; {ignored / pixels:.2%} of all pixels are ignored" if ignored else ""
    console.table(f"share of pixels, and in how many images{chosen}{left}", ["class", *found.counts], rows)


def _print_objects(root: str, found: DetSurvey) -> None:
    from lineattn.tasks import console

    def each(counts: dict[str, int]) -> str:
        return ", ".join(f"{count:,} {split}" for split, count in counts.items())

    totals = {split: sum(classes.values()) for split, classes in found.objects.items()}
    console.facts(
        {
            "data": root,
            "images": f"{each(found.counts)}; without objects {each(found.empty)}",
            "objects": f"{each(totals)}; {len(found.classes):,} classes",
            "masks": each(found.masks),
            "crowds": each(found.crowds),
            "modes": _modes(found.modes),
            "sizes": _sizes(found.sizes),
        }
    )
    names, chosen = _shown(sorted(found.classes, key=lambda name: -found.objects["train"][name]))
    rows = [[name, *(f"{classes.get(name, 0):,}" for classes in found.objects.values())] for name in names]
    console.table(f"objects a class{chosen}", ["class", *found.objects], rows)


def _modes(modes: dict[str, int]) -> str:
    return ", ".join(f"{mode} {count:,}" for mode, count in modes.items()) or "-"


def _sizes(sizes: list[tuple[int, int]]) -> str:
    smallest, median, largest = [f"{width}x{height}" for width, height in sizes] or ["-"] * 3
    return smallest if smallest == largest else f"{smallest} to {largest}, median {median}"


def _shown(names: list[str]) -> tuple[list[str], str]:
    """The first and last of many names, and what a title says of that."""
    if len(names) <= _ROWS:
        return names, ""
    return [*names[: _ROWS // 2], *names[-_ROWS // 2 :]], f", the largest and smallest of {len(names):,}"


def _print_finding(finding: Finding) -> None:
    from lineattn.tasks import console

    console.say(f"{'problem' if finding.serious else 'note'}: {finding.text}")
    for item in finding.items[:_SHOWN]:
        console.say(f"    {item}")
    if (more := len(finding.items) - _SHOWN) > 0:
        console.say(f"    and {more:,} more; --out FILE writes all")
