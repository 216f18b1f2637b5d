r"""Losses of segmentation, and what their logits say.

Two forms of logits (B, C, H, W): one channel, whose sigmoid is the probability of class 1 against class 0, or one
channel a class, whose softmax is that of the classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.ops.autocast import no_autocast
from lineattn.tasks.ranges import require


def predict(logits: Tensor) -> Tensor:
    """Class indices, (B, C, H, W) -> (B, H, W); of one channel, 1 where the logit is above 0.

    Example:
        >>> predict(torch.tensor([[[[-1.0, 2.0]]]]))
        tensor([[[0, 1]]])
    """
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def probabilities(logits: Tensor) -> Tensor:
    """Probabilities of the classes, (B, C, H, W) -> (B, classes, H, W), of which one channel gives two.

    Example:
        >>> probabilities(torch.tensor([[[[0.0]]]])).flatten()
        tensor([0.5000, 0.5000])
    """
    logits = _exact(logits)
    return torch.cat([-logits, logits], 1).sigmoid() if logits.shape[1] == 1 else logits.softmax(1)


class BceDice(nn.Module):
    r"""Binary cross-entropy plus Dice loss, as in the KCLA paper's segmentation.

    .. math::
        \frac{1}{B} \sum_b \left[ \frac{1}{|\Omega_b|} \sum_{i \in \Omega_b} \mathrm{BCE}(p_i, y_i) + 1 -
        \frac{2 \sum_{\Omega_b} p_i y_i + 1}{\sum_{\Omega_b} p_i + \sum_{\Omega_b} y_i + 1} \right],
        \qquad p = \sigma(\mathrm{logit})

    where :math:`\Omega_b` are the pixels of an image that aren't ignored. An image without any is left out of the mean;
    if there is no other, the loss is 0, and so is its gradient.

    Args:
        ignore: Class in the masks of pixels that don't count.

    Shape:
        - Logits ``(B, 1, H, W)``, target ``(B, H, W)`` of 0, 1 and `ignore`; returns a scalar, in float32 at least.

    Example:
        >>> float(BceDice()(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1)))  # log(2) + 1 - 2 / 2.5
        0.893...
    """

    def __init__(self, *, ignore: int = 255) -> None:
        super().__init__()
        self.ignore = ignore

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        with no_autocast(logits.device):
            logits = _exact(logits)[:, 0].flatten(1)
            valid = (target != self.ignore).flatten(1)
            true = (target == 1).flatten(1).to(logits)
            # Chosen rather than multiplied by 0, which an infinite logit would survive.
            bce = torch.where(valid, F.binary_cross_entropy_with_logits(logits, true, reduction="none"), 0.0)
            found = torch.where(valid, logits.sigmoid(), 0.0)
            pixels = valid.sum(1)
            dice = (2 * (found * true).sum(1) + 1) / (found.sum(1) + true.sum(1) + 1)
            # Without a pixel that counts both terms are 0.
            per_image = bce.sum(1) / pixels.clamp(min=1) + 1 - dice
            return per_image.sum() / (pixels > 0).sum().clamp(min=1)


class CrossEntropy(nn.Module):
    r"""Cross-entropy of the pixels that aren't ignored, :math:`\Omega`.

    .. math::
        -\frac{1}{Z} \sum_{i \in \Omega} w_{y_i} \log p_{i, y_i}, \qquad p = \mathrm{softmax}(\mathrm{logits})

    If all pixels are ignored the loss is 0, and so is its gradient.

    Args:
        classes: Number of classes.
        ignore: Class in the masks of pixels that don't count.
        weights: :math:`w`, one a class; by default 1.
        over: What :math:`Z` sums: ``valid``, the weights of the pixels of :math:`\Omega`; ``all``, 1 for each pixel,
            ignored ones too, as EANet's published code does: there, a crop with much to ignore counts less.

    Shape:
        - Logits ``(B, classes, H, W)``, target ``(B, H, W)`` of class indices and `ignore`; returns a scalar, in
          float32 at least.

    Raises:
        InputError: The weights are not as many as the classes, negative, or all 0.

    Example:
        >>> float(CrossEntropy(4)(torch.zeros(1, 4, 1, 2), torch.tensor([[[3, 255]]])))  # log(4)
        1.386...
    """

    weights: Tensor | None

    def __init__(
        self,
        classes: int,
        *,
        ignore: int = 255,
        weights: Sequence[float] | None = None,
        over: Literal["valid", "all"] = "valid",
    ) -> None:
        super().__init__()
        self.ignore, self.over = ignore, over
        if weights is not None:
            option = "model.class_weights"
            require(len(weights) == classes, option, list(weights), f"{classes} numbers, one a class")
            allowed = all(0 <= weight < math.inf for weight in weights) and any(weights)
            require(allowed, option, list(weights), "0 or more, and not all 0")
        # Of the options, not of the training: it has no place in a checkpoint.
        self.register_buffer("weights", None if weights is None else torch.tensor(weights), persistent=False)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        with no_autocast(logits.device):
            logits, target = _exact(logits), target.long()
            weights = self.weights.to(logits) if self.weights is not None else None
            # Summed here, so that nothing is divided by the weight of no pixels.
            loss = F.cross_entropy(logits, target, weights, ignore_index=self.ignore, reduction="none").sum()
            if self.over == "all":
                return loss / target.numel()
            valid = target != self.ignore
            if weights is None:
                return loss / valid.sum().clamp(min=1)
            total = torch.where(valid, weights[torch.where(valid, target, 0)], 0.0).sum()
            return loss / torch.where(total > 0, total, 1.0)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
