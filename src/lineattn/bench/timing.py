"""Timing of several calls against each other in one process.

Load and clock change from second to second, so the calls take turns, in an order that is reversed every round, and
what is compared are medians. Besides wall time the processor time of all threads is kept: on a busy machine only that
is worth comparing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
    """Times calls in turns.

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
    gc.collect()
    for i in range(rounds):
        for name in list(calls) if i % 2 == 0 else list(calls)[::-1]:
            cpu, wall = time.process_time(), time.perf_counter()
            calls[name]()
            timings[name].cpu_ms.append((time.process_time() - cpu) * 1e3)
            timings[name].wall_ms.append((time.perf_counter() - wall) * 1e3)
            tick()
    return timings
