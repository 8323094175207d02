"""A program's tile-list kernels as the text of a Python module."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from attndsl.ir import DType, const

from .device_functions import param_values, parameters, program_function, record_of_given
from .expression import print_expressions
from .module_lines import scope_function
from .template import fill_template, pair_function

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.tiles.cells import Cell
    from attndsl.passes.tiles.intervals import Bounds
    from attndsl.passes.tiles.sparsity import Sparsity
    from attndsl.pipeline import Lowered

    from .facts import KernelFacts

_BLOCKS = "BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr"
_KERNELS = ("summarise", "classify", "refine", "list_tiles")


def generate_lists(lowered: Lowered, facts: KernelFacts) -> str:
    """The module of the kernels that find the tiles of a masked program."""
    bounds = lowered.sparsity.by_cells
    assert bounds is not None
    texts, helpers = [], set()
    for text, used in (
        pair_function("mask_of_pair", lowered.program.mask, facts, "Whether each pair takes part."),
        _store_values("row", "q", bounds.rows, facts),
        _store_values("column", "kv", bounds.columns, facts),
        *chain.from_iterable(_cell(n, cell, facts) for n, cell in enumerate(bounds.cells)),
        _bounds(bounds, lowered.sparsity, facts),
    ):
        texts.append(text)
        helpers |= used
    given = parameters(facts)
    flags = {"Q_KIND": facts.q_kind, "KV_KIND": facts.kv_kind}
    texts = [record_of_given(given), *texts]
    return fill_template(__package__, ("tile_lists",), _KERNELS, texts, helpers, flags, given)


def has_undecided(sparsity: Sparsity) -> bool:
    """Return True if bounds may leave tiles undecided that evaluation is to decide."""
    bounds = sparsity.by_cells
    return sparsity.evaluate and bounds is not None and bounds.sure is not const(True)


def value_counts(bounds: Bounds) -> dict[str, int]:
    """Number of values in each summary array; the positions themselves are the first ints."""
    return {
        f"{stem}_{kind}": sum(value.dtype is dtype for value in values) + (dtype is DType.INT)
        for stem, values in (("row", bounds.rows), ("column", bounds.columns))
        for kind, dtype in (("ints", DType.INT), ("floats", DType.FLOAT))
    }


def _store_values(
    stem: str, position: str, values: tuple[Node, ...], facts: KernelFacts
) -> tuple[str, set[str]]:
    printed = print_expressions(values, facts.names())
    counts = {kind: sum(v.dtype is kind for v in values) for kind in (DType.INT, DType.FLOAT)}
    counts[DType.INT] += 1
    body = [
        *printed.lines,
        f"ints += place.number * {2 * counts[DType.INT]} * place.tiles + place.tile",
        f"floats += place.number * {2 * counts[DType.FLOAT]} * place.tiles + place.tile",
        f"store_extremes({position}, inside, ints, ints + place.tiles)",
    ]
    places = {DType.INT: 1, DType.FLOAT: 0}
    for value, text in zip(values, printed.values, strict=True):
        array = "ints" if value.dtype is DType.INT else "floats"
        low, high = (f"{array} + {2 * places[value.dtype] + end} * place.tiles" for end in (0, 1))
        places[value.dtype] += 1
        body.append(f"store_extremes({text}, inside, {low}, {high})")
    text = program_function(
        f"store_{stem}_values",
        f"ints, floats, place, inside, {position}",
        facts,
        f"Store the bounds of what the mask needs to know of a {stem} tile.",
        body,
        bool(values),
    )
    return text, set(printed.helpers)


def _cell(number: int, cell: Cell, facts: KernelFacts) -> list[tuple[str, set[str]]]:
    """Functions of condition ``number`` of a pair, and of its extremes in a tile.

    See M71 in docs/dev/measured.md.
    """
    name = f"cell{number}"
    condition = pair_function(f"{name}_of_pair", cell.condition, facts, "One condition of pairs.")
    loops, points = [], []
    for position, tile, block, size, kind in (
        ("q", "row.tile + zeros", "BLOCK_M", cell.q_size, facts.q_kind),
        ("kv", "column.tile", "BLOCK_N", cell.kv_size, facts.kv_kind),
    ):
        # Rows so far apart, and the last one, are in all cells of a tile that begins anywhere.
        step = 1 if kind == "index" else size
        loops.append(f"for {position}_point in range(0, ({block} - 1) // {step} + 2):")
        points.append(
            f"{position} = position_in_tile({position}_point * {step}, {tile}, {block}, "
            f"sizes.{position}_len, origins.{position}, {position.upper()}_KIND)"
        )
    body = [
        "zeros = tl.zeros([1, 1], tl.int32)",
        "score = tl.zeros(inside.shape, tl.float32)",
        "every, some = inside, inside & (column.tile < 0)",
        loops[0],
        f"    {points[0]}",
        f"    {loops[1]}",
        f"        {points[1]}",
        f"        holds = {name}_of_pair(score, inside, q, kv, scope) & inside",
        "        every, some = every & holds, some | holds",
        "return every, some",
    ]
    doc = f"Whether all pairs of the tiles have condition {number}, and whether some have."
    text = scope_function(f"{name}_of_tile", "row, column, inside, origins", doc, body, _BLOCKS)
    return [condition, (text, set())]


def _bounds(bounds: Bounds, sparsity: Sparsity, facts: KernelFacts) -> tuple[str, set[str]]:
    loads = []
    for stem, position, values, place, of in (
        ("row", "q", bounds.rows, "row.tile + zeros", "row"),
        ("column", "kv", bounds.columns, "column.tile", "column"),
    ):
        named = [(f"{position}_", DType.INT)]
        named += [(f"{stem}{number}_", value.dtype) for number, value in enumerate(values)]
        guard = "" if stem == "row" else ", mask=inside, other=0"
        counts = {kind: sum(k is kind for _, k in named) for kind in (DType.INT, DType.FLOAT)}
        slots = {DType.INT: 0, DType.FLOAT: 0}
        for name, kind in named:
            array = f"values.{stem}_{'ints' if kind is DType.INT else 'floats'}"
            base = f"{array} + {of}.number * {2 * counts[kind]} * {of}.tiles"
            for end in ("low", "high"):
                slot = slots[kind]
                slots[kind] += 1
                narrow = ".to(tl.int32)" if name in ("q_", "kv_") else ""
                loads.append(
                    f"{name}{end} = tl.load({base} + {slot} * {of}.tiles + {place}{guard}){narrow}"
                )
    cells = [
        f"cell{number}_low, cell{number}_high = cell{number}_of_tile("
        "row, column, inside, origins, scope, BLOCK_M, BLOCK_N)"
        for number in range(len(bounds.cells))
    ]
    sure = bounds.sure if sparsity.evaluate else const(True)
    printed = print_expressions((bounds.may, bounds.must, sure), facts.names())
    lines = [*param_values(facts), "zeros = tl.zeros([1, 1], tl.int32)", *loads, *cells]
    body = [*lines, *printed.lines, f"return {', '.join(printed.results)}"]
    doc = "Whether pairs of the tiles may be live, whether all must be, and whether both are sure."
    taken = "values, row, column, inside, origins"
    text = scope_function("bounds_of_tile", taken, doc, body, _BLOCKS)
    return text, set(printed.helpers)
