"""What passes the sites of a network, kept; and the same sites run again on it with one map changed.

A *stretch* is a row of sites through which a state goes on in one width and resolution: a stage, unless the reach of
the state was chosen otherwise. At its first site it begins from nothing, or from all before summed up as one layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lineattn.errors import InputError
from lineattn.hosts.depth_host import DepthHost
from lineattn.nn.depth.base import DepthAttention

# What a map is changed by, over its own root mean square: small, so that the answer is a derivative, and in double
# precision far above rounding.
_STEP = 1e-6


@dataclass(frozen=True)
class Passage:
    """One site in one pass.

    Attributes:
        name: Path of the site in the host.
        method: A copy of what stands there, in evaluation mode.
        out: What it was given: the block's output, or for ``position="branch"`` its branch, ``(B, C, H, W)``.
        shortcut: What the block adds to its branch, where the method asks for it.
        state: What arrived.
        after: What it returned, shaped like ``out``.
    """

    name: str
    method: DepthAttention
    out: Tensor
    shortcut: Tensor | None
    state: Any
    after: Tensor

    def weights(self) -> dict[str, Tensor]:
        """What the method says of itself here, see `lineattn.nn.depth.base.DepthAttention.weights`."""
        with torch.no_grad():
            return self.method.weights(self.out, self.shortcut, self.state)


@dataclass(frozen=True)
class Stretch:
    """Sites through which a state goes on.

    Attributes:
        stage: Number of its stage, from 1; with a second number where the state begins anew within a stage.
        passages: Its sites, in order.
        summed_up: Whether it begins with all before it as one layer.
    """

    stage: str
    passages: tuple[Passage, ...]
    summed_up: bool

    @property
    def sources(self) -> list[str]:
        """What its layers can attend to, in order."""
        return [*(["earlier"] if self.summed_up else []), *self.layers]

    @property
    def layers(self) -> list[str]:
        return [str(i + 1) for i in range(len(self.passages))]


def record(host: nn.Module, images: Tensor) -> list[Stretch]:
    """Runs a host in evaluation mode and keeps what passes its sites.

    Args:
        host: A network with attention over depth; left as it was found.
        images: ``(B, C, H, W)``.

    Raises:
        InputError: The network has no attention over depth, or something in it is not finite.
    """
    if not isinstance(host, DepthHost):
        raise InputError("this network has no attention over depth (--model.attn none); analyse a run that has")
    passages: list[Passage] = []
    training = host.training
    host.eval()
    copies = {module: (name, cast(DepthAttention, copy.deepcopy(module))) for name, module in host.sites.items()}

    def keep(module: nn.Module, args: tuple, result: tuple) -> None:
        passages.append(Passage(*copies[module], *args, after=result[0]))

    hooks = [module.register_forward_hook(keep) for module in copies]
    try:
        with torch.no_grad():
            logits = host(images)
    finally:
        host.train(training)
        for hook in hooks:
            hook.remove()
    if not logits.isfinite().all():
        raise InputError("the network's outputs are not finite on these images; was the run diverging?")
    return list(_stretches(passages))


def _stretches(passages: list[Passage]) -> Iterator[Stretch]:
    """The stretches of a pass."""
    begins = [i for i, passage in enumerate(passages) if passage.method.site.entry != "continue"]
    stages = [passages[i].method.site.stage for i in begins]
    for place, (start, end) in enumerate(zip(begins, [*begins[1:], len(passages)], strict=True)):
        stage, site = stages[place], passages[start].method.site
        part = f".{stages[: place + 1].count(stage)}" if stages.count(stage) > 1 else ""
        yield Stretch(f"{stage + 1}{part}", tuple(passages[start:end]), summed_up=site.entry == "transition")


def influence(stretch: Stretch, seed: int = 0) -> Tensor:
    r"""How far a change of one layer's map, as attention sees it, moves what later layers add.

    .. math:: I_{t,s} = \lVert \Delta o_t \rVert / \lVert \Delta x_s \rVert

    :math:`o_t` is what attention adds to the block's output, or for ``position="branch"`` what it makes of the branch.

    Noise is added to :math:`x_s` where attention reads it. Blocks are held: what they computed of other maps stays, so
    that the change goes by attention alone. Where a method reads a block's shortcut, that carries the change of the
    attention before it. Computed in double precision, for a change of a millionth of the map.

    Args:
        stretch: Sites, with what passed them.
        seed: Of the noise.

    Returns:
        ``(B, T, T)``, zero above the diagonal.
    """
    methods = [copy.deepcopy(passage.method).double() for passage in stretch.passages]
    outs = [passage.out.double() for passage in stretch.passages]
    shortcuts = [None if passage.shortcut is None else passage.shortcut.double() for passage in stretch.passages]
    values = torch.zeros(len(outs[0]), len(outs), len(outs), dtype=torch.float64)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        states, base = [tree_map(_double, stretch.passages[0].state)], []
        for method, out, shortcut in zip(methods, outs, shortcuts, strict=True):
            after, state = method(out, shortcut, states[-1])
            states.append(state)
            base.append(_own(method, after, out))
        for s, out in enumerate(outs):
            noise = torch.randn(out.shape, generator=draws, dtype=torch.float64).to(out.device)
            noise *= _STEP * out.square().mean((1, 2, 3), keepdim=True).sqrt()
            length = _norm(noise).clamp_min(torch.finfo(noise.dtype).tiny)
            state, change = states[s], None
            for t in range(s, len(outs)):
                x = out + noise if t == s else outs[t]
                shortcut = shortcuts[t]
                if shortcut is not None and change is not None:
                    shortcut = shortcut + change
                after, state = methods[t](x, shortcut, state)
                change = _own(methods[t], after, x) - base[t]
                values[:, t, s] = (_norm(change) / length).cpu()
    return values


def _own(method: DepthAttention, after: Tensor, given: Tensor) -> Tensor:
    return after if method.position == "branch" else after - given


def _norm(maps: Tensor) -> Tensor:
    """``(B, C, H, W) -> (B,)``."""
    return torch.linalg.vector_norm(maps.flatten(1), dim=1)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
