r"""External attention (EA): positions attend to two small learned memories that all samples share.

"Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (Guo, Liu, Mu, Hu; 2021), arXiv
2105.02358.

.. math::
    \alpha = \mathrm{norm}(q M_k^\top), \qquad o = \alpha M_v

with :math:`M_k, M_v` of ``M`` rows, learned, and the double normalisation of `lineattn.ops.memory`: a softmax over the
positions for every slot, then every position divided by its sum over the slots. Positions exchange one number a slot;
no map of positions by positions is made. Cost O(N); no state. "Shared by all samples" is what weights are: nothing is
exchanged within a batch.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lineattn.errors import InputError
from lineattn.nn.depth.base import Init
from lineattn.nn.sample.base import SampleAttention, check_init, normed, pointwise
from lineattn.ops.memory import (
    Norm,
    check_tile,
    double_normalisation,
    external_attention,
    products,
    slot_log_sums,
    spread,
)
from lineattn.registry import register

MemoryNorm = Norm | Literal["slots"]
Start = Literal["equal", "independent", "tied"]


class ExternalMemory(nn.Module):
    r"""The two memories and the attention to them: the core of external attention, without any projection.

    .. math:: o_i = \sum_j \alpha_{ij} v_j + b, \qquad \alpha = \mathrm{norm}(\langle q_i, k_j \rangle)

    Args:
        width: Width of a query, ``C``, or ``D`` for heads.
        slots: Slots ``M``.
        heads: Heads with memories of their own; if not given, all heads share one.
        norm: ``log``: double normalisation, exact; ``official``: as published, with an epsilon in the second division;
            ``slots``: a softmax over the slots alone, so that positions exchange nothing, for comparison.
        start: ``equal``: keys and values start as one matrix, as published, and go their own ways; ``independent``;
            ``tied``: they stay one matrix.
        std: Standard deviation of the start, by default :math:`\sqrt{2 / \mathrm{width}}`.
        bias: Biases of both memories, as multi-head external attention has them. That of the keys changes nothing: the
            softmax over the positions cancels it.
        dropout: Probability of dropping a weight in training.
        tile: Positions at a time, see `lineattn.ops.memory.external_attention`; where weights are dropped, or ``norm``
            is ``slots``, they are all there.

    Shape:
        - ``query``: ``(B, N, C)`` or ``(B, N, h, D)``; ``mask``: ``(B, N)``; ``log_sums``: see `log_sums`.
        - Returns the shape of ``query``.

    Example:
        >>> memory = ExternalMemory(32, slots=8)
        >>> memory(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        width: int,
        slots: int = 64,
        *,
        heads: int | None = None,
        norm: MemoryNorm = "log",
        start: Start = "equal",
        std: float | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        tile: int | None = None,
    ) -> None:
        super().__init__()
        if slots < 1:
            raise InputError(f"slots is {slots}; it must be at least 1")
        if norm not in (*get_args(Norm), "slots"):
            raise InputError(f"norm is {norm!r}; it must be 'log', 'official' or 'slots'")
        if start not in get_args(Start):
            raise InputError(f"start is {start!r}; it must be 'equal', 'independent' or 'tied'")
        check_tile(tile)
        if not 0 <= dropout < 1:
            raise InputError(f"dropout is {dropout}; it must be at least 0 and less than 1")
        self.norm: MemoryNorm = norm
        self.start, self.dropout, self.tile = start, dropout, tile
        shape = (slots, width) if heads is None else (heads, slots, width)
        std = math.sqrt(2 / width) if std is None else std
        self.keys = nn.Parameter(torch.empty(shape).normal_(std=std))
        if start == "tied":
            self.register_parameter("values", None)
        else:
            # Copied: two names of one storage would be one memory, until a move or a copy makes them two.
            first = self.keys.detach().clone() if start == "equal" else torch.empty(shape).normal_(std=std)
            self.values = nn.Parameter(first)
        shared = () if heads is None else (heads,)
        self.key_bias = nn.Parameter(torch.zeros(*shared, slots)) if bias else None
        self.value_bias = nn.Parameter(torch.zeros(*shared, width)) if bias else None

    def forward(self, query: Tensor, mask: Tensor | None = None, log_sums: Tensor | None = None) -> Tensor:
        values = self.keys if self.values is None else self.values
        bias = self.value_bias
        if self.norm == "slots" or (self.training and self.dropout):
            alpha = F.dropout(self.attention(query, mask), self.dropout, self.training)
            out = spread(alpha, values, query)
        else:
            out = external_attention(
                query, self.keys, values, mask=mask, norm=self.norm, tile=self.tile, log_sums=log_sums
            )
            if bias is not None and self.key_bias is not None:
                # That of the keys is cancelled exactly; it stands here to get its gradient, which is zero.
                bias = bias + 0 * self.key_bias.sum()
        return out if bias is None else out + bias.to(out.dtype)

    def log_sums(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """What these positions add to the sums over all positions of a larger sample, ``(B, 1, M)`` or
        ``(B, 1, h, M)``; the sums of all of them are what `forward` takes. Not with ``norm="slots"``."""
        return slot_log_sums(query, self.keys, mask=mask, tile=self.tile)

    def logits(self, query: Tensor) -> Tensor:
        """``(B, N, M)`` or ``(B, N, h, M)``."""
        logits = products(query, self.keys.mT)
        return logits if self.key_bias is None else logits + self.key_bias.to(logits.dtype)

    def attention(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weights, ``(B, N, M)`` or ``(B, N, h, M)``."""
        return normalised(self.logits(query), mask, self.norm)

    def macs(self, positions: int) -> int:
        """Multiply-accumulates of so many queries; in tiles, logits are computed twice."""
        tiled = self.tile is not None and self.tile < positions and self.norm != "slots"
        return positions * (3 if tiled else 2) * self.keys.shape[-2] * self.keys.shape[-1]

    @torch.no_grad()
    def health(self, query: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        r"""What tells whether the memory is used.

        Returns:
            ``attention`` ``(B, N, M)`` or ``(B, N, h, M)``; ``usage`` ``(M,)``, the mean weight of a slot, whose sum is
            one; ``perplexity``, :math:`e^{H(\mathrm{usage})}`, the number of slots in use, from 1 to ``M``;
            ``logit_scale``, their standard deviation (near 0, every slot gets the same; above 10, the published
            normalisation loses positions); ``key_cosine``, the largest cosine between two keys (at 1, two slots are
            one; -1 if there is only one). Without a gradient.
        """
        alpha, logits = self.attention(query, mask), self.logits(query)
        weight = alpha.flatten(0, -2).double()
        usage = weight.sum(0) / weight.sum()
        unit = F.normalize(self.keys.double(), dim=-1)
        cosine = (unit @ unit.mT).masked_fill(torch.eye(unit.shape[-2], dtype=torch.bool, device=unit.device), -1)
        there = logits if mask is None else logits[mask]
        return {
            "attention": alpha,
            "usage": usage,
            "perplexity": torch.special.entr(usage).sum().exp(),
            "logit_scale": there.double().std(),
            "key_cosine": cosine.amax(),
        }

    def extra_repr(self) -> str:
        return f"{tuple(self.keys.shape)}, norm={self.norm!r}, start={self.start!r}"


def normalised(logits: Tensor, mask: Tensor | None, norm: MemoryNorm) -> Tensor:
    """Weights from logits, ``(B, N, M)`` or ``(B, N, h, M)``; zero where there is no position."""
    if norm != "slots":
        return double_normalisation(logits, mask=mask, norm=norm)
    alpha = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    if mask is not None:
        alpha = alpha * mask[(..., *[None] * (alpha.ndim - 2))]
    return alpha.to(logits.dtype)


@register(
    "external",
    axis="sample",
    title="External attention",
    paper="Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks (2021)",
    arxiv="2105.02358",
    cost="O(N)",
    state="none",
    no_gradient=(("query.bias", "a constant a slot in the logits, which the softmax over the positions cancels"),),
)
class ExternalAttention(SampleAttention):
    r"""External attention with its projections: a residual block.

    .. math::
        y = \mathrm{ReLU}\big(\mathrm{BN}(W_2\, o) + x\big), \qquad
        o = \mathrm{norm}\big((W_1 x + b_1) M_k^\top\big) M_v

    :math:`2 C^2 + 2 C M + 3 C` parameters, :math:`2 C^2 + 2 C M` MACs a position. `fuse` leaves
    :math:`2 C M + C` and :math:`2 C M`, because nothing but products stands between the projections and the memories.

    Args:
        channels: Width ``C``.
        slots: Slots ``M`` of the memory.
        norm: ``log`` (exact), ``official`` (as published) or ``slots`` (no exchange between positions), see
            `ExternalMemory`.
        start: ``equal``, ``independent`` or ``tied`` memories, see `ExternalMemory`.
        init: ``paper``, or ``identity``: the block starts as :math:`\mathrm{ReLU}(x)`, which behind a ReLU is
            :math:`x`.
        act: The last ReLU, as published. Without it, ``init="identity"`` starts as :math:`x` anywhere.
        block: The block. If not, the core alone, :math:`\mathrm{norm}(x M_k^\top) M_v`, which has nothing else and no
            residual: what stands in the place of a transformer's attention.
        tile: Positions at a time: memory for logits of so many, not of all.

    Shape:
        - ``x``: ``(B, C, H, W)`` or ``(B, N, C)``; ``mask``: ``(B, H, W)`` or ``(B, N)`` of booleans, true where there
          is a position.
        - Returns the shape of ``x``.

    Note:
        The published code adds :math:`10^{-9}` to the sum over the slots. Where logits are large (a standard deviation
        of 10 and more) most of these sums are smaller, and such positions go without attention: ``norm="official"``.

    Example:
        >>> block = ExternalAttention(512)
        >>> sum(p.numel() for p in block.parameters())
        591360
        >>> block(torch.randn(2, 512, 16, 16)).shape, block(torch.randn(2, 256, 512)).shape
        (torch.Size([2, 512, 16, 16]), torch.Size([2, 256, 512]))
        >>> sum(t.numel() for t in block.fuse().state_dict().values())
        66048

    Reference:
        "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks" (2021), arXiv 2105.02358,
        equations 5-8.
    """

    residual = True

    def __init__(
        self,
        channels: int,
        *,
        slots: int = 64,
        norm: MemoryNorm = "log",
        start: Start = "equal",
        init: Init = "paper",
        act: bool = True,
        block: bool = True,
        tile: int | None = None,
    ) -> None:
        super().__init__(channels)
        check_init(init)
        self.residual, self.act = block, act
        self.memory = ExternalMemory(channels, slots, norm=norm, start=start, tile=tile)
        self.query, self.project, self.norm = nn.Identity(), nn.Identity(), nn.Identity()
        if block:
            self.query, self.project = nn.Linear(channels, channels), nn.Linear(channels, channels, bias=False)
            self.norm = nn.BatchNorm1d(channels)
            for layer in (self.query, self.project):
                nn.init.normal_(layer.weight, std=math.sqrt(2 / channels))  # of 1x1 convolutions, by their fan-out
            if init == "identity":
                nn.init.zeros_(self.norm.weight)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        out = self.memory(self._query(x), mask)
        if isinstance(self.project, nn.Linear):
            out = pointwise(out, self.project.weight)
        if not self.residual:
            return out
        y = x + (out if isinstance(self.norm, nn.Identity) else normed(self.norm, out, mask))
        return torch.relu(y) if self.act else y

    def macs(self, positions: int) -> int:
        layers = sum(isinstance(layer, nn.Linear) for layer in (self.query, self.project))
        return positions * layers * self.channels**2 + self.memory.macs(positions)

    def _query(self, x: Tensor) -> Tensor:
        return pointwise(x, self.query.weight, self.query.bias) if isinstance(self.query, nn.Linear) else x

    def weights(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """See `ExternalMemory.health`."""
        tokens, mask = self._tokens(x, mask)
        return self.memory.health(self._query(tokens), mask)

    def _fold(self) -> None:
        r""":math:`M_k' = M_k W_1,\ M_v' = M_v W_2^\top \mathrm{diag}(g),\ b' = \beta - g \mu`, g the norm's slope."""
        query, project, norm, memory = self.query, self.project, self.norm, self.memory
        if not (isinstance(query, nn.Linear) and isinstance(project, nn.Linear) and isinstance(norm, _BatchNorm)):
            return
        if norm.running_mean is None or norm.running_var is None:  # of each batch: nothing is constant
            return
        slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        values = memory.keys if memory.values is None else memory.values
        memory.values = nn.Parameter(values @ project.weight.mT * slope, requires_grad=False)
        if memory.norm == "slots":  # the other norms cancel it
            memory.key_bias = nn.Parameter(memory.keys @ query.bias, requires_grad=False)
        memory.keys = nn.Parameter(memory.keys @ query.weight, requires_grad=False)
        memory.value_bias = nn.Parameter(norm.bias - norm.running_mean * slope, requires_grad=False)
        self.query, self.project, self.norm = nn.Identity(), nn.Identity(), nn.Identity()
