"""`lineattn models`: what can be built."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from lineattn.errors import InputError


class Cost(NamedTuple):
    """A plain network's size: parameters, and MACs of one image of ``side`` pixels."""

    params: int
    macs: int
    side: int


def run(args: list[str]) -> int:
    """Prints the networks, all or those that fit a pattern, and the methods that can be attached to them."""
    parser = argparse.ArgumentParser(
        prog="lineattn models",
        description="Networks with parameters and MACs, and the methods they take.",
        allow_abbrev=False,
    )
    parser.add_argument("pattern", nargs="?", help="e.g. 'resnet*_cifar'; quote it, or the shell expands it")
    pattern = parser.parse_args(args).pattern

    from rich.table import Table

    from lineattn import list_methods, list_models, registry
    from lineattn.tasks.console import plain_console

    names = list_models(pattern)
    if not names:
        raise InputError(f"no network fits {pattern!r}; `lineattn models` lists all")
    networks = Table(title="networks (--model.name)", title_justify="left")
    networks.add_column("name")
    for column in ("parameters", "MMACs", "at"):
        networks.add_column(column, justify="right")
    for name in names:
        cost = plain_cost(name)
        networks.add_row(name, f"{cost.params:,}", f"{cost.macs / 1e6:,.1f}", f"{cost.side}x{cost.side}")
    methods = Table(title="attention over depth for each of them (--model.attn)", title_justify="left")
    for column in ("name", "method", "time", "state", "paper"):
        methods.add_column(column)
    for name in list_methods("depth"):
        card = registry.get(name)
        methods.add_row(name, card.title, card.cost, card.state, card.paper)
    console = plain_console()
    console.print(networks)
    console.print("A MAC is a multiply-accumulate of a convolution or matrix product, for one image.\n")
    console.print(methods)
    console.print("`lineattn show NAME` says more about a network or a method.")
    return 0


def plain_cost(name: str) -> Cost:
    """Size of a network without attention, counted without allocating or computing anything."""
    import torch

    from lineattn import create_model
    from lineattn.analysis.cost import count_macs, count_params

    side = 32 if name.endswith("_cifar") else 224
    with torch.device("meta"):
        net = create_model(name)
        example = torch.empty(1, 3, side, side)
    return Cost(count_params(net), count_macs(net, example), side)
