"""A program's own device functions, as the Hopper kernels call them.

Those of pairs are the portable kernels' but for lookups by one position alone: these are made once
for each row of a tile before the loop, and once for its columns at each step, by neighbouring
threads, while the products run. And but for lookups of pairs whose values come by tiles
(:mod:`.features.bias`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.ir import SCORE, DType, Op, const, dependencies, node, substitute, toposort
from attndsl.passes.differentiate import vjp
from attndsl.passes.factor import split_factor
from attndsl.passes.gather import lookups
from attndsl.passes.int_ranges import fits, ranges
from attndsl.passes.simplify import simplify_node

from ..emit.device_functions import PAIR, program_function
from ..emit.expression import print_expressions
from ..emit.template import pair_body
from ..kernels.kernel import Task
from .capture_sums import slope_for_factor
from .features.bias import pair_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..emit.leaf_names import LeafNames
    from .capture_sums import Learned


def print_functions(
    lowered: Lowered, facts: KernelFacts, task: Task, learned: Learned
) -> tuple[list[str], set[str]]:
    """Device functions of the kernel of a task, and the names of the library's they call."""
    program, placed = lowered.program, lowered.placed
    forward = task is not Task.BACKWARD
    derived = task is not Task.FORWARD
    slope = slope_for_factor(placed) if learned.factor else placed.slope
    weights, common = weights_and_factor(lowered, facts, task)
    by_score = None
    if weights is not None and not forward:
        by_score = vjp(weights, const(1.0)).get(SCORE, const(0.0))
        if common is not None:
            by_score = node(Op.MUL, by_score, common)
        by_score = simplify_node(by_score)
    pairs = (program.mask, placed.pair, slope if derived else None, weights, by_score)
    # Parts of rows are added after the forward's loop, those of columns before the backward's.
    of_q = lookups((*pairs, None if forward else placed.row), "q")
    of_kv = lookups((*pairs, placed.column if forward else None), "kv")
    of_tiles = pair_params(lowered, facts)
    replaced = {**of_q, **of_kv, **of_tiles}
    names = _with_locals(facts.names(), replaced)
    names = replace(names, int_bits={**names.int_bits, **_bits(of_q, names), **_bits(of_kv, names)})
    of_pair = names
    if task is not Task.FORWARD_TANGENT and names.from_zero:
        of_pair = replace(names, first_key="parts.first_key")

    def without(root: Node | None) -> Node | None:
        return None if root is None else substitute(root, replaced)

    mask, pair, slope, weights, by_score = map(without, pairs)
    row = placed.row if forward else without(placed.row)
    column = without(placed.column) if forward else placed.column
    of_pairs = [
        ("mask_of_pair", mask, "The pairs that take part."),
        ("score_of_pair", pair, "The score from scale * (q . k), without other parts."),
        ("weight_of_pair", weights, "The weight that the program gives to its score."),
    ]
    if derived:
        doc = "Derivative of the program's score by scale * (q . k)."
        of_pairs.append(("derivative_of_pair", slope, doc))
    if not forward:
        of_pairs.append(("slope_of_weight", by_score, "The weight's derivative by the score."))
    of_parts = (
        ("factor_of_score", placed.inner, "", "A factor of scale * (q . k)."),
        ("row_of_score", row, "q, origin, q_parts", "The part of the score of the row alone."),
        ("column_of_score", column, "kv, away, kv_parts", "Its part of the column alone."),
        ("steepness_of_column", placed.steepness, "", "The column's part by its distance."),
        ("factor_of_weights", common, "", "A factor of all weights of a head."),
        ("sink_of_head", program.sink, "", "The logit that is in the denominator of each row."),
        ("drop_probability", program.dropout, "", "With what probability each pair is dropped."),
    )
    printed = [
        *(_pair_function(name, root, facts, of_pair, doc) for name, root, doc in of_pairs),
        *(_part_function(*part, facts, names) for part in of_parts),
        _parts_function("q", of_q, facts),
        _parts_function("kv", of_kv, facts),
    ]
    return [text for text, _ in printed], set[str]().union(*(used for _, used in printed))


