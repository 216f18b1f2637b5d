"""What gates over channels are made of; no method by itself."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from lineattn.errors import InputError
from lineattn.nn.depth.base import DepthAttention


class ChannelGate(DepthAttention):
    r"""Base of methods that multiply a block's branch by a gate a sample and channel, before the shortcut is added.

    .. math:: \tilde b = (1 + \mathrm{gain} \odot (g - 1)) \odot b

    With ``init="paper"`` the published :math:`g \odot b`. A subclass adds the gate. Where the network has drop path,
    the branch arrives here behind it: in training its gate is that of the branch as it was kept and scaled.
    """

    position: ClassVar[Literal["after", "branch"]] = "branch"

    def _gated(self, branch: Tensor, gate: Tensor) -> Tensor:
        """``(B, C, H, W)`` times ``(B, C)``: one pass over the map."""
        factor = gate if self.gain is None else 1 + self.gain.to(gate.dtype) * (gate - 1)
        return branch * factor.to(branch.dtype)[:, :, None, None]

    def _fold_gain(self, gain: Tensor) -> None:
        others = int((gain != 1).sum())
        if others:
            raise InputError(
                f"{others} of {len(gain)} gains are not 1, and 1 + gain * (gate - 1) is no gate without them; keep "
                "init='identity' for this network"
            )


def squeezed(channels: int, reduction: int) -> int:
    """Width of a gate's hidden layer: ``channels / reduction`` rounded down, but at least 8.

    Where a ReLU turns all of a few units off, a gate learns nothing; published ImageNet networks have more anyway.

    Raises:
        InputError: The reduction is not positive.

    Example:
        >>> squeezed(256, 16), squeezed(16, 16)
        (16, 8)
    """
    if reduction < 1:
        raise InputError(f"reduction is {reduction}; it must be at least 1")
    return max(8, channels // reduction)
