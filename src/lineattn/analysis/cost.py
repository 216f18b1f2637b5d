"""What a network costs: parameters, and multiply-accumulate operations (MACs).

MACs are those of convolutions and matrix products, the convention of the papers' tables; sums, norms and activations
are not counted. One MAC is two FLOPs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_params(module: nn.Module, *, trainable: bool = False) -> int:
    """How many parameters a module has; shared ones count once.

    Args:
        module: Any module.
        trainable: Count only those that require a gradient.

    Example:
        >>> count_params(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


def count_macs(module: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of one forward pass.

    The pass runs on tensors without data: nothing is computed, and the module is not touched. Attention runs in its
    unfused form, as torch's counter misses the fused one on the CPU. A detector is counted as if it kept as many
    regions as it may, see `lineattn.models.detection.Detector.forward_dense`.

    Args:
        module: Any module with one tensor as input.
        example: An input; only its shape and dtype matter.

    Example:
        >>> count_macs(nn.Conv2d(3, 8, 3, padding=1), torch.zeros(1, 3, 10, 10))  # 8 * 3 * 9 * 100
        21600
    """
    # Of the meta device autocast knows no dtype, and a method that holds it off fails there: fake ones are on the CPU.
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        tensors = {f"module.{name}": _empty(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        functional_call(_Dense(module), tensors, (_empty(example),))
    return counter.get_total_flops() // 2


class _Dense(nn.Module):
    """A module, and what there is of its work whatever it sees."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> object:
        return getattr(self.module, "forward_dense", self.module)(x)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
