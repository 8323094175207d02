"""The type of ``kernel_options``: torch's, with the option that attndsl has."""

from __future__ import annotations

from typing import TypedDict


class FlexKernelOptions(TypedDict, total=False):
    """Options of torch's kernels, which have no meaning here, and ``backend``, which has.

    Each of torch's may also have ``fwd_`` or ``bwd_`` before its name.
    """

    backend: str
    """A backend of attndsl's, such as ``triton``; ``auto`` by default."""
    BACKEND: str
    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int
