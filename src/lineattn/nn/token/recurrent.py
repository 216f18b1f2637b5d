r"""The form that the methods of the token axis share: a state of fixed size that decays, is written, and is read.

.. math::
    S_t = \mathrm{diag}(a_t) \, S_{t-1} + k_t^\top v_t, \qquad o_t = s \, q_t S_t, \qquad a_t = e^{g_t}

A method says what its queries, keys, values and decays are made from, and what it makes of what is read. No method by
itself.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lineattn.errors import InputError
from lineattn.nn.token.base import Form, Layout, TokenMixer, exists
from lineattn.ops.attention_map import attention_map, scan_parallel
from lineattn.ops.convolution import causal_convolution
from lineattn.ops.scan import mask_padding, scan, scan_chunked, scan_loop

_FORMS = {"auto": scan, "parallel": scan_parallel, "chunked": scan_chunked, "loop": scan_loop}


class RecurrentState(NamedTuple):
    """What later tokens need of earlier ones.

    Attributes:
        memory: :math:`S`, ``(B, h, K, V)``, at least float32.
        recent: The last tokens, or what a convolution makes of them, ``(B, n - 1, W)``, for a short convolution of
            ``n``; ``(B, 0, W)`` without one.
    """

    memory: Tensor
    recent: Tensor


class Parts(NamedTuple):
    """What a recurrence is made of: queries and keys ``(B, T, h, K)``, values ``(B, T, h, V)`` and the logarithms of
    the decays, ``(B, T, h, K)``, or ``(B, T, h)`` for one a head; all at least float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class Recurrent(TokenMixer):
    """A method that is a gated linear recurrence.

    Args:
        channels: Width ``C``.
        heads: Heads ``h``; they divide the channels and the keys.
        divided: What heads have to divide in the place of the channels.
        key_width: Width of the keys of all heads.
        value_width: Width of the values of all heads, so many channels by default.
        conv: Length of the short convolution before everything else; 0 for none.
        conv_width: Channels that it runs over; ``C`` by default.
        conv_bias: Whether it has a bias.
        piece: Tokens at a time, in every form, with the memory handed on; what they are made of is made again for the
            gradients. For methods whose parts are far wider than the tokens. ``None`` for all at once.
        scale: What queries are multiplied by, see `lineattn.ops.scan`.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        *,
        divided: int | None = None,
        key_width: int,
        value_width: int | None = None,
        conv: int = 0,
        conv_width: int | None = None,
        conv_bias: bool = False,
        piece: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(channels, heads, divided=divided)
        value_width = channels if value_width is None else value_width
        for name, width in (("key_width", key_width), ("value_width", value_width)):
            if width < 1 or width % heads:
                raise InputError(f"{name} is {width}; it must be a multiple of the {heads} heads")
        if conv < 0:
            raise InputError(f"conv is {conv}; it must be the length of a convolution, or 0 for none")
        self.key_width, self.value_width, self.piece = key_width, value_width, piece
        self.scale = (key_width // heads) ** -0.5 if scale is None else scale
        width = channels if conv_width is None else conv_width
        self.conv1d = nn.Conv1d(width, width, conv, groups=width, bias=conv_bias) if conv else None

    @abstractmethod
    def parts(self, x: Tensor) -> Parts:
        """Of what `local` found."""

    @abstractmethod
    def read_out(self, x: Tensor, out: Tensor, parts: Parts) -> Tensor:
        """What the method puts out, ``(B, T, C)``, from what it read, ``(B, T, h, V)``, and from what `local` found."""

    def local(self, x: Tensor, recent: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Of each token and those just before it, ``(B, T, ...)``, and the `recent` ones for later tokens.

        By default the short convolution, and SiLU; the tokens themselves without one.
        """
        if self.conv1d is None:
            return x, x.new_zeros(layout.count(x), 0, *x.shape[2:])
        out, recent = causal_convolution(x, self.conv1d.weight[:, 0], recent, *layout)
        return F.silu(out if self.conv1d.bias is None else out + self.conv1d.bias).to(x.dtype), recent

    def read(self, tokens: Parts, memory: Tensor | None, layout: Layout, form: Form) -> tuple[Tensor, Tensor]:
        """What tokens read, ``(B, T, h, V)``, and the memory after; those that there are not are zeros.

        By default of the memory in which they have been written.
        """
        return _FORMS[form](*tokens, scale=self.scale, initial_state=memory, cu_seqlens=layout.cu_seqlens)

    def attention(self, parts: Parts) -> Tensor:
        """The map, ``(B, h, T, T)``, that applied to the values is what `read` finds from the start."""
        return attention_map(parts.q, parts.k, parts.g, scale=self.scale)

    def moved_on(self, memory: Tensor, tokens: int | Tensor) -> Tensor:
        """The memory as it is seen from so many tokens later, ``(B,)`` or one number; before, if it is less than zero.

        By default as it is.
        """
        return memory

    def mix(self, x: Tensor, state: RecurrentState | None, layout: Layout, form: Form) -> tuple[Tensor, RecurrentState]:
        x, recent = self.local(x, None if state is None else state.recent, layout)
        memory = None if state is None else state.memory
        if self.piece is None or x.shape[1] <= self.piece:
            out, after = self._recur(x, memory, layout, form)
            return out, RecurrentState(after, recent)
        run = self._recur
        if torch.is_grad_enabled():
            run = partial(checkpoint, self._recur, use_reentrant=False, preserve_rng_state=False)
        if memory is None:
            key, value = self.key_width // self.heads, self.value_width // self.heads
            memory = wide(x).new_zeros(layout.count(x), self.heads, key, value)
        outs, memories = [], [memory] if layout.cu_seqlens is None else list(memory.split(1))
        for piece, which, inside in layout.pieces(x, self.piece):
            out, after = run(piece, torch.cat(memories[which]), inside, form)
            memories[which] = [after] if layout.cu_seqlens is None else after.split(1)
            outs.append(out)
        return torch.cat(outs, 1), RecurrentState(torch.cat(memories), recent)

    def _recur(self, x: Tensor, memory: Tensor | None, layout: Layout, form: Form) -> tuple[Tensor, Tensor]:
        """What is put out, and the memory after; of what `local` found."""
        parts = tokens = self.parts(x)
        end: int | Tensor = x.shape[1]
        if layout.lengths is not None:
            end = layout.lengths
            tokens = Parts(*mask_padding(*parts, exists(end, x.shape[1])))
        elif layout.cu_seqlens is not None:
            end = layout.cu_seqlens[1:].to(x.device)
            if memory is not None:  # of sequences whose places are counted from the start of the row
                memory = self.moved_on(memory, -layout.cu_seqlens[:-1].to(x.device))
        out, after = self.read(tokens, memory, layout, form)
        return self.read_out(x, out, parts), self.moved_on(after, end)

    def state_size(self, tokens: int) -> int:
        recent = 0 if self.conv1d is None else self.conv1d.in_channels * (self.conv1d.kernel_size[0] - 1)
        return self.key_width * self.value_width // self.heads + recent

    def weights(self, x: Tensor) -> dict[str, Tensor]:
        self._check(x)
        parts = self.parts(self.local(x, None, Layout())[0])
        return {**parts._asdict(), "attention": self.attention(parts)}

    def _heads(self, *tensors: Tensor) -> list[Tensor]:
        """``(B, T, h * D) -> (B, T, h, D)``, at least float32."""
        return [wide(t).unflatten(2, (self.heads, -1)) for t in tensors]


