"""One more token: a step of the recurrence against softmax attention over a cache of all earlier tokens.

The operators alone, with a batch of one and as many heads on both sides. Softmax attention's queries are as wide as the
values, and its cache holds the keys and values of the context. Beside them a whole layer of MetaLA, projections and
all, that has really read the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from lineattn.bench.timing import Timing, compared, take_turns
from lineattn.nn.token.metala import MetaLA
from lineattn.nn.token.recurrent import RecurrentState
from lineattn.ops.scan import scan_step

CONTEXTS = (1024, 8192, 65536)
BATCH, HEADS, KEYS, VALUES = 1, 4, 64, 128
SETTING = {"batch_size": BATCH, "heads": HEADS, "key_width": KEYS, "value_width": VALUES, "decays": "per key channel"}
SOFTMAX = f"softmax over a cache (SDPA, d={VALUES})"
LAYER = "MetaLA, the layer"

# Steps of one timed call: a single one is shorter than the clock of processor time can tell.
STEPS = 100


def measure(
    *,
    rounds: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    contexts: Sequence[int] = CONTEXTS,
) -> list[dict[str, Any]]:
    """One row for each context and form.

    Args:
        rounds: Timed calls a row, of a hundred steps each.
        seed: Seed of the tensors.
        tick: Called after every timed call.
        contexts: Tokens that came before.

    Returns:
        Rows with ``context`` and ``name``: medians ``wall_us`` and ``cpu_us`` of one step and how many times slower
        than ours (``wall_ratio``, ``cpu_ratio``), and ``state_mb``, what is kept between steps (10^6 bytes).
    """
    rows = []
    for context in contexts:
        draws = torch.Generator().manual_seed(seed)
        q, gate = (torch.randn(BATCH, HEADS, KEYS, generator=draws) for _ in range(2))
        g = logsigmoid(gate) / 16
        v, state = (torch.randn(BATCH, HEADS, *shape, generator=draws) for shape in ((VALUES,), (KEYS, VALUES)))
        query = torch.randn(BATCH, HEADS, 1, VALUES, generator=draws)
        cache = [torch.randn(BATCH, HEADS, context, VALUES, generator=draws) for _ in range(2)]
        layer = MetaLA(HEADS * VALUES, HEADS, init_std=None)
        token, read = _read(layer, context, draws)
        steps = {
            "ours": _repeat(scan_step, q, -torch.expm1(g), v, g, state),
            LAYER: _repeat(layer.step, token, read),
            SOFTMAX: _repeat(scaled_dot_product_attention, query, *cache),
        }
        kept = {"ours": [state], LAYER: read, SOFTMAX: cache}
        timings = {
            name: Timing(*([ms * 1e3 / STEPS for ms in series] for series in (timing.wall_ms, timing.cpu_ms)))
            for name, timing in take_turns(steps, rounds=rounds, tick=tick).items()
        }
        for name, figures in compared(timings, "ours").items():
            micro = {"wall_us": figures.pop("wall_ms"), "cpu_us": figures.pop("cpu_ms")}
            size = sum(t.numel() * t.element_size() for t in kept[name]) / 1e6
            rows.append({"context": context, "name": name} | micro | figures | {"state_mb": size})
    return rows


def calls(rounds: int) -> int:
    """How often `measure` will call ``tick``."""
    return rounds * len(CONTEXTS) * 3


@torch.no_grad()
def _read(layer: MetaLA, context: int, draws: torch.Generator) -> tuple[Tensor, RecurrentState]:
    """A token ``(1, C)``, and the state after so many before it."""
    tokens = torch.randn(1, context + 1, layer.channels, generator=draws)
    return tokens[:, -1], layer(tokens[:, :-1])[1]


def _repeat(form: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> None:
        for _ in range(STEPS):
            form(*arguments)

    return call
