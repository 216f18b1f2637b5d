"""Image classification: a network of the library, or one with attention, trained with cross-entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from lineattn.tasks.data.dataset import Batch
from lineattn.tasks.data.transforms import batch_mixing
from lineattn.tasks.image import ImageTask
from lineattn.tasks.meter import Meter


class Classifier(ImageTask):
    """Trains and evaluates an image classifier.

    Args:
        name: The network, see `lineattn models`.
        classes: Number of classes.
        mixup: Strength of mixup, 0 is off.
        cutmix: Strength of cutmix, 0 is off.
        arguments: Those of `lineattn.tasks.image.ImageTask`.
    """

    task = "cls"
    metric = "acc1"
    columns = ("train/loss", "train/acc1", "val/loss", "val/acc1", "val/acc5")

    def __init__(
        self,
        name: str = "resnet20_bottleneck_cifar",
        *,
        classes: int,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        **arguments: Any,
    ) -> None:
        super().__init__(name, outputs=classes, **arguments)
        self.names = {"loss": "loss", "acc1": "top-1 accuracy, %", "acc5": "top-5 accuracy, %"}
        self.mixing = batch_mixing(mixup, cutmix, classes)
        self.train_meter, self.eval_meter = Meter(), Meter()

    def mixed(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.mixing(images, target) if self.mixing is not None else (images, target)

    def loss(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(images).float()
        return cross_entropy(logits, target, label_smoothing=self.optim.label_smoothing), logits

    def note(self, meter: Any, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        meter.update(loss, outputs, target)

    def evaluate(self, batch: Batch) -> None:
        logits = self(batch.inputs).float()
        self.note(self.eval_meter, cross_entropy(logits, batch.targets), logits, batch.targets)

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Places in the data set and class probabilities, (B,) and (B, classes)."""
        if not len(batch.index):
            return batch.index, batch.inputs.new_empty(0, 0)
        return batch.index, self(batch.inputs).float().softmax(1)
