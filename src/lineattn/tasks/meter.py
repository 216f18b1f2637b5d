"""Loss and metrics over an epoch, exact over processes and over an interruption."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import all_reduce, is_available, is_initialized


class Sums(ABC):
    """What an epoch adds up, in double precision where the device has it.

    The sums are the state: saved in the middle of an epoch and restored, they go on as if nothing had happened.

    Args:
        size: How many sums there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reset()

    def reset(self) -> None:
        self.sums = torch.zeros(self.size, dtype=torch.float64)

    def restore(self, sums: Sequence[float]) -> None:
        self.sums = torch.tensor(sums, dtype=torch.float64)

    def total(self, device: torch.device) -> Tensor:
        """The sums over all processes; every process must ask."""
        sums = self.sums.clone()
        if is_available() and is_initialized():
            sums = sums.to(device)
            all_reduce(sums)
        return sums.cpu()

    def add(self, batch: Tensor) -> None:
        """Adds what a batch gave."""
        # Apple's GPUs have no doubles.
        kind = torch.float32 if batch.device.type == "mps" else torch.float64
        self.sums = self.sums.to(batch.device, kind) + batch.to(kind)

    @abstractmethod
    def compute(self, prefix: str, device: torch.device) -> dict[str, float]:
        """The metrics, each as `prefix/name`; every process must ask."""

    @abstractmethod
    def count(self, device: torch.device) -> int:
        """The samples over all processes; every process must ask."""


class Meter(Sums):
    """Sums of loss, top-1 and top-5 hits, and the number of samples."""

    def __init__(self) -> None:
        super().__init__(4)

    @torch.no_grad()
    def update(self, loss: Tensor, logits: Tensor, target: Tensor) -> None:
        """Adds a batch.

        Args:
            loss: Its mean loss.
            logits: (B, classes).
            target: (B,) class indices, or (B, classes) class weights, of which the largest counts.
        """
        labels = target.argmax(1) if target.ndim == 2 else target
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        count = len(labels)
        self.add(torch.stack([loss.detach() * count, top[:, 0].sum(), top.any(1).sum(), loss.new_tensor(count)]))

    def compute(self, prefix: str, device: torch.device) -> dict[str, float]:
        """Mean loss and accuracies in percent, as `prefix/loss`, `prefix/acc1`, `prefix/acc5`."""
        loss, top1, top5, count = self.total(device).tolist()
        if not count:
            return {}
        return {
            f"{prefix}/loss": loss / count,
            f"{prefix}/acc1": 100 * top1 / count,
            f"{prefix}/acc5": 100 * top5 / count,
        }

    def count(self, device: torch.device) -> int:
        return int(self.total(device)[3])
