"""Weights of a trunk into a network or a host, with a report of what became of each tensor."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lineattn import registry
from lineattn.errors import InputError
from lineattn.hosts.attach import make_method
from lineattn.hosts.called import called
from lineattn.hosts.depth_host import DepthHost
from lineattn.hosts.plans import find
from lineattn.hosts.sources import Source, Weights, read
from lineattn.nn.depth.base import DepthAttention
from lineattn.nn.sample.base import SampleAttention

_PREFIXES = ("module.", "_orig_mod.", "ema.module.", "model.", "net.", "backbone.")


@dataclass(frozen=True)
class LoadReport:
    """What became of each tensor.

    Attributes:
        source: Where the weights came from.
        loaded: Names in the network that were set.
        new: Names in the network that the source doesn't have and need not: the methods, what was put in with
            `lineattn.swap` and `lineattn.attach`, a fresh classifier.
        adapted: Of the loaded ones, those that were changed on the way, with what was done.
        dropped: Names in the source that were left out on purpose, with the reason.
        unexpected: Names in the source that the network has no place for.
    """

    source: str
    loaded: tuple[str, ...]
    new: tuple[str, ...] = ()
    adapted: tuple[tuple[str, str], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.loaded)} tensors loaded"]
        if self.new:
            lines.append(f"new, as they were: {some(self.new)}")
        lines += [f"adapted {name}: {change}" for name, change in self.adapted]
        for reason in dict.fromkeys(reason for _, reason in self.dropped):
            lines.append(f"dropped {some([name for name, why in self.dropped if why == reason])}: {reason}")
        if self.unexpected:
            lines.append(f"no place for: {some(self.unexpected)}")
        return "\n".join(lines)


def load_trunk(net: nn.Module, source: Source, *, strict_head: bool = False) -> LoadReport:
    """Loads the weights of a plain network into a host's backbone or into the plain network itself.

    All or nothing: an error leaves the network as it was. Wrappers (``state_dict``) and prefixes (``module.``,
    ``_orig_mod.``, ``model.``, ``net.``, ``backbone.``) are taken off, and timm's networks convert older layouts of
    their weights. As in timm, the first convolution of a network for another number of channels is made from that for
    three, and a classifier for another number of classes stays new.

    A source that has attention too, such as a checkpoint of a run, gives it to the sites where the same method stands
    in the same form; elsewhere it is dropped, with the reason. The method and its arguments are known of a checkpoint;
    of a bare state dict only names and shapes are, which some methods share. Of what `lineattn.swap`
    and `lineattn.attach(at=)` have put in only these are ever compared: it is loaded where the source has all of it and
    nothing else there. The attention of
    a plain network, in whose place another stands, is dropped.

    Args:
        net: A host or a plain network.
        source: A file (``.safetensors``, or what `torch.save` wrote), a state dict, or a name that
            `lineattn.hosts.sources.read` knows: ``timm/resnet50.a1_in1k``, ``torchvision/resnet50``.
        strict_head: Whether a classifier that is missing or of another class count is an error; else ours stays.

    Returns:
        What was loaded, what is new, what was adapted, dropped or unexpected.

    Raises:
        InputError: The source can't be read, or a trunk weight is missing, renamed, or of another shape.

    Example:
        >>> import lineattn
        >>> plain = lineattn.create_model("resnet20_cifar", num_classes=10)
        >>> host = lineattn.create_model("resnet20_cifar", attn="kcla", num_classes=7)
        >>> report = load_trunk(host, plain.state_dict())
        >>> [name for name, reason in report.dropped]
        ['fc.weight', 'fc.bias']
    """
    trunk, classifiers = trunk_of(net)
    heads = tuple(f"{path}." for path in classifiers)
    ours = trunk.state_dict()
    found = read(source)
    theirs = {strip(key, ours): value for key, value in found.tensors.items()}
    attention = {key: theirs.pop(key) for key in list(theirs) if key.startswith("sites.")}
    added = tuple(f"{path}." for path in added_in(trunk))
    needed = {key: value for key, value in ours.items() if not key.startswith(added)}
    theirs = _as_the_network_has_them(trunk, needed, theirs)
    adapted = _adapt_first_conv(trunk, ours, theirs)

    load: dict[str, Tensor] = {}
    new, dropped = [], []
    for place in added:
        here, there = (_under(place, tensors) for tensors in (ours, theirs))
        theirs = {key: value for key, value in theirs.items() if key not in there}
        if {key: value.shape for key, value in here.items()} == {key: value.shape for key, value in there.items()}:
            load |= there
        else:
            new += here
            dropped += [(key, "of other attention than stands there now") for key in there]
    for key, value in needed.items():
        given = theirs.get(key)
        if given is not None and given.shape == value.shape:
            load[key] = given
        elif key.startswith(heads) and not strict_head:
            new.append(key)
            if given is not None:
                dropped.append((key, f"{tuple(given.shape)} there, {tuple(value.shape)} here (another class count?)"))
        elif given is not None:
            raise InputError(
                f"{found.name}: {key} has shape {tuple(given.shape)}; the network's is {tuple(value.shape)}"
            )
        elif not key.endswith(".num_batches_tracked"):  # older files lack it, and nothing reads it
            raise _missing(found.name, key, [other for other in theirs if other not in ours])
    left = [key for key in theirs if key not in ours]
    dropped += [(key, "the network has no classifier there") for key in left if key.startswith(heads)]
    unexpected = tuple(key for key in left if not key.startswith(heads))
    _refuse_deeper(found.name, trunk, unexpected)
    sites: dict[str, Tensor] = {}
    if isinstance(net, DepthHost):
        sites, unfit = _fitting(net, attention, found)
        dropped += unfit
        new += [f"sites.{key}" for key in net.sites.state_dict() if f"sites.{key}" not in sites]
        net.sites.load_state_dict({key.removeprefix("sites."): value for key, value in sites.items()}, strict=False)
    else:
        dropped += [(key, "the network has no attention") for key in attention]
    trunk.load_state_dict(load, strict=False)
    return LoadReport(found.name, (*load, *sites), tuple(new), adapted, tuple(dropped), unexpected)


def _refuse_deeper(source: str, trunk: nn.Module, unexpected: Sequence[str]) -> None:
    """Blocks behind the last one of ours: the weights are of a deeper network, and ours would be a torso of it."""
    modules = dict(trunk.named_modules())
    for key in unexpected:
        parts = key.split(".")
        for i in range(1, len(parts)):
            row, block = ".".join(parts[:i]), parts[i]
            in_a_row = isinstance(modules.get(row), nn.Sequential | nn.ModuleList) and block.isdigit()
            if in_a_row and f"{row}.{block}" not in modules:
                raise InputError(f"{source}: has {key!r}, a block more than {row!r} here; is it of a deeper network?")


def trunk_of(net: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The network without attention, which a plain one is itself, and the paths of its classifiers.

    Raises:
        InputError: No plan knows the network.
    """
    trunk, plan = (cast(nn.Module, net.backbone), net.plan) if isinstance(net, DepthHost) else (net, find(net))
    return trunk, plan.classifiers(trunk)


