"""Where autocast must not choose the types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The types of the arguments decide, in the backward too."""
    # Only where there is something to turn off, so that an exported graph is free of it.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
