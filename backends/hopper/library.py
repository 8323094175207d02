"""Device functions that generated Hopper kernels call."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def counted(NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """0.0, 1.0 ... ``NUMBER - 1`` in ``LAYOUT``, that of the columns of a product.

    A thread has two neighbours of each eight columns: as a sum of multiples of eight, which are
    constants, and of its place among eight, only the latter has to be converted.
    """
    EIGHTS: gl.constexpr = gl.BlockedLayout([NUMBER // 8, 2], [8, 4], [4, 1], [1, 0])
    eighths = gl.arange(0, NUMBER // 8, layout=gl.SliceLayout(1, EIGHTS)).to(gl.float32) * 8.0
    places = gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHTS)).to(gl.float32)
    both = eighths[:, None] + places[None, :]
    return gl.convert_layout(gl.reshape(both, [NUMBER]), LAYOUT)


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
