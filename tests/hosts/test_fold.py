from __future__ import annotations

import torch
from torch import Tensor, nn

from lineattn.hosts.fold import fold_batch_norms
from tests.hosts.nets import image


class Shared(nn.Module):
    """One convolution before two norms, one norm behind two convolutions, one output used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm_a, self.norm_b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.conv_c, self.conv_d, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv_e, self.norm_e = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.conv_f, self.norm_f = nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3, affine=False)
        self.conv_g, self.norm_g = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_b(self.twice(self.norm_a(self.twice(x))))
        x = self.norm(self.conv_c(x)) + self.norm(self.conv_d(x))
        y = self.conv_e(x)
        return self.norm_g(self.conv_g(self.norm_f(self.conv_f(y + self.norm_e(y)))))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def test_only_pairs_are_folded() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), Shared(), Untraceable(), nn.BatchNorm2d(3)).double()
    for norm in [m for m in net.modules() if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None]:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    net.eval()
    x = image(dtype=torch.float64)
    with torch.no_grad():
        before = net(x)
        fold_batch_norms(list(net), net)
        torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-10)
    gone = [name for name, module in net.named_modules() if isinstance(module, nn.Identity)]
    assert gone == ["1", "2.norm_f"]
