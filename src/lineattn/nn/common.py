"""Parts that several methods are made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.nn.depth.base import Site
from lineattn.ops.channels import channel_conv
from lineattn.ops.depth import Norm, attend, attend_plain


def kernel_size(channels: int) -> int:
    r"""Width of the channel convolution, :math:`\lfloor |\log_2 C + 1| / 2 \rfloor` made odd (ECA, arXiv 1910.03151).

    Example:
        >>> [kernel_size(c) for c in (16, 64, 128, 1024, 2048)]
        [3, 3, 5, 5, 7]
    """
    size = int(abs((math.log2(channels) + 1) / 2))
    return size if size % 2 else size + 1


def count_heads(channels: int, head_dim: int) -> int:
    """Heads of width ``head_dim`` in ``channels``.

    Raises:
        InputError: The width does not divide the channels.
    """
    if head_dim < 1 or channels % head_dim:
        raise InputError(f"head_dim={head_dim} does not divide the {channels} channels of a site; choose a divisor")
    return channels // head_dim


class ChannelConv(nn.Module):
    """`lineattn.ops.channels.channel_conv` with its kernel: ``(B, C) -> (B, C)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, 1, kernel_size(channels)))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, y: Tensor) -> Tensor:
        return channel_conv(y, self.weight)


def depthwise_value(channels: int) -> nn.Conv2d:
    """The value projection: depth-wise 3x3, no bias, initialised as the papers do (normal, fan-out)."""
    conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of a position, ``(B, C, H, W)``."""

    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def channel_norm(site: Site) -> nn.BatchNorm2d | LayerNorm2d:
    """The norm of a method at a site, of the kind that the network has."""
    return nn.BatchNorm2d(site.channels) if site.norm == "batch" else LayerNorm2d(site.channels)


def compare(query: Tensor, keys: Tensor) -> Tensor:
    r""":math:`\langle q, k_s \rangle`: ``(B, h, D), (B, h, L, D) -> (B, h, L)``.

    A sum of products rather than a matrix product, which autocast would take out of float32.
    """
    return (query[..., None, :] * keys).sum(-1)


def softmax_over_depth(query: Tensor, keys: Tensor) -> Tensor:
    r""":math:`\mathrm{softmax}_s(\langle q, k_s \rangle / \sqrt{D})`: ``(B, h, D), (B, h, L, D) -> (B, h, L)``."""
    return torch.softmax(compare(query, keys) / math.sqrt(query.shape[-1]), dim=-1)


def drop_path_factor(x: Tensor, drop_path: float, training: bool) -> Tensor | None:
    """Drop path, ``(B,)``: 0 with probability ``drop_path``, else one over the rest; ``None`` outside training."""
    if not training or drop_path == 0:
        return None
    keep = 1 - drop_path
    return x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32)).bernoulli_(keep) / keep


def read_out(
    x: Tensor,
    read: Tensor,
    value: nn.Conv2d | None,
    gate: Tensor | None,
    norm: nn.Module,
    *,
    relu: bool,
    gain: Tensor | None,
    drop: Tensor | None,
    shortcut: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """`lineattn.ops.depth.attend` for modules.

    A norm that somebody put in the batch norm's place (synchronised, frozen) is called as it is.
    """
    kernel = None if value is None else value.weight
    extra = {"relu": relu, "gain": gain, "drop": drop, "shortcut": shortcut, "decay": decay}
    data = norm_data(norm)
    if data is None:
        return attend_plain(x, read, kernel, gate, norm, **extra)
    return attend(x, read, kernel, gate, data, **extra)


def norm_data(norm: nn.Module) -> Norm | None:
    """A batch norm, or what `fold_norm` left of one, as data; ``None`` for any other module.

    In training, counts the batch as PyTorch's own module does.
    """
    if isinstance(norm, Offset):
        return Norm(None, norm.bias, None, None, training=False, momentum=0.0, eps=0.0)
    if type(norm) is not nn.BatchNorm2d or not norm.affine:
        return None
    momentum = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    training = norm.training or norm.running_mean is None
    return Norm(norm.weight, norm.bias, norm.running_mean, norm.running_var, training, momentum or 0.0, norm.eps)


class Offset(nn.Module):
    """What is left of a batch norm in evaluation when its slope is in the weights before it: ``(C,)``, added."""

    bias: Tensor

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", bias)

    def forward(self, y: Tensor) -> Tensor:
        return y + self.bias[:, None, None]


def fold_norm(attention: Any, *, relu: bool) -> Tensor | None:
    r"""Folds a method's ``norm`` and ``gain`` into its ``value`` for evaluation, in place.

    .. math:: V' = \frac{\gamma}{\sigma} V, \qquad b' = \beta - \frac{\mu \gamma}{\sigma}

    A ReLU doesn't let the sign of a gain through: where one is negative, the signs stay behind as the gain.

    Returns:
        The factor a channel that went into the value, ``(C,)``; ``None`` where there was no batch norm to fold.
    """
    norm, gain = attention.norm, attention.gain
    if type(norm) is not nn.BatchNorm2d or norm.running_mean is None or norm.running_var is None:
        return None
    with torch.no_grad():
        slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        offset = norm.bias - norm.running_mean * slope
        attention.gain = None
        if gain is not None:
            if relu and bool((gain < 0).any()):
                attention.gain, gain = nn.Parameter(gain.sign(), requires_grad=False), gain.abs()
            slope, offset = slope * gain, offset * gain
        attention.value.weight.mul_(slope[:, None, None, None])
        attention.norm = Offset(offset)
    return slope


def fold_into_norm(norm: Any, gain: Tensor, *, relu: bool) -> None:
    """Multiplies a gain a channel into the norm before it, in place.

    Raises:
        InputError: A ReLU stands between them and a gain is negative.
    """
    negative = int((gain < 0).sum())
    if relu and negative:
        raise InputError(
            f"{negative} of {len(gain)} gains are negative and stand behind a ReLU, so they can't be folded into the "
            "norm before it; keep init='identity' for this network (host.fuse() needs no folding)"
        )
    with torch.no_grad():
        norm.weight.mul_(gain)
        norm.bias.mul_(gain)
