"""Attention of the sample axis in networks of others: in the place of theirs, and behind their modules."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from lineattn import attach, create_model, swap
from lineattn.analysis.cost import count_macs
from lineattn.errors import InputError
from lineattn.nn.sample.base import SampleAttention
from lineattn.nn.sample.external import ExternalAttention
from lineattn.nn.sample.sagan import SAGANAttention
from lineattn.nn.sample.self_attention import SelfAttention
from tests.hosts.nets import shake

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit(**arguments: object) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | arguments))


def swin() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)


class DualHead(nn.Module):
    """A head as DANet's, with its position attention, on a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.attention = SAGANAttention(16)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.body(x)))


NETS = {
    "vit": (vit, "blocks.*.attn", "external_multihead", 2),
    "vit, core": (vit, "blocks.*.attn", "external", 2),
    "swin": (swin, "layers.*.attn", "external_multihead", 4),
    "torchvision": (torchvision_vit, "encoder.layers.*.self_attention", "external_multihead", 2),
    "head": (DualHead, "attention", "external", 1),
}
nets = pytest.mark.parametrize("name", NETS)


@nets
def test_everything_else_stays(name: str):
    make, pattern, method, count = NETS[name]
    net = make().train()
    before = copy.deepcopy(net)
    report = swap(net, pattern, method)
    assert len(report.swapped) == count
    replaced = tuple(f"{one.path}." for one in report.swapped)
    ours, theirs = net.state_dict(), before.state_dict()
    kept = {key for key in theirs if not key.startswith(replaced)}
    assert kept == {key for key in ours if not key.startswith(replaced)}
    assert all(torch.equal(ours[key], theirs[key]) for key in kept)
    assert all(module.training for module in net.modules())
    net(X).square().sum().backward()
    assert [n for n, p in net.named_parameters() if p.grad is None] == []
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(X)[:1], net(X[:1]), rtol=1e-4, atol=1e-5)
        net.load_state_dict(copy.deepcopy(net).state_dict())


@nets
def test_the_report_counts_what_is_there(name: str):
    make, pattern, method, _ = NETS[name]
    net = make()
    macs, params = count_macs(net, X[:1]), sum(p.numel() for p in net.parameters())
    report = swap(net, pattern, method, example=X)
    assert sum(one.params[1] - one.params[0] for one in report.swapped) == (
        sum(p.numel() for p in net.parameters()) - params
    )
    assert sum(one.macs[1] - one.macs[0] for one in report.swapped) == count_macs(net, X[:1]) - macs


@nets
@pytest.mark.medium
def test_compiles_and_exports(name: str):
    make, pattern, method, _ = NETS[name]
    torch._dynamo.reset()
    net = make()
    swap(net, pattern, method)
    net = shake(net).eval()
    with torch.no_grad():
        expected = net(X)
        torch.testing.assert_close(torch.compile(net, backend="aot_eager")(X), expected)
        torch.testing.assert_close(torch.export.export(net, (X,)).module()(X), expected)


def test_the_report_says_where_it_is_dearer_and_what_to_do():
    net = timm.create_model("vit_tiny_patch16_224", depth=1)
    text = str(swap(net, "blocks.*.attn", "external_multihead"))
    assert "blocks.0.attn (Attention): 148,224 -> 304,192 parameters, 44.0 -> 77.5 MMACs at 197 positions" in text
    assert "the dearer one below 640 positions" in text  # 2 C + 256
    assert "with coef=1, slots=64 there would be 19.4 MMACs" in text
    assert "dearer" not in str(swap(net, "blocks.*.attn.attention", "external_multihead", coef=1, slots=64))


