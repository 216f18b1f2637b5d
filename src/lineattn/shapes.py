"""The axis letters of the project, and array types that spell them.

======  ==========================================
letter  axis
======  ==========================================
``B``   batch
``C``   channels
``H W`` space (rows, columns)
``N``   positions
``T``   tokens of a sequence
``L``   layers
``M``   memory slots
``h``   heads
``D``   width of a head, ``C = h * D``
======  ==========================================

The jaxtyping aliases exist for the type checker and for tests; at run time nothing is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Map = Float[Tensor, "B C H W"]
    Pooled = Float[Tensor, "B C"]
    Heads = Float[Tensor, "B h"]
