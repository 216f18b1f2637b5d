r"""Dense-and-implicit attention: one recurrent cell, shared by the layers of a stage, gates their branches.

"DIANet: Dense-and-Implicit Attention Network" (Huang, Liang, Liang, Yang; AAAI 2020), arXiv 1905.10671.

With :math:`y_t = \mathrm{GAP}(b_t)`, an LSTM whose two products are bottlenecks and whose output has a sigmoid:

.. math::
    (i, f, g, o) = A(y_t) + R(h_{t-1}), \qquad
    c_t = \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \qquad
    h_t = \sigma(o) \odot \sigma(c_t), \qquad
    \tilde b_t = h_t \odot b_t

where :math:`A` and :math:`R` are linear layers from ``C`` to ``C / 4`` and on to ``4C`` channels, with a ReLU between.
Cost O(L); state: two vectors a sample, and the cell's parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lineattn.nn.channel.gate import ChannelGate, squeezed
from lineattn.nn.depth.base import Init, Site
from lineattn.ops.channels import linear, pool
from lineattn.registry import register


class Bottleneck(NamedTuple):
    """Parameters of two linear layers: ``(C / r, C)``, ``(C / r,)``, ``(4C, C / r)``, ``(4C,)``."""

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        return linear(torch.relu(linear(y, self.down, self.down_bias)), self.up, self.up_bias)


class DIANetState(NamedTuple):
    """What the layers of a stage hand on.

    Attributes:
        hidden: :math:`h`, ``(B, C)``, at least float32.
        cell: :math:`c`, like ``hidden``.
        input_gates: Parameters of :math:`A`, which the stage's first layer owns.
        hidden_gates: Parameters of :math:`R`.
    """

    hidden: Tensor
    cell: Tensor
    input_gates: Bottleneck
    hidden_gates: Bottleneck


class _Gates(nn.Module):
    """Owner of a bottleneck's parameters; never called, as they travel in the state."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, hidden)
        self.up = nn.Linear(hidden, 4 * channels)

    def data(self) -> Bottleneck:
        return Bottleneck(self.down.weight, self.down.bias, self.up.weight, self.up.bias)


@register(
    "dianet",
    axis="depth",
    title="Dense-and-implicit attention",
    paper="DIANet: Dense-and-Implicit Attention Network (2020)",
    arxiv="1905.10671",
    cost="O(L)",
    state="O(1)",
    no_gradient_alone=(("hidden_gates.down.weight", "it only meets the first state of the cell, which is zero"),),
    start="each block's branch is multiplied by a gate near 1/4",
)
class DIANet(ChannelGate):
    r"""A gate a channel from the branches of the stage's layers so far, by a cell that they share.

    .. math::
        c_t = \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \qquad
        \tilde b_t = \sigma(o) \odot \sigma(c_t) \odot b_t, \qquad
        (i, f, g, o) = A(\mathrm{GAP}(b_t)) + R(h_{t-1})

    Cost O(L) for a network of L layers; state O(1): :math:`h` and :math:`c`, ``C`` numbers each, and the parameters of
    the cell. They belong to the module where the stage starts; the others have no parameters but their gains.

    Args:
        site: Where the module stands; its stage's layers share the cell.
        reduction: Width of the branch over that of the cell's hidden layers, which are at least 8 wide; where the
            stage starts. The published networks have 4 on CIFAR and 20 on ImageNet.
        init: ``identity`` (zero gain) or ``paper``.

    Shape:
        - ``out``: the branch, ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `DIANetState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `DIANetState`.

    Example:
        >>> attention = DIANet(Site(channels=32), init="paper")
        >>> branch = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(branch, None, None)
        >>> out.shape, state.hidden.shape
        (torch.Size([2, 32, 8, 8]), torch.Size([2, 32]))

    Reference:
        "DIANet: Dense-and-Implicit Attention Network" (2020), arXiv 1905.10671.
    """

    def __init__(self, site: Site, *, reduction: int = 4, init: Init = "identity") -> None:
        super().__init__(site, init=init)
        self.input_gates = self.hidden_gates = None
        if site.entry == "start":
            hidden = squeezed(site.channels, reduction)
            self.input_gates, self.hidden_gates = _Gates(site.channels, hidden), _Gates(site.channels, hidden)

    def forward(self, out: Tensor, shortcut: Tensor | None, state: DIANetState | None) -> tuple[Tensor, DIANetState]:
        state = self._step(out, state)
        return self._gated(out, state.hidden), state

    def weights(self, out: Tensor, shortcut: Tensor | None, state: DIANetState | None) -> dict[str, Tensor]:
        """``gate`` :math:`h_t` and ``cell`` :math:`c_t`, both ``(B, C)`` and at least float32."""
        after = self._step(out, state)
        return {"gate": after.hidden, "cell": after.cell}

    def _step(self, out: Tensor, state: DIANetState | None) -> DIANetState:
        pooled = pool(out)
        if self.input_gates is not None and self.hidden_gates is not None:
            zeros = torch.zeros_like(pooled)
            state = DIANetState(zeros, zeros, self.input_gates.data(), self.hidden_gates.data())
        assert state is not None
        i, f, g, o = (state.input_gates(pooled) + state.hidden_gates(state.hidden)).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * state.cell + torch.sigmoid(i) * torch.tanh(g)
        return state._replace(hidden=torch.sigmoid(o) * torch.sigmoid(cell), cell=cell)
