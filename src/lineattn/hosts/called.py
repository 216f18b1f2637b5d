"""Methods of the sample axis, called as networks of others call their own attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.sample.base import SampleAttention


class Called(nn.Module):
    """A method of the sample axis in the place of a network's own attention."""

    def __init__(self, attention: SampleAttention) -> None:
        super().__init__()
        self.attention = attention


def called(module: nn.Module) -> nn.Module:
    """The method that a module calls; any other module is its own."""
    return module.attention if isinstance(module, Called) else module


class InTimm(Called):
    """As timm's blocks call their attention."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _refuse_causal(self.attention, is_causal)
        return self.attention(x, None if attn_mask is None else self._positions(attn_mask))

    def _positions(self, mask: Tensor) -> Tensor:
        """``(B, N)`` of ``(B, 1, 1, N)``, or of pairs of positions that exist, ``(B, 1, N, N)``, as timm makes them for
        images of many sizes: of booleans, or added to logits."""
        seen = mask if mask.dtype == torch.bool else mask == 0
        if mask.ndim != 4 or mask.shape[1] != 1:
            raise _no_pairs(self.attention, mask)
        if mask.shape[2] == 1:
            return seen[:, 0, 0]
        there = seen[:, 0].any(1)
        if not torch.compiler.is_compiling() and not torch.equal(seen[:, 0], there[:, :, None] & there[:, None]):
            raise _no_pairs(self.attention, mask)
        return there


class InSwin(Called):
    """As timm's Swin calls the attention of its windows. A shifted window has parts that do not see each other."""

    parts = 4  # of a window that is shifted over the edges of both rows and columns

    def set_window_size(self, window_size: object) -> None:
        """timm calls it for images of another size; nothing here depends on it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attention(x)
        same = mask == 0  # (windows, N, N): pairs of one part
        first = same.to(torch.uint8).argmax(-1)  # a part's first position is its name
        leads = first == torch.arange(mask.shape[-1], device=mask.device)
        part = (leads.cumsum(-1) - 1).gather(-1, first).repeat(x.shape[0] // mask.shape[0], 1)
        out = torch.zeros_like(x)
        for i in range(self.parts):
            here = part == i
            out = torch.where(here[..., None], self.attention(x, here), out)
        return out


class InTorch(Called):
    """As `torch.nn.MultiheadAttention` is called for self-attention."""

    batch_first = True
    in_proj_bias = None  # torch.nn.TransformerEncoderLayer looks here whether it may leave out the call

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        _refuse_causal(self.attention, is_causal)
        if attn_mask is not None:
            raise _no_pairs(self.attention, attn_mask)
        if key is not query or value is not query:
            raise InputError(
                f"{type(self.attention).__name__} has memories in the place of keys and values; none fit in"
            )
        if key_padding_mask is not None:
            absent = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask < 0
            return self.attention(query, ~absent), None
        return self.attention(query), None


def _refuse_causal(attention: nn.Module, is_causal: bool) -> None:
    if is_causal:
        raise InputError(
            f"is_causal=True: {type(attention).__name__} normalises over all positions together, later ones too; use a "
            "method of the token axis"
        )


def _no_pairs(attention: nn.Module, mask: Tensor) -> InputError:
    return InputError(
        f"a mask {tuple(mask.shape)} of {mask.dtype} says which positions see which; {type(attention).__name__} takes "
        "one of positions that exist, (B, 1, 1, N) of torch.bool"
    )
