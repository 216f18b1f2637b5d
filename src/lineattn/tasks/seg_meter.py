r"""Segmentation metrics over an epoch, exact over processes and over an interruption.

All but the boundary score and the means over images come from one confusion matrix :math:`n_{tp}` of the data set, the
pixels of class :math:`t` that were predicted as :math:`p`:

.. math::
    \mathrm{IoU}_k = \frac{n_{kk}}{\sum_p n_{kp} + \sum_t n_{tk} - n_{kk}}, \qquad
    \mathrm{IoU} = \frac{TP}{TP + FP + FN}, \qquad
    \mathrm{DSC} = \frac{2\,TP}{2\,TP + FP + FN}

where :math:`TP, FP, FN` are those of the foreground, all classes but 0 taken as one.

What is not there:

- A class that is neither in the masks nor predicted is left out of the mean IoU, one that is in no mask out of the mean
  class accuracy. A metric of which nothing is left is not reported.
- An image without foreground in mask and prediction has an IoU and a Dice of 100 % for the means over images; with
  foreground in one of the two only, 0.
- An image of ignored pixels alone counts nowhere. So an image may be padded with ignored pixels, whatever is predicted
  there.

**Boundary score**, after Csurka et al. (2013). A boundary pixel of a class has, above, below, left or right of it, a
pixel of another class; the border of the image and ignored pixels make no boundary. Precision is the share of the
predicted boundary pixels of a class with a true one of this class nearer than 0.75 % of the image's diagonal (of the
box around the pixels that aren't ignored), from centre to centre; recall the reverse. The score of a class in an image
is :math:`2PR / (P + R)`, 0 if both are 0 or if only one of mask and prediction has a boundary; if neither has one it is
100 % where the two agree, else 0. The score of an image is the mean over the classes in its mask or prediction; with
two classes it is that of class 1, in every image. The result is the mean over images.

Reference: Csurka, Larlus, Perronnin, "What is a good evaluation measure for semantic segmentation?", BMVC 2013.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lineattn.errors import InputError
from lineattn.tasks.meter import Sums

NAMES = {
    "loss": "mean loss over images",
    "miou": "mean IoU over classes, %",
    "pixel_acc": "pixel accuracy, %",
    "class_acc": "mean class accuracy, %",
    "iou_fg": "foreground IoU, pooled over all pixels, % (the KCLA paper's mIoU)",
    "dsc_fg": "foreground Dice, pooled over all pixels, % (the KCLA paper's DSC)",
    "sensitivity": "foreground sensitivity, pooled over all pixels, %",
    "specificity": "foreground specificity, pooled over all pixels, %",
    "iou_fg_image": "foreground IoU, mean over images, %",
    "dsc_fg_image": "foreground Dice, mean over images, %",
    "boundary_f": "boundary F-score within 0.75 % of the diagonal, mean over images, %",
}

_PER_IMAGE = 5  # sums before the confusion matrix: loss, images, IoU, Dice, boundary score


class SegMeter(Sums):
    """Sums of losses, of scores of images and of the confusion matrix.

    Args:
        classes: Number of classes, 2 for a foreground and a background.
        ignore: Class in the masks of pixels that don't count.
        boundary: Whether to score boundaries too, which takes longer than all the rest.

    Example:
        >>> meter = SegMeter(2)
        >>> mask, found = torch.tensor([[[0, 1], [1, 255]]]), torch.tensor([[[1, 1], [0, 0]]])
        >>> meter.update(torch.tensor(0.5), found, mask)
        >>> results = meter.compute("val", torch.device("cpu"))
        >>> round(results["val/iou_fg"], 2), round(results["val/dsc_fg"], 2)
        (33.33, 50.0)
    """

    def __init__(self, classes: int, *, ignore: int = 255, boundary: bool = True) -> None:
        self.classes, self.ignore, self.boundary = classes, ignore, boundary
        super().__init__(_PER_IMAGE + classes**2)

    @torch.no_grad()
    def update(self, loss: Tensor, prediction: Tensor, target: Tensor) -> None:
        """Adds a batch.

        Args:
            loss: Its mean loss.
            prediction: (B, H, W) class indices.
            target: (B, H, W) class indices, with `ignore` where a pixel doesn't count.

        Raises:
            InputError: A mask has a class that isn't one.
        """
        if target.device.type == "mps":  # Apple's GPUs have no doubles
            loss, prediction, target = loss.cpu(), prediction.cpu(), target.cpu()
        valid = target != self.ignore
        counts = self._counts(prediction, target, valid)
        there = counts.sum((0, 1)) > 0
        hits, misses = counts[1:, 1:].sum((0, 1)), counts[0, 1:].sum(0) + counts[1:, 0].sum(0)
        either = hits + misses > 0
        iou = torch.where(either, hits / (hits + misses), 1.0)
        dice = torch.where(either, 2 * hits / (2 * hits + misses), 1.0)
        edges = _boundary_scores(prediction, target, valid, counts) if self.boundary else torch.zeros_like(iou)
        scores = torch.stack([loss.detach().to(iou).expand_as(iou), torch.ones_like(iou), iou, dice, edges])
        batch = torch.cat([torch.where(there, scores, 0.0).sum(1), counts.sum(2).flatten()])
        self.sums = self.sums.to(batch.device) + batch

    def _counts(self, prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Confusion matrix of each image, (classes, classes, B): true class, predicted one."""
        images = len(target)
        image = torch.arange(images, device=target.device)[:, None, None]
        # The image is the fastest index, so that a class that isn't one falls behind the end.
        places = ((target.long() * self.classes + prediction) * images + image)[valid]
        size = self.classes**2 * images
        counts = torch.bincount(places, minlength=size)
        if len(counts) > size:
            raise InputError(
                f"a mask has class {int(target[valid].max())}, but the classes are 0 to {self.classes - 1}: "
                f"correct the mask, or write {self.ignore} where a pixel shall not count"
            )
        return counts.view(self.classes, self.classes, images).double()

    def compute(self, prefix: str, device: torch.device) -> dict[str, float]:
        """The metrics of `NAMES`, as `prefix/miou` and so on; every process must ask."""
        sums = self.total(device)
        loss, images, iou, dice, boundary = sums[:_PER_IMAGE].tolist()
        if not images:
            return {}
        matrix = self._matrix(sums)
        right, pixels = matrix.diagonal(), matrix.sum(1)
        recalls = (right / pixels)[pixels > 0]
        ious = self._ious(matrix).values()
        tn, tp = float(matrix[0, 0]), float(matrix[1:, 1:].sum())
        fp, fn = float(matrix[0, 1:].sum()), float(matrix[1:, 0].sum())
        ratios = {
            "miou": (sum(ious), len(ious)),
            "pixel_acc": (float(right.sum()), float(pixels.sum())),
            "class_acc": (float(recalls.sum()), len(recalls)),
            "iou_fg": (tp, tp + fp + fn),
            "dsc_fg": (2 * tp, 2 * tp + fp + fn),
            "sensitivity": (tp, tp + fn),
            "specificity": (tn, tn + fp),
            "iou_fg_image": (iou, images),
            "dsc_fg_image": (dice, images),
        }
        if self.boundary:
            ratios["boundary_f"] = (boundary, images)
        percent = {f"{prefix}/{key}": 100 * part / whole for key, (part, whole) in ratios.items() if whole}
        return {f"{prefix}/loss": loss / images} | percent

    def per_class(self, prefix: str, device: torch.device) -> dict[str, float]:
        """IoU in percent of each class in a mask or prediction, as `prefix/iou/0` and so on; every process must ask."""
        ious = self._ious(self._matrix(self.total(device)))
        return {f"{prefix}/iou/{k}": 100 * iou for k, iou in ious.items()}

    def count(self, device: torch.device) -> int:
        """The images over all processes that have a pixel that counts; every process must ask."""
        return int(self.total(device)[1])

    def _matrix(self, sums: Tensor) -> Tensor:
        return sums[_PER_IMAGE:].view(self.classes, self.classes)

    def _ious(self, matrix: Tensor) -> dict[int, float]:
        """IoU of the classes in a mask or prediction."""
        union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
        return {k: float(matrix[k, k] / union[k]) for k in range(self.classes) if union[k]}


