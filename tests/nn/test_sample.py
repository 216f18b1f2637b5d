"""What every method of the sample axis owes: the contract, and its formula in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from lineattn import registry
from lineattn.analysis.cost import count_macs
from lineattn.errors import InputError
from lineattn.nn.sample.base import SampleAttention
from lineattn.nn.sample.external import ExternalMemory
from tests.oracles import sample as oracle

B, C, SIZE = 2, 8, (3, 5)
N = SIZE[0] * SIZE[1]


class Case(NamedTuple):
    """A method with arguments."""

    method: str
    arguments: Mapping[str, Any] = MappingProxyType({})

    def make(self, **more: object) -> SampleAttention:
        return registry.get(self.method, axis="sample").cls(C, **self.arguments, **more)

    def __str__(self) -> str:
        return "-".join([self.method, *(f"{key}={value}" for key, value in self.arguments.items() if key != "slots")])


CASES = [
    Case("external", {"slots": 4}),
    Case("external", {"slots": 4, "norm": "official"}),
    Case("external", {"slots": 4, "norm": "slots"}),
    Case("external", {"slots": 4, "start": "tied", "act": False}),
    Case("external", {"slots": 4, "start": "independent", "tile": 4}),
    Case("external", {"slots": 4, "block": False}),
    Case("external_multihead", {"heads": 2, "slots": 4}),
    Case("external_multihead", {"heads": 2, "slots": 4, "coef": 1, "shared": False}),
    Case("external_multihead", {"heads": 2, "slots": 4, "norm": "slots"}),
    Case("self_attention", {"heads": 2}),
    Case("sagan"),
    Case("double_attention"),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
graphs = pytest.mark.parametrize(  # a graph takes seconds: the first form of each method
    "case", list({case.method: case for case in reversed(CASES)}.values()), ids=str
)
both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def shaken(module: SampleAttention) -> SampleAttention:
    """Away from its start, with statistics of its own."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if name.endswith("var") else torch.randn_like(tensor))
    return module.eval()


def tokens() -> Tensor:
    return torch.randn(B, N, C)


def some_positions() -> Tensor:
    return torch.arange(N) < torch.tensor([[N - 4], [N]])


def test_every_registered_method_is_tested_here():
    assert {case.method for case in CASES} == set(registry.list_methods("sample"))


@cases
@both_modes
def test_values_and_gradients_are_those_of_the_formula(case: Case, training: bool):
    module, x = shaken(case.make()).train(training), tokens().requires_grad_()
    wanted = {"x": x, **dict(module.named_parameters())}
    expected = getattr(oracle, case.method)(module, x)
    cotangent = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, list(wanted.values()), cotangent, allow_unused=True)
    found = module(x)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    ours = torch.autograd.grad(found, list(wanted.values()), cotangent)
    for name, a, b in zip(wanted, ours, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-9, msg=name)


@cases
def test_a_map_is_its_tokens(case: Case):
    """T15: (B, C, H, W) in both orders of memory, and (B, N, C)."""
    module, x = shaken(case.make()), torch.randn(B, C, *SIZE)
    expected = module(x.flatten(2).mT).mT.unflatten(2, SIZE)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert module(x).is_contiguous() or not module.residual
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(module(last), expected, rtol=1e-12, atol=1e-12)
    assert module(last).is_contiguous(memory_format=torch.channels_last)


@cases
def test_a_map_has_the_same_gradients(case: Case):
    module = shaken(case.make()).train()
    x = torch.randn(B, C, *SIZE, requires_grad=True)
    cotangent = torch.randn_like(x)
    inputs = [x, *module.parameters()]
    on_map = torch.autograd.grad(module(x), inputs, cotangent)
    on_tokens = torch.autograd.grad(module(x.flatten(2).mT.contiguous()), inputs, cotangent.flatten(2).mT)
    for a, b in zip(on_map, on_tokens, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@cases
def test_positions_are_exchangeable(case: Case):
    module, x, order = shaken(case.make()), tokens(), torch.randperm(N)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], rtol=1e-12, atol=1e-12)


@cases
def test_positions_see_each_other(case: Case):
    """T7; but for a softmax over the slots alone, which is there to compare with."""
    module, x = shaken(case.make()), tokens()
    other = x.clone()
    other[:, 0] += 1
    change = (module(other) - module(x))[:, 1:].abs().max()
    assert change == 0 if case.arguments.get("norm") == "slots" else change > 1e-5


@cases
def test_samples_are_independent(case: Case):
    module, x = shaken(case.make()), tokens()
    torch.testing.assert_close(module(x)[:1], module(x[:1]), rtol=1e-12, atol=1e-12)


