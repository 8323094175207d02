"""Texts of what kernels add up for gradients of captured tensors and params."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.ir import Op

from ..emit.device_functions import PAIR, program_function
from ..emit.expression import Printer
from ..emit.module_lines import device_function, scope_function
from ..gradients.gradient_terms import ONE, SOURCES, terms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..gradients.gradient_terms import Term

    Lines = tuple[Sequence[str], set[str]]
    """Lines of device code, or functions, and the library functions that they use."""

TILE, ROWS_OF_TILE, COLUMNS_OF_TILE = "[BLOCK_M, BLOCK_N]", "[BLOCK_M]", "[BLOCK_N]"


def _nothing(count: int, facts: KernelFacts) -> list[str]:
    return []


def _no_functions(terms: tuple[Term, ...], facts: KernelFacts) -> Lines:
    return (), set()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """Sums that a kernel makes for gradients of captures, as texts of its functions say it."""

    shape: str = TILE
    """Shape of one sum."""
    along: str = ""
    """``row`` or ``column`` where terms that vary along that alone are added up; else all are."""
    of_ds: bool = False
    """True if there is one sum, of dS alone: torch makes gradients of it."""
    by_tensor: bool = False
    """True if there is a sum for each tensor, instead of one for each term."""
    added: str = "{}"
    """The expression that a term adds to its sum, of its part of a tile."""
    helpers: frozenset[str] = frozenset()
    """Library functions that ``added`` and ``store`` use."""
    scatter: Callable[[Term, str, int, Printer, KernelFacts], Lines] | None = None
    """Adds a term's part to memory, instead of to the sum of a number."""
    functions: Callable[[tuple[Term, ...], KernelFacts], Lines] = _no_functions
    """Further functions."""
    given: Callable[[int, KernelFacts], list[str]] = _nothing
    """Kernel arguments, after those that the program adds, for so many terms."""
    stored_from: str = ""
    """Parameters of ``store_sums``; empty where there is no such function."""
    store: Callable[[int, KernelFacts], list[str]] = _nothing
    """Lines of ``store_sums``, for so many sums."""


def _line_sums(along: str, of: str) -> Callable[[int, KernelFacts], list[str]]:
    def store(count: int, facts: KernelFacts) -> list[str]:
        lines = []
        for number in range(count):
            lines += [
                f"line = head.b * sizes.heads + head.h + {number} * sizes.batch * sizes.heads",
                f"places = given.LINE_SUMS + line.to(tl.int64) * sizes.{along} + {of}",
                f"tl.store(places, sums[{number}], mask={of} < sizes.{along})",
            ]
        return lines

    return store


def _line_arguments(count: int, facts: KernelFacts) -> list[str]:
    return ["LINE_SUMS"] * bool(count)


ROWS = Sums(
    shape=ROWS_OF_TILE, along="row", added="tl.sum({}, 1)", given=_line_arguments,
    stored_from="sums, rows", store=_line_sums("q_len", "rows"),
)  # fmt: skip
COLUMNS = Sums(
    shape=COLUMNS_OF_TILE, along="column", added="tl.sum({}, 1)", given=_line_arguments,
    stored_from="sums, columns", store=_line_sums("kv_len", "columns"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradientTexts:
    """Functions, helpers, flags and arguments that a module gets for gradients or tangents."""

    functions: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    """Library functions that they use."""
    flags: Mapping[str, bool | float] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    """Kernel arguments, after those that the program adds."""


NO_GRADIENTS = GradientTexts(flags={f"GRAD_OF_{source.upper()}": False for source in SOURCES})


def gradient_texts(lowered: Lowered, facts: KernelFacts, kind: Sums) -> GradientTexts:
    """Texts of a kernel that adds up ``kind``, for the gradients that ``facts`` names."""
    names = {*facts.tensor_gradients, *facts.param_gradients}
    terms = () if kind.of_ds else terms_of(lowered, names)
    if kind.along:
        terms = tuple(term for term in terms if term.along == kind.along)
    numbers = numbers_of(terms, facts) if kind.by_tensor else _in_order(terms)
    count = 1 if kind.of_ds else len(set(numbers.values()))
    functions: list[str] = []
    flags: dict[str, bool | float] = {}
    helpers = set(kind.helpers)
    for source in SOURCES:
        own = tuple(term for term in terms if source in term.factors)
        adds = bool(own) or (kind.of_ds and source == "score")
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
    zeros = f"tl.zeros({kind.shape}, tl.float32), " * count
    begin = [f"return ({zeros.rstrip()})"]
    functions.append(device_function("no_sums", "", "The sums of nothing.", begin))
    more, used = kind.functions(terms, facts)
    functions += [*more, *_end(count, facts, kind)]
    given = tuple(kind.given(len(terms), facts))
    return GradientTexts(tuple(functions), frozenset(helpers | used), flags, given)


def stored_texts(lowered: Lowered, facts: KernelFacts, kind: Sums) -> GradientTexts:
    """Texts of the kernel that adds up stored dS: each of its terms is that sum."""
    count = len(terms_of(lowered, facts.tensor_gradients))
    functions = tuple(_end(count, facts, kind))
    return GradientTexts(functions, given=tuple(kind.given(count, facts)))


_OF = {"score": "score", "weight": "weight", "dropout": "chance to be dropped"}


def numbers_of(terms: tuple[Term, ...], facts: KernelFacts) -> dict[Node, int]:
    """Numbers of the tensors, by lookup."""
    return {term.leaf: facts.tensor_gradients.index(term.name) for term in terms}


def _in_order(terms: tuple[Term, ...]) -> dict[Node, int]:
    return {term.leaf: number for number, term in enumerate(terms)}


def _end(count: int, facts: KernelFacts, kind: Sums) -> list[str]:
    """``store_sums``: what becomes of the sums after the last tile."""
    if not kind.stored_from:
        return []
    body = kind.store(count, facts)
    doc = "Store the sums." if body else "Nothing is left to store."
    function = scope_function if kind.along else device_function
    return [function("store_sums", kind.stored_from, doc, body or ["return"])]


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
    printer = Printer(factors + indices * (kind.scatter is not None), facts.names())
    lines: list[str] = []
    helpers: set[str] = set()
    parts: dict[int, list[str]] = {number: [] for number in range(count)}
    if kind.of_ds:
        parts[0].append("ds")
    for term, factor in zip(terms, factors, strict=True):
        part = "ds"
        if factor is not ONE:
            part = f"ds * {printer.factor(factor)}"
            if factor.op is not Op.CONST:
                # What has no weight adds nothing, be its derivative infinite.
                part = f"tl.where(ds != 0.0, {part}, 0.0)"
        number = numbers[term.leaf]
        if kind.scatter is None:
            parts[number].append(kind.added.format(part))
        else:
            # Indices have locals of their own, which come after those of all factors.
            found, used = kind.scatter(term, part, number, printer, facts)
            lines += found
            helpers |= used
    sums = "".join(
        f"{' + '.join([f'sums[{number}]', *added])}, " for number, added in parts.items()
    )
    lines.append(f"return ({sums.rstrip()})")
    return [*printer.lines, *lines], set(printer.helpers) | helpers
