"""The memory of a training step where no allocator keeps count: what autograd saves, plus parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class SavedBytes:
    """Bytes of the storages that autograd keeps for the backward pass, each counted once."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    @contextmanager
    def counting(self, net: nn.Module) -> Iterator[None]:
        """Counts what the code inside saves, `net`'s own parameters and buffers left out."""
        own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def static_bytes(net: nn.Module) -> int:
    """Parameters, their gradients, and buffers."""
    parameters = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in net.parameters())
    return parameters + sum(b.numel() * b.element_size() for b in net.buffers())
