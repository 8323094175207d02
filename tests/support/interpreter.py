"""Triton's interpreter without work whose result it throws away: the same numbers, sooner."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def hasten() -> None:
    """Change the interpreter of this process."""
    _leave_out_unread_checks()
    # Versions of Triton whose launches have no scope never end what a call put there.
    if hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()


def _leave_out_unread_checks() -> None:
    """No second sum in 64 bits beside each sum of ints: assertions on it are off without debug."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """Let a kernel's launch put the interpreter's operations into ``triton.language`` once.

    The interpreter puts them there again for each call of a function within the kernel, which is
    a search through the modules' members and changes nothing.
    """
    patch = interpreter._patch_lang
    known: dict[Callable, frozenset[ModuleType]] = {}
    done: set[ModuleType] = set()

    def once(fn: Callable) -> interpreter._LangPatchScope:
        if fn not in known:
            modules = (x for x in fn.__globals__.values() if inspect.ismodule(x))
            known[fn] = frozenset(x for x in modules if x in (tl, tl.core))
        if known[fn] and known[fn] <= done:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore

        def end() -> None:
            restore()
            done.clear()

        done.update(known[fn])
        scope.restore = end
        return scope

    interpreter._patch_lang = once
