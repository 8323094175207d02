"""A case's program as text, with no more parentheses than the grammar asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .operations import Form, operation
from .program import (
    Apply,
    Dot,
    Given,
    Invoke,
    Kind,
    Literal,
    Load,
    Local,
    Masked,
    Member,
    Name,
    Target,
)  # fmt: skip

if TYPE_CHECKING:
    from .program import Case, Expr, Function

_ATOM = 13
_UNARY = 11
_POWER = 12
_SHIFT = 8
_COMPARISON = 4
_ARITHMETIC = ("+", "-", "*", "//", "%", "**")
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_BY_OPERANDS = frozenset(
    (*_ARITHMETIC, *_COMPARISONS, "min", "max", "clamp", "abs", "sign", "where", "if")
)
"""What is of ints where all operands are, so that one operand has to say that it is a float."""
_CONSTANTS = {"inf": float("inf"), "pi": 3.141592653589793, "e": 2.718281828459045}


def text(case: Case) -> str:
    """The program, one statement a line."""
    lines = []
    for param in case.params:
        default = f" = {_number(param.value)}" if param.given is Given.DEFAULT else ""
        lines.append(f"param {param.name}: {param.kind.value}{default}")
    for tensor in case.tensors:
        dims = ", ".join(written(dim) for dim in tensor.dims)
        lines.append(f"tensor {tensor.name}[{dims}]: {tensor.kind.value}")
    lines += [_definition(function) for function in case.functions]
    softmax = True
    for line in case.lines:
        name = line.name if line.target is Target.LOCAL else line.target.value
        value = written(line.value)
        if line.target is Target.WEIGHTS:
            softmax = False
            if case.dropout is not None:
                value = f"dropout({value}, {_number(case.dropout)})"
        if line.target is Target.LOCAL:
            value = _typed(line.value)
        lines.append(f"{name} = {value}")
    if softmax and case.dropout is not None:
        lines.append(f"weights = dropout(softmax(score), {_number(case.dropout)})")
    return "\n".join(lines or ["score = score"])


def _definition(function: Function) -> str:
    parameters = ", ".join(parameter.name for parameter in function.parameters)
    return f"def {function.name}({parameters}) = {written(function.body)}"


def _number(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    for name, constant in _CONSTANTS.items():
        if value == constant and isinstance(value, float):
            return name
    return repr(value)


def written(item: Expr) -> str:
    """An expression as text."""
    return _at(item, 0)


def _at(item: Expr, level: int) -> str:
    """``item`` where an expression of at least ``level`` is expected."""
    own, found = _tree(item)
    return found if own >= level else f"({found})"


def _promotes(item: Expr) -> bool:
    return isinstance(item, Apply) and item.operation.form is Form.PROMOTION


def _typed(item: Expr) -> str:
    """``item`` where nothing around it makes an int a float."""
    return f"float({written(item.args[0])})" if _promotes(item) else written(item)


def _named(item: Apply) -> Apply:
    """``item`` with ``float(...)`` written out where it would be an operation of ints."""
    floats = [at for at, arg in enumerate(item.args) if arg.kind is Kind.FLOAT]
    if item.operation.word not in _BY_OPERANDS or not floats:
        return item
    if not all(_promotes(item.args[at]) for at in floats):
        return item
    first = floats[0]
    told = Apply(operation("float", Kind.INT), item.args[first].args)
    return Apply(item.operation, (*item.args[:first], told, *item.args[first + 1 :]))


def _list(items: tuple[Expr, ...]) -> str:
    return ", ".join(written(item) for item in items)


def _tree(item: Expr) -> tuple[int, str]:
    """How tight the text of ``item`` binds, and the text."""
    if isinstance(item, Literal):
        negative = item.kind is not Kind.BOOL and item.value < 0
        return (_UNARY if negative else _ATOM), _number(item.value)
    if isinstance(item, Name | Local):
        return _ATOM, item.name
    if isinstance(item, Load):
        return _ATOM, f"{item.tensor}[{_list(item.args)}]"
    if isinstance(item, Dot):
        left, right = item.args[: item.split], item.args[item.split :]
        rows = [
            f"{name}[{', '.join([*(written(x) for x in indices), ':'])}]"
            for name, indices in ((item.left, left), (item.right, right))
        ]
        return _ATOM, f"dot({', '.join(rows)})"
    if isinstance(item, Member):
        element, *indices = item.args
        row = f"{item.tensor}[{', '.join([*map(written, indices), ':'])}]"
        word = "not in" if item.turned else "in"
        return _COMPARISON, f"{_at(element, _SHIFT)} {word} {row}"
    if isinstance(item, Invoke):
        return _ATOM, f"{item.function.name}({', '.join(_typed(arg) for arg in item.args)})"
    if isinstance(item, Masked):
        condition, score = item.args
        if item.turned:
            return _ATOM, f"where(not {_at(condition, 3)}, -inf, {written(score)})"
        return _ATOM, f"where({written(condition)}, {written(score)}, -inf)"
    return _apply(item)


def _apply(item: Apply) -> tuple[int, str]:
    item = _named(item)
    operation, args = item.operation, item.args
    word, level, form = operation.word, operation.level, operation.form
    if form is Form.PROMOTION:
        return _tree(args[0])
    if form is Form.CALL:
        return _ATOM, f"{word}({_list(args)})"
    if form is Form.TERNARY:
        condition, yes, no = args
        return level, f"{_at(yes, 1)} if {_at(condition, 1)} else {_at(no, 0)}"
    if form is Form.BETWEEN:
        low, value, high = (_at(arg, _SHIFT) for arg in args)
        return level, f"{low} <= {value} < {high}"
    if form is Form.PREFIX:
        space = " " if word == "not" else ""
        return level, f"{word}{space}{_at(args[0], level)}"
    if level == _POWER:
        return level, f"{_at(args[0], _ATOM)} ** {_at(args[1], _UNARY)}"
    if level == _COMPARISON:
        return level, f"{_at(args[0], _SHIFT)} {word} {_at(args[1], _SHIFT)}"
    return level, f"{_at(args[0], level)} {word} {_at(args[1], level + 1)}"
