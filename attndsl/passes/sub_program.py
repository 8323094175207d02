"""A program for a part of a call, with the meaning that another program has in the whole.

A part has some of the rows, keys, heads or batch entries of a larger call. Its kernels count those
of its own tensors. So the numbers and the sizes that the program speaks of become sums and sizes of
other names: ``h`` becomes ``h + h_offset``, and ``heads`` becomes ``whole_heads``, whose values a
call has among its sizes. Kernels know of no parts, and those of whole calls stay as they are.

Offsets and lengths of each batch entry become captured tensors: ``q + q_offsets[b]``. So does the
first token of each request of a packed call: ``token`` becomes ``q + token_starts[b]``.

Non-goals: dropout, which counts pairs in no expression (:class:`attndsl.backends.base.Draws`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attndsl.ir import (
    TOKEN,
    TOKENS,
    DType,
    Entries,
    Node,
    Op,
    ParamDecl,
    TensorDecl,
    load,
    node,
    param,
    rebuild,
    sides,
    size,
    toposort,
    var,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.ir import Program

VARIABLE_OF = {"batch": "b", "heads": "h", "kv_heads": "hkv", "q_len": "q", "kv_len": "kv"}
"""The sizes that a part has some of, and the variables that count them."""
SIZE_OF = {variable: name for name, variable in VARIABLE_OF.items()}


class Start(enum.Enum):
    """Ways in which a position follows from a row of the part."""

    CALL = "call"
    """The call's own offset or index, as in any call."""
    NUMBER = "number"
    """The row and a size, ``q_start``, which is not negative."""
    SCALAR = "scalar"
    """The row and a param, ``q_start``."""
    ENTRIES = "entries"
    """The row and an element for each batch entry, ``q_starts[b]``."""
    ROWS = "rows"
    """An element for each row, ``q_positions[q]``."""
    TOKENS = "tokens"
    """An element for each token of a packed call, ``q_positions[q + token_starts[b]]``."""


class Tokens(enum.Enum):
    """Meanings of ``token`` in a part."""

    ROWS = "rows"
    """``b * q_len`` and the row of q, whose position is another."""
    POSITIONS = "positions"
    """``b * q_len`` and the position: rows are those of the whole."""
    PACKED = "packed"
    """The row and the request's first token, ``token_starts[b]``."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences of a part from a whole call."""

    sizes: frozenset[str] = frozenset()
    """Names of :data:`VARIABLE_OF` of which the whole has more."""
    replicated: bool = False
    """True if a key head of the part has fewer query heads than one of the whole."""
    q: Start = Start.CALL
    kv: Start = Start.CALL
    lengths: bool = False
    """True if each batch entry has its own number of keys, ``kv_lengths[b]``."""
    requests: bool = False
    """True if a batch entry is any request of a packed call, ``requests[b]``, and has rows behind
    its last query, which the mask leaves out."""
    tokens: Tokens = Tokens.ROWS
    shares: frozenset[tuple[str, int]] = frozenset()
    """Dims of tensors that have the part's rows alone: plain variables look them up."""


@dataclass(frozen=True, slots=True)
class Localised:
    """A program for a part, and the names that it uses for the part."""

    program: Program
    names: Mapping[str, str]
    """Names by their meaning: ``heads``, ``h_offset``, ``q_start``, ``q_starts``, ``kv_lengths``
    ..."""


