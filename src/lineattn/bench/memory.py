"""External attention at the operator level: ours, plain and published forms, the floor of two products, and softmax.

The projections around the operator are the same for all and left out. Softmax attention has as many channels in eight
heads, and is timed up to the length where it still takes less than a second or so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, scaled_dot_product_attention

from lineattn.bench.timing import compared, exponent, take_turns
from lineattn.measure import SavedBytes
from lineattn.ops.memory import external_attention

POSITIONS = (196, 1024, 4096, 16384, 65536)
CHANNELS, SLOTS, HEADS = 512, 64, 8
SOFTMAX_UP_TO = 4096
SETTING = {"batch_size": 1, "channels": CHANNELS, "slots": SLOTS}

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def two_products(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """No normalisation: what every form pays at least."""
    return (x @ keys.T) @ values


def ours_channels(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Ours on a map ``(B, C, N)``, without a copy."""
    return external_attention(x.mT, keys, values).mT


def two_linears(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The plain module of two linear layers, the popular one, in ``(B, N, C)``."""
    alpha = torch.softmax(x @ keys.T, dim=1)
    alpha = alpha / alpha.sum(dim=2, keepdim=True)
    return alpha @ values


def published_channels(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The authors' order of operations, in their layout ``(B, C, N)``, which ``x`` has to be in."""
    alpha = torch.softmax(conv1d(x, keys[:, :, None]), dim=-1)
    alpha = alpha / (1e-9 + alpha.sum(dim=1, keepdim=True))
    return conv1d(alpha, values.T[:, :, None])


def softmax_attention(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """PyTorch's own, of every position to every position; without a memory."""
    heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return scaled_dot_product_attention(heads, heads, heads)


FORMS: dict[str, Form] = {
    "ours": external_attention,
    "two products": two_products,
    "two linear layers": two_linears,
    "ours, B C N": ours_channels,
    "published, B C N": published_channels,
    "softmax, 8 heads": softmax_attention,
}
_CHANNELS_FIRST = (ours_channels, published_channels)


def measure(
    *,
    rounds: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    positions: Sequence[int] = POSITIONS,
) -> list[dict[str, Any]]:
    """One row for each length, mode and form, and the exponents of growth.

    Args:
        rounds: Timed calls a row.
        seed: Seed of positions and memory.
        tick: Called after every timed call.
        positions: Lengths.

    Returns:
        Rows with ``positions``, ``mode`` and ``name``: medians ``wall_ms`` and ``cpu_ms`` and how many times slower
        than ours (``wall_ratio``, ``cpu_ratio``), with a backward ``saved_mb`` (10^6 bytes, beyond the arguments); in
        the last rows ``exponent``, of processor time and of saved bytes.
    """
    rows = []
    for length in positions:
        draws = torch.Generator().manual_seed(seed)
        x, keys, values = (
            torch.randn(shape, generator=draws).requires_grad_()
            for shape in ((1, length, CHANNELS), (SLOTS, CHANNELS), (SLOTS, CHANNELS))
        )
        with torch.no_grad():
            keys /= CHANNELS**0.5  # logits of order one
        given = {
            name: (x.detach().mT.contiguous().requires_grad_() if form in _CHANNELS_FIRST else x, keys, values)
            for name, form in _forms(length).items()
        }
        saved = {name: _saved_bytes(FORMS[name], arguments) for name, arguments in given.items()}
        for mode, bind in (("forward", _forward), ("forward + backward", _both)):
            steps = {name: bind(FORMS[name], arguments) for name, arguments in given.items()}
            times = compared(take_turns(steps, rounds=rounds, tick=tick), "ours")
            for name in steps:
                row = {"positions": length, "mode": mode, "name": name} | times[name]
                rows.append(row | ({"saved_mb": saved[name] / 1e6} if bind is _both else {}))
    return rows + _exponents(rows)


def calls(rounds: int) -> int:
    """How often `measure` will call ``tick``."""
    return 2 * rounds * sum(len(_forms(length)) for length in POSITIONS)


def _forms(length: int) -> dict[str, Form]:
    return {name: form for name, form in FORMS.items() if form is not softmax_attention or length <= SOFTMAX_UP_TO}


def _forward(form: Form, arguments: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    def step() -> None:
        with torch.no_grad():
            form(*arguments)

    return step


def _both(form: Form, arguments: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    cotangent = torch.randn_like(form(*arguments))
    return lambda: torch.autograd.grad(form(*arguments), arguments, cotangent, allow_unused=True)


def _saved_bytes(form: Form, arguments: tuple[Tensor, Tensor, Tensor]) -> int:
    """Beyond the arguments."""
    saved = SavedBytes()
    with saved.counting(torch.nn.Module(), *arguments):
        out = form(*arguments)
    del out
    return saved.total


def _exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for what, mode, figure in (
        ("forward", "forward", "cpu_ms"),
        ("forward + backward", "forward + backward", "cpu_ms"),
        ("saved bytes", "forward + backward", "saved_mb"),
    ):
        for name in FORMS:
            points = [(row["positions"], row[figure]) for row in rows if (row["mode"], row["name"]) == (mode, name)]
            if len(points) > 1:
                sizes, values = zip(*points, strict=True)
                row = {"mode": f"exponent, {what}", "name": name, "exponent": round(exponent(sizes, values), 3)}
                found.append(row)
    return found
