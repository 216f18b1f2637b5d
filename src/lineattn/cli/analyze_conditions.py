"""`lineattn analyze conditions`: which methods of the token axis can stand for softmax attention, measured.

Files under ``--out``: ``conditions.json``, with the command, the environment and a row a method; the same rows in
``conditions.csv``; ``conditions.png``.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineattn.errors import unknown
from lineattn.files import need_folder, write_json

if TYPE_CHECKING:
    from lineattn.analysis.conditions import Conditions


def run(args: list[str]) -> int:
    """Measures, prints the table of the conditions and that of the figures, and writes the files."""
    parser = argparse.ArgumentParser(
        prog="lineattn analyze conditions",
        description="The conditions of MetaLA's paper, measured on a layer of each method of the token axis: linear "
        "cost (C0), dynamic memory (C1), static approximation of softmax maps (C2), least parameters (C3).",
        allow_abbrev=False,
    )
    parser.add_argument("--methods", help="comma-separated (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokens and maps (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/conditions"), help="folder for the files (default: %(default)s)"
    )
    options = parser.parse_args(args)
    need_folder(options.out)

    from lineattn import list_methods
    from lineattn.analysis.pictures import draw_conditions
    from lineattn.cli.analyze import write_csv
    from lineattn.measure import environment
    from lineattn.ops import native

    known = list_methods("token")
    methods = known if options.methods is None else options.methods.split(",")
    for method in methods:
        if method not in known:
            raise unknown("token method", method, known)
    measured_with = environment(seed=options.seed, native=native.status())
    found = _measure(methods, options.seed)
    rows = [asdict(conditions) for conditions in found]
    files = [options.out / f"conditions.{ending}" for ending in ("json", "csv", "png")]
    command = shlex.join(["lineattn", "analyze", "conditions", *args])
    write_json(files[0], {"command": command, "environment": measured_with, "rows": rows})
    write_csv(files[1], [_flat(row) for row in rows])
    draw_conditions(rows, files[2])
    _print(found)
    print(f"wrote {', '.join(map(str, files))}")
    return 1 if any(conditions.faults for conditions in found) else 0


def _measure(methods: list[str], seed: int) -> list[Conditions]:
    import torch

    from lineattn import registry
    from lineattn.analysis.conditions import CHANNELS, PARTS, measure
    from lineattn.cli.progress import bars
    from lineattn.tasks.console import plain_console

    found = []
    with bars(plain_console(stderr=True)) as progress:
        task = progress.add_task("conditions", note="", total=PARTS * len(methods))
        for method in methods:
            progress.update(task, note=method)
            torch.manual_seed(seed)
            mixer = registry.get(method, axis="token").cls(CHANNELS)
            found.append(measure(method, mixer, seed=seed, tick=lambda: progress.advance(task)))
    return found


def _print(found: list[Conditions]) -> None:
    from lineattn.analysis.conditions import MANY, SIZES
    from lineattn.tasks import console

    rows = [
        [c.method, c.of_token or "not shown", *map(verdict, (c.linear, c.dynamic, c.static, c.least))] for c in found
    ]
    console.table(
        "C0 linear cost, C1 dynamic memory, C2 static approximation, C3 least parameters",
        ["", "maps of the token", "C0", "C1", "C2", "C3"],
        rows,
    )
    rows = []
    for c in found:
        off = ["" if c.overwriting is None else f"{c.overwriting:.0e}", f"{max(c.fits.values()):.0e}"]
        spare = "" if c.redundant is None else str(c.redundant)
        rows.append([c.method, f"{c.state[1]:,}", f"{c.growth:.2f}", *off, f"{c.rank}/{c.block}", spare])
    console.table("measured", ["", "state", "work", "C1 off", "C2 off", "rank", "spare"], rows)
    console.say(
        f"state: numbers after {MANY:,} tokens. work: exponent in tokens. off: at best, from overwriting one row of "
        "the state (C1), and from softmax maps of as many tokens as key channels (C2). rank: of a block of a longer "
        "map, out of what it could be; at most the key channels of a head. spare: numbers that a row of the map "
        "doesn't need.\nAll this is about maps that can be had, not about what is learned."
    )
    for c in found:
        for note in c.notes:
            console.say(f"{c.method}: {note}")
        if c.dynamic and c.least_decays:
            decays = ", ".join(f"{decay:.2g}" for decay in c.least_decays)
            console.say(
                f"{c.method}: zero is the limit of its decays: {decays} for tokens of size {', '.join(map(str, SIZES))}"
            )
    for cell in dict.fromkeys(c.cell for c in found if c.least):
        if len(same := [c.method for c in found if c.cell == cell]) > 1:
            console.say(f"{' and '.join(same)}: the same cell ({cell})")
    for c in found:
        for fault in c.faults:
            console.say(f"fault: {c.method}: {fault}")


def verdict(holds: bool | None) -> str:
    """A sign for a condition; a question mark where it was not measured.

    Example:
        >>> verdict(True), verdict(False), verdict(None)
        ('✓', '✗', '?')
    """
    return "?" if holds is None else "✓" if holds else "✗"


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with one column a number; of a dictionary and a tuple too."""
    from lineattn.analysis.conditions import FEW, MANY, SIZES, TOKENS

    decays = row["least_decays"] or [None] * len(SIZES)
    flat = {key: value for key, value in row.items() if not isinstance(value, (tuple, dict))}
    flat |= {f"state_{tokens}": size for tokens, size in zip((FEW, MANY), row["state"], strict=True)}
    flat |= {f"least_decay_{size}": decay for size, decay in zip(SIZES, decays, strict=True)}
    flat |= {f"error_{tokens}": row["fits"].get(tokens) for tokens in TOKENS}
    return flat | {key: "; ".join(row[key]) for key in ("notes", "faults")}
