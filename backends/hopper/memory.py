"""Shared memory of a Hopper kernel: how wide its tiles are, and what they take together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.config import shared_memory_of

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts
    from ..kernels.config import Config

BYTES_OF_TYPES = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1}
_REST = 640
"""Barriers, and what an item is: bytes, rounded up."""
_LOST = 384
"""Whether a forward's consumers, at most three, lost a maximum: bytes, rounded up."""
_TURNED = 16384
"""Bytes in which a backward's rows of dK and dV get from who has computed to who stores them; above
head dim 128 the places of k and v."""
ADDRESS_BYTES = 16
"""Addresses and strides that the tensor memory accelerator takes are multiples of this."""
_LINES = 2048
"""Bytes in which sums along a tile's diagonals get from warp to warp."""


def block_width(head_dim: int) -> int:
    """Columns of a tile that holds rows of ``head_dim`` elements; the rest is zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def widest(facts: KernelFacts) -> int:
    """Columns of the wider ones of a kernel's tiles."""
    return max(map(block_width, (facts.head_dim, facts.value_dim)))


def pair_block(direction: str, facts: KernelFacts, config: Config) -> tuple[int, int, int]:
    """Tiles of what pairs look up: how many consumers have one, its queries, its keys."""
    m, n = config.block_m, config.block_n
    if direction == "forward":
        return config.consumers, m // config.consumers, n
    # Above head dim 128 one consumer alone computes weights.
    return (1, m, n) if widest(facts) > 128 else (2, m, n // 2)


def has_own_output(facts: KernelFacts, config: Config) -> bool:
    """Whether a forward's output lies beside q in shared memory, not in its place.

    The next item's rows of q may then come before those of the output have gone.
    """
    d, dv = block_width(facts.head_dim), block_width(facts.value_dim)
    if d != dv or not config.persistent:
        return d != dv
    q, k, v = (1 + (name in facts.moving_operands) for name in "qkv")
    elements = config.block_m * (q * d + dv) + config.stages * config.block_n * (k * d + v * dv)
    more = _pair_bytes("forward", facts, config) + _kept_bytes("forward", facts, config)
    return 2 * elements + more + (_REST + _LOST) * bool(more) < shared_memory_of("cuda:90")


def shared_bytes(direction: str, facts: KernelFacts, config: Config) -> int:
    """What a kernel takes at least, in bytes: a forward's output in the place of q, if it can."""
    d, dv = block_width(facts.head_dim), block_width(facts.value_dim)
    m, n, stages = config.block_m, config.block_n, config.stages
    if direction == "forward":
        elements = m * d + stages * n * (d + dv) + m * dv * (d != dv)
    else:
        elements = (n + stages * m) * (d + dv)
        # dS; above head dim 128 once, and its slopes in fp32. Row statistics are two of fp32.
        elements += 3 * n * m if widest(facts) > 128 else 2 * n * m
        elements += 4 * stages * m
    turned = _TURNED * (direction != "forward" and widest(facts) <= 128)
    turned += _LINES * facts.adds_diagonals
    more = _pair_bytes(direction, facts, config) + _kept_bytes(direction, facts, config)
    return 2 * elements + more + turned + _REST + _LOST * (direction == "forward")


def _kept_bytes(direction: str, facts: KernelFacts, config: Config) -> int:
    """What says which pairs dropout keeps: of each stage two words a thread, or a bit a pair."""
    if direction == "forward":
        size = 2 * 4 * 128 * config.consumers
    else:
        size = config.block_m * config.block_n // 8
    return facts.dropout * config.stages * size


def _pair_bytes(direction: str, facts: KernelFacts, config: Config) -> int:
    parts, queries, keys = pair_block(direction, facts, config)
    sizes = sum(BYTES_OF_TYPES[tile.dtype] for tile in facts.pair_tiles)
    return parts * queries * keys * sizes