def localised_program(program: Program, changes: Changes) -> Localised:
    """``program`` for the parts that ``changes`` describe."""
    names = FreshNames(program)
    known = _numbers(changes, names)
    known |= {size(name): size(names[name]) for name in changes.sizes}
    tensors = [_with_dims(decl, known, changes.shares) for decl in program.tensors]
    params = list(program.params)
    dead = None
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        if start is Start.SCALAR:
            params.append(ParamDecl(names[f"{name}_start"], DType.INT, is_position=True))
        elif start is Start.ENTRIES:
            tensors.append(_positions(names[f"{name}_starts"], "batch"))
        elif start is Start.ROWS:
            tensors.append(_positions(names[f"{name}_positions"], f"{name}_len"))
        elif start is Start.TOKENS:
            tensors.append(_positions(names[f"{name}_positions"], names[TOKENS]))
    if changes.tokens is Tokens.PACKED:
        tensors.append(_positions(names["token_starts"], "batch"))
    if changes.lengths:
        lengths = load(names["kv_lengths"], DType.INT, var("b"))
        tensors.append(_positions(names["kv_lengths"], "batch"))
        known[size("kv_len")] = lengths
        if changes.tokens is Tokens.PACKED:
            # The whole is the request's sequence so far, as many queries as keys.
            known[size("q_len")] = lengths
        dead = node(Op.LT, var("kv"), lengths)
        if changes.requests:
            if changes.q is not Start.ENTRIES:
                tensors.append(_positions(names["q_starts"], "batch"))
            # Queries are the last positions, so that rows behind them are behind the keys.
            row = node(Op.ADD, var("q"), load(names["q_starts"], DType.INT, var("b")))
            dead = node(Op.AND, dead, node(Op.LT, row, lengths))
    if changes.requests:
        tensors.append(_positions(names["requests"], "batch"))
    mask = None if program.mask is None else _moved(program.mask, known, changes.shares)
    if dead is not None:
        mask = dead if mask is None else node(Op.AND, dead, mask)
    moved = (
        None if part is None else _moved(part, known, changes.shares)
        for part in (program.sink, program.weights, program.dropout)
    )
    sink, weights, dropout = moved
    found = replace(
        program,
        score=_moved(program.score, known, changes.shares),
        mask=mask,
        sink=sink,
        weights=weights,
        dropout=dropout,
        params=tuple(params),
        tensors=tuple(tensors),
        entries=Entries(
            names["q_starts"] if changes.q is Start.ENTRIES else None,
            names["kv_lengths"] if changes.lengths else None,
        ),
    )
    return Localised(found, dict(names))


def _positions(name: str, dim: str) -> TensorDecl:
    """A tensor of a position or a length for each element along ``dim``."""
    return TensorDecl(name, DType.INT, (size(dim),), is_position=True)


_OTHER_NAMES = {TOKENS: "packed_tokens"}
"""Names of sizes that programs use for something else."""