@cases
@both_modes
def test_masked_positions_are_as_if_they_were_not_there(case: Case, training: bool):
    module, x, mask = shaken(case.make()).train(training), tokens(), some_positions()
    if training and case.method == "external":  # both samples make the statistics
        x[1], mask = x[0], mask[:1].expand(2, -1)
        torch.testing.assert_close(module(x, mask)[:, : N - 4], module(x[:, : N - 4]), rtol=1e-12, atol=1e-12)
        return
    whole = module(x, mask)
    torch.testing.assert_close(whole[:1, : N - 4], module(x[:1, : N - 4]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole[1:], module(x[1:]), rtol=1e-12, atol=1e-12)
    on_map = module(x.mT.unflatten(2, SIZE), mask.unflatten(1, SIZE))
    torch.testing.assert_close(on_map.flatten(2).mT, whole, rtol=1e-12, atol=1e-12)


@cases
@both_modes
def test_a_sample_without_positions_spoils_nothing(case: Case, training: bool):
    module, x = shaken(case.make()).train(training), tokens().requires_grad_()
    mask = torch.arange(N) < torch.tensor([[N], [0]])
    out = module(x, mask)
    inputs = [x, *module.parameters()]
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out[0].square().sum(), inputs, materialize_grads=True))


@cases
def test_every_parameter_gets_a_gradient(case: Case):
    module = shaken(case.make()).train()
    (module(tokens()) * torch.randn(B, N, C)).sum().backward()
    none = set() if case.arguments.get("norm") == "slots" else dict(registry.get(case.method).no_gradient).keys()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        if name in none:
            assert parameter.grad.abs().max() < 1e-9, name
        else:
            assert parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("case", [case for case in CASES if case.make().residual], ids=str)
@both_modes
def test_identity_at_the_start(case: Case, training: bool):
    module, x = case.make(init="identity").train(training), tokens()
    assert torch.equal(module(x), x.relu() if getattr(module, "act", False) else x)
    if case.method != "sagan":  # whose published gate is shut
        assert (case.make().train(training)(x) - x).abs().max() > 1e-3


@cases
def test_copies_and_weights_are_independent(case: Case):
    module, x = shaken(case.make()), tokens()
    before, state = (
        module(x),
        {key: torch.randn_like(t) if t.is_floating_point() else t for key, t in module.state_dict().items()},
    )
    twin = copy.deepcopy(module)
    twin.load_state_dict(state)
    assert all(torch.equal(twin.state_dict()[key], value) for key, value in state.items())  # T14
    assert torch.equal(module(x), before)


@cases
def test_fused_is_equal_and_no_dearer(case: Case):
    module, x, mask = shaken(case.make()), tokens(), some_positions()
    fused = module.fuse()
    torch.testing.assert_close(fused(x), module(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fused(x, mask)[mask], module(x, mask)[mask], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fused.fuse()(x), module(x), rtol=1e-10, atol=1e-10)
    assert fused.macs(N) <= module.macs(N) and fused.weights(x).keys() <= module.weights(x).keys()


@cases
def test_macs_are_the_counted_ones(case: Case):
    module = case.make()
    for net in (module, module.fuse()):
        assert net.macs(N) == count_macs(net, torch.empty(1, N, C))
        assert net.macs(N) == count_macs(net, torch.empty(1, C, *SIZE))


@cases
@both_modes
def test_half_precision_by_autocast_is_finite(case: Case, training: bool):
    module = case.make().float().train(training)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(torch.randn(B, 64, C).float()).square().mean()
    loss.backward()
    assert loss.isfinite() and all(parameter.grad.isfinite().all() for parameter in module.parameters())


@graphs
@pytest.mark.medium
def test_compiles_as_one_graph(case: Case):
    torch._dynamo.reset()
    module, x = shaken(case.make()), torch.randn(B, C, *SIZE)
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), module(x))
    module.train()
    x.requires_grad_()
    expected = torch.autograd.grad(copy.deepcopy(module)(x).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(whole(x).square().sum(), x), expected)


@graphs
@pytest.mark.medium
def test_exports_and_runs_as_onnx(case: Case):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = shaken(case.make()).float().requires_grad_(False)
    sizes = {0: Dim("batch", max=64), 2: Dim("rows", max=64)}
    program = export(module, (torch.randn(B, C, *SIZE).float(),), dynamic_shapes=(sizes,))
    assert not [node.target for node in program.graph.nodes if "lineattn" in str(node.target)]
    x = torch.randn(3, C, 7, SIZE[1]).float()
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-4, atol=1e-4)
    onnx = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False).model_proto
    session = runtime.InferenceSession(onnx.SerializeToString())
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((B, *SIZE, C), r"given as x.flatten\(1, 2\)"),
        ((B, C, N), "given as x.mT"),
        ((B, N, C + 1), "tokens are"),
        ((B, C + 1, *SIZE), "a map is"),
        ((N, C), "must be"),
    ],
)
@cases
def test_channels_in_the_wrong_place_are_refused(case: Case, shape: tuple[int, ...], message: str):
    with pytest.raises(InputError, match=message):
        case.make()(torch.randn(shape))


