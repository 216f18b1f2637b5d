from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lineattn import attach, create_model, swap
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.weights import added_in, load_trunk
from lineattn.models import cifar_resnet
from lineattn.models.eamlp import EAMLP
from tests.hosts.nets import Mean, image, shake, small


@pytest.fixture
def plain() -> nn.Module:
    return shake(small("cifar_basic"))


@pytest.fixture
def host() -> DepthHost:
    return attach(small("cifar_basic"), Mean)


def same_trunk(host: nn.Module, plain: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(host(image(size=32)), plain(image(size=32)))


def test_report_of_a_host(host: DepthHost, plain: nn.Module) -> None:
    report = load_trunk(host, plain.state_dict())
    assert same_trunk(host, plain)
    assert set(report.loaded) == set(plain.state_dict())
    assert set(report.new) == {key for key in host.state_dict() if key.startswith("sites.")}
    assert str(report) == (
        f"state dict: {len(report.loaded)} tensors loaded\n"
        f"new, as they were: {', '.join(report.new[:4])}, ... {len(report.new)} in all"
    )


def test_a_plain_network_loads_too(plain: nn.Module) -> None:
    net = small("cifar_basic")
    assert load_trunk(net, plain.state_dict()).new == ()
    assert same_trunk(net, plain)


@pytest.mark.parametrize(
    "form", ["pth", "safetensors", "wrapped", "ddp", "compiled", "lightning", "host", "shaken_host"]
)
def test_forms_of_a_trunk(form: str, host: DepthHost, plain: nn.Module, tmp_path: Path) -> None:
    state: dict[str, Tensor] = plain.state_dict()
    path = tmp_path / f"trunk.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        save_file(state, path)
    elif form == "pth":
        torch.save(OrderedDict(state), path)
    elif form == "wrapped":
        torch.save({"epoch": 3, "state_dict": state, "optimizer": {"state": {}}}, path)
    elif form == "ddp":
        torch.save({f"module.{key}": value for key, value in state.items()}, path)
    elif form == "compiled":
        torch.save({f"module._orig_mod.{key}": value for key, value in state.items()}, path)
    else:
        other = attach(plain, Mean)
        prefix = "model." if form == "lightning" else ""
        torch.save({"state_dict": {prefix + key: value for key, value in other.state_dict().items()}}, path)
    report = load_trunk(host, path)
    assert same_trunk(host, plain)
    assert report.source == str(path) and report.unexpected == report.dropped == ()
    assert any(key.startswith("sites.") for key in report.loaded) == ("host" in form or form == "lightning")


def test_other_class_count_is_dropped_with_a_word(host: DepthHost, plain: nn.Module) -> None:
    host.reset_classifier(9)
    fc = host.get_classifier().weight.clone()
    report = load_trunk(host, plain.state_dict())
    assert torch.equal(host.get_classifier().weight, fc)
    assert torch.equal(host.backbone.conv1.weight, plain.conv1.weight)
    assert "dropped fc.weight: (5, 32) there, (9, 32) here (another class count?)" in str(report)
    with pytest.raises(InputError, match=r"fc.weight has shape \(5, 32\); the network's is \(9, 32\)"):
        load_trunk(host, plain.state_dict(), strict_head=True)


def test_a_trunk_without_a_head(host: DepthHost, plain: nn.Module) -> None:
    state = {key: value for key, value in plain.state_dict().items() if not key.startswith("fc.")}
    assert {"fc.weight", "fc.bias"} < set(load_trunk(host, state).new)
    with pytest.raises(InputError, match=r"trunk's 'fc\.weight' is missing"):
        load_trunk(host, state, strict_head=True)


def test_a_head_without_a_place(host: DepthHost, plain: nn.Module) -> None:
    host.reset_classifier(0)
    report = load_trunk(host, plain.state_dict())
    assert dict(report.dropped) == dict.fromkeys(("fc.weight", "fc.bias"), "the network has no classifier there")
    assert "dropped fc.weight, fc.bias: the network has no classifier there" in str(report)


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_as_in_timm(plain: nn.Module, channels: int) -> None:
    block = cifar_resnet.BasicBlock
    net = cifar_resnet.CifarResNet(block, 14, num_classes=5, in_chans=channels, width=8).eval()
    host = attach(net, Mean)
    report = load_trunk(host, plain.state_dict())
    kernel = plain.conv1.weight
    summed, repeated = kernel.sum(1, keepdim=True), torch.cat((kernel, kernel[:, :2]), 1) * 3 / 5
    torch.testing.assert_close(host.backbone.conv1.weight, summed if channels == 1 else repeated)
    assert torch.equal(host.backbone.bn1.weight, plain.bn1.weight)
    assert f"adapted conv1.weight: for 3 channels there, for {channels} here" in str(report)


def test_four_channels_become_no_two(plain: nn.Module) -> None:
    state = plain.state_dict() | {"conv1.weight": torch.ones(8, 4, 3, 3)}
    with pytest.raises(InputError, match=r"conv1.weight has shape \(8, 4, 3, 3\); the network's is \(8, 3, 3, 3\)"):
        load_trunk(attach(small("cifar_basic"), Mean), state)


def test_a_renamed_key_is_an_error_and_nothing_is_loaded(host: DepthHost, plain: nn.Module) -> None:
    state = plain.state_dict()
    state["stages.1.0.convolution1.weight"] = state.pop("stages.1.0.conv1.weight")
    before = host.backbone.conv1.weight.clone()
    with pytest.raises(
        InputError, match=r"'stages\.1\.0\.conv1\.weight' is missing; it has 'stages\.1\.0\.convolution1\.weight'"
    ):
        load_trunk(host, state)
    assert torch.equal(host.backbone.conv1.weight, before)


def test_a_trunk_of_another_shape_is_an_error(host: DepthHost) -> None:
    other = create_model("resnet14_cifar", num_classes=5, width=16)
    with pytest.raises(InputError, match=r"conv1.weight has shape \(16, 3, 3, 3\); the network's is \(8, 3, 3, 3\)"):
        load_trunk(host, other.state_dict())


def test_what_has_no_place_is_reported(host: DepthHost, plain: nn.Module) -> None:
    state = plain.state_dict() | {"neck.weight": torch.ones(1)}
    assert load_trunk(host, state).unexpected == ("neck.weight",)
    assert str(load_trunk(host, state)).endswith("no place for: neck.weight")


def test_older_files_count_no_batches(host: DepthHost, plain: nn.Module) -> None:
    state = {key: value for key, value in plain.state_dict().items() if not key.endswith("num_batches_tracked")}
    load_trunk(host, state)
    assert same_trunk(host, plain)


ATTENTION = {"head_dim": 8}


def trained(method: str, **args: Any) -> DepthHost:
    host = attach(small("cifar_basic"), method, **(ATTENTION | args))
    shake(host)
    return host


def test_attention_of_the_same_method_comes_along() -> None:
    there, here = trained("kcla"), attach(small("cifar_basic"), "kcla", **ATTENTION)
    report = load_trunk(here, there.state_dict())
    assert report.new == report.dropped == ()
    with torch.no_grad():
        assert torch.equal(here(image(size=32)), there(image(size=32)))


def test_attention_of_another_scope_comes_along_where_it_fits() -> None:
    there, here = trained("kcla"), attach(small("cifar_basic"), "kcla", scope="per_stage", **ATTENTION)
    report = load_trunk(here, there.state_dict())
    starts = {key for key, module in here.sites.items() if module.site.entry == "start"} - {"stages_0_0"}
    assert {key.split(".")[1] for key in report.new} == {key.split(".")[1] for key, _ in report.dropped} == starts
    assert {reason for _, reason in report.dropped} == {
        "no kcla of the same form: it has transition.conv.weight, transition.key.weight, transition.norm.bias, "
        "transition.norm.num_batches_tracked, ... 7 in all"
    }
    assert torch.equal(here.sites["stages_1_1"].gain, there.sites["stages_1_1"].gain)


@pytest.mark.parametrize(
    ("there", "here", "reason"),
    [
        ({"method": "mrla_light"}, {}, "no kcla of the same form: it has decay; it has no gate.weight"),
        ({"head_dim": 4}, {}, "no kcla of the same form: gate.weight is of another shape"),
        ({"init": "paper"}, {}, "trained with init='paper'; the network has init='identity'"),
        ({}, {"init": "paper"}, "trained with init='identity'; the network has init='paper'"),
    ],
)
def test_other_attention_is_dropped_with_the_reason(there: dict, here: dict, reason: str) -> None:
    source = trained(**({"method": "kcla"} | there))
    host = attach(small("cifar_basic"), "kcla", scope="per_stage", **(ATTENTION | here))
    before = {key: value.clone() for key, value in host.sites.state_dict().items()}
    if source.sites["stages_0_0"].gain is not None:
        source.sites["stages_0_0"].gain.data.fill_(9)
    report = load_trunk(host, {key: value for key, value in source.state_dict().items() if "transition" not in key})
    assert {why for _, why in report.dropped} == {reason}
    assert str(report).count("\n") == 2
    assert all(torch.equal(before[key], value) for key, value in host.sites.state_dict().items())
    assert torch.equal(host.backbone.bn1.weight, source.backbone.bn1.weight)


def test_a_checkpoint_says_its_method_and_holds_averaged_weights() -> None:
    """As `lineattn.tasks.checkpoint` writes it. These two methods have the same parameters."""
    there = trained("mrla_base")
    last = {f"net.{key}": torch.zeros_like(value) for key, value in there.state_dict().items()}
    averaged = {f"ema.module.{key}": value for key, value in there.state_dict().items()}
    checkpoint = {
        "state_dict": last | averaged,
        "lineattn": {"config": {"model": {"attn": "mrla_base", "attn_args": ATTENTION}}},
    }
    same, other = (attach(small("cifar_basic"), method, **ATTENTION) for method in ("mrla_base", "layer_softmax"))
    assert load_trunk(same, checkpoint).dropped == ()
    with torch.no_grad():
        assert torch.equal(same(image(size=32)), there(image(size=32)))
    report = load_trunk(other, checkpoint)
    assert {why for _, why in report.dropped} == {"of mrla_base; the network has layer_softmax"}
    assert same_trunk(other, there.backbone)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"head_dim": 8, "drop_path": 0.1}, None),
        ({"head_dim": 8, "normalise": True}, "head_dim=8, normalise=True; the network has head_dim=8, normalise=False"),
        ({"head_dim": 4}, "head_dim=4, normalise=False; the network has head_dim=8, normalise=False"),
    ],
)
def test_a_checkpoint_says_its_methods_arguments(arguments: dict, reason: str | None) -> None:
    """None of these changes a parameter's shape."""
    config = {"model": {"attn": "layer_linear", "attn_args": arguments}}
    there, host = trained("layer_linear"), attach(small("cifar_basic"), "layer_linear", **ATTENTION)
    state = torch.random.get_rng_state()
    report = load_trunk(host, {"state_dict": there.state_dict(), "lineattn": {"config": config}})
    assert {why for _, why in report.dropped} == (set() if reason is None else {f"trained with {reason}"})
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_plain_network_drops_attention(plain: nn.Module) -> None:
    net = small("cifar_basic")
    report = load_trunk(net, attach(plain, Mean).state_dict())
    assert {why for _, why in report.dropped} == {"the network has no attention"}
    assert same_trunk(net, plain)


