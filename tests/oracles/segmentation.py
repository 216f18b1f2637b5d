"""Segmentation's metrics from their definitions, pixel by pixel in NumPy, and its losses in torch, in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def metrics(pairs: list[tuple[np.ndarray, np.ndarray]], classes: int, ignore: int = 255) -> dict[str, float]:
    """Of predictions and masks (H, W), image by image, without the loss; with the classes' IoU."""
    found, true, images = [], [], []
    for prediction, mask in pairs:
        valid = mask != ignore
        if valid.any():
            found += prediction[valid].tolist()
            true += mask[valid].tolist()
            images.append((prediction, mask, valid))
    if not images:
        return {}
    p, t = np.array(found), np.array(true)
    per_class = {
        k: 100 * ((p == k) & (t == k)).sum() / ((p == k) | (t == k)).sum()
        for k in range(classes)
        if ((p == k) | (t == k)).any()
    }
    recalls = [(p[t == k] == k).mean() for k in range(classes) if (t == k).any()]
    results = {f"iou/{k}": iou for k, iou in per_class.items()}
    results["miou"] = np.mean(list(per_class.values()))
    results["pixel_acc"] = 100 * (p == t).mean()
    results["class_acc"] = 100 * np.mean(recalls)
    p, t = p > 0, t > 0
    if (p | t).any():
        results["iou_fg"] = 100 * (p & t).sum() / (p | t).sum()
        results["dsc_fg"] = 200 * (p & t).sum() / (p.sum() + t.sum())
    if t.any():
        results["sensitivity"] = 100 * p[t].mean()
    if not t.all():
        results["specificity"] = 100 * (~p[~t]).mean()
    overlaps = [overlap(prediction[valid] > 0, mask[valid] > 0) for prediction, mask, valid in images]
    results["iou_fg_image"], results["dsc_fg_image"] = np.mean(overlaps, 0)
    results["boundary_f"] = np.mean([boundary(*image, classes) for image in images])
    return {key: float(value) for key, value in results.items()}


def overlap(p: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """IoU and Dice of two masks."""
    if not (p | t).any():
        return 100.0, 100.0
    return 100 * (p & t).sum() / (p | t).sum(), 200 * (p & t).sum() / (p.sum() + t.sum())


def boundary(prediction: np.ndarray, mask: np.ndarray, valid: np.ndarray, classes: int) -> float:
    """The boundary score of an image."""
    rows, columns = np.nonzero(valid)
    diagonal2 = int(np.ptp(rows) + 1) ** 2 + int(np.ptp(columns) + 1) ** 2
    limit = math.ceil(Fraction(75, 10_000) ** 2 * diagonal2)  # of squared distances, which are whole numbers
    scores = []
    for k in [1] if classes == 2 else range(classes):
        p, t = (prediction == k) & valid, (mask == k) & valid
        if classes > 2 and not (p | t).any():
            continue
        ps, ts = edge(p, valid), edge(t, valid)
        if not ps and not ts:
            scores.append(100.0 * (p == t).all())
        elif not ps or not ts:
            scores.append(0.0)
        else:
            precision = np.mean([near(a, ts, limit) for a in ps])
            recall = np.mean([near(a, ps, limit) for a in ts])
            scores.append(200 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return float(np.mean(scores))


def edge(inside: np.ndarray, valid: np.ndarray) -> list[tuple[int, int]]:
    height, width = inside.shape
    return [
        (y, x)
        for y in range(height)
        for x in range(width)
        if inside[y, x]
        and any(
            0 <= b < height and 0 <= a < width and valid[b, a] and not inside[b, a]
            for b, a in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1))
        )
    ]


def near(point: tuple[int, int], others: list[tuple[int, int]], limit: int) -> bool:
    return bool((((np.array(others) - point) ** 2).sum(1) < limit).any())


def bce_dice(logits: Tensor, target: Tensor, ignore: int = 255) -> Tensor:
    losses = []
    for image, mask in zip(logits[:, 0], target, strict=True):
        valid = mask != ignore
        if valid.any():
            p, y = 1 / (1 + torch.exp(-image[valid])), mask[valid].to(logits)
            bce = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
            losses.append(bce + 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1))
    return sum(losses) / len(losses)


def cross_entropy(logits: Tensor, target: Tensor, weights: list[float], over: str, ignore: int = 255) -> Tensor:
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    total, pixels = torch.zeros((), dtype=logits.dtype), 0.0
    for image, y, x in np.ndindex(*target.shape):
        k = int(target[image, y, x])
        if k != ignore:
            total = total - weights[k] * p[image, k, y, x].log()
            pixels += weights[k]
    return total / (target.numel() if over == "all" else pixels)
