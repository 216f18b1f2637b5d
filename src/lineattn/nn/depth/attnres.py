r"""Attention Residuals: softmax attention over depth with a learned query, at every position by itself.

"Attention Residuals" (Kimi Team; 2026), arXiv 2603.15031.

.. math::
    h_t = \sum_{s \le t} a_{t,s}\, v_s, \qquad
    a_t = \mathrm{softmax}_s(\langle w_t, \mathrm{RMSNorm}(v_s) \rangle)

The scores are those of a position. Cost O(L²); state O(L), one map a layer, or O(L / K) in blocks of K layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.depth.base import DepthAttention, Init, Site
from lineattn.registry import register

_EPS = 1e-6


class AttnResState(NamedTuple):
    """Maps ``(B, C, H, W)`` to attend to, and one over the root mean square of their positions ``(B, 1, H, W)``."""

    maps: tuple[Tensor, ...]
    inverse_rms: tuple[Tensor, ...]


@register(
    "attnres",
    axis="depth",
    title="Attention Residuals",
    paper="Attention Residuals (2026)",
    arxiv="2603.15031",
    cost="O(L^2)",
    state="O(L)",
    no_gradient=(
        ("query", "where a stage starts there is one map to attend to, and the softmax of one is 1"),
        ("gain", "where a stage starts there is one map to attend to, and what replaces it is itself"),
    ),
    start="each block's output is replaced by the plain mean of the stage's outputs so far",
)
class AttnRes(DepthAttention):
    r"""Replaces a block's output by an attended mean of the outputs so far, position by position.

    .. math::
        \tilde x_t = x_t + g \odot \Big(\sum_{s \in S_t} a_s\, x_s - x_t\Big), \qquad
        a = \mathrm{softmax}_s(\langle w_t, x_s / \mathrm{rms}(x_s) \rangle)

    The query :math:`w_t` starts at zero, which is the plain mean; without the gain :math:`g` it is the published form.
    Cost O(L²) in the mixing of maps; state O(L), one map a layer, or O(L / ``block``).

    Note:
        In the paper the attention takes the place of all residual connections: what it mixes are the layers' branches.
        A host keeps the network's blocks as they are, with the additions inside them, so here it mixes the blocks'
        outputs, which are sums of branches already, and reaches back to the start of the stage. A learned weight of the
        RMSNorm would only multiply the query and is left out.

        The paper's blocks sum up their layers by residual connections, and so do these: of a block of layers that has
        ended, the last output is kept. The stage's first output is a block of its own, as the embedding is in the
        paper. :math:`S_t` are the ends of these blocks and the present output.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        block: Layers of a block; 1 attends to all layers.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `AttnResState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `AttnResState`.

    Raises:
        InputError: ``block`` is less than 1.

    Example:
        >>> first, second = AttnRes(Site(8), init="paper"), AttnRes(Site(8, index=1, entry="continue"), init="paper")
        >>> a, b = torch.randn(2, 1, 8, 4, 4)
        >>> out, state = second(b, None, first(a, None, None)[1])
        >>> torch.allclose(out, (a + b) / 2)
        True

    Reference:
        "Attention Residuals" (2026), arXiv 2603.15031.
    """

    def __init__(self, site: Site, *, block: int = 1, init: Init = "identity") -> None:
        super().__init__(site, init=init)
        if block < 1:
            raise InputError(f"block is {block}; it must be at least 1")
        self.block = block
        self.ends_block = site.entry == "start" or site.index % block == 0
        self.query = nn.Parameter(torch.zeros(site.channels))

    def extra_repr(self) -> str:
        return f"block={self.block}"

    def forward(self, out: Tensor, shortcut: Tensor | None, state: AttnResState | None) -> tuple[Tensor, AttnResState]:
        seen = _append(state, out)
        read = _mix(seen.maps, self._attention(seen)["share"])
        if self.gain is not None:
            read = torch.addcmul(out, read - out, self.gain.to(out.dtype)[:, None, None])
        return read, seen if state is None or self.ends_block else state

    def weights(self, out: Tensor, shortcut: Tensor | None, state: AttnResState | None) -> dict[str, Tensor]:
        """``score`` and ``share`` ``(B, L, H, W)`` of the maps attended to; the last is the present one."""
        return self._attention(_append(state, out))

    def _attention(self, seen: AttnResState) -> dict[str, Tensor]:
        query = self.query.to(seen.inverse_rms[0].dtype)[:, None, None]
        scores = [(x * query).sum(1, keepdim=True) * scale for x, scale in zip(*seen, strict=True)]
        score = torch.cat(scores, dim=1)
        return {"score": score, "share": torch.softmax(score, dim=1)}

    def _fold_gain(self, gain: Tensor) -> None:
        if not bool((gain == 1).all()):
            raise InputError(
                "a gain of attnres weighs the attention against the block's own output and can't be folded away unless "
                "it is 1; keep init='identity' for this network"
            )


def _append(state: AttnResState | None, x: Tensor) -> AttnResState:
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    inverse_rms = (norm.square() / x.shape[1] + _EPS).rsqrt()
    before = AttnResState((), ()) if state is None else state
    return AttnResState((*before.maps, x), (*before.inverse_rms, inverse_rms))


def _mix(maps: tuple[Tensor, ...], share: Tensor) -> Tensor:
    """`lineattn.ops.depth.mix` with a share ``(B, L, H, W)`` a position."""
    shares = share.to(maps[0].dtype).split(1, dim=1)
    total = maps[0] * shares[0]
    for x, a in zip(maps[1:], shares[1:], strict=True):
        total = total.addcmul_(x, a)
    return total