def added_in(net: nn.Module) -> dict[str, nn.Module]:
    """What `lineattn.swap` and `lineattn.attach` have put into a network, as it is called there, by its names."""
    found: dict[str, nn.Module] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        method, inside = called(module), path.rpartition(".")[0] in found
        if isinstance(method, SampleAttention) and method.added and not inside:
            found[path] = module
    return found


def strip(key: str, known: Mapping[str, Any]) -> str:
    """A name without what wrappers have put in front of it."""
    while key not in known:
        prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
        if prefix is None:
            break
        key = key.removeprefix(prefix)
    return key


def some(names: Sequence[str]) -> str:
    """The first names, and how many there are."""
    shown = ", ".join(names[:4])
    return f"{shown}, ... {len(names)} in all" if len(names) > 4 else shown


def _under(place: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key.startswith(place)}


def _as_the_network_has_them(
    trunk: nn.Module, ours: Mapping[str, Tensor], theirs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A network of timm may convert what doesn't fit: the layout of the first release, or of another image size."""
    module = sys.modules[type(trunk).__module__]
    convert: Callable[..., dict[str, Tensor]] | None = getattr(module, "checkpoint_filter_fn", None)
    fits = all(key in theirs and theirs[key].shape == value.shape for key, value in ours.items())
    if convert is None or fits:
        return theirs
    try:
        return convert(dict(theirs), trunk)
    except Exception:  # anybody's code, on the weights of any network: what doesn't fit is said below
        return theirs


def _adapt_first_conv(
    trunk: nn.Module, ours: Mapping[str, Tensor], theirs: dict[str, Tensor]
) -> tuple[tuple[str, str], ...]:
    """Sums or repeats the first kernel's channels as timm does, in place of ``theirs``."""
    first = next((name for name, module in trunk.named_modules() if isinstance(module, nn.Conv2d)), None)
    key = f"{first}.weight"
    if key not in theirs:
        return ()
    there, here = theirs[key].shape, ours[key].shape
    if len(there) != 4 or there[1] != 3 or here[1] == 3:
        return ()
    from timm.models import adapt_input_conv

    theirs[key] = adapt_input_conv(here[1], theirs[key])
    return ((key, f"for 3 channels there, for {here[1]} here"),)


def _fitting(
    host: DepthHost, attention: Mapping[str, Tensor], found: Weights
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """What of the attention goes to which site, and what doesn't, with the reason."""
    load: dict[str, Tensor] = {}
    dropped: list[tuple[str, str]] = []
    for site in dict.fromkeys(key.split(".")[1] for key in attention):
        theirs = {key: value for key, value in attention.items() if key.startswith(f"sites.{site}.")}
        reason = _unfit(host, site, theirs, found)
        if reason is None:
            load |= theirs
        else:
            dropped += [(key, reason) for key in theirs]
    return load, dropped


def _unfit(host: DepthHost, site: str, theirs: Mapping[str, Tensor], found: Weights) -> str | None:
    if site not in host.sites:
        return "the network has no attention there"
    here = _method(host)
    if found.method is not None and found.method != here:
        return f"of {found.method}; the network has {here}"
    ours = {f"sites.{site}.{key}": value for key, value in host.sites[site].state_dict().items()}
    if odd := ours.keys() ^ theirs.keys():
        if odd == {gain := f"sites.{site}.gain"}:
            there, here = ("identity", "paper") if gain in theirs else ("paper", "identity")
            return f"trained with init={there!r}; the network has init={here!r}"
        return f"no {here} of the same form: {_difference(ours, theirs, site)}"
    if reshaped := [key for key, value in ours.items() if value.shape != theirs[key].shape]:
        key = reshaped[0].removeprefix(f"sites.{site}.")
        return f"no {here} of the same form: {key} is of another shape"
    return _otherwise_built(host, site, found) if found.method is not None else None


def _otherwise_built(host: DepthHost, site: str, found: Weights) -> str | None:
    """Arguments may change what is computed without changing a shape: the width of heads, for one."""
    ours = cast(DepthAttention, host.sites[site])
    with torch.random.fork_rng(devices=[]):
        theirs = make_method(type(ours), ours.site, host.plan, "paper", found.arguments)
    if theirs.extra_repr() == ours.extra_repr():
        return None
    return f"trained with {theirs.extra_repr()}; the network has {ours.extra_repr()}"


def _difference(ours: Iterable[str], theirs: Iterable[str], site: str) -> str:
    def names(keys: Iterable[str], others: Iterable[str]) -> str:
        return some(sorted(key.removeprefix(f"sites.{site}.") for key in set(keys) - set(others)))

    more, less = names(theirs, ours), names(ours, theirs)
    return "; ".join([*([f"it has {more}"] if more else []), *([f"it has no {less}"] if less else [])])


def _method(host: DepthHost) -> str:
    cls = type(next(iter(host.sites.values())))
    cards = map(registry.get, registry.list_methods("depth"))
    return next((card.name for card in cards if card.cls is cls), cls.__name__)


def _missing(source: str, key: str, unplaced: list[str]) -> InputError:
    parts = key.split(".")
    for i in range(1, len(parts)):
        place = ".".join(parts[:i])
        if any(other.startswith(f"{place}.attention.") for other in unplaced):
            return InputError(
                f"{source}: other attention stands at {place!r} there; swap it here too, or take weights of the plain "
                "network"
            )
    near = difflib.get_close_matches(key, unplaced, n=1)
    hint = f"; it has {near[0]!r} (renamed?)" if near else "; is it of another network?"
    return InputError(f"{source}: the trunk's {key!r} is missing{hint}")
