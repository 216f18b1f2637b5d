"""`lineattn check-data`: what is wrong with a data set, before training finds out."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lineattn.errors import InputError

if TYPE_CHECKING:
    from lineattn.tasks.data.survey import Finding, Survey

_SHOWN = 3  # files that are named of each finding
_ROWS = 10  # classes that are counted on the screen


def run(args: list[str]) -> int:
    """Prints what is in a data set and what is wrong with it; 1 where training would stop at it or mislead."""
    parser = argparse.ArgumentParser(
        prog="lineattn check-data",
        description="Reads every image of a data set and reports broken files, empty or missing classes, images that "
        "are in two splits, modes, sizes and class balance. Exit code 1 where training would stop or mislead.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", required=True, help="folder of images, or of CIFAR's files")
    parser.add_argument("--task", choices=("cls",), default="cls", help="what the data is for (default: cls)")
    parser.add_argument("--fast", action="store_true", help="headers alone: no broken pixels, no duplicates")
    parser.add_argument("--out", type=Path, help="a JSON file for all that was found")
    options = parser.parse_args(args)

    from lineattn.cli.progress import bars
    from lineattn.files import write_json
    from lineattn.tasks.data.survey import survey

    with bars() as progress:
        bar = progress.add_task("reading", note="")
        try:
            found = survey(
                options.root,
                fast=options.fast,
                tell=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        except InputError as error:
            raise InputError(str(error).replace("--data.root", "--root")) from error
    _print(options.root, found)
    if options.out is not None:
        write_json(options.out, {"root": options.root, "fast": options.fast, **asdict(found)})
        print(f"written: {options.out}")
    return int(any(finding.serious for finding in found.findings))


def _print(root: str, found: Survey) -> None:
    from lineattn.tasks import console

    totals = found.totals
    smallest, median, largest = [f"{width}x{height}" for width, height in found.sizes] or ["-"] * 3
    images = ", ".join(f"{sum(classes.values()):,} {split}" for split, classes in found.counts.items())
    console.facts(
        {
            "data": root,
            "images": f"{images}; {len(found.counts['train']):,} classes, the largest {found.imbalance:.1f} times the "
            "smallest",
            "modes": ", ".join(f"{mode} {count:,}" for mode, count in found.modes.items()) or "-",
            "sizes": smallest if smallest == largest else f"{smallest} to {largest}, median {median}",
        }
    )
    names = list(totals)
    shown = names if len(names) <= _ROWS else [*names[: _ROWS // 2], *names[-_ROWS // 2 :]]
    rows = [[name, *(f"{classes.get(name, 0):,}" for classes in found.counts.values())] for name in shown]
    title = "images a class" + ("" if shown == names else f", the largest and smallest of {len(names):,}")
    console.table(title, ["class", *found.counts], rows)
    for finding in found.findings:
        _print_finding(finding)
    if not any(finding.serious for finding in found.findings):
        console.say("nothing is wrong with it")


def _print_finding(finding: Finding) -> None:
    from lineattn.tasks import console

    console.say(f"{'problem' if finding.serious else 'note'}: {finding.text}")
    for item in finding.items[:_SHOWN]:
        console.say(f"    {item}")
    if (more := len(finding.items) - _SHOWN) > 0:
        console.say(f"    and {more:,} more; --out FILE writes all")
