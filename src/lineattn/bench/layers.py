"""KCLA by itself: one layer against the published form, what a layer of a chain saves, and growth with depth.

Everything is in channels_last and as the paper starts (``init="paper"``). A layer stands in the middle of a chain: a
state comes in, and in training gradients of the state that goes out come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lineattn.bench.against import Build
from lineattn.bench.depth import ran
from lineattn.bench.published import PublishedKCLA
from lineattn.bench.timing import compared, exponent, take_turns
from lineattn.measure import SavedBytes
from lineattn.nn.depth.base import Site
from lineattn.nn.depth.kcla import KCLA

Shape = tuple[int, int, int, int]

HEAD_DIM = 32  # the paper's on ImageNet
BEFORE = 4  # layers before the single one: what its backward makes again is then of middling length
SINGLE: tuple[Shape, ...] = ((8, 256, 56, 56), (8, 1024, 14, 14))
CHAIN_MAP: Shape = (16, 64, 16, 16)
CHAIN_DEPTH = 64
GROWTH_MAP: Shape = (2, 64, 8, 8)
GROWTH_DEPTHS = (125, 250, 500, 1000)


class Ours(nn.Module):
    """`KCLA` as a module of ``(x, state)``."""

    def __init__(self, channels: int, head_dim: int, *, start: bool = False) -> None:
        super().__init__()
        self.attention = KCLA(Site(channels, entry="start" if start else "continue"), head_dim=head_dim, init="paper")

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.attention(x, None, state)


class Chain(nn.Module):
    r"""Layers after blocks that keep nothing but what they put out, :math:`x_t = \mathrm{ReLU}(\tilde x_{t-1} / 2)`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(torch.relu(x / 2), state)
        return x


def measure(
    *,
    rounds: int,
    against: dict[str, Build] | None = None,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    single: Sequence[Shape] = SINGLE,
    chain: tuple[Shape, int] = (CHAIN_MAP, CHAIN_DEPTH),
    growth: tuple[Shape, Sequence[int]] = (GROWTH_MAP, GROWTH_DEPTHS),
) -> list[dict[str, Any]]:
    """Rows of single layers, of what a chain saves, and of growth with depth.

    Args:
        rounds: Timed calls a row.
        against: Other implementations to time beside ours and the published form, by name.
        seed: Seed of weights, maps and drop path.
        tick: Called after every timed call.
        single: Maps of the single layers.
        chain: Map and depth of the chain whose saved bytes are counted.
        growth: Map and depths of the chains whose growth is fitted.

    Returns:
        Rows with ``part`` (``layer``, ``chain``, ``growth``), ``size``, ``mode`` and ``name``. Timed ones have medians
        ``wall_ms`` and ``cpu_ms``, and for a layer how many times slower than ours, ``wall_ratio`` and ``cpu_ratio``;
        a chain ``saved_mb`` (10^6 bytes, beyond the blocks' outputs) and ``saved_maps`` a layer; a fit ``exponent``.
    """
    builds: dict[str, Build] = {"ours": Ours, "published": PublishedKCLA} | (against or {})
    rows = []
    for shape in single:
        rows += _layer_rows(shape, builds, rounds, seed, tick)
    torch.manual_seed(seed)
    for name, start in {"ours": _ours_first, "published": PublishedKCLA}.items():
        rows.append(_chain_row(name, _chain(start, builds[name], *chain), *chain))
    rows += _growth_rows(*growth, rounds, seed, tick)
    return rows


def calls(rounds: int, against: dict[str, Build] | None = None) -> int:
    """How often `measure` will call ``tick``."""
    return rounds * (2 * len(SINGLE) * (2 + len(against or {})) + len(GROWTH_DEPTHS))


def _ours_first(channels: int, head_dim: int) -> nn.Module:
    return Ours(channels, head_dim, start=True)


def _native(name: str) -> dict[str, str]:
    return ran("kcla") if name == "ours" else {}


