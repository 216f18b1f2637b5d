"""`lineattn bench`: time and memory of what this library computes, beside what it is compared with.

Files under ``--out``, each with the command, the environment, the setting and the rows of one table:

- ``bench_depth_<network>.json``: a network with attention over depth, against the plain one.
- ``bench_depth.json``: KCLA by itself, against its published form: one layer, a chain, growth with depth.
- ``bench_scan.json``, ``bench_memory.json``, ``bench_decode.json``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lineattn.errors import InputError, unknown

SUBJECTS = {
    "depth": "attention over depth: networks against the plain ones, and KCLA's layer against its published form",
    "scan": "the linear recurrence against Python loops and causal softmax attention",
    "memory": "external attention against its published forms, the floor, and softmax attention",
    "decode": "one token: the recurrence against softmax attention with a cache",
}

# Network, images a call, pixels: the two that the targets are stated for.
NETWORKS = {"resnet50": (8, 224), "resnet56_bottleneck_cifar": (64, 32)}

_OF_DEPTH = ("--network", "--attn", "--batch_size", "--against")


@dataclass(frozen=True)
class Part:
    """What goes into one file: its name, the table's title, its own settings, and how its rows are measured.

    Attributes:
        file: The file's name, without its ending.
        title: Above the table, and beside the progress bar.
        reference: What ratios are relative to.
        setting: What the rows depend on, besides the settings that all parts share.
        calls: Timed calls in all.
        measure: Given ``tick``, returns the rows.
    """

    file: str
    title: str
    reference: str
    setting: dict[str, Any]
    calls: int
    measure: Callable[..., list[dict[str, Any]]]


def run(args: list[str]) -> int:
    """Measures, prints a table a part, and writes its rows as JSON."""
    options = _options(args)

    from lineattn.bench.timing import TUNED_ALLOCATOR

    if options.allocator == "tuned" and any(os.environ.get(key) != value for key, value in TUNED_ALLOCATOR.items()):
        # The allocator reads its settings when a process starts.
        command = [sys.executable, "-m", "lineattn", "bench", *args]
        os.execve(sys.executable, command, os.environ | TUNED_ALLOCATOR)
    return _measure(options, shlex.join(["lineattn", "bench", *args]))


def _options(args: list[str]) -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--rounds", type=int, default=7, help="timed calls a row (default: %(default)s)")
    shared.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    shared.add_argument(
        "--allocator",
        choices=["tuned", "default"],
        default="tuned",
        help="tuned: large tensors are kept, not unmapped, so that page faults are not measured (glibc; default)",
    )
    shared.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON files (default: results)")
    parser = argparse.ArgumentParser(
        prog="lineattn bench",
        description="Time, and bytes saved for the backward. Calls take turns in one process; what is compared are "
        "medians.",
        allow_abbrev=False,
    )
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    parsers = {
        name: subjects.add_parser(name, help=line, description=line, parents=[shared], allow_abbrev=False)
        for name, line in SUBJECTS.items()
    }
    _add_depth(parsers["depth"])
    options, left = parser.parse_known_args(args)
    for option in (part.split("=")[0] for part in left):
        if option in _OF_DEPTH:
            raise InputError(
                f"{option}: an option of `lineattn bench depth`; `bench {options.subject}` doesn't take it"
            )
    if left:
        parsers[options.subject].error(f"unrecognized arguments: {' '.join(left)}")
    for name in ("rounds", "threads", "batch_size"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: at least 1")
    return options


def _add_depth(parser: argparse.ArgumentParser) -> None:
    names = ",".join(NETWORKS)
    parser.add_argument(
        "--network", default=names, help="comma-separated; none: only KCLA by itself (default: %(default)s)"
    )
    parser.add_argument("--attn", default="mrla_light,kcla", help="methods, comma-separated (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, help="images a call (default: 8 at 224 pixels, 64 at 32)")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="a Python file, which is run: its build(channels, head_dim) makes a module of (x, state) -> (out, state) "
        "that is timed beside KCLA's layer",
    )


def _measure(options: argparse.Namespace, command: str) -> int:
    import torch

    from lineattn.files import write_json
    from lineattn.measure import environment
    from lineattn.ops import native

    if options.threads:
        torch.set_num_threads(options.threads)
    parts = _depth(options) if options.subject == "depth" else [_operator(options)]
    measured_with = environment(seed=0, native=native.status())  # before a file is written that would dirty the commit
    for part in parts:
        with _progress(part) as tick:
            rows = part.measure(tick=tick)
        setting = part.setting | {
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
            "allocator": options.allocator,
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "native": native.status(),
            "dtype": "float32",
        }
        path = options.out / f"{part.file}.json"
        write_json(path, {"command": command, "environment": measured_with, "setting": setting, "rows": rows})
        _print(options.subject, part, rows, options.allocator)
        print(f"written: {path}\n")
    return 0


def _depth(options: argparse.Namespace) -> list[Part]:
    """A part a network, then KCLA by itself; what can be wrong with the options is found before anything is timed."""
    import torch

    from lineattn import create_model, list_methods
    from lineattn.bench import against, depth, layers

    methods = options.attn.split(",")
    for method in methods:
        if method not in list_methods("depth"):
            raise unknown("depth method", method, list_methods("depth"))
    others = {} if options.against is None else {options.against.name: against.load(options.against)}
    parts = []
    for network in [] if options.network == "none" else options.network.split(","):
        with torch.device("meta"):
            create_model(network, num_classes=depth.CLASSES)
        batch_size, side = NETWORKS.get(network, (64, 32) if network.endswith("_cifar") else (8, 224))
        size = {"batch_size": options.batch_size or batch_size, "image_size": side}
        parts.append(
            Part(
                file=f"bench_depth_{network}",
                title=f"{network}, batch {size['batch_size']}, {side} pixels, channels_last",
                reference="plain",
                setting=size | {"layout": "channels_last"},
                calls=depth.calls(methods, options.rounds),
                measure=partial(depth.measure, network, methods, rounds=options.rounds, **size),
            )
        )
    single = Part(
        file="bench_depth",
        title="KCLA by itself, channels_last",
        reference="ours",
        setting={"head_dim": layers.HEAD_DIM, "layout": "channels_last"},
        calls=layers.calls(options.rounds, others),
        measure=partial(layers.measure, rounds=options.rounds, against=others),
    )
    return [*parts, single]


def _operator(options: argparse.Namespace) -> Part:
    bench = import_module(f"lineattn.bench.{options.subject}")
    return Part(
        file=f"bench_{options.subject}",
        title=SUBJECTS[options.subject].split(" against ")[0],
        reference="ours",
        setting=bench.SETTING,
        calls=bench.calls(options.rounds),
        measure=partial(bench.measure, rounds=options.rounds),
    )


@contextmanager
def _progress(part: Part) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; entering it gives the function that moves it."""
    from lineattn.cli.progress import bars
    from lineattn.tasks.console import plain_console

    with bars(plain_console(stderr=True)) as progress:
        task = progress.add_task(part.file, note="", total=part.calls)
        yield lambda: progress.advance(task)


