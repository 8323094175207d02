"""Programs as JSON values: for the disk cache, and for digests that name a program's meaning.

Nodes are listed in topological order and refer to operands by index; floats are written by
``float.hex``, so that every value comes back exactly.

A lowered program says of its nodes where they stand in its text, which errors at calls point at.

Non-goals: names of locals, which mean nothing once a program is checked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attndsl.ir import DType, Node, Op, ParamDecl, Program, TensorDecl, node, toposort
from attndsl.passes.differentiate import Derivative, ParamGradient, ProductGradient, TensorGradient
from attndsl.passes.lowered import Lowered, contractions_of
from attndsl.passes.split_score import place
from attndsl.passes.tiles.sparsity import analyse
from attndsl.source import Source, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = 3
_FIELDS = {"program", "derivative", "wide", "by_token"}
"""Fields of a lowered program."""
_PARTS = ("score", "mask", "sink", "weights", "dropout")


class SerialiseError(ValueError):
    """A value that is not a serialised program of this format."""


def program_to_json(program: Program, text: str | None = None) -> dict[str, Any]:
    """``program`` as JSON values, with the places of its nodes in ``text`` if that is given."""
    dims = [dim for tensor in program.tensors for dim in tensor.dims]
    table, numbers = _table([*program.roots(), *dims])
    places: dict[str, Any] = {} if text is None else {"places": _places(numbers, text)}
    optional = [x.name for x in program.captures() if x.optional]
    if text is not None and optional:  # A digest is that of the program in which all are there.
        places["optional"] = optional
    return {
        **places,
        "format": FORMAT,
        "nodes": table,
        "parts": {
            name: None if (part := getattr(program, name)) is None else numbers[part]
            for name in _PARTS
        },
        "params": [[p.name, p.dtype.value, _literal(p.default)] for p in program.params],
        "tensors": [[t.name, t.dtype.value, [numbers[d] for d in t.dims]] for t in program.tensors],
        "exact": program.exact,
    }


def program_from_json(data: dict[str, Any], text: str | None = None) -> Program:
    """The program that :func:`program_to_json` wrote, of the same ``text``.

    Raises:
        SerialiseError: ``data`` is damaged or of another format.
    """
    try:
        if data["format"] != FORMAT:
            raise SerialiseError(f"format {data['format']!r}, not {FORMAT}")
        nodes = _nodes(data["nodes"], _spans(data.get("places", {}), text))
        parts = {name: None if (i := data["parts"][name]) is None else nodes[i] for name in _PARTS}
        optional = frozenset(data.get("optional", ()))
        params = tuple(
            ParamDecl(n, DType(t), _unliteral(d), optional=n in optional)
            for n, t, d in data["params"]
        )
        tensors = tuple(
            TensorDecl(n, DType(t), tuple(nodes[i] for i in dims), optional=n in optional)
            for n, t, dims in data["tensors"]
        )
        return Program(
            _present(parts["score"]),
            parts["mask"],
            parts["sink"],
            parts["weights"],
            parts["dropout"],
            params,
            tensors,
            bool(data["exact"]),
        )
    except SerialiseError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SerialiseError(f"not a serialised program: {error!r}") from error


def derivative_to_json(derivative: Derivative) -> dict[str, Any]:
    """``derivative`` as JSON values."""
    loads = [g.load for g in derivative.tensors]
    factors = [g.factor for g in derivative.tensors] + [g.factor for g in derivative.params]
    products = [root for g in derivative.products for root in (g.product, g.factor)]
    table, numbers = _table([derivative.score, *loads, *factors, *products])
    return {
        "nodes": table,
        "score": numbers[derivative.score],
        "tensors": [[numbers[g.load], numbers[g.factor]] for g in derivative.tensors],
        "params": [[g.name, numbers[g.factor]] for g in derivative.params],
        "products": [[numbers[g.product], numbers[g.factor]] for g in derivative.products],
    }


def derivative_from_json(data: dict[str, Any]) -> Derivative:
    """The derivative that :func:`derivative_to_json` wrote.

    Raises:
        SerialiseError: ``data`` is damaged.
    """
    try:
        nodes = _nodes(data["nodes"])
        return Derivative(
            nodes[data["score"]],
            tuple(TensorGradient(nodes[i], nodes[j]) for i, j in data["tensors"]),
            tuple(ParamGradient(name, nodes[i]) for name, i in data["params"]),
            tuple(ProductGradient(nodes[i], nodes[j]) for i, j in data["products"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SerialiseError(f"not a serialised derivative: {error!r}") from error


def lowered_to_json(lowered: Lowered, text: str | None = None) -> dict[str, Any]:
    """``lowered`` as JSON values, without its sparsity, which is derived again from the program.

    Args:
        lowered: The program.
        text: Where its nodes' places are of use: its text.
    """
    found = lowered.contractions
    return {
        "program": program_to_json(lowered.program, text),
        "derivative": derivative_to_json(lowered.derivative),
        "wide": None if found is None or found.wide is None else lowered_to_json(found.wide),
        "by_token": (None if lowered.by_token is None else program_to_json(lowered.by_token, text)),
    }


def lowered_from_json(data: Any, text: str | None = None) -> Lowered:
    """Load the program that :func:`lowered_to_json` wrote, of the same ``text``.

    Raises:
        SerialiseError: ``data`` is damaged or of another format.
    """
    if not isinstance(data, dict) or not set(data) >= _FIELDS:
        raise SerialiseError("not a serialised lowered program")
    program = program_from_json(data["program"], text)
    by_token = None
    if data["by_token"] is not None:
        by_token = program_from_json(data["by_token"], text)
        program = replace(program, by_token=True)
    derivative = derivative_from_json(data["derivative"])
    placed = place(program, derivative)
    contractions = contractions_of(program, lambda _: lowered_from_json(data["wide"]))
    return Lowered(
        program, derivative, placed, analyse(program), digest(program), contractions, by_token
    )


def digest(program: Program) -> str:
    """64 hex digits that name the program's meaning.

    Renaming a local or reformatting the text keeps it; any change of what is computed, or of the
    name or declaration of a param or tensor, changes it.
    """
    values = program_to_json(program)
    positions = [decl.name for decl in program.params if decl.is_position]
    positions += [decl.name for decl in program.tensors if decl.is_position]
    if positions:
        values["positions"] = positions
    if padded := [decl.name for decl in program.tensors if decl.is_padded]:
        values["padded"] = padded
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _table(roots: Sequence[Node]) -> tuple[list[list[Any]], dict[Node, int]]:
    order = toposort(*roots)
    numbers = {item: number for number, item in enumerate(order)}
    rows = [
        [item.op.name, item.dtype.value, [numbers[arg] for arg in item.args], _literal(item.value)]
        for item in order
    ]
    return rows, numbers


def _nodes(rows: list[list[Any]], spans: Mapping[int, Span] | None = None) -> list[Node]:
    nodes: list[Node] = []
    for number, (name, dtype, args, value) in enumerate(rows):
        operands = tuple(nodes[i] for i in args)
        span = None if spans is None else spans.get(number)
        nodes.append(
            node(Op[name], *operands, value=_unliteral(value), dtype=DType(dtype), span=span)
        )
    return nodes


def _places(numbers: Mapping[Node, int], text: str) -> dict[str, list[int]]:
    """Offsets in ``text`` of the nodes that were written there, by their numbers.

    A node has the span of the text that first had it in this process. Products of rows, which calls
    may refuse, are looked for in ``text`` then.
    """
    source, found = Source(text), {}
    for item, number in numbers.items():
        span = item.span
        if span is not None and span.source.text != text:
            span = span.within(source) if item.op is Op.DOT else None
        if span is not None:
            found[str(number)] = [span.start, span.end]
    return found


def _spans(places: Mapping[str, list[int]], text: str | None) -> dict[int, Span]:
    if text is None:
        return {}
    source = Source(text)
    return {int(number): Span(source, start, end) for number, (start, end) in places.items()}


def _literal(value: bool | int | float | str | None) -> Any:
    return {"float": value.hex()} if isinstance(value, float) else value


def _unliteral(value: Any) -> Any:
    return float.fromhex(value["float"]) if isinstance(value, dict) else value


def _present(part: Node | None) -> Node:
    if part is None:
        raise SerialiseError("a program needs a score")
    return part
