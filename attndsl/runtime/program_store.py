"""Lowered programs by spec (text and declarations in one string), in memory and on disk.

A spec determines a program completely, so that it can stand in graphs and in other processes. It
does not say where the program was written: programs of one text and one set of declarations are one
operator, and no graph carries a path. Errors get their file and line from :func:`lowered_at` and
:func:`point_into`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.backends.base import SHORT_FORM, Written
from attndsl.backends.cache_entries import About
from attndsl.backends.key import version_of
from attndsl.errors import AttnDSLError, ProgramWarning, UnusedWarning
from attndsl.foundation.caches import memoised
from attndsl.foundation.fingerprint import source_fingerprint
from attndsl.foundation.gc_pause import gc_paused
from attndsl.foundation.logs import LOG
from attndsl.frontend.declare import Absent, Bound, ParamSpec, TensorSpec
from attndsl.passes.print_ir import short_form
from attndsl.pipeline import Lowered, Variant, lower, names_of, warnings_of
from attndsl.serialise import SerialiseError, lowered_from_json, lowered_to_json
from attndsl.settings import read_settings
from attndsl.source import Source, Span, shorten

from .bundle_store import BundledCache
from .disk_cache import KernelCache

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from attndsl.frontend.declare import Declared
    from attndsl.passes.broadcast import Dims


def make_spec(text: str, declared: Mapping[str, Declared], exact: bool = False) -> str:
    """The canonical string of a program's text and the caller's declarations."""
    return json.dumps(
        {
            "text": text,
            "declared": {key: _declared_to_json(value) for key, value in sorted(declared.items())},
            "exact": exact,
        },
        sort_keys=True,
    )


class SpecParts(NamedTuple):
    """Parts of a spec: text, declarations and variant of a program."""

    text: str
    declared: dict[str, Declared]
    exact: bool
    variant: Variant
    """The variant, which chooses one of the text's programs."""


def read_spec(spec: str) -> SpecParts:
    """The parts that ``spec`` was made of."""
    parts = json.loads(spec)
    declared = {key: _declared_from_json(value) for key, value in parts["declared"].items()}
    return SpecParts(parts["text"], declared, parts["exact"], _variant_of(parts))


def spec_without_sink(spec: str) -> str:
    """The program of ``spec`` without its sink."""
    return _with(spec, {"sink": False})


def spec_of_variant(spec: str, absent: Collection[str] = (), ones: Dims = ()) -> str:
    """The program of ``spec`` without some captures, and with size 1 along dims of others.

    Args:
        spec: A program.
        absent: Captures declared with ``= none`` that are not there.
        ones: Dims that have size 1 in place of the declared one.
    """
    before = _variant_of(json.loads(spec))
    changes: dict[str, Any] = {}
    if absent:
        changes["absent"] = sorted({*before.absent, *absent})
    if ones:
        changes["ones"] = sorted({*before.ones, *ones})
    return _with(spec, changes)


def _with(spec: str, changes: Mapping[str, Any]) -> str:
    return json.dumps({**json.loads(spec), **changes}, sort_keys=True)


def _variant_of(parts: Mapping[str, Any]) -> Variant:
    ones = tuple((name, dim) for name, dim in parts.get("ones", ()))
    return Variant(parts.get("sink", True), tuple(parts.get("absent", ())), ones)


def bound_numbers(spec: str) -> dict[str, bool | int | float]:
    """The params of the program of ``spec`` that are bound to numbers, by name."""
    declared = read_spec(spec).declared.items()
    return {name: value.value for name, value in declared if isinstance(value, Bound)}


def source_of_spec(spec: str) -> Source:
    """The text of ``spec``, of no file."""
    return Source(json.loads(spec)["text"])


def written_as(spec: str) -> Written:
    """The program of ``spec`` as it was written, for texts that people read.

    ``spec`` is one of a program without errors.
    """
    parts = read_spec(spec)
    names = names_of(Source(parts.text), parts.declared)
    return Written(parts.text, bound_numbers(spec), names)


def lowered_at(spec: str, source: Source, declared: Mapping[str, Declared]) -> Lowered:
    """Lowered program of ``spec``, for backends; its errors point into ``source``.

    Args:
        spec: The program.
        source: Its text, where errors are to point.
        declared: Its declarations, where they were made.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    with suppress(AttnDSLError):
        return lowered_program(spec)
    # The spec does not know of any file, so that its errors do not either.
    lower(source, declared, variant=read_spec(spec).variant)
    return lowered_program(spec)


def point_into(error: AttnDSLError, source: Source) -> None:
    """Make ``error`` point into ``source``. Other files may hold the same program."""
    if error.span is not None:
        error.span = error.span.within(source)


@contextmanager
def pointing_into(source: Source) -> Iterator[None]:
    """Context in which errors point into ``source``; see :func:`point_into`."""
    try:
        yield
    except AttnDSLError as error:
        point_into(error, source)
        raise


def lowered_program(spec: str) -> Lowered:
    """Lowered program of ``spec``, for backends.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    return compiled_program(spec).lowered


