"""Checkpoints of the published KCLA, MRLA and DLA networks into ours."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost, site_key
from lineattn.hosts.sources import Source, read
from lineattn.hosts.weights import LoadReport, some, strip

# Published names to ours, of the modules at a site. KCLA's, MRLA's and DLA's codes share them.
_MODULES = {
    "Wq": "query",
    "Wk": "key",
    "Wv": "value",
    "bn": "norm",
    "bn_mrla": "norm",
    "bn_layer_attention": "norm",
    "head_att": "gate",
    "adjust_channel": "transition.conv",
    "u_bn": "transition.norm",
    "u_Wk": "transition.key",
    "lambda_t": "decay",
}
# Of the modules that DLA has once a stage; with us they stand at the stage's first site.
_STAGE_MODULES = {
    "lstm.w_ih.0.seq.": "cell.input.",
    "lstm.w_hh.0.seq.": "cell.hidden.",
    "extict.": "extract.",  # so on ImageNet
    "excite.": "extract.",  # and so on CIFAR
}
_STAGE = re.compile(r"(?:stages\.(?P<stage>\d+)|layer(?P<layer>\d+))\.")
_BLOCK = re.compile(r"(?:(?P<list>layers|attention)\.)?(?P<block>\d+)\.")
_METHOD_PARTS = {"kcla", "mrla", "bn_mrla"}
_TRANSITION = {"adjust_channel", "u_bn", "u_Wk"}
_UNUSED = {"norm_d", "bn2"}


def load_published(host: DepthHost, source: Source) -> LoadReport:
    """Loads a checkpoint of the published KCLA, MRLA or DLA networks, trunk and method.

    Their names for block ``i`` of a stage: for KCLA on CIFAR ``stages.S.i.*`` and ``stages.S.i.kcla.*``, on ImageNet
    ``layerN.layers.i.*`` and ``layerN.attention.i.*``; for MRLA ``layerN.i.*``, ``layerN.i.mrla.*`` and
    ``layerN.i.bn_mrla.*``; for DLA ``layerN.layers.i.*``, ``layerN.attention.i.*`` (``stages.S.`` on CIFAR) and, once
    a stage, ``layerN.lstm.*`` and ``layerN.extict.*`` (``excite`` on CIFAR). Members that their forward never calls
    (the first stage's transition) are dropped, and so are temperatures, which ours rebuilds from ``p``.

    Args:
        host: A host with ``init="paper"`` and the published form. KCLA: ``variant="ref-cls"``, ``head_dim=64`` for
            ImageNet networks, ``scope="anchors=11"`` for ResNet-101. DLA: ``leak_sample0=True``, ``reduction=4`` for
            CIFAR networks.
        source: A file or a state dict.

    Returns:
        What was loaded and what was dropped.

    Raises:
        InputError: A tensor is missing, left over or of another shape.
    """
    found = read(source)
    ours = host.state_dict()
    load: dict[str, Tensor] = {}
    dropped, unexpected = [], []
    for key, value in found.tensors.items():
        place = _place(strip(key, ours), host)
        if place is None:
            dropped.append((key, "never called in the published forward, or rebuilt here"))
        elif place not in ours:
            unexpected.append(key)
        elif _significant(ours[place]) != _significant(value):
            raise InputError(
                f"{found.name}: {key} has shape {tuple(value.shape)}, {place} has {tuple(ours[place].shape)}; "
                "is head_dim, width, num_classes, reduction or scope another?"
            )
        else:
            load[place] = value.reshape(ours[place].shape)
    if unexpected:
        raise InputError(f"{found.name}: no place for {some(unexpected)}; is it of another method or depth?")
    if lacking := [key for key in ours if key not in load and not key.endswith(".num_batches_tracked")]:
        raise InputError(f"{found.name}: nothing there for {some(lacking)}; is the host's scope or init another?")
    host.load_state_dict(load, strict=False)
    return LoadReport(found.name, tuple(load), dropped=tuple(dropped))


def _significant(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _place(key: str, host: DepthHost) -> str | None:
    """Our name for a published one; ``None`` for what the published forward doesn't use."""
    stage = _STAGE.match(key)
    if stage is None:
        return f"backbone.{key}"
    ours = f"stages.{stage['stage']}" if stage["layer"] is None else f"layer{stage['layer']}"
    rest = key[stage.end() :]
    for theirs, name in _STAGE_MODULES.items():
        if rest.startswith(theirs):
            return f"sites.{site_key(f'{ours}.0')}.{name}{rest.removeprefix(theirs)}"
    block = _BLOCK.match(rest)
    if block is None:
        return f"backbone.{key}"
    path, rest = f"{ours}.{block['block']}", rest[block.end() :]
    parts = rest.split(".")
    if block["list"] != "attention" and parts[0] not in _METHOD_PARTS:
        return f"backbone.{path}.{rest}"
    key_at = next((at for at, part in enumerate(parts) if part in _MODULES or part in _UNUSED), None)
    if key_at is None:
        return f"sites.{site_key(path)}.{rest}"
    module = parts[key_at]
    if module in _UNUSED or (module in _TRANSITION and _not_called(host, path, module)):
        return None
    return ".".join(["sites", site_key(path), _MODULES[module], *parts[key_at + 1 :]])


def _not_called(host: DepthHost, path: str, module: str) -> bool:
    """Theirs build a transition at the first stage too, and its convolution where nothing changes."""
    if site_key(path) not in host.sites:
        return False
    method: Any = host.sites[site_key(path)]
    if method.site.entry == "transition":
        return module == "adjust_channel" and method.transition.conv is None
    return method.site.entry == "start"
