r"""Key-Correlated Layer Attention as functions: what a layer writes into the running mean, and what it reads there.

.. math::
    S_h = \lVert k_h \rVert / D_h, \qquad
    \ell' = \log(e^{\ell} + e^{S}), \qquad
    m' = m + \sigma(S - \ell)(x - m), \qquad
    \tilde x = x + s \odot \phi(\mathrm{BN}(\sigma(\Phi \rho) \odot V * m'))

"Enhancing Layer Interaction Using Key-Correlated Layer Attention" (2026), arXiv 2606.28405.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lineattn.ops.channels import channel_conv, heads, per_channel, pool
from lineattn.ops.depth import Norm, accumulate, attend, running_mean

# Below this length a key has no direction; it also bounds the gradient of the direction.
SHORT = 1e-6


class Weights(NamedTuple):
    """Parameters of a layer.

    Attributes:
        query: Channel convolution, ``(1, 1, k)``.
        key: Channel convolution, ``(1, 1, k)``.
        inv_temperature: :math:`1 / D_h`, ``(h,)``.
        mixing: :math:`\\Phi`, ``(h, h)``, or ``None`` for the identity.
        value: :math:`V`, depth-wise, ``(C, 1, 3, 3)``.
    """

    query: Tensor
    key: Tensor
    inv_temperature: Tensor
    mixing: Tensor | None
    value: Tensor


class Form(NamedTuple):
    """Constants of a layer.

    Attributes:
        clamp: Largest score, or ``None``; a clamped score passes no gradient on.
        gate_eps: Added to the normaliser of what is read.
        relu: Whether :math:`\\phi` is a ReLU, or the identity.
    """

    clamp: float | None = None
    gate_eps: float = 0.0
    relu: bool = True


class Past(NamedTuple):
    """What a mean can be made from again: the last one that was kept, and the maps and scores since.

    .. math:: m_t = e^{\\ell_0 - \\ell_t} m_0 + \\sum_s e^{S_s - \\ell_t} x_s

    Attributes:
        mean: :math:`m_t` itself; by it, ``log_norm`` and ``version`` a state is known that has been changed since.
        log_norm: :math:`\\ell_t`.
        version: How often the mean had been written in place.
        base: :math:`m_0`, ``(B, C, H, W)``.
        base_log_norm: :math:`\\ell_0`, ``(B, h)``.
        maps: :math:`x_s`, each like ``base``.
        scores: :math:`S_s`, each like ``base_log_norm``.
    """

    mean: Tensor
    log_norm: Tensor
    version: int
    base: Tensor
    base_log_norm: Tensor
    maps: tuple[Tensor, ...] = ()
    scores: tuple[Tensor, ...] = ()


def address(pooled: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key, ``(B, h, D)``, and score, ``(B, h)``, of a pooled map ``(B, C)``."""
    count = len(weights.inv_temperature)
    query = heads(channel_conv(pooled, weights.query), count)
    key = heads(channel_conv(pooled, weights.key), count)
    return query, key, score(key, weights.inv_temperature, form.clamp)


def score(key: Tensor, inv_temperature: Tensor, clamp: float | None = None) -> Tensor:
    r""":math:`S_h = \lVert k_h \rVert / D_h`: ``(B, h, D) -> (B, h)``."""
    length = torch.sqrt(key.square().sum(-1) + torch.finfo(torch.float32).tiny)
    found = length * inv_temperature.to(length.dtype)
    return found if clamp is None else found.clamp(max=clamp)


def agreement(query: Tensor, key: Tensor) -> Tensor:
    r""":math:`\rho_h = \langle q_h, k_h / \lVert k_h \rVert \rangle`: twice ``(B, h, D) -> (B, h)``."""
    return (query * key).sum(-1) / key.norm(dim=-1).clamp_min(SHORT)


def gate(query: Tensor, key: Tensor, log_norm: Tensor, weights: Weights, form: Form) -> Tensor:
    r""":math:`\sigma(\Phi \rho)` with :math:`\rho_h = \langle q_h, k_h / \lVert k_h \rVert \rangle`, ``(B, h)``."""
    rho = agreement(query, key)
    if weights.mixing is not None:
        # Not a matrix product: under autocast it would leave float32.
        rho = (rho[:, None] * weights.mixing.to(rho.dtype)).sum(-1)
    found = torch.sigmoid(rho)
    if form.gate_eps:
        found = found / (1 + form.gate_eps * torch.exp(-log_norm))
    return found


def write(
    x: Tensor, score: Tensor, mean: Tensor | None = None, log_norm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The mean ``(B, C, H, W)`` and its log-normaliser ``(B, h)`` with one more map in them."""
    if mean is None or log_norm is None:
        return x.to(score.dtype), score
    log_norm, share = accumulate(log_norm, score)
    return running_mean(mean, x, share), log_norm


def kcla_plain(
    x: Tensor,
    mean: Tensor | None,
    log_norm: Tensor | None,
    *,
    weights: Weights,
    form: Form,
    norm: Norm,
    gain: Tensor | None,
    drop: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer in PyTorch's operators; returns the output, the mean, its log-normaliser, and the score."""
    query, key, weight = address(pool(x), weights, form)
    mean, log_norm = write(x, weight, mean, log_norm)
    opening = per_channel(gate(query, key, log_norm, weights, form), x.shape[1])
    out = attend(x, mean, weights.value, opening, norm, relu=form.relu, gain=gain, drop=drop)
    return out, mean, log_norm, weight
