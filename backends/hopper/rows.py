"""How the backward stores its rows of dK and dV, as lines of its templates.

Halves go through shared memory, so that each thread stores 16 bytes. Rows in fp32
(``KernelFacts.wide_gradients``) would take twice the memory there, of which little is left: each
thread stores what it holds, 8 bytes at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts

_INDENT = "    "
_LAYOUT = [
    "# Through shared memory, so that each thread stores 16 bytes.",
    "STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])",
]
_DK = "own, b, hkv, sizes.kv_len, HEAD_DIM"
_DV = "own, b, hkv, sizes.kv_len, VALUE_DIM"


def row_hooks(facts: KernelFacts) -> dict[str, list[str]]:
    """Lines of both backward templates: that of head dims up to 128, and that of wider ones."""
    if facts.wide_gradients:
        return {
            "dk_rows": ["dk_rows = dk * scale"],
            "dv_rows": ["dv_rows = dv"],
            "rows_layout": [],
            "store_dv": [f"store_rows(dv_out, total, {_DV})"],
            "store_dk": [f"store_rows(dk_out, total * scale, {_DK})"],
        }
    return {
        "dk_rows": [*_LAYOUT, "dk_rows = gl.convert_layout((dk * scale).to(HALF), STORED)"],
        "dv_rows": ["dv_rows = gl.convert_layout(dv.to(HALF), STORED)"],
        "rows_layout": _LAYOUT,
        "store_dv": [
            "v_tile.store(total.to(HALF))",
            "store_rows(",
            f"{_INDENT}dv_out, v_tile.load(STORED), {_DV}",
            ")",
        ],
        "store_dk": [
            "k_tile.store((total * scale).to(HALF))",
            "store_rows(",
            f"{_INDENT}dk_out, k_tile.load(STORED), {_DK}",
            ")",
        ],
    }
