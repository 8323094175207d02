"""Dropout: the producer draws which pairs are kept, the consumers take a bit of each pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...emit.dropout_offsets import drop_function
from ...kernels.kernel import Task
from .feature import Feature, Texts

if TYPE_CHECKING:
    from ...emit.facts import KernelFacts
    from ...emit.template import Flags
    from ...kernels.config import Config
    from .feature import ModuleSpec

_ROWS = (
    "factor_of_kept, keep_packed, keep_of_rows as keep_of_tile, "
    "layout_of_row_bits as layout_of_bits"
)
_KEYS = (
    "factor_of_kept, halves_of_kept, keep, keep_of_keys as keep_of_tile, "
    "layout_of_key_bits as layout_of_bits"
)
"""Imports from ``dropout`` where the products' rows are keys; ``_ROWS``: where they are queries."""


def _shared_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    """Bytes of the bits for kept pairs: of each stage two words a thread, or a bit a pair."""
    if task is Task.FORWARD:
        size = 2 * 4 * 128 * config.consumers
    else:
        size = config.block_m * config.block_n // 8
    return facts.dropout * config.stages * size


def _is_dropped(spec: ModuleSpec) -> bool:
    return spec.lowered.program.dropout is not None


def _flags(spec: ModuleSpec) -> Flags:
    return {"SIGNED_WEIGHTS": _is_dropped(spec) and spec.lowered.program.weights is None}


def _imports(spec: ModuleSpec) -> list[str]:
    drawing = "drop_of_head" if spec.facts.draws is None else "drop_of_part"
    names = _ROWS if spec.is_forward else _KEYS
    return [
        f"from attndsl.backends.device.dropout_tile import {drawing}",
        f"from attndsl.backends.hopper.dropout_bits import {names}",
    ]


def _functions(spec: ModuleSpec) -> Texts:
    return Texts([drop_function(spec.facts.draws)])


DROPOUT = Feature(
    "HAS_DROPOUT", _is_dropped, _flags, "dropout", imports=_imports, functions=_functions,
    shared_bytes=_shared_bytes,
)  # fmt: skip