def test_parts_of_a_shifted_window_do_not_see_each_other():
    """Positions that the shift has brought side by side: what changes on one side of the seam stays there."""
    net = swin()
    swap(net, "layers.*.attn", "external_multihead")
    block = shake(net).eval().layers[0].blocks[1]
    windows, area = block.attn_mask.shape[0], block.attn_mask.shape[1]
    x = torch.randn(windows, area, 8)
    parts = block.attn_mask[-1, 0] == 0
    other = x.clone()
    other[-1, ~parts] = torch.randn(int((~parts).sum()), 8)  # the same for all of them would change nothing
    with torch.no_grad():
        a, b = block.attn(x, block.attn_mask), block.attn(other, block.attn_mask)
        assert 0 < parts.sum() < area
        assert torch.equal(a[-1, parts], b[-1, parts]) and not torch.equal(a[-1, ~parts], b[-1, ~parts])
        torch.testing.assert_close(a[-1, parts], block.attn.attention(x[-1:, parts])[0])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_windows_of_one_part_spoil_no_gradient(training: bool, dropout: float):
    """Parts that a window has not are sets without a position."""
    net = swin().train(training)
    swap(net, "layers.*.attn", "external_multihead", dropout=dropout)
    net(X).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_masks_of_torch_and_of_timm():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x, absent = torch.randn(2, 7, 16), torch.arange(7).expand(2, -1) >= 5
    for net, pattern in ((layer, "self_attn"), (nn.TransformerEncoder(layer, 2), "layers.*.self_attn")):
        net = copy.deepcopy(net)
        swap(net, pattern, "external_multihead")
        net.eval()
        with torch.no_grad():
            found = net(x, src_key_padding_mask=absent)
            torch.testing.assert_close(found[:, :5], net(x[:, :5]))
    block = vit().blocks[0]
    holder = nn.ModuleDict({"block": block})
    swap(holder, "block.attn", "external_multihead")
    there = ~absent
    pairs = there[:, None, :, None] & there[:, None, None]
    added = torch.zeros(2, 1, 1, 7).masked_fill(absent[:, None, None], -torch.inf)
    with torch.no_grad():
        for mask in (there[:, None, None], pairs, added):
            found = block.eval()(x, attn_mask=mask)
            torch.testing.assert_close(found[:, :5], block(x[:, :5]))
        with pytest.raises(InputError, match="which positions see which"):
            block(x, attn_mask=torch.ones(7, 7, dtype=torch.bool).tril()[None, None])


def test_heads_are_those_of_what_is_replaced_again_and_again():
    net = vit()
    for method in ("external_multihead", "external_multihead", "self_attention", "external_multihead"):
        swap(net, "blocks.*.attn", method)
        assert net.blocks[0].attn.attention.heads == 2
        assert not isinstance(net.blocks[0].attn.attention, nn.Sequential)


def test_a_network_that_keeps_what_it_has_computed_keeps_numbers():
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attn, self.table = nn.Conv2d(3, 8, 4, 4), SelfAttention(8, 2), None

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            if self.table is None:
                self.table = torch.zeros(x.shape[1:])
            return self.attn(x + self.table)

    net = Keeps()
    report = swap(net, "attn", "external_multihead", example=X)
    assert report.swapped[0].macs is not None and net.table is None
    net(X)


def test_all_or_nothing_and_one_module_of_two_names():
    def attention(channels: int) -> nn.Module:
        return nn.MultiheadAttention(channels, 2, batch_first=True)

    net = nn.ModuleDict({"a": attention(32), "b": attention(48), "c": nn.MultiheadAttention(8, 2)})
    before = str(net)
    with pytest.raises(InputError, match="heads is 32"):
        swap(net, "[ab]", "external_multihead", heads=32)
    assert str(net) == before
    shared = nn.ModuleDict({"a": net["a"], "b": net["a"]})
    assert len(swap(shared, "*", "external_multihead").swapped) == 1
    assert shared["a"] is shared["b"] and isinstance(shared["a"].attention, SampleAttention)
    swap(net, "a", "external_multihead")  # whatever c is


