"""How alike the keys of different layers are: what KCLA takes for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lineattn.analysis.record import Stretch
from lineattn.errors import InputError


def key_similarity(stretch: Stretch) -> Tensor:
    r"""Cosine between the keys of two layers, of every image and head.

    .. math:: c_{s,t} = \frac{\langle k_s, k_t \rangle}{\lVert k_s \rVert\, \lVert k_t \rVert}

    Where a layer makes keys of all layers' maps by its own projection, the last layer's are compared; else each layer's
    own. A key of length zero is at a right angle to all.

    Args:
        stretch: Sites of one stage, with what passed them.

    Returns:
        ``(B, h, T, T)``.

    Raises:
        InputError: The method has no keys, or none of single layers.

    Example:
        >>> import lineattn
        >>> from lineattn.analysis.record import record
        >>> host = lineattn.create_model("resnet20_cifar", attn="kcla")
        >>> key_similarity(record(host, torch.randn(2, 3, 32, 32))[0]).shape
        torch.Size([2, 1, 3, 3])
    """
    last = stretch.passages[-1].weights()
    if "key" in last:
        keys = torch.stack([passage.weights()["key"] for passage in stretch.passages], dim=2)
    else:
        keys = last.get("keys")
    if keys is None or keys.shape[2] != len(stretch.passages):
        raise InputError(f"{type(stretch.passages[-1].method).__name__} has no key of each layer to compare")
    unit = normalize(keys.double(), dim=-1, eps=torch.finfo(keys.dtype).tiny)
    return unit @ unit.transpose(-1, -2)


def similarity_rows(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """Mean and spread over images of `key_similarity`, a row for each stage, head and pair of layers.

    Returns:
        Rows with ``stage``, ``head``, ``layer``, ``other`` (an earlier layer), ``cosine`` and ``std``; counted from 1.
    """
    rows = []
    for stretch in _with_pairs(stretches):
        found = key_similarity(stretch)
        mean, std = found.mean(0), found.std(0, correction=0)
        for head, layer, other in _pairs(found):
            place = head, layer, other
            where = {"stage": stretch.stage, "head": head + 1, "layer": layer + 1, "other": other + 1}
            rows.append(where | {"cosine": mean[place].item(), "std": std[place].item()})
    if not rows:
        raise InputError("no stage of this network has two layers whose keys could be compared")
    return rows


def histogram_rows(stretches: Sequence[Stretch], bins: int = 40) -> list[dict[str, Any]]:
    """How the cosines of all images, heads and pairs of layers are spread over [-1, 1], by stage.

    Returns:
        Rows with ``stage``, ``from``, ``to`` and ``fraction``; the fractions of a stage sum to 1.
    """
    rows = []
    for stretch in _with_pairs(stretches):
        found = key_similarity(stretch)
        below = torch.ones(found.shape[-2:]).tril(-1).bool()
        values = found[..., below].flatten()
        counts, edges = torch.histogram(values.cpu().clamp(-1, 1), bins, range=(-1.0, 1.0))
        for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            rows.append({"stage": stretch.stage, "from": low, "to": high, "fraction": count / len(values)})
    return rows


def _with_pairs(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Those of two layers or more: one that is alone may have no key."""
    return [stretch for stretch in stretches if len(stretch.passages) > 1]


def _pairs(found: Tensor) -> Iterator[tuple[int, int, int]]:
    """Head, layer, earlier layer."""
    for head in range(found.shape[1]):
        for layer in range(1, found.shape[2]):
            for other in range(layer):
                yield head, layer, other
