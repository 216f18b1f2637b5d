"""Where methods stand in a network, and how far their state reaches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lineattn.errors import InputError
from lineattn.hosts.step import Step
from lineattn.nn.depth.base import Site


@dataclass(frozen=True)
class StateScope:
    """How far the state of a depth method reaches.

    Attributes:
        carry: Whether it goes on at a new stage (through a transition) or starts anew.
        every: Within a stage, sum up (or start anew) at each ``every``-th block.
        anchors: The same at these blocks of a stage, counted from 0; ``(11,)`` is what the published ImageNet
            networks do.

    Example:
        >>> StateScope.parse("per_stage"), StateScope.parse("anchors=11").anchors
        (StateScope(carry=False, every=None, anchors=()), (11,))
    """

    carry: bool = True
    every: int | None = None
    anchors: tuple[int, ...] = ()

    @classmethod
    def parse(cls, scope: str | StateScope | None, *, carries: bool = True) -> StateScope:
        """From the words of a recipe: ``carry``, ``per_stage``, ``every=k`` or ``anchors=i,j``.

        Args:
            scope: The words, a scope, or ``None`` for the method's own.
            carries: Whether the method can take its state into a new stage; what ``None``, ``every`` and
                ``anchors`` leave open.

        Raises:
            InputError: The words are none of these, or the method can't carry.
        """
        if scope is None:
            scope = cls(carries)
        elif isinstance(scope, str):
            if scope in ("carry", "per_stage"):
                scope = cls(scope == "carry")
            elif match := re.fullmatch(r"every=([1-9]\d*)", scope):
                scope = cls(carries, every=int(match[1]))
            elif match := re.fullmatch(r"anchors=(\d+(?:,\d+)*)", scope):
                scope = cls(carries, anchors=tuple(int(i) for i in match[1].split(",")))
            else:
                raise InputError(f"scope is {scope!r}; it must be 'carry', 'per_stage', 'every=6' or 'anchors=11'")
        if scope.carry and not carries:
            raise InputError("scope='carry': this method can't take its state into a new stage; use 'per_stage'")
        return scope

    def anchored(self, index: int) -> bool:
        """Whether block ``index`` of a stage, other than the first, begins a new stretch."""
        return index in self.anchors or (self.every is not None and index % self.every == 0)


def derive(
    walked: Iterable[tuple[Step, torch.Size]],
    scope: StateScope,
    *,
    carries: bool,
    norm: Literal["batch", "layer"] = "batch",
) -> dict[str, Site]:
    """The sites of a network, by path, from the shapes that its steps put out.

    Args:
        walked: The steps and the shapes of their outputs, as maps.
        scope: How far the state reaches.
        carries: Whether a stretch that ends is summed up for the next one or forgotten.
        norm: How the network normalises.
    """
    sites: dict[str, Site] = {}
    stage = index = 0
    before: torch.Size | None = None
    for step, shape in walked:
        if step.site:
            entry: Literal["start", "continue", "transition"] = "continue"
            previous, stride = None, 1
            if before is None or (index == 0 and not scope.carry):
                entry = "start"
            elif index == 0 or scope.anchored(index):
                entry = "transition" if carries else "start"
            if before is not None and entry == "transition":
                previous, stride = before[1], round(before[2] / shape[2])
            sites[step.path] = Site(shape[1], stage, index, entry, previous, stride, norm)
            before, index = shape, index + 1
        if step.stage_end:
            stage, index = stage + 1, 0
    if not sites:
        raise InputError("the network has no block that attention over depth could stand behind; take another one")
    entries = [site.entry for site in sites.values()]
    for (path, site), following in zip(list(sites.items()), [*entries[1:], "start"], strict=True):
        if site.entry != "continue" and following != "continue":
            sites[path] = replace(site, alone=True)
    return sites
