"""A program's tile-list kernels as the text of a Python module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import DType

from .device_functions import parameters, program_function, record_of_given
from .expression import print_expressions
from .template import fill_template, pair_function

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.tiles.intervals import Bounds
    from attndsl.pipeline import Lowered

    from .facts import KernelFacts

_KERNELS = ("summarise", "classify", "refine", "list_tiles")


def generate_lists(lowered: Lowered, facts: KernelFacts) -> str:
    """The module of the kernels that find the tiles of a masked program."""
    bounds = lowered.sparsity.bounds
    assert bounds is not None
    texts, helpers = [], set()
    for text, used in (
        pair_function("mask_of_pair", lowered.program.mask, facts, "Whether each pair takes part."),
        _store_values("row", "q", bounds.rows, facts),
        _store_values("column", "kv", bounds.columns, facts),
        _bounds(bounds, facts),
    ):
        texts.append(text)
        helpers |= used
    given = parameters(facts)
    flags = {"Q_KIND": facts.q_kind, "KV_KIND": facts.kv_kind}
    texts = [record_of_given(given), *texts]
    return fill_template(__package__, ("tile_lists",), _KERNELS, texts, helpers, flags, given)


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


def _bounds(bounds: Bounds, facts: KernelFacts) -> tuple[str, set[str]]:
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
    printed = print_expressions((bounds.may, bounds.must), facts.names())
    text = program_function(
        "bounds_of_tile",
        "values, row, column, inside",
        facts,
        "Whether pairs of the tiles may be live, and whether all must be.",
        [
            "zeros = tl.zeros([1, 1], tl.int32)",
            *loads,
            *printed.lines,
            f"return {printed.results[0]}, {printed.results[1]}",
        ],
        True,
    )
    return text, set(printed.helpers)
