r"""Positions as rotations: pairs of channels turn at speeds of their own, so that products know distances.

"RoFormer: Enhanced Transformer with Rotary Position Embedding" (Su et al., 2021), arXiv 2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    r"""Turns channels :math:`2j` and :math:`2j + 1` by the angle :math:`p \cdot 10000^{-2j/D}`.

    :math:`\langle R_t q, R_s k \rangle` depends on the positions only by :math:`t - s`.

    Args:
        x: ``(..., D)``, ``D`` even.
        positions: :math:`p`, of a shape that fits ``x`` without its last axis.

    Example:
        >>> q, k, at = torch.randn(8), torch.randn(8), torch.tensor
        >>> near = (rotate(q, at(5)) * rotate(k, at(3))).sum()
        >>> bool(torch.isclose(near, (rotate(q, at(2)) * k).sum(), atol=1e-5))
        True
    """
    width = x.shape[-1]
    # Formed in float64: at position 1e6, a float32 angle has lost its digits.
    speeds = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    return turn(x, positions[..., None] * speeds)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    r"""Turns channels :math:`2j` and :math:`2j + 1`, as a complex number, by the angle :math:`j`.

    Args:
        x: ``(..., D)``, ``D`` even.
        angles: ``(..., D / 2)``, of a shape that fits; sines and cosines are formed in its type.

    Example:
        >>> turn(torch.tensor([1.0, 0.0]), torch.tensor([torch.pi / 2])).round(decimals=6).tolist()
        [-0.0, 1.0]
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
