from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lineattn import attach, create_model
from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.published import load_published
from tests.hosts.nets import image, shake, small


def published(host: DepthHost, form: str) -> dict[str, Tensor]:
    """The host's weights under the published names, with the members that the published networks never call."""
    ours_to_theirs = {
        "query": "Wq", "key": "Wk", "value": "Wv", "norm": "bn", "gate": "head_att",
        "transition.conv": "adjust_channel", "transition.norm": "u_bn", "transition.key": "u_Wk", "decay": "lambda_t",
    }  # fmt: skip
    state: dict[str, Tensor] = {}
    for key, value in host.state_dict().items():
        room, _, rest = key.partition(".")
        if room == "backbone":
            if form == "imagenet" and rest.startswith("layer"):
                stage, tail = rest.split(".", 1)
                rest = f"{stage}.layers.{tail}"
            state[rest] = value
            continue
        site, _, rest = rest.partition(".")
        module = next(name for name in sorted(ours_to_theirs, key=len, reverse=True) if rest.startswith(name))
        theirs, path = ours_to_theirs[module] + rest.removeprefix(module), site.replace("_", ".")
        if form == "cifar":
            state[f"{path}.kcla.{theirs}"] = value
        elif form == "imagenet":
            stage, i = path.split(".")
            state[f"{stage}.attention.{i}.{theirs}"] = value
        elif theirs.startswith("bn"):
            state[f"{path}.bn_mrla{theirs.removeprefix('bn')}"] = value
        elif theirs == "lambda_t":
            state[f"{path}.mrla.lambda_t"] = value[:, None, None]
        else:
            state[f"{path}.mrla.mrla.{theirs}"] = value
    return state


@pytest.mark.parametrize("form", ["cifar", "imagenet", "mrla"])
def test_published_names(form: str) -> None:
    family = "cifar_bottleneck" if form == "cifar" else "torchvision_bottleneck"
    method, args = ("mrla_light", {}) if form == "mrla" else ("kcla", {"variant": "ref-cls"})
    trained, host = (attach(small(family), method, init="paper", **args) for _ in range(2))
    draws = torch.Generator().manual_seed(4)
    shake(trained)
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draws))
    state = {f"module.{key}": value for key, value in published(trained, form).items()}
    unused = {}
    if form != "mrla":
        first = "stages.0.0.kcla" if form == "cifar" else "layer1.attention.0"
        unused = {
            f"module.{first}.{name}": torch.ones(3) for name in ("adjust_channel.weight", "u_Wk.weight", "norm_d")
        }
    report = load_published(host, {"state_dict": state | unused})
    assert {key for key, _ in report.dropped} == set(unused)
    with torch.no_grad():
        assert torch.equal(host(image()), trained(image()))


@pytest.mark.medium
def test_published_resnet101_sums_up_at_block_11() -> None:
    """There a stage of more than eleven blocks has a transition in its midst, with a convolution that isn't called."""
    args = {"attn": "kcla", "init": "paper", "variant": "ref-cls", "num_classes": 5, "width": 4}
    trained = shake(create_model("resnet110_bottleneck_cifar", scope="anchors=11", **args))
    state = published(trained, "cifar") | {"stages.1.11.kcla.adjust_channel.weight": torch.ones(8, 4, 1, 1)}
    host = create_model("resnet110_bottleneck_cifar", scope="anchors=11", **args)
    assert [key for key, _ in load_published(host, state).dropped] == ["stages.1.11.kcla.adjust_channel.weight"]
    assert torch.equal(
        host.sites["stages_1_11"].transition.norm.weight, trained.sites["stages_1_11"].transition.norm.weight
    )
    with pytest.raises(InputError, match=r"no place for stages\.0\.11\.kcla\.u_bn"):
        load_published(create_model("resnet110_bottleneck_cifar", **args), state)


def test_published_weights_of_something_else() -> None:
    host = attach(small("cifar_bottleneck"), "kcla", init="paper")
    state = published(host, "cifar")
    with pytest.raises(InputError, match=r"no place for stages\.0\.0\.kcla\.Wz"):
        load_published(host, state | {"stages.0.0.kcla.Wz.weight": torch.ones(1)})
    lacking = {key: value for key, value in state.items() if key != "stages.0.0.kcla.Wq.weight"}
    with pytest.raises(InputError, match=r"nothing there for sites\.stages_0_0\.query\.weight"):
        load_published(host, lacking)
    with pytest.raises(InputError, match=r"is head_dim, width, num_classes, reduction or scope another"):
        load_published(attach(small("cifar_bottleneck"), "kcla", init="paper", head_dim=4), state)
    with pytest.raises(InputError, match=r"nothing there for .*gain.*init"):
        load_published(attach(small("cifar_bottleneck"), "kcla"), state)
