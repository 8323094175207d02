"""Device functions that generated Hopper kernels call."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def meet():
    """Wait until both consumer warpgroups are here (named barrier 9, 256 threads).

    One element a thread: the instruction runs once in each of the 128 threads of a warpgroup.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nothing = gl.full([128], 0, gl.int32, layout=THREADS)
    gl.inline_asm_elementwise(
        "{ bar.sync 9, 256; mov.b32 $0, $1; }", "=r,r", [nothing], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
