"""Errors of Triton's compiler in a line each, with the line of the kernel's text at fault."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any

from triton import CompilationError

from attndsl.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMAND = "Repro command"
"""The mark before which ptxas's words end."""


class KernelError(BackendError):
    """A kernel that Triton cannot compile, whatever the tile size."""


def kernel_error(function: Any, error: Exception) -> KernelError:
    """The message for an ``error`` that Triton raised while it compiled ``function``."""
    return KernelError(
        f"Triton cannot compile {function.__name__}{_place(function, error)}: {reason_of(error)}",
        hint="report this with the program, shapes and dtypes; "
        "backend='reference' computes it meanwhile",
    )


def reason_of(error: BaseException) -> str:
    """The last line of what the first cause of ``error`` says, with the type of that cause."""
    *_, cause = _causes(error)
    # The words of a compilation error alone, without the text that it shows.
    text = str(getattr(cause, "error_message", cause) or "").partition(_COMMAND)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    name = type(cause).__name__
    if not lines:
        return name
    return lines[-1] if isinstance(cause, CompilationError) else f"{name}: {lines[-1]}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _place(function: Any, error: BaseException) -> str:
    """The line of a kernel's text that ``error`` is of: that of the innermost function."""
    path = function.fn.__code__.co_filename
    found = [
        (cause.src, cause.node.lineno)
        for cause in _causes(error)
        if isinstance(cause, CompilationError) and cause.src and hasattr(cause.node, "lineno")
    ]
    if not found:
        return f" of {path}"
    source, line = found[-1]
    text = source.splitlines()[line - 1].strip()
    # Triton counts lines from the function's first one.
    before, function_text, _ = "".join(linecache.getlines(path)).partition(source.strip())
    number = f":{before.count(chr(10)) + line}" if function_text else ""
    return f" of {path}{number}, at '{text}'"
