from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm.models as timm
import torch
from torch import Tensor, nn
from torchvision.models import convnext, efficientnet, swin_transformer
from torchvision.models import vision_transformer as vit
from torchvision.models.feature_extraction import create_feature_extractor

from lineattn import attach
from lineattn.errors import InputError
from lineattn.hosts import plans
from lineattn.hosts.weights import load_trunk
from lineattn.models.eamlp import EAMLP
from tests.hosts.nets import FAMILIES, Mean, image, shake, small

SPLIT = [family for family in FAMILIES if family != "traced"]
TIMM = [family for family in FAMILIES if family.startswith("timm")]


def example(net: nn.Module) -> Tensor:
    return image(size=plans.find(net).probe_side(net))


# Networks with what the small ones leave out, each with something drawn at random in training.
def _resnet(**args: object) -> nn.Module:
    block = timm.resnet.BasicBlock if args.pop("basic", False) else timm.resnet.Bottleneck
    widths = {"num_classes": 5, "channels": (16, 16, 32, 32), "stem_width": 8}
    return timm.resnet.ResNet(block, [2, 1, 2, 2], drop_path_rate=0.5, drop_block_rate=0.3, **widths, **args)


def _timm_vit(**args: object) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "num_classes": 5, "embed_dim": 32, "depth": 3, "num_heads": 2}
    drops = {"drop_path_rate": 0.5, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "pos_drop_rate": 0.2}
    return timm.vision_transformer.VisionTransformer(**sizes, **drops, **args)


def _torchvision_vit() -> nn.Module:
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "representation_size": 24}
    net = vit.VisionTransformer(32, 8, num_classes=5, dropout=0.2, attention_dropout=0.2, **sizes)
    nn.init.normal_(net.heads.head.weight)  # zero at the start
    return net


def _eamlp(**args: object) -> nn.Module:
    sizes = {"img_size": 32, "num_classes": 5, "embed_dim": 32, "depth": 3, "heads": 2, "mlp_ratio": 2.0}
    return EAMLP(**sizes, drop_path_rate=0.5, drop_rate=0.2, **args)


def _timm_efficientnet(*stages: str) -> nn.Module:
    decoded = timm._efficientnet_builder.decode_arch_def([[stage] for stage in stages])
    return timm.efficientnet.EfficientNet(decoded, num_classes=5, num_features=40, stem_size=8, drop_path_rate=0.5)


def _torchvision_efficientnet() -> nn.Module:
    plain, fused = efficientnet.MBConvConfig, efficientnet.FusedMBConvConfig
    stages = [fused(1, 3, 1, 8, 8, 2), fused(3, 3, 2, 8, 16, 2), plain(3, 5, 2, 16, 24, 3)]
    return efficientnet.EfficientNet(stages, dropout=0.2, stochastic_depth_prob=0.5, num_classes=5, last_channel=40)


def _swin(module: object, name: str) -> nn.Module:
    return getattr(module, name)(
        img_size=28, patch_size=2, num_classes=5, embed_dim=16, depths=(2, 3), num_heads=(2, 4), window_size=4,
        drop_path_rate=0.5, proj_drop_rate=0.2,
    )  # fmt: skip


def _torchvision_swin(v2: bool) -> nn.Module:
    block = swin_transformer.SwinTransformerBlockV2 if v2 else swin_transformer.SwinTransformerBlock
    merging = swin_transformer.PatchMergingV2 if v2 else swin_transformer.PatchMerging
    sizes = ([2, 2], 16, [2, 3], [2, 4], [4, 4])
    return swin_transformer.SwinTransformer(
        *sizes, dropout=0.2, stochastic_depth_prob=0.5, num_classes=5, block=block, downsample_layer=merging
    )


