"""Which modules of a network are in its first stages: those that fine-tuning for other tasks leaves as they are."""

from __future__ import annotations

from torch import nn

from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost, site_key


def freeze_stages(host: DepthHost, stages: int) -> list[nn.Module]:
    """Freezes the stem and the first stages, with the attention behind their blocks.

    Args:
        host: The network.
        stages: How many stages; 0 freezes nothing.

    Returns:
        The modules, whose batch norms the caller keeps in evaluation.

    Raises:
        InputError: The network has fewer.

    Example:
        >>> import lineattn
        >>> host = lineattn.create_model("resnet20_cifar", attn="kcla")
        >>> len(freeze_stages(host, 1)), host.backbone.conv1.weight.requires_grad
        (9, False)
    """
    frozen: list[nn.Module] = []
    done = 0
    if stages:
        for name in host.plan.stem:
            host.backbone.get_parameter(name).requires_grad_(False)
    for step in host.plan.steps(host.backbone):
        if done == stages:
            break
        if isinstance(step.module, nn.Module):
            frozen.append(step.module)
        if site_key(step.path) in host.sites:
            frozen.append(host.sites[site_key(step.path)])
        done += step.stage_end
    if done < stages:
        raise InputError(f"{stages} frozen stages: the network has {done}")
    for module in frozen:
        module.requires_grad_(False)
    return frozen
