r"""Multi-head external attention (MEA): what EAMLP has in place of self-attention.

"Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (Guo, Liu, Mu, Hu; 2021), arXiv
2105.02358, algorithm 2.

.. math::
    \mathrm{head}_k = \mathrm{norm}(q_k M_k^\top) M_v, \qquad
    y = W_o\, [\mathrm{head}_1, \dots, \mathrm{head}_h], \qquad q = W x

All heads share the two memories. Cost O(N); no state.
"""

from __future__ import annotations

from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.sample.base import SampleAttention, pointwise
from lineattn.nn.sample.external import ExternalMemory, MemoryNorm, Start, normalised
from lineattn.registry import register


@register(
    "external_multihead",
    axis="sample",
    title="Multi-head external attention",
    paper="Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks (2021)",
    arxiv="2105.02358",
    cost="O(N)",
    state="none",
    no_gradient=(
        ("query.bias", "a constant a slot in the logits, which the softmax over the positions cancels"),
        ("memory.key_bias", "a constant a slot in the logits, which the softmax over the positions cancels"),
    ),
)
class MultiHeadExternalAttention(SampleAttention):
    r"""External attention in heads, between two projections; without a residual, as a transformer's attention.

    .. math::
        y = W_o\, [\mathrm{norm}(q_k M_k^\top) M_v]_{k = 1 \dots c h} + b_o, \qquad q = W x + b

    with :math:`q` of ``coef * C`` channels in ``coef * heads`` heads of ``D = C / heads``.
    :math:`2 c C^2 + c C + C + 2 D M + D + M` parameters and :math:`2 c C^2 + 2 c C M` MACs a position, with ``c`` for
    ``coef``. Self-attention has :math:`4 C^2 + 2 C N`: below :math:`N = (c - 2) C + c M` positions it is the cheaper
    one, with the published ``coef=4`` and 64 slots below :math:`2 C + 256`. `fuse` leaves :math:`2 c h C M` where that
    is less, and there are no tiles.

    Args:
        channels: Width ``C``.
        heads: Heads of a self-attention of this width; there are ``coef`` times as many.
        coef: How many times wider the queries are than ``x``.
        slots: Slots ``M``, by default ``256 // coef``.
        shared: One pair of memories for all heads, as published, or a pair a head.
        norm: ``log`` (exact), ``official`` (as published) or ``slots``, see
            `lineattn.nn.sample.external.ExternalMemory`.
        start: ``independent`` memories, as published here, ``equal`` or ``tied``.
        dropout: Probability of dropping an attention weight in training.
        proj_drop: Probability of dropping an output in training.
        tile: Positions at a time: memory for logits of so many, not of all.

    Shape:
        - ``x``: ``(B, N, C)`` or ``(B, C, H, W)``; ``mask``: ``(B, N)`` or ``(B, H, W)`` of booleans, true where there
          is a position.
        - Returns the shape of ``x``.

    Example:
        >>> import torch
        >>> layer = MultiHeadExternalAttention(256, 4)
        >>> sum(p.numel() for p in layer.parameters())
        533888
        >>> layer(torch.randn(2, 197, 256)).shape
        torch.Size([2, 197, 256])

    Reference:
        "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (2021), arXiv 2105.02358,
        algorithm 2; ``coef`` is in the published code alone.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        coef: int = 4,
        slots: int | None = None,
        shared: bool = True,
        norm: MemoryNorm = "log",
        start: Start = "independent",
        dropout: float = 0.0,
        proj_drop: float = 0.0,
        tile: int | None = None,
    ) -> None:
        super().__init__(channels)
        if heads < 1 or channels % heads:
            raise InputError(f"heads is {heads}; it must divide the {channels} channels")
        if coef < 1:
            raise InputError(f"coef is {coef}; it must be at least 1")
        self.heads, self.coef = heads, coef
        self.query = nn.Linear(channels, coef * channels)
        self.memory: ExternalMemory | _Folded = ExternalMemory(
            channels // heads,
            max(1, 256 // coef) if slots is None else slots,
            heads=None if shared else coef * heads,
            norm=norm,
            start=start,
            std=0.02,
            bias=True,
            dropout=dropout,
            tile=tile,
        )
        self.project = nn.Linear(coef * channels, channels)
        self.proj_drop = nn.Dropout(proj_drop)
        for layer in (self.query, self.project):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        found = self.memory(self._heads(x), mask)
        return self.proj_drop(pointwise(found.flatten(2), self.project.weight, self.project.bias))

    def macs(self, positions: int) -> int:
        inside = 0 if isinstance(self.memory, _Folded) else self.coef * self.heads * self.memory.macs(positions)
        return positions * (self.query.weight.numel() + self.project.weight.numel()) + inside

    def _heads(self, x: Tensor) -> Tensor:
        return pointwise(x, self.query.weight, self.query.bias).unflatten(-1, (self.coef * self.heads, -1))

    def weights(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """See `lineattn.nn.sample.external.ExternalMemory.health`; ``attention`` is ``(B, N, h, M)``."""
        tokens, mask = self._tokens(x, mask)
        if isinstance(self.memory, _Folded):
            return {"attention": self.memory(self._heads(tokens), mask)}
        return self.memory.health(self._heads(tokens), mask)

    def _fold(self) -> None:
        r""":math:`M_k' = M_k W_k,\ M_v' = M_v W_{o,k}^\top` a head: two linear layers and the softmax between them."""
        memory, heads = self.memory, self.coef * self.heads
        if isinstance(memory, _Folded) or memory.tile is not None:  # which needs keys and values
            return
        if 2 * heads * memory.keys.shape[-2] * self.channels >= self.macs(1):
            return
        values = memory.keys if memory.values is None else memory.values
        before = self.query.weight.unflatten(0, (heads, -1))
        after = self.project.weight.unflatten(1, (heads, -1)).permute(1, 2, 0)
        keys, values = memory.keys @ before, values @ after
        query = nn.Linear(self.channels, keys.shape[0] * keys.shape[1], bias=memory.norm == "slots")
        project = nn.Linear(query.out_features, self.channels)
        bias = self.project.bias
        if memory.value_bias is not None:
            bias = bias + (memory.value_bias.expand(heads, -1)[:, None] @ after).sum((0, 1))
        if query.bias is not None:  # the other norms cancel it
            offset = memory.logits(self.query.bias.unflatten(0, (1, 1, heads, -1)))
            query.bias = nn.Parameter(offset.flatten(), requires_grad=False)
        query.weight, project.weight, project.bias = (
            nn.Parameter(tensor, requires_grad=False)
            for tensor in (keys.flatten(0, 1), values.flatten(0, 1).mT.contiguous(), bias)
        )
        self.query, self.memory, self.project = query, _Folded(memory), project


class _Folded(nn.Module):
    """What is left of a memory whose keys and values are in the layers around it: queries are logits."""

    def __init__(self, memory: ExternalMemory) -> None:
        super().__init__()
        self.norm: MemoryNorm = memory.norm

    def forward(self, logits: Tensor, mask: Tensor | None = None) -> Tensor:
        return normalised(logits, mask, self.norm)
