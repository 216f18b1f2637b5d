"""What a layer still has of earlier ones: the shares of its attention, and how a learned decay wears them down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lineattn.analysis.record import Stretch, influence
from lineattn.errors import InputError
from lineattn.nn.depth.kcla import KCLA
from lineattn.nn.depth.key_correlated import KeyCorrelated, OneMean
from lineattn.nn.depth.mrla import MRLALight
from lineattn.nn.depth.pooled import PooledAttention

NOTHING = (
    "no layer of this network reaches another: no stage has two layers with attention that adds anything (with "
    "init='identity' it starts at zero gain; train first)"
)


def shares(stretch: Stretch) -> Tensor | None:
    r"""Attention of each layer to each source, or ``None`` for a method that gives no shares to single layers.

    KCLA's follow from each layer's own share :math:`\alpha_t = e^{S_t - \ell_t}` when it was written:

    .. math:: a_{t \to t} = \alpha_t, \qquad a_{s \to t} = a_{s \to t-1}\, (1 - \alpha_t)

    Args:
        stretch: Sites of one stage, with what passed them.

    Returns:
        ``(B, h, T, S)`` for the ``S`` sources of the stretch, zero where a source comes later. Of attention that
        differs from pixel to pixel, the mean over them, with ``h = 1``.

    Example:
        >>> import lineattn
        >>> from lineattn.analysis.record import record
        >>> host = lineattn.create_model("resnet20_cifar", attn="kcla")
        >>> stage = record(host, torch.randn(2, 3, 32, 32))[1]
        >>> stage.sources, shares(stage).shape
        (['earlier', '1', '2', '3'], torch.Size([2, 2, 3, 4]))
    """
    found = [passage.weights() for passage in stretch.passages]
    recurrent = all(isinstance(passage.method, KCLA | OneMean) for passage in stretch.passages)
    rows: list[Tensor] = []
    for t, weights in enumerate(found):
        share = weights.get("share")
        if share is None:
            return None
        if share.ndim == 4:  # (B, L, H, W)
            share = share.mean((2, 3))[:, None]
        if recurrent:
            before = rows[-1] if rows else share.new_ones(*share.shape, int(stretch.summed_up))
            share = torch.cat([before * (1 - share[..., None]), share[..., None]], dim=-1)
        if share.shape[2:] != (t + 1 + int(stretch.summed_up),):
            return None
        if (factor := weights.get("factor")) is not None:  # DLA-base wears its values down, a channel at a time
            share = share * factor.unflatten(-1, (share.shape[1], -1)).mean(-1).transpose(1, 2)
        rows.append(share.double())
    width = len(stretch.sources)
    return torch.stack([nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows], dim=2)


def decay_products(stretch: Stretch) -> dict[str, Tensor]:
    r"""How much a learned decay leaves of a layer, by channel; nothing for methods but MRLA-light.

    .. math:: \beta_{t,s} = \prod_{r=s+1}^{t} \lvert \lambda_r \rvert, \qquad
        \beta'_{t,s} = \prod_{r=s+1}^{t} \lvert \lambda_r\, g_{r-1}\, \gamma_{r-1} / \sigma_{r-1} \rvert

    The second is how attention itself reaches on where the decayed map is the block's shortcut, which has the layer
    before behind its batch norm, and behind the gain :math:`g` of ``init="identity"``.

    Returns:
        ``decay`` and, where it applies, ``decay and norm``, each ``(C, T, T)``, zero above the diagonal.
    """
    methods = [passage.method for passage in stretch.passages]
    if len(methods) < 2 or not all(isinstance(method, MRLALight) for method in methods):
        return {}
    decay = [cast(Tensor, method.decay).detach().double().abs() for method in methods[1:]]
    found = {"decay": _products(decay)}
    norms = [getattr(method, "norm", None) for method in methods]
    if methods[-1].needs_shortcut and all(isinstance(norm, nn.BatchNorm2d) for norm in norms):
        scales = []
        for method, norm in zip(methods, norms, strict=True):
            assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None
            scale = norm.weight.detach().double().abs() / (norm.running_var.double() + norm.eps).sqrt()
            scales.append(scale if method.gain is None else scale * method.gain.detach().double().abs())
        found["decay and norm"] = _products([a * b for a, b in zip(decay, scales[:-1], strict=True)])
    return found


def _products(factors: list[Tensor]) -> Tensor:
    """Products of ``factors[s:t]``, ``(C, T, T)``."""
    rows = [torch.ones(len(factors[0]), 1, dtype=torch.float64, device=factors[0].device)]
    for factor in factors:
        rows.append(nn.functional.pad(rows[-1] * factor[:, None], (0, 1), value=1.0))
    return torch.stack([nn.functional.pad(row, (0, len(rows) - row.shape[1])) for row in rows], dim=1)


def decay_rows(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    r"""All measures of what is left of a layer, a row for each stage, measure and pair of layers.

    Measures are ``share`` (see `shares`), ``decay`` and ``decay and norm`` (see `decay_products`), and ``influence``:
    :math:`I_{t,s} / I_{s,s}` of `lineattn.analysis.record.influence`, what a change of layer ``s`` does to the
    attention of layer ``t`` over what it does to its own.

    Returns:
        Rows with ``stage``, ``measure``, ``layer``, ``source``, ``distance``, and ``mean`` and ``std`` of the absolute
        value: over images and heads of a share, over channels of a decay, over images of an influence. Layers whose
        attention adds nothing have no influence.
    """
    rows = []
    for stretch in stretches:
        measures = dict(decay_products(stretch))
        attention = shares(stretch)
        if attention is not None:
            measures["share"] = attention[..., int(stretch.summed_up) :].flatten(0, 1).abs()
        moved = influence(stretch)
        own = moved.diagonal(dim1=1, dim2=2)[:, None]
        measures["influence"] = torch.where(own > 0, moved / own, torch.nan)
        for name, values in measures.items():
            for layer in range(values.shape[1]):
                for source in range(layer + 1):
                    found = values[:, layer, source]
                    found = found[found.isfinite()]
                    if len(found):
                        where = {"stage": stretch.stage, "measure": name, "layer": layer + 1, "source": source + 1}
                        spread = {"mean": found.mean().item(), "std": found.std(correction=0).item()}
                        rows.append(where | {"distance": layer - source} | spread)
    if not any(row["distance"] for row in rows):
        raise InputError(NOTHING)
    return rows


def map_rows(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """The map from sources to layers, a row for each stage, layer and source.

    Returns:
        Rows with ``stage``, ``measure``, ``layer``, ``source`` (a layer, or ``earlier``), and ``mean`` and
        ``std`` over images and heads: of shares where the method has them, else of the influence.
    """
    rows = []
    for stretch in stretches:
        attention, sources = shares(stretch), stretch.sources
        measure = "influence" if attention is None else "share"
        values = influence(stretch) if attention is None else attention.flatten(0, 1)
        if attention is None:
            sources = stretch.layers
        for t, layer in enumerate(stretch.layers):
            for s, source in enumerate(sources[: t + 1 + len(sources) - len(stretch.layers)]):
                found = values[:, t, s]
                where = {"stage": stretch.stage, "measure": measure, "layer": int(layer), "source": source}
                rows.append(where | {"mean": found.mean().item(), "std": found.std(correction=0).item()})
    if not any(row["mean"] for row in rows):
        raise InputError(NOTHING)
    return rows


def head_rows(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """Gate and temperature of each head, for methods that have them.

    Returns:
        Rows with ``stage``, ``site``, ``layer``, ``head``, ``gate`` and ``gate_std`` (mean and spread over images), and
        ``temperature``: what a head divides a key's length by, empty for methods without one.
    """
    rows = []
    for stretch in stretches:
        for layer, passage in enumerate(stretch.passages, start=1):
            method, gate = passage.method, passage.weights().get("gate")
            if gate is None or not isinstance(method, PooledAttention):  # a gate of channels is none of heads
                continue
            divisors = (
                method.head_temperatures().tolist() if isinstance(method, KeyCorrelated) else [None] * gate.shape[1]
            )
            mean, std = gate.double().mean(0).tolist(), gate.double().std(0, correction=0).tolist()
            for head, (one, spread, divisor) in enumerate(zip(mean, std, divisors, strict=True), start=1):
                where = {"stage": stretch.stage, "site": passage.name, "layer": layer, "head": head}
                rows.append(where | {"gate": one, "gate_std": spread, "temperature": divisor})
    return rows
