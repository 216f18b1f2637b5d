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

from lineattn.bench.timing import take_turns
from lineattn.hosts import plans
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.fold import fold_batch_norms
from lineattn.measure import SavedBytes
from lineattn.models import create_model

CLASSES = 100


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
        step = _train if mode == "training step" else _evaluate
        calls = {
            name: _bind(step, net.train(mode == "training step"), images, labels) for name, net in variants.items()
        }
        timings = take_turns(calls, rounds=rounds, tick=tick)
        plain = timings["none"]
        rows += [
            {
                "network": network,
                "mode": mode,
                "method": name,
                "wall_ms": round(timing.wall, 1),
                "cpu_ms": round(timing.cpu, 1),
                "wall_ratio": round(timing.wall / plain.wall, 3),
                "cpu_ratio": round(timing.cpu / plain.cpu, 3),
            }
            for name, timing in timings.items()
        ]
    saved = {name: _saved_bytes(net.train(), images, labels) for name, net in nets.items()}
    rows += [
        {
            "network": network,
            "mode": "saved",
            "method": name,
            "saved_mb": round(count / 1e6, 1),
            "saved_ratio": round(count / saved["none"], 3),
        }
        for name, count in saved.items()
    ]
    return rows


def _for_evaluation(net: nn.Module, *, trunk: bool) -> nn.Module:
    if isinstance(net, DepthHost):
        return net.fuse(trunk=trunk)
    net = copy.deepcopy(net).eval()
    if trunk:
        fold_batch_norms([step.module for step in plans.find(net).steps(net)], net)
    return net


def _bind(
    step: Callable[[nn.Module, Tensor, Tensor], object], net: nn.Module, images: Tensor, labels: Tensor
) -> Callable[[], object]:
    return lambda: step(net, images, labels)


def _evaluate(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    with torch.no_grad():
        net(images)


def _train(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    net.zero_grad(set_to_none=True)
    cross_entropy(net(images), labels).backward()


def _saved_bytes(net: nn.Module, images: Tensor, labels: Tensor) -> int:
    saved = SavedBytes()
    with saved.counting(net, images):
        loss = cross_entropy(net(images), labels)
    del loss
    return saved.total
