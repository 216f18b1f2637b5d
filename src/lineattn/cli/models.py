"""`lineattn models`: what can be built."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lineattn.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

_TIMM = "timm/"
_ROWS = 40  # networks that are counted: each of timm takes a second


class Cost(NamedTuple):
    """A network's size: parameters, and MACs of one image of ``side`` pixels."""

    params: int
    macs: int
    side: int


def run(args: list[str]) -> int:
    """Prints the networks and the methods that can be attached to them, all or those that fit a pattern."""
    parser = argparse.ArgumentParser(
        prog="lineattn models",
        description="Networks with parameters and MACs, and the methods they take. A pattern also finds the names that "
        "lineattn.timm registers; timm's own networks are found as 'timm/PATTERN'.",
        allow_abbrev=False,
    )
    parser.add_argument("pattern", nargs="?", help="e.g. 'resnet*_cifar'; quote it, or the shell expands it")
    pattern = parser.parse_args(args).pattern

    from lineattn import list_methods, list_models
    from lineattn.tasks.console import plain_console

    if pattern is not None and pattern.startswith(_TIMM):
        names, pixels, registered = _of_timm(pattern), [], []
    else:
        names, pixels = list_models(pattern), list_models(pattern, task="seg")
        registered = _registered(pattern) if pattern else []
    methods = list_methods("depth") if names or pixels else fnmatch.filter(list_methods("depth"), pattern or "*")
    sample = fnmatch.filter(list_methods("sample"), pattern or "*")
    tokens = fnmatch.filter(list_methods("token"), pattern or "*")
    if not (names or pixels or registered or methods or sample or tokens):
        raise InputError(
            f"no network or method fits {pattern!r}; `lineattn models` lists all but timm's, which are timm/NAME"
        )
    console = plain_console()
    if names:
        console.print(_networks("networks (--model.name)", names, plain_cost))
    if pixels:
        console.print(_networks("of fit seg; also smp/ARCHITECTURE:NAME", pixels, plain_cost))
    if registered:
        console.print(_networks("registered by lineattn.timm (timm.create_model)", registered, timm_cost))
    if names or pixels or registered:
        console.print("A MAC is a multiply-accumulate of a convolution or matrix product, for one image.\n")
    if methods:
        console.print(_methods("attention over depth (--model.attn)", methods, "reads", _reads))
    if sample:
        title = "attention over positions (lineattn.swap, and lineattn.attach with at=)"
        console.print(_methods(title, sample, "stands", _stands))
    if tokens:
        console.print(_methods("attention over tokens (layers of lineattn.nn.token)", tokens, "of the input", _dynamic))
    console.print("`lineattn show NAME` says more about a network or a method.")
    return 0


def plain_cost(name: str) -> Cost:
    """Size of a network without attention, counted without allocating or computing anything."""
    from lineattn import create_model

    if name.startswith(_TIMM):
        return timm_cost(name.removeprefix(_TIMM))
    return _cost(lambda: create_model(name), 32 if name.endswith("_cifar") else 224)


def timm_cost(name: str) -> Cost:
    """Size of a network by its name in timm, ours among them, at the size that it is made for."""
    import timm

    config = timm.get_pretrained_cfg(name)
    assert config is not None
    return _cost(lambda: timm.create_model(name), config.input_size[-1])


def _cost(build: Callable[[], nn.Module], side: int) -> Cost:
    import torch

    from lineattn.analysis.cost import count_macs, count_params

    with torch.device("meta"):
        net, example = build(), torch.empty(1, 3, side, side)
    return Cost(count_params(net), count_macs(net.eval(), example), side)


def _of_timm(pattern: str) -> list[str]:
    import timm

    return fnmatch.filter([_TIMM + name for name in timm.list_models(exclude_filters="*_tpu*")], pattern)


def _registered(pattern: str) -> list[str]:
    import lineattn.timm
    from lineattn.models import eamlp

    return fnmatch.filter([*lineattn.timm.default_cfgs, *eamlp.default_cfgs], pattern)


def _networks(title: str, names: Sequence[str], cost: Callable[[str], Cost]) -> Table:
    from rich.table import Table

    from lineattn.cli.progress import bars

    shown = names[:_ROWS]
    rest = f"; {len(names) - _ROWS} more fit the pattern" if len(names) > _ROWS else ""
    table = Table(title=f"{title}{rest}", title_justify="left")
    table.add_column("name", overflow="fold")
    for column in ("parameters", "MMACs", "at"):
        table.add_column(column, justify="right")
    with bars() as progress:
        for name in progress.track(shown, description="counting"):
            try:
                found = cost(name)
            except Exception as error:  # the code of any network of timm
                table.add_row(name, "-", "-", type(error).__name__)
                continue
            table.add_row(name, f"{found.params:,}", f"{found.macs / 1e6:,.1f}", f"{found.side}x{found.side}")
    return table


def _methods(title: str, names: Sequence[str], what: str, value: Callable[[type], str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lineattn import registry

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("name", "time", "state", what, "arXiv"):
        table.add_column(column, no_wrap=True)
    table.add_column("method", overflow="fold")
    for card in map(registry.get, names):
        table.add_row(card.name, card.cost, card.state, value(card.cls), card.arxiv or card.paper, card.title)
    return table


def _reads(cls: Any) -> str:
    return "branch" if cls.position == "branch" else "output+shortcut" if cls.needs_shortcut else "output"


def _stands(cls: Any) -> str:
    return "behind a module" if cls.residual else "in its place"


def _dynamic(cls: Any) -> str:
    return cls.row.dynamic
