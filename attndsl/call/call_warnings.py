"""Warnings about valid but probably unintended programs and calls.

Python's ``warnings`` prints each of them once for a place in the caller's code.

Non-goals: errors; calls in graphs, which are traced and not made.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from attndsl.errors import ProgramWarning
from attndsl.ir import Op, node, var

from .options import LOCATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attndsl.backends.base import Call
    from attndsl.ir import Node, Program

_ROOT = Path(__file__).parents[1]
_FOLDERS = (f"{_ROOT}{os.sep}", f"{_ROOT.parent / 'backends'}{os.sep}")
"""Folders of the package's own code, also in a checkout."""
_MANY_HEADS = 256
"""More heads than models have."""
_SOME_HEADS = 64
"""Heads from which models share keys among them."""


def tell(found: Iterable[ProgramWarning]) -> None:
    """Warn of ``found`` at the line of the caller that is not of this package."""
    for warning in found:
        warnings.warn(warning, stacklevel=_level())


def _level() -> int:
    """The ``stacklevel`` of :func:`tell`'s caller that lies outside of the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        level, frame = level + 1, frame.f_back
    return level


def doubts_of_call(
    program: Program, call: Call, said: Mapping[str, object]
) -> Iterator[ProgramWarning]:
    """Warnings about arguments that are probably unintended.

    Args:
        program: The program of the call.
        call: The checked call.
        said: Arguments as the caller wrote them. One of 0 says where the call lies, as the first
            part of a larger one has it, and None says nothing.
    """
    heads, q_len, kv_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    if (heads > _MANY_HEADS and q_len < heads) or _is_transposed(call, said):
        yield ProgramWarning(
            f"q has {heads} heads and {q_len} rows: its shape looks like (batch, length, heads, "
            "dim)",
            hint="pass (batch, heads, length, dim): q.transpose(1, 2), which copies nothing",
        )
        return
    placed = any(said.get(name) is not None for name in LOCATION)
    if q_len == kv_len or 0 in (q_len, kv_len) or placed or not _is_causal(program.mask):
        return
    unseen = "" if q_len > kv_len else f", and no row sees the last {kv_len - q_len}"
    yield ProgramWarning(
        f"the mask is causal, and a call of {q_len} rows and {kv_len} keys has no offset: row 0 "
        f"sees key 0 alone{unseen}",
        hint=f"pass q_offset={kv_len - q_len} if the rows are the last ones, or write "
        "causal_lower_right()"
        if q_len < kv_len
        else "pass q_offset or kv_offset, the positions of the first row and the first key",
    )


def _is_transposed(call: Call, said: Mapping[str, object]) -> bool:
    """Tell whether a call of few rows and many heads has its lengths in place of its heads.

    Models of so many heads share their keys, and project to rows that lie behind one another, so
    that heads are the inner dim in memory. Where neither is so, there are hardly fewer rows and
    keys than heads.
    """
    q, k = call.q, call.k
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    placed = any(said.get(name) is not None for name in LOCATION)
    return (
        not placed
        and heads >= _SOME_HEADS
        and k.shape[1] == heads
        and 0 < kv_len <= q_len
        and 1 < q_len < heads
        and all(x.stride(1) > x.stride(2) for x in (q, k))
    )


_CAUSAL = node(Op.LE, var("kv"), var("q"))


def _is_causal(mask: Node | None) -> bool:
    """Return True if live pairs must have ``kv <= q``, in the words of ``causal()``."""
    ahead = [] if mask is None else [mask]
    while ahead:
        condition = ahead.pop()
        if condition is _CAUSAL:
            return True
        if condition.op is Op.AND:
            ahead += condition.args
    return False
