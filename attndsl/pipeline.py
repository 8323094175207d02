"""The order of the passes from a text to a lowered program."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.errors import ProgramWarning
from attndsl.foundation.caches import BoundedCache
from attndsl.frontend import (
    Absent,
    Bound,
    parsed,
    read,
    read_fractions,
    read_large_numbers,
    read_locals,
    read_mask_span,
    read_unscored,
    read_unused,
)
from attndsl.ir import Op
from attndsl.passes.broadcast import with_ones
from attndsl.passes.differentiate import differentiate
from attndsl.passes.lowered import Lowered, contractions_of
from attndsl.passes.signs import with_known_signs
from attndsl.passes.simplify import simplify, simplify_derivative, simplify_node
from attndsl.passes.split_mask import split_mask
from attndsl.passes.split_score import place
from attndsl.passes.tiles.constant_mask import verdict
from attndsl.passes.tiles.sparsity import analyse
from attndsl.passes.tokens import expanded, mentions_tokens, without_tokens
from attndsl.serialise import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.frontend import Declared
    from attndsl.frontend.surface import Tree
    from attndsl.ir import Node, Program
    from attndsl.passes.broadcast import Dims
    from attndsl.source import Source, Span


__all__ = [
    "Lowered",
    "Variant",
    "check",
    "lower",
    "lower_program",
    "names_of",
    "stages",
    "warnings_of",
]


class Variant(NamedTuple):
    """Choice of one of the programs of a text and its declarations."""

    sink: bool = True
    """True if the program's sink stays. Tensors that only the sink mentions stay in any case."""
    absent: tuple[str, ...] = ()
    """Captures that are declared with ``= none`` and are not there."""
    ones: Dims = ()
    """Dims of tensors that have size 1 in place of the declared one."""


WHOLE = Variant()
"""The program as it is written, in which nothing is absent."""


def check(source: Source, declared: Mapping[str, Declared]) -> None:
    """Raise the errors of :func:`lower` and of calls, in less time than :func:`lower` needs.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    tree = parsed(source)
    program = read(tree, declared)
    split_mask(program)
    _check_variants(tree, declared, program)


def warnings_of(source: Source, declared: Mapping[str, Declared]) -> tuple[ProgramWarning, ...]:
    """Check a program as :func:`check` does; return warnings about probably unintended text.

    Args:
        source: The text.
        declared: Names that the text need not declare.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    tree = parsed(source)
    program = read(tree, declared)
    masked = split_mask(program)
    _check_variants(tree, declared, program)
    found = [*read_unused(tree), *read_unscored(tree, program), *read_large_numbers(tree)]
    if masked.mask is not None:
        found += read_fractions(tree, declared, masked.mask)
    mask = None if masked.mask is None else simplify_node(masked.mask)
    if mask is not None and (value := verdict(mask)) is not None:
        # A value may well switch a mask off, but nobody asks for no pairs at all.
        bound = any(isinstance(given, Bound) for given in declared.values())
        if not value or not bound:
            found.append(_of_mask(value, read_mask_span(tree)))
    return tuple(found)


def _of_mask(value: bool, span: Span | None) -> ProgramWarning:
    if value:
        hint = "remove the mask, or look at its conditions with 'attndsl plot'"
        return ProgramWarning("the mask is true for all pairs", span, hint)
    hint = "look at its conditions with 'attndsl plot'; all outputs are 0"
    return ProgramWarning("the mask is false for all pairs", span, hint)


