"""From a spec (text and declarations in one string) to a lowered program, by memory or disk.

A spec determines a program completely, so that it can stand in graphs and in other processes.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attndsl.backends.key import source_fingerprint, version_of
from attndsl.frontend.declare import Bound, ParamSpec, TensorSpec
from attndsl.pipeline import Lowered, lower
from attndsl.serialise import SerialiseError, lowered_from_json, lowered_to_json
from attndsl.settings import read_settings
from attndsl.source import Source, Span

from .cache import KernelCache

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from attndsl.frontend.declare import Declared

_LONGEST_LINE = 1000
"""Of a configuration, in characters, to stand in a program's specification."""


def make_spec(
    text: str, name: str, first_line: int, declared: Mapping[str, Declared], exact: bool = False
) -> str:
    """The canonical string of a program's text and the caller's declarations."""
    return json.dumps(
        {
            "text": text,
            "name": name,
            "line": first_line,
            "declared": {key: _declared_to_json(value) for key, value in sorted(declared.items())},
            "exact": exact,
        },
        sort_keys=True,
    )


@lru_cache(maxsize=1024)
def lowered_program(spec: str) -> Lowered:
    """What backends get of ``spec``.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    cache = default_cache()
    key = _disk_key(spec)
    entry = cache.load(key)
    if entry is not None:
        try:
            return lowered_from_json(entry.meta["lowered"])
        except (SerialiseError, KeyError):
            pass  # Of another version of this package, or damaged: it is written again below.
    parts = json.loads(spec)
    declared = {key: _declared_from_json(value) for key, value in parts["declared"].items()}
    source = Source(parts["text"], parts["name"], parts["line"])
    lowered = lower(source, declared, parts["exact"])
    cache.save(key, "", {"kind": "program", "lowered": lowered_to_json(lowered)})
    return lowered


def default_cache() -> KernelCache:
    """The cache that the environment names; one object for each folder."""
    settings = read_settings()
    return _cache_at(settings.cache_dir, settings.cache_bytes, settings.cache)


@lru_cache(maxsize=16)
def _cache_at(folder: Path, limit: int, enabled: bool) -> KernelCache:
    return KernelCache(folder, limit, enabled)


def _disk_key(spec: str) -> str:
    text = "\0".join(["program", version_of("attndsl"), source_fingerprint(), spec])
    return hashlib.sha256(text.encode()).hexdigest()


def _declared_to_json(value: Declared) -> list[Any]:
    if isinstance(value, Bound):
        number = value.value
        written = {"float": number.hex()} if isinstance(number, float) else number
        return ["bound", written, value.origin, _span_to_json(value.span)]
    if isinstance(value, ParamSpec):
        return ["param", value.dtype]
    return ["tensor", list(value.dims), value.dtype]


def _declared_from_json(value: list[Any]) -> Declared:
    if value[0] == "bound":
        number = value[1]
        number = float.fromhex(number["float"]) if isinstance(number, dict) else number
        return Bound(number, value[2], _span_from_json(value[3]))
    if value[0] == "param":
        return ParamSpec(value[1])
    return TensorSpec(tuple(value[1]), value[2])


def _span_to_json(span: Span | None) -> list[Any] | None:
    """``span`` with its first line alone: no more of a configuration is part of the program.

    Nothing of it where that line is long: it may have thousands of params, each with a span.
    """
    if span is None or len(span.source.line(span.line)) > _LONGEST_LINE:
        return None
    source, start = span.source, span.column - 1
    return [
        source.line(span.line), source.name, span.line, start, start + span.end - span.start
    ]  # fmt: skip


def _span_from_json(value: list[Any] | None) -> Span | None:
    if value is None:
        return None
    line, name, number, start, end = value
    return Span(Source(line, name, number), start, end)
