"""Batch norms folded into the convolutions before them, with the modules' tree left as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.fx import Tracer
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lineattn.hosts.step import Step, loaded


def fold_batch_norms(steps: Sequence[Step], root: nn.Module) -> None:
    """Replaces each convolution that feeds one batch norm by the two together, and the norm by what is left of it.

    .. math:: W' = W \\gamma / \\sigma, \\qquad b' = \\beta + (b - \\mu) \\gamma / \\sigma

    Nothing is left of a plain batch norm, and of timm's, which end in one, the activation. Splits and plans go on
    working, since no module changes its place. What can't be traced stays as it is.

    Args:
        steps: The steps of a network in evaluation mode.
        root: The network.
    """
    paths = {id(module): path for path, module in root.named_modules(remove_duplicate=False)}
    used = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    for conv, norm in _pairs(steps):
        if used[id(conv)] == used[id(norm)] == 1 and norm.running_mean is not None:
            root.set_submodule(paths[id(conv)], fuse_conv_bn_eval(conv, norm))
            root.set_submodule(paths[id(norm)], _rest(norm))


def _pairs(steps: Sequence[Step]) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions whose output goes to one batch norm and nowhere else."""
    found: list[tuple[Any, Any]] = [
        (_last(a.module), b.module) for a, b in pairwise(steps) if not (a.site or a.is_feature)
    ]
    for step in steps:
        if not isinstance(step.module, nn.Module) or not any(map(_is_norm, step.module.modules())):
            continue
        try:
            graph = _Tracer().trace(step.module)
        except Exception:  # the forward is anybody's code, and tracing calls it
            continue
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        modules = dict(step.module.named_modules())
        for node in graph.nodes:
            if node.op != "call_module" or len(node.users) != 1:
                continue
            (user,) = node.users
            if user.op == "call_module" and calls[node.target] == calls[user.target] == 1:
                found.append((modules[node.target], modules[user.target]))
    return [(a, b) for a, b in found if _is_conv(a) and _is_norm(b)]


def _last(module: object) -> object:
    """The module, or the last of several: a stem may end in the convolution that its norm stands behind."""
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    return module


class _Tracer(Tracer):
    """Sees a convolution and a norm as one call each, of whichever library they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_conv(m) or _is_norm(m) or super().is_leaf_module(m, module_qualified_name)


def _is_conv(module: object) -> bool:
    """By exact class: a subclass may change its weight before it uses it, and scaling that would have no effect."""
    return type(module) in (nn.Conv2d, *loaded("timm.layers.conv2d_same", "Conv2dSame"))


def _is_norm(module: object) -> bool:
    return type(module) is nn.BatchNorm2d or type(module) in _norms_with_activation()


def _norms_with_activation() -> tuple[type, ...]:
    return loaded("timm.layers.norm_act", "BatchNormAct2d")


def _rest(norm: Any) -> nn.Module:
    """What a norm does besides normalising."""
    return nn.Sequential(norm.drop, norm.act) if type(norm) in _norms_with_activation() else nn.Identity()
