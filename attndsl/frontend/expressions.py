"""Surface expressions to IR: names resolved, functions inlined, types checked.

An expression with an error has the value None, which silences what is built from it, so that each
error is reported once. Errors inside a prelude function are reported where the program calls it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl import ir
from attndsl.errors import (
    AttnDSLError,
    LimitError,
    NameResolutionError,
    RankError,
    TypeMismatchError,
    counted,
)
from attndsl.ir import DType, Node, TensorDecl

from . import (
    absent_names,
    builtin_functions,
    contraction,
    hints,
    membership,
    misspellings,
    promotion,
)
from . import surface as s
from .absent_names import Gone, OperandPlace, Part, RemainingOperands
from .keyword_arguments import parameters_of, refuse_keywords
from .limits import MAX_ERRORS, MAX_EXPANSIONS, MAX_NESTING
from .prelude import prelude_function, prelude_names
from .reserved_names import ALWAYS, CONSTANTS
from .type_inference import Wanted, likely

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.source import Span

Value = Part | TensorDecl
"""The meaning of a name; a tensor may only be indexed or handed to a function."""

_MEMBER = ("in", "not in")
_DECIDED_BY = {"and": False, "or": True}
"""The left operand that decides alone."""

_LONG_INDEX = 20
"""Characters of an index that a hint does not repeat."""
_WHOLE = f"write an index; whole rows stand in dot only: {contraction.FORM.removeprefix('write ')}"


@dataclass(slots=True)
class Scope:
    """Names of a program while it is checked."""

    values: dict[str, Value | None]
    """Params, tensors, sizes and locals; None for a name whose definition has an error."""
    definitions: Mapping[str, s.Define]
    lines: Mapping[str, Span]
    """Place of each local name in the text, those of later lines too."""
    wanted: Wanted
    """Uses of undeclared names."""
    score: Node | None = ir.SCORE
    """The score so far."""
    defining: str | None = None
    """The name whose definition is read now, which it cannot mention itself."""
    used: set[str] = field(default_factory=set)
    """Names that were looked up."""
    in_weights: bool = False
    """True if ``score`` is the final one here, which no name before can have read."""
    early: list[tuple[str, Span]] = field(default_factory=list)
    """Names that weights mention, and that read the score as it was before."""
    optional: set[str] = field(default_factory=set)
    """Captures that may be absent; :data:`.absent_names.NAME` tests these."""
    lacking: bool = False
    """True if some captures are absent. Code that conditions then leave out is not read, as it may
    have no meaning; the program in which all are there is checked as a whole."""


class Inliner:
    """Builds the IR of expressions, and collects their errors."""

    def __init__(self, scope: Scope, errors: list[AttnDSLError]) -> None:
        self.scope = scope
        self.errors = errors
        self._expansions = 0
        self._depth = 0
        self._calls: list[str] = []
        self._blame: Span | None = None
        self._frames: list[dict[str, Value | None]] = []

    def node(self, expr: s.Expr, what: str = "what stands here") -> Node | None:
        """The IR of ``expr``, or None where it has errors, such as reading an absent name."""
        part = self.part(expr)
        if not absent_names.lacks(part):
            return part  # type: ignore[return-value]
        try:
            return absent_names.needed(part, what, expr.span)  # type: ignore[arg-type]
        except AttnDSLError as error:
            self._error(error)
            return None

    def part(self, expr: s.Expr) -> Part | None:
        """Part that is left of ``expr`` without absent names, or None where it has errors."""
        value = self.value(expr)
        if isinstance(value, TensorDecl):
            rank = len(value.dims)
            self._error(
                RankError(
                    f"'{value.name}' is a tensor with {counted(rank, 'dim')}; "
                    "a pair needs one element",
                    expr.span,
                    hints.of_element(value.name, _dim_names(value)),
                )
            )
            return None
        return value

    def value(self, expr: s.Expr) -> Value | None:
        """Like :meth:`part`, but a tensor's name is allowed too."""
        self._expansions += 1
        self._depth += 1
        if self._expansions > MAX_EXPANSIONS:
            raise LimitError(
                f"the program has more than {MAX_EXPANSIONS} operators once functions are inlined",
                self._place(expr.span),
                "bind a value that is used several times to a name: locals are shared, not copied",
            )
        if self._depth > 2 * MAX_NESTING:
            raise LimitError(
                f"functions and expressions nest deeper than {2 * MAX_NESTING}",
                self._place(expr.span),
                "bind inner parts to names",
            )
        try:
            return self._build(expr)
        except LimitError:
            raise
        except AttnDSLError as error:
            self._error(error)
            return None
        finally:
            self._depth -= 1

    def _place(self, span: Span) -> Span:
        return self._blame or span

    def _error(self, error: AttnDSLError) -> None:
        if self._blame is not None and error.span is not None:
            error = type(error)(f"in {self._calls[0]}: {error.message}", self._blame, error.hint)
        self.errors.append(error)

    def _build(self, expr: s.Expr) -> Value | None:
        if isinstance(expr, s.Group):
            return self.value(expr.inner)
        if isinstance(expr, s.Number):
            return promotion.literal(expr.text, expr.span)
        if isinstance(expr, s.Name):
            return self._name(expr)
        if isinstance(expr, s.Binary):
            return self._binary(expr)
        if isinstance(expr, s.Unary):
            operand = self.part(expr.operand)
            if operand is None:
                return None
            return absent_names.unary(expr.op, operand, expr.operand.span, self._here(expr.span))
        if isinstance(expr, s.Compare):
            return self._compare(expr)
        if isinstance(expr, s.Ternary):
            return self._ternary(expr)
        if isinstance(expr, s.Index):
            return self._index(expr)
        if isinstance(expr, s.Whole):
            raise RankError("':' is no index of a pair's element", expr.span, _WHOLE)
        return self._call(expr)

    def _here(self, span: Span) -> OperandPlace:
        return OperandPlace(span, self.scope.score)

    def _ternary(self, expr: s.Ternary) -> Part | None:
        condition = self.part(expr.condition)
        known = self._known(condition)
        if known is not None:
            return self.part(expr.yes if known else expr.no)
        yes, no = self.part(expr.yes), self.part(expr.no)
        if condition is None or yes is None or no is None:
            return None
        if isinstance(condition, Node):
            promotion.need_bool(condition, expr.condition.span, "the condition of if")
            if isinstance(yes, Node) and isinstance(no, Node):
                return promotion.where(condition, yes, no, expr.span)
        return absent_names.where(condition, yes, no, self._here(expr.span))

    def _known(self, condition: Part | None) -> bool | None:
        """Value of a condition for all pairs, if names are absent and it is known."""
        if condition is None or not self.scope.lacking:
            return None
        return absent_names.known(condition)

    def _name(self, expr: s.Name, declare: str | None = None) -> Value | None:
        """The meaning of a name.

        Args:
            expr: The name.
            declare: The hint that says how to declare it, where it can be no function.
        """
        name = expr.name
        for frame in self._frames[-1:]:
            if name in frame:
                return frame[name]
        if name == self.scope.defining:
            raise NameResolutionError(
                f"'{name}' is read in its own definition",
                expr.span,
                "names are bound once: choose another (only 'score' lines replace one another)",
            )
        self.scope.used.add(name)
        if name in self.scope.values:
            value = self.scope.values[name]
            if self.scope.in_weights and isinstance(value, Node) and _mentions_score(value):
                self.scope.early.append((name, self._place(expr.span)))
            return value
        if name == "score":
            return self.scope.score
        if name in ir.VARS or name == ir.TOKEN:
            return ir.var(name, expr.span)
        if name in ir.SIZES or name == ir.TOKENS:
            return ir.size(name, expr.span)
        if name in CONSTANTS:
            return CONSTANTS[name]
        builtin = name in builtin_functions.NAMES or name in (contraction.NAME, absent_names.NAME)
        if name in self.scope.definitions or builtin or name in prelude_names():
            raise NameResolutionError(f"'{name}' is a function", expr.span, f"call it: {name}(...)")
        raise NameResolutionError(
            f"'{name}' is not declared", expr.span, self._nearest(expr, declare)
        )

    def _value_names(self) -> list[str]:
        frame = self._frames[-1] if self._frames else {}
        return [*frame, *self.scope.values, *sorted(ALWAYS), *self.scope.lines]

    def _function_names(self) -> list[str]:
        return [
            *self.scope.definitions, *sorted(builtin_functions.NAMES), contraction.NAME,
            absent_names.NAME,
            *prelude_names(),
        ]  # fmt: skip

    def _nearest(self, expr: s.Name, declare: str | None) -> str:
        name = expr.name
        if name in self.scope.lines:
            return hints.of_later(name, self.scope.lines[name], self._place(expr.span))
        elsewhere = hints.of_name(name)
        if elsewhere is not None:
            return elsewhere
        meant = misspellings.meant(name, self._value_names())
        if meant is not None:
            return f"did you mean '{meant}'?"
        if declare is not None:
            return declare
        many = len(self.errors) >= MAX_ERRORS
        kind = DType.FLOAT if many else likely(self.scope.wanted.types(name))
        declare = hints.of_value(name, kind.value)
        meant = misspellings.meant(name, self._function_names())
        if meant is None:
            return declare
        if kind is DType.BOOL:
            return f"did you mean the function '{meant}(...)'?"
        return f"{declare}; or do you mean the function '{meant}(...)'?"

    def _binary(self, expr: s.Binary) -> Part | None:
        # Chains lean left: walk them down, so that a long sum does not nest.
        chain = [expr]
        while isinstance(chain[-1].left, s.Binary):
            chain.append(chain[-1].left)
        total = self.part(chain[-1].left)
        for link in reversed(chain):
            if link.op in _DECIDED_BY and self._known(total) is _DECIDED_BY[link.op]:
                continue
            right = self.part(link.right)
            self._expansions += 1
            if total is not None and right is not None:
                spans = (link.left.span, link.right.span)
                total = absent_names.binary(link.op, total, right, spans, self._here(link.span))
            else:
                total = None
        return total

    def _compare(self, expr: s.Compare) -> Part | None:
        for operand in expr.operands:
            if isinstance(operand, s.Binary) and operand.op in ("&", "|", "^"):
                raise TypeMismatchError(
                    f"'{operand.op}' beside a comparison binds tighter than it looks",
                    operand.span,
                    {"&": "write 'and', or parentheses where bits are meant",
                     "|": "write 'or', or parentheses where bits are meant",
                     "^": "write parentheses where bits are meant"}[operand.op],
                )  # fmt: skip
        if expr.ops[0] in _MEMBER:
            return self._member(expr)
        nodes = [self.part(operand) for operand in expr.operands]
        result: Part | None = None
        here = self._here(expr.span)
        for op, a, b, x, y in zip(
            expr.ops, nodes, nodes[1:], expr.operands, expr.operands[1:], strict=False
        ):
            if a is None or b is None:
                return None
            link = absent_names.compare(op, a, b, (x.span, y.span), here)
            if result is not None:
                link = absent_names.conjunction(result, link, (expr.span, expr.span), here)
            result = link
        return result

    def _member(self, expr: s.Compare) -> Part | None:
        element, row = expr.operands
        assert isinstance(row, s.Index)
        if not row.indices or not isinstance(row.indices[-1], s.Whole):
            raise RankError(
                f"'in' looks through a row, and this is one element of '{row.name}'",
                row.span,
                f"write ':' for the last index: {row.name}[..., :]",
            )
        value, found = self.part(element), self._lookup(row, row.indices[:-1])
        lacking = [x for x in (value, found) if isinstance(x, Gone | RemainingOperands)]
        if lacking:
            return absent_names.through(lacking, self._here(expr.span), numbers=False)
        if not isinstance(value, Node) or not isinstance(found, tuple):
            return None
        result = membership.contains(value, found, (element.span, row.span), expr.span)
        return result if expr.ops[0] == "in" else ir.node(ir.Op.NOT, result, span=expr.span)

    def _index(self, expr: s.Index) -> Part | None:
        found = self._lookup(expr, expr.indices)
        if found is None or isinstance(found, Gone):
            return found
        tensor, indices = found
        return ir.load(tensor.name, tensor.dtype, *indices, span=expr.span)

    def _lookup(
        self, expr: s.Index, places: tuple[s.Expr, ...]
    ) -> tuple[TensorDecl, tuple[Node, ...]] | Gone | None:
        """Tensor and indices of a lookup; ``places`` are those indices of ``expr`` that count."""
        indices = [self.part(index) for index in places]
        tensor = self._name(s.Name(expr.name, expr.span), hints.of_tensor(expr.name))
        if tensor is None:
            return None
        if isinstance(tensor, Gone):
            return tensor
        if not isinstance(tensor, TensorDecl):
            raise RankError(f"'{expr.name}' is a single value and has no elements", expr.span)
        if len(expr.indices) != len(tensor.dims):
            count = len(expr.indices)
            raise RankError(
                f"'{expr.name}' has {counted(len(tensor.dims), 'dim')}, and "
                f"{counted(count, 'index', 'indices')} here",
                expr.span,
                hints.of_element(
                    expr.name,
                    _dim_names(tensor),
                    [
                        "..." if len(x.span.text) > _LONG_INDEX else x.span.text
                        for x in expr.indices
                    ],
                ),
            )
        found = []
        for index, written in zip(indices, places, strict=True):
            if index is None:
                return None
            if not isinstance(index, Node):
                absent_names.needed(index, "an index", written.span)
                return None
            if index.dtype is not DType.INT:
                raise TypeMismatchError(
                    f"an index is an int, and this is of type {index.dtype.value}",
                    written.span,
                    "write int(...) around it",
                )
            found.append(index)
        return tensor, tuple(found)

    def _dot(self, expr: s.FunctionCall) -> Part | None:
        if len(expr.args) != 2:
            raise RankError(
                f"dot takes 2 rows, and has {len(expr.args)}", expr.span, contraction.FORM
            )
        rows = []
        for written in expr.args:
            row = written
            while isinstance(row, s.Group):
                row = row.inner
            if not isinstance(row, s.Index):
                raise RankError("dot multiplies rows of tensors", row.span, contraction.FORM)
            if not row.indices or not isinstance(row.indices[-1], s.Whole):
                raise RankError(
                    f"dot multiplies rows, and this is one element of '{row.name}'",
                    row.span,
                    f"write ':' for the last index, along which dot adds up: {row.name}[..., :]",
                )
            rows.append((self._lookup(row, row.indices[:-1]), row.span))
        gone = [row for row, _ in rows if isinstance(row, Gone)]
        if gone:
            return absent_names.through(gone, self._here(expr.span))
        found = [(*row, span) for row, span in rows if isinstance(row, tuple)]
        if len(found) < 2:
            return None
        tensors, indices, spans = zip(*found, strict=True)
        return contraction.contract(tensors, indices, spans, expr.span)

    def _given(self, expr: s.FunctionCall) -> Node:
        """``given(x)``: whether a capture, or an argument of this function, is there."""
        refuse_keywords(expr)
        written = expr.args[0] if len(expr.args) == 1 else None
        if not isinstance(written, s.Name):
            raise RankError(
                "given asks for one name", expr.span, builtin_functions.FORMS[absent_names.NAME]
            )
        value = self._name(written, hints.of_optional(written.name))
        name = written.name
        in_frame = bool(self._frames) and name in self._frames[-1]
        if not in_frame and name not in self.scope.optional:
            raise NameResolutionError(
                f"'{name}' is nothing that a call may leave out",
                written.span,
                f"declare it with '= none', or drop given({name})",
            )
        if isinstance(value, RemainingOperands):
            absent_names.needed(value, f"given({name})", written.span)
        return ir.const(not isinstance(value, Gone), expr.span)

    def _builtin(self, expr: s.FunctionCall, args: list[Value | None]) -> Part | None:
        refuse_keywords(expr)
        parts = [self._argument(a, written) for a, written in zip(args, expr.args, strict=True)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        spans = [a.span for a in expr.args]
        here = self._here(expr.span)

        def make(nodes: list[Node]) -> Node:
            return builtin_functions.apply(expr.name, nodes, spans, expr.span)

        if expr.name in ("min", "max", "clamp"):
            return absent_names.choice(make, found, here)
        return absent_names.apply(make, found, here, expr.name != "bool")

    def _where(self, expr: s.FunctionCall) -> Part | None:
        """``where(condition, yes, no)``, where something is absent."""
        condition = self.part(expr.args[0])
        known = self._known(condition)
        if known is not None:
            return self.part(expr.args[1 if known else 2])
        yes, no = self.part(expr.args[1]), self.part(expr.args[2])
        if condition is None or yes is None or no is None:
            return None
        if isinstance(condition, Node) and isinstance(yes, Node) and isinstance(no, Node):
            spans = [a.span for a in expr.args]
            return builtin_functions.apply("where", [condition, yes, no], spans, expr.span)
        return absent_names.where(condition, yes, no, self._here(expr.span))

    def _call(self, expr: s.FunctionCall) -> Part | None:
        name = expr.name
        own = self.scope.definitions.get(name)
        if own is None and name == absent_names.NAME:
            return self._given(expr)
        if own is None and name == contraction.NAME:
            refuse_keywords(expr)
            return self._dot(expr)
        if own is None and name == "where" and self.scope.lacking and len(expr.args) == 3:
            refuse_keywords(expr)
            return self._where(expr)
        args = [self.value(arg) for arg in (*expr.args, *(k.value for k in expr.keywords))]
        if own is None and name in builtin_functions.NAMES:
            return self._builtin(expr, args)
        definition = own or prelude_function(name)
        if definition is None:
            raise self._unknown_function(expr)
        names = parameters_of(expr, [p.name for p in definition.parameters])
        if name in self._calls:
            raise NameResolutionError(
                f"'{name}' calls itself", expr.span, "functions are inlined: write out the steps"
            )
        outer = self._blame
        if own is None and outer is None:
            self._blame = expr.span
        self._calls.append(name)
        self._frames.append(dict(zip(names, args, strict=True)))
        try:
            return self.part(definition.body)
        finally:
            self._frames.pop()
            self._calls.pop()
            self._blame = outer

    def _argument(self, value: Value | None, written: s.Expr) -> Part | None:
        if isinstance(value, TensorDecl):
            raise RankError(
                f"'{value.name}' is a tensor; a program speaks of one pair and takes its elements",
                written.span,
                f"index it, or reduce it before the call: {value.name}[...]",
            )
        return value

    def _unknown_function(self, expr: s.FunctionCall) -> AttnDSLError:
        name = expr.name
        if name in builtin_functions.REDUCTIONS:
            return NameResolutionError(
                f"'{name}' would reduce over a tensor, but a program speaks of one pair",
                expr.span,
                "reduce the tensor before the call and pass the result as a tensor",
            )
        if name in ("softmax", "dropout"):
            return NameResolutionError(
                f"'{name}' is not a function of one score: it may only be the whole of 'weights'"
                f"{', or within dropout' * (name == 'softmax')}",
                expr.span,
                "write 'weights = softmax(score)' or 'weights = dropout(softmax(score), p)'; to "
                "scale weights, scale v; weights have no threshold: compare the score",
            )
        if name in self.scope.values or name in ALWAYS:
            return NameResolutionError(f"'{name}' is no function", expr.span, "remove the call")
        if name in self.scope.lines and name != self.scope.defining:
            later = hints.of_later(name, self.scope.lines[name], self._place(expr.span))
            return NameResolutionError(
                f"'{name}' is no function", expr.span, f"remove the call; {later}"
            )
        close = difflib.get_close_matches(name[:100].lower(), self._function_names(), n=1)
        others = [x for x in self._value_names() if x != name]
        values = difflib.get_close_matches(name[:100], others, n=1)
        hint = hints.of_function(name) or (
            f"did you mean '{close[0]}'?" if close
            else f"did you mean '{values[0]}', which is no function?" if values
            else f"define it: 'def {name[:40]}(...) = ...'"
        )  # fmt: skip
        return NameResolutionError(f"there is no function '{name}'", expr.span, hint)


def _dim_names(tensor: TensorDecl) -> list[str]:
    """The sizes that the dims of a tensor are; empty texts for other expressions."""
    return [str(dim.value) if dim.op is ir.Op.SIZE else "" for dim in tensor.dims]


def _mentions_score(value: Node) -> bool:
    """Return True if ``value`` reads the score itself; contractions have none of their own."""
    return any(item.op is ir.Op.SCORE for item in ir.toposort(value))
