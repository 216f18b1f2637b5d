"""Names in timm: ``import lineattn.timm`` registers timm's networks with attention over depth, as ``resnet50_kcla``.

They take what timm's own entry points take, and the method's arguments beside it:

>>> import timm, lineattn.timm
>>> net = timm.create_model("resnet18_kcla", num_classes=7, in_chans=1, head_dim=16)
>>> pyramid = timm.create_model("resnet18_kcla", features_only=True, out_indices=(1, 2, 3, 4))
>>> pyramid.feature_info.channels()
[64, 128, 256, 512]

The state of the attention crosses stages, so features come from the network's own forward pass (``FeatureGetterNet``).
There are no pretrained weights of these networks; ``trunk="timm/resnet50.a1_in1k"``, or a path, loads those of the
network without attention, and the outputs start as that network's.

The networks of `lineattn.models.eamlp`, which have external attention from the start, are registered too: ``eamlp_7``,
``eamlp_10``, ``eamlp_12``, ``eamlp_14``, ``eamlp_19``, ``eamlp_24``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timm
from timm.models import (
    build_model_with_cfg,
    get_pretrained_cfg,
    is_model,
    model_entrypoint,
    register_model,
    resolve_pretrained_cfg,
)
from torch import nn

import lineattn.models.eamlp  # noqa: F401  # which registers its networks
from lineattn import registry
from lineattn.errors import InputError
from lineattn.hosts.attach import attach
from lineattn.hosts.site import StateScope
from lineattn.hosts.sources import Source
from lineattn.hosts.weights import load_trunk
from lineattn.nn.depth.base import Init


class _Family(NamedTuple):
    """Networks of timm, the methods they are registered with, and how many maps ``features_only`` gives by default."""

    trunks: tuple[str, ...]
    methods: tuple[str, ...]
    levels: int


_FAMILIES = (
    _Family(
        (
            *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
            *("resnet50d", "seresnet50", "resnext50_32x4d", "wide_resnet50_2"),
        ),
        ("kcla", "mrla_light", "mrla_base", "dla_light", "layer_softmax"),
        5,
    ),
    _Family(("regnety_004", "efficientnet_b0"), ("kcla",), 5),
    _Family(("convnext_tiny", "convnext_small", "swin_tiny_patch4_window7_224"), ("kcla",), 4),
    _Family(
        (*(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")), "deit_tiny_patch16_224"), ("kcla",), 3
    ),
)


def _build(
    arch: str,
    method: str,
    *,
    trunk: Source | None = None,
    init: Init = "identity",
    scope: str | StateScope | None = None,
    **arguments: Any,
) -> nn.Module:
    """The host; arguments that the method doesn't know are timm's."""
    own = inspect.signature(registry.get(method, axis="depth").cls).parameters.keys() & arguments.keys()
    net = timm.create_model(arch, **{key: value for key, value in arguments.items() if key not in own})
    host = attach(net, method, init=init, scope=scope, **{key: arguments[key] for key in own})
    if trunk is not None:
        print(load_trunk(host, trunk))
    return host


def _create(name: str, arch: str, method: str, levels: int, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """What timm calls for a registered name."""
    given = (arguments.get("pretrained_cfg"), arguments.get("pretrained_cfg_overlay"))
    if pretrained and not resolve_pretrained_cfg(name, *given).has_weights:
        raise InputError(
            f"there are no pretrained weights of {name}; start from those of {arch} with trunk=PATH or "
            f"trunk='timm/{timm.list_pretrained(f'{arch}.*')[0]}'"
        )
    if arguments.get("feature_cls", "getter") != "getter":
        raise InputError(
            f"{name}: feature_cls is {arguments['feature_cls']!r}; its attention crosses stages, so it must be 'getter'"
        )
    return build_model_with_cfg(
        partial(_build, arch, method),
        name,
        pretrained,
        feature_cfg={"feature_cls": "getter", "out_indices": levels},
        **arguments,
    )


def _config(name: str, arch: str) -> dict[str, Any]:
    """The trunk's configuration for the host: its data's, without its weights, with names as the host has them."""
    config = get_pretrained_cfg(arch)
    assert config is not None
    paths = {key: _in_backbone(getattr(config, key)) for key in ("first_conv", "classifier")}
    nowhere = {"url": "", "hf_hub_id": None, "hf_hub_filename": None, "custom_load": False}
    return dataclasses.asdict(dataclasses.replace(config, architecture=name, tag=None, **nowhere, **paths))


def _in_backbone(paths: Any) -> Any:
    if isinstance(paths, (tuple, list)):
        return tuple(map(_in_backbone, paths))
    return None if paths is None else f"backbone.{paths}"


default_cfgs: dict[str, dict[str, Any]] = {}  # timm looks here when a name is registered


def _register() -> None:
    """Registers every network with every method of its family.

    Raises:
        InputError: timm, or another package, has the name already; then none is registered.
    """
    entries: dict[str, Callable[..., nn.Module]] = {}
    for trunks, methods, levels in _FAMILIES:
        for arch in trunks:
            for method in methods:
                name = f"{arch}_{method}"
                entries[name] = _entry(name, arch, method, levels)
    for name in entries:
        if is_model(name) and model_entrypoint(name).__module__ != __name__:
            raise InputError(
                f"timm has a model {name!r} of {model_entrypoint(name).__module__} already; lineattn overwrites none"
            )
    for name, entry in entries.items():
        register_model(entry)
        globals()[name] = entry


def _entry(name: str, arch: str, method: str, levels: int) -> Callable[..., nn.Module]:
    default_cfgs[name] = _config(name, arch)

    def entry(pretrained: bool = False, **arguments: Any) -> nn.Module:
        return _create(name, arch, method, levels, pretrained, **arguments)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"timm's {arch} with {method} behind its blocks."
    return entry


_register()
