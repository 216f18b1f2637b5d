"""Attention whose cost grows linearly: over depth, over samples, over tokens.

Names are imported when they are asked for, so that the command line answers at once. Where timm is loaded already, its
networks with attention are registered in it, as `lineattn.timm` does; and where transformers is, ours in it, as
`lineattn.hf` does.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineattn.hosts.attach import attach
    from lineattn.hosts.swap import swap
    from lineattn.models import create_model, list_models
    from lineattn.registry import list_methods

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "create_model", "list_methods", "list_models", "swap"]

_HOMES = {
    "attach": "lineattn.hosts.attach",
    "create_model": "lineattn.models",
    "list_methods": "lineattn.registry",
    "list_models": "lineattn.models",
    "swap": "lineattn.hosts.swap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if hasattr(sys.modules.get("timm"), "create_model"):  # not while timm itself is being imported
    importlib.import_module("lineattn.timm")
if hasattr(sys.modules.get("transformers"), "AutoModel"):
    with contextlib.suppress(ImportError):  # of a transformers that is too old for ours, which `lineattn.hf` says
        importlib.import_module("lineattn.hf")