def _regnet(**args: object) -> nn.Module:
    cfg = timm.regnet.RegNetCfg(w0=16, wa=8.0, wm=1.6, depth=7, group_size=8, stem_width=8, **args)
    return timm.regnet.RegNet(cfg, num_classes=5, drop_path_rate=0.5)


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "resnet basic": lambda: _resnet(basic=True, block_args={"attn_layer": "eca"}),
    "resnet anti-aliased": lambda: _resnet(aa_layer=timm.resnet.BlurPool2d),
    "resnet dilated 8": lambda: _resnet(output_stride=8, avg_down=True, stem_type="deep_tiered"),
    "resnet dilated 16": lambda: _resnet(output_stride=16, replace_stem_pool=True),
    "convnext v2": lambda: timm.convnext.ConvNeXt(
        num_classes=5, depths=(2, 1, 2, 1), dims=(16, 16, 32, 32), use_grn=True, ls_init_value=None, drop_path_rate=0.5
    ),
    "convnext conv_mlp, dilated": lambda: timm.convnext.ConvNeXt(
        num_classes=5, depths=(2, 1, 2, 1), dims=(16, 16, 32, 32), conv_mlp=True, drop_path_rate=0.5, output_stride=16,
        head_norm_first=True, ls_init_value=0.5,
    ),
    "torchvision convnext": lambda: convnext.ConvNeXt(
        [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)], 0.5, layer_scale=0.5, num_classes=5
    ),
    "regnet z": lambda: _regnet(downsample="", linear_out=True, num_features=48, act_layer="silu"),
    "regnet v": lambda: _regnet(downsample="avg", preact=True, act_layer="silu", se_ratio=0.25),
    "efficientnet v2": lambda: _timm_efficientnet(
        "cn_r2_k3_s1_e1_c8_skip", "er_r2_k3_s2_e4_c16", "ir_r3_k3_s2_e4_c24_se0.25", "ds_r2_k3_s1_e1_c24_pa"
    ),
    "mobilenet v4": lambda: _timm_efficientnet("uir_r2_a3_k3_s2_e2_c16", "uir_r3_a0_k5_s2_e2_c24"),
    "torchvision efficientnet v2": _torchvision_efficientnet,
    "vit post-norm, pooled": lambda: _timm_vit(
        block_fn=timm.vision_transformer.ResPostBlock, class_token=False, global_pool="avg"
    ),
    "vit pre-norm": lambda: _timm_vit(init_values=0.5, pre_norm=True, dynamic_img_size=True),
    "torchvision vit": _torchvision_vit,
    "eamlp": _eamlp,
    "eamlp bn": lambda: _eamlp(norm_mlp="bn", attn="self_attention"),
    "swin": lambda: _swin(timm.swin_transformer, "SwinTransformer"),
    "swin v2": lambda: _swin(timm.swin_transformer_v2, "SwinTransformerV2"),
    "torchvision swin": lambda: _torchvision_swin(v2=False),
    "torchvision swin v2": lambda: _torchvision_swin(v2=True),
}  # fmt: skip
ALL = [*FAMILIES, *VARIANTS]


def build(name: str) -> nn.Module:
    if name in FAMILIES:
        return small(name)
    torch.manual_seed(0)
    return VARIANTS[name]().eval()


@pytest.mark.parametrize("name", ALL)
def test_steps_and_head_are_the_forward_pass(name: str) -> None:
    net = shake(build(name))
    plan = plans.find(net)
    x = example(net)
    with torch.no_grad():
        whole = net(x)
        for step in plan.steps(net):
            x = step.module(x)
        assert torch.equal(plan.head(net, x, False), whole)
        for path in plan.classifiers(net):
            assert plan.head(net, x, True).shape == (2, net.get_submodule(path).in_features)