def _with_locals(names: LeafNames, replaced: dict[Node, Node]) -> LeafNames:
    """``names`` with those of locals for what they are where lookups are ``replaced`` too."""
    found = {substitute(item, replaced): name for item, name in names.locals.items()}
    return replace(names, locals={**names.locals, **found})


def weights_and_factor(
    lowered: Lowered, facts: KernelFacts, task: Task
) -> tuple[Node | None, Node | None]:
    """Weights of the program's own, and what is multiplied with their sums instead; None for none.

    A backward's sums are of all heads that share keys. Gradients of what weights are made of are
    the portable kernels' to make. fp16 may have no room for weights without the factor.
    """
    weights = lowered.program.weights
    if weights is None or facts.dtype != "bf16":
        return weights, None
    rest, common = split_factor(weights)
    if task is not Task.FORWARD and common is not None and dependencies(common)[common]:
        return weights, None
    return rest, common


def _pair_function(
    name: str, root: Node | None, facts: KernelFacts, names: LeafNames, doc: str
) -> tuple[str, set[str]]:
    body, used = ["return live"], set[str]()
    if root is not None:
        body, used = pair_body(root, names)
        lines, more = _spread_parts(root, "parts.{}")
        body, used = lines + body, used | more
    first = f"score, live, parts, {PAIR}"
    return program_function(name, first, facts, doc, body, root is not None), used


def _part_function(
    name: str, root: Node | None, positions: str, doc: str, facts: KernelFacts, names: LeafNames
) -> tuple[str, set[str]]:
    """A part of the score as a function of a vector of positions."""
    body, used = ["return 0.0"], set[str]()
    if root is not None:
        printed = print_expressions((root,), names)
        result = printed.results[0]
        if result != printed.values[0]:
            # A number has no dims, since vectors of the callers have layouts of their own.
            result = f"tl.full([], {result}, tl.float32)"
        lines, used = _spread_parts(root, "{}_parts")
        body, used = [*lines, *printed.lines, f"return {result}"], used | printed.helpers
    return program_function(name, positions, facts, doc, body, root is not None), used


def _parts_function(
    variable: str, parts: Mapping[Node, Node], facts: KernelFacts
) -> tuple[str, set[str]]:
    """All that is looked up by one position, as a function of a vector of positions."""
    body, used = ["return (0,)"], set[str]()
    if parts:
        names = facts.names()
        printed, bits = print_expressions(tuple(parts), names), _bits(parts, names)
        results = []
        for part, text in zip(parts.values(), printed.values, strict=True):
            kind = {DType.FLOAT: "float32", DType.BOOL: "int8"}.get(part.dtype)
            results.append(f"({text}).to(tl.{kind or f'int{bits[str(part.value)]}'}),")
        body = [*printed.lines, f"return ({' '.join(results)})"]
        used = set(printed.helpers)
    return program_function(
        f"{variable}_parts_of_pairs",
        variable,
        facts,
        f"Values that masks and scores look up by ``{variable}`` alone.",
        body,
        bool(parts),
    ), used


def _spread_parts(root: Node, given: str) -> tuple[list[str], set[str]]:
    """Lines that give the parts that ``root`` mentions the shape of its positions.

    ``given`` is the expression that has them, with a place for ``q``, ``kv`` or ``pairs``.
    """
    lines, used = [], set[str]()
    for item in toposort(root):
        name = str(item.value)[1:]
        variable, marker, place = name.partition("_part")
        if item.op is not Op.PARAM or not marker or not str(item.value).startswith("$"):
            continue
        known = "" if item.dtype is not DType.BOOL else " != 0"
        if variable == "pair":
            found = f"{given.format('pairs')}[{place}]"
            lines.append(f"{name} = {found}" + (known or ".to(tl.float32)"))
            continue
        used.add("spread")
        lines.append(f"{name} = spread({given.format(variable)}[{place}], {variable}){known}")
    return sorted(lines), used


def _bits(parts: Mapping[Node, Node], names: LeafNames) -> dict[str, int]:
    """Bits of the parts that are integers, by the names of their params."""
    found = ranges(tuple(parts), names.int_bits, names.from_zero)
    return {
        str(own.value): 32 if fits(found[part]) else 64
        for part, own in parts.items()
        if part.dtype is DType.INT
    }
