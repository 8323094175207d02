"""The programs of :mod:`.sdpa_programs` in graphs of ``torch.compile``.

Apart from the others, since what torch.compile must not look into is marked by a part of torch that
takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.runtime.program_store import make_spec

from .dtensor_sdpa import attend_shards
from .sdpa_programs import program_text

if TYPE_CHECKING:
    from .sdpa_programs import Key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def program_spec(reach: str, captures: Key, dropout: bool) -> str:
    """Spec for the program in a graph; see :mod:`attndsl.call.torch_ops_impl`."""
    return make_spec(program_text(reach, captures, dropout), {})


attend_shards_apart: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    attend_shards, reason="the program is compiled where the call's mask is known"
)
"""Graphs break here: an :class:`attndsl.Attention` that was made before is what they take whole."""
