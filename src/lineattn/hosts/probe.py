"""Running a network on a small input, without a trace of it left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lineattn.errors import InputError


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and the modes that its modules had behind it."""
    flags = {module: module.training for module in net.modules()}
    try:
        net.eval()
        yield
    finally:
        for module, training in flags.items():
            module.training = training


@contextmanager
def same_draws(probe: Tensor) -> Iterator[None]:
    """Random numbers drawn inside start from one seed, and the user's stream goes on as if there had been none."""
    # Generator by generator: torch.manual_seed would also seed accelerators that aren't forked here.
    with torch.random.fork_rng([probe.device] if probe.is_cuda else []):
        torch.default_generator.manual_seed(0)
        if probe.is_cuda:
            with torch.cuda.device(probe.device):
                torch.cuda.manual_seed(0)
        yield


def make_probe(net: nn.Module, side: int) -> Tensor:
    """Two random images, with the channels, on the device and of the numbers that a network's first layer has."""
    images = images_of(net)
    if images is None:
        raise InputError(f"a {type(net).__qualname__} has no 2-D convolution; attention over depth is for images")
    channels, like = images
    draws = torch.Generator().manual_seed(0)
    return torch.randn(2, channels, side, side, generator=draws, device="cpu").to(like)


def images_of(net: nn.Module) -> tuple[int, Tensor] | None:
    """Channels of the images that a network is for, and a tensor on their device and of their numbers.

    Those of its first convolution; without one, the channels are what the network says, as timm's do.
    """
    first = next((module for module in net.modules() if isinstance(module, nn.Conv2d)), None)
    if first is not None:
        return first.in_channels, first.weight
    channels = getattr(net, "in_chans", None)
    return None if channels is None else (channels, next(net.parameters()))
