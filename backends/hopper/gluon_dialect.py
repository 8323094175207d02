"""``tl`` as generated functions see it in Gluon kernels.

Everything is Triton's own but for constants: in Gluon a tile needs a layout, so that a constant is
a scalar here, which every operation spreads to the tile that it meets.
"""

from triton.language import *  # noqa: F403
from triton.language import core


@core.builtin
def full(shape, value, dtype, _semantic=None):
    """A scalar ``value``, whatever ``shape``."""
    value = core._unwrap_if_constexpr(value)
    dtype = core._unwrap_if_constexpr(dtype)
    if isinstance(value, core.tensor):
        return _semantic.cast(value, dtype)
    return _semantic.scalar_constant(value, dtype)


@core.builtin
def zeros(shape, dtype, _semantic=None):
    """A scalar zero, whatever ``shape``."""
    return _semantic.scalar_constant(0, core._unwrap_if_constexpr(dtype))
