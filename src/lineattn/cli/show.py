"""`lineattn show`: one method or one network."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import TYPE_CHECKING

from lineattn.errors import unknown

if TYPE_CHECKING:
    from lineattn.registry import Card


def run(args: list[str]) -> int:
    """Prints what there is to know of a method or a network."""
    parser = argparse.ArgumentParser(
        prog="lineattn show",
        description="A method: equation, paper, cost, arguments. A network: stages, parameters, MACs.",
        allow_abbrev=False,
    )
    parser.add_argument("name", help="a name from `lineattn models`")
    parser.add_argument("--attn", help="for a network: with this method attached")
    options = parser.parse_args(args)

    from lineattn import list_methods, list_models, registry
    from lineattn.errors import InputError

    name = options.name
    if name in list_methods():
        if options.attn:
            raise InputError(f"--attn {options.attn}: for a network; {name} is a method")
        print(_method(registry.get(name)))
        return 0
    for method in list_methods("depth"):
        if name.endswith(f"_{method}") and not options.attn:  # as lineattn.timm registers them
            print(_network(f"timm/{name.removesuffix(f'_{method}')}", method))
            return 0
    networks = [*list_models(), *list_models(task="seg")]
    if name not in networks and not name.endswith("_cifar") and not name.startswith(("timm/", "smp/")):
        raise unknown("method or network", name, [*list_methods(), *networks])
    print(_network(name, options.attn))
    return 0


def _method(card: Card) -> str:
    where = f"{card.paper}, arXiv {card.arxiv}" if card.arxiv else card.paper
    theory = inspect.getdoc(sys.modules[card.cls.__module__]) or ""
    lines = [
        f"{card.name}: {card.title}",
        f"  paper   {where}",
        f"  axis    {card.axis}; time {card.cost}, state {card.state}",
        f"  class   {card.where}",
    ]
    if card.axis == "token":
        lines.append(f"  made of {card.cls.row}")
    if card.start:
        lines.append(f"  start   with init='paper' the network starts changed: {card.start}")
    lines += [
        f"  no gradient by construction: {name}: {reason}"
        for name, reason in (*card.no_gradient, *card.no_gradient_alone)
    ]
    return "\n".join([*lines, "", _plain(theory), "", _plain(inspect.getdoc(card.cls) or "")])


def _plain(text: str) -> str:
    """A docstring without its markup; the equations stay as TeX."""
    return text.replace(".. math::", "").replace(":math:", "").replace("``", "`")


def _network(name: str, attn: str | None) -> str:
    import torch

    from lineattn import attach, create_model
    from lineattn.analysis.cost import count_macs, count_params
    from lineattn.cli.models import plain_cost
    from lineattn.models.segmentation import SegmentationNetwork

    plain = plain_cost(name)
    net = create_model(name)
    pixels = isinstance(net, SegmentationNetwork)
    host = attach(net.get_encoder() if pixels else net, attn or "kcla")
    if pixels:
        net.set_encoder(host)
    whole = net if pixels else host
    lines = [
        f"{name}: {plain.params:,} parameters, {plain.macs / 1e6:,.1f} MMACs at {plain.side}x{plain.side}",
        "  stage    channels  reduction  ends at",
    ]
    lines += [
        f"  {stage:<8} {info['num_chs']:>8}  {info['reduction']:>9}  {info['module']}"
        for stage, info in enumerate(host.feature_info)
    ]
    if pixels:
        lines.append("  these are of its encoder; each pixel gets a class")
    else:
        lines.append(f"  classifier for {host.num_classes} classes reads {host.head_hidden_size} features")
    if attn:
        macs, params = count_macs(whole, torch.empty(1, 3, plain.side, plain.side, device="meta")), count_params(whole)
        lines.append(
            f"with {attn} behind {len(host.sites)} blocks: {params:,} parameters "
            f"(+{params / plain.params - 1:.1%}), {macs / 1e6:,.1f} MMACs (+{macs / plain.macs - 1:.1%})"
        )
    else:
        lines.append(f"  {len(host.sites)} blocks that attention over depth can stand behind; see --attn METHOD")
    return "\n".join(lines)
