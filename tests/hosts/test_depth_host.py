from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from lineattn import attach
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from tests.hosts.nets import Mean, image, shake, small


@pytest.fixture
def host() -> DepthHost:
    host = attach(small("cifar_basic"), Mean)
    shake(host)
    return host


def test_names_of_parameters() -> None:
    net = small("torchvision_basic")
    plain = list(net.state_dict())
    host = attach(net, Mean)
    keys = list(host.state_dict())
    assert [key.removeprefix("backbone.") for key in keys if key.startswith("backbone.")] == plain
    assert {key.split(".")[1] for key in keys if key.startswith("sites.")} == {
        f"layer{stage}_{i}" for stage, blocks in enumerate((2, 1, 1, 2), 1) for i in range(blocks)
    }


@pytest.mark.medium
def test_split_and_whole_blocks_compute_the_same_in_training() -> None:
    """At zero gain the host is the plain network, running statistics included, whichever way its blocks run."""
    nets = [small("torchvision_bottleneck").train() for _ in range(3)]
    runs = [nets[0], attach(nets[1], Mean), attach(nets[2], Mean, of="shortcut")]
    for _ in range(2):
        outs = [run(image()) for run in runs]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        for run, out in zip(runs, outs, strict=True):
            run.zero_grad()
            out.square().sum().backward()
    for i in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(nets[0].buffers(), nets[i].buffers(), strict=True))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(nets[0].parameters(), nets[i].parameters(), strict=True))


def test_sites_may_be_left_out() -> None:
    net = small("cifar_basic")
    full = shake(attach(net, Mean))
    last = {path: full.sites[path.replace(".", "_")] for path in ("stages.0.0", "stages.0.1")}
    host = DepthHost(net, full.plan, last, full.feature_info, full.num_features, full.head_hidden_size).eval()
    with torch.no_grad():
        assert torch.equal(host.features(image())[0], full.features(image())[0])
        assert not torch.equal(host(image()), full(image()))


def test_features_and_intermediates(host: DepthHost) -> None:
    x = image(size=32)
    with torch.no_grad():
        maps = host.features(x)
        last, all_maps = host.forward_intermediates(x)
        assert all(torch.equal(a, b) for a, b in zip(maps, all_maps, strict=True))
        assert torch.equal(last, host.forward_features(x)) and torch.equal(last, maps[-1])
        for indices, expected in [(1, [2]), (2, [1, 2]), ([0], [0]), ([-1, 0], [0, 2]), ((1,), [1])]:
            found = host.forward_intermediates(x, indices, intermediates_only=True)
            assert [m.shape for m in found] == [maps[i].shape for i in expected], indices
        early, _ = host.forward_intermediates(x, [0], stop_early=True)
        assert torch.equal(early, maps[0])
    assert [info["module"] for info in host.feature_info] == [f"backbone.stages.{s}.1" for s in range(3)]
    assert [info["num_chs"] for info in host.feature_info] == [8, 16, 32]
    assert [info["reduction"] for info in host.feature_info] == [1, 2, 4]


@pytest.mark.parametrize("indices", [[3], [-4], [], 4, 0])
def test_no_such_stage(host: DepthHost, indices: list[int] | int) -> None:
    with pytest.raises(InputError, match="stages 0 to 2"):
        host.forward_intermediates(image(size=32), indices)


def test_other_formats_are_refused(host: DepthHost) -> None:
    with pytest.raises(InputError, match="NCHW"):
        host.forward_intermediates(image(size=32), output_fmt="NLC")


def test_head(host: DepthHost) -> None:
    x = image(size=32)
    with torch.no_grad():
        pooled = host.forward_head(host.forward_features(x), pre_logits=True)
        assert pooled.shape == (2, host.num_features)
        assert torch.equal(host.get_classifier()(pooled), host(x))
        host.double().reset_classifier(3)
        assert host.num_classes == 3 and host(x.double()).shape == (2, 3)
        host.reset_classifier(0)
        assert host.num_classes == 0
        torch.testing.assert_close(host(x.double()).float(), pooled, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="global_pool"):
        host.reset_classifier(3, "max")


