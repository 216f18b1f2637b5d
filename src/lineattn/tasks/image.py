"""What the tasks on images share: a network by its name, with attention put in, and a trunk that it starts from."""

from __future__ import annotations

from abc import ABC
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lineattn import models
from lineattn.errors import InputError
from lineattn.hosts.weights import added_in, trunk_of
from lineattn.models import create_model
from lineattn.models.encoder import encoder_of
from lineattn.nn.depth.base import Init
from lineattn.tasks.base import Task
from lineattn.tasks.optim import Optim
from lineattn.tasks.seeding import seeded

# What `create_model`, `attach` and `swap` take beside the arguments of a method.
_NO_ARGUMENTS = {*signature(create_model).parameters, "example", "copy"} - {"method_args"}
_FOR = {"seg": "segmentation", "det": "detection"}


class ImageTask(Task, ABC):
    """Trains and evaluates a network that sees images.

    Args:
        name: The network, see `lineattn models`.
        attn: A method, or `none`: then `scope`, `at`, `swap` and `attn_args` have no effect, so that a sweep may hold
            the plain network too. One of attention over depth stands behind every block; others need `at` or `swap`.
        init: `paper`, or `identity`: at the start the network computes what it does without attention.
        scope: How far the attention's state is carried: `carry`, `per_stage` or `every=k`; by default the method's.
        at: The module that a block of the sample axis stands behind, such as `layer4`.
        swap: Names of the network's attention in whose place a method of the sample axis comes: `blocks.*.attn`.
        attn_args: Further arguments of the method, such as `head_dim` or `drop_path`.
        net_args: Further arguments of the network's own constructor, such as `img_size` of timm's transformers.
        width: Channels of the first stage, for networks that have the choice.
        trunk: Weights to start from, of the network without attention or of another run: a file, or by name as
            `timm/resnet50.a1_in1k` and `torchvision/resnet50`.
        freeze_trunk: Train the attention and what comes behind the trunk alone, such as the classifier; batch norms of
            the rest keep their statistics.
        channels_last: Keep activations in the memory order that convolutions prefer.
        outputs: Channels of the network's output.
        in_chans: Channels of the images.
        optim: How it is trained.
        seed: Seed of the run.
    """

    task: ClassVar[models.Task]
    """What its networks are for."""

    def __init__(
        self,
        name: str,
        attn: str = "none",
        init: Init = "identity",
        scope: str | None = None,
        at: str | None = None,
        swap: str | None = None,
        attn_args: dict[str, Any] | None = None,
        net_args: dict[str, Any] | None = None,
        width: int | None = None,
        trunk: str | None = None,
        freeze_trunk: bool = False,
        channels_last: bool = True,
        *,
        outputs: int,
        in_chans: int = 3,
        optim: Optim | None = None,
        seed: int = 0,
    ) -> None:
        other = models.task_of(name)
        if other not in ("cls", self.task):  # a name that nobody knows counts as one for classification
            raise InputError(f"--model.name {name} is a network for {_FOR[other]}: choose another, see lineattn models")
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        arguments = {"name": name, "attn": attn, "init": init, "width": width, "net_args": net_args}
        arguments |= {"num_classes": outputs, "in_chans": in_chans}
        of_method = {"scope": scope, "at": at, "swap": swap}
        if twice := _NO_ARGUMENTS & (attn_args or {}).keys():
            raise InputError(
                f"--model.attn_args has {sorted(twice)[0]!r}, which is no argument of a method: it is an option of its "
                "own, or is not given here"
            )
        if attn != "none":
            arguments |= of_method
        arguments = {key: value for key, value in arguments.items() if value is not None}
        if attn != "none" and attn_args is not None:
            arguments |= attn_args
        reports: list[object] = []
        with seeded(seed):
            net = create_model(**arguments, trunk=trunk, tell=reports.append)
        if freeze_trunk:
            frozen, classifiers = trunk_of(encoder_of(net))
            frozen.requires_grad_(False)
            for path in (*classifiers, *added_in(frozen)):
                frozen.get_submodule(path).requires_grad_(True)
        net = net.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]
        super().__init__(net, optim=optim or Optim(), seed=seed)
        self.arguments, self.reports = arguments, reports
        self.memory_format, self.freeze_trunk = memory_format, freeze_trunk
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode; a frozen trunk is always in evaluation, but for what was put in."""
        super().train(mode)
        if self.freeze_trunk:
            frozen = trunk_of(encoder_of(self.net))[0].eval()
            for module in added_in(frozen).values():
                module.train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs, ...); in evaluation by the averaged weights, where there are any."""
        net = self.net if self.training else self.evaluated_net
        return net(images.contiguous(memory_format=self.memory_format))
