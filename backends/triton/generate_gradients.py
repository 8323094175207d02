"""Texts of what kernels add up for gradients of captured tensors and params.

Non-goals: which kernel adds up which (``gradients/plan.py``), and all other texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.ir import Op

from ..emit.device_functions import PAIR, program_function
from ..emit.expression import Printer, element_offset
from ..emit.text import device_function, scope_function
from ..gradients.terms import ONE, SOURCES, lines_of, terms_of
from ..kernels.kernel import NO_SUMS, Sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..gradients.terms import Term

_TILE, _ROWS = "[BLOCK_M, BLOCK_N]", "[BLOCK_M]"
ROWS = Sums(_ROWS, "sums, rows", along="row")
COLUMNS = Sums("[BLOCK_N]", "sums, columns", along="column")
DIAGONALS = Sums(_TILE)
"""Of dS alone. torch makes gradients of the sums."""
PAIRS = Sums(_TILE, "sums, share, q, kv, inside, sizes, given")
STORED = Sums(stored_from="total, share, inside, sizes, given")
BOUNDS = Sums(_ROWS, "sums, given")
"""Of sizes: the greatest bounds the exact sums."""
EXACT = Sums(_ROWS, "sums, given")
"""Sums that any pairs may meet in."""
TOGETHER = Sums(_TILE, PAIRS.stored_from)
"""Sums over batch entries and heads, of every pair, that any pairs may meet in."""


@dataclass(frozen=True, slots=True)
class GradientTexts:
    """Functions, helpers, flags and arguments that a module gets for gradients or tangents."""

    functions: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    """Library functions that they use."""
    flags: Mapping[str, bool | float] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    """Kernel arguments, after those that the program adds."""


def gradient_texts(lowered: Lowered, facts: KernelFacts, kind: Sums) -> GradientTexts:
    """Texts of a kernel that adds up ``kind``, for the gradients that ``facts`` names."""
    names = {*facts.tensor_gradients, *facts.param_gradients}
    if kind in (NO_SUMS, DIAGONALS):
        terms: tuple[Term, ...] = ()
    elif kind.along:
        terms = lines_of(lowered, names, kind.along)
    else:
        terms = terms_of(lowered, names)
    numbers = _numbers(terms, facts, kind)
    count = 1 if kind is DIAGONALS else len(set(numbers.values()))
    functions: list[str] = []
    flags: dict[str, bool | float] = {}
    helpers = {"raise_bound"} if kind is BOUNDS else set[str]()
    for source in SOURCES:
        own = tuple(term for term in terms if source in term.factors)
        adds = bool(own) or (kind is DIAGONALS and source == "score")
        flags[f"GRAD_OF_{source.upper()}"] = adds
        if adds:
            body, used = _body(source, own, numbers, count, facts, kind)
            helpers |= used
            functions.append(
                program_function(
                    f"add_{source}_gradients",
                    f"sums, ds, score, live, {PAIR}",
                    facts,
                    f"The sums with what the gradient of each pair's {_OF[source]} adds.",
                    body,
                    True,
                )
            )
    if kind is not NO_SUMS:
        functions.append(_begin(count, kind))
    if kind is TOGETHER:
        body, used = _meetings(terms, facts)
        helpers |= used
        doc = "Add the sums, as integers, at the elements that their pairs look up."
        functions.append(program_function("scatter", f"sums, live, {PAIR}", facts, doc, body, True))
    if kind.stored_from:
        functions.append(_end(count, facts, kind))
    given = _buffers(facts, kind) + _outputs(len(terms), facts, kind)
    return GradientTexts(tuple(functions), frozenset(helpers), flags, tuple(given))


def stored_texts(lowered: Lowered, facts: KernelFacts, kind: Sums) -> GradientTexts:
    """Texts of the kernel that adds up stored dS: each of its terms is that sum."""
    count = len(terms_of(lowered, facts.tensor_gradients))
    return GradientTexts((_end(count, facts, kind),), given=tuple(_outputs(count, facts, kind)))


_OF = {"score": "score", "weight": "weight", "dropout": "chance to be dropped"}


def _buffers(facts: KernelFacts, kind: Sums) -> list[str]:
    """Kernel arguments of the kernels that scatter sums."""
    if kind is BOUNDS:
        return ["BOUNDS"]
    if kind not in (EXACT, TOGETHER):
        return []
    ranks = {capture.name: capture.rank for capture in facts.captures}
    names = ["SCALES"]
    for name in facts.tensor_gradients:
        names += [f"exact_{name}", f"notes_{name}", f"copies_{name}", f"step_{name}"]
        names += [f"gstride{dim}_{name}" for dim in range(ranks[name])]
    return names


def _numbers(terms: tuple[Term, ...], facts: KernelFacts, kind: Sums) -> dict[Node, int]:
    """Numbers of the sums, by lookup or param."""
    if kind in (BOUNDS, EXACT):
        return _places_of(terms, facts)
    return {term.leaf: number for number, term in enumerate(terms)}


def _places_of(terms: tuple[Term, ...], facts: KernelFacts) -> dict[Node, int]:
    """Numbers of the tensors in buffers of exact sums, by lookup."""
    return {term.leaf: facts.tensor_gradients.index(term.name) for term in terms}


def _outputs(count: int, facts: KernelFacts, kind: Sums) -> list[str]:
    """Kernel arguments that are used at the end alone."""
    if kind.along:
        return ["LINE_SUMS"] * bool(count)
    if kind is DIAGONALS:
        return ["DISTANCE_SUMS"]
    if kind not in (PAIRS, STORED):
        return []
    found = []
    for number in range(count):
        found.append(f"PAIR_SUMS{number}")
        found += [step for step in _pair_steps(number, facts) if step != "1"]
    return found


def _pair_steps(number: int, facts: KernelFacts) -> list[str]:
    """Steps between parts, batch entries, heads, queries and keys; one that is known is a 1."""
    unit = facts.pair_units[number]
    return [
        "1" if name == unit else f"pair_step{number}_{name}"
        for name in ("part", "b", "h", "q", "kv")
    ]


def _begin(count: int, kind: Sums) -> str:
    """``no_sums``: the sums before the first tile."""
    zeros = f"tl.zeros({kind.shape}, tl.float32), " * count
    return device_function("no_sums", "", "The sums of nothing.", [f"return ({zeros.rstrip()})"])


def _end(count: int, facts: KernelFacts, kind: Sums) -> str:
    """``store_sums``: what becomes of the sums after the last tile."""
    body = []
    if kind is TOGETHER:
        # Where heads are told apart each is its own; elsewhere nothing looks at them.
        body += [
            "head = Head(share.b, share.h, share.h // (sizes.heads // sizes.kv_heads))",
            "rows = share.corner.q + tl.arange(0, BLOCK_M)",
            "columns = share.corner.kv + tl.arange(0, BLOCK_N)",
            "live = (rows < sizes.q_len)[:, None] & (columns < sizes.kv_len)[None, :]",
            "scatter(sums, live, q, kv, Scope(head, sizes, given))",
        ]
    for number in range(count):
        if kind.along:
            along, of = ("q_len", "rows") if kind is ROWS else ("kv_len", "columns")
            body += [
                f"line = head.b * sizes.heads + head.h + {number} * sizes.batch * sizes.heads",
                f"places = given.LINE_SUMS + line.to(tl.int64) * sizes.{along} + {of}",
                f"tl.store(places, sums[{number}], mask={of} < sizes.{along})",
            ]
        elif kind is BOUNDS:
            body.append(f"raise_bound(given.BOUNDS + {number}, sums[{number}])")
        elif kind in (PAIRS, STORED):
            total = "total" if kind is STORED else f"sums[{number}]"
            steps = (
                step if step == "1" else f"given.{step}" for step in _pair_steps(number, facts)
            )
            body += [
                f"steps = Steps({', '.join(steps)})",
                f"store_pairs(given.PAIR_SUMS{number}, steps, {total}, share, inside, sizes)",
            ]
    doc = "Store the sums." if body else "Nothing is left to store."
    if kind.along:
        return scope_function("store_sums", kind.stored_from, doc, body or ["return"])
    return device_function("store_sums", kind.stored_from, doc, body or ["return"])


def _body(
    source: str,
    terms: tuple[Term, ...],
    numbers: Mapping[Node, int],
    count: int,
    facts: KernelFacts,
    kind: Sums,
) -> tuple[list[str], set[str]]:
    """Lines of the function that adds up what ``source`` gives, and the library's that they use.

    ``numbers`` say which of ``count`` sums a lookup or param adds to.
    """
    factors = tuple(term.factors[source] for term in terms)
    indices = tuple(index for term in terms for index in term.leaf.args)
    scatters = kind is EXACT
    printer = Printer(factors + indices * scatters, facts.names())
    lines: list[str] = []
    helpers: set[str] = set()
    parts: dict[int, list[str]] = {number: [] for number in range(count)}
    if kind is DIAGONALS:
        parts[0].append("ds")
    for term, factor in zip(terms, factors, strict=True):
        part = "ds"
        if factor is not ONE:
            part = f"ds * {printer.factor(factor)}"
            if factor.op is not Op.CONST:
                # What has no weight adds nothing, be its derivative infinite.
                part = f"tl.where(ds != 0.0, {part}, 0.0)"
        number = numbers[term.leaf]
        if scatters:
            found, used = _scattered(term, part, number, printer, facts)
            # Indices have locals of their own, which come after those of all factors.
            lines += found
            helpers |= used
        elif kind is BOUNDS:
            parts[number].append(f"tl.sum(finite_size({part}), 1)")
            helpers.add("finite_size")
        elif kind in (PAIRS, DIAGONALS, TOGETHER):
            parts[number].append(part)
        else:
            parts[number].append(f"tl.sum({part}, 1)")
    sums = "".join(
        f"{' + '.join([f'sums[{number}]', *added])}, " for number, added in parts.items()
    )
    lines.append(f"return ({sums.rstrip()})")
    return [*printer.lines, *lines], set(printer.helpers) | helpers


def _meetings(terms: tuple[Term, ...], facts: KernelFacts) -> tuple[list[str], set[str]]:
    """Lines that add each term's sums at the elements that it looks up, and what they use."""
    printer = Printer(tuple(index for term in terms for index in term.leaf.args), facts.names())
    lines: list[str] = []
    helpers: set[str] = set()
    places = _places_of(terms, facts)
    for number, term in enumerate(terms):
        found, used = _scattered(term, f"sums[{number}]", places[term.leaf], printer, facts)
        lines += found
        helpers |= used
    return [*printer.lines, *lines], set(printer.helpers) | helpers


def _scattered(
    term: Term, part: str, number: int, printer: Printer, facts: KernelFacts
) -> tuple[list[str], set[str]]:
    """Lines that add a term's parts, as integers, at the elements that it looks up."""
    name = term.name
    capture = next(capture for capture in facts.captures if capture.name == name)
    # Strides of the buffer are its own, so no dim of it counts as having stride 1.
    place = element_offset(printer.indices(term.leaf), "gstride", name, capture.wide, frozenset())
    lines = [
        f"part = {part}",
        f"exact = exact_parts(part, given.SCALES + {number})",
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
        f"number = (tl.program_id(0) % given.copies_{name}).to(tl.int64)",
        f"add_exactly(given.exact_{name} + number * given.step_{name}, place, exact)",
        f"note_infinities(given.notes_{name}, place, part)",
    ]
    return lines, {"exact_parts", "add_exactly", "note_infinities"}
