"""Cost against depth: what a training step keeps, what it keeps in the published forms, times, and how all this grows.

Networks are in channels_last and start as the papers do unless told otherwise; labels are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lineattn.bench.depth import evaluate, saved_bytes, train_step
from lineattn.bench.published import PublishedKCLA
from lineattn.bench.published_mixing import PublishedLayerSoftmax, PublishedMRLABase
from lineattn.bench.timing import exponent, take_turns
from lineattn.measure import static_bytes
from lineattn.models import create_model
from lineattn.models.cifar_resnet import Bottleneck, CifarResNet

Row = dict[str, Any]

PUBLISHED: Mapping[str, Callable[..., nn.Module]] = {
    "kcla": PublishedKCLA,
    "mrla_base": PublishedMRLABase,
    "layer_softmax": PublishedLayerSoftmax,
}
"""Methods whose published form is kept: ``(channels, head_dim, *, drop_path)`` makes a layer of ``(x, state)``."""

HEAD_DIM = 16  # of the papers' CIFAR networks

COUNTED = ("mmac", "mixing_mmac", "saved_mb", "saved_published_mb")
TIMED = ("evaluation_ms", "training_ms")
FITTED_DEPTHS = 3


class Batch(NamedTuple):
    """Images ``(B, C, H, W)``, channels_last, and labels ``(B,)``, drawn."""

    images: Tensor
    labels: Tensor


def draw(shape: tuple[int, int, int, int], classes: int, device: str, seed: int = 0) -> Batch:
    """A batch of normal noise."""
    draws = torch.Generator().manual_seed(seed)
    images = torch.randn(shape, generator=draws).to(device).contiguous(memory_format=torch.channels_last)
    return Batch(images, torch.randint(classes, shape[:1], generator=draws).to(device))


def build(arguments: Mapping[str, Any], device: str, seed: int = 0) -> nn.Module:
    """`lineattn.create_model` by its arguments, in channels_last and in training mode."""
    torch.manual_seed(seed)
    net = create_model(**arguments).train().to(device)
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class PublishedResNet(nn.Module):
    """A CIFAR ResNet with a published form behind every block; each stage starts without a state.

    Args:
        net: The plain network; its modules are shared.
        method: One of `PUBLISHED`.
        head_dim: Width of a head; where it does not divide the channels, their greatest common divisor.
        drop_path: Probability of leaving out the attention of a sample in training.
    """

    def __init__(self, net: CifarResNet, method: str, *, head_dim: int = HEAD_DIM, drop_path: float = 0.2) -> None:
        super().__init__()
        self.net = net
        self.attention = nn.ModuleList()
        for blocks in net.stages:
            widths = [cast(Bottleneck, block).conv1.out_channels * block.expansion for block in cast(Any, blocks)]
            layers = [PUBLISHED[method](c, math.gcd(head_dim, c), drop_path=drop_path) for c in widths]
            self.attention.append(nn.ModuleList(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.relu(self.net.bn1(self.net.conv1(x)))
        for blocks, layers in zip(self.net.stages, self.attention, strict=True):
            state = None
            for block, layer in zip(cast(Any, blocks), cast(Any, layers), strict=True):
                x, state = layer(block(x), state)
        return self.net.fc(torch.flatten(self.net.avgpool(x), 1))


def step_memory(net: nn.Module, batch: Batch) -> dict[str, float]:
    """What a training step holds, MB (10^6 bytes).

    Returns:
        ``saved_mb``, kept by autograd for the backward pass, and ``memory_mb``: on the CPU that and parameters, their
        gradients and buffers, as a run records it; on a GPU the allocator's peak over the step, what was there before
        but for the network itself taken off.
    """
    saved = saved_bytes(net.train(), *batch)
    memory = saved + static_bytes(net)
    if batch.images.is_cuda:
        held = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
        net.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_step(net, *batch)
        memory = torch.cuda.max_memory_allocated() - before + held
        net.zero_grad(set_to_none=True)
    return {"saved_mb": saved / 1e6, "memory_mb": memory / 1e6}


def published_memory(arguments: Mapping[str, Any], method: str, batch: Batch) -> float:
    """What autograd keeps of a training step of the published form, MB (10^6 bytes).

    Args:
        arguments: Of the plain CIFAR ResNet, for `build`, and of the method, of which ``head_dim`` and ``drop_path``
            are read.
        method: One of `PUBLISHED`.
        batch: What the step is of.
    """
    device = str(batch.images.device)
    plain = {key: value for key, value in arguments.items() if key in ("name", "num_classes", "in_chans", "width")}
    given = {key: arguments[key] for key in ("head_dim", "drop_path") if key in arguments}
    net = PublishedResNet(cast(CifarResNet, build(plain, device)), method, **given).to(device)
    return saved_bytes(net.to(memory_format=torch.channels_last), *batch) / 1e6  # pyright: ignore[reportCallIssue]


def times(
    nets: Mapping[str, nn.Module], batch: Batch, *, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, dict[str, float]]:
    """Median wall times of a forward pass in evaluation and of a training step, in turns.

    Args:
        nets: What to time, by name.
        batch: What they are given.
        rounds: Timed calls of each network in each mode.
        tick: Called after every timed call.

    Returns:
        By name ``evaluation_ms`` and ``training_ms``.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in nets}
    for column, step in zip(TIMED, (evaluate, train_step), strict=True):
        for net in nets.values():
            net.train(step is train_step)
        calls: dict[str, Callable[[], object]] = {
            name: partial(_finished, step, net, batch) for name, net in nets.items()
        }
        for name, timing in take_turns(calls, rounds=rounds, tick=tick).items():
            found[name][column] = round(timing.wall, 3)
    return found


