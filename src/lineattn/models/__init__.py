"""Complete networks, by name: our own where no library has one, torchvision's ResNets, and all of timm's."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from torch import nn

from lineattn import registry
from lineattn.errors import InputError, unknown
from lineattn.hosts.attach import attach
from lineattn.hosts.site import StateScope
from lineattn.hosts.sources import Source
from lineattn.hosts.swap import swap as exchange
from lineattn.models.cifar_resnet import BasicBlock, Bottleneck, CifarResNet
from lineattn.models.encoder import EncoderNetwork, encoder_of, load_weights
from lineattn.models.resunet import ResUNet
from lineattn.nn.depth.base import Init

Task = Literal["cls", "seg", "det"]
_SEGMENTATION = ("resunet", "eanet_resnet50", "eanet_resnet101")
_DETECTION = (
    *(f"{kind}_resnet{depth}" for kind in ("faster_rcnn", "mask_rcnn") for depth in (50, 101)),
    "retinanet_resnet50",
)
_DETECTORS = r"(faster_rcnn|mask_rcnn|retinanet)(?:_(resne[^/:]*)|:(.+))"
_CIFAR = (
    *(f"resnet{depth}_cifar" for depth in (20, 32, 44, 56, 110)),
    *(f"resnet{depth}_bottleneck_cifar" for depth in (20, 29, 56, 110, 164)),
)
# Arguments of other libraries' constructors that are given otherwise, or would make more, or less, than the network.
_REFUSED = {
    **dict.fromkeys(("name", "num_classes", "in_chans"), "it is an argument of its own, or comes from the data"),
    "zero_init_residual": "init='paper' asks for it",
    **dict.fromkeys(("pretrained", "checkpoint_path", "weights"), "trunk= loads weights"),
    "features_only": "the classifier belongs to the network",
}
_TORCHVISION = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)


def list_models(pattern: str | None = None, *, task: Task = "cls") -> list[str]:
    """Names of networks for a task that `create_model` takes, all or those that fit a pattern.

    CIFAR ResNets of other depths exist too, and ``timm/NAME`` is any network of timm; for segmentation there is
    ``smp/ARCHITECTURE:NAME``, an architecture of segmentation_models_pytorch on a network of timm, and for detection
    ``faster_rcnn:NAME``, ``mask_rcnn:NAME`` and ``retinanet:NAME`` on any network for classification.

    Args:
        pattern: With ``*`` and ``?``.
        task: ``cls``, classification, ``seg``, segmentation, or ``det``, detection.

    Raises:
        InputError: Another task.

    Example:
        >>> list_models("resnet*_bottleneck_cifar")[:2]
        ['resnet20_bottleneck_cifar', 'resnet29_bottleneck_cifar']
        >>> list_models(task="seg")
        ['resunet', 'eanet_resnet50', 'eanet_resnet101']
    """
    if task not in get_args(Task):
        raise InputError(f"task is {task!r}; it must be 'cls', 'seg' or 'det'")
    names = {"seg": _SEGMENTATION, "det": _DETECTION}.get(task, (*_CIFAR, *_TORCHVISION))
    return [name for name in names if pattern is None or fnmatch.fnmatch(name, pattern)]


def task_of(name: str) -> Task:
    """What a network is for, by its name; one that nobody knows counts as one for classification.

    Example:
        >>> task_of("resunet"), task_of("smp/unet:resnet50"), task_of("timm/resnet50"), task_of("mask_rcnn_resnet50")
        ('seg', 'seg', 'cls', 'det')
    """
    if re.fullmatch(_DETECTORS, name):
        return "det"
    return "seg" if name in _SEGMENTATION or name.startswith("smp/") else "cls"


def create_model(
    name: str,
    *,
    attn: str | None = None,
    trunk: Source | None = None,
    num_classes: int | None = None,
    in_chans: int = 3,
    init: Init = "identity",
    scope: str | StateScope | None = None,
    at: str | None = None,
    swap: str | None = None,
    width: int | None = None,
    net_args: Mapping[str, Any] | None = None,
    tell: Callable[[object], None] = print,
    **method_args: Any,
) -> nn.Module:
    """A network by name: plain, with attention over depth, or with other attention over the positions of a sample.

    Args:
        name: One of `list_models`, ``timm/NAME``, ``smp/ARCHITECTURE:NAME``, as ``smp/unet:resnet50``, or
            ``mask_rcnn:NAME``, ``faster_rcnn:NAME`` or ``retinanet:NAME``, as ``mask_rcnn:timm/convnext_tiny``.
        attn: Method of the depth axis, or of the sample axis with ``at`` or ``swap``; ``None`` or ``"none"`` for the
            plain network.
        trunk: Weights to start from, see `lineattn.hosts.weights.load_trunk`; of a network for segmentation or
            detection those of its encoder, or of all of it, see `lineattn.models.encoder.load_encoder`.
        num_classes: Classes; by default 10 for CIFAR networks, 21 for EANets, 1 for other segmentation, 90 for
            detection (the background is none of them), and the library's, 1000 mostly, for others.
        in_chans: Channels of the image.
        init: Start of the methods, see `lineattn.attach`. ``paper`` also starts torchvision's residual branches at
            zero, as the papers' ImageNet recipes do.
        scope: Reach of the state, see `lineattn.attach`.
        at: Name of the module that a block of the sample axis stands behind, see `lineattn.attach`.
        swap: Names of the attention in whose place a method of the sample axis comes, see `lineattn.swap`.
        width: Planes of the first stage of a CIFAR network, or of the stem of a ``resunet``, by default 16.
        net_args: Further arguments of the constructor that the network's library has for it, as ``img_size``; of ours,
            ``legacy_crop`` of `lineattn.models.resunet.ResUNet`, ``output_stride`` (8 or 16) of EANets, and what
            `lineattn.models.eanet.EANet` takes; of a detector what `lineattn.models.detection.build` takes, and
            ``trunk_args``, those of its trunk.
        tell: Gets the reports of ``swap`` and of ``trunk``; by default they are printed.
        method_args: Arguments of the method.

    Returns:
        The library's own network, for attention over depth in a `lineattn.hosts.depth_host.DepthHost`; of a network
        for segmentation or detection, whose attention is in its encoder, the encoder is in it.

    Raises:
        InputError: No such model, method, module or argument, or weights that don't fit.

    Example:
        >>> net = create_model("resnet20_bottleneck_cifar", attn="kcla", num_classes=100, init="paper")
        >>> sum(p.numel() for p in net.parameters())
        257938
        >>> sizes, memory = {"img_size": 64, "patch_size": 8, "depth": 1}, {"coef": 1, "slots": 64}
        >>> net = create_model(
        ...     "timm/vit_tiny_patch16_224", attn="external_multihead", swap="blocks.*.attn", net_args=sizes, **memory
        ... )
        external_multihead in the place of 1 modules
          blocks.0.attn (Attention): 148,224 -> 82,432 parameters, 11.2 -> 6.4 MMACs at 65 positions
        in all 148,224 -> 82,432 parameters, 11.2 -> 6.4 MMACs an image
    """
    _refuse_misplaced(attn, init=init, scope=scope, at=at, swap=swap, method_args=method_args)
    if not isinstance(net_args, Mapping | None):
        raise InputError(f"net_args is a {type(net_args).__name__}; it must be a dictionary of arguments")
    given = dict(net_args or {})
    if match := re.fullmatch(_DETECTORS, name):
        trunk_args = given.pop("trunk_args", None)
        encoder = create_model(
            match[2] or match[3],
            attn=attn,
            in_chans=in_chans,
            init=init,
            scope=scope,
            at=at,
            swap=swap,
            width=width,
            net_args=trunk_args,
            tell=tell,
            **method_args,
        )
        net = _built(name, given, _detector, kind=match[1], encoder=encoder, num_classes=num_classes)
        attn = None  # it has it
    elif match := re.fullmatch(r"resnet(\d+)(_bottleneck)?_cifar", name):
        if given:
            raise InputError(f"net_args={given}: {name} has none; width= is its only choice")
        block = Bottleneck if match[2] else BasicBlock
        classes = 10 if num_classes is None else num_classes
        net = CifarResNet(
            block, int(match[1]), num_classes=classes, in_chans=in_chans, width=16 if width is None else width
        )
    elif name == "resunet":
        net = _built(
            name, given, _resunet, num_classes=num_classes, in_chans=in_chans, width=16 if width is None else width
        )
    elif width is not None:
        raise InputError(f"width is for CIFAR networks and resunet; {name} has none")
    elif match := re.fullmatch(r"eanet_resnet(50|101)", name):
        net = _built(name, given, _eanet, depth=int(match[1]), num_classes=num_classes, in_chans=in_chans)
    elif name.startswith("smp/"):
        net = _built(name, given, _smp, num_classes=num_classes, in_chans=in_chans)
    elif name in _TORCHVISION:
        classes = 1000 if num_classes is None else num_classes
        net = _built(name, given, _torchvision, num_classes=classes, in_chans=in_chans, zero_branches=init == "paper")
    elif name.startswith("timm/"):
        net = _built(name, given, _timm, num_classes=num_classes, in_chans=in_chans)
    else:
        known = [other for task in get_args(Task) for other in list_models(task=task)]
        raise unknown("model", name, [*known, *_in_timm(name)])
    if attn is not None and attn != "none":
        encoder = encoder_of(net)
        try:
            if swap is not None:
                tell(exchange(encoder, swap, attn, **method_args))
            elif at is not None:
                encoder = attach(encoder, attn, at=at, init=init, **method_args)
            else:
                encoder = attach(encoder, attn, init=init, scope=scope, **method_args)
        except (TypeError, ValueError) as error:  # a value of another kind than the method takes
            if not method_args:
                raise
            raise InputError(f"{attn} can't be built with {method_args}: {' '.join(str(error).split())}") from error
        if isinstance(net, EncoderNetwork):
            net.set_encoder(encoder)
        else:
            net = encoder
    if trunk is not None:
        tell(load_weights(net, trunk))
    return net


def _refuse_misplaced(
    attn: str | None,
    *,
    init: Init,
    scope: str | StateScope | None,
    at: str | None,
    swap: str | None,
    method_args: Mapping[str, Any],
) -> None:
    """Refuses what the method has no use for, before the network is built."""
    where = {key: value for key, value in {"scope": scope, "at": at, "swap": swap}.items() if value is not None}
    if attn is None or attn == "none":
        if method_args or where:
            raise InputError(f"{', '.join([*method_args, *where])}: for a method, and attn is not given")
        return
    card = registry.get(attn)
    if card.axis == "token":
        raise InputError(f"attn={attn!r} is of the token axis, a layer for sequences ({card.where}); these see images")
    if card.axis != "sample":
        if odd := {"at", "swap"} & where.keys():
            raise InputError(
                f"{sorted(odd)[0]}: for a method of the sample axis; {attn} stands behind every block: leave it out"
            )
        return
    if (at is None) == (swap is None):
        both = "" if at is None else ", not both"
        raise InputError(
            f"{attn} stands behind one module, at='layer4', or in the place of attention, swap='blocks.*.attn': give "
            f"one of them{both}"
        )
    if scope is not None:
        raise InputError(f"scope={scope!r}: for attention over depth; {attn} is over the positions of a sample")
    if swap is not None and init != "identity":
        raise InputError(
            f"init={init!r}: for what is added to a network; in the place of attention, {attn} has no choice"
        )


def _built(name: str, net_args: dict[str, Any], build: Callable[..., nn.Module], **own: Any) -> nn.Module:
    """The library's network, with arguments that it may not take."""
    for key in net_args:
        if key in _REFUSED:
            raise InputError(f"net_args of {name} can't have {key!r}: {_REFUSED[key]}")
    try:
        return build(name, **own, **net_args)
    except InputError:
        raise
    except Exception as error:  # of anybody's code, which checks its arguments as it likes
        if not net_args:
            raise
        reason = " ".join(str(error).split())
        raise InputError(f"{name} can't be built with net_args={net_args}: {reason}") from error


