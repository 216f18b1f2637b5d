"""Kernels for CUDA, written in Triton: the switch, and what they take.

Off unless ``LINEATTN_TRITON=on``: they are tested in Triton's interpreter and they compile, but no numbers have been
seen on a GPU yet, neither their results nor their times; until then PyTorch computes everything there. The switch is
read once, when this module is imported; Triton is imported only if it is on.
"""

from __future__ import annotations

import importlib
import os

from torch import Tensor

from lineattn.errors import InputError
from lineattn.ops import native

MODES = ("off", "on")


def mode() -> str:
    """``LINEATTN_TRITON``, checked.

    Raises:
        InputError: It is none of `MODES`.
    """
    found = os.environ.get("LINEATTN_TRITON", "off")
    if found not in MODES:
        raise InputError(f"LINEATTN_TRITON={found}: it must be one of {', '.join(MODES)}")
    return found


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these: they are switched on, and these are plain float32 tensors on one CUDA device.

    As `lineattn.ops.native.usable`, it says no where PyTorch's own operators have to be seen.
    """
    if not enabled or not native.plain(tensors, "cuda"):
        return False
    return len({t.device for t in tensors if t is not None}) == 1


def _find() -> bool:
    if mode() == "off":
        return False
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise InputError(f"LINEATTN_TRITON=on: Triton can't be imported ({error}): install it, or unset it") from error
    return True


# Whether the kernels are there. A plain name, so that a compiler's guard on it costs nothing.
enabled: bool = _find()
