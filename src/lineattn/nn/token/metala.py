r"""MetaLA: linear attention with a query and a decay, and without a key.

"MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map" (Chou, Yao, Wang, Pan, Zhu, Zhong, Qiao, Wu, Xu,
Li; NeurIPS 2024), arXiv 2411.10741.

.. math::
    S_t = \mathrm{diag}(a_t) \, S_{t-1} + (1 - a_t)^\top v_t, \qquad o_t = q_t S_t / \sqrt{K}, \qquad
    a_t = \sigma(x_t W_\alpha)^{1/16}

What a channel of the state forgets is what it takes up of the token: with a decay that depends on the token, a key of
its own adds nothing to what attention maps can be expressed. Cost O(T) for T tokens; state O(1): ``K * V`` numbers a
head, and the last three tokens of the short convolution.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.token.base import Row
from lineattn.nn.token.recurrent import Parts, Recurrent, gated, head_norm
from lineattn.registry import register

Augmentation = Literal["official", "gated", "linear", "none"]


@register(
    "metala",
    axis="token",
    title="MetaLA",
    paper="MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map (2024)",
    arxiv="2411.10741",
    cost="O(T)",
    state="O(1)",
)
class MetaLA(Recurrent):
    r"""Linear attention whose keys are one minus its decays.

    .. math::
        q = x' W_q, \quad v = x' W_v, \quad g = \log \sigma(x' W_\alpha) / \tau, \quad k = 1 - e^g, \qquad
        x' = \mathrm{SiLU}(\mathrm{conv}_4(x))

    .. math::
        S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1} + k_t^\top v_t, \qquad
        o_t = q_t S_t / \sqrt{K} + \sigma\big(\langle q_t \odot w, k_t \rangle \, v_t\big)

    .. math:: y_t = \big(\mathrm{SiLU}(x'_t W_g + b_g) \odot \mathrm{LN}(o_t)\big) W_o

    The second term of :math:`o_t` is the self-augmentation, by which a token sees itself more than the recurrence lets
    it; LN is a layer norm of each head, without weights. :math:`4 C^2 + 5.5 C` parameters.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``.
        key_width: Width of queries and decays of all heads; half the channels by default.
        conv: Length of the short convolution; 0 for none. The paper has 2 for associative recall, else 4.
        key: Keys of their own, :math:`k = x' W_k`, as in the paper's ablation; :math:`C^2 / 2` parameters more.
        augmentation: :math:`\sigma(wv)` (``official``), :math:`\sigma(w) v` (``gated``), :math:`w v` (``linear``) or
            ``none``, for the weight :math:`w_t = \langle q_t \odot w, k_t \rangle` a head.
        norm: The layer norm of each head.
        gate: The gate before the last projection.
        tau: :math:`\tau`; where the logit is zero, what is there is halved in so many tokens.
        scale: What queries are multiplied by where the state is read; :math:`1 / \sqrt{K}` by default.
        init_std: Standard deviation of the projections' start, biases being zero, as in the published model. ``None``:
            what its layer does before the model draws again, Xavier's at a gain of :math:`2^{-2.5}` for queries and
            decays, and PyTorch's for the others.

    Shape:
        - ``x``: ``(B, T, C)``; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``state``: `RecurrentState` or ``None``.
        - Returns ``(B, T, C)`` and the new `RecurrentState`.

    Raises:
        InputError: An argument that can't be; from `forward`, see `TokenMixer`.

    Note:
        The parameters have the published code's names, so that a layer of its checkpoints (``token_mixer.``) loads as
        it is. Where paper and code differ this is the code: SiLU behind the convolution, a bias in the gate, a query
        that is scaled in the recurrence but not in the self-augmentation. Its self-augmentation is that of the paper's
        equation 22; equation A38 leaves the sigmoid out, which is ``linear``. Against the code, keys are formed in
        float32 at least (in half precision :math:`1 - e^g` is zero for channels that forget slowly, which then never
        write), the state goes on rightly from any piece of a sequence, and padding may stand anywhere.

    Example:
        >>> mixer = MetaLA(64, heads=4)
        >>> sum(p.numel() for p in mixer.parameters())
        16736
        >>> x = torch.randn(2, 10, 64)
        >>> out, state = mixer(x)
        >>> out.shape, state.memory.shape, state.recent.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 8, 16]), torch.Size([2, 3, 64]))
        >>> begun, state = mixer(x[:, :9])
        >>> last, state = mixer.step(x[:, 9], state)
        >>> torch.allclose(last, out[:, 9], atol=1e-6)
        True

    Reference:
        "MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map" (2024), arXiv 2411.10741, equations
        20-22 and appendix A5.
    """

    row = Row(query="input", key="decay", value="input", decay="input")

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        key_width: int | None = None,
        conv: int = 4,
        key: bool = False,
        augmentation: Augmentation = "official",
        norm: bool = True,
        gate: bool = True,
        tau: float = 16.0,
        scale: float | None = None,
        init_std: float | None = 0.02,
    ) -> None:
        width = channels // 2 if key_width is None else key_width
        super().__init__(channels, heads, key_width=width, conv=conv, scale=scale)
        if augmentation not in get_args(Augmentation):
            raise InputError(f"augmentation is {augmentation!r}; it must be 'official', 'gated', 'linear' or 'none'")
        if tau <= 0:
            raise InputError(f"tau is {tau}; it must be positive")
        self.augmentation, self.norm, self.tau, self.init_std = augmentation, norm, tau, init_std
        self.q_proj = nn.Linear(channels, width, bias=False)
        self.k_gate = nn.Linear(channels, width, bias=False)
        self.k_proj = nn.Linear(channels, width, bias=False) if key else None
        self.v_proj = nn.Linear(channels, channels, bias=False)
        self.g_proj = nn.Linear(channels, channels) if gate else None
        self.out_proj = nn.Linear(channels, channels, bias=False)
        self.aug_balance = None if augmentation == "none" else nn.Parameter(torch.zeros(width))
        if key:
            self.row = self.row._replace(key="input")
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        if self.init_std is None:
            for layer in (self.q_proj, self.k_gate):
                nn.init.xavier_uniform_(layer.weight, gain=2**-2.5)
            return
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=self.init_std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def parts(self, x: Tensor) -> Parts:
        q, logits, v = self._heads(self.q_proj(x), self.k_gate(x), self.v_proj(x))
        g = F.logsigmoid(logits) / self.tau
        # Not 1 - exp(g), which has lost the digits of a small g.
        (k,) = (-torch.expm1(g),) if self.k_proj is None else self._heads(self.k_proj(x))
        return Parts(q, k, v, g)

    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        if self.aug_balance is not None:
            out = out + self._augment(self.aug_balance, parts)
        return gated(x, head_norm(out) if self.norm else out, self.g_proj, self.out_proj)

    def _augment(self, balance: Tensor, parts: Parts) -> Tensor:
        """What a token adds of its own value, ``(B, T, h, V)``."""
        own = (parts.q * parts.k * balance.unflatten(0, (self.heads, -1))).sum(-1, keepdim=True)
        if self.augmentation == "gated":
            return own.sigmoid() * parts.v
        if self.augmentation == "linear":
            return own * parts.v
        # A sigmoid is tanh(y / 2) / 2 and a half, which the norm takes away again, but with digits of what is small.
        swing = (own * parts.v / 2).tanh() / 2
        return swing if self.norm else swing + 0.5

    def extra_repr(self) -> str:
        return f"heads={self.heads}, augmentation={self.augmentation!r}, norm={self.norm}, tau={self.tau}"
