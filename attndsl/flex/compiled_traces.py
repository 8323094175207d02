"""Traced programs as compiled ones, each text once in a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.api import Options, compile_source
from attndsl.foundation.caches import memoised
from attndsl.runtime.program_store import make_spec
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.attention import Attention
    from attndsl.passes.int_ranges import Range

_NAME = "<traced>"
"""Name of a traced program in errors."""


@memoised("programs of traced functions", 512)
def compiled(text: str, backend: str) -> Attention:
    """The compiled program of ``text``."""
    return compile_source(Source(text, _NAME), {}, Options(backend))


def spec_of(text: str) -> str:
    """Spec for the program of ``text`` in a graph; see :mod:`attndsl.call.torch_ops_impl`."""
    return make_spec(text, {})


def position_ranges(batch: int, heads: int, q_len: int, kv_len: int) -> dict[str, Range]:
    """Least and greatest values of a program's positions in a call of these sizes."""
    sizes = {"b": batch, "h": heads, "q": q_len, "kv": kv_len}
    return {name: (0, max(0, size - 1)) for name, size in sizes.items()}


def near(captures: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """``captures``, 0-d tensors of the CPU moved to ``device``: torch takes them beside any."""

    def moved(value: Any) -> Any:
        scalar = isinstance(value, torch.Tensor) and value.dim() == 0
        return value.to(device) if scalar and value.device.type == "cpu" else value

    return {name: moved(value) for name, value in captures.items()}
