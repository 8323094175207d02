"""Text to checked IR. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .declare import Bound, Declared, ParamSpec, TensorSpec, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Program
    from attndsl.source import Source

__all__ = ["Bound", "Declared", "ParamSpec", "TensorSpec", "read", "tensor"]


def read(source: Source, declared: Mapping[str, Declared]) -> Program:
    """The checked program of ``source``.

    Raises:
        AttnDSLError: All that is wrong with it.
    """
    from .check import check
    from .imports import expand
    from .parse import parse

    return check(parse(expand(source)), declared)