def wide(t: Tensor) -> Tensor:
    """In float32 at least."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def head_norm(out: Tensor) -> Tensor:
    """A layer norm of each head, ``(B, T, h, V)``, without weights."""
    return F.layer_norm(out, out.shape[3:], eps=1e-5)


def rms_norm(out: Tensor, norm: nn.RMSNorm) -> Tensor:
    """``norm`` of ``(B, T, W)`` in the type of what was read, which under lower weights is wider than theirs."""
    return F.rms_norm(out, norm.normalized_shape, norm.weight.to(out.dtype), norm.eps)


def start_of_steps(count: int) -> Tensor:
    """So many numbers whose softplus is log-uniform between 0.001 and 0.1, the steps that state spaces start with.

    Example:
        >>> steps = F.softplus(start_of_steps(100))
        >>> bool(steps.min() > 0.0009) and bool(steps.max() < 0.11)
        True
    """
    step = torch.empty(count).uniform_(math.log(0.001), math.log(0.1)).exp()
    return step + torch.log(-torch.expm1(-step))


def gated(x: Tensor, out: Tensor, gate: nn.Module | None, project: nn.Module) -> Tensor:
    """What was read, ``(B, T, h, V)``, through a gate from the tokens and the last projection, ``(B, T, C)``."""
    out = out.flatten(2)
    if gate is not None:
        out = F.silu(gate(x)) * out
    return project(out.to(x.dtype))
