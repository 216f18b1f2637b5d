"""`lineattn doctor`: what works here and what doesn't, on one screen."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from lineattn.errors import InputError

_HUB = "https://huggingface.co"
_PATIENCE = 2.0  # seconds that the network has to answer
_ROOM = 1 << 30  # bytes that a run with its checkpoints may need
# Where the name of a package isn't that of its module.
_MODULES = {"fla-core": "fla", "pillow": "PIL", "scikit-learn": "sklearn", "pyyaml": "yaml"}
_DEVELOPERS = "dev"  # the extra that users don't miss


def run(args: list[str]) -> int:
    """Prints what is installed, what works and what doesn't; 1 if training can't work."""
    parser = argparse.ArgumentParser(
        prog="lineattn doctor",
        description="Versions, kernels, devices, threads, disk, network. Exit code 1 if training can't work.",
        allow_abbrev=False,
    )
    parser.parse_args(args)
    works = True
    for name, check, needed in _checks():
        mark, text = _try(check)
        if mark == "FAIL" and not needed:
            mark = "--"
        works = works and mark != "FAIL"
        print(f"{mark:<4}  {name:<18}  {text}", flush=True)
    print("training works" if works else "training can't work: see FAIL above")
    return 0 if works else 1


def _try(check: Callable[[], str]) -> tuple[str, str]:
    """What a check found; a package can be broken in any way."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "ok", check()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        return "FAIL", reason if isinstance(error, InputError) else f"{type(error).__name__}: {reason}"


def _checks() -> Iterator[tuple[str, Callable[[], str], bool]]:
    """Name, check, and whether training needs it."""
    yield "lineattn", _lineattn, True
    for spec, extra in _packages():
        yield _name(spec), partial(_package, spec, extra), extra is None
    yield "torchvision's nms", _nms, True
    yield "a training step", _step, True
    yield "native kernels", _native, False
    yield "Triton kernels", _triton, False
    yield "timm's registry", _timm, False
    yield "devices", _devices, False
    yield "threads", _threads, False
    yield "disk", _disk, False
    yield "network", _network, False


def _lineattn() -> str:
    from lineattn import __version__

    return f"{__version__}, Python {platform.python_version()}, {platform.platform()}"


def _packages() -> list[tuple[str, str | None]]:
    """What this package asks for (``timm>=1.0.20,<2``), each with the extra that brings it."""
    try:
        lines = metadata.requires("lineattn") or []
    except metadata.PackageNotFoundError:
        return []  # from its sources, without an installation
    asked = [line.partition(";")[::2] for line in lines if not line.startswith("lineattn")]
    extras = [(spec.strip(), re.search(r"extra == ['\"](\w+)['\"]", marker)) for spec, marker in asked]
    return [(spec, extra[1] if extra else None) for spec, extra in extras if not extra or extra[1] != _DEVELOPERS]


def _package(spec: str, extra: str | None) -> str:
    name = _name(spec)
    mend = f"pip install 'lineattn[{extra}]'" if extra else "pip install lineattn"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise InputError(f"not installed: {mend}") from None
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", spec):
        if (_numbers(version) < _numbers(bound)) == (sign == ">="):
            raise InputError(f"{version}, where {sign}{bound} is needed: {mend}")
    importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
    return version


def _name(spec: str) -> str:
    return re.split(r"[^\w.-]", spec, maxsplit=1)[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _nms() -> str:
    import torch
    from torchvision.ops import nms

    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9]])
    kept = nms(boxes, torch.tensor([0.5, 0.9]), 0.5).tolist()
    if kept != [1]:
        raise RuntimeError(f"it kept the boxes {kept} where it should keep [1]")
    return "its compiled operators fit torch"


def _step() -> str:
    import torch

    from lineattn import create_model, list_methods

    net = create_model("resnet20_bottleneck_cifar", attn="kcla", width=4)
    net(torch.zeros(2, 3, 16, 16)).sum().backward()
    return f"forward and backward of a ResNet with KCLA; {len(list_methods('depth'))} methods of the depth axis"


def _native() -> str:
    from lineattn.ops import native

    return f"{native.status()}; of {', '.join(native.instructions()) or 'no instruction set'}"


def _triton() -> str:
    from lineattn.ops import triton

    return "on (LINEATTN_TRITON=on)" if triton.enabled else "off (LINEATTN_TRITON=on switches them on, for CUDA)"


def _timm() -> str:
    import timm

    importlib.import_module("lineattn.timm")
    names = [name for name in timm.list_models() if "kcla" in name]
    return f"import lineattn.timm adds networks such as {names[0]}" if names else "no network was added"


def _devices() -> str:
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
    if torch.backends.mps.is_available():
        return "Apple's MPS"
    return "no accelerator: the CPU trains"


def _threads() -> str:
    import torch

    settings = [f"{name}={os.environ.get(name, 'unset')}" for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")]
    return f"{torch.get_num_threads()} of torch on {os.cpu_count()} processors; {', '.join(settings)}"


def _disk() -> str:
    free = shutil.disk_usage(".").free
    if free < _ROOM:
        raise OSError(f"{free / 2**30:.2f} GiB free here: a run may not have the room for its checkpoints")
    return f"{free / 2**30:.0f} GiB free here"


def _network() -> str:
    hub = os.environ.get("HF_ENDPOINT", _HUB)
    if (offline := os.environ.get("HF_HUB_OFFLINE", "0")).upper() in ("1", "ON", "YES", "TRUE"):
        return f"HF_HUB_OFFLINE={offline}: nothing is downloaded; give paths"
    answers: list[bool] = []
    # In a thread: a name that can't be resolved takes its own time.
    asking = Thread(target=lambda: answers.append(_answers(hub)), daemon=True)
    asking.start()
    asking.join(_PATIENCE + 0.5)
    return f"{hub} answers" if answers and answers[0] else f"offline ({hub}): downloads won't work; give paths"


def _answers(address: str) -> bool:
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_PATIENCE):
            return True
    except HTTPError:
        return True  # it did answer
    except Exception:
        return False