@pytest.mark.parametrize("name", [name for name in ALL if name != "traced"])
@pytest.mark.parametrize("training", [True, False])
def test_split_is_the_block_bit_for_bit(name: str, training: bool) -> None:
    """With the same random numbers drawn, and the same gradients."""
    net = shake(build(name)).train(training)
    halves = copy.deepcopy(net)
    plan = plans.find(net)
    x, y = example(net), example(net)
    splits = 0
    for i, (whole, halved) in enumerate(zip(plan.steps(net), plan.steps(halves), strict=True)):
        torch.manual_seed(i)
        x = whole.module(x)
        torch.manual_seed(i)
        if halved.split is None:
            y = halved.module(y)
        else:
            branch, shortcut, act = halved.split(halved.module, y)
            assert branch.shape == shortcut.shape
            branch += shortcut  # in place, as the host does
            y = act(branch)
            splits += 1
        assert torch.equal(x, y), whole.path
    x.square().sum().backward()
    y.square().sum().backward()
    assert splits >= sum(step.site for step in plan.steps(net)) > 0
    for (name, a), b in zip(net.named_parameters(), halves.named_parameters(), strict=True):
        assert (a.grad is None) == (b[1].grad is None), name
        assert a.grad is None or torch.equal(a.grad, b[1].grad), name
    for (name, a), b in zip(net.named_buffers(), halves.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", [name for name in VARIANTS if "pre-norm" not in name])
def test_variants_draw_at_random(name: str) -> None:
    """Without that, the test of splits in training would not see the order in which they draw."""
    net = shake(build(name)).train()  # some start with residual branches of zero
    with torch.no_grad():
        assert not torch.equal(*(net(example(net)) for _ in range(2)))


@pytest.mark.parametrize("name", ALL)
def test_attached_either_way_the_network_is_the_same(name: str) -> None:
    net = shake(build(name))
    keys, x = list(net.state_dict()), example(net)
    for of in ("out", "shortcut") if name != "traced" else ("out",):
        host = attach(net, Mean, of=of)
        assert [k.removeprefix("backbone.") for k in host.state_dict() if k.startswith("backbone.")] == keys
        with torch.no_grad():
            assert torch.equal(host(x), net(x))
            assert [(m.shape[1], x.shape[2] // m.shape[2]) for m in host.features(x)] == [
                (info["num_chs"], info["reduction"]) for info in host.feature_info
            ]


@pytest.mark.parametrize("name", ALL)
def test_methods_see_maps_and_leave_the_rest(name: str) -> None:
    """What a method adds to a map comes back in the place that the map was taken from."""
    net = build(name)
    plan, x = plans.find(net), example(net)
    size = (x.shape[2], x.shape[3])
    with torch.no_grad():
        for step in plan.steps(net):
            x = step.module(x)
            if step.site:
                maps = step.show(x, size)
                assert maps.ndim == 4 and maps.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                assert torch.equal(step.put_back(x, maps), x)
                moved = step.put_back(x, maps + 1)
                changed = (moved != x).all(-1).sum() if step.maps else 0
                assert changed == (maps[:, 0].numel() if step.maps else 0)


@pytest.mark.parametrize("name", [name for name in [*TIMM, *VARIANTS] if not name.startswith(("torchvision", "eamlp"))])
def test_maps_are_those_of_timm(name: str) -> None:
    net = shake(build(name))
    host, x = attach(net, Mean), example(net)
    assert host.num_features == net.num_features
    assert host.head_hidden_size == net.head_hidden_size
    theirs = [(info["num_chs"], info["reduction"]) for info in net.feature_info]
    assert [(info["num_chs"], (info["reduction"],) * 2) for info in host.feature_info] == [
        (channels, (r, r) if isinstance(r, int) else tuple(r)) for channels, r in theirs
    ]
    with torch.no_grad():
        last, maps = host.forward_intermediates(x)
        their_last, their_maps = net.forward_intermediates(x)
        assert torch.equal(host.forward_features(x), net.forward_features(x))
        assert all(torch.equal(a, b) for a, b in zip(maps, their_maps, strict=True))
        if "efficientnet" not in name and name != "mobilenet v4":  # there timm's last is the last map, before the head
            assert torch.equal(last, their_last)


@pytest.mark.parametrize(
    "name",
    [name for name in ALL if name.startswith("torchvision") and "vit" not in name and name != "torchvision swin"],
)
def test_maps_are_those_that_torchvision_extracts(name: str) -> None:
    net = shake(build(name))
    host, x = attach(net, Mean), example(net)
    names = {info["module"].removeprefix("backbone."): str(i) for i, info in enumerate(host.feature_info)}
    with torch.no_grad():
        theirs = create_feature_extractor(net, names, suppress_diff_warning=True)(x)
        for i, ours in enumerate(host.features(x)):
            other = theirs[str(i)].permute(0, 3, 1, 2) if "swin" in name else theirs[str(i)]
            assert torch.equal(ours, other)
    halved = [b["reduction"] / a["reduction"] for a, b in zip(host.feature_info, host.feature_info[1:], strict=False)]
    assert set(halved) == {2.0} or name == "torchvision_convnext"


@pytest.mark.parametrize("name", ALL)
def test_groups_cover_all_but_the_head(name: str) -> None:
    host = attach(build(name), Mean)
    steps = list(host.plan.steps(host.backbone))
    for coarse in (False, True):
        names = timm.group_parameters(host, host.group_matcher(coarse), reverse=True)
        assert set(names) == {name for name, _ in host.named_parameters()}
        last = max(names.values())
        inside = tuple(f"backbone.{step.path}." for step in steps)
        for parameter, group in names.items():
            of_step = parameter.startswith((*inside, "sites."))
            assert of_step or group == last or (group == 0 and parameter[9:] in host.plan.stem), parameter
            assert not (of_step and group == last), parameter


@pytest.mark.parametrize("name", ALL)
def test_classifier_is_replaced_and_taken_away(name: str) -> None:
    net = shake(build(name))
    host, x = attach(net, Mean), example(net)
    with torch.no_grad():
        pooled = host.forward_head(host.forward_features(x), pre_logits=True)
        assert pooled.shape == (2, host.head_hidden_size)
        assert host.num_classes == 5
        host.reset_classifier(0)
        assert host.num_classes == 0
        torch.testing.assert_close(host(x), pooled, rtol=1e-5, atol=1e-5)
        host.train().reset_classifier(3)
        assert host.num_classes == 3 and host(x).shape == (2, 3)


@pytest.mark.parametrize("name", ["timm_deit_distilled", "timm_convnext", "torchvision_mobilenet_v3"])
def test_a_trunk_of_another_class_count_loads(name: str) -> None:
    net = build(name)
    host = attach(build(name), Mean)
    host.reset_classifier(3)
    report = load_trunk(host, net.state_dict())
    dropped = {key.rpartition(".")[0] for key, _ in report.dropped}
    assert dropped == set(host.plan.classifiers(host.backbone))


def test_a_network_without_a_classifier_gets_one() -> None:
    decode = timm._efficientnet_builder.decode_arch_def
    net = timm.mobilenetv3.MobileNetV3(decode([["ir_r2_k3_s2_e3_c16"]]), num_classes=0, num_features=48, stem_size=8)
    host = attach(net.eval(), Mean)
    assert (host.num_features, host.head_hidden_size, host.num_classes) == (16, 48, 0)
    host.reset_classifier(7)
    assert host(image()).shape == (2, 7)


def test_distilled_training_returns_both_predictions() -> None:
    host = attach(small("timm_deit_distilled"), Mean)
    host.backbone.set_distilled_training()
    host.train()
    assert [out.shape for out in host(image(size=32))] == [(2, 5), (2, 5)]


def test_a_dynamic_vit_takes_other_sizes() -> None:
    torch.manual_seed(0)
    net = _timm_vit(dynamic_img_size=True, reg_tokens=1).eval()
    host = attach(net, Mean)
    x = image(size=48)[..., :40]
    with torch.no_grad():
        assert torch.equal(host(x), net(x))
        assert [m.shape for m in host.features(x)] == [(2, 32, 6, 5)] * 3
        assert not torch.equal(shake(host)(x), net(x))


def test_norm_behind_the_maps_is_not_silently_left_out() -> None:
    with pytest.raises(InputError, match="norm=True: these are the maps before the last norm of the timm ViT"):
        attach(small("timm_vit"), Mean).forward_intermediates(image(size=32), norm=True)


@pytest.mark.parametrize(
    ("build_net", "message"),
    [
        (lambda: _timm_vit(patch_drop_rate=0.5), "patch_drop_rate leaves out tokens in training"),
        (lambda: timm.vision_transformer.VisionTransformer((32, 16), 8, embed_dim=8, depth=1, num_heads=1), "square"),
        (lambda: EAMLP(img_size=(32, 16), embed_dim=8, depth=1, heads=1), "square"),
    ],
)
def test_vits_that_are_no_maps_are_refused(build_net: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attach(build_net(), Mean)


def test_torchvision_vit_names_its_size() -> None:
    host = attach(small("torchvision_vit"), Mean)
    with pytest.raises(InputError, match="takes images of 32x32"):
        host(image(size=64)[..., :16])  # as many patches


@pytest.mark.parametrize(
    "build_net",
    [
        lambda: _timm_vit(block_fn=timm.vision_transformer.ParallelScalingBlock),
        lambda: timm.resnet.ResNet(timm.sknet.SelectiveKernelBasic, [1, 1, 1, 1], num_classes=5),
        lambda: _timm_efficientnet("ir_r2_k3_s2_e2_c16_cc4"),
    ],
)
def test_blocks_of_another_kind_have_sites_and_no_split(build_net: Callable[[], nn.Module]) -> None:
    net = build_net().eval()
    host = attach(net, Mean)
    assert host.sites
    with torch.no_grad():
        assert torch.equal(host(example(net)), net(example(net)))
    with pytest.raises(InputError, match=r"can't be split into branch and shortcut, which Mean needs; .*kcla"):
        attach(net, Mean, of="shortcut")


def test_blocks_without_a_shortcut_have_no_site() -> None:
    host = attach(small("timm_efficientnet"), Mean)
    assert list(host.sites) == ["blocks_0_0", "blocks_1_1", "blocks_2_1", "blocks_3_1", "blocks_3_2"]
    assert [module.site.stage for module in host.sites.values()] == [0, 1, 2, 3, 3]
    assert [module.site.norm for module in attach(small("timm_swin"), Mean).sites.values()] == ["layer"] * 4


def test_unknown_family_lists_the_known() -> None:
    with pytest.raises(
        InputError, match=r"no plan for .*Linear: .*; supported families: CIFAR ResNet, torchvision Res"
    ):
        plans.find(nn.Linear(1, 1))