def test_the_seed_alone_decides_about_new_weights():
    states = []
    for example in (X, None):
        torch.manual_seed(0)
        net = vit()
        torch.manual_seed(1)
        swap(net, "blocks.*.attn", "external_multihead", example=example)
        states.append(net.blocks[1].attn.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_without_an_image_to_guess_the_costs_are_left_out():
    net = nn.Sequential(nn.Linear(8, 8), SelfAttention(8, 2))
    assert "for MACs give example=" in str(swap(net, "1", "external_multihead"))
    assert "MMACs at 7 positions" in str(swap(net, "1", "self_attention", example=torch.randn(1, 7, 8)))
    assert "MMACs at 17 positions" in str(swap(vit(in_chans=1), "blocks.*.attn", "external_multihead"))


@pytest.mark.parametrize(
    ("make", "pattern", "method", "arguments", "message"),
    [
        (vit, "nothing", "external", {}, "has no module 'nothing'; its attention: blocks.0.attn, blocks.1.attn"),
        (vit, "blocks.0", "external", {}, "'blocks.0' is a Block, no attention that can be replaced"),
        (vit, "blocks.*.attn", "kcla", {}, "unknown sample method 'kcla'"),
        (vit, "blocks.*.attn", "metala", {}, "unknown sample method 'metala'"),
        (vit, "blocks.*.attn", "sagan", {}, "has a residual of its own"),
        (vit, "blocks.*.attn", "external_multihead", {"head": 2}, "did you mean 'heads'"),
        (DualHead, "attention", "external_multihead", {}, "has no residual"),
        (vit, "blocks.*.attn", "external", {"block": True}, "has a residual of its own"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "0", "external", {}, "none of its modules is an attention"),
        (lambda: nn.Sequential(nn.MultiheadAttention(4, 2)), "0", "external", {}, "batch_first=True"),
    ],
)
def test_what_can_not_be_swapped_is_said(make, pattern: str, method: str, arguments: dict, message: str):
    net = make()
    before = str(net)
    with pytest.raises(InputError, match=message):
        swap(net, pattern, method, **arguments)
    assert str(net) == before


def test_causal_use_and_masks_of_pairs_are_refused():
    net = vit()
    swap(net, "blocks.*.attn", "external_multihead")
    with pytest.raises(InputError, match="normalises over all positions together"):
        net.blocks[0](torch.randn(1, 5, 16), is_causal=True)
    with pytest.raises(InputError, match="which positions see which"):
        net.blocks[0](torch.randn(1, 5, 16), attn_mask=torch.ones(5, 5, dtype=torch.bool))


@pytest.mark.parametrize("method", ["external", "sagan", "double_attention"])
@pytest.mark.parametrize(
    ("name", "at"), [("resnet20_cifar", "stages.2"), ("resnet18", "layer4.1"), ("timm/resnet18", "layer4")]
)
def test_a_block_behind_a_module(method: str, name: str, at: str):
    net = shake(create_model(name)).train()
    before = copy.deepcopy(net)
    found = attach(net, method, at=at)
    assert found is net and net.training
    block = net.get_submodule(f"{at}.{method}")
    assert isinstance(block, SampleAttention)
    assert net.state_dict().keys() - before.state_dict().keys() == {
        f"{at}.{method}.{key}" for key in block.state_dict()
    }
    net.load_state_dict(before.state_dict(), strict=False)
    net.eval(), before.eval()
    with torch.no_grad():
        assert torch.equal(net(X), before(X))
        twin = shake(copy.deepcopy(net))
        assert not torch.equal(twin(X), net(X)) and torch.equal(net(X), before(X))
        for key, value in before.state_dict().items():
            twin.state_dict()[key].copy_(value)
        twin.get_submodule(f"{at}.{method}").load_state_dict(block.state_dict())
        assert torch.equal(twin(X), before(X))
    net(X).sum().backward()
    assert [key for key, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.medium
def test_a_block_behind_a_module_compiles_and_exports():
    torch._dynamo.reset()
    net = shake(attach(create_model("resnet18"), "external", at="layer4.1")).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(X), net(X))
        torch.testing.assert_close(torch.export.export(net, (X,)).module()(X), net(X))


def test_a_block_in_a_transformer_and_at_the_start_of_the_paper():
    net = shake(vit()).eval()
    with pytest.raises(InputError, match="leave out its ReLU with act=False"):
        attach(net, "external", at="blocks.1")
    before = net(X)
    assert torch.equal(attach(net, "external", at="blocks.1", act=False, copy=True)(X), before)
    assert not torch.equal(attach(net, "external", at="blocks.1", init="paper", copy=True)(X), before)
    assert torch.equal(net(X), before) and not hasattr(net.blocks[1], "external")


@pytest.mark.parametrize(
    ("make", "method", "at", "more", "message"),
    [
        (lambda: create_model("resnet20_cifar"), "external", None, {}, "give its name as at="),
        (lambda: create_model("resnet20_cifar"), "kcla", "layer3", {}, "stands behind every block"),
        (lambda: create_model("resnet20_cifar"), "external", "stage.2", {}, "did you mean 'stages"),
        (lambda: create_model("resnet20_cifar"), "external_multihead", "stages.2", {}, "has no residual"),
        (lambda: create_model("resnet20_cifar"), "external", "stages.2", {"slot": 3}, "did you mean 'slots'"),
        (swin, "external", "layers.0", {}, r"puts out \(B, H, W, C\)"),
        (swin, "external", "patch_embed", {}, r"puts out \(B, H, W, C\)"),
        (swin, "external", "layers.0.blocks.0.norm1", {}, r"puts out \(B, H, W, C\)"),
        (lambda: create_model("resnet18"), "external", "layer4.1.relu", {}, "calls 'layer4.1.relu' 2 times"),
        (lambda: create_model("resnet18"), "external", "layer4", {"block": False}, "leave out block=False"),
        (DualHead, "external", "body", {}, "no plan knows a DualHead"),
        (
            lambda: attach(create_model("resnet20_cifar"), "external", at="stages.2"),
            "external",
            "stages.2",
            {},
            "already",
        ),
        (lambda: attach(create_model("resnet20_cifar"), "kcla").backbone.stages, "external", "1", {}, "no plan knows"),
    ],
)
def test_where_a_block_can_not_stand_is_said(make, method: str, at: str | None, more: dict, message: str):
    with pytest.raises(InputError, match=message):
        attach(make(), method, at=at, **more)


def test_a_module_that_is_walked_in_parts_is_never_called():
    host = attach(create_model("resnet20_cifar"), "kcla")
    with pytest.raises(InputError, match=r"calls 'backbone\.stages\.2' never"):
        attach(host, "external", at="backbone.stages.2", example=X)
    assert not hasattr(host.backbone.stages, "external")


SAVED = """
import sys, torch
net, x, before = torch.load(sys.argv[1], weights_only=False)
for _ in range(9):
    net.layer4[1].register_forward_hook(lambda *_: None)
assert torch.equal(net(x), before)
"""


@pytest.mark.medium
def test_a_saved_network_keeps_its_block_whatever_else_is_hooked(tmp_path):
    net = shake(attach(create_model("resnet18"), "external", at="layer4.1", init="paper")).eval()
    with torch.no_grad():
        torch.save((net, X, net(X)), tmp_path / "net.pt")
    subprocess.run([sys.executable, "-c", SAVED, str(tmp_path / "net.pt")], check=True)


def test_an_output_that_can_not_be_compared_is_refused():
    class Odd(DualHead):
        def forward(self, x: Tensor) -> object:
            return slice(super().forward(x))

    class Boxed(DualHead):
        def forward(self, x: Tensor) -> object:
            return {"out": [super().forward(x), None, 3, "x"]}

    attach(Boxed(), "external", at="body", example=X)
    with pytest.raises(InputError, match="puts out a slice, which can't be compared"):
        attach(Odd(), "external", at="body", example=X)


def test_a_network_without_a_plan_is_proved_on_an_example():
    net = attach(DualHead(), "external", at="body", example=X)
    assert isinstance(net.body.external, ExternalAttention)
