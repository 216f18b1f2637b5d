r"""A language model of any method of the token axis.

.. math::
    x \leftarrow x + \mathrm{Mixer}(\mathrm{Norm}(x)), \qquad x \leftarrow x + \mathrm{GLU}(\mathrm{Norm}(x)), \qquad
    \mathrm{logits} = \mathrm{Norm}(x) W^\top

Positions are told to the model by its mixers alone. The names of its parts, and so of its weights, are those of
MetaLA's published checkpoints (arXiv 2411.10741).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from lineattn import registry
from lineattn.errors import InputError
from lineattn.nn.token.base import TokenMixer

Norm = Literal["simple_rms", "rms", "layer"]


class GatedMLP(nn.Module):
    r"""What stands between two mixers, and sees each token by itself.

    .. math:: y = (\mathrm{SiLU}(x W_1) \odot x W_2) W_3

    Args:
        channels: Width of a token.
        hidden: Width inside.
        bias: Biases, which the published model has not.

    Shape:
        - Input and output: ``(B, T, C)``.
    """

    def __init__(self, channels: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.l1 = nn.Linear(channels, hidden, bias=bias)
        self.l2 = nn.Linear(channels, hidden, bias=bias)
        self.l3 = nn.Linear(hidden, channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(F.silu(self.l1(x)) * self.l2(x))


class Block(nn.Module):
    """A mixer and a gated MLP, each behind a norm and beside a shortcut.

    Args:
        mixer: The mixer.
        hidden: Width inside the MLP; 0 for none.
        norm: ``simple_rms``, without weights; ``rms`` or ``layer``.
        bias: Biases in the MLP.

    Shape:
        - ``x``: ``(B, T, C)``; ``state``, ``mask`` and ``cu_seqlens``: those of the mixer.
        - Returns ``(B, T, C)`` and the mixer's new state.
    """

    def __init__(self, mixer: TokenMixer, hidden: int, *, norm: Norm = "simple_rms", bias: bool = False) -> None:
        super().__init__()
        self.token_norm = norm_of(norm, mixer.channels)
        self.token_mixer = mixer
        self.channel_norm = norm_of(norm, mixer.channels) if hidden else None
        self.channel_mixer = GatedMLP(mixer.channels, hidden, bias=bias) if hidden else None

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        out, state = self.token_mixer(self.token_norm(x), state, mask, cu_seqlens=cu_seqlens)
        x = x + out
        if self.channel_mixer is not None and self.channel_norm is not None:
            x = x + self.channel_mixer(self.channel_norm(x))
        return x, state


class LanguageModel(nn.Module):
    r"""Logits of the next token after each token.

    Args:
        vocabulary: Number of tokens that there are.
        channels: Width of a token.
        depth: Blocks.
        mixer: A method of the token axis.
        mixer_args: Its arguments beside the width, such as ``heads``.
        hidden: Width inside the MLPs; 0 for none. By default 8/3 of the width, rounded up to a multiple of 64.
        norm: ``simple_rms``, without weights, as published; ``rms`` or ``layer``.
        tied: Use the embedding for the logits too.
        dropout: Probability of dropping a number of the embedded tokens, in training.
        init_std: Standard deviation of embeddings and of the weights of linear maps at the start; of those that lead
            back to the shortcut, :math:`\sqrt{2 \cdot \mathrm{depth}}` times smaller. What else a mixer has starts as
            the mixer has it.

    Shape:
        - ``tokens``: ``(B, T)`` of integers; ``mask``: ``(B, T)`` of booleans, true where there is a token.
        - ``states``: Those of the blocks, as a call before returned them, or ``None``.
        - ``cu_seqlens``: Where sequences that are packed in a batch of one begin, and the end of the last; see
          `lineattn.ops.scan`.
        - Returns logits ``(B, T, V)``, of the last ``keep`` tokens where that is not 0, and the new states.

    Raises:
        InputError: An argument that can't be.

    Example:
        >>> import torch
        >>> net = LanguageModel(256, 64, 2, mixer="metala", mixer_args={"heads": 4})
        >>> tokens = torch.randint(256, (1, 10))
        >>> logits, states = net(tokens)
        >>> logits.shape, net.state_size(10), net.state_size(10_000)
        (torch.Size([1, 10, 256]), 1408, 1408)
        >>> _, states = net(tokens[:, :9])
        >>> last, states = net(tokens[:, 9:], states)
        >>> torch.allclose(last[:, 0], logits[:, 9], atol=1e-6)
        True

    Reference:
        "MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map" (2024), arXiv 2411.10741, appendix A5.
    """

    def __init__(
        self,
        vocabulary: int,
        channels: int,
        depth: int,
        *,
        mixer: str = "metala",
        mixer_args: Mapping[str, Any] | None = None,
        hidden: int | None = None,
        norm: Norm = "simple_rms",
        tied: bool = True,
        dropout: float = 0.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        for name, number in (("vocabulary", vocabulary), ("channels", channels), ("depth", depth)):
            if number < 1:
                raise InputError(f"{name} is {number}; it must be 1 or more")
        for name, value in (("hidden", hidden or 0), ("init_std", init_std)):
            if value < 0:
                raise InputError(f"{name} is {value}; it must be 0 or more")
        if not 0 <= dropout < 1:
            raise InputError(f"dropout is {dropout}; it must be 0 or more and below 1")
        if hidden is None:
            hidden = -(-8 * channels // (3 * 64)) * 64
        mixers = [make_mixer(mixer, channels, mixer_args or {}) for _ in range(depth)]
        self.embed_tokens = nn.Embedding(vocabulary, channels)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(one, hidden, norm=norm) for one in mixers)
        self.final_norm = norm_of(norm, channels)
        # None where the embedding is used: two names for one tensor would be averaged, and saved, twice.
        self.lm_head = None if tied else nn.Linear(channels, vocabulary, bias=False)
        self._start(init_std)

    def _start(self, std: float) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=std)
        back = {"out_proj", "l3"}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                narrower = (2 * len(self.layers)) ** -0.5 if name.rpartition(".")[2] in back else 1.0
                nn.init.normal_(module.weight, std=std * narrower)

    def forward(
        self,
        tokens: Tensor,
        states: Sequence[Any] | None = None,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        x, after = self.features(tokens, states, mask, cu_seqlens=cu_seqlens)
        return self.logits(x[:, -keep:]), after

    def logits(self, features: Tensor) -> Tensor:
        """``(..., C) -> (..., V)``."""
        return F.linear(features, (self.lm_head or self.embed_tokens).weight)

    def features(
        self,
        tokens: Tensor,
        states: Sequence[Any] | None = None,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """What the logits are made from, ``(B, T, C)``, and the new states."""
        x = self.dropout(self.embed_tokens(tokens))
        after: list[Any] = []
        for layer, state in zip(self.layers, states or [None] * len(self.layers), strict=True):
            x, state = layer(x, state, mask, cu_seqlens=cu_seqlens)
            after.append(state)
        return self.final_norm(x), tuple(after)

    def state_size(self, tokens: int) -> int:
        """Numbers that the states of a sequence hold after so many tokens."""
        mixers = [module for module in self.modules() if isinstance(module, TokenMixer)]
        return sum(mixer.state_size(tokens) for mixer in mixers)


def norm_of(kind: Norm, channels: int) -> nn.Module:
    """A norm of tokens by its name.

    Raises:
        InputError: There is none of that name.
    """
    if kind not in get_args(Norm):
        raise InputError(f"norm is {kind!r}; it must be 'simple_rms', 'rms' or 'layer'")
    if kind == "layer":
        return nn.LayerNorm(channels, eps=1e-5)
    return nn.RMSNorm(channels, eps=1e-6, elementwise_affine=kind == "rms")


def make_mixer(name: str, channels: int, arguments: Mapping[str, Any]) -> TokenMixer:
    """A method of the token axis by its name, with arguments that it may not take.

    Raises:
        InputError: No such method or argument, or values that can't be.
    """
    cls = registry.get(name, axis="token").cls
    try:
        return cls(channels, **arguments)
    except TypeError as error:
        raise InputError(f"{name} can't be built with {dict(arguments)}: {error}") from error
