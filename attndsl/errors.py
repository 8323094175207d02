"""Errors and warnings, with their facts as attributes and their text made of these.

Every error is an :class:`AttnDSLError` (a ``ValueError``) with a message, the span of program text
that it is about (if any) and a hint with text to write instead. A program with several errors
raises :class:`ProgramErrors`, which holds them all; a program with one raises that one.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.source import Span

_MAX_SHOWN = 120


class AttnDSLError(ValueError):
    """Base of all errors: ``message``, ``span`` (or None) and ``hint`` (or None)."""

    def __init__(self, message: str, span: Span | None = None, hint: str | None = None) -> None:
        # No super().__init__(), which Dynamo cannot follow: of a call that does not fit in a graph
        # it would say that instead of the message. BaseException.__new__ keeps what is given.
        self.message = message
        self.span = span
        self.hint = hint

    def __str__(self) -> str:
        return render(self)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.span, self.hint)


class LexError(AttnDSLError):
    """A character or literal that is no part of the language."""


class ParseError(AttnDSLError):
    """Tokens in an order that the grammar does not have."""


class NameResolutionError(AttnDSLError):
    """A name that is not declared, declared twice, or used where it has no meaning."""


class TypeMismatchError(AttnDSLError):
    """An operand, argument or statement of the wrong type."""


class RankError(AttnDSLError):
    """The wrong number of indices of a tensor, or of arguments of a function."""


class LimitError(AttnDSLError):
    """A program larger, deeper or more repetitive than the compiler's limits allow."""


class ShapeError(AttnDSLError):
    """A tensor at a call whose shape does not fit."""


class ArgumentError(AttnDSLError):
    """An argument at a call that is missing, unknown or of a kind that cannot be used."""


class DTypeError(AttnDSLError):
    """A tensor at a call whose dtype cannot be used, or does not agree with another's."""


class DeviceError(AttnDSLError):
    """Tensors at a call that are on different devices."""


class UnsupportedError(AttnDSLError):
    """The chosen backend cannot run this. The message says what, the hint names one that can."""


class BackendError(AttnDSLError):
    """A backend that does not exist or does not work on this machine."""


class NonFiniteError(AttnDSLError):
    """A result or gradient in checked mode that is not finite; says what made it so."""


class PlanError(AttnDSLError):
    """A tile plan that contradicts the mask it was derived from: a defect of the compiler."""


class TraceError(AttnDSLError):
    """A Python function that cannot be read as a program; the span is in the function itself."""


class ConfigError(AttnDSLError):
    """A configuration file that does not hold programs in the documented form."""


class ProgramWarning(AttnDSLError, UserWarning):
    """Warning about a valid but probably unintended program or call, with place and hint."""


class UnusedWarning(ProgramWarning):
    """A name of a program that nothing reads."""


class LaunchWarning(UserWarning):
    """Kernels are launched in a slower way than usual, since this Triton is not as expected."""


class CacheWarning(UserWarning):
    """A kernel cache entry or directory that could not be used; the call goes on without it."""


class ProgramErrors(AttnDSLError):
    """Several errors of a program or of a configuration, in the order of their places."""

    def __init__(self, errors: Sequence[AttnDSLError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.message, first.span, first.hint)

    def __str__(self) -> str:
        count = f"{len(self.errors)} errors"
        return "\n\n".join([render(error) for error in self.errors] + [count])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errors,)


def flatten(error: AttnDSLError) -> tuple[AttnDSLError, ...]:
    """The errors that ``error`` stands for."""
    return error.errors if isinstance(error, ProgramErrors) else (error,)


def raise_all(errors: Sequence[AttnDSLError]) -> None:
    """Raise nothing, the only error, or :class:`ProgramErrors`, sorted by place."""
    if not errors:
        return
    # Each file by itself, in the order in which the errors first name them.
    files = list(dict.fromkeys(e.span.source.name for e in errors if e.span))
    ordered = sorted(errors, key=lambda error: _place(error, files))
    if len(ordered) == 1:
        raise ordered[0]
    raise ProgramErrors(ordered)


def _place(error: AttnDSLError, files: Sequence[str]) -> tuple[int, ...]:
    # By lines, since spans of a configuration and of a program in it count from different places.
    span = error.span
    return (files.index(span.source.name), span.line, span.column, span.end) if span else ()


def render(error: AttnDSLError) -> str:
    """``file:line:column: message``, the line with a caret under the span, and the hint."""
    message = _visible_lines(error.message)
    hint = [f"  hint: {_visible_lines(error.hint)}"] if error.hint else []
    if error.span is None:
        return "\n".join([message, *hint])
    span = error.span
    where = f"{visible(span.source.name)}:{span.line}:{span.column}"
    line = span.source.line(span.line)
    start = span.column - 1
    first = max(0, start - _MAX_SHOWN // 2)
    shown = _printable(line[first : first + _MAX_SHOWN])
    width = max(1, min(span.end - span.start, len(line) - start, first + len(shown) - start))
    rows = [
        f"{where}: {message}",
        f"    {shown}",
        "    "
        + " " * _columns(shown[: start - first])
        + "^" * max(1, _columns(shown[start - first :][:width])),
    ]
    return "\n".join(rows + hint)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, such as ``1 dim`` or ``2 dims``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def visible(text: str) -> str:
    """``text`` for a terminal: each character that is no visible one or a space is escaped.

    So no text from a file can move the cursor, change colours, begin a line or reorder letters.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def _printable(text: str) -> str:
    """Control characters as a visible stand-in of the same width, so that carets stay in place."""
    return "".join(
        c if c.isprintable() else (c == "\t" and " ") or "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _columns(text: str) -> int:
    """Terminal columns that ``text`` takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
