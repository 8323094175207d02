"""Places in the user's own Python, so that errors can point at them."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attndsl.errors import TraceError
from attndsl.source import Source, Span

if TYPE_CHECKING:
    from types import CodeType, FrameType

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def refusal(message: str, hint: str) -> TraceError:
    """An error that points at the innermost frame of user code, to be raised by the caller."""
    frame = _user_frame()
    span = None if frame is None else _span_of(frame)
    if span is None and frame is not None:
        message = f"{message} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return TraceError(message, span, hint)


def refusal_at(code: CodeType | None, message: str, hint: str) -> TraceError:
    """An error that points at the head of a function."""
    span = None if code is None else _line(code.co_filename, code.co_firstlineno)
    return TraceError(message, span, hint)


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH)) and "functools" not in name:
            return frame
        frame = frame.f_back
    return None


def _span_of(frame: FrameType) -> Span | None:
    """The expression that ``frame`` is at."""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    name = frame.f_code.co_filename
    if at < len(positions):
        line, end_line, start, end = positions[at]
        if line is not None and line == end_line and start is not None and end is not None:
            return _line(name, line, start, end)
    return _line(name, frame.f_lineno)


def _line(name: str, number: int, start: int | None = None, end: int | None = None) -> Span | None:
    """A line of a file, or the bytes ``start`` to ``end`` of it."""
    lines = linecache.getlines(name)
    if not 0 < number <= len(lines):
        return None
    line = lines[number - 1]
    if start is None or end is None:
        first, last = len(line) - len(line.lstrip()), len(line.rstrip())
    else:
        raw = line.encode()
        first, last = len(raw[:start].decode()), len(raw[:end].decode())
    before = sum(len(text) for text in lines[: number - 1])
    return Span(Source("".join(lines), name), before + first, before + last)
