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
    _make_shapes_once()
    _rewrite_equal_functions_once()
    # Versions of Triton whose launches have no scope never end what a call put there.
    if hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()
        _call_operations_directly()


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


def _make_shapes_once() -> None:
    """No new tuple of numbers, with a type for it, for each tensor and each type of one.

    All of a shape share one, which nothing changes.
    """
    make_tensor, make_type = tl.tensor.__init__, tl.block_type.__init__
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def tensor(self: Any, handle: Any, type: tl.dtype) -> None:  # noqa: A002
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[shape]

    def block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else tl.core._unwrap_if_constexpr(size)
                       for size in shape])  # fmt: skip
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    tl.tensor.__init__, tl.block_type.__init__ = tensor, block_type


def _call_operations_directly() -> None:
    """No two functions around each operation that only look after one argument."""
    around = tl.core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        direct = member.__wrapped__ if getattr(member, "__code__", None) is around else member
        semantic = interpreter.interpreter_semantic

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return direct(*arguments, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


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
