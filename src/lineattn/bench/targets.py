"""What the figures of the benches are meant to reach on the setting that they are stated for, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lineattn.bench.scan import SOFTMAX


@dataclass(frozen=True)
class Target:
    """A bound of one figure: what must be met, and what would be better still.

    Attributes:
        where: Subject and values that a row has to have.
        figure: Key of the row that is bounded.
        must: The bound.
        stretch: The harder bound.
        most: Whether the figure may be at most this, or must be at least this.
    """

    where: dict[str, Any]
    figure: str
    must: float
    stretch: float | None = None
    most: bool = True

    def met(self, value: float, bound: float) -> bool:
        """Whether a figure keeps a bound."""
        return value <= bound if self.most else value >= bound

    def verdict(self, row: dict[str, Any]) -> str:
        """A bound and whether a row keeps it: the harder one where it does, else the one that it must."""
        value, sign = row[self.figure], "≤" if self.most else "≥"
        if self.stretch is not None and self.met(value, self.stretch):
            return f"{sign} {self.stretch:g} met (stretch)"
        return f"{sign} {self.must:g} {'met' if self.met(value, self.must) else 'MISSED'}"


def _plain(network: str, mode: str, figure: str, must: float, stretch: float) -> Target:
    return Target({"subject": "depth", "network": network, "mode": mode, "method": "kcla"}, figure, must, stretch)


def _layer(mode: str, must: float, stretch: float) -> Target:
    where = {"subject": "depth", "part": "layer", "size": "8x256x56x56", "mode": mode, "name": "published"}
    return Target(where, "cpu_ratio", must, stretch, most=False)


def _scan(mode: str, name: str, must: float, stretch: float | None = None) -> Target:
    where = {"subject": "scan", "length": 2048, "mode": mode, "name": name}
    return Target(where, "cpu_ratio", must, stretch, most=False)


def _memory(positions: int, mode: str, name: str, must: float) -> Target:
    where = {"subject": "memory", "positions": positions, "mode": mode, "name": name}
    return Target(where, "cpu_ratio", must, most=False)


TARGETS = (
    _plain("resnet50", "evaluation", "cpu_ratio", 1.25, 1.15),
    _plain("resnet50", "evaluation, trunk folded", "cpu_ratio", 1.25, 1.15),
    _plain("resnet50", "training step", "cpu_ratio", 1.35, 1.2),
    _plain("resnet50", "saved", "saved_ratio", 1.45, 1.1),
    _plain("resnet56_bottleneck_cifar", "saved", "saved_ratio", 1.5, 1.15),
    _layer("evaluation", 4, 4.5),
    _layer("training step", 3, 4),
    Target({"subject": "depth", "part": "chain", "name": "ours"}, "saved_maps", 0.15, 0.06),
    Target({"subject": "depth", "part": "growth"}, "exponent", 1.05, 1.0),
    _scan("forward", "python loop", 18, 25),
    _scan("forward", SOFTMAX, 8, 12),
    _scan("forward + backward", "python loop", 25),
    _scan("forward + backward", SOFTMAX, 7),
    Target({"subject": "scan", "mode": "saved", "name": "ours"}, "saved_mb", 0),
    *(_memory(n, "forward", "two products", 0.8) for n in (16384, 65536)),
    *(
        _memory(n, mode, "two linear layers", 0.95)
        for n in (4096, 16384, 65536)
        for mode in ("forward", "forward + backward")
    ),
    _memory(4096, "forward", "softmax, 8 heads", 30),
    Target({"subject": "memory", "positions": 65536, "name": "ours"}, "saved_mb", 0.55 * 33.5),  # of the plain one's
    Target({"subject": "memory", "name": "ours"}, "exponent", 1.05),
)


def find(subject: str, row: dict[str, Any]) -> Target | None:
    """The target of a row, if it has one.

    Example:
        >>> row = {"part": "chain", "name": "ours", "saved_maps": 0.1}
        >>> find("depth", row).verdict(row)
        '≤ 0.15 met'
    """
    known = {"subject": subject} | row
    for target in TARGETS:
        if target.figure in row and all(known.get(key) == value for key, value in target.where.items()):
            return target
    return None
