r"""Dynamic Layer Attention, base and light.

"Strengthening Layer Interaction via Dynamic Layer Attention" (Wang, Xia, Liu, Yi, He; IJCAI 2024),
arXiv 2406.13392.

A recurrent cell, one a stage, reads the layers as they come and then refreshes what attention reads of the past:

.. math::
    (i, f, g) = W_y\, y + W_h\, h, \qquad
    c' = \sigma(f) \odot c + \sigma(i) \odot \tanh(g), \qquad
    h' = \sigma(c'), \qquad \mathrm{DSU}(y; h, c) = h'

with :math:`W_y, W_h` two linear layers with a ReLU between them. At layer :math:`t` the cell takes
:math:`y_t = \mathrm{GAP}(x_t)` into its state; the states of the refreshing calls are thrown away.

**Base** multiplies every key and value map of MRLA-base once more at each layer, and then attends to them:

.. math::
    k_s \leftarrow k_s \odot \mathrm{DSU}(k_s; h_t, c_t), \qquad
    v_s \leftarrow v_s \odot \mathrm{DSU}(\mathrm{GAP}(v_s); h_t, c_t) \qquad (s < t)

Cost O(L²); state O(L). The factor of a value is one a channel, so no map is written anew: with :math:`F_s` the product
of its factors so far, :math:`\mathrm{GAP}(F_s \odot v_s) = F_s \odot \mathrm{GAP}(v_s)`, and the read is
:math:`\sum_s (a_s F_s) \odot v_s`.

**Light** refreshes the shortcut of MRLA-light:

.. math::
    \hat I_t = I_t \odot \mathrm{DSU}(\mathrm{GAP}(I_t); h_t, c_t) + E * I_t, \qquad
    o_t = \mathrm{BN}(\sigma(\langle q_t, k_t \rangle / \sqrt{D}) \odot V_t * x_t + \lambda_t \odot \hat I_t)

with one depth-wise convolution :math:`E` a stage. Cost O(L); state O(1).

The cell and :math:`E` are parameters of the module at a stage's first site, which hands them on in the state.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.common import depthwise_value, drop_path_factor, fold_norm, read_out, softmax_over_depth
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.pooled import PooledAttention
from lineattn.ops.channels import heads, linear, per_channel, pool
from lineattn.ops.depth import mix
from lineattn.registry import register

_PAPER = "Strengthening Layer Interaction via Dynamic Layer Attention (2024)"
# Of a narrower layer it happens that its ReLU lets nothing through, of any sample.
_NARROWEST = 8


class Bottleneck(NamedTuple):
    """Two linear layers with a ReLU between them: their weights ``(O, I)`` and biases ``(O,)``."""

    narrow: Tensor
    narrow_bias: Tensor
    wide: Tensor
    wide_bias: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        return linear(torch.relu(linear(y, self.narrow, self.narrow_bias)), self.wide, self.wide_bias)


class CellState(NamedTuple):
    """The cell on its way through a stage: its parameters, and what it remembers, ``(B, C)``, at least float32."""

    input: Bottleneck
    hidden: Bottleneck
    h: Tensor
    c: Tensor

    def step(self, y: Tensor) -> CellState:
        """Takes ``(B, C)`` in."""
        h, c = _dsu(self.input(y) + self.hidden(self.h), self.c)
        return self._replace(h=h, c=c)

    def refresh(self, y: Tensor, *, leak_sample0: bool) -> Tensor:
        """What the cell would make of each of ``n`` rows a sample: ``(B, n, C) -> (B, n, C)``, in (0, 1)."""
        h, c = (self.h[:1], self.c[:1]) if leak_sample0 else (self.h, self.c)
        return _dsu(self.input(y) + self.hidden(h)[:, None], c[:, None])[0]


def _dsu(sums: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g = sums.chunk(3, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(c), c


class Cell(nn.Module):
    """Parameters of a stage's dynamic sharing unit."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        width = max(_NARROWEST, channels // reduction)
        self.input = nn.Sequential(nn.Linear(channels, width), nn.ReLU(), nn.Linear(width, 3 * channels))
        self.hidden = nn.Sequential(nn.Linear(channels, width), nn.ReLU(), nn.Linear(width, 3 * channels))

    def start(self, like: Tensor) -> CellState:
        """The state at the first layer: zeros like ``(B, C)``."""
        zeros = torch.zeros_like(like)
        return CellState(Bottleneck(*self.input.parameters()), Bottleneck(*self.hidden.parameters()), zeros, zeros)


class DynamicAttention(PooledAttention):
    """What both forms have: the cell, and how it goes from site to site."""

    def __init__(
        self, site: Site, *, head_dim: int, reduction: int, leak_sample0: bool, drop_path: float, init: Init
    ) -> None:
        super().__init__(site, head_dim=head_dim, drop_path=drop_path, init=init)
        if reduction < 1:
            raise InputError(f"reduction is {reduction}; it must be at least 1")
        self.reduction, self.leak_sample0 = reduction, leak_sample0
        self.cell = Cell(site.channels, reduction) if site.entry == "start" else None

    def extra_repr(self) -> str:
        leak = ", leak_sample0=True" if self.leak_sample0 else ""
        return f"{super().extra_repr()}, reduction={self.reduction}{leak}"

    def _step(self, y: Tensor, before: CellState | None) -> CellState:
        """The cell after this layer's pooled map."""
        if self.cell is not None:
            before = self.cell.start(y)
        assert before is not None
        return before.step(y)


