"""Nonlinear least squares for several small problems at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Past it a step is too short to change anything.
_MOST_DAMPING = 1e8


def least_squares(
    residual: Callable[[Tensor], Tensor], start: Tensor, *, steps: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    r"""Levenberg and Marquardt's steps down :math:`\lVert r(\theta_p) \rVert^2`, for each problem :math:`p` by itself.

    .. math:: \theta \leftarrow \theta - J^\top (J J^\top + \mu I)^{-1} r

    A step that makes the sum of squares greater is not taken, and the next is damped more.

    Args:
        residual: From ``(P, N)`` to ``(P, M)``; a problem's residuals depend on its own row alone.
        start: ``(P, N)``.
        steps: How many at most; it ends before where no problem gets better any more.
        tolerance: A residual that is small enough: it ends where all are.

    Returns:
        The unknowns ``(P, N)``, and the largest residual of each problem, ``(P,)``.

    Example:
        >>> root, left = least_squares(lambda x: x**2 - 2, torch.ones(1, 1), steps=20, tolerance=1e-6)
        >>> round(root.item(), 4)
        1.4142
    """
    theta = start.detach()
    damping = theta.new_full((len(theta),), 0.1)
    stalled = 0
    for _ in range(steps):
        theta.requires_grad_(True)
        left = residual(theta)
        if not left.requires_grad or stalled == 8:
            break
        slopes = [torch.autograd.grad(column.sum(), theta, retain_graph=True)[0] for column in left.unbind(1)]
        theta, left, slope = theta.detach(), left.detach(), torch.stack(slopes, 1)
        if left.abs().max() < tolerance:
            break
        gram = slope @ slope.mT
        scale = gram.diagonal(dim1=1, dim2=2).mean(1) + torch.finfo(gram.dtype).tiny
        damped = gram + torch.diag_embed((damping * scale)[:, None].expand_as(left))
        step = (slope.mT @ torch.linalg.solve(damped, left[..., None]))[..., 0]
        with torch.no_grad():
            cost, after = left.square().sum(1), residual(theta - step).square().sum(1)
        better = after < cost
        theta = torch.where(better[:, None], theta - step, theta)
        damping = torch.where(better, damping / 4, damping * 4).clamp(1e-12, _MOST_DAMPING)
        stalled = 0 if (after < 0.999 * cost).any() else stalled + 1
    with torch.no_grad():
        return theta.detach(), residual(theta).abs().amax(1)
