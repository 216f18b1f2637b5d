"""All networks for segmentation by their names, small: their depth and their parts, with few channels."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import timm

from lineattn import create_model, list_models
from lineattn.models.segmentation import SegmentationNetwork

SMP = "smp/unet:resnet10t"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "resunet": {"width": 8},
    "eanet_resnet50": {"net_args": {"width": 16, "slots": 8}},
    "eanet_resnet101": {"net_args": {"width": 16, "slots": 8}},
    SMP: {"net_args": {"decoder_channels": (16, 8, 8, 8, 8)}},
}
_WITHOUT = pytest.mark.skipif(find_spec("segmentation_models_pytorch") is None, reason="needs segmentation")
NAMES = [
    *(pytest.param(name, marks=pytest.mark.medium if "101" in name else ()) for name in list_models(task="seg")),
    pytest.param(SMP, marks=_WITHOUT),
]


def narrow(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Gives the trunks of EANets a sixteenth of their channels, in all of their blocks unless `layers` are given."""
    create = partial(timm.create_model, channels=(4, 8, 16, 32), stem_width=8, **arguments)
    monkeypatch.setattr("lineattn.models.eanet.timm", SimpleNamespace(create_model=create))


def small(name: str, **arguments: Any) -> SegmentationNetwork:
    """A network with three classes."""
    net = create_model(name, **{"num_classes": 3, "tell": lambda report: None} | ARGUMENTS.get(name, {}) | arguments)
    assert isinstance(net, SegmentationNetwork)
    return net
