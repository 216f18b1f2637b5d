"""One file a family of networks; a new one is added to `PLANS`. `traced` derives a plan for the others."""

from __future__ import annotations

from torch import nn

from lineattn.errors import InputError
from lineattn.hosts.plans import (
    cifar_resnet,
    convnext,
    eamlp,
    efficientnet,
    regnet,
    resunet,
    swin,
    timm_resnet,
    torchvision_resnet,
    traced,
    vit,
)
from lineattn.hosts.step import Plan

PLANS: tuple[Plan, ...] = (
    cifar_resnet.PLAN,
    torchvision_resnet.PLAN,
    timm_resnet.PLAN,
    *(plan for family in (convnext, regnet, efficientnet, vit, swin) for plan in (family.TIMM, family.TORCHVISION)),
    eamlp.PLAN,
    resunet.PLAN,
)


def find(net: nn.Module) -> Plan:
    """The plan of a network: its family's, or an experimental one, with a warning.

    Raises:
        InputError: No plan knows the network and none can be derived; the families that are known are listed.
    """
    for plan in PLANS:
        if plan.matches(net):
            return plan
    try:
        return traced.derive(net)
    except InputError as error:
        families = ", ".join(plan.family for plan in PLANS)
        raise InputError(
            f"no plan for a {type(net).__module__}.{type(net).__qualname__}: {error}; supported families: {families}"
        ) from error