def warnings_at(spec: str, source: Source) -> list[ProgramWarning]:
    """Warnings about probably unintended text in the program of ``spec``.

    Args:
        spec: A program without errors.
        source: Its text, where warnings are to point.
    """
    found = []
    for kind, message, hint, start, end in compiled_program(spec).warnings:
        text = Source(read_spec(spec).text)
        span = None if start is None or end is None else Span(text, start, end).within(source)
        warning = UnusedWarning if kind == UnusedWarning.__name__ else ProgramWarning
        # An imported file may have more than this program uses.
        if kind != UnusedWarning.__name__ or span is None or span.source.name == source.name:
            found.append(warning(message, span, hint))
    return found


Row = tuple[str, str, str | None, int | None, int | None]


class CompiledProgram(NamedTuple):
    """Lowered program and warnings of a spec, which a process keeps."""

    lowered: Lowered
    warnings: tuple[Row, ...]
    """Class, message, hint, and the place in the spec's text of each."""


@memoised("compiled programs", 1024)
def compiled_program(spec: str) -> CompiledProgram:
    """The program of ``spec`` and its warnings.

    Raises:
        AttnDSLError: What is wrong with the program.
    """
    parts = read_spec(spec)
    cache = default_cache()
    key = _disk_key(spec)
    entry = cache.load(key)
    if entry is not None:
        try:
            lowered = lowered_from_json(entry.meta["lowered"], parts.text)
            rows: Any = entry.meta["warnings"]
            return CompiledProgram(lowered, tuple((a, b, c, d, e) for a, b, c, d, e in rows))
        except (SerialiseError, KeyError, TypeError, ValueError):
            pass  # Of another version of this package, or damaged: it is written again below.
    begin = time.perf_counter()
    source = Source(parts.text)
    with gc_paused():
        lowered = lower(source, parts.declared, parts.exact, parts.variant)
    # Variants are programs that calls ask for, and nobody has written.
    whole = parts.variant == Variant()
    found = [_row(each) for each in warnings_of(source, parts.declared)] if whole else []
    made = CompiledProgram(lowered, tuple(found))
    cache.save(key, "", _program_meta(spec, made))
    if LOG.isEnabledFor(logging.DEBUG):
        ms = (time.perf_counter() - begin) * 1e3
        LOG.debug(
            "compiled program %s in %.1f ms: %s", lowered.digest[:12], ms, short_form(lowered)
        )
    return made


def _row(found: ProgramWarning) -> Row:
    place = (None, None) if found.span is None else (found.span.start, found.span.end)
    return type(found).__name__, found.message, found.hint, *place


def program_entry(spec: str) -> tuple[str, dict[str, Any]]:
    """The key and the content of the entry that keeps the program of ``spec``.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    return _disk_key(spec), _program_meta(spec, compiled_program(spec))


def _program_meta(spec: str, made: CompiledProgram) -> dict[str, Any]:
    text = read_spec(spec).text
    bound = ", ".join(f"{name} = {value!r}" for name, value in bound_numbers(spec).items())
    words = shorten(text, SHORT_FORM) + (f"  # {bound}" if bound else "")
    about = About(text=words[: 2 * SHORT_FORM], program=made.lowered.digest)
    return {
        "kind": "program",
        "about": about.to_json(),
        "lowered": lowered_to_json(made.lowered, text),
        "warnings": made.warnings,
    }


def default_cache() -> BundledCache:
    """The cache that the environment names, and bundles; one object for each folder."""
    settings = read_settings()
    return _cache_at(settings.cache_dir, settings.cache_bytes, settings.cache)


@memoised("stores of kernels on disk", 16)
def _cache_at(folder: Path, limit: int, enabled: bool) -> BundledCache:
    return BundledCache(KernelCache(folder, limit, enabled))


def _disk_key(spec: str) -> str:
    text = "\0".join(["program", version_of("attndsl"), source_fingerprint(), spec])
    return hashlib.sha256(text.encode()).hexdigest()


def _declared_to_json(value: Declared) -> list[Any]:
    if isinstance(value, Bound):
        number = value.value
        if isinstance(number, float):
            return ["bound", {"float": number.hex()}]
        # JSON has decimal digits, and Python makes 4,300 at most.
        return ["bound", {"int": hex(number)} if number.bit_length() > 64 else number]
    if isinstance(value, ParamSpec):
        return ["param", value.dtype]
    if isinstance(value, Absent):
        return ["absent"]
    return ["tensor", list(value.dims), value.dtype]


def _declared_from_json(value: list[Any]) -> Declared:
    if value[0] == "bound":
        number = value[1]
        if isinstance(number, dict):
            number = int(number["int"], 16) if "int" in number else float.fromhex(number["float"])
        return Bound(number)
    if value[0] == "param":
        return ParamSpec(value[1])
    if value[0] == "absent":
        return Absent()
    return TensorSpec(tuple(value[1]), value[2])
