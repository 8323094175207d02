"""Expressions as Python functions of 0-d torch tensors, one statement a node.

For torch's own ``flex_attention``, whose compiler reads Python; sizes and numbers are written in.
"""

from __future__ import annotations

import keyword
import linecache
import math
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional

from attndsl.foundation.caches import memoised
from attndsl.ir import FLOAT_UNARY, DType, Node, Op, toposort
from attndsl.passes.evaluate import Environment, evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.backends.base import Scalar

_INFIX = {
    Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/", Op.POW: "**", Op.LT: "<", Op.LE: "<=",
    Op.EQ: "==", Op.NE: "!=", Op.AND: "&", Op.OR: "|", Op.BITAND: "&", Op.BITOR: "|",
    Op.BITXOR: "^", Op.SHL: "<<", Op.SHR: ">>",
}  # fmt: skip
_FUNCTIONAL = frozenset({Op.SILU, Op.RELU, Op.GELU, Op.SOFTPLUS})


def torch_function(
    name: str,
    arguments: Sequence[str],
    root: Node,
    leaves: Mapping[str, str],
    numbers: Mapping[str, Scalar],
    tensors: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """A Python function that computes ``root``.

    Args:
        name: The function's name.
        arguments: Its arguments' names.
        root: The expression.
        leaves: Python expressions of the variables, over arguments and tensors.
        numbers: Values of sizes and params.
        tensors: Captured tensors, and params that are tensors, by name.
    """
    taken = {name, "torch", *arguments}
    own = {key: _free(key, taken) for key in tensors}
    writer = _TorchWriter(leaves, numbers, tensors, own)
    result = writer.write(root)
    captured = ["torch", *own.values()]
    lines = [
        f"def make({', '.join(captured)}):",
        f"    def {name}({', '.join(arguments)}):",
        *(f"        {line}" for line in writer.lines),
        f"        return {result}",
        f"    return {name}",
    ]
    found: Callable[..., Any] = _compiled("\n".join(lines) + "\n")(torch, *tensors.values())
    return found


@memoised("functions from generated Python", 256)
def _compiled(text: str) -> Any:
    # torch's compiler wants to read the lines that it follows.
    file = f"<attndsl to_flex {hash(text) & 0xFFFFFFFFFFFFFFFF:x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    return names["make"]


class _TorchWriter:
    def __init__(
        self,
        leaves: Mapping[str, str],
        numbers: Mapping[str, Scalar],
        tensors: Mapping[str, torch.Tensor],
        own: Mapping[str, str],
    ) -> None:
        self.leaves = leaves
        self.known = Environment(numbers)
        self.numbers = numbers
        self.tensors = tensors
        self.own = own
        self.lines: list[str] = []

    def write(self, root: Node) -> str:
        """Add the lines for ``root``; return its expression, valid once :attr:`lines` have run."""
        fixed: set[Node] = set()
        names: dict[Node, str] = {}
        for item in toposort(root):
            if self._is_fixed(item, fixed):
                fixed.add(item)
                names[item] = _literal(evaluate(item, self.known))
            elif not item.args and item.op is not Op.LOAD:
                names[item] = self._leaf(item)
            else:
                text = self._text(item, [names[arg] for arg in item.args], fixed)
                names[item] = f"t{len(self.lines)}_"
                self.lines.append(f"{names[item]} = {text}")
        if root in fixed:
            # torch wants a tensor for a pair.
            return f"torch.full_like(b, {names[root]}, dtype={_dtype(root)})"
        return names[root]

    def _is_fixed(self, item: Node, fixed: set[Node]) -> bool:
        if item.op in (Op.SIZE, Op.PARAM):
            return str(item.value) in self.numbers
        if item.op in (Op.VAR, Op.SCORE, Op.LOAD):
            return False
        return all(arg in fixed for arg in item.args)

    def _leaf(self, item: Node) -> str:
        if item.op is Op.SCORE:
            return "score"
        return (self.own if item.op is Op.PARAM else self.leaves)[str(item.value)]

    def _text(self, item: Node, args: list[str], fixed: set[Node]) -> str:
        op = item.op
        if op is Op.LOAD:
            tensor = self.tensors[str(item.value)]
            places = [
                str(min(max(int(text), 0), size - 1))
                if arg in fixed
                else f"torch.clamp({text}, 0, {size - 1})"
                for text, arg, size in zip(args, item.args, tensor.shape, strict=True)
            ]
            return f"{self.own[str(item.value)]}[{', '.join(places)}]"
        if op is Op.CAST:
            return (
                f"{args[0]} != 0" if item.dtype is DType.BOOL else f"{args[0]}.to({_dtype(item)})"
            )
        if op in (Op.FLOORDIV, Op.MOD):
            return self._quotient(item, args, fixed)
        if op in (Op.MIN, Op.MAX):
            for text, other, arg in zip(args, args[::-1], item.args, strict=True):
                if arg in fixed:
                    bound = "max" if op is Op.MIN else "min"
                    return f"torch.clamp({other}, {bound}={text})"
            return f"torch.{op.value}imum({args[0]}, {args[1]})"
        if op in (Op.SHL, Op.SHR) and item.args[1] not in fixed:
            args = [args[0], f"torch.clamp({args[1]}, 0, 63)"]
        if op is Op.WHERE:
            return f"torch.where({', '.join(args)})"
        if op is Op.NOT or op is Op.BITNOT:
            return f"~{args[0]}"
        if op is Op.NEG:
            return f"-({args[0]})"
        if op in (Op.ABS, Op.SIGN):
            return f"torch.{op.value}({args[0]})"
        if op in FLOAT_UNARY:
            home = "torch.nn.functional" if op in _FUNCTIONAL else "torch"
            return f"{home}.{op.value}({args[0]})"
        return f"({args[0]}) {_INFIX[op]} ({args[1]})"

    def _quotient(self, item: Node, args: list[str], fixed: set[Node]) -> str:
        symbol = "//" if item.op is Op.FLOORDIV else "%"
        divisor = item.args[1]
        if item.dtype is DType.FLOAT or (divisor in fixed and evaluate(divisor, self.known)):
            return f"({args[0]}) {symbol} ({args[1]})"
        if divisor in fixed:
            return f"({args[0]}) * 0"
        safe = f"torch.where({args[1]} == 0, 1, {args[1]})"
        return f"torch.where({args[1]} == 0, 0, ({args[0]}) {symbol} {safe})"


def _free(name: str, taken: set[str]) -> str:
    """A Python name like ``name`` that is none of ``taken``, nor that of a local."""
    while name in taken or keyword.iskeyword(name) or re.fullmatch(r"t\d+_", name):
        name += "_capture"
    taken.add(name)
    return name


def _dtype(item: Node) -> str:
    kinds = {DType.BOOL: "bool", DType.INT: "int64", DType.FLOAT: "float32"}
    return f"torch.{kinds[item.dtype]}"


def _literal(value: Scalar) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)
