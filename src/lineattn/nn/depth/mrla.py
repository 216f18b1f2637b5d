r"""Multi-head Recurrent Layer Attention, base and light.

"Cross-Layer Retrospective Retrieving via Layer Attention" (Fang, Cai, Chen, Ye, Li; ICLR 2023), arXiv 2302.03985.

**Base** keeps a key and a value map of every earlier layer of the stage, each made by that layer's own projections:

.. math::
    o_t = \mathrm{ReLU}\Big(\mathrm{BN}\Big(\sum_{s \le t} a_{t,s} V_s * x_s\Big)\Big), \qquad
    a_t = \mathrm{softmax}_s(\langle q_t, k_s \rangle / \sqrt{D})

Cost O(L²) in the mixing; state O(L).

**Light** drops the softmax and takes the query of layer :math:`t` for a multiple of that of layer :math:`t - 1`:

.. math::
    O_t = \lambda_t \odot O_{t-1} + \sigma(\langle q_t, k_t \rangle / \sqrt{D}) \odot V_t * x_t, \qquad
    o_t = \mathrm{BN}(O_t)

Cost O(L); state O(1). Layer :math:`s` reaches layer :math:`t` by :math:`\prod_{r=s+1}^{t} \lambda_r`, which falls
geometrically.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.common import drop_path_factor, fold_norm, read_out, softmax_over_depth
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.pooled import PooledAttention
from lineattn.ops.channels import heads, per_channel, pool
from lineattn.ops.depth import mix
from lineattn.registry import register

_PAPER = "Cross-Layer Retrospective Retrieving via Layer Attention (2023)"


class MRLABaseState(NamedTuple):
    """Keys ``(B, h, D)`` and value maps ``(B, C, H, W)`` of the stage's layers so far."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@register(
    "mrla_base",
    axis="depth",
    title="Multi-head Recurrent Layer Attention, base",
    paper=_PAPER,
    arxiv="2302.03985",
    cost="O(L^2)",
    state="O(L)",
    no_gradient=(
        ("query.weight", "where a stage starts there is one layer to attend to, and the softmax of one is 1"),
    ),
    no_gradient_alone=(("key.weight", "a stage of one layer attends to that layer whatever its key is"),),
)
class MRLABase(PooledAttention):
    r"""Softmax attention to the keys and values that earlier layers of the stage have left.

    .. math::
        o_t = \mathrm{ReLU}(\mathrm{BN}(
            \textstyle\sum_s \mathrm{softmax}_s(\langle q_t, k_s\rangle / \sqrt{D})\, V_s * x_s))

    Cost O(L²) in the mixing of maps; state O(L), one map a layer.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `MRLABaseState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `MRLABaseState`.

    Example:
        >>> attention = MRLABase(Site(channels=32), head_dim=16)
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> out.shape, len(state.values)
        (torch.Size([2, 32, 8, 8]), 1)

    Reference:
        "Cross-Layer Retrospective Retrieving via Layer Attention" (2023), arXiv 2302.03985, section 3.2.
    """

    def __init__(self, site: Site, *, head_dim: int = 32, drop_path: float = 0.2, init: Init = "identity") -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)

    def forward(
        self, out: Tensor, shortcut: Tensor | None, state: MRLABaseState | None
    ) -> tuple[Tensor, MRLABaseState]:
        share, keys = self._attention(out, state)
        values = (() if state is None else state.values) + (self.value(out),)
        read = mix(values, share)
        drop = drop_path_factor(out, self.drop_path, self.training)
        x = read_out(out, read, None, None, self.norm, relu=True, gain=self.gain, drop=drop)
        return x, MRLABaseState(keys, values)

    def weights(self, out: Tensor, shortcut: Tensor | None, state: MRLABaseState | None) -> dict[str, Tensor]:
        """``query``, ``key`` ``(B, h, D)``; ``share`` ``(B, h, L)``, the attention to the layers so far."""
        share, keys = self._attention(out, state)
        return {"query": heads(self.query(pool(out)), self.head_count), "key": keys[-1], "share": share}

    def _attention(self, out: Tensor, state: MRLABaseState | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        pooled = pool(out)
        query = heads(self.query(pooled), self.head_count)
        keys = (() if state is None else state.keys) + (heads(self.key(pooled), self.head_count),)
        return self._share(query, torch.stack(keys, dim=-2)), keys

    def _share(self, query: Tensor, keys: Tensor) -> Tensor:
        """``(B, h, D), (B, h, L, D) -> (B, h, L)``."""
        return softmax_over_depth(query, keys)

    def _fold(self) -> None:
        """Nothing: values are made before it is known how the norm will scale their sum."""


@register(
    "mrla_light",
    axis="depth",
    title="Multi-head Recurrent Layer Attention, light",
    paper=_PAPER,
    arxiv="2302.03985",
    cost="O(L)",
    state="O(1)",
)
class MRLALight(PooledAttention):
    r"""A learned decay of the past plus the gated value of the present layer.

    .. math:: o_t = \mathrm{BN}(\lambda_t \odot I_t + \sigma(\langle q_t, k_t\rangle / \sqrt{D}) \odot V_t * x_t)

    Cost O(L); state O(1).

    Note:
        In the paper :math:`I_t` is the previous attention output :math:`O_{t-1}`. The released code has the block's
        shortcut there, so that its only recurrence is the residual stream. ``source`` selects: ``shortcut`` (the
        code, from which the published figures come) or ``attention`` (the paper; the first layer of a stage then
        has no past, and no decay).

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        source: What decays, ``shortcut`` or ``attention``.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut``: the same, read with ``source="shortcut"``.
        - ``state``: with ``source="attention"`` the map :math:`O_{t-1}`, else ``None``.
        - Returns ``(B, C, H, W)`` and the new state.

    Example:
        >>> attention = MRLALight(Site(channels=32), head_dim=16, init="paper")
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, shortcut=x, state=None)
        >>> out.shape, state
        (torch.Size([2, 32, 8, 8]), None)

    Reference:
        "Cross-Layer Retrospective Retrieving via Layer Attention" (2023), arXiv 2302.03985, section 3.3.
    """

    relu = False
    needs_shortcut = True

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 32,
        source: Literal["shortcut", "attention"] = "shortcut",
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        if source not in ("shortcut", "attention"):
            raise InputError(f"source is {source!r}; it must be 'shortcut' or 'attention'")
        self.source = source
        self.needs_shortcut = source == "shortcut"
        has_past = source == "shortcut" or site.entry != "start"
        self.decay = nn.Parameter(torch.randn(site.channels)) if has_past else None

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, source={self.source!r}"

    def forward(self, out: Tensor, shortcut: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = per_channel(self.weights(out, shortcut, state)["gate"], out.shape[1])
        drop = drop_path_factor(out, self.drop_path, self.training)
        if self.source == "shortcut":
            assert shortcut is not None
            past = {"shortcut": shortcut, "decay": self.decay}
            return read_out(out, out, self.value, gate, self.norm, relu=False, gain=self.gain, drop=drop, **past), None
        attended = self.value(out) * gate.to(out.dtype)[:, :, None, None]
        if self.decay is not None:
            assert state is not None
            attended = torch.addcmul(attended, state, self.decay.to(attended.dtype)[:, None, None])
        return read_out(out, attended, None, None, self.norm, relu=False, gain=self.gain, drop=drop), attended

    def weights(self, out: Tensor, shortcut: Tensor | None, state: Tensor | None) -> dict[str, Tensor]:
        """``query``, ``key`` ``(B, h, D)``; ``gate`` ``(B, h)``; ``decay`` ``(C,)`` where there is a past."""
        pooled = pool(out)
        query, key = heads(self.query(pooled), self.head_count), heads(self.key(pooled), self.head_count)
        gate = torch.sigmoid((query * key).sum(-1) / math.sqrt(self.head_dim))
        found = {"query": query, "key": key, "gate": gate}
        return found if self.decay is None else found | {"decay": self.decay}

    def _fold(self) -> None:
        if self.source == "attention":
            return  # the next layer reads the attention as it is before the norm
        slope = fold_norm(self, relu=False)
        if slope is not None and self.decay is not None:
            self.decay.mul_(slope)
