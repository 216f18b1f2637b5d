"""`lineattn profile`: what attention over depth costs, against the depth of the network.

Files under ``--out``: ``profile.csv``, a row a depth and method; ``profile.json``, the same with the exponents, the
command, the environment and the setting; ``profile.png``, what the methods add to the plain network.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineattn.errors import InputError
from lineattn.files import need_folder, write_json, write_text

DEPTHS = "20,56,110,164,272,362"
METHODS = "kcla,mrla_base,mrla_light,layer_softmax,dla_light"

# Of a run that --ckpt_path names, these are what they were.
_OF_A_RUN = ("attn", "width", "image_size")

COLUMNS = (
    *("network", "depth", "blocks", "method", "params", "mmac", "mixing_mmac"),
    *("saved_mb", "saved_published_mb", "memory_mb", "evaluation_ms", "training_ms"),
)


@dataclass(frozen=True)
class Network:
    """One to profile.

    Attributes:
        arguments: Of `lineattn.create_model`, for the plain network.
        depth: Layers with weights, where it is a CIFAR ResNet.
        blocks: Blocks a stage, where it is one.
    """

    arguments: dict[str, Any]
    depth: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        networks: In order of depth.
        methods: Arguments that `lineattn.create_model` takes besides the network's, by method; ``none`` first.
        shape: Of a batch, ``(B, C, H, W)``.
    """

    networks: list[Network]
    methods: dict[str, dict[str, Any]]
    shape: tuple[int, int, int, int]


