"""The programs of :mod:`.programs` in graphs of ``torch.compile``.

Apart from the others, since what torch.compile must not look into is marked by a part of torch that
takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.runtime.programs import make_spec

from .programs import program_text

if TYPE_CHECKING:
    from .programs import Key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def program_spec(reach: str, captures: Key, dropout: bool) -> str:
    """What stands for the program in a graph; see :mod:`attndsl.runtime.operator`."""
    return make_spec(program_text(reach, captures, dropout), {})
