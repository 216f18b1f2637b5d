"""Checkpoints of the published EAMLP networks into ours.

Names, theirs to ours: ``tokens_to_token.attentionN.*`` to ``stem.attentionN.*``; in an attention ``q_linear`` and
``trans_dims`` to ``query``, ``linear_0`` to the memory's keys, ``linear_1`` to its values, ``proj`` to ``project``;
everything else is called the same. Keys and values are tensors of their own here, whatever was shared there.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.hosts.sources import Source, read
from lineattn.hosts.weights import LoadReport, some, strip
from lineattn.models.eamlp import EAMLP, STRIDE

# Parts of an attention, ours to theirs.
_IN_BLOCK = {
    "query.": "trans_dims.",
    "memory.keys": "linear_0.weight",
    "memory.key_bias": "linear_0.bias",
    "memory.values": "linear_1.weight",
    "memory.value_bias": "linear_1.bias",
    "project.": "proj.",
}
_IN_STEM = {
    "query.": "attn.q_linear.",
    "memory.keys": "attn.linear_0.weight",
    "memory.values": "attn.linear_1.weight",
    "value_bias": "attn.linear_1.bias",
    "project.": "attn.proj.",
}
_IN_OTHER_STEM = {  # of the file without dropout
    **_IN_STEM,
    "memory.keys": "attn.linear_1.weight",
    "memory.values": "attn.linear_2.weight",
    "value_bias": "attn.linear_2.bias",
}


def load_published(net: EAMLP, source: Source) -> LoadReport:
    """Loads a checkpoint of the published code (EANet's ``EAMLP/``), with either of its stems.

    All or nothing: an error leaves the network as it was.

    Args:
        net: A network of the same size; with ``norm="official"`` it computes what theirs does.
        source: A file or a state dict.

    Returns:
        What was loaded.

    Raises:
        InputError: A tensor is missing, left over or of another shape, the table of positions is no table of sines, or
            the source can't be read.

    Example:
        >>> net = EAMLP(embed_dim=32, depth=2, heads=2, num_classes=5, img_size=32)
        >>> load_published(net, {"head.bias": torch.zeros(7)})
        Traceback (most recent call last):
        lineattn.errors.InputError: state dict: head.bias has shape (7,), the network's is (5,); is num_classes another?
    """
    found, ours = read(source), {**net.state_dict(), "pos_embed": net.pos_embed}
    in_stem = _IN_OTHER_STEM if any("attention1.attn.linear_2." in key for key in found.tensors) else _IN_STEM
    places = {_published(key, in_stem): key for key in ours}
    load: dict[str, Tensor] = {}
    unexpected = []
    for key, value in found.tensors.items():
        key = strip(key, places)
        if key not in places:
            unexpected.append(key)
            continue
        place = places[key]
        turned = place.endswith("memory.values")  # a linear layer's weight there, rows of slots here
        shape = ours[place].mT.shape if turned else ours[place].shape
        if value.shape != shape:
            raise InputError(
                f"{found.name}: {key} has shape {tuple(value.shape)}, the network's is {tuple(shape)}; "
                f"is {_other(place, value)} another?"
            )
        load[place] = value.mT if turned else value
    if unexpected:
        raise InputError(f"{found.name}: no place for {some(unexpected)}; is it of another network or depth?")
    if lacking := [key for key, place in places.items() if place not in load]:
        raise InputError(f"{found.name}: nothing there for {some(lacking)}; is it of another network or depth?")
    if not torch.allclose(load.pop("pos_embed").to(net.pos_embed), net.pos_embed, atol=1e-3):
        raise InputError(f"{found.name}: its pos_embed is not the table of sines that the published networks have")
    net.load_state_dict(load)
    return LoadReport(found.name, tuple(load))


def _published(key: str, in_stem: dict[str, str]) -> str:
    """The published name for ours."""
    match = re.match(r"stem\.attention\d\.|blocks\.\d+\.attn\.", key)
    if match:
        path, part = match[0], key[match.end() :]
        names = in_stem if path.startswith("stem") else _IN_BLOCK
        name = next((name for name in names if part.startswith(name)), "")
        key = path + names.get(name, "") + part.removeprefix(name)
    return re.sub(r"^stem\.", "tokens_to_token.", key)


def _other(place: str, value: Tensor) -> str:
    """The argument by which a shape differs."""
    if place == "pos_embed" and value.ndim == 3:
        return f"img_size (of square images it was {STRIDE * math.isqrt(value.shape[1] - 1)})"
    return "num_classes" if place.startswith("head.") else "embed_dim, heads, mlp_ratio or in_chans"