# Keys of rows that hold numbers, in the order of the columns: the heading, and how a number is written.
_NUMBERS = {
    "cpu_ms": ("CPU ms", "{:,.2f}"),
    "wall_ms": ("wall ms", "{:,.2f}"),
    "cpu_us": ("CPU µs", "{:,.1f}"),
    "wall_us": ("wall µs", "{:,.1f}"),
    "saved_mb": ("saved MB", "{:,.2f}"),
    "saved_maps": ("maps a layer", "{:.3f}"),
    "state_mb": ("state MB", "{:,.2f}"),
    "ratio": ("", "{:.2f}x"),
    "exponent": ("exponent", "{:.3f}"),
}
# Keys that rows of one group have in common, in the order of the group's heading.
_GROUP = {"length": "{:,} tokens", "context": "{:,} tokens", "positions": "{:,} positions", "size": "{}", "mode": "{}"}


def _print(subject: str, part: Part, rows: list[dict[str, Any]], allocator: str) -> None:
    from itertools import groupby

    from rich.table import Table

    from lineattn.bench.targets import find
    from lineattn.tasks.console import plain_console

    shown = []
    for row in rows:
        target, ratio = find(subject, row), row.get("cpu_ratio", row.get("saved_ratio"))
        verdict = {} if target is None else {"target": target.verdict(row)}
        shown.append(row | verdict | ({} if ratio is None else {"ratio": ratio}))
    console = plain_console()
    console.print(f"{part.title}, {allocator} allocator", style="bold")
    for heading, group in groupby(shown, _heading):
        group = list(group)
        numbers = [key for key in _NUMBERS if any(key in row for row in group)]
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(heading, min_width=30)
        for key in numbers:
            title = f"vs {part.reference}" if key == "ratio" else _NUMBERS[key][0]
            table.add_column(title, justify="right", min_width=8)
        verdicts = [row["target"] for row in group if "target" in row]
        if verdicts:
            table.add_column("target")
        for row in group:
            cells = [_NUMBERS[key][1].format(row[key]) if key in row else "" for key in numbers]
            table.add_row(f"  {_name(row)}", *cells, *([row.get("target", "")] if verdicts else []))
        console.print(table)
    lines = ["CPU: processor time of all threads, which the ratios are of, or of bytes; MB is 10^6 bytes."]
    kernels = {row.get("method", "ours"): row["native"] for row in rows if "native" in row}
    if kernels:
        lines.append("Native kernels: " + "; ".join(f"{name}: {status}" for name, status in kernels.items()))
    print("\n".join(lines))


def _name(row: dict[str, Any]) -> str:
    name = row.get("method", row.get("name"))
    return "plain" if name == "none" else str(name)


def _heading(row: dict[str, Any]) -> str:
    return ", ".join(form.format(row[key]) for key, form in _GROUP.items() if key in row)
