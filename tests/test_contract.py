"""What every method of the depth axis owes to every family of backbones; a new one of either is covered at once."""

from __future__ import annotations

import copy
import gc
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn.parallel import DistributedDataParallel

from lineattn import attach, registry
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.weights import load_trunk
from lineattn.nn.depth.base import DepthAttention
from tests.hosts.nets import FAMILIES, image, shake, small

METHODS = registry.list_methods("depth")
CELLS = [(method, family) for method in METHODS for family in FAMILIES]


def cells(mark: Callable[[str, str], pytest.MarkDecorator | None]) -> list[ParameterSet]:
    """Every method on every family; what takes long is marked to be left to `make test` or `make test-slow`."""
    return [pytest.param(names, id="-".join(names), marks=[m] if (m := mark(*names)) else []) for names in CELLS]


def in_memory(method: str, family: str) -> pytest.MarkDecorator | None:
    """torchvision's networks can't be made small."""
    return None if family.startswith("cifar") else pytest.mark.medium


def compiled(method: str, family: str) -> pytest.MarkDecorator:
    """Each method on one family; on another one a method with and one without split blocks."""
    other = family == "torchvision_bottleneck" and method in ("kcla", "mrla_light")
    return pytest.mark.medium if family == "cifar_basic" or other else pytest.mark.slow


def trained(method: str, family: str) -> pytest.MarkDecorator:
    return pytest.mark.medium if family == "cifar_basic" and method in ("kcla", "mrla_light") else pytest.mark.slow


def exported(method: str, family: str) -> pytest.MarkDecorator:
    return pytest.mark.medium if family == "cifar_basic" else pytest.mark.slow


@pytest.fixture(scope="module", params=cells(in_memory))
def cell(request: pytest.FixtureRequest) -> DepthHost:
    """A host at its start, in evaluation mode; tests that change it work on a copy."""
    method, family = request.param
    return attach(small(family), method)


@pytest.fixture
def x(cell: DepthHost) -> Tensor:
    return image(size=cell.plan.probe_size)


def methods_of(host: DepthHost) -> dict[str, DepthAttention]:
    return {key: module for key, module in host.sites.items() if isinstance(module, DepthAttention)}


def shaken(host: DepthHost, dtype: torch.dtype = torch.float32) -> DepthHost:
    host = copy.deepcopy(host).to(dtype)
    shake(host)
    return host


def test_start_is_the_network_itself(cell: DepthHost, x: Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(cell(x), cell.backbone(x))


def test_shapes(cell: DepthHost, x: Tensor) -> None:
    with torch.no_grad():
        maps = cell.features(x)
        assert cell(x).shape == (2, 5)
    assert [(m.shape[1], x.shape[2] // m.shape[2]) for m in maps] == [
        (info["num_chs"], info["reduction"]) for info in cell.feature_info
    ]
    assert cell.num_features == maps[-1].shape[1]


def test_odd_sizes(cell: DepthHost, x: Tensor) -> None:
    with torch.no_grad():
        assert shaken(cell)(x[..., :29, :21]).isfinite().all()


def test_trunk_loads_strictly(cell: DepthHost, x: Tensor) -> None:
    host = copy.deepcopy(cell)
    plain = shake(copy.deepcopy(host.backbone))
    report = load_trunk(host, plain.state_dict())
    assert not report.dropped and not report.unexpected
    assert all(key.startswith("sites.") for key in report.new)
    with torch.no_grad():
        assert torch.equal(host(x), plain(x))


def test_every_parameter_gets_a_gradient(cell: DepthHost, x: Tensor) -> None:
    start = copy.deepcopy(cell).train()
    start(x).square().sum().backward()
    assert [name for name, p in start.named_parameters() if p.grad is None] == []

    host = shaken(cell, torch.float64).train()
    for module in methods_of(host).values():
        module.drop_path = 0.0
    host(x.double()).square().sum().backward()
    dead = {name for name, p in host.named_parameters() if not p.grad.abs().max() > 0}
    assert dead <= excepted(host)


def excepted(host: DepthHost) -> set[str]:
    """Parameters without gradient by algebra: what the card names, where a stretch starts."""
    cards = {card.cls: card for card in map(registry.get, METHODS)}
    return {
        f"sites.{key}.{name}"
        for key, module in methods_of(host).items()
        if module.site.entry == "start"
        for name, _ in cards[type(module)].no_gradient
    }


def test_samples_are_independent(cell: DepthHost, x: Tensor) -> None:
    host, x = shaken(cell, torch.float64), x.double()
    other = x.clone()
    other[0] = 5 * other[0].flip(-1)
    with torch.no_grad():
        torch.testing.assert_close(host(x)[1:], host(other)[1:], rtol=0, atol=1e-12)
        torch.testing.assert_close(host(x)[1:], host(x[1:]), rtol=1e-12, atol=1e-12)


def test_copies_are_independent(cell: DepthHost, x: Tensor) -> None:
    host = shaken(cell)
    twin = copy.deepcopy(host)
    with torch.no_grad():
        before = twin(x)
        for tensor in host.state_dict().values():
            tensor.fill_(1)
        assert torch.equal(twin(x), before)


@pytest.mark.medium
def test_nothing_holds_a_host_back(cell: DepthHost, x: Tensor) -> None:
    host = copy.deepcopy(cell)
    host(x).sum().backward()
    gone = [weakref.ref(host), weakref.ref(host.backbone), weakref.ref(next(iter(host.sites.values())))]
    gc.collect()
    gc.disable()  # what a cycle holds would stay now
    try:
        del host
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


def test_bf16_autocast_is_finite(cell: DepthHost, x: Tensor) -> None:
    host = shaken(cell).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = host(x).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in host.parameters())


def test_channels_last_stays_and_changes_nothing(cell: DepthHost, x: Tensor) -> None:
    host = shaken(cell)
    with torch.no_grad():
        plain = host(x)
        host.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(host(x), plain, rtol=1e-4, atol=1e-4)
        assert all(m.is_contiguous(memory_format=torch.channels_last) for m in host.features(x))


def test_fused_is_equal(cell: DepthHost, x: Tensor) -> None:
    host, x = shaken(cell, torch.float64).train(), x.double()
    fused = [host.fuse(), host.fuse(trunk=False)]
    assert host.training and all(p.requires_grad for p in host.parameters())
    host.eval()
    with torch.no_grad():
        for copied in fused:
            torch.testing.assert_close(copied(x), host(x), rtol=1e-10, atol=1e-10)
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in net.backbone.modules()) for net in (host, *fused)]
    assert norms == [norms[0], 0, norms[0]]