class DLABaseState(NamedTuple):
    """What `DLABase` keeps of the stage's layers so far.

    Attributes:
        cell: The stage's cell; ``None`` in a stage of one layer.
        keys: As they have been refreshed, ``(B, L, C)``.
        values: Value maps as they were made, ``(B, C, H, W)``.
        means: Their means over space, ``(B, L, C)``.
        factors: What refreshing has multiplied them by, ``(B, L, C)``.
    """

    cell: CellState | None
    keys: Tensor
    values: tuple[Tensor, ...]
    means: Tensor
    factors: Tensor


@register(
    "dla_base",
    axis="depth",
    title="Dynamic Layer Attention, base",
    paper=_PAPER,
    arxiv="2406.13392",
    cost="O(L^2)",
    state="O(L)",
    no_gradient=(
        ("query.weight", "where a stage starts there is one layer to attend to, and the softmax of one is 1"),
    ),
    no_gradient_alone=(("key.weight", "a stage of one layer attends to that layer whatever its key is"),),
)
class DLABase(DynamicAttention):
    r"""Softmax attention to the keys and values of earlier layers, which every layer refreshes before it reads them.

    .. math::
        o_t = \mathrm{ReLU}(\mathrm{BN}(\textstyle\sum_s \mathrm{softmax}_s(\langle q_t, k_s\rangle / \sqrt{D})\, v_s)),
        \qquad k_s \leftarrow k_s \odot \mathrm{DSU}(k_s; h_t, c_t), \quad
        v_s \leftarrow v_s \odot \mathrm{DSU}(\mathrm{GAP}(v_s); h_t, c_t)

    All refreshing of a layer is one call of the cell. Cost O(L²) in the mixing of maps; state O(L), one map a layer.

    Note:
        The published code refreshes every sample with the state of the first sample of the batch, so that what is
        predicted for one image depends on another one. ``leak_sample0=True`` does the same, for comparison with
        published numbers; nothing else in this package lets samples see each other in evaluation.

    Args:
        site: Where the module stands; its stage's layers are all it sees.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        reduction: Width of the site over the width inside the cell, which is at least 8. Published are 4 on
            CIFAR, 16 on ImageNet, 20 for detection.
        leak_sample0: Refresh as the published code does, see above.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `DLABaseState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `DLABaseState`.

    Example:
        >>> attention = DLABase(Site(channels=32), head_dim=16)
        >>> out, state = attention(torch.randn(2, 32, 8, 8), None, None)
        >>> out.shape, state.keys.shape
        (torch.Size([2, 32, 8, 8]), torch.Size([2, 1, 32]))

    Reference:
        "Strengthening Layer Interaction via Dynamic Layer Attention" (2024), arXiv 2406.13392.
    """

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 32,
        reduction: int = 16,
        leak_sample0: bool = False,
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(
            site, head_dim=head_dim, reduction=reduction, leak_sample0=leak_sample0, drop_path=drop_path, init=init
        )
        if site.alone:
            self.cell = None  # nothing is there to be refreshed

    def forward(self, out: Tensor, shortcut: Tensor | None, state: DLABaseState | None) -> tuple[Tensor, DLABaseState]:
        state = self._write(out, state)
        share = per_channel(self._attention(out, state)["share"], out.shape[1])
        read = mix(state.values, share * state.factors.transpose(1, 2))
        drop = drop_path_factor(out, self.drop_path, self.training)
        return read_out(out, read, None, None, self.norm, relu=True, gain=self.gain, drop=drop), state

    def weights(self, out: Tensor, shortcut: Tensor | None, state: DLABaseState | None) -> dict[str, Tensor]:
        """``query`` ``(B, h, D)``; ``keys`` ``(B, h, L, D)``, ``share`` ``(B, h, L)``, ``factor`` ``(B, L, C)``."""
        return self._attention(out, self._write(out, state))

    def _write(self, out: Tensor, state: DLABaseState | None) -> DLABaseState:
        y, value = pool(out), self.value(out)
        cell = None if self.site.alone else self._step(y, None if state is None else state.cell)
        key, mean = self.key(y)[:, None], pool(value)[:, None]
        one = torch.ones_like(key)
        if state is None:
            return DLABaseState(cell, key, (value,), mean, one)
        assert cell is not None
        rows = torch.cat([state.keys, state.means * state.factors], dim=1)
        for_keys, for_values = cell.refresh(rows, leak_sample0=self.leak_sample0).chunk(2, dim=1)
        return DLABaseState(
            cell,
            torch.cat([state.keys * for_keys, key], dim=1),
            (*state.values, value),
            torch.cat([state.means, mean], dim=1),
            torch.cat([state.factors * for_values, one], dim=1),
        )

    def _attention(self, out: Tensor, state: DLABaseState) -> dict[str, Tensor]:
        query = heads(self.query(pool(out)), self.head_count)
        keys = heads(state.keys, self.head_count).transpose(1, 2)
        return {"query": query, "keys": keys, "share": softmax_over_depth(query, keys), "factor": state.factors}

    def _fold(self) -> None:
        """Nothing: values are made before it is known how the norm will scale their sum."""


