"""Where autocast must not choose the types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast lowers to on a device; ``None`` where it is off, or where there is none."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The types of the arguments decide, in the backward too."""
    # Only where there is something to turn off, so that an exported graph is free of it.
    if autocast_dtype(device) is not None:
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