def _boundary_scores(prediction: Tensor, target: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """From 0 to 1, of maps (B, H, W) with confusion matrices (classes, classes, B): (B,)."""
    classes, _, images = counts.shape
    height, width = _extent(valid.any(2)), _extent(valid.any(1))
    # The largest squared distance d^2 < (3/400)^2 (h^2 + w^2), in whole numbers, so that no rounding decides.
    reach = ((9 * (height**2 + width**2) - 1) // 160_000).repeat_interleave(classes)
    # A number of its own for each class of each image, so that all are matched at once.
    first = torch.arange(0, images * classes, classes, device=valid.device)[:, None, None]
    found, true = (_edges(torch.where(valid, first + labels, -1)) for labels in (prediction, target))
    if classes == 2:  # the background has the boundary of the foreground
        found, true = (torch.where(keys % 2 == 1, keys, -1) for keys in (found, true))
    found_all, found_far = (n.view(images, classes).to(counts) for n in _far(found, true, reach))
    true_all, true_far = (n.view(images, classes).to(counts) for n in _far(true, found, reach))
    found_near, true_near = found_all - found_far, true_all - true_far
    # 2PR / (P + R) without the divisions by 0.
    score = 2 * found_near * true_near / (found_near * true_all + true_near * found_all).clamp(min=1)
    predicted, actual, right = counts.sum(0).T, counts.sum(1).T, counts.diagonal()
    agree = (predicted == right) & (actual == right)
    score = torch.where(found_all + true_all == 0, agree.to(counts), score)
    if classes == 2:
        return score[:, 1]
    present = predicted + actual > 0
    return (score * present).sum(1) / present.sum(1)


def _extent(there: Tensor) -> Tensor:
    """From the first true element to the last, (B, N) -> (B,)."""
    first, after = there.int().argmax(1), there.flip(1).int().argmax(1)
    return there.shape[1] - after - first


def _edges(keys: Tensor) -> Tensor:
    """The keys of the pixels with a neighbour of another, -1 elsewhere, of maps (B, H, W) with -1 where none counts."""
    edge = torch.zeros_like(keys, dtype=torch.bool)
    for axis in (1, 2):
        pairs = keys.shape[axis] - 1
        one, next_one = keys.narrow(axis, 0, pairs), keys.narrow(axis, 1, pairs)
        differ = (one != next_one) & (one >= 0) & (next_one >= 0)
        edge.narrow(axis, 0, pairs).logical_or_(differ)
        edge.narrow(axis, 1, pairs).logical_or_(differ)
    return torch.where(edge, keys, -1)


def _far(mine: Tensor, other: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels of each key in a map, and those of them that have none of the same key near in the other map.

    It looks around the pixels that have a key: they are few, and so are the places that are near enough, where a
    distance transform would be one of the whole map for each class.
    """
    furthest = int(reach.max())
    radius = math.isqrt(furthest)
    mine, other = (F.pad(keys, [radius] * 4, value=-1) for keys in (mine, other))
    width, mine, other = mine.shape[2], mine.flatten(), other.flatten()
    places = (mine >= 0).nonzero()[:, 0]
    keys = mine[places]
    total = torch.bincount(keys, minlength=len(reach))
    steps = itertools.product(range(-radius, radius + 1), repeat=2)
    for square, down, right in sorted((down**2 + right**2, down, right) for down, right in steps):
        if square <= furthest:
            far = (other[places + down * width + right] != keys) | (square > reach[keys])
            places, keys = places[far], keys[far]  # most are found by the first few steps
    return total, torch.bincount(keys, minlength=len(reach))
