"""Weights of a trunk into a network or a host, with a report; published checkpoints of KCLA and MRLA into ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.files import load_torch
from lineattn.hosts.depth_host import DepthHost, site_key
from lineattn.hosts.plans import find

Source: TypeAlias = str | Path | Mapping[str, Any]

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.")


@dataclass(frozen=True)
class LoadReport:
    """What became of each tensor.

    Attributes:
        source: Where the weights came from.
        loaded: Names in the network that were set.
        new: Names in the network that the source doesn't have and need not: the methods, a fresh classifier.
        dropped: Names in the source that were left out on purpose, with the reason.
        unexpected: Names in the source that the network has no place for.
    """

    source: str
    loaded: tuple[str, ...]
    new: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.loaded)} tensors loaded"]
        if self.new:
            lines.append(f"new, as they were: {_some(self.new)}")
        lines += [f"dropped {name}: {reason}" for name, reason in self.dropped]
        if self.unexpected:
            lines.append(f"no place for: {_some(self.unexpected)}")
        return "\n".join(lines)


def load_trunk(net: nn.Module, source: Source, *, strict_head: bool = False) -> LoadReport:
    """Loads the weights of a plain network into a host's backbone or into the plain network itself.

    All or nothing: an error leaves the network as it was. Wrappers (``state_dict``) and prefixes (``module.``,
    ``_orig_mod.``, ``model.``, ``backbone.``) are taken off.

    Args:
        net: A host or a plain network.
        source: A file (``.safetensors``, or what `torch.save` wrote) or a state dict.
        strict_head: Whether a classifier that is missing or of another class count is an error; else ours stays.

    Returns:
        What was loaded, what is new, what was dropped, what was unexpected.

    Raises:
        InputError: The file can't be read, or a trunk weight is missing, renamed, or of another shape.

    Example:
        >>> import lineattn
        >>> plain = lineattn.create_model("resnet20_cifar", num_classes=10)
        >>> host = lineattn.create_model("resnet20_cifar", attn="kcla", num_classes=7)
        >>> report = load_trunk(host, plain.state_dict())
        >>> [name for name, reason in report.dropped]
        ['fc.weight', 'fc.bias']
    """
    trunk = net.backbone if isinstance(net, DepthHost) else net
    assert isinstance(trunk, nn.Module)
    head = find(trunk).classifier + "."
    ours = trunk.state_dict()
    name, theirs = read_state_dict(source)
    theirs = {_strip(key, ours): value for key, value in theirs.items()}

    load: dict[str, Tensor] = {}
    new, dropped = [], []
    for key, value in ours.items():
        given = theirs.get(key)
        if given is not None and given.shape == value.shape:
            load[key] = given
        elif key.startswith(head) and not strict_head:
            new.append(key)
            if given is not None:
                dropped.append((key, f"{tuple(given.shape)} there, {tuple(value.shape)} here (another class count?)"))
        elif given is not None:
            raise InputError(f"{name}: {key} has shape {tuple(given.shape)}; the network's is {tuple(value.shape)}")
        elif not key.endswith(".num_batches_tracked"):  # older files lack it, and nothing reads it
            raise _missing(name, key, [other for other in theirs if other not in ours])
    left = [key for key in theirs if key not in ours]
    dropped += [(key, "not of the trunk") for key in left if key.startswith("sites.")]
    trunk.load_state_dict(load, strict=False)
    if isinstance(net, DepthHost):
        new += [f"sites.{key}" for key in net.sites.state_dict()]
    unexpected = tuple(key for key in left if not key.startswith("sites."))
    return LoadReport(name, tuple(load), tuple(new), tuple(dropped), unexpected)


def read_state_dict(source: Source) -> tuple[str, dict[str, Tensor]]:
    """Name and tensors of a state dict or of a file that holds one; code in a file is never run.

    Raises:
        InputError: The file is missing, no weights file, or a pickle of something else than weights.
    """
    if isinstance(source, Mapping):
        return "state dict", _unwrap(source, "state dict")
    path = Path(source)
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a weights file (.safetensors, .pth) or a state dict")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return str(path), load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path}: not a whole safetensors file ({error})") from error
    return str(path), _unwrap(load_torch(path), str(path))


def _unwrap(content: Any, name: str) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
            break
        content = inner
    raise InputError(f"{name}: holds no state dict; it should map names to tensors")


def _strip(key: str, known: Mapping[str, Any]) -> str:
    while key not in known:
        prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
        if prefix is None:
            break
        key = key.removeprefix(prefix)
    return key


def _missing(source: str, key: str, unplaced: list[str]) -> InputError:
    near = difflib.get_close_matches(key, unplaced, n=1)
    hint = f"; it has {near[0]!r} (renamed?)" if near else "; is it of another network?"
    return InputError(f"{source}: the trunk's {key!r} is missing{hint}")


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown}, ... {len(names)} in all" if len(names) > 4 else shown


# Published names to ours, of the modules at a site. KCLA's and MRLA's codes share them.
_MODULES = {
    "Wq": "query",
    "Wk": "key",
    "Wv": "value",
    "bn": "norm",
    "bn_mrla": "norm",
    "head_att": "gate",
    "adjust_channel": "transition.conv",
    "u_bn": "transition.norm",
    "u_Wk": "transition.key",
    "lambda_t": "decay",
}
_BLOCK = re.compile(
    r"(?:stages\.(?P<stage>\d+)|layer(?P<layer>\d+))\.(?:(?P<list>layers|attention)\.)?(?P<block>\d+)\."
)
_METHOD_PARTS = {"kcla", "mrla", "bn_mrla"}
_TRANSITION = {"adjust_channel", "u_bn", "u_Wk"}
_UNUSED = {"norm_d", "bn2"}


def load_published(host: DepthHost, source: Source) -> LoadReport:
    """Loads a checkpoint of the published KCLA or MRLA networks, trunk and method.

    Their names for block ``i`` of a stage: on CIFAR ``stages.S.i.*`` and ``stages.S.i.kcla.*``; for KCLA on ImageNet
    ``layerN.layers.i.*`` and ``layerN.attention.i.*``; for MRLA ``layerN.i.*``, ``layerN.i.mrla.*`` and
    ``layerN.i.bn_mrla.*``. Members that their forward never calls (the first stage's transition) are dropped, and so
    are temperatures, which ours rebuilds from ``p``.

    Args:
        host: A host with ``init="paper"`` and the published form: ``variant="ref-cls"`` for KCLA, ``head_dim=64`` for
            ImageNet networks, ``scope="anchors=11"`` for ResNet-101.
        source: A file or a state dict.

    Returns:
        What was loaded and what was dropped.

    Raises:
        InputError: A tensor is missing, left over or of another shape.
    """
    name, theirs = read_state_dict(source)
    ours = host.state_dict()
    load: dict[str, Tensor] = {}
    dropped, unexpected = [], []
    for key, value in theirs.items():
        place = _published_place(_strip(key, ours), host)
        if place is None:
            dropped.append((key, "never called in the published forward, or rebuilt here"))
        elif place not in ours:
            unexpected.append(key)
        elif _significant(ours[place]) != _significant(value):
            raise InputError(
                f"{name}: {key} has shape {tuple(value.shape)}, {place} has {tuple(ours[place].shape)}; "
                "is head_dim, width, num_classes or scope another?"
            )
        else:
            load[place] = value.reshape(ours[place].shape)
    if unexpected:
        raise InputError(f"{name}: no place for {_some(tuple(unexpected))}; is it of another method or depth?")
    if lacking := [key for key in ours if key not in load and not key.endswith(".num_batches_tracked")]:
        raise InputError(f"{name}: nothing there for {_some(tuple(lacking))}; is the host's scope or init another?")
    host.load_state_dict(load, strict=False)
    return LoadReport(name, tuple(load), (), tuple(dropped))


def _significant(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _published_place(key: str, host: DepthHost) -> str | None:
    """Our name for a published one; ``None`` for what the published forward doesn't use."""
    block = _BLOCK.match(key)
    if block is None:
        return f"backbone.{key}"
    stage = f"stages.{block['stage']}" if block["layer"] is None else f"layer{block['layer']}"
    path, rest = f"{stage}.{block['block']}", key[block.end() :]
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
