"""Parsing while other threads parse too.

``ast.parse`` counts its depth for all threads together. Python 3.11 collects garbage meanwhile, and
finalizers let other threads run. What parses there leaves another depth, and then a right text
raises ``SystemError: AST constructor recursion depth mismatch`` (python/cpython#106905). Several
threads compile kernels, and Triton parses in each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_SAID = "AST constructor recursion depth mismatch"
_TRIES = 20
"""More than a chance of one in two survives."""


def parsing(call: Callable[[], _T]) -> _T:
    """Return the result of ``call``, which parses; call again where Python confused the depths."""
    for _ in range(_TRIES - 1):
        try:
            return call()
        except Exception as error:
            if not _is_confused(error):
                raise
    return call()


def _is_confused(error: BaseException | None) -> bool:
    """Return True if an error is Python's mismatch of depths, or was raised because of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if _SAID in str(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
