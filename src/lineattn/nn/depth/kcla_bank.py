r"""KCLA at several temperatures at once, between which the reader chooses.

An extension of "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405, whose
authors name a temperature that adapts itself as future work.

The means at :math:`B` multiples of each head's temperature are kept side by side, and a layer mixes what it reads:

.. math::
    m^b_t = \frac{\sum_s e^{S_s / r_b} x_s}{\sum_s e^{S_s / r_b}}, \qquad
    m_t = \sum_b w_{t,b}\, m^b_t, \qquad
    w_t = \mathrm{softmax}_b(W \rho_t + c), \quad W = c = 0 \text{ at the start}

with :math:`r_b` log-spaced from 1/2 to 2, and 1 for one copy. The mix is arithmetic, so what is read is a weighted mean
of the layers, and exactly recurrent. Cost O(L); state: ``B`` maps and ``B h`` scalars a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lineattn.errors import InputError
from lineattn.nn.depth.base import Init, Site
from lineattn.nn.depth.key_correlated import KCLAExtension, Read, temperatures, zero_linear
from lineattn.ops.channels import linear
from lineattn.ops.depth import mix
from lineattn.ops.kcla import agreement, write
from lineattn.registry import register

# The lowest temperature of the bank over the head's own; the highest is as far above.
LOWEST = 0.5


class BankState(NamedTuple):
    """A mean over depth for each temperature.

    Attributes:
        means: :math:`m^b`, each ``(B, C, H, W)``, at least float32.
        log_norms: The logarithms of their normalisers, ``(B, h, copies)``, at least float32.
    """

    means: tuple[Tensor, ...]
    log_norms: Tensor


@register(
    "kcla_bank",
    axis="depth",
    title="KCLA with a bank of temperatures",
    paper="extension of KCLA (2026), its stated future work",
    arxiv="2606.28405",
    cost="O(L)",
    state="O(1)",
)
class KCLABank(KCLAExtension):
    r"""KCLA whose reader chooses between copies of the mean at different temperatures.

    .. math:: m_t = \sum_b \mathrm{softmax}_b(W \rho_t + c)\, m^b_t

    Starts at the plain mean of the copies; exactly a weighted mean of all layers. A transition takes every copy along,
    by the same convolution and one norm over all of them. Cost O(L); state O(1), ``copies`` times KCLA's. In PyTorch's
    operators: slower than KCLA, which has kernels of its own.

    Args:
        site: Where the module stands.
        head_dim: Width :math:`D` of a head; it divides the site's channels.
        copies: Means that are kept, :math:`B`; with one it is KCLA.
        p: Smallest temperature factor, in (0, 1].
        drop_path: Probability of leaving out the attention of a sample in training.
        init: ``identity`` (zero gain) or ``paper`` (as KCLA is published).

    Shape:
        - ``out``: ``(B, C, H, W)``; ``shortcut`` is not read.
        - ``state``: `BankState` or ``None``.
        - Returns ``(B, C, H, W)`` and the new `BankState`.

    Example:
        >>> attention = KCLABank(Site(channels=32), head_dim=16)
        >>> x = torch.randn(2, 32, 8, 8)
        >>> out, state = attention(x, None, None)
        >>> torch.equal(out, x), state.log_norms.shape
        (True, torch.Size([2, 2, 2]))

    Reference:
        This library's own. "Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv
        2606.28405, names a temperature that adapts itself as future work.
    """

    inv_factor: Tensor

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 32,
        copies: int = 2,
        p: float = 0.7,
        drop_path: float = 0.2,
        init: Init = "identity",
    ) -> None:
        super().__init__(site, head_dim=head_dim, p=p, drop_path=drop_path, init=init)
        if copies < 1:
            raise InputError(f"copies is {copies}; it must be at least 1")
        self.copies = copies
        self.register_buffer("inv_factor", 1 / temperatures(copies, LOWEST), persistent=False)
        # Where a stretch starts there is one layer, and every copy holds just that.
        has_choice = copies > 1 and site.entry != "start"
        self.choice = zero_linear(self.head_count, self.head_count * copies) if has_choice else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, copies={self.copies}"

    def _enter(self, out: Tensor, state: BankState | None) -> BankState | None:
        if self.transition is None:
            return state
        assert state is not None
        r, key = self._summed_up(torch.cat(state.means), out)
        copies = (self.copies, state.log_norms.shape[0])  # not len(), which an export would hold fast
        scores = self._score(key).unflatten(0, copies).movedim(0, -1)
        return BankState(r.unflatten(0, copies).unbind(), scores * self.inv_factor.to(scores.dtype))

    def _read(self, out: Tensor, state: BankState | None) -> Read:
        query, key, weight, opening = self._address(out)
        exposed = {"query": query, "key": key, "score": weight, "gate": opening}
        scores = (weight[..., None] * self.inv_factor.to(weight.dtype)).unbind(-1)
        before = [()] * self.copies if state is None else zip(state.means, state.log_norms.unbind(-1), strict=True)
        written = [write(out, found, *past) for found, past in zip(scores, before, strict=True)]
        after = BankState(tuple(mean for mean, _ in written), torch.stack([norm for _, norm in written], dim=-1))
        shares = (torch.stack(scores, dim=-1) - after.log_norms).exp()
        if self.choice is None:
            return Read(after, after.means[0], exposed | {"share": shares[..., 0]})
        logits = linear(agreement(query, key), self.choice.weight, self.choice.bias)
        choice = logits.unflatten(-1, (self.head_count, self.copies)).softmax(-1)
        exposed |= {"share": (choice * shares).sum(-1), "choice": choice}
        return Read(after, mix(after.means, choice), exposed)
