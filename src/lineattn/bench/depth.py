"""Depth attention against the plain network: evaluation, training step, and what autograd saves.

Both sides are in channels_last, which is the faster layout of the plain network. In evaluation the trunk's batch norms
are folded on both sides or on neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lineattn.bench.timing import compared, take_turns
from lineattn.hosts import plans
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.fold import fold_batch_norms
from lineattn.measure import SavedBytes
from lineattn.models import create_model
from lineattn.ops import native

CLASSES = 100

# Methods of the depth axis that have native kernels; PyTorch computes the others.
_WITH_KERNELS = ("kcla",)


def measure(
    network: str,
    methods: list[str],
    *,
    batch_size: int,
    image_size: int,
    rounds: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One row for the plain network and one for each method, in each of four modes.

    Args:
        network: A name that `lineattn.create_model` knows.
        methods: Methods of the depth axis, in the papers' form (``init="paper"``, drop path 0.2).
        batch_size: Images a call.
        image_size: Height and width, pixels.
        rounds: Timed calls a row.
        seed: Seed of weights and images.
        tick: Called after every timed call.

    Returns:
        Rows with ``mode``, ``method``, medians ``wall_ms`` and ``cpu_ms`` and their ratios to the plain network's
        ``wall_ratio`` and ``cpu_ratio``; for mode ``saved`` instead ``saved_mb`` (10^6 bytes) and ``saved_ratio``.
        Rows of a method say in ``native`` whether its kernels ran.
    """
    draws = torch.Generator().manual_seed(seed)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=draws)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch_size,), generator=draws)
    nets: dict[str, nn.Module] = {}
    for method in ("none", *methods):
        torch.manual_seed(seed)
        net = create_model(network, attn=method, num_classes=CLASSES, init="paper")
        nets[method] = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    rows = []
    for mode, variants in (
        ("evaluation", {name: _for_evaluation(net, trunk=False) for name, net in nets.items()}),
        ("evaluation, trunk folded", {name: _for_evaluation(net, trunk=True) for name, net in nets.items()}),
        ("training step", nets),
    ):
        step = train_step if mode == "training step" else evaluate
        steps = {
            name: _bind(step, net.train(mode == "training step"), images, labels) for name, net in variants.items()
        }
        times = compared(take_turns(steps, rounds=rounds, tick=tick), "none")
        rows += [{"network": network, "mode": mode, "method": name} | times[name] | ran(name) for name in steps]
    saved = {name: saved_bytes(net.train(), images, labels) for name, net in nets.items()}
    rows += [
        {
            "network": network,
            "mode": "saved",
            "method": name,
            "saved_mb": round(count / 1e6, 1),
            "saved_ratio": round(count / saved["none"], 3),
        }
        | ran(name)
        for name, count in saved.items()
    ]
    return rows


def calls(methods: list[str], rounds: int) -> int:
    """How often `measure` will call ``tick``."""
    return 3 * (1 + len(methods)) * rounds


def ran(method: str) -> dict[str, str]:
    """What a row says of the native kernels: their status, or that the method has none; nothing for ``none``."""
    if method == "none":
        return {}
    return {"native": native.status() if method in _WITH_KERNELS else "no kernels"}


def _for_evaluation(net: nn.Module, *, trunk: bool) -> nn.Module:
    if isinstance(net, DepthHost):
        return net.fuse(trunk=trunk)
    net = copy.deepcopy(net).eval()
    if trunk:
        fold_batch_norms(list(plans.find(net).steps(net)), net)
    return net


def _bind(
    step: Callable[[nn.Module, Tensor, Tensor], object], net: nn.Module, images: Tensor, labels: Tensor
) -> Callable[[], object]:
    return lambda: step(net, images, labels)


def evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """One forward pass without gradients."""
    with torch.no_grad():
        net(images)


def train_step(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """One forward and one backward pass; no weight is changed."""
    net.zero_grad(set_to_none=True)
    cross_entropy(net(images), labels).backward()


def saved_bytes(net: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Bytes that autograd keeps of a training step's forward pass, beyond parameters, buffers and images."""
    saved = SavedBytes()
    with saved.counting(net, images):
        loss = cross_entropy(net(images), labels)
    del loss
    return saved.total
