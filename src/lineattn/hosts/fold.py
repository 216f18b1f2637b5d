"""Batch norms folded into the convolutions before them, with the modules' tree left as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.proxy import TraceError
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fold_batch_norms(steps: Sequence[Callable[[Tensor], Tensor]], root: nn.Module) -> None:
    """Replaces each convolution that feeds one batch norm by the two together, and the batch norm by an identity.

    .. math:: W' = W \\gamma / \\sigma, \\qquad b' = \\beta + (b - \\mu) \\gamma / \\sigma

    Splits and plans go on working, since no module changes its place. What can't be traced stays as it is.

    Args:
        steps: Modules and functions that are called one after the other, in evaluation mode.
        root: The network that holds them.
    """
    paths = {id(module): path for path, module in root.named_modules(remove_duplicate=False)}
    used = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    for conv, norm in _pairs(steps):
        if used[id(conv)] == used[id(norm)] == 1 and norm.running_mean is not None:
            root.set_submodule(paths[id(conv)], fuse_conv_bn_eval(conv, norm))
            root.set_submodule(paths[id(norm)], nn.Identity())


def _pairs(steps: Sequence[Callable[[Tensor], Tensor]]) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions whose output goes to one batch norm and nowhere else."""
    found: list[tuple[Any, Any]] = list(pairwise(steps))
    for step in steps:
        if not isinstance(step, nn.Module) or not any(step.children()):
            continue
        try:
            graph = symbolic_trace(step)
        except TraceError:
            continue
        calls = Counter(node.target for node in graph.graph.nodes if node.op == "call_module")
        modules = dict(step.named_modules())
        for node in graph.graph.nodes:
            if node.op != "call_module" or len(node.users) != 1:
                continue
            (user,) = node.users
            if user.op == "call_module" and calls[node.target] == calls[user.target] == 1:
                found.append((modules[node.target], modules[user.target]))
    return [(a, b) for a, b in found if isinstance(a, nn.Conv2d) and isinstance(b, nn.BatchNorm2d)]
