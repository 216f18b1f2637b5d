"""Our names in timm: what `timm.create_model` gives, and that timm's tools work on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.utils
import torch
from _pytest.mark import ParameterSet
from timm.data.config import resolve_model_data_config
from timm.models import _registry, group_parameters, load_checkpoint, save_for_hf
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import lineattn.timm
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost

NAMES = sorted(lineattn.timm.default_cfgs)
KCLA = timm.list_models("*_kcla")
METHODS = ("kcla", "mrla_light", "mrla_base", "dla_light", "layer_softmax")


def trunk_of(name: str) -> str:
    return next(name.removesuffix(f"_{method}") for method in METHODS if name.endswith(f"_{method}"))


def by_cost(names: list[str], costly: str) -> list[ParameterSet]:
    return [
        pytest.param(name, marks=pytest.mark.slow if re.search(costly, name) else pytest.mark.medium) for name in names
    ]


def image(net: Any, batch: int = 1, channels: int = 3) -> Tensor:
    """As small as the network takes it."""
    size = net.pretrained_cfg["input_size"][-1] if net.pretrained_cfg.get("fixed_input_size") else 64
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def shaken(net: nn.Module) -> nn.Module:
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("gain"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draws))
    return net


def test_names() -> None:
    assert len(NAMES) == len(set(NAMES)) and set(NAMES) <= set(timm.list_models())
    assert {"resnet50_kcla", "vit_small_patch16_224_kcla", "resnet50_mrla_light", "seresnet50_dla_light"} < set(NAMES)
    assert set(NAMES) & set(timm.list_models(pretrained=True)) == set()
    assert all(lineattn.timm.__dict__[name].__name__ == name for name in NAMES)


@pytest.mark.parametrize("name", by_cost(KCLA, costly=r"resnet1\d\d|wide_|_small|_base"))
def test_every_name_starts_as_its_trunk(name: str) -> None:
    trunk = timm.create_model(trunk_of(name), num_classes=5).eval()
    net = timm.create_model(name, num_classes=5, trunk=trunk.state_dict()).eval()
    x = image(net)
    with torch.no_grad():
        expected = trunk(x)
        assert torch.equal(net(x), expected)
        found = shaken(net)(x)
    assert found.isfinite().all() and not torch.equal(found, expected)
    assert resolve_model_data_config(net) == resolve_model_data_config(trunk)


@pytest.mark.parametrize("name", by_cost(sorted(set(NAMES) - set(KCLA)), costly=r"^resnet(34|50|1\d\d)|resnext|wide_"))
def test_other_methods_build_and_count_their_parameters(name: str) -> None:
    with torch.device("meta"):
        net = timm.create_model(name, num_classes=2)
        trunk = timm.create_model(trunk_of(name), num_classes=2)
    assert isinstance(net, DepthHost) and net.num_classes == 2
    assert net(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 2)
    names = [key.removeprefix("backbone.") for key, _ in net.named_parameters() if key.startswith("backbone.")]
    assert names == [key for key, _ in trunk.named_parameters()]


def test_arguments_go_where_they_belong() -> None:
    net: Any = timm.create_model(
        "resnet18_kcla", num_classes=7, in_chans=1, drop_rate=0.25, drop_path_rate=0.1, global_pool="max",
        output_stride=16, head_dim=16, drop_path=0.3, init="paper", scope="per_stage",
    )  # fmt: skip
    site = net.sites["layer2_0"]
    assert site.head_dim == 16 and site.drop_path == 0.3 and site.gain is None and site.site.entry == "start"
    assert net.num_classes == 7 and net.backbone.conv1.in_channels == 1
    assert net.backbone.drop_rate == 0.25 and net.backbone.layer4[1].drop_path.drop_prob > 0
    assert net.backbone.global_pool.pool_type == "max"
    assert [info["reduction"] for info in net.feature_info] == [2, 4, 8, 16, 16]
    assert net.eval()(torch.randn(2, 1, 65, 97)).shape == (2, 7)


def test_a_trunk_from_a_file_with_other_channels_and_classes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trunk = timm.create_model("resnet18")
    torch.save(trunk.state_dict(), tmp_path / "resnet18.pth")
    net: Any = timm.create_model("resnet18_kcla", trunk=tmp_path / "resnet18.pth", num_classes=7, in_chans=1)
    assert torch.equal(net.backbone.layer4[1].conv2.weight, trunk.layer4[1].conv2.weight)
    torch.testing.assert_close(net.backbone.conv1.weight, trunk.conv1.weight.sum(1, keepdim=True))
    said = capsys.readouterr().out
    assert "adapted conv1.weight: for 3 channels there, for 1 here" in said
    assert "dropped fc.weight: (1000, 512) there, (7, 512) here" in said and "new, as they were: fc.weight" in said


def test_pretrained_is_an_error_that_names_the_trunk() -> None:
    with pytest.raises(InputError, match=r"no pretrained weights of resnet50_kcla; .*trunk='timm/resnet50\.a1_in1k'"):
        timm.create_model("resnet50_kcla", pretrained=True)
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model("resnet50_kcla.a1_in1k")


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match=r"feature_cls is 'list'.*must be 'getter'"):
        timm.create_model("resnet18_kcla", features_only=True, feature_cls="list")
    with pytest.raises(TypeError, match="heads"):
        timm.create_model("resnet18_kcla", heads=3)
    with pytest.raises(InputError, match=r"indices \[7\]: this network has stages 0 to 4"):
        timm.create_model("resnet18_kcla", features_only=True, out_indices=(7,))


def test_checkpoints_of_whole_networks(tmp_path: Path) -> None:
    net = shaken(timm.create_model("resnet18_kcla", num_classes=3)).eval()
    torch.save({"state_dict": {f"module.{key}": value for key, value in net.state_dict().items()}}, tmp_path / "a.pth")
    again = timm.create_model("resnet18_kcla", num_classes=3, checkpoint_path=tmp_path / "a.pth").eval()
    other = timm.create_model("resnet18_kcla", num_classes=3).eval()
    load_checkpoint(other, str(tmp_path / "a.pth"))
    overlay: Any = {"file": str(tmp_path / "a.pth")}
    fourth = timm.create_model("resnet18_kcla", pretrained=True, pretrained_cfg_overlay=overlay | {"num_classes": 3})
    x = image(net)
    with torch.no_grad():
        for found in (again, other, fourth.eval()):
            assert torch.equal(found(x), net(x))


def test_a_folder_for_the_hub_and_back(tmp_path: Path) -> None:
    net: Any = shaken(timm.create_model("resnet18_kcla", num_classes=3, head_dim=16)).eval()
    save_for_hf(net, tmp_path, model_args={"head_dim": 16})
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(image(net)), net(image(net)))


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("resnet18_kcla", None),
        ("resnet18_kcla", (1, 2, 3, 4)),
        ("resnet18_kcla", (2,)),
        ("resnet18_mrla_light", (1, 3)),
    ],
)
def test_features(name: str, indices: tuple[int, ...] | None) -> None:
    net: Any = shaken(timm.create_model(name)).eval()
    wanted: Any = {} if indices is None else {"out_indices": indices}
    pyramid: Any = timm.create_model(name, features_only=True, trunk=net.state_dict(), **wanted).eval()
    x = torch.randn(2, 3, 65, 97)
    with torch.no_grad():
        found, maps = pyramid(x), net.features(x)
    chosen = tuple(range(5)) if indices is None else indices
    assert all(torch.equal(a, maps[i]) for a, i in zip(found, chosen, strict=True))
    assert pyramid.feature_info.channels() == [m.shape[1] for m in found]
    assert pyramid.feature_info.reduction() == [2 ** (i + 1) for i in chosen]
    assert pyramid.feature_info.module_name()[0] == f"backbone.{'act1' if chosen[0] == 0 else f'layer{chosen[0]}.1'}"


@pytest.mark.medium
@pytest.mark.parametrize("name", ["resnet18_kcla", "convnext_tiny_kcla", "regnety_004_kcla", "efficientnet_b0_kcla",
                                  "vit_tiny_patch16_224_kcla"])  # fmt: skip
def test_of_features_every_parameter_gets_a_gradient(name: str) -> None:
    """Where maps up to the middle are asked for, later blocks, their attention, norm and head are gone."""
    whole: Any = timm.create_model(name)
    for indices in (None, tuple(range(len(whole.feature_info) - 2))):
        wanted: Any = {} if indices is None else {"out_indices": indices}
        pyramid: Any = timm.create_model(name, features_only=True, **wanted)
        sum(m.square().sum() for m in pyramid(image(pyramid))).backward()
        assert [key for key, p in pyramid.named_parameters() if p.grad is None] == []
    assert len(pyramid.model.sites) < len(whole.sites)
    assert len(dict(pyramid.named_parameters())) < len(dict(whole.named_parameters()))


@pytest.mark.medium
@pytest.mark.parametrize("name", ["resnet18_kcla", "vit_tiny_patch16_224_kcla"])
def test_layer_decay(name: str) -> None:
    net: Any = timm.create_model(name)
    optimizer = create_optimizer_v2(net, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    scales = {id(p): (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    found = {key: scales[id(p)] for key, p in net.named_parameters()}
    groups = group_parameters(net, net.group_matcher(), reverse=True)
    deepest = max(groups.values())
    assert all(scale == 0.5 ** (deepest - groups[key]) for key, (scale, _) in found.items())
    first, *_, last = net.sites
    assert found[f"sites.{last}.value.weight"][0] > found[f"sites.{first}.value.weight"][0]
    assert all(decay == 0 for key, (_, decay) in found.items() if key.endswith(("gain", "norm.weight", "bias")))
    assert found[f"sites.{first}.value.weight"][1] == 0.05
    if name.startswith("vit"):
        assert net.no_weight_decay() >= {"backbone.pos_embed", "backbone.cls_token"}
        assert found["backbone.pos_embed"] == (0.5**deepest, 0)


def test_freezing_by_name() -> None:
    net: Any = timm.create_model("resnet18_kcla", num_classes=3)
    timm.utils.freeze(net, ["backbone"])
    assert all(p.requires_grad == key.startswith("sites.") for key, p in net.named_parameters())
    before = net.backbone.bn1.running_mean.clone()
    net.train()(image(net, 2)).square().sum().backward()
    assert torch.equal(net.backbone.bn1.running_mean, before)
    assert net.sites["layer1_0"].gain.grad is not None and net.sites["layer1_0"].norm.running_mean.abs().max() > 0


def run(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.medium
def test_which_imports_register() -> None:
    registered = "print(timm.is_model('resnet50_kcla'))"
    assert run(f"import timm, lineattn; {registered}") == ["True"]
    explicit = f"import lineattn, timm; {registered}; import lineattn.timm; {registered}"
    assert run(explicit) == ["False", "True"]


def test_a_name_that_timm_has_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: Any = {**_registry._model_entrypoints, "resnet50_kcla": timm.models.resnet50}
    del theirs["resnet18_kcla"]
    monkeypatch.setattr(_registry, "_model_entrypoints", theirs)
    with pytest.raises(InputError, match=r"timm has a model 'resnet50_kcla' of timm\.models\.resnet already"):
        lineattn.timm._register()
    assert theirs["resnet50_kcla"] is timm.models.resnet50 and "resnet18_kcla" not in theirs
