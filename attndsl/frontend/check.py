"""Surface tree to checked program: declarations, then statements in order."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attndsl import ir
from attndsl.errors import (
    AttnDSLError,
    LimitError,
    NameResolutionError,
    TypeMismatchError,
    raise_all,
)
from attndsl.foundation.scalars import as_int
from attndsl.ir import DType, Node, Op, ParamDecl, Program, TensorDecl
from attndsl.passes.simplify import simplify_node
from attndsl.source import Source

from . import hints, promotion
from . import surface as s
from .absent_names import Gone, finished, lacks
from .declare import (
    Absent,
    Bound,
    ParamSpec,
    TensorSpec,
    no_optional,
    origin_of,
    span_of,
    type_of,
    unusable,
)
from .expressions import Inliner, Scope
from .keyword_arguments import refuse_keywords
from .legacy_calls import modern
from .limits import MAX_ERRORS, MAX_OPTIONAL, check_dims
from .parse import parse
from .program_imports import homeless
from .reserved_names import ALWAYS
from .reserved_names import TARGETS as _TARGETS
from .type_inference import Wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.source import Span

    from .declare import Declared

_SHOWN = 40
"""Characters of an expression that a hint repeats."""


def check(tree: s.Tree, declared: Mapping[str, Declared]) -> Program:
    """The program that ``tree`` and the caller's declarations make.

    Args:
        tree: The surface tree.
        declared: Names that the caller gave: numbers to fold in, params and tensors.

    Raises:
        AttnDSLError: What is wrong (:class:`~attndsl.errors.ProgramErrors` where there is more).
    """
    checker = _Checker(tree, declared)
    try:
        checker.run()
    except LimitError as error:
        checker.errors.append(error)
    raise_all(checker.errors[:MAX_ERRORS])
    return checker.program()


def locals_of(tree: s.Tree, declared: Mapping[str, Declared]) -> dict[str, Node]:
    """Values of the local names of a program without errors, in the order of their lines.

    Raises:
        AttnDSLError: As :func:`check`.
    """
    checker = _Checker(tree, declared)
    checker.run()
    raise_all(checker.errors[:MAX_ERRORS])
    names = [x.name.name for x in tree.statements if isinstance(x, s.Assign)]
    found = {name: checker.scope.values.get(name) for name in names if name not in _TARGETS}
    return {name: value for name, value in found.items() if isinstance(value, Node)}


class KnownValues(NamedTuple):
    """Known values of a program's names, of its other parts and of its score lines."""

    names: Mapping[str, Node | TensorDecl]
    """Params, tensors, sizes and locals."""
    parts: Mapping[str, Node]
    """Mask, sink and weights."""
    lines: tuple[ir.Line, ...]
    """The score after each of its lines, in order."""


def values_of(tree: s.Tree, declared: Mapping[str, Declared]) -> KnownValues:
    """Known values of a program that may have errors, without those names that have them."""
    checker = _Checker(tree, declared)
    with contextlib.suppress(AttnDSLError):
        checker.run()
    known = {n: x for n, x in checker.scope.values.items() if isinstance(x, Node | TensorDecl)}
    parts = {name: value for name, value in checker.parts.items() if value is not None}
    return KnownValues(known, parts, tuple(checker.lines))


