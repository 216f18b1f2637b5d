"""What every recorded number is made with: the environment it came from, and the bytes of a training step."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_PACKAGES = ("lineattn", "torch", "torchvision", "timm", "lightning", "numpy")


def environment(seed: int, *, native: str) -> dict[str, Any]:
    """What a number depends on besides the configuration: versions, commit, machine, threads, kernels, seed.

    Args:
        seed: The seed.
        native: `lineattn.ops.native.status`; given, since nothing here imports the rooms above.
    """
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "git": _git_hash(),
        "machine": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": seed,
        "native": native,
    }


def _processor() -> str:
    """The model's name; `platform` knows only the architecture on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git_hash() -> str | None:
    """The commit of the library's own source, with a mark where it was changed; none outside a git checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return found.stdout.strip() or None


class SavedBytes:
    """Bytes of the storages that autograd keeps for the backward pass, each counted once."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    @contextmanager
    def counting(self, net: nn.Module, *inputs: Tensor) -> Iterator[None]:
        """Counts what the code inside saves; ``net``'s own parameters and buffers and ``inputs`` are left out."""
        own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers(), *inputs)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def static_bytes(net: nn.Module) -> int:
    """Parameters, their gradients, and buffers."""
    parameters = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in net.parameters())
    return parameters + sum(b.numel() * b.element_size() for b in net.buffers())
