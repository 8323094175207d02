"""Texts of what kernels add up for gradients of captured tensors and params.

Non-goals: which kernel adds up which (``shares.py``), and all other texts (``generate.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.ir import Op

from .device_functions import PAIR, program_function, wrapped
from .expression import Printer, element_offset
from .terms import ONE, SOURCES, lines_of, terms_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from .specialise import Specialisation
    from .terms import Term

LINES = {"backward_q": "row", "backward_kv": "column"}
"""What the attention kernels sum along, by direction."""
SCATTERED = ("scatter_bounds", "scatter_sums")
"""The two kernels of sums that any pairs may meet in."""


@dataclass(frozen=True, slots=True)
class GradientTexts:
    """What a module gets."""

    functions: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    """Library functions that they use."""
    flags: Mapping[str, bool | float] = field(default_factory=dict)
    hooks: Mapping[str, list[str]] = field(default_factory=dict)


def gradient_texts(lowered: Lowered, special: Specialisation, direction: str) -> GradientTexts:
    """What the kernel of ``direction`` adds up of what ``special`` names."""
    names = {*special.tensor_gradients, *special.param_gradients}
    if direction in ("forward", "distances"):
        terms: tuple[Term, ...] = ()
    elif direction in LINES:
        terms = lines_of(lowered, names, LINES[direction])
    else:
        terms = terms_of(lowered, names)
    parameters = sum_parameters(special, direction)
    numbers = _numbers(terms, special, direction)
    count = 1 if direction == "distances" else len(set(numbers.values()))
    sums = [f"sum{number}" for number in range(count)]
    functions: list[str] = []
    flags: dict[str, bool | float] = {}
    helpers = {"raise_bound"} if direction == "scatter_bounds" else set[str]()
    for source in SOURCES:
        own = tuple(term for term in terms if source in term.factors)
        adds = bool(own) or (direction == "distances" and source == "score")
        flags[f"LEARNS_{source.upper()}"] = adds
        if adds:
            body, used = _body(source, own, numbers, sums, special, direction)
            helpers |= used
            functions.append(
                program_function(
                    f"add_{source}_gradients",
                    ", ".join([*sums, "dscore", "score", "live", PAIR]),
                    special,
                    f"The sums with what the gradient of each pair's {_OF[source]} adds.",
                    body,
                    True,
                    parameters,
                )
            )
    hooks = {
        "sums": wrapped(sums),
        "sum_parameters": wrapped(parameters),
        "outputs": wrapped(_outputs(terms, special, direction)),
        "begin_sums": [f"{name} = tl.zeros({_SHAPES[direction]}, tl.float32)" for name in sums],
        "end_sums": _end(sums, special, direction),
    }
    return GradientTexts(tuple(functions), frozenset(helpers), flags, hooks)


def stored_hooks(lowered: Lowered, special: Specialisation) -> dict[str, list[str]]:
    """What the kernel that adds up stored dS does with a sum: each of its terms is that."""
    terms = terms_of(lowered, special.tensor_gradients)
    return {
        "outputs": wrapped(_outputs(terms, special, "pairs")),
        "end_sums": _end(["total"] * len(terms), special, "pairs"),
    }


_OF = {"score": "score", "weight": "weight", "dropout": "chance to be dropped"}
_SHAPES = {
    "backward_q": "[BLOCK_M]",
    "backward_kv": "[BLOCK_N]",
    "distances": "[BLOCK_M, BLOCK_N]",
    "pairs": "[BLOCK_M, BLOCK_N]",
    "scatter_bounds": "[BLOCK_M]",
    "scatter_sums": "[BLOCK_M]",
}


def sum_parameters(special: Specialisation, direction: str) -> list[str]:
    """Kernel arguments that the functions get, after what the program adds."""
    if direction == "scatter_bounds":
        return ["BOUNDS"]
    if direction != "scatter_sums":
        return []
    ranks = {capture.name: capture.rank for capture in special.captures}
    names = ["SCALES"]
    for name in special.tensor_gradients:
        names += [f"exact_{name}", f"notes_{name}", f"copies_{name}", f"step_{name}"]
        names += [f"gstride{dim}_{name}" for dim in range(ranks[name])]
    return names


def _numbers(terms: tuple[Term, ...], special: Specialisation, direction: str) -> dict[Node, int]:
    """Numbers of the sums, by lookup or param."""
    if direction in SCATTERED:
        order = special.tensor_gradients
        return {term.leaf: order.index(term.name) for term in terms}
    return {term.leaf: number for number, term in enumerate(terms)}


def _outputs(terms: tuple[Term, ...], special: Specialisation, direction: str) -> list[str]:
    """Kernel arguments that are used at the end alone."""
    if direction in LINES:
        return ["LINE_SUMS"] * bool(terms)
    if direction != "pairs":
        return []
    found = []
    for number in range(len(terms)):
        found.append(f"PAIR_SUMS{number}")
        found += [step for step in _pair_steps(number, special) if step != "1"]
    return found


def _pair_steps(number: int, special: Specialisation) -> list[str]:
    """Steps between parts, batch entries, heads, queries and keys; one that is known is a 1."""
    unit = special.pair_units[number]
    return [
        "1" if name == unit else f"pair_step{number}_{name}"
        for name in ("part", "b", "h", "q", "kv")
    ]


def _end(sums: list[str], special: Specialisation, direction: str) -> list[str]:
    if direction in LINES:
        length, lines = ("q_len", "rows") if direction == "backward_q" else ("kv_len", "columns")
        return [
            f"tl.store(LINE_SUMS + (b * heads + h + {number} * batch * heads).to(tl.int64)"
            f" * {length} + {lines}, {name}, mask={lines} < {length})"
            for number, name in enumerate(sums)
        ]
    if direction == "scatter_bounds":
        return [f"raise_bound(BOUNDS + {number}, {name})" for number, name in enumerate(sums)]
    if direction != "pairs":
        return []
    calls = []
    for number, name in enumerate(sums):
        calls += [
            "store_pairs(",
            f"    PAIR_SUMS{number}, {', '.join(_pair_steps(number, special))},",
            f"    {name}, part, own_b, own_h, first, kv_first, q_len, kv_len, inside,",
            ")",
        ]
    return calls


def _body(
    source: str,
    terms: tuple[Term, ...],
    numbers: Mapping[Node, int],
    sums: list[str],
    special: Specialisation,
    direction: str,
) -> tuple[list[str], set[str]]:
    """Lines of the function that adds up what ``source`` gives, and the library's that they use.

    ``numbers`` say which of ``sums`` a lookup or param adds to.
    """
    factors = tuple(term.factors[source] for term in terms)
    indices = tuple(index for term in terms for index in term.leaf.args)
    scatters = direction == "scatter_sums"
    printer = Printer(factors + indices * scatters, special.names())
    lines: list[str] = []
    helpers: set[str] = set()
    if direction == "distances":
        lines.append("sum0 = sum0 + dscore")
    for term, factor in zip(terms, factors, strict=True):
        part = "dscore"
        if factor is not ONE:
            part = f"dscore * {printer.factor(factor)}"
            if factor.op is not Op.CONST:
                # What has no weight adds nothing, be its derivative infinite.
                part = f"tl.where(dscore != 0.0, {part}, 0.0)"
        number = numbers[term.leaf]
        if scatters:
            found, used = _scattered(term, part, number, printer, special)
            # Indices have locals of their own, which come after those of all factors.
            lines += found
            helpers |= used
        elif direction == "scatter_bounds":
            lines.append(f"sum{number} = sum{number} + tl.sum(finite_size({part}), 1)")
            helpers.add("finite_size")
        elif direction == "pairs":
            lines.append(f"sum{number} = sum{number} + {part}")
        else:
            lines.append(f"sum{number} = sum{number} + tl.sum({part}, 1)")
    lines.append(f"return ({', '.join(sums)},)")
    return [*printer.lines, *lines], set(printer.helpers) | helpers


def _scattered(
    term: Term, part: str, number: int, printer: Printer, special: Specialisation
) -> tuple[list[str], set[str]]:
    """Lines that add a term's parts, as integers, at the elements that it looks up."""
    name = term.name
    capture = next(capture for capture in special.captures if capture.name == name)
    # Strides of the buffer are its own, so no dim of it counts as having stride 1.
    place = element_offset(printer.indices(term.leaf), "gstride", name, capture.wide, frozenset())
    lines = [
        f"part = {part}",
        f"exact = exact_parts(part, SCALES + {number})",
    ]
    if term.along != "pair":
        # Integers are added up in any order: in the tile first, along what the index lacks.
        varies = frozenset[str]().union(*(printer.deps[index] for index in term.leaf.args))
        if "kv" not in varies:
            lines.append("exact = tl.sum(exact, 1, keep_dims=True)")
        if "q" not in varies:
            lines.append("exact = tl.sum(exact, 0, keep_dims=True)")
    lines += [
        f"place = {place}",
        f"copy = exact_{name} + (tl.program_id(0) % copies_{name}).to(tl.int64) * step_{name}",
        "add_exactly(copy, place, exact)",
        f"note_infinities(notes_{name}, place, part)",
    ]
    return lines, {"exact_parts", "add_exactly", "note_infinities"}
