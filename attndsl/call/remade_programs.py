"""Programs of calls in other terms, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.foundation.caches import memoised

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from attndsl.ir import Program


@memoised("programs of calls in other terms", 512)
def remade(make: Callable[[Program, Any], Any], program: Program, how: Hashable) -> Any:
    """Call ``make(program, how)``, or return what it made before."""
    return make(program, how)
