"""Complete networks, by name: our own where no library has one, torchvision's ResNets, and all of timm's."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from torch import nn

from lineattn.errors import InputError, unknown
from lineattn.hosts.attach import attach
from lineattn.hosts.site import StateScope
from lineattn.hosts.sources import Source
from lineattn.hosts.weights import load_trunk
from lineattn.models.cifar_resnet import BasicBlock, Bottleneck, CifarResNet
from lineattn.nn.depth.base import Init

_CIFAR = (
    *(f"resnet{depth}_cifar" for depth in (20, 32, 44, 56, 110)),
    *(f"resnet{depth}_bottleneck_cifar" for depth in (20, 29, 56, 110, 164)),
)
_TORCHVISION = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)


def list_models(pattern: str | None = None) -> list[str]:
    """Names that `create_model` takes, all or those that fit a pattern.

    CIFAR ResNets of other depths exist too, and ``timm/NAME`` is any network of timm.

    Example:
        >>> list_models("resnet*_bottleneck_cifar")[:2]
        ['resnet20_bottleneck_cifar', 'resnet29_bottleneck_cifar']
    """
    names = (*_CIFAR, *_TORCHVISION)
    return [name for name in names if pattern is None or fnmatch.fnmatch(name, pattern)]


def create_model(
    name: str,
    *,
    attn: str | None = None,
    trunk: Source | None = None,
    num_classes: int | None = None,
    in_chans: int = 3,
    init: Init = "identity",
    scope: str | StateScope | None = None,
    width: int | None = None,
    **method_args: Any,
) -> nn.Module:
    """A network by name, plain or with attention over depth.

    Args:
        name: One of `list_models`, or ``timm/NAME``.
        attn: Method of the depth axis; ``None`` or ``"none"`` for the plain network.
        trunk: Weights to start from, see `lineattn.hosts.weights.load_trunk`; what became of each is printed.
        num_classes: Classes; by default 10 for CIFAR networks and the library's, 1000 mostly, for others.
        in_chans: Channels of the image.
        init: Start of the methods, see `lineattn.attach`. ``paper`` also starts torchvision's residual branches at
            zero, as the papers' ImageNet recipes do.
        scope: Reach of the state, see `lineattn.attach`.
        width: Planes of the first stage of a CIFAR network, by default 16.
        method_args: Arguments of the method.

    Returns:
        The plain network, or a `lineattn.hosts.depth_host.DepthHost`.

    Raises:
        InputError: No such model, method or argument, or weights that don't fit.

    Example:
        >>> net = create_model("resnet20_bottleneck_cifar", attn="kcla", num_classes=100, init="paper")
        >>> sum(p.numel() for p in net.parameters())
        257938
    """
    if match := re.fullmatch(r"resnet(\d+)(_bottleneck)?_cifar", name):
        block = Bottleneck if match[2] else BasicBlock
        classes = 10 if num_classes is None else num_classes
        net = CifarResNet(
            block, int(match[1]), num_classes=classes, in_chans=in_chans, width=16 if width is None else width
        )
    elif width is not None:
        raise InputError(f"width is for CIFAR networks; {name} has none")
    elif name in _TORCHVISION:
        net = _torchvision(name, 1000 if num_classes is None else num_classes, in_chans, init == "paper")
    elif name.startswith("timm/"):
        net = _timm(name, num_classes, in_chans)
    else:
        raise unknown("model", name, [*list_models(), *_in_timm(name)])
    if attn is None or attn == "none":
        if method_args or scope is not None:
            given = ", ".join([*method_args, *(["scope"] if scope is not None else [])])
            raise InputError(f"{given}: for a method, and attn is not given")
    else:
        net = attach(net, attn, init=init, scope=scope, **method_args)
    if trunk is not None:
        print(load_trunk(net, trunk))
    return net


def _torchvision(name: str, num_classes: int, in_chans: int, zero_branches: bool) -> nn.Module:
    """torchvision's network; imported here, as the import takes seconds."""
    from torchvision.models import get_model

    net: Any = get_model(name, num_classes=num_classes, zero_init_residual=zero_branches)
    if in_chans != 3:
        net.conv1 = nn.Conv2d(in_chans, net.conv1.out_channels, 7, 2, 3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return net


def _timm(name: str, num_classes: int | None, in_chans: int) -> nn.Module:
    """timm's network; imported here, as the import takes seconds. Ours among them are registered first."""
    import timm

    import lineattn.models.eamlp  # noqa: F401

    arch, dot, _ = name.removeprefix("timm/").partition(".")
    if dot:
        raise InputError(f"{name} are weights: the network is timm/{arch}, and trunk={name!r} loads them into it")
    if not timm.is_model(arch):
        raise unknown("model", name, [f"timm/{known}" for known in timm.list_models()])
    return timm.create_model(arch, num_classes=num_classes, in_chans=in_chans)


def _in_timm(name: str) -> list[str]:
    """What ``timm/`` was forgotten before."""
    import timm

    import lineattn.models.eamlp  # noqa: F401

    return [f"timm/{name}"] if timm.is_model(name) else []