@cases
def test_a_mask_that_does_not_fit_is_refused(case: Case):
    for x, shape in ((tokens(), (B, N + 1)), (torch.randn(B, C, *SIZE), (B, *SIZE[::-1]))):
        with pytest.raises(InputError, match="one a position"):
            case.make()(x, torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        (Case("external"), {"slots": 0}, "slots is 0"),
        (Case("external"), {"norm": "l1"}, "norm is 'l1'"),
        (Case("external"), {"start": "same"}, "start is 'same'"),
        (Case("external"), {"init": "zero"}, "init is 'zero'"),
        (Case("external"), {"tile": 0}, "tile is 0"),
        (Case("sagan"), {"init": "zero"}, "init is 'zero'"),
        (Case("double_attention"), {"init": "zero"}, "init is 'zero'"),
        (Case("double_attention"), {"width": 0}, "width is 0"),
        (Case("external_multihead"), {"heads": 3}, "heads is 3"),
        (Case("external_multihead"), {"coef": 0}, "coef is 0"),
        (Case("external_multihead"), {"dropout": 1.0}, "dropout is 1.0"),
        (Case("self_attention"), {"heads": 3}, "heads is 3"),
    ],
)
def test_arguments_are_checked(case: Case, arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        case.make(**arguments)


def check_memories_are_two(module: nn.Module) -> None:
    """T14: equal at the start, two tensors from the start."""
    keys, values = module.memory.keys, module.memory.values
    assert torch.equal(keys, values)
    assert keys.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()


def test_memories_start_equal_and_are_two():
    module = Case("external").make()
    check_memories_are_two(module)
    assert module.memory.keys.std().item() == pytest.approx((2 / C) ** 0.5, rel=0.2)


def test_aliased_memories_are_seen():
    module = Case("external").make()
    module.memory.values = nn.Parameter(module.memory.keys.detach())
    with pytest.raises(AssertionError):
        check_memories_are_two(module)


def test_folding_that_would_be_dearer_is_left_out():
    """64 channels in 8 heads: with 64 slots a head, a folded head is eight times as wide as one of 8 channels."""
    wide = registry.get("external_multihead").cls(64, 8)
    assert wide.fuse().macs(1) == wide.macs(1) == 65_536
    tiled = Case("external_multihead", {"heads": 2, "slots": 2, "tile": 3}).make()
    assert tiled.fuse().memory.tile == 3


def test_fused_after_the_norm_was_synchronised():
    module = nn.SyncBatchNorm.convert_sync_batchnorm(shaken(Case("external").make()))
    assert isinstance(module.norm, nn.SyncBatchNorm) and module.fuse().macs(1) < module.macs(1)


def test_dropout_is_for_training():
    module, x = Case("external_multihead", {"heads": 2, "dropout": 0.5}).make(), tokens()
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


def test_health_of_a_memory():
    memory, query = ExternalMemory(C, 4), tokens()
    found = memory.health(query)
    assert found["attention"].shape == (B, N, 4)
    torch.testing.assert_close(found["usage"], found["attention"].mean((0, 1)))
    torch.testing.assert_close(found["logit_scale"], (query @ memory.keys.mT).std())
    assert 1 <= found["perplexity"] <= 4 and -1 <= found["key_cosine"] <= 1
    with torch.no_grad():
        memory.keys.copy_(torch.ones(4, C))
    same = memory.health(query, some_positions())
    torch.testing.assert_close(same["perplexity"], torch.tensor(4.0))
    torch.testing.assert_close(same["key_cosine"], torch.tensor(1.0))
    torch.testing.assert_close(same["usage"], torch.full((4,), 0.25))


def test_the_block_at_the_width_of_the_paper():
    block = registry.get("external").cls(512)
    assert sum(p.numel() for p in block.parameters()) == 591_360
    assert block.macs(1) == 589_824
    assert count_macs(block, torch.empty(1, 512, 64, 64)) == 4096 * 589_824
    fused = block.fuse()
    assert sum(t.numel() for t in fused.state_dict().values()) == 66_048 and fused.macs(1) == 65_536


@pytest.mark.parametrize(("width", "heads", "params", "mmacs"), [(256, 4, 533_888, 129.1), (384, 6, 1_189_888, 271.1)])
def test_multihead_at_the_widths_of_the_paper(width: int, heads: int, params: int, mmacs: float):
    module = registry.get("external_multihead").cls(width, heads)
    assert sum(p.numel() for p in module.parameters()) == params
    assert round(module.macs(197) / 1e6, 1) == mmacs
    plain = registry.get("self_attention").cls(width, heads)
    even = 2 * width + 256  # positions from which on it is the cheaper one
    assert module.macs(even) == plain.macs(even) and module.macs(even - 1) > plain.macs(even - 1)
