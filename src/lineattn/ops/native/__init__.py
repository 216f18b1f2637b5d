"""The native kernels of this package: finding the library, and the one door from tensors to raw pointers.

A plain C interface, so it knows nothing of PyTorch: every pointer that goes there has been checked in `address` for
device, type, shape and strides. ``LINEATTN_NATIVE`` decides what happens without the library:

- ``auto`` (the default): PyTorch computes everything, with the same results.
- ``require``: an error.
- ``off``: the library is not looked for.

It is read once, when this module is imported.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lineattn.errors import InputError

MODES = ("auto", "require", "off")

# As `lineattn_interface` in csrc/kernels.cpp: a library left over from another version is not called.
INTERFACE = 4

_CPU = torch.device("cpu")

# A sum of sizes beyond this would overflow in the library.
_LARGEST = 2**48


def mode() -> str:
    """``LINEATTN_NATIVE``, checked.

    Raises:
        InputError: It is none of `MODES`.
    """
    found = os.environ.get("LINEATTN_NATIVE", "auto")
    if found not in MODES:
        raise InputError(f"LINEATTN_NATIVE={found}: it must be one of {', '.join(MODES)}")
    return found


def library() -> ctypes.CDLL:
    """The library, where it is `enabled`."""
    assert not isinstance(_found, str)
    return _found


def status() -> str:
    """One line on what runs, and why: the instruction set, or the reason that PyTorch computes everything.

    Example:
        >>> isinstance(status(), str)
        True
    """
    if not enabled:
        return f"off: {_found}"
    return f"on: {instructions()[0]}" + ("" if _openmp() else ", one thread (torch's OpenMP was not found)")


def instructions() -> list[str]:
    """Instruction sets that the library has and this processor too; the first is the one in use at the start."""
    names: list[str] = []
    while enabled and (name := library().lineattn_instructions(len(names))) is not None:
        names.append(name.decode())
    return names


def _find() -> ctypes.CDLL | str:
    """The library, or why it is not used."""
    wanted = mode()
    if wanted == "off":
        return "LINEATTN_NATIVE=off"
    found = _load()
    if wanted == "require" and isinstance(found, str):
        raise InputError(f"LINEATTN_NATIVE=require: {found}")
    return found


def _library_path() -> Path:
    return Path(__file__).parent / "_kernels.so"


def _load() -> ctypes.CDLL | str:
    path = _library_path()
    if not path.exists():
        return "the kernels were not built (install a C++ compiler, then this package again)"
    try:
        found = ctypes.CDLL(str(path))
        version = found.lineattn_interface()
    except (OSError, AttributeError) as error:
        return f"{path} can't be loaded ({error}): install this package again"
    if version != INTERFACE:
        return f"{path} is of another version: install this package again"
    found.lineattn_instructions.argtypes = [ctypes.c_int64]
    found.lineattn_instructions.restype = ctypes.c_char_p
    found.lineattn_size_of.argtypes = [ctypes.c_char_p]
    found.lineattn_size_of.restype = ctypes.c_int64
    found.lineattn_choose.argtypes = [ctypes.c_int64]
    found.lineattn_choose.restype = None
    found.lineattn_threads_from.argtypes = [ctypes.c_void_p]
    found.lineattn_threads_from.restype = None
    found.lineattn_threads_from(_openmp())
    found.lineattn_transpose.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4
    return found


def _openmp() -> ctypes.c_void_p | None:
    """``GOMP_parallel`` of the OpenMP runtime that torch has loaded; without one, kernels use one thread."""
    if sys.platform == "win32" or not torch.backends.openmp.is_available():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return None


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these: the library is there, and they are plain float32 tensors on the CPU."""
    return enabled and plain(tensors, "cpu")


def plain(tensors: Sequence[Tensor | None], device: str) -> bool:
    """Whether these are plain float32 tensors on a type of device, and nobody has to see PyTorch's own operators.

    A tracer has to (export, jit), a transform of `torch.func`, forward-mode differentiation and a dispatch mode (which
    counts or fakes operators).
    """
    for t in tensors:
        if t is None:
            continue
        if type(t) not in (Tensor, nn.Parameter) or t.dtype != torch.float32 or t.device.type != device:
            return False
        if t.layout != torch.strided:
            return False
    if torch.compiler.is_compiling():  # a compiler looks at none of what follows
        return not torch.compiler.is_exporting()
    return not _watched() and not any(t.is_neg() for t in tensors if t is not None)


def _watched() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
        or torch.autograd.forward_ad._current_level >= 0
    )


def address(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    *,
    channels_last: bool = False,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> int | None:
    """The door: the address of a tensor's values, for a kernel that will read or write exactly ``shape`` there.

    Args:
        name: What the kernel calls it, for the error.
        tensor: A tensor, or ``None``, which stays ``None``.
        shape: The shape it must have.
        channels_last: Whether its values must lie in PyTorch's channels_last order, or contiguous.
        device: Where it must be.
        dtype: The type it must have.

    Raises:
        ValueError: It is something else.
    """
    if tensor is None:
        return None
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name}: {str(dtype).removeprefix('torch.')} of shape {shape} on {device} is expected, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
    order = torch.channels_last if channels_last else torch.contiguous_format
    if not tensor.is_contiguous(memory_format=order):
        raise ValueError(f"{name}: strides {tensor.stride()} are not those of a dense {order} tensor")
    if tensor.numel() >= _LARGEST:
        raise ValueError(f"{name}: {tensor.numel()} values are too many")
    return tensor.data_ptr()


def channels_last(x: Tensor) -> Tensor:
    """``(B, C, H, W)`` in channels_last order: itself, or a copy of a contiguous one."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    copy = torch.empty_like(x, memory_format=torch.channels_last)
    _transpose(x, copy, x.shape[1], x.shape[2] * x.shape[3])
    return copy


def contiguous(x: Tensor) -> Tensor:
    """``(B, C, H, W)`` in contiguous order: itself, or a copy of one in channels_last order."""
    if x.is_contiguous():
        return x
    copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    _transpose(x, copy, x.shape[2] * x.shape[3], x.shape[1])
    return copy


def _transpose(x: Tensor, to: Tensor, rows: int, columns: int) -> None:
    # PyTorch's own copy between the two orders takes three times as long.
    last = x.is_contiguous(memory_format=torch.channels_last)
    source = address("map", x, x.shape, channels_last=last)
    target = address("copy", to, x.shape, channels_last=not last)
    check(library().lineattn_transpose(source, target, len(x), rows, columns, threads()))


def check_mirror(name: str, structure: type[ctypes.Structure]) -> None:
    """Compares a structure of arguments with the library's own.

    Raises:
        InputError: Their sizes differ: the library is left over from another version.
    """
    if enabled and library().lineattn_size_of(name.encode()) != ctypes.sizeof(structure):
        raise InputError(f"{_library_path()} is of another version ({name}): install this package again")


def threads() -> int:
    """How many threads a kernel may use: torch's own setting."""
    return torch.get_num_threads()


def check(code: int) -> None:
    """Turns a kernel's answer into an exception.

    Raises:
        MemoryError: There was no memory for its scratch space.
    """
    if code:
        raise MemoryError("a native kernel got no memory for its scratch space")


_found = _find()

# Whether the kernels are there. A plain name, so that a compiler's guard on it costs nothing.
enabled: bool = not isinstance(_found, str)
