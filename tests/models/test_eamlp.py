"""EAMLP against the figures and the code of its paper, and as timm uses a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data.config import resolve_model_data_config
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.export import Dim, export

import lineattn.timm  # noqa: F401  # which registers the names
from lineattn import attach, swap
from lineattn.analysis.cost import count_macs, count_params
from lineattn.errors import InputError
from lineattn.hosts.weights import load_trunk, trunk_of
from lineattn.models.eamlp import EAMLP, sinusoid_table
from lineattn.models.eamlp_published import load_published
from lineattn.nn.sample.external import ExternalMemory
from tests.published import eamlp as published

SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "heads": 2, "mlp_ratio": 2.0, "num_classes": 5, "img_size": 32}
STILL: dict[str, Any] = {"drop_path_rate": 0.0, "stem_drop": 0.0}
# In the blocks: all positions get the same from them, which the softmax over the positions cancels.
DEAD = ("norm1.bias", "attn.query.bias", "attn.memory.key_bias")


def images(batch: int = 3, side: int = 32, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=dtype)


def fill(net: nn.Module) -> nn.Module:
    """Weights that let everything matter: attention far from uniform, biases and slopes off their start."""
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(generator=draws).mul_(1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(generator=draws).mul_(0.3)
            elif parameter.requires_grad:
                parameter.uniform_(0.5, 1.5, generator=draws)
    return net


def by_size(*rows: tuple) -> list:
    """The first one is quick."""
    return [rows[0], *(pytest.param(*row, marks=pytest.mark.medium) for row in rows[1:])]


@pytest.mark.parametrize(
    ("name", "size", "total", "trainable", "giga"),
    by_size(
        ("eamlp_7", 224, 6_146_638, 6_096_206, 1.465),
        ("eamlp_7", 384, 6_243_918, 6_096_206, 4.293),
        ("eamlp_10", 224, 8_540_110, 8_489_678, 2.007),
        ("eamlp_12", 224, 10_135_758, 10_085_326, 2.369),
        ("eamlp_14", 224, 29_877_070, 29_801_422, 6.450),
        ("eamlp_14", 384, 30_022_990, 29_801_422, 18.894),
        ("eamlp_19", 224, 54_559_054, 54_470_798, 11.598),
        ("eamlp_19", 384, 54_729_294, 54_470_798, 33.970),
        ("eamlp_24", 224, 89_456_590, 89_355_726, 18.820),
    ),
)
def test_cost(name: str, size: int, total: int, trainable: int, giga: float) -> None:
    """The published networks hold the table of positions as a parameter; ours as a buffer."""
    with torch.device("meta"):
        net = timm.create_model(name, img_size=size)
    assert (count_params(net, trainable=True), count_params(net) + net.pos_embed.numel()) == (trainable, total)
    assert round(count_macs(net, torch.empty(1, 3, size, size)) / 1e9, 3) == giga


@pytest.mark.parametrize(
    ("name", "trainable", "giga"),
    by_size(("eamlp_7", 4_195_790, 1.062), ("eamlp_14", 21_405_902, 4.699), ("eamlp_19", 39_025_166, 8.395)),
)
def test_cost_with_self_attention(name: str, trainable: int, giga: float) -> None:
    with torch.device("meta"):
        net = timm.create_model(name, attn="self_attention")
    assert count_params(net) == trainable
    assert round(count_macs(net, torch.empty(1, 3, 224, 224)) / 1e9, 3) == giga


@pytest.mark.parametrize(
    ("name", "stem", "attention", "mlp", "mega", "mega_self"),
    [
        ("eamlp_7", 253_670, 533_888, 262_912, 129.1, 71.5),
        ("eamlp_14", 327_526, 1_189_888, 886_272, 271.1, 146.0),
        ("eamlp_19", 364_454, 1_616_192, 1_206_016, 361.5, 192.9),
    ],
)
def test_cost_of_the_parts(name: str, stem: int, attention: int, mlp: int, mega: float, mega_self: float) -> None:
    with torch.device("meta"):
        net = timm.create_model(name, depth=1)
        other = timm.create_model(name, depth=1, attn="self_attention").blocks[0].attn
    block, tokens = net.blocks[0], torch.empty(1, 197, net.embed_dim)
    assert (count_params(net.stem), count_params(block.attn), count_params(block.mlp)) == (stem, attention, mlp)
    assert round(count_macs(block.attn, tokens) / 1e6, 1) == mega
    assert round(count_macs(other, tokens) / 1e6, 1) == mega_self


@pytest.mark.parametrize("first", [0, 1], ids=["stem", "other_stem"])
def test_published_weights_give_the_published_outputs(first: int) -> None:
    theirs = fill(published.EAMLP(**SMALL, first=first)).double()
    ours = EAMLP(**SMALL, **STILL, norm="official").double()
    load_published(ours, {"state_dict": {f"module.{key}": value for key, value in theirs.state_dict().items()}})
    for training in (False, True):
        found, expected = ours.train(training)(images()), theirs.train(training)(images())
        assert expected.std() > 0.1
        assert (found - expected).abs().max() < 1e-10
    exact = EAMLP(**SMALL, **STILL).double()
    exact.load_state_dict(ours.state_dict())
    assert 1e-12 < (exact(images()) - expected).abs().max() < 1e-5, "the published epsilon is all that differs"


def test_published_gradients() -> None:
    theirs = fill(published.EAMLP(**SMALL)).double()
    ours = EAMLP(**SMALL, **STILL, norm="official").double()
    load_published(ours, theirs.state_dict())
    for net in (ours, theirs):
        net(images()).square().sum().backward()
    stem, attention = ours.stem, ours.blocks[0].attn
    for mine, yours in (
        (stem.attention1.query.weight.grad, theirs.tokens_to_token.attention1.attn.q_linear.weight),
        (stem.attention1.memory.keys.grad, theirs.tokens_to_token.attention1.attn.linear_0.weight),
        (stem.attention2.memory.values.grad.mT, theirs.tokens_to_token.attention2.attn.linear_1.weight),
        (attention.memory.keys.grad, theirs.blocks[0].attn.linear_0.weight),
        (attention.memory.values.grad.mT, theirs.blocks[0].attn.linear_1.weight),
    ):
        assert yours.grad.abs().max() > 1e-3
        assert (mine - yours.grad).abs().max() < 1e-10 * max(1, yours.grad.abs().max())


def test_both_memories_read_back_bit_for_bit() -> None:
    """Theirs are one storage on the CPU, and loading writes the one over the other."""
    theirs, net = fill(published.EAMLP(**SMALL)), EAMLP(**SMALL)
    load_published(net, theirs.state_dict())
    for ours, their in (
        (net.stem.attention1, theirs.tokens_to_token.attention1),
        (net.stem.attention2, theirs.tokens_to_token.attention2),
        (net.blocks[1], theirs.blocks[1]),
    ):
        memory = ours.memory if hasattr(ours, "memory") else ours.attn.memory
        assert torch.equal(memory.keys, their.attn.linear_0.weight)
        assert torch.equal(memory.values, their.attn.linear_1.weight.mT)
    again = EAMLP(**SMALL)
    again.load_state_dict(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))
    aliased = theirs.state_dict()
    key = "tokens_to_token.attention1.attn.linear_{}.weight"
    aliased[key.format(1)] = aliased[key.format(0)].mT
    load_published(net, aliased)
    with torch.no_grad():
        net.stem.attention1.memory.keys.zero_()
    assert torch.equal(net.stem.attention1.memory.values, aliased[key.format(1)].mT)


def test_the_start() -> None:
    net = EAMLP(**SMALL | {"embed_dim": 128})
    memories = [module for module in net.modules() if isinstance(module, ExternalMemory)]
    assert len(memories) == 4
    assert all(0.018 < tensor.std() < 0.022 for memory in memories for tensor in (memory.keys, memory.values))
    assert [torch.equal(memory.keys, memory.values) for memory in memories] == [True, True, False, False]
    assert all(memory.keys.data_ptr() != memory.values.data_ptr() for memory in memories)
    assert all(0.018 < m.weight.std() < 0.022 and not m.bias.any() for m in net.modules() if isinstance(m, nn.Linear))
    assert [block.drop_path.drop_prob for block in EAMLP(**SMALL | {"depth": 3}).blocks] == [0.0, 0.05, 0.1]


def test_a_file_of_published_weights(tmp_path: Path) -> None:
    theirs, path = fill(published.EAMLP(**SMALL)), tmp_path / "checkpoint.pth.tar"
    torch.save({"state_dict": {}, "state_dict_ema": theirs.state_dict(), "arch": "T2t_vit_7"}, path)
    net = EAMLP(**SMALL, norm="official").eval()
    report = load_published(net, path)
    assert report.source == str(path) and set(report.loaded) == set(net.state_dict())
    assert torch.allclose(net(images(dtype=torch.float32)), theirs(images(dtype=torch.float32)), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ({"num_classes": 7}, {}, r"head\.weight has shape \(5, 32\), the network's is \(7, 32\); is num_classes"),
        ({"img_size": 48}, {}, r"pos_embed has shape \(1, 5, 32\).*is img_size \(of square images it was 32\) another"),
        ({"heads": 4}, {}, r"blocks\.0\.attn\.linear_0\.weight has shape \(64, 16\), the network's is \(64, 8\)"),
        ({"depth": 1}, {}, r"no place for blocks\.1\.norm1\.weight, .* in all; is it of another network or depth"),
        ({"depth": 3}, {}, r"nothing there for blocks\.2\.norm1\.weight, .* in all"),
        ({}, {"head.scale": torch.ones(1)}, r"no place for head\.scale"),
        ({}, {"pos_embed": torch.zeros(1, 5, 32)}, r"its pos_embed is not the table of sines"),
        ({}, {"blocks.0.attn.linear_1.weight": torch.zeros(64)}, r"linear_1\.weight has shape \(64,\)"),
    ],
)
def test_published_weights_of_something_else(arguments: dict, changes: dict, message: str) -> None:
    net = EAMLP(**SMALL | arguments)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(InputError, match=message) as caught:
        load_published(net, published.EAMLP(**SMALL).state_dict() | changes)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


@pytest.mark.parametrize("norm_mlp", ["ln", "bn"])
def test_in_evaluation_a_sample_is_alone(norm_mlp: Any) -> None:
    net = fill(EAMLP(**SMALL, norm_mlp=norm_mlp)).double().eval()
    x = images()
    assert (net(x)[1:2] - net(x[1:2])).abs().max() < 1e-12
    assert (net(x)[0] - net(x)[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    "arguments", [{}, {"norm_mlp": "bn"}, {"norm": "official"}, {"attn": "self_attention"}], ids=str
)
def test_every_parameter_gets_a_gradient(arguments: dict) -> None:
    net = fill(EAMLP(**SMALL, **arguments)).double()
    net(images()).square().sum().backward()
    dead = DEAD if "attn" not in arguments else ()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        largest = parameter.grad.abs().max()
        if name.startswith("blocks.") and name.endswith(dead):
            assert largest < 1e-10, name
        else:
            assert largest > 1e-6, name


def test_positions_exchange() -> None:
    """A pixel in one corner changes the token of the other, unless the softmax is over the slots."""
    x = images()
    y = x.clone()
    y[:, :, 0, 0] += 5
    for norm, reaches in (("log", True), ("slots", False)):
        net = fill(EAMLP(**SMALL | {"img_size": 64}, norm=norm)).double().eval()
        wide = [torch.nn.functional.pad(image, (0, 32, 0, 32)) for image in (x, y)]
        change = (net.forward_features(wide[0])[:, -1] - net.forward_features(wide[1])[:, -1]).abs().max()
        assert (change > 1e-6) == reaches


def test_batch_norm_is_over_samples_and_positions() -> None:
    net = EAMLP(**SMALL, **STILL, norm_mlp="bn").double()
    seen: list[Tensor] = []
    net.blocks[1].norm2.register_forward_hook(lambda _module, _args, out: seen.append(out))
    net(images())
    assert seen[0].shape == (15, 32)
    assert seen[0].mean(0).abs().max() < 1e-10 and (seen[0].var(0, unbiased=False) - 1).abs().max() < 0.1
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(net).eval()
    assert synchronised(images()).shape == (3, 5)


def test_sizes() -> None:
    net = EAMLP(**SMALL | {"img_size": (32, 48)}, in_chans=1).eval()
    assert net.forward_features(torch.randn(1, 1, 32, 48)).shape == (1, 7, 32)
    with pytest.raises(InputError, match=r"x is \(1, 1, 64, 64\).*for images of 32x48: build it with img_size=64$"):
        net(torch.randn(1, 1, 64, 64))
    with pytest.raises(InputError, match=r"img_size=\(48, 32\)$"):
        net(torch.randn(1, 1, 48, 32))
    with pytest.raises(InputError, match=r"x is \(1, 3, 32, 48\); images are \(B, 1, H, W\)"):
        net(torch.randn(1, 3, 32, 48))
    large = EAMLP(**SMALL | {"img_size": 64})
    large.load_state_dict(EAMLP(**SMALL).state_dict())


def test_every_pixel_is_seen() -> None:
    net = fill(EAMLP(**SMALL)).double().eval()
    x = images(1).requires_grad_()
    net(x).sum().backward()
    assert (x.grad != 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"img_size": 30}, "img_size is 30; both sides must be multiples of 16"),
        ({"img_size": (32, 0)}, r"img_size is \(32, 0\)"),
        ({"heads": 3}, "heads is 3; it must divide embed_dim, which is 32"),
        ({"depth": 0}, "depth is 0"),
        ({"attn": "external"}, "attn is 'external'; it must be 'external_multihead' or 'self_attention'"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"norm_mlp": "gn"}, "norm_mlp is 'gn'; it must be 'ln' or 'bn'"),
        ({"stem_drop": 1.0}, r"dropout is 1\.0"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EAMLP(**SMALL | arguments)


def test_the_table_of_positions() -> None:
    assert torch.allclose(sinusoid_table(50, 6), published.sines(50, 6)[0], atol=1e-6)
    assert "pos_embed" not in EAMLP(**SMALL).state_dict()


def test_lower_precision() -> None:
    net = fill(EAMLP(**SMALL)).eval()
    x = images(dtype=torch.float32)
    expected = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = net(x)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert (net.bfloat16()(x.bfloat16()) - expected).abs().max() < 0.1 * expected.abs().max()


def test_what_timm_calls() -> None:
    net: Any = EAMLP(**SMALL).eval()
    x = images(dtype=torch.float32)
    features = net.forward_features(x)
    assert torch.equal(net(x), net.forward_head(features))
    assert net.forward_head(features, pre_logits=True).shape == (3, net.head_hidden_size)
    assert net.get_classifier() is net.head and net.num_features == 32
    expected = net(x)
    net.set_grad_checkpointing()
    assert torch.equal(net(x), expected)
    net(x).sum().backward()
    net.reset_classifier(7)
    assert net(x).shape == (3, 7) and net.num_classes == 7 and 0.01 < net.head.weight.std() < 0.03
    net.reset_classifier(0, "token")
    assert torch.equal(net(x), net.forward_head(net.forward_features(x), pre_logits=True))
    with pytest.raises(InputError, match="global_pool is 'avg'"):
        net.reset_classifier(5, "avg")


def test_layer_decay() -> None:
    net: Any = EAMLP(**SMALL)
    groups = group_parameters(net, net.group_matcher(), reverse=True)
    order = [groups[key] for key in ("stem.project.weight", "blocks.0.norm1.weight", "blocks.1.attn.memory.keys")]
    assert order == sorted(set(order)) and groups["cls_token"] == order[0] and groups["head.bias"] > order[-1]
    optimizer = create_optimizer_v2(net, "adamw", lr=1.0, weight_decay=0.05)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(net.cls_token)] == 0 and decay[id(net.stem.attention1.memory.keys)] == 0.05


def test_by_name_in_timm() -> None:
    names = [f"eamlp_{depth}" for depth in (7, 10, 12, 14, 19, 24)]
    assert timm.list_models("eamlp_*") == names and not timm.list_models("eamlp_*", pretrained=True)
    with torch.device("meta"):
        net: Any = timm.create_model("eamlp_7", num_classes=5, in_chans=1, img_size=384, drop_rate=0.0)
        plain: Any = timm.create_model("eamlp_7", drop_path_rate=0.3)
    assert (net.img_size, net.in_chans, net.num_classes, net.head.out_features) == ((384, 384), 1, 5, 5)
    assert net.stem.attention1.query.in_features == 49 and net.pos_embed.shape == (1, 577, 256)
    data = resolve_model_data_config(plain)
    assert data["input_size"] == (3, 224, 224) and (data["crop_pct"], data["interpolation"]) == (0.9, "bicubic")
    assert data["mean"] == (0.485, 0.456, 0.406) and plain.default_cfg is plain.pretrained_cfg
    assert plain.blocks[-1].drop_path.drop_prob == 0.3
    with pytest.raises(InputError, match=r"no published weights of eamlp_7 .*load_published\(net, PATH\)"):
        timm.create_model("eamlp_7", pretrained=True)
    with pytest.raises(InputError, match="features_only"):
        timm.create_model("eamlp_7", features_only=True)


def test_a_checkpoint_by_path_in_timm(tmp_path: Path) -> None:
    arguments = {"embed_dim": 32, "depth": 2, "heads": 2, "img_size": 32, "num_classes": 5}
    net = timm.create_model("eamlp_7", **arguments)
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    again = timm.create_model("eamlp_7", checkpoint_path=str(tmp_path / "weights.pth"), **arguments)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))


@pytest.mark.medium
@pytest.mark.parametrize("norm_mlp", ["ln", "bn"])
def test_export(norm_mlp: Any) -> None:
    net = fill(EAMLP(**SMALL | {"depth": 1}, norm_mlp=norm_mlp)).double().eval()
    program = export(net, (images(2),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert (program.module()(images(5)) - net(images(5))).abs().max() < 1e-12


@pytest.mark.medium
def test_compile() -> None:
    net = fill(EAMLP(**SMALL | {"depth": 1}, **STILL)).double()
    compiled: Any = torch.compile(net, fullgraph=True, backend="aot_eager")
    grads = []
    for forward in (net, compiled):
        net.zero_grad()
        out = forward(images())
        out.square().sum().backward()
        grads.append([out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    assert all((a - b).abs().max() < 1e-9 * (1 + a.abs().max()) for a, b in zip(*grads, strict=True))


def test_checkpointing_changes_nothing_in_training() -> None:
    nets = [fill(EAMLP(**SMALL, **STILL, norm_mlp="bn")).double().train() for _ in range(2)]
    nets[1].set_grad_checkpointing()
    for net in nets:
        net(images()).square().sum().backward()
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(nets[0].named_buffers(), nets[1].buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("method", ["kcla", "mrla_light", "se"])
def test_attention_over_depth(method: str) -> None:
    """The output, branch and shortcut, the branch alone; behind each block but the last, as the head reads a token."""
    net = fill(EAMLP(**SMALL | {"depth": 3}, **STILL)).eval()
    host, x = attach(net, method), images(dtype=torch.float32)
    assert list(host.sites) == ["blocks_0", "blocks_1"] and trunk_of(host)[1] == ("head",)
    with torch.no_grad():
        assert torch.equal(host(x), net(x))
        assert [m.shape for m in host.features(x)] == [(3, 32, 2, 2)] * 3
    host.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for key, p in host.sites.named_parameters() if key.endswith("gain"))
    again = EAMLP(**SMALL | {"depth": 3, "num_classes": 7})
    report = load_trunk(again, host.state_dict())
    assert report.new == ("head.weight", "head.bias") and report.unexpected == ()


def test_its_attention_can_be_exchanged() -> None:
    net = EAMLP(**SMALL | {"img_size": 64})
    report = swap(net, "blocks.*.attn", "external_multihead", coef=1, slots=64)
    assert [one.was for one in report.swapped] == ["MultiHeadExternalAttention"] * 2
    assert report.swapped[0].at == "17" and net.blocks[0].attn.heads == 2


def test_weights_into_a_network_made_without_memory() -> None:
    net = fill(EAMLP(**SMALL)).eval()
    with torch.device("meta"):
        empty = EAMLP(**SMALL)
    twin = empty.to_empty(device="cpu").eval()
    twin.load_state_dict(net.state_dict())
    x = images(dtype=torch.float32)
    assert torch.equal(twin(x), net(x))
