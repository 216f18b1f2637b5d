"""Compiles KCLA's Triton kernels for a GPU that is not there, and prints their names: run by `test_kcla.py`.

``python -m tests.ops.triton.compiled``, with `TRITON_CACHE_DIR` where nothing is yet.
"""

from __future__ import annotations

from typing import Any

from tests.ops.triton.interpreted import draw, run


class Absent:
    """A driver for a GPU of compute capability 9.0 that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    from triton.runtime import driver

    from lineattn.ops.triton import kcla as kernels

    def compile_only(cut: Any, kernel: Any, *arguments: Any, **flags: bool) -> None:
        found = kernel.run(*arguments, grid=cut.programs, warmup=True, **cut.sizes, **flags)
        assert found.asm["cubin"], kernel.fn.__name__
        print(kernel.fn.__name__)

    driver.set_active(Absent())
    kernels._Cut.launch = compile_only
    # Each kernel in its shortest form, with sizes of one, which Triton makes constants, and in its longest.
    for shape, past, training in (((1, 8, 1, 1, 1), None, False), ((2, 64, 14, 14, 2), 2, True)):
        given = draw(0, shape, past, training) | {"relu": training}
        x, scale = given["x"], given["running_var"]
        given |= {"gain": scale, "drop": scale[:2]} if training else dict.fromkeys(("gain", "drop", "weight"))
        run(kernels, given | {"grads": [x, x if training else None, None, None]})


if __name__ == "__main__":
    main()
