"""Costs of a sharded call, from the tiles that it computes and the keys that it fetches.

A model of two numbers of a machine, to compare layouts and exchanges: never a promise of speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attndsl.errors import ArgumentError

TILE = 128
"""Rows and keys of the tiles that work is counted in."""
_BACKWARD = 2.5
"""Products of a backward for each of the forward: five for two."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds that a plan is made for; by default those of H100s of one host.

    Raises:
        ArgumentError: A speed that is not positive; a ``call`` or ``kept`` below 0.
    """

    flops: float = 600e12
    """Floating-point operations a second of attention's products on one device."""
    link: float = 300e9
    """Bytes a second that a device receives from others."""
    latency: float = 20e-6
    """Seconds that an exchange takes beside its bytes."""
    call: float = 60e-6
    """Seconds that one more call of a kernel takes beside its tiles, forward and backward."""
    kept: float = 1 / 32
    """Bytes of fetched keys, as a part of those of a rank's rows of q and out, up to which they are
    kept for the backward, which otherwise fetches them again."""

    def __post_init__(self) -> None:
        for name in ("call", "kept"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ArgumentError(
                    f"{name} is {value!r}", hint=f"pass a number from 0 on: Machine({name}=0.0)"
                )
        for name in ("flops", "link"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ArgumentError(
                    f"{name} is {value!r}", hint=f"pass a positive number: Machine({name}=1e12)"
                )


class Shape(NamedTuple):
    """The sizes of a call that its costs depend on."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    value_dim: int = 128
    itemsize: int = 2
    """Bytes of an element of q, k and v."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of one forward and one backward."""

    tile: float
    """Seconds of a tile of scores of one head of one batch entry."""
    key: float
    """Seconds that the journey of one position's keys and values takes, and of their gradients."""
    key_bytes: int
    """Bytes of the journey forth, and again in the backward."""
    grad_bytes: int
    """Bytes of the gradients' journey."""
    row_bytes: int
    """Bytes of a row of q and of out, of all heads, for an exchange of heads."""
    call: float
    """Seconds of one more call."""

    @property
    def journey(self) -> int:
        """Bytes that one position's keys and values cause, forward and backward."""
        return 2 * self.key_bytes + self.grad_bytes


def costs_of(machine: Machine, shape: Shape) -> Costs:
    """Seconds and bytes of the parts of a call of these sizes on ``machine``."""
    width = shape.head_dim + shape.value_dim
    products = 2 * TILE * TILE * width * (1 + _BACKWARD)
    key = shape.batch * shape.kv_heads * width
    row = shape.batch * shape.heads * (width * shape.itemsize + 4)
    wide = max(4, shape.itemsize)
    journey = key * (2 * shape.itemsize + wide)
    return Costs(
        tile=products / machine.flops,
        key=journey / machine.link,
        key_bytes=key * shape.itemsize,
        grad_bytes=key * wide,
        row_bytes=row,
        call=machine.call,
    )