def lower(
    source: Source, declared: Mapping[str, Declared], exact: bool = False, variant: Variant = WHOLE
) -> Lowered:
    """Text to the input of backends.

    Args:
        source: The text.
        declared: Names that the text need not declare.
        exact: See :class:`~attndsl.ir.Program`.
        variant: Which of its programs.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    # Text -> surface tree -> typed IR, with functions inlined and bound params folded in.
    # Absent captures are gone from it.
    absent = dict.fromkeys(variant.absent, Absent())
    tree = parsed(source)
    program = replace(read(tree, {**declared, **absent}), exact=exact)
    if not variant.absent:
        _check_variants(tree, declared, program)
    if variant.ones:
        program = with_ones(program, variant.ones)
    return lower_program(program if variant.sink else replace(program, sink=None))


def _check_variants(tree: Tree, declared: Mapping[str, Declared], program: Program) -> None:
    """Refuse a program that has no meaning once captures are absent.

    One capture at a time, all that give a size its value, and all together. What then remains to be
    refused shows when a call leaves out such a set.

    Raises:
        AttnDSLError: What is wrong.
    """
    optional = [x.name for x in program.captures() if x.optional]
    sets = [frozenset({name}) for name in optional]
    for size in program.dim_names():
        tells = [x for x in program.tensors
                 if any(dim.op is Op.SIZE and dim.value == size for dim in x.dims)]  # fmt: skip
        if all(x.optional for x in tells):
            sets.append(frozenset(x.name for x in tells))
    if len(optional) > 1:
        sets.append(frozenset(optional))
    for absent in dict.fromkeys(sets):
        split_mask(read(tree, {**declared, **dict.fromkeys(sorted(absent), Absent())}))


MADE: BoundedCache[Any] = BoundedCache("programs in place of others by program, purpose", 256)
"""Programs that backends make of others, and run."""


def lower_program(program: Program) -> Lowered:
    """A checked program to the input of backends."""
    # First, while it is known which line each part of the score comes from. It simplifies each line
    # by itself, so that `where(true, ...)` of bound params does not hide a mask. Before
    # differentiation, which must not see -inf; it may leave `true` or `x and x` behind.
    # What the mask says of positions then holds for every pair whose score counts.
    written = program = with_known_signs(simplify(split_mask(program)))
    # Here what `token` is in most calls takes its place. Parts start from the program as written.
    program = simplify(expanded(written))
    by_token = written if mentions_tokens(written) else None
    # Of the simplified score, so that the derivative shares its nodes.
    derivative = simplify_derivative(differentiate(program))
    # Of the simplified score too, and of its derivative, which is that of the part of pairs.
    placed = place(program, derivative)
    # Contractions that only add to the raw score join the matrix product that makes it.
    contractions = contractions_of(program, lower_program)
    # Last, since it looks at the mask that the passes above have completed. Loops over tiles are
    # planned by backends, which know tile sizes: `sparsity.loop`.
    return Lowered(
        program, derivative, placed, analyse(program), digest(program), contractions, by_token
    )


def names_of(source: Source, declared: Mapping[str, Declared]) -> dict[Node, str]:
    """The local names of a text, by what they stand for as written and as simplified.

    Of two names of one expression the first counts.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    found: dict[Node, str] = {}
    simple: dict[Node, Node] = {}
    plain: dict[Node, Node] = {}
    for name, item in read_locals(source, declared).items():
        found.setdefault(item, name)
        found.setdefault(simplify_node(item, simple), name)
        found.setdefault(simplify_node(without_tokens(item, plain), simple), name)
    return found


def stages(source: Source, declared: Mapping[str, Declared]) -> dict[str, str]:
    """Each stage of :func:`lower` as text, by name.

    The names are ``tree``, ``ir``, ``simplified``, ``split``, ``derivative`` and ``tiles``.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    from attndsl.frontend.surface import shown
    from attndsl.passes.print_ir import print_derivative, print_program
    from attndsl.passes.tiles.plan_text import print_tiles

    tree = parsed(source)
    program = read(tree, declared)
    lowered = lower_program(program)
    return {
        "tree": "\n".join(map(shown, tree.statements)),
        "ir": print_program(program),
        "simplified": print_program(simplify(program)),
        "split": print_program(lowered.program),
        "derivative": print_derivative(lowered.derivative),
        "tiles": print_tiles(lowered.sparsity, 128, 64),
    }
