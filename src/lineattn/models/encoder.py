"""What networks for pixels and objects have in common: inside is one for classification, whose weights load by name."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.hosts.sources import Source, Weights, read
from lineattn.hosts.weights import LoadReport, load_trunk


class EncoderNetwork(nn.Module, ABC):
    """Base of networks around an encoder, which is a network of its own, plain or a host."""

    encoder_path: ClassVar[str] = "encoder"
    """Name of the encoder in the network."""

    def get_encoder(self) -> nn.Module:
        """The encoder: a plain network, or a host."""
        return self.get_submodule(self.encoder_path)

    def set_encoder(self, encoder: nn.Module) -> None:
        """Puts another in its place, which has the same maps."""
        self.set_submodule(self.encoder_path, encoder)

    def converted(self, found: Weights) -> tuple[Weights, tuple[tuple[str, str], ...]]:
        """Weights as this kind of network has them, and what was changed on the way: names, and what was done."""
        return found, ()


def load_encoder(net: EncoderNetwork, source: Source) -> LoadReport:
    """Loads the weights of a plain network into the encoder; the rest of the network stays new.

    A source that is a whole network of this kind, such as a checkpoint of a run, also gives the rest, where shapes
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
    found, changes = net.converted(read(source))
    ours, prefix = net.state_dict(), f"{net.encoder_path}."
    wrapper = next((before for key in found.tensors if (before := _before(prefix, key)) is not None), None)
    rest: dict[str, Tensor] = {}
    if wrapper is not None:  # a whole network
        theirs = {key.removeprefix(wrapper): value for key, value in found.tensors.items()}
        rest = {key: value for key, value in theirs.items() if not key.startswith(prefix)}
        inside = {key.removeprefix(prefix): value for key, value in theirs.items() if key.startswith(prefix)}
        found = replace(found, tensors=inside)
    outside = {key: value for key, value in ours.items() if not key.startswith(prefix)}
    unfit = {key for key, value in rest.items() if key in outside and value.shape != outside[key].shape}
    before = {key: value.clone() for key, value in outside.items()}
    try:
        # What is of no name here goes along: modules of torchvision convert the names of earlier versions.
        result = net.load_state_dict({key: rest[key] for key in rest.keys() - unfit}, strict=False)
        report = load_trunk(net.get_encoder(), found)
    except (RuntimeError, InputError) as error:
        net.load_state_dict(before, strict=False)
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())
        raise InputError(f"{found.name}: what is behind the encoder does not fit: {reason}") from error
    missing = set(result.missing_keys)

    def named(keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(prefix + key for key in keys)

    def named_pairs(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((prefix + key, what) for key, what in pairs)

    other = tuple((key, "of another shape there (another class count?)") for key in rest if key in unfit)
    return LoadReport(
        report.source,
        (*named(report.loaded), *(key for key in outside if key not in missing)),
        (*named(report.new), *(key for key in outside if key in missing)),
        (*changes, *named_pairs(report.adapted)),
        (*named_pairs(report.dropped), *other),
        (*named(report.unexpected), *result.unexpected_keys),
    )


def load_weights(net: nn.Module, source: Source) -> LoadReport:
    """`load_encoder` of a network around an encoder, `lineattn.hosts.weights.load_trunk` of any other."""
    return load_encoder(net, source) if isinstance(net, EncoderNetwork) else load_trunk(net, source)


def encoder_of(net: nn.Module) -> nn.Module:
    """The part of a network that a trunk's weights are for: its encoder, or all of it."""
    return net.get_encoder() if isinstance(net, EncoderNetwork) else net


def _before(prefix: str, key: str) -> str | None:
    """What a wrapper has put in front of a name, if it is one of the encoder."""
    at = key.find(prefix)
    return key[:at] if at == 0 or (at > 0 and key[at - 1] == ".") else None