class DLALightState(NamedTuple):
    """The stage's cell, and the kernel ``(C, 1, 3, 3)`` of its convolution."""

    cell: CellState
    extract: Tensor


@register(
    "dla_light",
    axis="depth",
    title="Dynamic Layer Attention, light",
    paper=_PAPER,
    arxiv="2406.13392",
    cost="O(L)",
    state="O(1)",
)
class DLALight(DynamicAttention):
    r"""The gated value of the present layer plus a learned decay of the refreshed shortcut.

    .. math::
        o_t = \mathrm{BN}(\sigma(\langle q_t, k_t\rangle / \sqrt{D}) \odot V_t * x_t + \lambda_t \odot \hat I_t), \qquad
        \hat I_t = I_t \odot \mathrm{DSU}(\mathrm{GAP}(I_t); h_t, c_t) + E * I_t

    Cost O(L); state O(1), two vectors.

    Note:
        The published code refreshes every sample with the state of the first sample of the batch, so that what is
        predicted for one image depends on another one. ``leak_sample0=True`` does the same, for comparison with
        published numbers; nothing else in this package lets samples see each other in evaluation.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        reduction: Width of the site over the width inside the cell, which is at least 8. Published are 4 on
            CIFAR, 16 on ImageNet, 20 for detection.
        leak_sample0: Refresh as the published code does, see above.
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``, ``shortcut``: ``(B, C, H, W)``.
        - ``state``: `DLALightState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `DLALightState`.

    Example:
        >>> attention = DLALight(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, shortcut=x, state=None)
        >>> out.shape, state.cell.h.shape
        (torch.Size([2, 32, 8, 8]), torch.Size([2, 32]))

    Reference:
        "Strengthening Layer Interaction via Dynamic Layer Attention" (2024), arXiv 2406.13392.
    """

    relu = False
    needs_shortcut = True

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 32,
        reduction: int = 16,
        leak_sample0: bool = False,
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(
            site, head_dim=head_dim, reduction=reduction, leak_sample0=leak_sample0, drop_path=drop_path, init=init
        )
        self.decay = nn.Parameter(torch.randn(site.channels))
        self.extract = depthwise_value(site.channels) if site.entry == "start" else None

    def forward(
        self, out: Tensor, shortcut: Tensor | None, state: DLALightState | None
    ) -> tuple[Tensor, DLALightState]:
        assert shortcut is not None
        state = self._write(out, state)
        found = self._attention(out, shortcut, state)
        kernel, refresh = state.extract.to(shortcut.dtype), found["refresh"].to(shortcut.dtype)
        extracted = F.conv2d(shortcut, kernel, padding=1, groups=len(kernel))
        refreshed = torch.addcmul(extracted, shortcut, refresh[:, :, None, None])
        past = {"shortcut": refreshed, "decay": self.decay}
        gate = per_channel(found["gate"], out.shape[1])
        drop = drop_path_factor(out, self.drop_path, self.training)
        return read_out(out, out, self.value, gate, self.norm, relu=False, gain=self.gain, drop=drop, **past), state

    def weights(self, out: Tensor, shortcut: Tensor | None, state: DLALightState | None) -> dict[str, Tensor]:
        """``query``, ``key`` ``(B, h, D)``; ``gate`` ``(B, h)``; ``refresh`` ``(B, C)``; ``decay`` ``(C,)``."""
        assert shortcut is not None
        return self._attention(out, shortcut, self._write(out, state))

    def _write(self, out: Tensor, state: DLALightState | None) -> DLALightState:
        cell = self._step(pool(out), None if state is None else state.cell)
        if self.extract is not None:
            return DLALightState(cell, self.extract.weight)
        assert state is not None
        return DLALightState(cell, state.extract)

    def _attention(self, out: Tensor, shortcut: Tensor, state: DLALightState) -> dict[str, Tensor]:
        y = pool(out)
        query, key = heads(self.query(y), self.head_count), heads(self.key(y), self.head_count)
        gate = torch.sigmoid((query * key).sum(-1) / math.sqrt(self.head_dim))
        refresh = state.cell.refresh(pool(shortcut)[:, None], leak_sample0=self.leak_sample0)[:, 0]
        return {"query": query, "key": key, "gate": gate, "refresh": refresh, "decay": self.decay}

    def _fold(self) -> None:
        slope = fold_norm(self, relu=False)
        if slope is not None:
            self.decay.mul_(slope)