def _resunet(_name: str, num_classes: int | None, **arguments: Any) -> nn.Module:
    return ResUNet(**arguments, **_classes(num_classes))


def _eanet(
    _name: str, depth: int, num_classes: int | None, in_chans: int, output_stride: int = 8, **net_args: Any
) -> nn.Module:
    """Imported here, as timm's import takes seconds."""
    from lineattn.models.eanet import EANet, dilated_resnet

    trunk = dilated_resnet(depth, output_stride=output_stride, in_chans=in_chans)
    return EANet(trunk, **_classes(num_classes), **net_args)


def _smp(name: str, num_classes: int | None, in_chans: int, **net_args: Any) -> nn.Module:
    """Imported here, as that library is optional."""
    from lineattn.models.smp import SmpNetwork

    architecture, colon, encoder = name.removeprefix("smp/").partition(":")
    if not colon:
        raise InputError(f"{name} names no encoder: smp/ARCHITECTURE:NAME, as smp/unet:resnet50")
    return SmpNetwork(architecture, encoder, in_chans=in_chans, **_classes(num_classes), **net_args)


def _detector(_name: str, kind: str, encoder: nn.Module, num_classes: int | None, **net_args: Any) -> nn.Module:
    """Imported here, as torchvision's import takes seconds."""
    from lineattn.models.detection import build

    return build(kind, encoder, **_classes(num_classes), **net_args)


