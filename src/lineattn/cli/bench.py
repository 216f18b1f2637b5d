"""`lineattn bench`: what attention costs beside the plain network, in time and memory."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from lineattn.errors import InputError, unknown

# Network, images a call, pixels: the two that the targets are stated for.
SETTINGS = {"resnet50": (8, 224), "resnet56_bottleneck_cifar": (64, 32)}


def run(args: list[str]) -> int:
    """Measures, prints a table a network, and writes the rows as JSON."""
    parser = argparse.ArgumentParser(
        prog="lineattn bench",
        description="Attention over depth against the plain network, both in channels_last: evaluation, training step, "
        "and bytes saved for the backward. Calls take turns in one process; what is compared are medians.",
        allow_abbrev=False,
    )
    parser.add_argument("subject", choices=["depth"], help="what to measure")
    parser.add_argument("--network", default=",".join(SETTINGS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--attn", default="mrla_light,kcla", help="methods, comma-separated (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, help="images a call (default: 8 at 224 pixels, 64 at 32)")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls a row (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    parser.add_argument(
        "--allocator",
        choices=["tuned", "default"],
        default="tuned",
        help="tuned: large tensors are kept, not unmapped, so that page faults are not measured (glibc; default)",
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON files (default: results)")
    options = parser.parse_args(args)
    if options.rounds < 1:
        raise InputError(f"--rounds {options.rounds}: at least 1")

    from lineattn.bench.timing import TUNED_ALLOCATOR

    if options.allocator == "tuned" and any(os.environ.get(key) != value for key, value in TUNED_ALLOCATOR.items()):
        # The allocator reads its settings when a process starts.
        command = [sys.executable, "-m", "lineattn", "bench", *args]
        os.execve(sys.executable, command, os.environ | TUNED_ALLOCATOR)
    return _measure(options, shlex.join(["lineattn", "bench", *args]))


def _measure(options: argparse.Namespace, command: str) -> int:
    import torch

    from lineattn import list_methods
    from lineattn.bench import depth
    from lineattn.files import write_json
    from lineattn.measure import environment

    methods = options.attn.split(",")
    for method in methods:
        if method not in list_methods("depth"):
            raise unknown("depth method", method, list_methods("depth"))
    if options.threads:
        torch.set_num_threads(options.threads)
    measured_with = environment(seed=0)  # before a file is written that would make the commit look changed
    for network in options.network.split(","):
        batch_size, side = SETTINGS.get(network, (64, 32) if network.endswith("_cifar") else (8, 224))
        batch_size = options.batch_size or batch_size
        with _progress(network, 3 * (1 + len(methods)) * options.rounds) as tick:
            rows = depth.measure(
                network, methods, batch_size=batch_size, image_size=side, rounds=options.rounds, tick=tick
            )
        setting = {
            "batch_size": batch_size,
            "image_size": side,
            "rounds": options.rounds,
            "allocator": options.allocator,
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "layout": "channels_last",
            "dtype": "float32",
        }
        path = options.out / f"bench_depth_{network}.json"
        content = {"command": command, "environment": measured_with, "setting": setting, "rows": rows}
        write_json(path, content)
        _print(network, setting, rows)
        print(f"written: {path}")
    return 0


def _progress(network: str, total: int) -> Any:
    """A bar on the terminal; entering it gives the function that moves it."""
    from contextlib import contextmanager

    from lineattn.cli.progress import bars
    from lineattn.tasks.console import plain_console

    @contextmanager
    def bar() -> Any:
        with bars(plain_console(stderr=True)) as progress:
            task = progress.add_task(network, note="", total=total)
            yield lambda: progress.advance(task)

    return bar()


def _print(network: str, setting: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from lineattn.tasks.console import plain_console

    title = (
        f"{network}, batch {setting['batch_size']}, {setting['image_size']} pixels, {setting['allocator']} allocator"
    )
    table = Table(title=title, title_justify="left")
    for column in ("mode", "method", "processor ms", "wall ms", "saved MB", "against plain"):
        table.add_column(column, justify="left" if column in ("mode", "method") else "right")
    for row in rows:
        ratio = row.get("cpu_ratio", row.get("saved_ratio"))
        numbers = (f"{row[key]:,.1f}" if key in row else "" for key in ("cpu_ms", "wall_ms", "saved_mb"))
        table.add_row(row["mode"], row["method"], *numbers, f"{ratio:.2f}x")
    plain_console().print(table)
    print("Ratios are of processor time, summed over threads, or of bytes; MB is 10^6 bytes.")
