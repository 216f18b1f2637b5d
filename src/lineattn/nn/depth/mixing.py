r"""What the methods are made of that mix all earlier maps of a stage by shares; no method by itself.

.. math::
    o_t = \phi\Big(\mathrm{BN}\Big(\sum_{s \le t} a_{t,s}\, V_t * x_s\Big)\Big), \qquad
    q_t = Q_t\, y_t, \quad k_{t,s} = K_t\, y_s, \quad y_s = \mathrm{GAP}(x_s)

They differ in how the shares :math:`a_{t,s}` follow from the query and the keys. A share is one number a head and
:math:`V_t` a depth-wise convolution, so :math:`\sum_s a_s (V_t * x_s) = V_t * \sum_s a_s x_s` holds exactly: one
convolution a layer instead of ``t``.

Cost O(L²); state O(L), one map a layer, which is the block's own output and no copy of it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from lineattn.nn.common import drop_path_factor, read_out
from lineattn.nn.depth.pooled import PooledAttention
from lineattn.ops.channels import heads, pool
from lineattn.ops.depth import mix


class MixingState(NamedTuple):
    """Outputs ``(B, C, H, W)`` of the stage's layers so far, and their means over space ``(B, C)``."""

    maps: tuple[Tensor, ...]
    pooled: tuple[Tensor, ...]


class MixingAttention(PooledAttention):
    """Base of methods that give a share to every map so far; a subclass says which."""

    @abstractmethod
    def _shares(self, query: Tensor, keys: Tensor) -> Tensor:
        """``(B, C), (B, L, C) -> (B, h, L)``."""

    def forward(self, out: Tensor, shortcut: Tensor | None, state: MixingState | None) -> tuple[Tensor, MixingState]:
        state = self._write(out, state)
        read = mix(state.maps, self._attention(state)["share"])
        drop = drop_path_factor(out, self.drop_path, self.training)
        return read_out(out, read, self.value, None, self.norm, relu=self.relu, gain=self.gain, drop=drop), state

    def weights(self, out: Tensor, shortcut: Tensor | None, state: MixingState | None) -> dict[str, Tensor]:
        """``query`` ``(B, h, D)``, ``keys`` ``(B, h, L, D)`` and ``share`` ``(B, h, L)`` over the layers so far."""
        return self._attention(self._write(out, state))

    def _write(self, out: Tensor, state: MixingState | None) -> MixingState:
        before = MixingState((), ()) if state is None else state
        return MixingState((*before.maps, out), (*before.pooled, self._pool(out)))

    def _pool(self, out: Tensor) -> Tensor:
        """What a layer leaves for its keys, ``(B, C)``."""
        return pool(out)

    def _attention(self, state: MixingState) -> dict[str, Tensor]:
        query, keys = self.query(state.pooled[-1]), self.key(torch.stack(state.pooled, dim=1))
        by_head = self._split(query, keys)
        return {"query": by_head[0], "keys": by_head[1], "share": self._shares(query, keys)}

    def _split(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """``(B, h, D)`` and ``(B, h, L, D)``."""
        return heads(query, self.head_count), heads(keys, self.head_count).transpose(1, 2)
