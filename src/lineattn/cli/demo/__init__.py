"""`lineattn demo`: three small networks side by side on real images, in about a minute.

Plain, MRLA-light and KCLA ResNets of equal depth, the same recipe, three seeds each, on the handwritten digits that
scikit-learn bundles. `train` runs them, `result` sums them up, `pictures` and `report` show them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lineattn.errors import InputError


def run(args: list[str]) -> int:
    """Trains the nine networks; prints a table; writes curves, a report and the numbers."""
    parser = argparse.ArgumentParser(
        prog="lineattn demo",
        description="Plain, MRLA-light and KCLA ResNets on handwritten digits: nine runs, a table, a report.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, help="new folder to write to (default: runs/demo, or runs/demo-2 ...)")
    out = _new_folder(parser.parse_args(args).out)

    from lineattn.cli.demo.pictures import draw
    from lineattn.cli.demo.report import write_report
    from lineattn.cli.demo.result import read_results, show_table
    from lineattn.cli.demo.train import train_all
    from lineattn.tasks.console import plain_console

    console = plain_console()
    console.print(
        f"Nine networks on 16x16 images of handwritten digits: plain, MRLA-light and KCLA, three seeds each.\n"
        f"Writing to {out}\n"
    )
    began = time.monotonic()
    digits = train_all(out, console)
    results = read_results(out, seconds=time.monotonic() - began)
    results.write(out / "results.json")
    draw(results, out / "curves.png", dark=False)
    draw(results, out / "curves-dark.png", dark=True)
    write_report(results, digits, out)
    console.print()
    show_table(results, console)
    console.print(results.sentence())
    console.print(f"\n{results.seconds:.0f} s; curves: {out / 'curves.png'}; numbers: {out / 'results.json'}")
    console.print(f"report: {(out / 'report.html').resolve()}", soft_wrap=True)
    return 0


def _new_folder(given: Path | None) -> Path:
    """The folder asked for, or the first of runs/demo, runs/demo-2, ... that is free.

    Raises:
        InputError: The folder asked for holds something.
    """
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise InputError(f"--out {given} is not an empty folder; choose a new one")
        return given
    number = 1
    while (folder := Path("runs") / ("demo" if number == 1 else f"demo-{number}")).exists():
        number += 1
    return folder
