"""Optimisers and learning-rate schedules, made by timm's factories."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from timm.optim import create_optimizer_v2, list_optimizers  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from torch import nn
from torch.optim import Optimizer

from lineattn.errors import InputError, unknown
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.plans import find
from lineattn.tasks.ranges import require

Sched = Literal["multistep", "cosine", "step", "poly", "none"]


@dataclass
class Optim:
    """How the weights are trained.

    Args:
        name: Any optimiser of timm. `momentum` is SGD without Nesterov's term; timm's `sgd` has it.
        lr: Learning rate after the warm-up.
        weight_decay: Weight decay.
        momentum: Momentum, for optimisers that have one.
        betas: The two of Adam and its kin, by default those of timm; for optimisers that have them.
        decay_all: Decay norms and biases too, as the papers do.
        layer_decay: Factor of the learning rate from one block of the network to the one before it, for fine-tuning;
            the attention learns with the block that it stands behind.
        schedule: How the learning rate falls: `multistep`, `cosine`, `step`, `poly` or `none`.
        milestones: Epochs, counted from 0, from which on the rate is divided, for `multistep`.
        decay_epochs: Epochs between two divisions, for `step`.
        decay_rate: Factor of a division; power for `poly`.
        min_lr: Where `cosine` and `poly` end.
        period: Epochs after which `cosine` is back where it began, having been down half-way, as torch's
            `CosineAnnealingLR` is after twice its `T_max`; by default it falls over the whole run.
        warmup_epochs: Epochs of linear warm-up from `warmup_lr`, counted within the run; whole ones, unless `per_step`.
        warmup_lr: Learning rate at the start of the warm-up.
        per_step: Change the rate at each step instead of each epoch.
        label_smoothing: Part of the target spread over all classes.
        ema_decay: Decay of the moving average of the weights, which is then what is evaluated; 0 is off.

    Raises:
        InputError: timm has no optimiser of that name, or a number is out of its range.
    """

    name: str = "momentum"
    lr: float = 0.1
    weight_decay: float = 1e-4
    momentum: float = 0.9
    betas: list[float] | None = None
    decay_all: bool = True
    layer_decay: float | None = None
    schedule: Sched = "cosine"
    milestones: list[int] = field(default_factory=list)
    decay_epochs: int = 30
    decay_rate: float = 0.1
    min_lr: float = 0.0
    period: int | None = None
    warmup_epochs: float = 0.0
    warmup_lr: float = 1e-3
    per_step: bool = False
    label_smoothing: float = 0.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        known = [str(name) for name in list_optimizers()]
        if self.name not in known:
            raise unknown("optimiser", self.name, known)
        require(0 < self.lr < math.inf, "optim.lr", self.lr, "above 0")
        require(0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, "0 or more")
        if self.layer_decay is not None:
            require(0 < self.layer_decay <= 1, "optim.layer_decay", self.layer_decay, "above 0 and at most 1")
        if self.period is not None:
            require(self.period >= 2 and self.period % 2 == 0, "optim.period", self.period, "an even number")
            if self.schedule != "cosine" or self.warmup_epochs:
                raise InputError("--optim.period is for --optim.schedule cosine without warm-up: leave it out")
        if self.betas is not None:
            two = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
            require(two, "optim.betas", self.betas, "two numbers of 0 or more and below 1")
        if not self.per_step and self.warmup_epochs != int(self.warmup_epochs):
            raise InputError(
                f"--optim.warmup_epochs {self.warmup_epochs}: a part of an epoch needs --optim.per_step true"
            )
        require(0 <= self.label_smoothing <= 1, "optim.label_smoothing", self.label_smoothing, "from 0 to 1")
        require(0 <= self.ema_decay < 1, "optim.ema_decay", self.ema_decay, "0 or more and below 1")


def optimizer(config: Optim, net: nn.Module) -> Optimizer:
    """The optimiser of a network's parameters.

    Raises:
        InputError: Layer decay is asked for, and the order of the network's layers isn't known.
    """
    if config.layer_decay is not None and not hasattr(net, "group_matcher"):
        net = DepthHost(net, find(net), {}, [], 0, 0)  # knows the order of its blocks
    betas: dict[str, Any] = {} if config.betas is None else {"betas": tuple(config.betas)}
    return create_optimizer_v2(
        net,
        opt=config.name,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        filter_bias_and_bn=not config.decay_all,
        layer_decay=config.layer_decay,
        **betas,
    )


class Schedule:
    """The learning rate as a function of the epoch, or of the step: it holds no state that a resumed run would miss.

    Args:
        config: The settings.
        optimizer: Whose learning rate is set.
        epochs: Length of the run.
        steps_per_epoch: Updates an epoch, for schedules by step.
    """

    def __init__(self, config: Optim, optimizer: Optimizer, *, epochs: int, steps_per_epoch: int) -> None:
        self.per_step, self.steps_per_epoch, self.period = config.per_step, steps_per_epoch, config.period
        units = steps_per_epoch if config.per_step else 1
        # timm divides one unit of time before a milestone, torch and the papers at it; half a unit more mends that
        # without depending on rounding.
        milestones = [milestone + 0.5 / units for milestone in config.milestones]
        self.timm = create_scheduler_v2(
            optimizer,
            sched=config.schedule if config.schedule != "none" else "multistep",
            num_epochs=epochs if config.period is None else config.period // 2,
            decay_epochs=config.decay_epochs,
            decay_milestones=milestones if config.schedule == "multistep" else [],  # pyright: ignore[reportArgumentType]
            decay_rate=config.decay_rate,
            min_lr=config.min_lr,
            # timm counts whole steps, or epochs, as the schedule does.
            warmup_epochs=config.warmup_epochs,  # pyright: ignore[reportArgumentType]
            warmup_lr=config.warmup_lr,
            step_on_epochs=not config.per_step,
            updates_per_epoch=steps_per_epoch,
        )[0]

    def at(self, epoch: int, step: int) -> None:
        """Sets the learning rate for an epoch (a no-op by step) or for a step (a no-op by epoch)."""
        if self.timm is not None:
            self.timm.step(self._folded(epoch, 1))
            self.timm.step_update(self._folded(step, self.steps_per_epoch))

    def _folded(self, time: int, units: int) -> int:
        """A time on the way up, as the time on the way down at which the rate is the same."""
        if self.period is None:
            return time
        time %= self.period * units
        return min(time, self.period * units - time)
