"""Small networks and a method without a paper, for the tests of hosts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models import resnet

from lineattn.models import cifar_resnet
from lineattn.nn.depth.base import DepthAttention, Init, Site


def _cifar_basic() -> nn.Module:
    return cifar_resnet.CifarResNet(cifar_resnet.BasicBlock, 14, num_classes=5, width=8)


def _cifar_bottleneck() -> nn.Module:
    return cifar_resnet.CifarResNet(cifar_resnet.Bottleneck, 20, num_classes=5, width=4)


def _torchvision_basic() -> nn.Module:
    return resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], num_classes=5)


def _torchvision_bottleneck() -> nn.Module:
    return resnet.ResNet(resnet.Bottleneck, [2, 2, 2, 2], num_classes=5, width_per_group=16, groups=2)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "cifar_basic": _cifar_basic,
    "cifar_bottleneck": _cifar_bottleneck,
    "torchvision_basic": _torchvision_basic,
    "torchvision_bottleneck": _torchvision_bottleneck,
}


def small(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def image(batch: int = 2, size: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def shake(net: nn.Module) -> nn.Module:
    """Takes a network away from its start: gains, and everything that a batch norm holds, at random.

    Maps stay small: gates that saturate would hide what comes before them.
    """
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("gain"):
                tensor.copy_(torch.randn(tensor.shape, generator=draws))
            elif name.endswith(("running_mean", "bias")):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draws))
            elif name.endswith("running_var"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=draws))
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(0.2 + 0.4 * torch.rand(module.weight.shape, generator=draws))
    return net


class Mean(DepthAttention):
    """Adds the plain mean of the stretch's outputs (of its shortcuts, with ``of="shortcut"``)."""

    carries = True

    def __init__(self, site: Site, *, of: str = "out", head_dim: int = 1, init: Init = "identity") -> None:
        super().__init__(site, init=init)
        self.needs_shortcut = of == "shortcut"
        self.head_dim = head_dim
        self.scale = nn.Parameter(torch.ones(site.channels))
        self.norm = nn.BatchNorm2d(site.channels)

    def forward(
        self, out: Tensor, shortcut: Tensor | None, state: tuple[Tensor, int] | None
    ) -> tuple[Tensor, tuple[Tensor, int]]:
        assert (state is None) == (self.site.entry == "start")
        assert (shortcut is not None) == self.needs_shortcut
        seen = out if shortcut is None else shortcut
        total, count = (0.0, 0) if state is None or self.site.entry == "transition" else state
        total, count = total + seen, count + 1
        gain = self.scale if self.gain is None else self.gain * self.scale
        return out + gain[:, None, None] * self.norm(total / count), (total, count)

    def _fold_gain(self, gain: Tensor) -> None:
        self.scale.data.mul_(gain)
