"""`lineattn sweep`: every setting of a grid with every seed, one run folder each, in one process."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lineattn.errors import InputError, unknown
from lineattn.files import write_json, write_text

if TYPE_CHECKING:
    from lineattn.cli.follow import Tell


# What a sweep gives each run itself.
_OWN = {
    "--out": "each run has a folder of its own under the --out of the sweep",
    "--seed_everything": "give the seeds as --seeds 1,2,3",
    "--ckpt_path": "each run goes on from its own checkpoint",
}


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its folder and the options that set it apart."""

    folder: Path
    options: tuple[str, ...]


def run(args: list[str]) -> int:
    """Trains the cells that are not finished yet; 1 if any of them failed."""
    from lineattn.cli.main import TASKS

    task, args = (args[0], args[1:]) if args and not args[0].startswith("-") else ("cls", args)
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    options, shared = _parser().parse_known_args(args)
    _refuse_own(options.out, [*shared, *(f"--{axis.removeprefix('--')}" for axis in options.grid)])
    configs = [part for path in options.config for part in ("--config", path)]
    shared = (*configs, *shared)
    cells = grid(options.grid, _seeds(options.seeds), Path(options.out[0]))
    stamps = [_stamp(task, (*shared, *cell.options), options.config) for cell in cells]
    todo = [(cell, stamp) for cell, stamp in zip(cells, stamps, strict=True) if not _finished(cell.folder, stamp)]
    from lineattn.cli.progress import bars, show

    print(f"{len(cells)} runs in {options.out[0]}, {len(cells) - len(todo)} of them finished already")
    failed = []
    with bars() as progress:
        everything = progress.add_task("all runs", note="", total=len(cells), completed=len(cells) - len(todo))
        for cell, stamp in todo:
            line = progress.add_task(cell.folder.name, note="", total=1)
            problem = _train(task, cell, shared, stamp, partial(show, progress, line))
            progress.print(f"{cell.folder}: {problem or 'done'}")
            if problem:
                failed.append(f"{cell.folder}: {problem}")
            progress.remove_task(line)
            progress.advance(everything)
    if failed:
        print(f"\n{len(failed)} of {len(cells)} runs failed; the same command tries them again:")
        print("\n".join(f"  {line}" for line in failed))
    print(f"\nlineattn compare {options.out[0]}   shows the finished runs side by side")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lineattn sweep",
        usage="lineattn sweep [TASK] --out DIR [--config FILE] [--grid KEY=A,B ...] [--seeds 1,2,3] [OPTIONS OF fit]",
        description="Every setting of a grid with every seed, one run folder each under --out. The same command "
        "again skips finished runs and goes on with interrupted ones.",
        epilog="Example: lineattn sweep --config recipes/smoke/cifar_kcla.yaml --grid model.attn=none,kcla "
        "--seeds 1,2,3 --out runs/mine --data.root my_images",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="recipe, as for fit")
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="an option of fit and its values; may be repeated",
    )
    parser.add_argument("--seeds", default="1", metavar="1,2,3", help="seeds (default: 1)")
    parser.add_argument("--out", action="append", required=True, metavar="DIR", help="folder of the run folders")
    return parser


def _refuse_own(outs: list[str], options: list[str]) -> None:
    """Refuses what the sweep gives each run itself."""
    if len(outs) > 1:
        raise InputError(f"--out is given {len(outs)} times; name one folder, each run gets one of its own in it")
    for option in options:
        if (name := option.partition("=")[0]) in _OWN:
            raise InputError(f"{name} is no option of a sweep: {_OWN[name]}")


def grid(axes: list[str], seeds: list[int], out: Path) -> list[Cell]:
    """The cells of a grid, seeds innermost.

    Raises:
        InputError: An axis is not ``key=a,b``, or two cells would share a folder.

    Example:
        >>> [str(cell.folder) for cell in grid(["model.attn=none,kcla"], [1, 2], Path("runs"))]
        ['runs/none-1', 'runs/none-2', 'runs/kcla-1', 'runs/kcla-2']
    """
    keys, choices = [], []
    for axis in axes:
        key, equals, values = axis.partition("=")
        if not (key and equals and values):
            raise InputError(f"--grid {axis!r}: write it as key=value,value, e.g. model.attn=none,kcla")
        keys.append(key.removeprefix("--"))
        choices.append(_split(values))
    cells = []
    for values in itertools.product(*choices):
        for seed in seeds:
            name = "-".join([*(re.sub(r"[^\w.+]+", "_", value) for value in values), str(seed)])
            settings = [part for key, value in zip(keys, values, strict=True) for part in (f"--{key}", value)]
            cells.append(Cell(out / name, (*settings, "--seed_everything", str(seed))))
    names = [cell.folder.name for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"--grid gives two runs the folder {out / twice}: a value stands there twice")
    return cells


def _split(values: str) -> list[str]:
    """Splits at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(values):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append(values[start:place])
            start = place + 1
    return [*parts, values[start:]]


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds {text!r}: write whole numbers with commas, e.g. 1,2,3") from None


def _stamp(task: str, options: tuple[str, ...], configs: list[str]) -> dict:
    """What a cell was asked to do, with the recipes' content, so that an edited recipe is noticed."""
    try:
        digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in configs]
    except OSError as error:
        raise InputError(f"--config {error.filename}: {error.strerror}; give a recipe that can be read") from error
    return {"task": task, "options": list(options), "config_sha256": digests}


def _finished(folder: Path, stamp: dict) -> bool:
    """Whether the cell's run is done.

    Raises:
        InputError: The folder holds a run of other settings, which must neither be skipped nor gone on with.
    """
    summary, held = folder / "summary.json", folder / "sweep.json"
    begun = summary.exists() or (folder / "checkpoints" / "last.ckpt").exists()
    # A run that failed before its first checkpoint has nothing to lose: its settings may be mended.
    if begun and held.exists() and _read(held) != stamp:
        raise InputError(f"{folder} was run with other settings ({held} lists them); choose another --out or remove it")
    return _read(summary).get("status") == "done"


def _read(path: Path) -> dict:
    """A JSON object; an empty one where there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _train(task: str, cell: Cell, shared: tuple[str, ...], stamp: dict, tell: Tell) -> str | None:
    """Trains one cell, from its last checkpoint if it has one; returns what went wrong in one line."""
    from lineattn.cli.follow import Follow
    from lineattn.cli.task import run as run_task

    write_json(cell.folder / "sweep.json", stamp)
    last = cell.folder / "checkpoints" / "last.ckpt"
    resume = ("--ckpt_path", str(last)) if last.exists() else ()
    if not resume:
        (cell.folder / "summary.json").unlink(missing_ok=True)  # not of a finished run, and nothing to go on from
    options = [*shared, *cell.options, "--out", str(cell.folder), *resume]
    try:
        run_task("fit", task, options, quiet=True, callbacks=[Follow(tell)])
    except InputError as error:
        return f"failed: {error}"
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on where it was") from None
    except Exception as error:
        report = cell.folder / "error.txt"
        write_text(report, traceback.format_exc())
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]} ({report} has the traceback)"
    return None
