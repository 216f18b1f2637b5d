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
    first = next((module for module in net.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        raise InputError(f"a {type(net).__qualname__} has no 2-D convolution; attention over depth is for images")
    draws = torch.Generator().manual_seed(0)
    probe = torch.randn(2, first.in_channels, side, side, generator=draws, device="cpu")
    return probe.to(first.weight)