def test_gain_folds_away(cell: DepthHost, x: Tensor) -> None:
    host, x = shaken(cell, torch.float64), x.double()
    for module in methods_of(host).values():
        module.gain.data.abs_()  # a negative one has no exact form behind a ReLU
    with torch.no_grad():
        before = host(x)
        host.fold_gain()
        torch.testing.assert_close(host(x), before, rtol=1e-10, atol=1e-10)
    assert not any(name.endswith("gain") for name, _ in host.named_parameters())


def test_checkpointing_changes_nothing(cell: DepthHost, x: Tensor) -> None:
    plain, saving = shaken(cell).train(), shaken(cell).train()
    saving.set_grad_checkpointing()
    for host in (plain, saving):
        torch.manual_seed(3)  # drop path
        host(x).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(plain.named_buffers(), saving.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("names", cells(compiled))
def test_compiles_as_one_graph(names: tuple[str, str]) -> None:
    torch._dynamo.reset()
    method, family = names
    host = shaken(attach(small(family), method))
    x = image(size=host.plan.probe_size)
    whole = torch.compile(host, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(whole(x), host(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", cells(trained))
def test_compiles_for_training(names: tuple[str, str]) -> None:
    torch._dynamo.reset()
    method, family = names
    host = shaken(attach(small(family), method)).train()
    for module in methods_of(host).values():
        module.drop_path = 0.0  # the compiler draws other numbers
    other, x = copy.deepcopy(host), image(size=host.plan.probe_size)
    torch.compile(host, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    other(x).square().sum().backward()
    for (name, a), b in zip(host.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("names", cells(exported))
def test_exports_and_runs_as_onnx(names: tuple[str, str]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    method, family = names
    host = shaken(attach(small(family), method)).requires_grad_(False)
    size = host.plan.probe_size
    shapes = {"x": {0: Dim("batch", max=64), 2: 32 * Dim("rows", max=8)}}
    program = export(host, (image(2, 2 * size),), dynamic_shapes=shapes)
    x = image(3, 2 * size)[..., :size, :]
    torch.testing.assert_close(program.module()(x), host(x), rtol=1e-5, atol=1e-5)
    onnx = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    session = runtime.InferenceSession(onnx.SerializeToString())
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), host(x), rtol=1e-4, atol=1e-4)


def _train_two_steps(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for method, family in CELLS:
        host = DistributedDataParallel(attach(small(family), method).train())
        for step in range(2):  # the second forward pass is where unused parameters are found
            x: Tensor = image() + rank + step
            host(x).square().sum().backward()
        total = torch.cat([p.grad.flatten() for p in host.parameters()]).double().sum()
        torch.save(total, Path(folder) / f"{method}-{family}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.medium
def test_two_processes_use_every_parameter(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_train_two_steps, (port, str(tmp_path)), nprocs=2)
    for method, family in CELLS:
        first, second = (torch.load(tmp_path / f"{method}-{family}-{rank}.pt") for rank in (0, 1))
        assert first.isfinite() and first == second, (method, family)
