"""Triton's interpreter without work whose result it throws away: the same numbers, sooner."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType, ModuleType

    import numpy as np


def hasten() -> None:
    """Change the interpreter of this process."""
    _leave_out_unread_checks()
    _look_up_dtypes_once()
    _rewrite_equal_functions_once()
    # Versions of Triton whose launches have no scope never end what a call put there.
    if hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()


def _leave_out_unread_checks() -> None:
    """No second sum in 64 bits beside each sum of ints: assertions on it are off without debug."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _look_up_dtypes_once() -> None:
    """No table of all dtypes for each operand."""
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def once(kind: tl.dtype) -> np.dtype[Any]:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return find(kind)
        if scalar.name not in known:
            known[scalar.name] = find(kind)
        return known[scalar.name]

    interpreter._get_np_dtype = once


def _rewrite_equal_functions_once() -> None:
    """Parse a function's text once, however many generated modules have it.

    The interpreter reads, parses and rewrites each function of each module. Many modules have many
    functions alike. Each is still compiled by itself, with its own file and lines.
    """
    rewriter = interpreter.FunctionRewriter
    rewrite, transform = rewriter.rewrite_ast, rewriter._transform_ast
    known: dict[tuple[object, ...], tuple[ast.AST, int]] = {}

    def transform_and_keep(self: Any, src: str) -> ast.AST:
        tree = transform(self, src)
        known[_content(self.fn)] = tree, self.fn.__code__.co_firstlineno
        return tree

    def rewrite_once(self: Any) -> Callable:
        code, content = self.fn.__code__, _content(self.fn)
        if content not in known:
            return rewrite(self)
        tree, line = known[content]
        ast.increment_lineno(tree, code.co_firstlineno - line)
        known[content] = tree, code.co_firstlineno
        self.filename = code.co_filename
        return self._compile_and_exec(tree)

    rewriter.rewrite_ast, rewriter._transform_ast = rewrite_once, transform_and_keep


def _content(function: FunctionType) -> tuple[object, ...]:
    """What functions of equal texts have alike, and others have not."""
    code = function.__code__
    # Functions within another have a place of their own: those with some are like no other.
    nests = any(isinstance(each, CodeType) for each in code.co_consts)
    return (
        code.co_code, code.co_names, code.co_varnames, code.co_name, code.co_linetable,
        # 0, 0.0 and False are equal, and their texts are not.
        repr(code.co_consts), repr(function.__annotations__), repr(function.__defaults__),
        id(code) if nests else 0,
    )  # fmt: skip


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
