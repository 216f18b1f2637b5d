"""What methods there are: one `Card` a method, recorded where the class stands.

`@register` only records. The methods of the package are found by importing every module under `lineattn.nn` in
sorted order, those of other packages through the entry point group ``lineattn.methods``; both happen at the first
question, not at import.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Literal, TypeVar

from lineattn.errors import InputError, unknown

Axis = Literal["depth", "sample", "token"]
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Card:
    """What a method is, for tables, help texts and contract tests.

    Attributes:
        name: Registry name, lower snake case.
        axis: What attends to what: ``depth``, ``sample`` or ``token``.
        cls: The module class.
        title: The method's full name.
        paper: Title and year of its source.
        arxiv: arXiv identifier, or ``None`` where there is none.
        cost: Time for the whole network in the length of the axis, e.g. ``O(L)``.
        state: Memory carried along the axis, e.g. ``O(1)``.
        no_gradient: Parameters that provably get a zero gradient where a stretch of layers starts, each with the
            algebraic reason.
        no_gradient_alone: The same where a stretch is one layer.
        start: What the published form does to a network before the first step, where it is not the identity; it
            completes "with init='paper' the network starts changed: ".
    """

    name: str
    axis: Axis
    cls: type
    title: str
    paper: str
    arxiv: str | None
    cost: str
    state: str
    no_gradient: tuple[tuple[str, str], ...] = ()
    no_gradient_alone: tuple[tuple[str, str], ...] = ()
    start: str = ""

    @property
    def where(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"


_CARDS: dict[str, Card] = {}


def register(
    name: str,
    *,
    axis: Axis,
    title: str,
    paper: str,
    arxiv: str | None,
    cost: str,
    state: str,
    no_gradient: tuple[tuple[str, str], ...] = (),
    no_gradient_alone: tuple[tuple[str, str], ...] = (),
    start: str = "",
) -> Callable[[_Class], _Class]:
    """Records a method class under ``name``; the class itself is returned unchanged.

    Raises:
        InputError: The name is taken by another class; both places are named.
    """

    def record(cls: _Class) -> _Class:
        card = Card(name, axis, cls, title, paper, arxiv, cost, state, no_gradient, no_gradient_alone, start)
        held = _CARDS.get(name)
        if held is not None and held.where != card.where:
            raise InputError(f"two methods are called {name!r}: {held.where} and {card.where}; rename one")
        _CARDS[name] = card
        return cls

    return record


@cache
def _scan() -> None:
    package = importlib.import_module("lineattn.nn")
    modules = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    for name in sorted(module.name for module in modules):
        importlib.import_module(name)
    for point in sorted(entry_points(group="lineattn.methods"), key=lambda point: point.name):
        point.load()


def get(name: str, *, axis: Axis | None = None) -> Card:
    """The card of a method.

    Raises:
        InputError: No such method on that axis; the nearest names are given.
    """
    _scan()
    card = _CARDS.get(name)
    if card is None or (axis is not None and card.axis != axis):
        raise unknown(f"{axis} method" if axis else "method", name, list_methods(axis))
    return card


def list_methods(axis: Axis | None = None) -> list[str]:
    """Sorted names of the registered methods, of one axis or of all."""
    _scan()
    return sorted(name for name, card in _CARDS.items() if axis is None or card.axis == axis)
