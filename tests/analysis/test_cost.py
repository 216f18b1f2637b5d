from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from lineattn import create_model
from lineattn.analysis.cost import count_macs, count_params


def _by_formula(net, example):
    """MACs of convolutions and linear layers from their definitions, with the sizes that a real pass has."""
    total = 0

    def add(module, inputs, output):
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += (
                output.numel() * module.in_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]
            )
        elif isinstance(module, nn.Linear):
            total += output.numel() * module.in_features

    for module in net.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        net(example)
    return total


@pytest.mark.parametrize(
    ("name", "side"), [("resnet20_bottleneck_cifar", 32), ("resnet20_cifar", 17), ("resnet18", 65)]
)
def test_macs_of_a_plain_network_are_those_of_the_formula(name, side):
    net, example = create_model(name, num_classes=7).eval(), torch.randn(2, 3, side, side)
    assert count_macs(net, example) == _by_formula(net, example)


@pytest.mark.medium
def test_resnet50_has_the_papers_figure():
    with torch.device("meta"):
        net, example = create_model("resnet50"), torch.empty(1, 3, 224, 224)
    # Stem, four stages of bottlenecks (1x1 in, 3x3, 1x1 out; the first of a stage has its 1x1 in at the old resolution
    # and a 1x1 shortcut), classifier.
    expected = 64 * 3 * 49 * 112**2 + 2048 * 1000
    incoming = 64
    for planes, blocks, side, stride in ((64, 3, 56, 1), (128, 4, 28, 2), (256, 6, 14, 2), (512, 3, 7, 2)):
        for block in range(blocks):
            first = side * stride if block == 0 else side
            expected += incoming * planes * first**2 + planes**2 * 9 * side**2 + planes * 4 * planes * side**2
            expected += incoming * 4 * planes * side**2 if block == 0 else 0
            incoming = 4 * planes
    assert count_macs(net, example) == expected == 4_089_184_256


def test_fused_attention_counts():
    class Attention(nn.Module):
        def forward(self, x):
            return scaled_dot_product_attention(x, x, x)

    assert count_macs(Attention(), torch.zeros(2, 3, 10, 4)) == 2 * 3 * (10 * 10 * 4 + 10 * 10 * 4)


@pytest.mark.medium
def test_nothing_is_touched():
    net = create_model("resnet20_cifar", attn="kcla").train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    draws = torch.get_rng_state()
    count_macs(net, torch.zeros(1, 3, 32, 32))
    assert torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.device.type == "cpu" and p.grad is None for p in net.parameters())


def test_parameters_shared_and_frozen():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    assert count_params(net) == 16 + 10
    assert count_params(net, trainable=True) == 16


def test_the_heads_of_a_detector_count_as_for_all_regions_it_may_propose():
    sizes = {"fpn_channels": 16, "box_width": 32, "rpn_post_nms_top_n_test": 50, "min_size": 64}
    net = create_model("faster_rcnn:resnet20_cifar", num_classes=3, net_args=sizes).eval()
    example = torch.zeros(1, 3, 64, 64)
    head = net.roi_heads
    regions = 50 * sum(layer.weight.numel() for layer in (head.box_head.fc6, head.box_head.fc7))
    regions += 50 * (head.box_predictor.cls_score.weight.numel() + head.box_predictor.bbox_pred.weight.numel())
    maps = list(net.backbone(example).values())
    dense = count_macs(net.backbone, example)
    for level in maps:
        dense += _by_formula(net.rpn.head, [level])
        for module in net.rpn.head.modules():
            module._forward_hooks.clear()
    assert count_macs(net, example) == dense + regions


def test_a_module_with_a_layer_called_dense_is_counted_whole():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.dense = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            return self.dense(self.first(x))

    assert count_macs(Net(), torch.zeros(1, 5)) == 50
