"""`lineattn export`: a checkpoint as safetensors, as ONNX, or as a program of torch.export."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineattn.errors import InputError, need
from lineattn.files import write_json, write_whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from lineattn.cli.restore import Trained

# A larger difference from torch than rounding explains, in parts of the largest logit.
_TOLERANCE = 1e-3
# Pixels between the sizes that a program is made with and checked at: a multiple of the usual reductions.
_STEP = 32

# Whose operators a graph may have: PyTorch's own in a program, ONNX's own (two names) in a model.
_TORCH = ("aten", "prims", "higher_order")
_ONNX = ("", "ai.onnx")

_FILES = {"safetensors": "model.safetensors", "onnx": "model.onnx", "torch": "model.pt2"}
# Lines of Python that run as they stand, in the folder of the export.
_USE = {
    "safetensors": "import json, lineattn, pathlib, safetensors.torch; "
    "net = lineattn.create_model(**json.loads(pathlib.Path('model.safetensors.json').read_text())['create_model']); "
    "net.load_state_dict(safetensors.torch.load_file('model.safetensors')); net.eval()",
    "onnx": "import onnxruntime; session = onnxruntime.InferenceSession('model.onnx')"
    "  # session.run(['logits'], {'images': X}) for an X of float32 and the shape above",
    "torch": "import torch; net = torch.export.load('model.pt2').module()"
    "  # net(X) for an X of float32 and the shape above; lineattn is not needed",
}


def run(args: list[str]) -> int:
    """Writes the weights of a checkpoint, and how to build their network, where other programs can read them."""
    parser = argparse.ArgumentParser(
        prog="lineattn export",
        description="Writes model.safetensors, model.onnx or model.pt2, and beside it a .json of the same name: "
        "classes, input, how to build or run the network. Weights are written as trained; in the other two everything "
        "constant is folded.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", type=Path, required=True, help="checkpoint of a run")
    parser.add_argument("--to", choices=tuple(_FILES), default="safetensors", help="default: safetensors")
    parser.add_argument("--out", type=Path, help="folder to write to (default: export/ in the run folder)")
    parser.add_argument("--dynamic", action="store_true", help="images of any size; the batch is always of any size")
    parser.add_argument("--check", action="store_true", help="run the file, at another batch, and compare with torch")
    options = parser.parse_args(args)
    for given, name in ((options.check, "--check"), (options.dynamic, "--dynamic")):
        if given and options.to == "safetensors":
            raise InputError(f"{name} is for --to onnx or torch: safetensors holds the weights themselves")
    if options.to == "onnx":
        need("onnxscript", "export", "--to onnx")  # torch's exporter needs it
        if options.check:
            need("onnxruntime", "export", "--check")

    from lineattn.cli.restore import restore

    trained = restore(options.ckpt_path)
    description = _describe(trained, options.to, dynamic=options.dynamic)
    here = options.ckpt_path.parent
    out = options.out or (here.parent if here.name == "checkpoints" else here) / "export"
    path = out / _FILES[options.to]
    if options.to == "safetensors":
        _write_safetensors(trained.net, path)
    else:
        program = _program(trained, dynamic=options.dynamic)
        if options.to == "torch":
            _need_own_size(program, trained)
        write = _write_onnx if options.to == "onnx" else _write_torch
        write(program, path)
    beside = path.with_name(f"{path.name}.json")
    write_json(beside, description)
    print(f"wrote {path} and {beside}")
    return _check(trained, path, dynamic=options.dynamic) if options.check else 0


def _write_safetensors(net: nn.Module, path: Path) -> None:
    from safetensors.torch import save

    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    write_whole(path, lambda file: file.write(save(weights)))


def _describe(trained: Trained, kind: str, *, dynamic: bool) -> dict[str, Any]:
    data = trained.visual
    return {
        "create_model": trained.arguments,
        "classes": trained.classes,
        "input": {
            "shape": ["batch", data.channels, *(["height", "width"] if dynamic else [data.image_size] * 2)],
            "range": "pixels in 0..1, then (x - mean) / std",
            "mean": data.mean,
            "std": data.std,
        },
        "use": _USE[kind],
    }


def _program(trained: Trained, *, dynamic: bool) -> ExportedProgram:
    """The network's graph for any batch and, if asked, any size of the images."""
    import torch
    from torch.export import Dim, export
    from torch.fx import GraphModule

    from lineattn.tasks.console import hush_libraries

    net, side = trained.net, trained.visual.image_size
    # Of two sizes, neither so small that the last map is a pixel wide: its width would be taken for a constant.
    size = (side + 2 * _STEP, side + _STEP) if dynamic else (side, side)
    example = torch.zeros(2, trained.visual.channels, *size)
    if dynamic:
        _need_sizes(net, example, side)
    axes = {0: Dim.DYNAMIC, **({2: Dim.DYNAMIC, 3: Dim.DYNAMIC} if dynamic else {})}
    with hush_libraries():
        program = export(_folded(net), (example,), dynamic_shapes=(axes,))
    if bounded := [str(bounds) for bounds in program.range_constraints.values() if bounds.upper.is_Integer]:
        raise InputError(f"--dynamic: the graph holds for some sizes only ({', '.join(bounded)}); leave it out")
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    _refuse_custom({str(target) for target in targets if getattr(target, "namespace", "aten") not in _TORCH})
    return program


