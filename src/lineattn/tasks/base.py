"""What all tasks share: the network with its attention, its training, and a record that a resumed run goes on with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from inspect import signature
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from lineattn.errors import InputError
from lineattn.hosts.weights import added_in, trunk_of
from lineattn.measure import SavedBytes, static_bytes
from lineattn.models import create_model
from lineattn.models.segmentation import SegmentationNetwork
from lineattn.nn.depth.base import Init
from lineattn.tasks.data.dataset import Batch, Unreadable
from lineattn.tasks.meter import Sums
from lineattn.tasks.optim import Optim, Schedule, optimizer
from lineattn.tasks.seeding import mix, seeded

# What `create_model`, `attach` and `swap` take beside the arguments of a method.
_NO_ARGUMENTS = {*signature(create_model).parameters, "example", "copy"} - {"method_args"}
_LOOK_EVERY = 50  # steps between looks at the loss on a GPU, where looking waits for it


class Task(LightningModule, ABC):
    """Trains and evaluates a network.

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

    metric: str
    """What the best weights are chosen by, on the validation set; the larger the better."""
    names: dict[str, str]
    """Metrics by their keys, in full, with their units."""
    columns: tuple[str, ...]
    """What is recorded of each epoch."""

    train_meter: Sums
    eval_meter: Sums

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
        super().__init__()
        self.optim, self.seed = optim or Optim(), seed
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
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
        self.arguments: dict[str, Any] = {key: value for key, value in arguments.items() if value is not None}
        if attn != "none" and attn_args is not None:
            self.arguments |= attn_args
        self.reports: list[object] = []
        with seeded(seed):
            self.net: nn.Module = create_model(**self.arguments, trunk=trunk, tell=self.reports.append)
        self.freeze_trunk = freeze_trunk
        if freeze_trunk:
            frozen, classifiers = trunk_of(self._encoder)
            frozen.requires_grad_(False)
            for path in (*classifiers, *added_in(frozen)):
                frozen.get_submodule(path).requires_grad_(True)
            self.train()
        self.net = self.net.to(memory_format=self.memory_format)  # pyright: ignore[reportCallIssue]
        self.ema = None
        if self.optim.ema_decay > 0:
            self.ema = ModelEmaV3(self.net, decay=self.optim.ema_decay).requires_grad_(False)
        self.unreadable = Unreadable()
        self.results: dict[str, float] = {}
        self.evaluated = 0  # images that the results are of
        self.step_bytes: int | None = None
        # The first step with a loss that is no number; on the device, so that asking is not needed at each step.
        self.first_bad = torch.tensor(math.inf)

    @property
    def _encoder(self) -> nn.Module:
        """The part of the network that a trunk's weights are for."""
        return self.net.get_encoder() if isinstance(self.net, SegmentationNetwork) else self.net

    @property
    def evaluated_net(self) -> nn.Module:
        """The network of the averaged weights, where there are any."""
        return self.net if self.ema is None else self.ema.module

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode; a frozen trunk is always in evaluation, but for what was put in."""
        super().train(mode)
        if self.freeze_trunk:
            frozen = trunk_of(self._encoder)[0].eval()
            for module in added_in(frozen).values():
                module.train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs, ...); in evaluation by the averaged weights, where there are any."""
        net = self.net if self.training else self.evaluated_net
        return net(images.contiguous(memory_format=self.memory_format))

    def configure_optimizers(self) -> Optimizer:
        return optimizer(self.optim, self.net)

    def on_train_start(self) -> None:
        per_epoch = max(1, -(-int(self.trainer.num_training_batches) // self.trainer.accumulate_grad_batches))
        epochs = self.trainer.max_epochs or 1
        self.schedule = Schedule(self.optim, self.trainer.optimizers[0], epochs=epochs, steps_per_epoch=per_epoch)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.unreadable.admit(batch)

    def on_train_epoch_start(self) -> None:
        self.train_meter.reset()
        self.results = {}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.schedule.at(self.current_epoch, self.global_step)
        # Drop path, mixup and the like: a function of the step, whatever was drawn before.
        torch.manual_seed(mix(self.seed, -1, self.trainer.fit_loop.total_batch_idx, self.global_rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self._learn(batch) if len(batch.index) else self._nothing()
        # Whether a batch is empty differs between processes, and all of them must look.
        if self.device.type == "cpu" or batch_idx % _LOOK_EVERY == 0:
            self.refuse_bad()
        return loss

    def _nothing(self) -> Tensor | None:
        """The loss of no images. Other processes wait for the gradient of this one."""
        if self.trainer.world_size == 1:
            return None
        return torch.stack([(0 * parameter).sum() for parameter in self.net.parameters()]).sum()

    def _learn(self, batch: Batch) -> Tensor:
        images, target = self.mixed(batch.images, batch.labels)
        if self.step_bytes is None and self.device.type == "cpu":
            saved = SavedBytes()
            with saved.counting(self.net):
                loss, outputs = self.loss(images, target)
            self.step_bytes = saved.total + static_bytes(self.net)
        else:
            loss, outputs = self.loss(images, target)
        self.note(self.train_meter, loss, outputs, target)
        bad = torch.where(loss.detach().isfinite(), math.inf, float(self.global_step))
        self.first_bad = torch.minimum(self.first_bad.to(bad), bad)
        return loss

    def mixed(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The batch, after what is done to all of it at once."""
        return images, target

    @abstractmethod
    def loss(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and the network's outputs in single precision."""

    @abstractmethod
    def note(self, meter: Any, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        """Adds a batch to the sums of an epoch."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> None:
        """Adds a batch without augmentation to the sums of the evaluation."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.net)

    def refuse_bad(self, *, weights: bool = False) -> None:
        """Stops where the loss is no finite number any more, or, if asked, a weight.

        Raises:
            InputError: With the step, and what usually helps.
        """
        first = self.first_bad.to(self.device)
        if weights and not all(bool(p.isfinite().all()) for p in self.net.parameters()):
            first = first.clamp(max=self.global_step)
        if self.trainer.world_size > 1:
            first = self.trainer.strategy.reduce(first.clone(), reduce_op="min")
        step = float(first)
        if step == math.inf:
            return
        raise InputError(
            f"the loss is no finite number at step {int(step)} (epoch {self.current_epoch}): lower --optim.lr, "
            "lengthen --optim.warmup_epochs, or pass --trainer.gradient_clip_val 1; the checkpoint before it is kept"
        )

    def on_validation_epoch_start(self) -> None:
        self.eval_meter.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if len(batch.index):
            self.evaluate(batch)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, split: str) -> None:
        self.results = self.eval_meter.compute(split, self.device)
        self.evaluated = self.eval_meter.count(self.device)
        self.log_dict(self.results)  # for loggers and early stopping, in single precision

    def on_train_epoch_end(self) -> None:
        if self.trainer.num_training_batches and not self.train_meter.count(self.device):
            raise InputError(
                f"epoch {self.current_epoch + 1} has seen no image: none could be read, or all of their pixels are "
                "ignored; lineattn check-data says more"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["train_sums"] = self.train_meter.total(self.device).tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The saved sums are those of all processes; one of them goes on from there.
        if self.global_rank == 0:
            self.train_meter.restore(checkpoint["train_sums"])
