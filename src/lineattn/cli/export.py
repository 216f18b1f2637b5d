"""`lineattn export`: a checkpoint as safetensors, or as ONNX."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lineattn.errors import InputError
from lineattn.files import write_json, write_whole

if TYPE_CHECKING:
    from lineattn.cli.restore import Trained

# A larger difference between ONNX and torch than rounding explains.
_TOLERANCE = 1e-3

# Lines of Python that run as they stand, in the folder of the export.
_USE = {
    ".safetensors": "import json, lineattn, pathlib, safetensors.torch; "
    "net = lineattn.create_model(**json.loads(pathlib.Path('model.json').read_text())['create_model']); "
    "net.load_state_dict(safetensors.torch.load_file('model.safetensors')); net.eval()",
    ".onnx": "import onnxruntime; session = onnxruntime.InferenceSession('model.onnx')"
    "  # session.run(['logits'], {'images': X}) for an X of float32 and the shape above",
}


def run(args: list[str]) -> int:
    """Writes the weights of a checkpoint, and how to build their network, where other programs can read them."""
    parser = argparse.ArgumentParser(
        prog="lineattn export",
        description="Writes model.safetensors or model.onnx, and model.json: classes, input, how to build the network.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", type=Path, required=True, help="checkpoint of a run")
    parser.add_argument("--to", choices=("safetensors", "onnx"), default="safetensors", help="default: safetensors")
    parser.add_argument("--out", type=Path, help="folder to write to (default: export/ in the run folder)")
    parser.add_argument("--check", action="store_true", help="run the ONNX file and compare it with torch")
    options = parser.parse_args(args)
    if options.check and options.to != "onnx":
        raise InputError("--check is for --to onnx: safetensors holds the weights themselves")

    if options.to == "onnx":
        _need("onnxscript", "--to onnx")  # torch's exporter needs it
    if options.check:
        _need("onnxruntime", "--check")

    from lineattn.cli.restore import restore

    trained = restore(options.ckpt_path)
    here = options.ckpt_path.parent
    out = options.out or (here.parent if here.name == "checkpoints" else here) / "export"
    path = out / f"model.{options.to}"
    (_write_onnx if options.to == "onnx" else _write_safetensors)(trained, path)
    _write_json(trained, path)
    print(f"wrote {path} and {out / 'model.json'}")
    return _check(trained, path) if options.check else 0


def _need(module: str, option: str) -> None:
    if find_spec(module) is None:
        raise InputError(f"{option} needs the export extra: pip install 'lineattn[export]'")


def _write_safetensors(trained: Trained, path: Path) -> None:
    from safetensors.torch import save

    weights = {name: tensor.contiguous() for name, tensor in trained.net.state_dict().items()}
    write_whole(path, lambda file: file.write(save(weights)))


def _write_json(trained: Trained, weights: Path) -> None:
    """Writes ``model.json`` beside the weights."""
    data = trained.data
    description = {
        "create_model": trained.arguments,
        "classes": trained.classes,
        "input": {
            "shape": ["batch", data.channels, data.image_size, data.image_size],
            "range": "pixels in 0..1, then (x - mean) / std",
            "mean": data.mean,
            "std": data.std,
        },
        "use": _USE[weights.suffix],
    }
    write_json(weights.with_name("model.json"), description)


def _write_onnx(trained: Trained, path: Path) -> None:
    import torch

    from lineattn.tasks.console import hush_libraries

    data = trained.data
    example = torch.zeros(2, data.channels, data.image_size, data.image_size)
    with hush_libraries():
        program = torch.onnx.export(
            trained.net,
            (example,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto.SerializeToString()
    write_whole(path, lambda file: file.write(model))


def _check(trained: Trained, path: Path) -> int:
    """Prints how far ONNX Runtime is from torch on random images; 1 if further than rounding explains."""
    import onnxruntime
    import torch

    data = trained.data
    images = torch.randn(3, data.channels, data.image_size, data.image_size, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    with torch.no_grad():
        expected = trained.net(images)
    error, size = (found - expected).abs().max().item(), expected.abs().max().item()
    print(f"largest absolute difference from torch over 3 random images: {error:.2g} (largest logit {size:.3g})")
    return 0 if error <= _TOLERANCE * max(size, 1.0) else 1
