"""Tile sizes: candidates in order of preference, fastest first, smallest last.

Preferences come from ``benchmarks/results`` (one H200) and from the peers' published defaults; a
candidate whose estimated shared memory exceeds the device's is left out, and the caller goes on to
the next one where a compiled candidate still needs more than there is.
"""

from __future__ import annotations

from ..kernels.config import Config

_FORWARD = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
    256: (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 32, 4, 2)),
    512: (Config(64, 32, 8, 2), Config(32, 32, 8, 1)),
}
_BACKWARD_KV = {
    64: (Config(128, 64, 4, 2), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(64, 128, 8, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 1)),
    256: (Config(32, 64, 8, 2), Config(32, 64, 8, 1), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 8, 1),),
}
_BACKWARD_Q = {
    64: (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    128: (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    256: (Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 8, 1),),
}
# See templates/distances.py. Of two stages the second would be loaded after all of the first has
# been computed with; a mask that looks things up leaves one, since Triton 3.6 cannot pipeline
# products in a branch.
_DISTANCES = {
    64: (Config(128, 64, 8, 3), Config(64, 64, 8, 3), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
    128: (Config(64, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 32, 4, 1)),
    256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 4, 1),),
}
# Loops are short: what hides loads is a second program, for which half of the registers are left,
# or loading all ahead.
_PAIRS = {
    64: (
        Config(64, 64, 8, 1, most_registers=128),
        Config(64, 64, 8, 2),
        Config(128, 64, 8, 2),
        Config(32, 32, 4, 1),
    ),
    128: (
        Config(64, 64, 8, 1, most_registers=128),
        Config(64, 64, 8, 3),
        Config(64, 64, 8, 2),
        Config(64, 64, 8, 1),
        Config(128, 64, 8, 1),
        Config(32, 32, 4, 1),
    ),
    256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 4, 1),),
}
# Whole tiles of these make a backward's. Little else is done than to load and to store, of which
# much is to be on its way: five programs of a processor, whose threads have 96 registers.
_STORED: dict[int, tuple[Config, ...]] = dict.fromkeys(
    (64, 128, 256, 512), (Config(64, 64, 4, 1), Config(32, 32, 4, 1))
)
# They hold no tile of sums. In one stage, since Triton 3.6 cannot pipeline products in a branch.
_SCATTER_BOUNDS = {
    64: (Config(128, 64, 8, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
    128: (Config(128, 64, 8, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
    256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 4, 1),),
}
# Integers of 64 bits take registers: more threads, or smaller tiles.
_SCATTER_SUMS = {
    64: (Config(64, 64, 8, 1), Config(64, 32, 4, 1), Config(32, 32, 4, 1)),
    128: (Config(64, 32, 4, 1), Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 4, 1),),
}
# There are two tiles of each of q, k and v, and two of the scores. Only D 128 was measured: see M11
# in docs/measured.md.
_TANGENT = {
    64: (Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(128, 64, 8, 2), Config(128, 32, 8, 3), Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
    256: (Config(128, 32, 8, 1), Config(64, 16, 4, 2), Config(32, 32, 4, 1)),
    512: (Config(32, 32, 8, 1),),
}
_TABLES = {
    "forward": _FORWARD,
    "backward_kv": _BACKWARD_KV,
    "backward_q": _BACKWARD_Q,
    "distances": _DISTANCES,
    "pairs": _PAIRS,
    "stored": _STORED,
    "scatter_bounds": _SCATTER_BOUNDS,
    "scatter_sums": _SCATTER_SUMS,
    "tangent": _TANGENT,
}
# A masked program has two loops, FULL and PARTIAL, and needs more registers.
_MASKED = {
    ("backward_kv", 64): (Config(64, 128, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    ("backward_kv", 128): (
        Config(64, 128, 8, 3),
        Config(64, 128, 8, 2),
        Config(64, 64, 4, 2),
        Config(64, 64, 4, 1),
    ),
    ("backward_q", 64): (Config(128, 64, 4, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
}
# Short loops are mostly beginnings and ends: two small programs on one processor hide each other's.
_SHORT = {
    ("forward", 64): (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    ("forward", 128): (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    ("backward_kv", 64): (Config(32, 64, 4, 3), Config(64, 64, 4, 2)),
    ("backward_kv", 128): (Config(32, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 1)),
    ("backward_q", 64): (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    ("backward_q", 128): (Config(64, 64, 4, 2), Config(64, 32, 4, 3), Config(64, 64, 4, 1)),
    ("tangent", 64): (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    ("tangent", 128): (Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
}
# Without FULL tiles, the mask is the larger part of the work.
_SHORT_PARTIAL = {
    ("forward", 64): (Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
    ("forward", 128): (Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
    ("backward_q", 64): (Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
    ("backward_q", 128): (Config(64, 32, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 1)),
}
_BY_WORK: dict[str, dict[tuple[str, int], tuple[Config, ...]]] = {
    "dense": {},
    "masked": _MASKED,
    "short": _MASKED | _SHORT,
    "short partial": _MASKED | _SHORT | _SHORT_PARTIAL,
}
_FALL_BACK = (Config(32, 32, 4, 1), Config(32, 16, 4, 1), Config(16, 16, 4, 1))
_OF_MUCH_WORK = {"forward": ((240, 8), (80, 32))}
_OF_MUCH_WORK_BACKWARD = ((200, 8),)
"""(instructions, scores): with more instructions a pair, threads hold at most so many scores. The
first that applies counts.

Then smaller tiles compile in a fraction of the time, spill less, and are mostly faster: see M15 in
docs/measured.md."""
_NARROW = 16
"""Head dims of so many columns."""
_FEW_ELEMENTS = (Config(64, 64, 4, 2), Config(64, 32, 4, 2))


def candidates(
    kernel: str,
    block_d: int,
    block_dv: int,
    element_bytes: int,
    shared_memory: int,
    work: str = "dense",
    of_pair: int = 0,
) -> tuple[Config, ...]:
    """Configs worth compiling, in order.

    Args:
        kernel: ``forward``, ``backward_kv``, ``backward_q``, ``tangent``, or one of those that make
            gradients of captures alone.
        block_d: Head dim, rounded up to a power of two.
        block_dv: The value's head dim, likewise.
        element_bytes: Bytes of an element of q, k and v.
        shared_memory: Bytes that one program may use.
        work: What a program's loop is like: ``dense``, ``masked``, ``short`` (the tiles do not grow
            with the length), or ``short partial`` (and few of them are FULL).
        of_pair: Instructions that a pair takes besides products (:mod:`.pair_work`).
    """
    width = max(64, block_d, block_dv)
    # An fp32 element takes the room of two: the table's row for twice the width fits.
    row = min(512, width * (2 if element_bytes > 2 else 1))
    preferred = _BY_WORK[work].get((kernel, row), _TABLES[kernel][row])
    limits = _OF_MUCH_WORK.get(kernel, _OF_MUCH_WORK_BACKWARD)
    most = next((most for least, most in limits if of_pair > least), preferred[0].elements)
    if preferred[0].elements > most:
        preferred = (*preferred, *_FEW_ELEMENTS)
        preferred = tuple(config for config in preferred if config.elements <= most)
    preferred = tuple(dict.fromkeys((*preferred, *_FALL_BACK)))
    if element_bytes > 2 and min(block_d, block_dv) <= _NARROW:
        preferred = tuple(config for config in preferred if not _misread(kernel, config))
    if kernel == "distances":
        preferred = tuple(config for config in preferred if config.block_m % config.block_n == 0)
    fitting = tuple(
        config
        for config in preferred
        if shared_bytes(kernel, config, block_d, block_dv, element_bytes) <= shared_memory
    )
    return fitting or (preferred[-1],)


def _misread(kernel: str, config: Config) -> bool:
    """Whether Triton 3.6 would read past the end of shared memory, or what is not the operand's.

    It does in products in three parts (``tf32x3``) of 64 rows by 16 columns that eight warps share
    (``Invalid __shared__ read`` of compute-sanitizer; dK at head dim 16, wrong or a fault).
    """
    rows = config.block_n if kernel == "backward_kv" else config.block_m
    return config.warps == 8 and rows < 128


def shared_bytes(
    kernel: str, config: Config, block_d: int, block_dv: int, element_bytes: int
) -> int:
    """Estimated shared memory: pipelined tiles per stage, resident ones once."""
    width = block_d + block_dv
    if kernel == "stored":
        # The sums, while they are turned.
        return 4 * config.block_m * config.block_n
    if kernel == "forward":
        # Products of fp32 in three parts keep q twice.
        kept = 2 if element_bytes > 2 else 1
        elements = kept * config.block_m * block_d + config.stages * config.block_n * width
    elif kernel == "backward_kv":
        elements = config.block_n * width + config.stages * config.block_m * width
        elements += config.block_m * config.block_n
    elif kernel == "tangent":
        elements = 2 * (config.block_m * block_d + config.stages * config.block_n * width)
    elif kernel in ("distances", "pairs"):
        elements = config.stages * (config.block_m + config.block_n) * width
    else:
        elements = config.block_m * width + config.stages * config.block_n * width
    return elements * element_bytes