def _need_own_size(program: ExportedProgram, trained: Trained) -> None:
    """A graph for any size leaves out those at which a map is one pixel wide, which may be the network's own."""
    import torch

    side = trained.visual.image_size
    try:
        with torch.no_grad():
            program.module()(torch.zeros(2, trained.visual.channels, side, side))
    except (AssertionError, RuntimeError) as error:
        raise InputError(
            f"--dynamic: at {side}x{side}, the size of training, a map is one pixel wide, and no graph for other sizes "
            "holds there; leave it out, or export to onnx"
        ) from error


def _need_sizes(net: nn.Module, example: Tensor, side: int) -> None:
    import torch

    try:
        with torch.no_grad():
            net(example)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"--dynamic: this network takes images of {side}x{side} alone; leave it out") from error


def _folded(net: nn.Module) -> nn.Module:
    """A copy with equal outputs where everything constant is folded, as far as the network's family is known."""
    import torch

    from lineattn.models.encoder import EncoderNetwork
    from lineattn.nn.sample.base import SampleAttention

    folded = copy.deepcopy(net).requires_grad_(False)
    if isinstance(folded, EncoderNetwork):
        folded.set_encoder(_folded_trunk(folded.get_encoder()))
    else:
        folded = _folded_trunk(folded)
    for name, module in list(folded.named_modules()):
        if isinstance(module, SampleAttention):
            folded.set_submodule(name, module.fuse())
    for tensor in (*folded.parameters(), *folded.buffers()):
        tensor.data = tensor.data.clone(
            memory_format=torch.contiguous_format
        )  # views would be written with their whole
    return folded


def _folded_trunk(net: nn.Module) -> nn.Module:
    from lineattn.hosts.depth_host import DepthHost
    from lineattn.hosts.fold import fold_batch_norms
    from lineattn.hosts.plans import PLANS

    if isinstance(net, DepthHost):
        return net.fuse()
    for plan in PLANS:
        if plan.matches(net):
            fold_batch_norms(list(plan.steps(net)), net)
    return net


def _refuse_custom(operators: set[str]) -> None:
    if operators:
        raise InputError(
            f"the graph has operators that other programs don't know: {', '.join(sorted(operators))}; export a network "
            "whose attention consists of PyTorch's own operators"
        )


def _write_torch(program: ExportedProgram, path: Path) -> None:
    import torch

    write_whole(path, lambda file: torch.export.save(program, file))


def _write_onnx(program: ExportedProgram, path: Path) -> None:
    import torch

    from lineattn.tasks.console import hush_libraries

    with hush_libraries():
        written = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch", 2: "height", 3: "width"},),  # only names: what is dynamic is decided
            dynamo=True,
            verbose=False,
        )
    assert written is not None
    model = written.model_proto
    _refuse_custom({f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain not in _ONNX})
    content = model.SerializeToString()
    write_whole(path, lambda file: file.write(content))


def _check(trained: Trained, path: Path, *, dynamic: bool) -> int:
    """Prints how far the file is from torch on random images; 1 if further than rounding explains."""
    import torch

    side = trained.visual.image_size
    size = (side, side + 2 * _STEP) if dynamic else (side, side)
    images = torch.randn(3, trained.visual.channels, *size, generator=torch.Generator().manual_seed(0))
    found = _run_onnx(path, images) if path.suffix == ".onnx" else _run_torch(path, images)
    with torch.no_grad():
        expected = trained.net(images)
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    print(
        f"largest absolute difference from torch over 3 random images of {size[0]}x{size[1]}: {error:.2g} "
        f"(largest logit {largest:.3g})"
    )
    return 0 if error <= _TOLERANCE * max(largest, 1.0) else 1


def _run_onnx(path: Path, images: Tensor) -> Tensor:
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _run_torch(path: Path, images: Tensor) -> Tensor:
    import torch

    with torch.no_grad():
        return torch.export.load(path).module()(images)