def _classes(given: int | None) -> dict[str, Any]:
    """The network's own default where none are given."""
    return {} if given is None else {"num_classes": given}


def _torchvision(name: str, num_classes: int, in_chans: int, zero_branches: bool, **net_args: Any) -> nn.Module:
    """torchvision's network; imported here, as the import takes seconds."""
    from torchvision.models import get_model

    net: Any = get_model(name, num_classes=num_classes, zero_init_residual=zero_branches, **net_args)
    if in_chans != 3:
        net.conv1 = nn.Conv2d(in_chans, net.conv1.out_channels, 7, 2, 3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return net


def _timm(name: str, num_classes: int | None, in_chans: int, **net_args: Any) -> nn.Module:
    """timm's network; imported here, as the import takes seconds. Ours among them are registered first."""
    import timm

    import lineattn.models.eamlp  # noqa: F401

    arch, dot, _ = name.removeprefix("timm/").partition(".")
    if dot:
        raise InputError(f"{name} are weights: the network is timm/{arch}, and trunk={name!r} loads them into it")
    if not timm.is_model(arch):
        raise unknown("model", name, [f"timm/{known}" for known in timm.list_models()])
    return timm.create_model(arch, num_classes=num_classes, in_chans=in_chans, **net_args)


def _in_timm(name: str) -> list[str]:
    """What ``timm/`` was forgotten before."""
    import timm

    import lineattn.models.eamlp  # noqa: F401

    return [f"timm/{name}"] if timm.is_model(name) else []