@pytest.mark.parametrize("family", ["cifar_basic", "torchvision_basic"])
def test_timm_groups_parameters_by_depth(family: str) -> None:
    from timm.models import group_parameters

    host = attach(small(family), Mean)
    names = group_parameters(host, host.group_matcher(), reverse=True)
    first = "stages.0" if family.startswith("cifar") else "layer1"
    key = first.replace(".", "_")
    assert names["backbone.conv1.weight"] == names["backbone.bn1.weight"] == 0
    assert names[f"backbone.{first}.0.conv1.weight"] == names[f"sites.{key}_0.gain"] == 1
    assert names[f"backbone.{first}.1.conv1.weight"] == names[f"sites.{key}_1.gain"] == 2
    assert names["backbone.fc.weight"] == max(names.values()) == len(host.sites) + 1
    coarse = group_parameters(host, host.group_matcher(coarse=True), reverse=True)
    assert coarse[f"backbone.{first}.0.conv1.weight"] == coarse[f"sites.{key}_1.gain"] == 1
    assert coarse["backbone.fc.weight"] == len(host.feature_info) + 1


def test_group_of_block_1_is_not_that_of_block_10() -> None:
    from timm.models import group_parameters

    from lineattn.models import create_model

    host = attach(create_model("resnet110_bottleneck_cifar", width=4), Mean)
    names = group_parameters(host, host.group_matcher(), reverse=True)
    assert names["backbone.stages.0.1.conv1.weight"] == names["sites.stages_0_1.gain"] == 2
    assert names["backbone.stages.0.10.conv1.weight"] == names["sites.stages_0_10.gain"] == 11


def test_fuse_leaves_the_tree_and_the_original(host: DepthHost) -> None:
    fused = host.fuse()
    assert not fused.training and not any(p.requires_grad for p in fused.parameters())
    assert isinstance(fused.backbone.bn1, nn.Identity) and isinstance(host.backbone.bn1, nn.BatchNorm2d)
    assert isinstance(fused.backbone.stages[1][0].downsample[1], nn.Identity)
    assert fused.backbone.conv1.bias is not None and host.backbone.conv1.bias is None
    with torch.no_grad():
        torch.testing.assert_close(fused(image()), host(image()), rtol=1e-5, atol=1e-5)


def test_fused_split_blocks_stay_equal() -> None:
    host = attach(small("torchvision_bottleneck"), Mean, of="shortcut").double()
    shake(host)
    x = image(dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(host.fuse()(x), host(x), rtol=1e-10, atol=1e-10)


def test_fuse_keeps_channels_last(host: DepthHost) -> None:
    fused = host.to(memory_format=torch.channels_last).fuse()
    assert fused.backbone.stages[1][0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_pickles(host: DepthHost) -> None:
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(host))(image()), host(image()))


def test_graph_kept_for_a_second_backward_pass(host: DepthHost) -> None:
    host.train().set_grad_checkpointing()
    before = {name: buffer.clone() for name, buffer in host.named_buffers()}
    loss = host(image()).square().sum()
    once = torch.autograd.grad(loss, list(host.parameters()), retain_graph=True)
    after = {name: buffer.clone() for name, buffer in host.named_buffers()}
    twice = torch.autograd.grad(loss, list(host.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    for name, buffer in host.named_buffers():
        assert torch.equal(buffer, after[name]), name
        assert not torch.equal(buffer, before[name]), name
    assert all(m.momentum == 0.1 for m in host.modules() if isinstance(m, nn.BatchNorm2d))


def test_checkpointing_saves_memory(host: DepthHost) -> None:
    def saved() -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            host(image())
        return total

    host.train()
    kept = saved()
    host.set_grad_checkpointing()
    assert saved() < 0.5 * kept
    host.set_grad_checkpointing(False)
    assert saved() == kept