def run(args: list[str]) -> int:
    """Measures, prints tables, and writes CSV, JSON and the picture."""
    options = _parser().parse_args(args)
    for name in ("batch", "rounds", "width"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: at least 1")
    if options.image_size is not None and options.image_size < 8:
        raise InputError(f"--image_size {options.image_size}: at least 8, as two stages halve it")

    need_folder(options.out)
    import torch

    from lineattn.bench.profile import growth, growth_by_block
    from lineattn.measure import environment
    from lineattn.ops import native

    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = _plan(options) if options.ckpt_path is None else _plan_of_run(options)
    measured_with = environment(seed=0, native=native.status())
    try:
        rows = _measure(plan, options, device)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise InputError(
            "--batch 1: the last map is one pixel, of which batch norm needs two; give --batch 2"
        ) from error
    exponents = {"exponents": growth(rows), "exponents_by_block": growth_by_block(rows)}
    _print(rows, exponents)

    setting = {
        "device": device,
        "batch": plan.shape[0],
        "image_size": plan.shape[2],
        "rounds": 0 if options.no_time else options.rounds,
        "threads": torch.get_num_threads(),
        "layout": "channels_last",
        "dtype": "float32",
        "methods": plan.methods,
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, [name for name in COLUMNS if name in rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(options.out / "profile.csv", text.getvalue())
    found = {"command": shlex.join(["lineattn", "profile", *args]), "environment": measured_with, "setting": setting}
    write_json(options.out / "profile.json", found | {"rows": rows} | exponents)
    written = [options.out / "profile.csv", options.out / "profile.json"]
    if rows[0]["depth"] is not None and len(plan.methods) > 1:
        from lineattn.cli.profile_picture import draw

        title = f"What attention adds to the plain network, batch {plan.shape[0]}, {plan.shape[2]} pixels"
        draw(rows, title, options.out / "profile.png")
        written.append(options.out / "profile.png")
    print("written:", *written)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lineattn profile",
        description="Parameters, MACs, memory and time of CIFAR ResNets of bottlenecks against their depth, and how "
        "what attention adds to the plain network grows with it.",
        allow_abbrev=False,
    )
    parser.add_argument("--depths", help=f"comma-separated, each 9n + 2 (default: {DEPTHS})")
    parser.add_argument("--attn", help=f"methods beside the plain network, comma-separated (default: {METHODS})")
    parser.add_argument("--batch", type=int, default=2, help="images a call (default: %(default)s)")
    parser.add_argument("--image_size", type=int, help="height and width, pixels (default: 32)")
    parser.add_argument("--width", type=int, help="planes of the first stage (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each network (default: %(default)s)")
    parser.add_argument("--no_time", action="store_true", help="measure no times")
    parser.add_argument(
        "--ckpt_path",
        type=Path,
        help="checkpoint of a run: its method, at its image size, across depths if its network is a CIFAR ResNet; "
        "else its network alone",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/profile"), help="folder (default: %(default)s)")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    from lineattn import registry

    names = [name for name in dict.fromkeys((options.attn or METHODS).split(",")) if name != "none"]
    for name in names:
        registry.get(name, axis="depth")
    arguments = {"num_classes": 100, **({} if options.width is None else {"width": options.width})}
    networks = _across_depths("_bottleneck", arguments, _depths(options))
    side = options.image_size or 32
    methods = {name: {"attn": name, "init": "paper"} for name in names}
    return Plan(networks, {"none": {}} | methods, (options.batch, 3, side, side))


def _plan_of_run(options: argparse.Namespace) -> Plan:
    from lineattn.cli.restore import restore

    for name in _OF_A_RUN:
        if getattr(options, name) is not None:
            raise InputError(f"--{name} with --ckpt_path: the run says which; leave one out")
    trained = restore(options.ckpt_path)
    if trained.task != "cls":
        raise InputError(f"{options.ckpt_path} is of the task {trained.task}: profile is for classifiers so far")
    keys = ("name", "num_classes", "in_chans", "width", "net_args")
    plain = {key: trained.arguments[key] for key in keys if key in trained.arguments}
    attn = trained.arguments.get("attn", "none")
    methods: dict[str, dict[str, Any]] = {"none": {}}
    if attn != "none":
        methods[attn] = {key: value for key, value in trained.arguments.items() if key not in plain}
    shape = (options.batch, plain["in_chans"], trained.visual.image_size, trained.visual.image_size)
    family = re.fullmatch(r"resnet(\d+)(|_bottleneck)_cifar", plain["name"])
    if family is None:
        if options.depths is not None:
            raise InputError(f"--depths {options.depths}: {plain['name']} comes in no other depths; leave it out")
        return Plan([Network(plain)], methods, shape)
    depths = sorted({*_depths(options), int(family[1])})
    return Plan(_across_depths(family[2], plain, depths), methods, shape)


def _depths(options: argparse.Namespace) -> list[int]:
    given = options.depths or DEPTHS
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise InputError(f"--depths {given}: give whole numbers with commas between them, as {DEPTHS}")
    return sorted({int(depth) for depth in given.split(",")})


def _across_depths(block: str, arguments: dict[str, Any], depths: list[int]) -> list[Network]:
    """The CIFAR ResNets of some depths; one that doesn't exist is found before anything is measured."""
    import torch

    from lineattn import create_model

    networks = []
    for depth in depths:
        named: dict[str, Any] = arguments | {"name": f"resnet{depth}{block}_cifar"}
        with torch.device("meta"):
            net: Any = create_model(**named)
        networks.append(Network(named, depth, len(net.stages[0])))
    return networks


def _measure(plan: Plan, options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """The rows, in order of depth; a bar on the terminal, which goes on by blocks."""
    from lineattn.cli.progress import bars
    from lineattn.tasks.console import plain_console

    calls = len(plan.methods) * (2 + (0 if options.no_time else 2 * options.rounds))
    with bars(plain_console(stderr=True)) as progress:
        total = calls * sum(network.blocks or 1 for network in plan.networks)
        task = progress.add_task("profile", note="", total=total)
        rows = []
        for network in plan.networks:
            progress.update(task, note=network.arguments["name"])
            rows += _rows(network, plan, options, device, lambda n=network: progress.advance(task, n.blocks or 1))
    return rows


def _rows(
    network: Network, plan: Plan, options: argparse.Namespace, device: str, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Of one network, a row a method."""
    import torch

    from lineattn.analysis.depth_cost import count_depth_cost
    from lineattn.bench.profile import PUBLISHED, build, draw, published_memory, step_memory, times

    batch = draw(plan.shape, network.arguments["num_classes"], device)
    nets, figures = {}, {}
    for method, extra in plan.methods.items():
        nets[method] = build(network.arguments | extra, device)
        cost = count_depth_cost(nets[method].eval(), torch.zeros(1, *plan.shape[1:]))
        figures[method] = {"params": cost.params, "mmac": cost.macs / 1e6, "mixing_mmac": cost.mixing / 1e6}
        tick()
        figures[method] |= step_memory(nets[method], batch)
        if network.depth is not None and method in PUBLISHED:
            figures[method]["saved_published_mb"] = published_memory(network.arguments | extra, method, batch)
        elif network.depth is not None and method == "none":
            figures[method]["saved_published_mb"] = figures[method]["saved_mb"]
        tick()
    timed = {} if options.no_time else times(nets, batch, rounds=options.rounds, tick=tick)
    who = {"network": network.arguments["name"], "depth": network.depth, "blocks": network.blocks}
    rows = [who | {"method": method} | figures[method] | timed.get(method, {}) for method in plan.methods]
    return [{name: row.get(name) for name in COLUMNS if name in rows[0]} for row in rows]


# Columns of the tables: the heading, and how a number is written.
_SHOWN = {
    "params": ("params", "{:,}"),
    "mmac": ("MMAC", "{:,.1f}"),
    "mixing_mmac": ("mixing\nMMAC", "{:,.2f}"),
    "saved_mb": ("saved\nMB", "{:,.1f}"),
    "saved_published_mb": ("published\nsaved MB", "{:,.1f}"),
    "memory_mb": ("step\nMB", "{:,.1f}"),
    "evaluation_ms": ("eval\nms", "{:,.1f}"),
    "training_ms": ("train\nms", "{:,.1f}"),
}
_EXPONENTS = {
    "mmac": "MACs",
    "mixing_mmac": "mixing",
    "saved_mb": "saved",
    "saved_published_mb": "published\nsaved",
    "evaluation_ms": "eval\ntime",
    "training_ms": "train\ntime",
}
_TITLES = {
    "exponents": "exponents, in blocks a stage, of what a method adds",
    "exponents_by_block": "the same of what one more block adds, plus one",
}


def _print(rows: list[dict[str, Any]], exponents: dict[str, list[dict[str, Any]]]) -> None:
    from itertools import groupby

    from lineattn.bench.profile import FITTED_DEPTHS

    shown = {name: look for name, look in _SHOWN.items() if name in rows[0]}
    for name, group in groupby(rows, lambda row: row["network"]):
        _print_table(name, shown, list(group))
    depths = ", ".join(map(str, list(dict.fromkeys(row["depth"] for row in rows))[-FITTED_DEPTHS:]))
    for kind, fits in exponents.items():
        shown = {name: (head, "{:.2f}") for name, head in _EXPONENTS.items() if any(name in fit for fit in fits)}
        if shown:
            _print_table(f"{_TITLES[kind]}; depths {depths}", shown, fits)
    print(
        "MMAC: of one image. mixing: multiply-adds of maps over depth, which MACs leave out. published: the naive\n"
        "form, which concatenates its cache. step: saved, parameters, gradients, buffers; on a GPU the allocator's\n"
        "peak. MB is 10^6 bytes. Times are noisy."
    )


def _print_table(title: str, columns: dict[str, tuple[str, str]], rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from lineattn.tasks.console import plain_console

    console = plain_console()
    console.print(title, style="bold")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", min_width=15, no_wrap=True)
    for head, _ in columns.values():
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom", min_width=6)
    for row in rows:
        name = "plain" if row["method"] == "none" else row["method"]
        table.add_row(f"  {name}", *(_number(row.get(key), form) for key, (_, form) in columns.items()))
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