def _finished(step: Callable[[nn.Module, Tensor, Tensor], object], net: nn.Module, batch: Batch) -> None:
    step(net, *batch)
    if batch.images.is_cuda:
        torch.cuda.synchronize()


def overhead(rows: Sequence[Row], method: str, column: str) -> list[tuple[int, float]]:
    """Blocks a stage and what a method adds: its figure less that of the plain network of the same depth.

    Args:
        rows: Of one profile, in order of depth.
        method: Whose.
        column: Of which figure.
    """
    plain = {row["blocks"]: row.get(column) for row in rows if row["method"] == "none"}
    own = [row for row in rows if row["method"] == method and row.get(column) is not None]
    return [(row["blocks"], row[column] - plain[row["blocks"]]) for row in own]


def growth(rows: Sequence[Row]) -> list[Row]:
    """Exponents of what each method adds, against blocks a stage: least squares of logarithms, deepest three networks.

    What is constant (a transition between stages) or linear beside a square draws these below the power that leads.

    Returns:
        A row a method; of `COUNTED` and `TIMED` those that could be fitted: two depths or more, positive figures.
    """
    return _fits(rows, (*COUNTED, *TIMED), lambda pairs: pairs)


def growth_by_block(rows: Sequence[Row]) -> list[Row]:
    """As `growth`, but one plus the exponent of what one more block a stage adds, which no constant is in.

    Between two depths that is the difference over the number of blocks, at the mean of both; times are too noisy for
    it. It takes three depths.
    """
    return _fits(rows, COUNTED, _slopes, plus=1)


def _fits(
    rows: Sequence[Row],
    columns: Sequence[str],
    of: Callable[[list[tuple[int, float]]], Sequence[tuple[float, float]]],
    plus: int = 0,
) -> list[Row]:
    fits = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "none"):
        fit: Row = {"method": method}
        for column in columns:
            pairs = of(overhead(rows, method, column)[-FITTED_DEPTHS:])
            if len(pairs) > 1 and all(value > 0 for _, value in pairs):
                fit[column] = round(plus + exponent(*zip(*pairs, strict=True)), 3)
        fits.append(fit)
    return fits


def _slopes(pairs: list[tuple[int, float]]) -> list[tuple[float, float]]:
    return [((a + b) / 2, (y - x) / (b - a)) for (a, x), (b, y) in pairwise(pairs)]
