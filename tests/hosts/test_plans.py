from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lineattn.errors import InputError
from lineattn.hosts import plans
from tests.hosts.nets import FAMILIES, image, shake, small


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_head_are_the_forward_pass(family: str) -> None:
    net = shake(small(family))
    plan = plans.find(net)
    x = image()
    with torch.no_grad():
        whole = net(x)
        for step in plan.steps(net):
            x = step.module(x)
        assert torch.equal(plan.head(net, x, False), whole)
        assert plan.head(net, x, True).shape == (2, net.get_submodule(plan.classifier).in_features)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False])
def test_split_is_the_block_bit_for_bit(family: str, training: bool) -> None:
    net = shake(small(family)).train(training)
    halves = copy.deepcopy(net)
    plan = plans.find(net)
    x, y = image(), image()
    splits = 0
    for whole, halved in zip(plan.steps(net), plan.steps(halves), strict=True):
        x = whole.module(x)
        if halved.split is None:
            y = halved.module(y)
        else:
            branch, shortcut, act = halved.split(halved.module, y)
            assert branch.shape == shortcut.shape
            y = act(branch + shortcut)
            splits += 1
        assert torch.equal(x, y), whole.path
    x.square().sum().backward()
    y.square().sum().backward()
    assert splits == sum(step.site for step in plan.steps(net)) > 0
    # The head is not run here, so its parameters have no gradient on either side.
    for (name, a), b in zip(net.named_parameters(), halves.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) == name.startswith("fc.")
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(net.named_buffers(), halves.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_unknown_family_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"no plan for .*Linear; supported families: CIFAR ResNet, torchvision ResNet"):
        plans.find(nn.Linear(1, 1))
