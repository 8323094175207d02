"""The order of the passes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.frontend import read
from attndsl.passes.differentiate import differentiate
from attndsl.passes.lowered import Lowered, contractions_of
from attndsl.passes.place import place
from attndsl.passes.simplify import simplify, simplify_derivative
from attndsl.passes.split_mask import split_mask
from attndsl.passes.tiles.sparsity import analyse
from attndsl.serialise import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.frontend import Declared
    from attndsl.ir import Program
    from attndsl.source import Source


__all__ = ["Lowered", "check", "lower", "lower_program", "stages"]


def check(source: Source, declared: Mapping[str, Declared]) -> None:
    """Raise the errors of :func:`lower` and of calls, in less time than :func:`lower` needs.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    split_mask(read(source, declared))


def lower(
    source: Source, declared: Mapping[str, Declared], exact: bool = False, sink: bool = True
) -> Lowered:
    """Text to the input of backends.

    Args:
        source: The text.
        declared: Names that the text need not declare.
        exact: See :class:`~attndsl.ir.Program`.
        sink: Whether the program's sink stays. Tensors that it alone mentions do.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    # Text -> surface tree -> typed IR, with functions inlined and bound params folded in.
    program = replace(read(source, declared), exact=exact)
    return lower_program(program if sink else replace(program, sink=None))


def lower_program(program: Program) -> Lowered:
    """A checked program to the input of backends."""
    # First, while it is known which line each part of the score comes from. It simplifies each line
    # by itself, so that `where(true, ...)` of bound params does not hide a mask. Before
    # differentiation, which must not see -inf; it may leave `true` or `x and x` behind.
    program = simplify(split_mask(program))
    # Of the simplified score, so that the derivative shares its nodes.
    derivative = simplify_derivative(differentiate(program))
    # Of the simplified score too, and of its derivative, which is that of the part of pairs.
    placed = place(program, derivative)
    # Contractions that only add to the raw score join the matrix product that makes it.
    contractions = contractions_of(program, lower_program)
    # Last, since it looks at the mask that the passes above have completed. Loops over tiles are
    # planned by backends, which know tile sizes: `sparsity.loop`.
    return Lowered(program, derivative, placed, analyse(program), digest(program), contractions)


def stages(source: Source, declared: Mapping[str, Declared]) -> dict[str, str]:
    """Each stage of :func:`lower` as text, by name.

    The names are ``tree``, ``ir``, ``simplified``, ``split``, ``derivative`` and ``tiles``.

    Raises:
        AttnDSLError: All that is wrong with the program.
    """
    from attndsl.frontend.imports import expand
    from attndsl.frontend.parse import parse
    from attndsl.passes.print_ir import print_derivative, print_program
    from attndsl.passes.tiles.describe import print_tiles

    source = expand(source)
    program = read(source, declared)
    lowered = lower_program(program)
    return {
        "tree": "\n".join(map(repr, parse(source).statements)),
        "ir": print_program(program),
        "simplified": print_program(simplify(program)),
        "split": print_program(lowered.program),
        "derivative": print_derivative(lowered.derivative),
        "tiles": print_tiles(lowered.sparsity, 128, 64),
    }