def test_a_site_that_is_not_there(plain: nn.Module) -> None:
    there = attach(plain, Mean)
    host = DepthHost(small("cifar_basic"), there.plan, {}, there.feature_info, 32, 32)
    assert {why for _, why in load_trunk(host, there.state_dict()).dropped} == {"the network has no attention there"}


@pytest.mark.medium
def test_timm_converts_the_layout_of_the_first_release() -> None:
    """ConvNeXt's own names for its parts, as in the files of its authors."""
    theirs, ours = (shake(small("timm_convnext")) for _ in range(2))
    renamed = {"stem.": "downsample_layers.0.", "head.norm.": "norm.", "head.fc.": "head.", "conv_dw.": "dwconv."}
    parts = {"mlp.fc1.": "pwconv1.", "mlp.fc2.": "pwconv2.", ".blocks.": "."}
    state = {}
    for key, value in theirs.state_dict().items():
        for old, new in (renamed | parts).items():
            key = key.replace(old, new)
        key = re.sub(r"stages\.(\d)\.downsample\.", r"downsample_layers.\1.", key)
        state[key] = value
    with torch.no_grad():
        for tensor in ours.parameters():
            tensor.zero_()
        host = attach(ours, Mean)
        assert load_trunk(host, {"model": state}).unexpected == ()
        assert torch.equal(host(image()), theirs(image()))


