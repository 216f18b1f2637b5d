"""What networks for segmentation have in common: an encoder, and what makes a class of each pixel from its maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.hosts.sources import Source, read
from lineattn.hosts.weights import LoadReport, load_trunk, strip


class SegmentationNetwork(nn.Module, ABC):
    """Base of the networks for segmentation.

    The encoder is a network of its own: `lineattn.attach` makes a host of it, which takes its place.

    Shape:
        - Input: ``(B, in_chans, H, W)``, of any size.
        - Output: ``(B, num_classes, H, W)``, logits.
    """

    encoder_path: ClassVar[str] = "encoder"
    """Name of the encoder in the network."""
    num_classes: int
    stride: int
    """Pixels between the positions of the deepest map: what is moved by them, or a multiple, has the same maps."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Logits of each pixel."""

    def get_encoder(self) -> nn.Module:
        """The encoder: a plain network, or a host."""
        return self.get_submodule(self.encoder_path)

    def set_encoder(self, encoder: nn.Module) -> None:
        """Puts another in its place, which has the same maps."""
        self.set_submodule(self.encoder_path, encoder)


def framed(x: Tensor, height: int, width: int) -> Tensor:
    """A map in another size: rows below and columns at the right are filled with zeros, or cut off.

    Example:
        >>> import torch
        >>> framed(torch.ones(1, 1, 2, 2), 1, 3)
        tensor([[[[1., 1., 0.]]]])
    """
    # Cut by padding too: of a slice, an exported graph asks whether it is the whole, and is for such sizes only.
    return F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2]))


def load_encoder(net: SegmentationNetwork, source: Source) -> LoadReport:
    """Loads the weights of a plain network into the encoder; the rest of the network stays new.

    A source that is a whole network for segmentation, such as a checkpoint of a run, also gives the rest, where shapes
    agree. See `lineattn.hosts.weights.load_trunk` for what is done to names, and to the attention. An error leaves the
    network as it was.

    Args:
        net: The network.
        source: What `lineattn.hosts.weights.load_trunk` takes.

    Returns:
        What was loaded, what is new, what was adapted, dropped or unexpected, by names in the network.

    Raises:
        InputError: The source can't be read, or a weight of the encoder is missing, renamed, or of another shape.

    Example:
        >>> from lineattn.models.resunet import ResUNet
        >>> net, other = ResUNet(width=8), ResUNet(width=8, num_classes=3)
        >>> load_encoder(net, other.encoder.state_dict()).new[-2:]
        ('head.weight', 'head.bias')
        >>> print(load_encoder(net, other.state_dict()))
        state dict: 176 tensors loaded
        new, as they were: head.weight, head.bias
        dropped head.weight, head.bias: of another shape there (another class count?)
    """
    found, ours, prefix = read(source), net.state_dict(), f"{net.encoder_path}."
    theirs = {strip(key, ours): value for key, value in found.tensors.items()}
    rest: dict[str, Tensor] = {}
    if any(key.startswith(prefix) for key in theirs):
        rest = {key: value for key, value in theirs.items() if not key.startswith(prefix)}
        inside = {key.removeprefix(prefix): value for key, value in theirs.items() if key.startswith(prefix)}
        found = replace(found, tensors=inside)
    report = load_trunk(net.get_encoder(), found)
    outside = {key: value for key, value in ours.items() if not key.startswith(prefix)}
    load = {key: value for key, value in rest.items() if key in outside and value.shape == outside[key].shape}
    net.load_state_dict(load, strict=False)
    other = tuple(
        (key, "of another shape there (another class count?)") for key in rest if key in outside.keys() - load
    )

    def named(keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(prefix + key for key in keys)

    def named_pairs(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((prefix + key, what) for key, what in pairs)

    return LoadReport(
        report.source,
        (*named(report.loaded), *load),
        (*named(report.new), *(key for key in outside if key not in load)),
        named_pairs(report.adapted),
        (*named_pairs(report.dropped), *other),
        (*named(report.unexpected), *(key for key in rest if key not in outside)),
    )
