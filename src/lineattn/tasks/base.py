"""What all tasks share: the network with its attention, its training, and a record that a resumed run goes on with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from lineattn.errors import InputError
from lineattn.measure import SavedBytes, static_bytes
from lineattn.tasks.data.dataset import Batch, Unreadable
from lineattn.tasks.meter import Sums
from lineattn.tasks.optim import Optim, Schedule, optimizer
from lineattn.tasks.seeding import mix

_LOOK_EVERY = 50  # steps between looks at the loss on a GPU, where looking waits for it


class Task(LightningModule, ABC):
    """Trains and evaluates a network.

    Args:
        net: The network.
        optim: How it is trained.
        seed: Seed of the run.
    """

    metric: str
    """What the best weights are chosen by, on the validation set; the larger the better, unless it `falls`."""
    falls: ClassVar[bool] = False
    names: dict[str, str]
    """Metrics by their keys, in full, with their units."""
    columns: tuple[str, ...]
    """What is recorded of each epoch."""
    counted: ClassVar[str] = "images"
    """What the number of evaluated things counts."""
    arguments: dict[str, Any]
    """What the network is built from."""

    train_meter: Sums
    eval_meter: Sums

    def __init__(self, net: nn.Module, *, optim: Optim, seed: int) -> None:
        super().__init__()
        self.net, self.optim, self.seed = net, optim, seed
        self.ema = None
        if optim.ema_decay > 0:
            self.ema = ModelEmaV3(net, decay=optim.ema_decay).requires_grad_(False)
        self.reports: list[object] = []
        self.unreadable = Unreadable()
        self.results: dict[str, float] = {}
        self.evaluated = 0  # what the results are of
        self.step_bytes: int | None = None
        # The first step with a loss that is no number; on the device, so that asking is not needed at each step.
        self.first_bad = torch.tensor(math.inf)

    @property
    def evaluated_net(self) -> nn.Module:
        """The network of the averaged weights, where there are any."""
        return self.net if self.ema is None else self.ema.module

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
        """The loss of an empty batch. Other processes wait for the gradient of this one."""
        if self.trainer.world_size == 1:
            return None
        return torch.stack([(0 * parameter).sum() for parameter in self.net.parameters()]).sum()

    def _learn(self, batch: Batch) -> Tensor:
        inputs, target = self.mixed(batch.inputs, batch.targets)
        if self.step_bytes is None and self.device.type == "cpu":
            saved = SavedBytes()
            with saved.counting(self.net):
                loss, outputs = self.loss(inputs, target)
            self.step_bytes = saved.total + static_bytes(self.net)
        else:
            loss, outputs = self.loss(inputs, target)
        self.note(self.train_meter, loss, outputs, target)
        bad = torch.where(loss.detach().isfinite(), math.inf, float(self.global_step))
        self.first_bad = torch.minimum(self.first_bad.to(bad), bad)
        return loss

    def mixed(self, inputs: Any, target: Any) -> tuple[Any, Any]:
        """The batch, after what is done to all of it at once."""
        return inputs, target

    @abstractmethod
    def loss(self, inputs: Any, target: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and the network's outputs in single precision."""

    @abstractmethod
    def note(self, meter: Any, loss: Tensor, outputs: Tensor, target: Any) -> None:
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
                f"epoch {self.current_epoch + 1} has seen no {self.counted.removesuffix('s')}: none could be read, or "
                "all that is in them is ignored; lineattn check-data says more"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["train_sums"] = self.train_meter.total(self.device).tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The saved sums are those of all processes; one of them goes on from there.
        if self.global_rank == 0:
            self.train_meter.restore(checkpoint["train_sums"])
