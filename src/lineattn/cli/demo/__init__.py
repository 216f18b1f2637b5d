"""`lineattn demo`: small networks side by side on real images, in a minute or two.

`lineattn demo` classifies, `lineattn demo seg` segments: `cls` and `seg` say what is trained and what is shown of it.
`train` runs it, `result` sums it up, `pictures` and `report` show it. `lineattn demo lm` has all that it does in `lm`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lineattn.errors import InputError, unknown


def run(args: list[str]) -> int:
    """Trains the networks; prints a table; writes curves, a report and the numbers."""
    parser = argparse.ArgumentParser(
        prog="lineattn demo",
        description="Small networks on what the package brings along: runs, a table, pictures.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "task",
        nargs="?",
        default="cls",
        help="cls (default): plain, MRLA-light and KCLA ResNets classify digits, nine runs in a minute; seg: plain and "
        "KCLA ResNet-UNets find even and odd digits in scenes, six runs in two minutes, with overlays; lm: MetaLA and "
        "softmax attention learn Python's help texts, a minute each, with what they write and the time of a token",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="new folder to write to (default: runs/demo, runs/demo-seg or runs/demo-lm, or that with -2 ...)",
    )
    given = parser.parse_args(args)

    if given.task == "lm":
        from lineattn.cli.demo.lm import run as run_lm
        from lineattn.tasks.console import plain_console

        out = _new_folder(given.out, "demo-lm")
        console = plain_console()
        console.print(f"Two language models on Python's help texts, byte by byte.\nWriting to {out}\n")
        run_lm(out, console)
        return 0
    from lineattn.cli.demo.cls import CLS
    from lineattn.cli.demo.seg import SEG

    demos = {demo.task: demo for demo in (CLS, SEG)}
    if given.task not in demos:
        raise unknown("task", given.task, [*demos, "lm"])
    demo = demos[given.task]
    out = _new_folder(given.out, demo.command.replace(" ", "-"))

    from lineattn.cli.demo.pictures import draw
    from lineattn.cli.demo.report import write_report
    from lineattn.cli.demo.result import read_results, show_table
    from lineattn.cli.demo.train import train_all
    from lineattn.tasks.console import plain_console

    console = plain_console()
    console.print(f"{demo.opening}\nWriting to {out}\n")
    began = time.monotonic()
    seen = train_all(demo, out, console)
    results = read_results(demo, out, floors=seen.floors, seconds=time.monotonic() - began)
    results.write(out / "results.json")
    draw(results, out / "curves.png", dark=False)
    draw(results, out / "curves-dark.png", dark=True)
    write_report(results, seen, out)
    console.print()
    show_table(results, console)
    console.print(results.sentence())
    console.print(f"\n{results.seconds:.0f} s; curves: {out / 'curves.png'}; numbers: {out / 'results.json'}")
    console.print(f"report: {(out / 'report.html').resolve()}", soft_wrap=True)
    return 0


def _new_folder(given: Path | None, name: str) -> Path:
    """The folder asked for, or the first of runs/NAME, runs/NAME-2, ... that is free.

    Raises:
        InputError: The folder asked for holds something.
    """
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise InputError(f"--out {given} is not an empty folder; choose a new one")
        return given
    number = 1
    while (folder := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder
