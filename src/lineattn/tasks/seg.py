"""Segmentation: a class for each pixel, medical (one foreground) or semantic."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.tasks.data.dataset import Batch
from lineattn.tasks.image import ImageTask
from lineattn.tasks.seg_loss import BceDice, CrossEntropy, predict
from lineattn.tasks.seg_meter import NAMES, SegMeter

Loss = Literal["bce_dice", "cross_entropy"]


class Segmenter(ImageTask):
    """Trains and evaluates a network that gives each pixel a class.

    Args:
        name: The network: `resunet`, `eanet_resnet50`, `smp/unet:NAME` with a network of timm; see `lineattn models`.
        classes: Number of classes.
        loss: `bce_dice`, of one foreground, or `cross_entropy`; by default what suits the number of classes.
        class_weights: Weights of the classes in the cross-entropy, in their order.
        over: What the cross-entropy is the mean over: pixels that aren't ignored (`valid`), or `all`, as EANet's
            published code has it.
        arguments: Those of `lineattn.tasks.image.ImageTask`.
    """

    task = "seg"

    def __init__(
        self,
        name: str = "resunet",
        *,
        classes: int,
        loss: Loss | None = None,
        class_weights: list[float] | None = None,
        over: Literal["valid", "all"] = "valid",
        **arguments: Any,
    ) -> None:
        loss = loss or ("bce_dice" if classes == 2 else "cross_entropy")
        if loss == "bce_dice":
            if classes != 2:
                raise InputError(f"--model.loss bce_dice is for two classes, and there are {classes}: cross_entropy")
            if class_weights is not None:
                raise InputError("--model.class_weights are for --model.loss cross_entropy")
        super().__init__(name, outputs=1 if loss == "bce_dice" else classes, **arguments)
        if self.optim.label_smoothing:
            raise InputError("--optim.label_smoothing is for classification: leave it out")
        self.criterion: nn.Module = (
            BceDice() if loss == "bce_dice" else CrossEntropy(classes, weights=class_weights, over=over)
        )
        self.metric = "iou_fg" if classes == 2 else "miou"
        # Of many classes the first is seldom what the others stand out from.
        self.names = {key: name for key, name in NAMES.items() if classes == 2 or not name.startswith("foreground")}
        shown = ("iou_fg", "dsc_fg", "miou", "pixel_acc") if classes == 2 else ("miou", "pixel_acc")
        self.columns = tuple(f"{split}/{key}" for split in ("train", "val") for key in ("loss", *shown))
        # Boundaries take several times as long as the rest, and in training they say little.
        self.train_meter, self.eval_meter = SegMeter(classes, boundary=False), SegMeter(classes)

    def loss(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(images).float()
        if logits.shape[2:] != target.shape[1:]:
            raise InputError(
                f"for images of {tuple(target.shape[1:])} the network puts out {tuple(logits.shape[2:])}: it is none "
                "for segmentation, see lineattn models"
            )
        return self.criterion(logits, target), logits

    def note(self, meter: Any, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        meter.update(loss, predict(outputs), target)

    def evaluate(self, batch: Batch) -> None:
        images, masks = batch.inputs, batch.targets
        parts = [(images, masks)] if isinstance(images, Tensor) else _by_size(images, masks)
        for part, target in parts:
            loss, logits = self.loss(part, target)
            self.note(self.eval_meter, loss, logits, target)


def _by_size(images: list[Tensor], masks: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Images of one size together: what one of them gives must not depend on the others."""
    groups: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = {}
    for image, mask in zip(images, masks, strict=True):
        group = groups.setdefault(image.shape, ([], []))
        group[0].append(image)
        group[1].append(mask)
    return [(torch.stack(images), torch.stack(masks)) for images, masks in groups.values()]