def test_weights_of_a_deeper_network_are_an_error() -> None:
    host = attach(_cifar(14), "eca")
    before = copy.deepcopy(host.state_dict())
    with pytest.raises(InputError, match=r"a block more than 'stages.0' here; is it of a deeper network"):
        load_trunk(host, _cifar(20).state_dict())
    assert all(torch.equal(value, host.state_dict()[key]) for key, value in before.items())


def _cifar(depth: int) -> nn.Module:
    return cifar_resnet.CifarResNet(cifar_resnet.BasicBlock, depth, num_classes=5, width=8)


def test_weights_that_the_networks_own_converter_cannot_read(tmp_path) -> None:
    """timm's for ConvNeXt asks for keys that only its first release had."""
    timm = pytest.importorskip("timm")
    host = attach(timm.create_model("convnext_atto"), "eca")
    with pytest.raises(InputError, match="missing"):
        load_trunk(host, _cifar(14).state_dict())


def _swapped(family: str, pattern: str, method: str = "external_multihead", **arguments: Any) -> nn.Module:
    net = small(family)
    swap(net, pattern, method, **arguments)
    return net


SWAPPED = {"timm_vit": "blocks.*.attn", "torchvision_vit": "encoder.layers.*.self_attention", "timm_swin": "*.attn"}