class _Checker:
    def __init__(self, tree: s.Tree, declared: Mapping[str, Declared]) -> None:
        # Calls of version 0.1 are errors, and are read as they are meant.
        tree, former = modern(tree)
        self.tree = tree
        self.declared = declared
        self.errors: list[AttnDSLError] = [*former]
        self.params: dict[str, ParamDecl] = {}
        self.tensors: dict[str, TensorDecl] = {}
        self.bound_at: dict[str, Span] = {}
        self.parts: dict[str, Node | None] = {}
        self.dropout: Node | None = None
        self.lines: list[ir.Line] = []
        self.weights_span: Span | None = None
        self.in_text = {
            x.name.name for x in tree.statements if isinstance(x, s.ParamDef | s.TensorDef)
        }
        definitions = {x.name.name: x for x in tree.statements if isinstance(x, s.Define)}
        wanted = Wanted(tree.statements, declared)
        self.scope = Scope({}, definitions, s.lines_of_locals(tree.statements, _TARGETS), wanted)
        self.scope.lacking = any(isinstance(x, Absent) for x in declared.values())
        self.inliner = Inliner(self.scope, self.errors)

    def program(self) -> Program:
        score = self.scope.score
        assert score is not None
        return Program(
            score=score,
            mask=self.parts.get("mask"),
            sink=self.parts.get("sink"),
            weights=self.parts.get("weights"),
            dropout=self.dropout,
            params=tuple(self.params.values()),
            tensors=tuple(self.tensors.values()),
            lines=tuple(self.lines),
            weights_span=self.weights_span,
        )

    def run(self) -> None:
        raise_all([homeless(x) for x in self.tree.statements if isinstance(x, s.Import)])
        given = {name: x for name, x in self.declared.items() if name not in self.in_text}
        # Declarations come first, so that their order does not matter. Dims mention params.
        for name, scalar in given.items():
            if not isinstance(scalar, TensorSpec):
                self._declare(name, scalar)
        for statement in self.tree.statements:
            if isinstance(statement, s.ParamDef):
                self._guard(self._param, statement)
        for name, tensor in given.items():
            if isinstance(tensor, TensorSpec):
                self._declare(name, tensor)
        for statement in self.tree.statements:
            if isinstance(statement, s.TensorDef):
                self._guard(self._tensor, statement)
            elif isinstance(statement, s.Define):
                self._guard(self._define, statement)
        self._check_optional()
        for statement in self.tree.statements:
            if isinstance(statement, s.Assign):
                self._guard(self._assign, statement)
            elif isinstance(statement, s.Bare):
                self._guard(self._bare, statement)
        self._check_early()
        self._check_unused()

    def _guard(self, step: object, statement: s.Statement) -> None:
        assert callable(step)
        if len(self.errors) >= MAX_ERRORS:
            return
        try:
            step(statement)
        except LimitError:
            raise
        except AttnDSLError as error:
            self.errors.append(error)

    def _bind(self, name: s.Name, what: str) -> None:
        """Refuse a name that already means something."""
        if name.name in ALWAYS or name.name in _TARGETS:
            if name.name not in ALWAYS and what != "a function":
                self.scope.values[name.name] = None
            raise NameResolutionError(
                f"'{name.name}' always has its own meaning and cannot be {what}",
                name.span,
                "choose another name",
            )
        if name.name in self.bound_at:
            raise NameResolutionError(
                f"'{name.name}' is already bound in "
                f"{self.bound_at[name.name].line_from(name.span)}",
                name.span,
                "names are bound once: choose another (only 'score' lines replace one another)",
            )
        if name.name in self.declared and what not in ("a param", "a tensor"):
            raise NameResolutionError(
                f"'{name.name}' {origin_of(self.declared[name.name])} and cannot be {what} too",
                name.span,
                "choose another name",
            )
        self.bound_at[name.name] = name.span

    def _declare(self, name: str, given: Declared) -> None:
        """A name that the caller declares and the text does not."""
        if name in ALWAYS or name in _TARGETS or not name.isidentifier():
            if name not in ALWAYS:
                self.scope.values[name] = None
            self.errors.append(
                NameResolutionError(
                    f"'{name[:40]}' cannot be declared: it has its own meaning or is no name",
                    span_of(given),
                    "choose another name",
                )
            )
        elif isinstance(given, Absent):
            self.errors.append(no_optional(name, given))
            self.scope.values[name] = Gone(frozenset({name}))
        elif isinstance(given, Bound):
            found = unusable(name, given)
            if found is not None:
                self.errors.append(found)
            self.scope.values[name] = ir.const(self.scope.wanted.number(name, given.value))
        elif isinstance(given, ParamSpec):
            self.params[name] = ParamDecl(name, type_of(given.dtype))
            self.scope.values[name] = ir.param(name, type_of(given.dtype))
        else:
            dims = tuple(self._declared_dim(name, dim) for dim in given.dims)
            self.tensors[name] = TensorDecl(name, type_of(given.dtype), dims)
            self.scope.values[name] = self.tensors[name]

    def _declared_dim(self, name: str, dim: str | int) -> Node:
        if isinstance(dim, int):
            return ir.const(dim)
        tree = parse(Source(dim, f"<dim of {name}>"))
        if len(tree.statements) != 1 or not isinstance(tree.statements[0], s.Bare):
            raise TypeMismatchError(
                f"'{dim}' is no dim of {name}", hint="write a size or an expression"
            )
        found = self._dim(tree.statements[0].value)
        return found if found is not None else ir.const(0)

    def _param(self, statement: s.ParamDef) -> None:
        self._bind(statement.name, "a param")
        name = statement.name.name
        self.scope.values[name] = None
        dtype = type_of(statement.dtype.name, statement.dtype.span)
        default = None
        if statement.default is not None:
            default = self._literal(name, statement.default, dtype)
        given = self.declared.get(name)
        if statement.optional:
            self.scope.optional.add(name)
        if isinstance(given, Absent):
            self._leave_out(statement, given)
            return
        if isinstance(given, Bound):
            self.scope.values[name] = self._bound(name, given, dtype, statement.span)
            return
        if given is not None and not (isinstance(given, ParamSpec) and given.dtype == dtype.value):
            raise TypeMismatchError(
                f"'{name}' is declared as a {dtype.value} param, and compile() got another kind",
                statement.span,
                f"pass a {dtype.value}",
            )
        self.params[name] = ParamDecl(
            name, dtype, default, statement.name.span, optional=statement.optional
        )
        self.scope.values[name] = ir.param(name, dtype, statement.name.span)

    def _leave_out(self, statement: s.ParamDef | s.TensorDef, given: Absent) -> None:
        """A capture that is not there, and sizes that it alone would have."""
        name = statement.name.name
        self.scope.values[name] = Gone(frozenset({name}))
        if not statement.optional:
            raise no_optional(name, given)
        for dim in statement.dims if isinstance(statement, s.TensorDef) else ():
            if isinstance(dim, s.Name) and self._is_free(dim.name):
                self.scope.values[dim.name] = Gone(frozenset(), frozenset({dim.name}))

    def _is_free(self, name: str) -> bool:
        """Return True if a dim may give ``name`` its meaning."""
        found = self.scope.values.get(name)
        of_absent = isinstance(found, Gone) and not found.names
        return name not in ALWAYS and (name not in self.scope.values or of_absent)

    def _default(
        self, name: str, value: bool | int | float, dtype: DType, span: Span
    ) -> bool | int | float:
        node = ir.const(value, span)
        if node.dtype is not dtype and (node.dtype, dtype) != (DType.INT, DType.FLOAT):
            shown = str(value).lower()
            raise TypeMismatchError(
                f"'{name}' is of type {dtype.value}, and its default {shown} is of type "
                f"{node.dtype.value}",
                span,
                hints.of_default(name, dtype.value, value),
            )
        return self._typed("the default", Bound(value), dtype, span).value  # type: ignore[return-value]

    def _literal(self, name: str, written: s.Expr, dtype: DType) -> bool | int | float:
        node = self.inliner.node(written)
        if node is not None and node.op is Op.CONST and isinstance(node.value, bool | int | float):
            return self._default(name, node.value, dtype, written.span)
        raise TypeMismatchError(
            "a default is a literal", written.span, "write a number, true or false"
        )

    def _bound(self, name: str, given: Bound, dtype: DType, span: Span) -> Node:
        """A param's value from outside of the text, where a whole float is as good as an int."""
        number = as_int(given.value) if dtype is DType.INT else None
        if number is not None and -(1 << 63) <= number < 1 << 63:
            given = replace(given, value=number)
        return self._typed(name, given, dtype, span)

    def _typed(self, name: str, given: Bound, dtype: DType, span: Span) -> Node:
        found = unusable(name, given)
        if found is not None:
            raise found
        node = ir.const(given.value, span)
        if dtype is DType.FLOAT and node.dtype is DType.INT:
            return promotion.as_float(node)
        if node.dtype is not dtype:
            raise TypeMismatchError(
                f"'{name}' is of type {dtype.value}, and {given.value!r} is not", span,
                "pass an int" if dtype is DType.INT else f"pass a {dtype.value}",
            )  # fmt: skip
        return node

    def _tensor(self, statement: s.TensorDef) -> None:
        self._bind(statement.name, "a tensor")
        name = statement.name.name
        self.scope.values[name] = None
        dtype = type_of(statement.dtype.name, statement.dtype.span)
        given = self.declared.get(name)
        if statement.optional:
            self.scope.optional.add(name)
        if isinstance(given, Absent):
            self._leave_out(statement, given)
            return
        if isinstance(given, Bound | ParamSpec) or (
            given is not None
            and (len(given.dims), given.dtype) != (len(statement.dims), dtype.value)
        ):
            raise TypeMismatchError(
                f"'{name}' is a {len(statement.dims)}-d {dtype.value} tensor here, "
                f"and {origin_of(given)} as another kind",
                statement.span,
            )
        if not statement.dims:
            raise TypeMismatchError(
                f"'{name}' has no dims", statement.span, f"write 'param {name}: {dtype.value}'"
            )
        check_dims(name, len(statement.dims), statement.span)
        self.scope.defining = name
        try:
            dims = [self._dim(dim) for dim in statement.dims]
        finally:
            self.scope.defining = None
        if any(dim is None for dim in dims):
            return
        found = TensorDecl(
            name, dtype, tuple(d for d in dims if d is not None), statement.name.span,
            optional=statement.optional,
        )  # fmt: skip
        self.tensors[name] = self.scope.values[name] = found

    def _dim(self, written: s.Expr) -> Node | None:
        """An int of sizes and params; a new name stands for a size of its own."""
        if isinstance(written, s.Name):
            name = written.name
            if self._is_free(name):
                self.scope.values[name] = ir.size(name, written.span)
                self.bound_at.setdefault(name, written.span)
        dim = self.inliner.node(written, "a dim")
        if dim is None:
            return None
        read = ir.leaf_names(dim) & {name for name, x in self.params.items() if x.optional}
        if read:
            raise TypeMismatchError(
                f"a dim cannot depend on '{min(read)}', which calls may leave out",
                written.span,
                "declare that param without '= none', or write a new name for the dim's own size",
            )
        allowed = all(x.op not in (Op.VAR, Op.SCORE, Op.LOAD, Op.DOT) for x in ir.toposort(dim))
        if dim.dtype is not DType.INT or not allowed:
            raise TypeMismatchError(
                "a dim is an int made of sizes, params and numbers",
                written.span,
                f"sizes are {', '.join((*ir.SIZES, ir.TOKENS))}",
            )
        return dim

    def _define(self, statement: s.Define) -> None:
        self._bind(statement.name, "a function")
        seen: set[str] = set()
        for parameter in statement.parameters:
            if parameter.name in seen:
                raise NameResolutionError(
                    f"'{parameter.name}' is a parameter twice", parameter.span, "rename one"
                )
            seen.add(parameter.name)

    def _left(self, written: s.Expr, keeps_score: bool = False) -> Node | Gone | None:
        """Node that absent names leave of a line: Gone if the line goes, None if it has errors."""
        part = self.inliner.part(written)
        if not lacks(part):
            return part  # type: ignore[return-value]
        left = finished(part, written.span)  # type: ignore[arg-type]
        if isinstance(part, Gone) and (left is None or not keeps_score):
            return part
        return left

    def _check_optional(self) -> None:
        """Each set of absent names makes a program of its own."""
        if len(self.scope.optional) > MAX_OPTIONAL:
            raise LimitError(
                f"the program has {len(self.scope.optional)} params and tensors with '= none'; at "
                f"most {MAX_OPTIONAL} are allowed",
                hint="write two programs, or bind some of them",
            )

    def _bare(self, statement: s.Bare) -> None:
        others = [x for x in self.tree.statements if isinstance(x, s.Bare | s.Assign)]
        named = {x.name.name for x in others if isinstance(x, s.Assign)}
        bare = [x for x in others if isinstance(x, s.Bare)]
        if len(bare) > 1 or named & _TARGETS:
            raise TypeMismatchError(
                "an expression without a name is allowed only where it is the whole program",
                statement.span,
                "write 'mask = ...' or 'score = ...' before it",
            )
        value = self._left(statement.value, keeps_score=True)
        if isinstance(value, Gone) or (value is ir.SCORE and self.scope.lacking):
            return
        if value is None:
            self.scope.score = None
        elif value.dtype is DType.BOOL:
            self.parts["mask"] = value
        else:
            self.scope.score = promotion.as_float(value)
            self.lines.append(ir.Line(self.scope.score, statement.span))

    def _assign(self, statement: s.Assign) -> None:
        name = statement.name.name
        if name == "score":
            value = self._left(statement.value, keeps_score=True)
            if isinstance(value, Gone) or (
                value is not None and value is self.scope.score and self.scope.lacking
            ):
                return
            if value is not None:
                value = promotion.as_float(
                    promotion.need_number(value, statement.value.span, "the score")
                )
                self.lines.append(ir.Line(value, statement.name.span.to(statement.value.span)))
            self.scope.score = value
            return
        if name not in _TARGETS:
            self._bind(statement.name, "a local name")
            self.scope.defining = name
            self.scope.values[name] = self.inliner.part(statement.value)
            self.scope.defining = None
            return
        if name == "mask":
            self._mask(statement)
            return
        if name in self.parts:
            raise NameResolutionError(
                f"'{name}' is already given in {self.bound_at[name].line_from(statement.span)}",
                statement.name.span,
                f"a program has one '{name}': write one expression",
            )
        self.parts[name] = None
        self.bound_at[name] = statement.name.span
        if name == "weights":
            self._weights(statement)
            return
        value = self._left(statement.value)
        if value is None or isinstance(value, Gone):
            return
        at = statement.value.span
        self._needs_only(value, {"b", "h"}, "a sink is one logit a row: it", at)
        self.parts[name] = promotion.as_float(promotion.need_number(value, at, "the sink"))

    def _mask(self, statement: s.Assign) -> None:
        """One more condition: mask lines mean what ``and`` between them means."""
        masks, others = s.joined_with("mask", statement.value)
        if masks and others and "mask" not in self.scope.values:
            hint = hints.of_joined([x.span.text for x in others])
            raise NameResolutionError("'mask' is not declared", masks[0].span, hint)
        value = self._left(statement.value)
        if value is None or isinstance(value, Gone):
            return
        if value.dtype is DType.FLOAT and ir.reads_score(value):
            text = " ".join(statement.value.span.text.split())
            raise TypeMismatchError(
                "the mask takes bools, and this is a score",
                statement.value.span,
                f"write 'score = {text}'" if len(text) <= _SHOWN else "write 'score = ...'",
            )
        value = promotion.need_bool(value, statement.value.span, "the mask")
        before = self.parts.get("mask")
        self.parts["mask"] = (
            value if before is None else ir.node(Op.AND, before, value, span=statement.value.span)
        )

    def _needs_only(self, value: Node, allowed: set[str], what: str, at: Span) -> None:
        found = ir.dependencies(value)[value] - allowed
        if found:
            names = " and ".join(sorted(allowed)) if allowed else "nothing but params and sizes"
            raise TypeMismatchError(
                f"{what} depends on {' and '.join(sorted(found))}", at, f"use {names} only"
            )

    def _weights(self, statement: s.Assign) -> None:
        """``softmax(score)``, another expression of the final score, or dropout of either."""
        written = statement.value
        if isinstance(written, s.FunctionCall) and written.name == "dropout":
            refuse_keywords(written)
            if len(written.args) != 2:
                raise TypeMismatchError(
                    "dropout takes the weights and a probability",
                    written.span,
                    "write dropout(softmax(score), 0.1)",
                )
            written, probability = written.args
            self.dropout = self._probability(probability)
        if isinstance(written, s.FunctionCall) and written.name == "softmax":
            refuse_keywords(written)
            if len(written.args) != 1 or written.args[0] != s.Name("score", written.args[0].span):
                raise TypeMismatchError(
                    "softmax is taken of the score",
                    written.span,
                    "write softmax(score), and change the score in lines before",
                )
            return
        # Within weights, `score` is the final score, wherever the line stands.
        before, self.scope.score = self.scope.score, ir.SCORE
        self.scope.in_weights = True
        value = self.inliner.node(written, "the weights")
        self.scope.score, self.scope.in_weights = before, False
        if value is not None:
            at = written.span
            self.parts["weights"] = promotion.as_float(promotion.need_number(value, at, "weights"))
            self.weights_span = at

    def _probability(self, written: s.Expr) -> Node | None:
        """The probability, or None where it is absent: nothing is dropped then."""
        value = self._left(written)
        if value is None or isinstance(value, Gone):
            return None
        value = promotion.as_float(promotion.need_number(value, written.span, "a probability"))
        self._needs_only(value, set(), "the dropout probability", written.span)
        known = simplify_node(value)  # Bound params may make a number of it.
        if known.op is Op.CONST and not 0.0 <= float(known.value or 0.0) < 1.0:
            raise TypeMismatchError(
                f"a dropout probability lies in [0, 1), and this is {known.value}",
                written.span,
                "write 0.1 to drop one weight in ten",
            )
        return value

    def _check_early(self) -> None:
        """Refuse names in weights that read an earlier score: there the score is the final one."""
        if self.scope.score is ir.SCORE:
            return
        for name, span in self.scope.early:
            self.errors.append(
                TypeMismatchError(
                    f"'{name}' reads the score as it was in its line, and in 'weights' the score "
                    "is the final one",
                    span,
                    f"write a function, 'def {name}(s) = ...', and {name}(score) in 'weights'",
                )
            )

    def _check_unused(self) -> None:
        """A name that the caller declares and nothing reads is a mistake."""
        for name, given in self.declared.items():
            if name in self.in_text or name in self.scope.used:
                continue
            close = difflib.get_close_matches(name, self.scope.used - set(self.declared), n=1)
            self.errors.append(
                NameResolutionError(
                    f"'{name[:40]}' {origin_of(given)}, but the program never uses it",
                    span_of(given),
                    f"did you mean '{close[0]}'?" if close else "remove it, or use it",
                )
            )
