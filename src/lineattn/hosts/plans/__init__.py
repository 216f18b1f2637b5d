"""One file a family of networks; a new one is added to `PLANS`."""

from __future__ import annotations

from torch import nn

from lineattn.errors import InputError
from lineattn.hosts.plans import cifar_resnet, torchvision_resnet
from lineattn.hosts.step import Plan

PLANS: tuple[Plan, ...] = (cifar_resnet.PLAN, torchvision_resnet.PLAN)


def find(net: nn.Module) -> Plan:
    """The plan of a network.

    Raises:
        InputError: No plan knows the network; the families that are known are listed.
    """
    for plan in PLANS:
        if plan.matches(net):
            return plan
    families = ", ".join(plan.family for plan in PLANS)
    raise InputError(f"no plan for a {type(net).__module__}.{type(net).__qualname__}; supported families: {families}")
