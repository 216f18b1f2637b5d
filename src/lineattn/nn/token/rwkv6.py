r"""RWKV-6 (Finch): a recurrence that is read before it is written, with a bonus for the token itself.

"Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (Peng et al.; COLM 2024), arXiv 2404.05892.

.. math::
    o_t = r_t \big(S_{t-1} + \mathrm{diag}(u) \, k_t^\top v_t\big), \qquad
    S_t = \mathrm{diag}(a_t) \, S_{t-1} + k_t^\top v_t, \qquad a_t = e^{-e^{d_t}}

Cost O(T); state O(1), and the last token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Form, Layout, Row
from lineattn.nn.token.recurrent import Parts, Recurrent, gated, head_norm, wide
from lineattn.ops.convolution import preceding
from lineattn.registry import register


@register(
    "rwkv6",
    axis="token",
    title="RWKV-6",
    paper="Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (2024)",
    arxiv="2404.05892",
    cost="O(T)",
    state="O(1)",
)
class RWKV6(Recurrent):
    r"""Time mixing: a decay of the token, a bonus for the token itself, and each input mixed with the token before.

    .. math::
        o_t = r_t \big(S_{t-1} + \mathrm{diag}(u) \, k_t^\top v_t\big), \qquad
        S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1} + k_t^\top v_t, \qquad
        y_t = \big(\mathrm{SiLU}(x^g_t W_g) \odot \mathrm{LN}(o_t)\big) W_o

    .. math::
        r = x^r W_r, \quad k = x^k W_k, \quad v = x^v W_v, \quad
        g = -\exp\big(\lambda + \tanh(x^w W_1) W_2\big)

    .. math::
        x^i_t = x_t + (x_{t-1} - x_t) \odot \big(\mu_i + \tanh(z_t A_i) B_i\big), \qquad
        z_t = x_t + (x_{t-1} - x_t) \odot \mu

    The bonus :math:`u` is a linear cousin of MetaLA's self-augmentation. LN is a layer norm of each head, with
    weights. The decay of a token is not applied to what it writes, and the token after reads that as it is.
    :math:`5 C^2 + 448 C` parameters and some a channel.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; the paper's are 64 channels wide.
        mix_rank: Width between the two maps that mix an input with the token before.
        decay_rank: Width between the two maps that make a decay.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``; its recent token is the last one, ``(B, 1, C)``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Note:
        The start is that of the published first layer, but for the first maps of low rank, :math:`A_i` and
        :math:`W_1`: small numbers here, and zeros there, from which the second ones get no gradient in the first step.
        Further layers start with other :math:`\mu`, :math:`\lambda` and :math:`u`. The published norm has a larger
        epsilon.

    Example:
        >>> mixer = RWKV6(64, heads=4)
        >>> out, state = mixer(torch.randn(2, 10, 64))
        >>> out.shape, state.memory.shape, state.recent.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]), torch.Size([2, 1, 64]))

    Reference:
        "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (2024), arXiv 2404.05892, section 4.2.
    """

    row = Row(query="input", key="input", value="input", decay="input")

    def __init__(self, channels: int, heads: int = 8, *, mix_rank: int = 32, decay_rank: int = 64) -> None:
        super().__init__(channels, heads, key_width=channels, scale=1.0)
        for name, found in (("mix_rank", mix_rank), ("decay_rank", decay_rank)):
            if found < 1:
                raise InputError(f"{name} is {found}; it must be at least 1")
        place = torch.arange(channels).to(torch.get_default_dtype())
        far, near = 1 - place / channels, 1 - (place / channels).sqrt()
        self.mu = nn.Parameter(far.clone())
        self.mus = nn.Parameter(torch.stack([near, far, far, far, near]))  # of r, k, v, w and g
        self.mix_in = nn.Linear(channels, 5 * mix_rank, bias=False)
        self.mix_out = nn.Parameter(torch.empty(5, mix_rank, channels))
        self.r_proj = nn.Linear(channels, channels, bias=False)
        self.k_proj = nn.Linear(channels, channels, bias=False)
        self.v_proj = nn.Linear(channels, channels, bias=False)
        narrow, widen = nn.Linear(channels, decay_rank, bias=False), nn.Linear(decay_rank, channels)
        self.decay = nn.Sequential(narrow, nn.Tanh(), widen)
        self.g_proj = nn.Linear(channels, channels, bias=False)
        self.bonus = nn.Parameter(0.1 * ((place + 1) % 3 - 1))
        self.norm_weight = nn.Parameter(torch.ones(channels))
        self.norm_bias = nn.Parameter(torch.zeros(channels))
        self.out_proj = nn.Linear(channels, channels, bias=False)
        with torch.no_grad():
            for weight in (self.mix_in.weight, self.mix_out, narrow.weight, widen.weight):
                nn.init.uniform_(weight, -0.01, 0.01)
            widen.bias.copy_(-6 + 5 * (place / max(channels - 1, 1)) ** 0.7)

    def local(self, x: Tensor, recent: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Each token mixed with the one before, for r, k, v, w and g: ``(B, T, 5, C)``."""
        (previous,), recent = preceding(x, 1, recent, *layout)
        change = previous - x
        low = self.mix_in(x + change * self.mu).tanh().unflatten(2, (5, -1))
        shares = self.mus + torch.einsum("btir,irc->btic", low, self.mix_out)
        return x[:, :, None] + change[:, :, None] * shares, recent

    def parts(self, x: Tensor) -> Parts:
        r, k, v, w, _ = x.unbind(2)
        q, k, v, logits = self._heads(self.r_proj(r), self.k_proj(k), self.v_proj(v), self.decay(w))
        return Parts(q, k, v, -logits.exp())

    def read(self, tokens: Parts, memory: Tensor | None, layout: Layout, form: Form) -> tuple[Tensor, Tensor]:
        # Written one token late, so that the recurrence, which reads after, reads what was there before.
        late, (k, v, g) = _late(tokens, layout.cu_seqlens)
        out, memory = super().read(late, memory, layout, form)
        memory = g[:, 0].exp()[..., None] * memory + k[:, 0, :, :, None] * v[:, 0, :, None]
        return out + self._own(tokens)[..., None] * tokens.v, memory

    def attention(self, parts: Parts) -> Tensor:
        late = super().attention(_late(parts)[0])
        return F.pad(late[..., 1:], (0, 1)) + self._own(parts).transpose(1, 2).diag_embed()

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        out = head_norm(out).flatten(2) * self.norm_weight + self.norm_bias
        return gated(x[:, :, 4], out, self.g_proj, self.out_proj)

    def state_size(self, tokens: int) -> int:
        return super().state_size(tokens) + self.channels

    def _own(self, parts: Parts) -> Tensor:
        """How much a token reads of its own value, ``(B, T, h)``."""
        return (parts.q * wide(self.bonus).unflatten(0, (self.heads, -1)) * parts.k).sum(-1)


def _late(parts: Parts, cu_seqlens: Tensor | None = None) -> tuple[Parts, list[Tensor]]:
    """With keys, values and decays of the token before; and those of the last token, ``(B, 1, h, ...)``."""
    q, *written = parts
    shifted, last = zip(*(preceding(t, 1, cu_seqlens=cu_seqlens) for t in written), strict=True)
    return Parts(q, *(t for (t,) in shifted)), list(last)
