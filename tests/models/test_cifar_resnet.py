from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lineattn.errors import InputError
from lineattn.models.cifar_resnet import BasicBlock, Bottleneck, CifarResNet
from tests.hosts.nets import image


@pytest.mark.parametrize(("depth", "count"), [(20, 243_508), (56, 614_452), (110, 1_170_868)])
def test_parameters_of_bottleneck_networks(depth: int, count: int) -> None:
    with torch.device("meta"):
        net = CifarResNet(Bottleneck, depth, num_classes=100)
    assert sum(p.numel() for p in net.parameters()) == count


def test_basic_resnet20_is_the_original() -> None:
    net = CifarResNet(BasicBlock, 20)
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in net.modules()) == 19
    # He et al. count 0.27M with shortcuts that have no parameters; ours are projections with norms.
    projections = sum(p.numel() for name, p in net.named_parameters() if "downsample" in name)
    assert sum(p.numel() for p in net.parameters()) - projections == 269_722


def test_maps_halve_twice() -> None:
    net = CifarResNet(Bottleneck, 11, num_classes=3, in_chans=1, width=4).eval()
    x = image(size=33)[:, :1]
    shapes = []
    for stage in net.stages:
        stage.register_forward_hook(lambda _module, _args, out: shapes.append(tuple(out.shape[1:])))
    assert net(x).shape == (2, 3)
    assert shapes == [(16, 33, 33), (32, 17, 17), (64, 9, 9)]


def test_start() -> None:
    torch.manual_seed(0)
    net = CifarResNet(Bottleneck, 20)
    conv = net.stages[2][1].conv2
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.02)
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in net.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize(("block", "depth"), [(BasicBlock, 2), (BasicBlock, 21), (Bottleneck, 14), (Bottleneck, 0)])
def test_depths_that_do_not_exist(block: type, depth: int) -> None:
    n, first = (6, 8) if block is BasicBlock else (9, 11)
    with pytest.raises(InputError, match=rf"depth {depth}: it must be {n}n \+ 2, as {first}, "):
        CifarResNet(block, depth)


@pytest.mark.parametrize(("block", "width"), [(BasicBlock, 7), (Bottleneck, 1)])
def test_widths_at_which_a_library_writes_out_of_bounds(block: type, width: int) -> None:
    with pytest.raises(InputError, match=f"width={width} is too narrow"):
        CifarResNet(block, 20, width=width)
