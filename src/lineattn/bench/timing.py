"""Timing of several calls against each other in one process.

Load and clock change from second to second, so the calls take turns, in an order that is drawn every round, and what
is compared are medians. Besides wall time the processor time of all threads is kept: on a busy machine only that is
worth comparing.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Large tensors are otherwise mapped and unmapped at each use, and page faults drown what is to be measured; a code
# that allocates more would look slower for that alone.
TUNED_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass
class Timing:
    """Milliseconds of one call: every round's wall time, and processor time summed over threads."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Median wall time, ms."""
        return statistics.median(self.wall_ms)

    @property
    def cpu(self) -> float:
        """Median processor time, ms."""
        return statistics.median(self.cpu_ms)


def take_turns(
    calls: dict[str, Callable[[], object]], *, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Timing]:
    """Times calls in turns, in another order each round: whoever comes first finds other caches than the next.

    Args:
        calls: What to time, by name; each is called once before, to warm up.
        rounds: How often each is timed.
        tick: Called after every timed call, for a progress bar.

    Example:
        >>> timings = take_turns({"short": lambda: sum(range(10)), "long": lambda: sum(range(100_000))}, rounds=5)
        >>> timings["short"].wall < timings["long"].wall
        True
    """
    timings = {name: Timing() for name in calls}
    for call in calls.values():
        call()
    draws, collects = random.Random(0), gc.isenabled()
    gc.disable()  # a collection goes through every object alive, whoever made it, and comes in anybody's turn
    try:
        for _ in range(rounds):
            gc.collect()
            for name in draws.sample(list(calls), len(calls)):
                cpu, wall = time.process_time(), time.perf_counter()
                calls[name]()
                timings[name].cpu_ms.append((time.process_time() - cpu) * 1e3)
                timings[name].wall_ms.append((time.perf_counter() - wall) * 1e3)
                tick()
    finally:
        if collects:
            gc.enable()
    return timings


def compared(timings: dict[str, Timing], reference: str) -> dict[str, dict[str, Any]]:
    """For a row each: medians ``wall_ms`` and ``cpu_ms``, and how many times those of ``reference`` they are.

    Example:
        >>> compared({"ours": Timing([2.0], [4.0]), "other": Timing([5.0], [6.0])}, "ours")["other"]
        {'wall_ms': 5.0, 'cpu_ms': 6.0, 'wall_ratio': 2.5, 'cpu_ratio': 1.5}
    """
    base = timings[reference]
    return {
        name: {
            "wall_ms": round(timing.wall, 3),
            "cpu_ms": round(timing.cpu, 3),
            "wall_ratio": round(timing.wall / base.wall, 3),
            "cpu_ratio": round(timing.cpu / base.cpu, 3),
        }
        for name, timing in timings.items()
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """``a`` of ``values = c * sizes**a``, by least squares of the logarithms.

    Example:
        >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, values))).slope