class FreshNames(dict[str, str]):
    """Names that a program does not have, made at their first lookup."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._taken = {decl.name for decl in program.tensors} | set(program.dim_names())
        self._taken |= {decl.name for decl in program.params}

    def __missing__(self, what: str) -> str:
        name = f"whole_{what}" if what in VARIABLE_OF else _OTHER_NAMES.get(what, what)
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self[what] = name
        return name


def _numbers(changes: Changes, names: FreshNames) -> dict[Node, Node]:
    """Replacements of the variables that count other things in the part than in the whole."""
    known: dict[Node, Node] = {}
    if changes.requests:
        known[var("b")] = load(names["requests"], DType.INT, var("b"))
    elif "batch" in changes.sizes:
        known[var("b")] = node(Op.ADD, var("b"), size(names["b_offset"]))
    if "heads" in changes.sizes:
        known[var("h")] = node(Op.ADD, var("h"), size(names["h_offset"]))
    if changes.replicated:
        head = known.get(var("h"), var("h"))
        known[var("hkv")] = node(Op.FLOORDIV, head, size(names["group"]))
    elif "kv_heads" in changes.sizes:
        known[var("hkv")] = node(Op.ADD, var("hkv"), size(names["hkv_offset"]))
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        row = var(name)
        if start is Start.NUMBER:
            known[row] = node(Op.ADD, row, size(names[f"{name}_start"]))
        elif start is Start.SCALAR:
            known[row] = node(Op.ADD, row, param(names[f"{name}_start"], DType.INT))
        elif start is Start.ENTRIES:
            first = load(names[f"{name}_starts"], DType.INT, var("b"))
            known[row] = node(Op.ADD, row, first)
        elif start is Start.ROWS:
            known[row] = load(names[f"{name}_positions"], DType.INT, row)
        elif start is Start.TOKENS:
            known[row] = load(names[f"{name}_positions"], DType.INT, _packed_token(names))
    _add_tokens(known, changes, names)
    return known


def _packed_token(names: FreshNames) -> Node:
    return node(Op.ADD, var("q"), load(names["token_starts"], DType.INT, var("b")))


def _add_tokens(known: dict[Node, Node], changes: Changes, names: FreshNames) -> None:
    """Add ``token`` and ``tokens`` to ``known``, after all other names are known."""
    if changes.tokens is Tokens.PACKED:
        known[var(TOKEN)] = _packed_token(names)
        known[size(TOKENS)] = size(names[TOKENS])
        return
    whole = {name: size(names[name] if name in changes.sizes else name)
             for name in ("batch", "q_len")}  # fmt: skip
    row = var("q")
    if changes.tokens is Tokens.POSITIONS:
        row = known.get(row, row)
    first = node(Op.MUL, known.get(var("b"), var("b")), whole["q_len"])
    known[var(TOKEN)] = node(Op.ADD, first, row)
    known[size(TOKENS)] = node(Op.MUL, whole["batch"], whole["q_len"])


def _with_dims(
    decl: TensorDecl, known: Mapping[Node, Node], shares: frozenset[tuple[str, int]]
) -> TensorDecl:
    """``decl`` with the whole's sizes, but for the part's own shares.

    Where batch entries have lengths of their own, ``kv_len`` stays what it is: the room for keys.
    """
    dims = tuple(
        dim if (decl.name, number) in shares else _moved(dim, known, frozenset())
        for number, dim in enumerate(decl.dims)
    )
    return replace(decl, dims=dims)


def _moved(root: Node, known: Mapping[Node, Node], shares: frozenset[tuple[str, int]]) -> Node:
    """``root`` with what is ``known``, but for the indices of the part's own shares."""
    done = dict(known)
    for item in toposort(root):
        if item in done:
            continue
        kept = {place for place, *looked_up in places_of(item) if tuple(looked_up) in shares}
        args = tuple(arg if place in kept else done[arg] for place, arg in enumerate(item.args))
        done[item] = item if args == item.args else rebuild(item, args)
    return done[root]


def places_of(item: Node) -> Iterator[tuple[int, str, int]]:
    """Operand number, tensor and dim of each index in a lookup or a product of rows."""
    if item.op is Op.LOAD:
        for place in range(len(item.args)):
            yield place, str(item.value), place
    elif item.op is Op.IN:
        for place in range(1, len(item.args)):
            yield place, str(item.value), place - 1
    elif item.op is Op.DOT:
        left, right = sides(item)
        for place in range(len(left.indices)):
            yield place, left.name, place
        for place in range(len(right.indices)):
            yield len(left.indices) + place, right.name, place


def plain_lookups(program: Program) -> Mapping[tuple[str, int], str | None]:
    """The variable that indexes all lookups along a dim, by tensor and dim.

    None where the indices are others, or not all the same.
    """
    found: dict[tuple[str, int], str | None] = {}
    for item in toposort(*program.roots()):
        for place, name, dim in places_of(item):
            index = item.args[place]
            variable = str(index.value) if index.op is Op.VAR else None
            found[name, dim] = variable if found.get((name, dim), variable) == variable else None
    return found


def other_lookup(program: Program, name: str, dim: int, variable: str) -> Node | None:
    """The first lookup whose index along a tensor's ``dim`` is not ``variable`` itself, or None."""
    for item in toposort(*program.roots()):
        for place, tensor, number in places_of(item):
            index = item.args[place]
            is_other = index.op is not Op.VAR or index.value != variable
            if is_other and (tensor, number) == (name, dim):
                return item
    return None