@pytest.mark.parametrize("family", SWAPPED)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_plain_networks_weights_go_around_what_was_put_in(family: str, wrapped: bool) -> None:
    plain, net = shake(small(family)), _swapped(family, SWAPPED[family])
    places = tuple(f"{path}." for path in added_in(net))
    before = copy.deepcopy(net.state_dict())
    state = plain.state_dict()
    report = load_trunk(net, {f"module.{key}": value for key, value in state.items()} if wrapped else state)
    assert report.unexpected == report.adapted == ()
    assert set(report.new) == {key for key in before if key.startswith(places)} != set()
    assert {reason for _, reason in report.dropped} == {"of other attention than stands there now"}
    assert {key for key, _ in report.dropped} == {key for key in state if key.startswith(places)}
    assert set(report.loaded) == before.keys() - set(report.new) == state.keys() - {key for key, _ in report.dropped}
    after = net.state_dict()
    assert all(torch.equal(after[key], (before if key in report.new else state)[key]) for key in after)


def test_a_swapped_networks_weights_come_along_where_they_fit() -> None:
    there, here, other = (_swapped("timm_vit", SWAPPED["timm_vit"], coef=coef) for coef in (1, 1, 2))
    report = load_trunk(here, there.state_dict())
    assert report.new == report.dropped == () and len(report.loaded) == len(there.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    report = load_trunk(other, there.state_dict())
    assert (
        len(report.new) == len(report.dropped) == sum(len(module.state_dict()) for module in added_in(other).values())
    )
    part = _swapped("timm_vit", "blocks.1.attn", coef=1)
    with pytest.raises(InputError, match=r"other attention stands at 'blocks\.0\.attn' there"):
        load_trunk(part, there.state_dict())


def test_all_else_stays_strict() -> None:
    net, state = _swapped("timm_vit", SWAPPED["timm_vit"]), small("timm_vit").state_dict()
    del state["blocks.1.norm2.weight"]
    with pytest.raises(InputError, match=r"trunk's 'blocks\.1\.norm2\.weight' is missing"):
        load_trunk(net, state)
    eamlp = EAMLP(embed_dim=16, depth=2, heads=2, img_size=32, num_classes=5)
    assert not added_in(eamlp)
    state = eamlp.state_dict()
    del state["blocks.1.attn.query.weight"]
    with pytest.raises(InputError, match=r"trunk's 'blocks\.1\.attn\.query\.weight' is missing"):
        load_trunk(eamlp, state)


def test_a_block_behind_a_module_is_new_or_comes_along(plain: nn.Module) -> None:
    net = attach(small("cifar_basic"), "external", at="stages.2", slots=4)
    report = load_trunk(net, plain.state_dict())
    assert report.dropped == report.unexpected == () and same_trunk(net, plain)
    assert {key.rpartition("external")[0] for key in report.new} == {"stages.2."}
    shake(net)
    again = attach(small("cifar_basic"), "external", at="stages.2", slots=4)
    assert load_trunk(again, net.state_dict()).new == ()
    assert same_trunk(again, net)


def test_copies_and_saved_networks_know_what_was_put_in() -> None:
    swapped = _swapped("timm_vit", SWAPPED["timm_vit"])
    inserted = attach(small("cifar_basic"), "external", at="stages.2", slots=4)
    for net, paths in ((swapped, [f"blocks.{i}.attn" for i in range(3)]), (inserted, ["stages.2.external"])):
        for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net)), attach(net, "eca", copy=True).backbone):
            assert list(added_in(twin)) == paths
