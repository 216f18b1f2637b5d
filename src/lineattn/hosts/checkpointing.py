"""Activation checkpointing that leaves batch norm's running statistics alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def checkpointed(function: Callable[..., Any], modules: Sequence[nn.Module], *args: Any) -> Any:
    """``function(*args)``, computed once more in the backward pass instead of being kept.

    Args:
        function: What to compute.
        modules: The modules that it calls; their batch norms count the batch once, not twice.
        args: Its arguments.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)]
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _Frozen(norms)))


class _Frozen:
    """Batch statistics are used and not recorded: the same kernels run, with momentum 0.

    A class, since a graph that is kept for a second backward pass enters it twice.
    """

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self.norms = norms

    def __enter__(self) -> None:
        self.kept = [(norm.momentum, norm.num_batches_tracked) for norm in self.norms]
        for norm in self.norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, count) in zip(self.norms, self.kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
