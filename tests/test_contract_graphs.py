"""What compilers and exporters make of every method on every family."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

from lineattn.hosts.depth_host import DepthHost
from tests.cells import CELLS, LIKE_OTHERS, METHODS, TYPICAL, build, example, shaken, splits, without_drop_path
from tests.hosts.nets import FAMILIES

pytestmark = pytest.mark.medium
NET = "torchvision_regnet"  # three blocks in two stages: the start, a block behind another and a transition
METHOD = "kcla"
# Once a method and once a family.
CROSS = [(method, NET) for method in METHODS] + [(METHOD, family) for family in FAMILIES if family != NET]
# As few cells as name each method and each family: what takes long is done on these.
_SPLIT = [family for family in FAMILIES if splits(family)]
DIAGONAL = [
    *((method, _SPLIT[i % len(_SPLIT)]) for i, method in enumerate(METHODS)),
    *((METHODS[i % len(METHODS)], family) for i, family in enumerate(_SPLIT)),
    *((METHOD, family) for family in FAMILIES if family not in _SPLIT),
]


def rarely(cells: list[tuple[str, str]], here: Callable[[str, str], bool]) -> list:
    """A graph takes seconds: `make test` has the cells that stand for the others, `make test-slow` all."""
    return [
        pytest.param(cell, id="-".join(cell), marks=[] if here(*cell) else [pytest.mark.slow])
        for cell in dict.fromkeys(cells)
    ]


def is_typical(method: str, family: str) -> bool:
    return method in TYPICAL or family == NET


def is_cheap(method: str, family: str) -> bool:
    """Inductor compiles C++ for each kernel: a traced net for our operators, basic blocks for none of ours."""
    return (method, family) in ((METHOD, "traced"), ("se", "torchvision_basic"))


def is_of_a_family(method: str, family: str) -> bool:
    """Graphs that compile for each method and export for each family: both walk through the same code."""
    return method in TYPICAL if family == NET else method == METHOD and family not in LIKE_OTHERS


def is_of_a_method(method: str, family: str) -> bool:
    return family == NET


def is_typical_of_onnx(method: str, family: str) -> bool:
    """The export in front of it, which is where shapes go wrong, has more cells."""
    return (method in TYPICAL and family == NET) or family in ("timm_vit", "timm_swin")


def test_the_diagonal_names_all() -> None:
    assert {method for method, _ in DIAGONAL} == set(METHODS)
    assert {family for _, family in DIAGONAL} == set(FAMILIES)


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("cell", rarely(CELLS, is_of_a_method))
def test_compiles_as_one_graph(cell: tuple[str, str]) -> None:
    host = shaken(build(*cell))
    x = example(host)
    whole = torch.compile(host, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(whole(x), host(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", rarely(DIAGONAL, is_cheap))
def test_inductor_computes_the_same(cell: tuple[str, str]) -> None:
    host = shaken(build(*cell))
    x = example(host)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(host, fullgraph=True)(x), host(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cell", rarely(DIAGONAL, is_typical))
def test_compiles_for_training(cell: tuple[str, str]) -> None:
    host = without_drop_path(shaken(build(*cell))).train()  # the compiler draws other numbers
    other, x = copy.deepcopy(host), example(host)
    torch.compile(host, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    other(x).square().sum().backward()
    for (name, a), b in zip(host.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=name)


def exported(host: DepthHost) -> ExportedProgram:
    """For any batch, and for other sizes where the network takes them."""
    one_size = callable(host.plan.probe_size)
    sizes = {0: Dim("batch", max=64)} | ({} if one_size else {2: 32 * Dim("rows", max=8)})
    given = example(host) if one_size else torch.cat([example(host)] * 2, 2)
    return export(host, (given,), dynamic_shapes={"x": sizes})


def another(host: DepthHost) -> torch.Tensor:
    """An input of another batch and size than it is exported with."""
    return example(host, 3)[..., : host.plan.probe_side(host.backbone), :]


@pytest.mark.parametrize("cell", rarely(CROSS, is_of_a_family))
def test_exports_without_an_operator_of_our_own(cell: tuple[str, str]) -> None:
    host = shaken(build(*cell)).requires_grad_(False)
    program, x = exported(host), another(host)
    assert not [node.target for node in program.graph.nodes if "lineattn" in str(node.target)]
    torch.testing.assert_close(program.module()(x), host(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", rarely(CROSS, is_typical_of_onnx))
def test_runs_as_onnx(cell: tuple[str, str]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    host = shaken(build(*cell)).requires_grad_(False)
    onnx = torch.onnx.export(exported(host), dynamo=True, optimize=False, verbose=False).model_proto
    assert {opset.domain for opset in onnx.opset_import} <= {"", "pkg.onnxscript.torch_lib.common"}
    session, x = runtime.InferenceSession(onnx.SerializeToString()), another(host)
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), host(x), rtol=1e-4, atol=1e-4)
