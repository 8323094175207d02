"""Limits on the size of a program, which keep any input from hanging the frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import LimitError

if TYPE_CHECKING:
    from attndsl.source import Span

MAX_SOURCE = 1 << 14
"""Characters of a program."""
MAX_STATEMENTS = 2000
"""Statements of a program."""
MAX_NESTING = 64
"""Depth of brackets and of operators that nest to the right; also of function calls."""
MAX_EXPANSIONS = 20_000
"""Operators and names of a program once all its functions are inlined."""
MAX_IMPORTS = 100
"""Files that a program imports, directly or through others."""
MAX_IMPORT_DEPTH = 16
"""Files that import one another in a chain."""
MAX_DIMS = 16
"""Dims of a tensor: backends make up small ones of all dims."""
MAX_OPTIONAL = 16
"""Params and tensors that calls may leave out."""
MAX_ERRORS = 20
"""Errors reported at once."""


def check_dims(name: str, count: int, span: Span) -> None:
    """Refuse a tensor of too many dims.

    Raises:
        LimitError: It has more than :data:`MAX_DIMS`.
    """
    if count > MAX_DIMS:
        raise LimitError(
            f"'{name}' has {count} dims; at most {MAX_DIMS} are allowed",
            span,
            "reshape it: several dims may be one",
        )