def _draw(shape: Shape, seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.relu_().contiguous(memory_format=torch.channels_last)


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _layer_rows(
    shape: Shape, builds: dict[str, Build], rounds: int, seed: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    maps = [_draw(shape, seed + i) for i in range(BEFORE + 1)]
    rows = []
    for mode, bind in (("evaluation", _evaluation), ("training step", _training_step)):
        steps = {}
        for name, build in builds.items():
            torch.manual_seed(seed)
            chain = _chain(_ours_first if name == "ours" else build, build, shape, BEFORE + 1)
            steps[name] = bind(chain.train(mode == "training step"), maps)
        times = compared(take_turns(steps, rounds=rounds, tick=tick), "ours")
        rows += [
            {"part": "layer", "size": _text(shape), "mode": mode, "name": name} | times[name] | _native(name)
            for name in steps
        ]
    return rows


def _state_before(chain: Chain, maps: Sequence[Tensor]) -> Any:
    """What the layers before the last one make of their maps."""
    state = None
    for layer, x in zip(chain.layers[:-1], maps[:-1], strict=True):
        _, state = layer(x, state)
    return state


def _evaluation(chain: Chain, maps: Sequence[Tensor]) -> Callable[[], object]:
    with torch.no_grad():
        state = _state_before(chain, maps)
    layer, x = chain.layers[-1], maps[-1]

    def step() -> None:
        with torch.no_grad():
            layer(x, state)

    return step


def _training_step(chain: Chain, maps: Sequence[Tensor]) -> Callable[[], object]:
    """Forward and backward, with a gradient for everything that came in, from everything that went out."""
    state = _state_before(chain, [x.clone().requires_grad_() for x in maps])
    leaves: dict[int, Tensor] = {}  # a tensor that stands in the state twice is still one
    state = pytree.tree_map_only(Tensor, lambda t: leaves.setdefault(id(t), t.detach().requires_grad_()), state)
    layer, x = chain.layers[-1], maps[-1].clone().requires_grad_()
    wanted = [x, *_tensors(state), *layer.parameters()]
    cotangents: list[Tensor] = []

    def step() -> None:
        outs = [t for t in _tensors(layer(x, state)) if t.grad_fn is not None]
        if not cotangents:
            cotangents.extend(torch.randn_like(t) for t in outs)
        torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)

    return step


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a state, each once."""
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}.values())


def _chain(first: Build, build: Build, shape: Shape, depth: int) -> Chain:
    layers = [first(shape[1], HEAD_DIM), *(build(shape[1], HEAD_DIM) for _ in range(depth - 1))]
    return Chain(layers).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _saved_beyond_blocks(chain: Chain, shape: Shape) -> int:
    """Bytes that the attention of a chain adds to the outputs of its blocks."""
    x = _draw(shape, seed=0).requires_grad_()
    saved = SavedBytes()
    with saved.counting(chain, x):
        out = chain.train()(x)
    del out
    return saved.total - len(chain.layers) * x.nbytes


def _chain_row(name: str, chain: Chain, shape: Shape, depth: int) -> dict[str, Any]:
    saved = _saved_beyond_blocks(chain, shape)
    row = {"part": "chain", "size": f"{depth} layers of {_text(shape)}", "mode": "saved", "name": name}
    row |= {"saved_mb": round(saved / 1e6, 3), "saved_maps": round(saved / _draw(shape, 0).nbytes / depth, 4)}
    return row | _native(name)


def _growth_rows(
    shape: Shape, depths: Sequence[int], rounds: int, seed: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    x = _draw(shape, seed).requires_grad_()
    torch.manual_seed(seed)
    chains = {depth: _chain(_ours_first, Ours, shape, depth) for depth in depths}
    saved = {depth: _saved_beyond_blocks(chain, shape) for depth, chain in chains.items()}

    def bind(chain: Chain) -> Callable[[], object]:
        wanted = [x, *chain.parameters()]
        return lambda: torch.autograd.grad(chain(x).sum(), wanted)

    steps = {str(depth): bind(chain) for depth, chain in chains.items()}
    timings = take_turns(steps, rounds=rounds, tick=tick)
    rows = [
        {"part": "growth", "size": _text(shape), "mode": "training step", "name": f"ours, {depth} layers"}
        | {"wall_ms": round(timing.wall, 3), "cpu_ms": round(timing.cpu, 3), "saved_mb": round(saved[depth] / 1e6, 3)}
        | _native("ours")
        for depth, timing in zip(depths, timings.values(), strict=True)
    ]
    fits = {"processor time": [timing.cpu for timing in timings.values()], "saved bytes": list(saved.values())}
    size = f"{min(depths)} to {max(depths)} layers"
    return rows + [
        {"part": "growth", "size": size, "mode": "exponent", "name": name}
        | {"exponent": round(exponent(depths, values), 3)}
        | _native("ours")
        for name, values in fits.items()
    ]
