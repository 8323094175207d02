"""``attndsl plot``: which pairs and tiles a program keeps, as text or as a picture."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.errors import ArgumentError
from attndsl.inspection.example_captures import make_for_picture
from attndsl.picture import check_path, picture_data, text, write

from .example_options import check_dim_names
from .show_command import compile_program
from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.frontend.declare import Declared
    from attndsl.ir import Program
    from attndsl.picture import Frame

    from .program_inputs import NamedProgram


def plot(
    program: NamedProgram,
    declared: Mapping[str, Declared],
    dims: Mapping[str, int],
    frame: Frame,
    *,
    raw_score: float,
    seed: int,
    output: str | None,
) -> None:
    """Print the tiles of ``program``, or write a picture to ``output``.

    Args:
        program: The program.
        declared: What the command line declares.
        dims: Sizes of tensors' own dims.
        frame: Sizes, tiles, batch entry and head.
        raw_score: What raw scores are taken to be.
        seed: Of values that are made up.
        output: File to write; None for text on stdout.

    Raises:
        UsageError: A size, an index or the file's name is of no use.
        AttnDSLError: The program has errors.
    """
    try:
        if output is not None:
            check_path(output)
        # What would run it is of no matter here, and the reference is always there.
        attention = compile_program(program, declared, "reference")
        lowered = attention.lowered
        check_dim_names([lowered.program], dims)
        _check_params(lowered.program)
        made = make_for_picture(lowered.program, {**frame.sizes(), **dims}, seed)
        if made.what:
            print(f"made up, seed {seed}: {made.what}", file=sys.stderr)
        title = program.description or attention.text
        data = picture_data(lowered, frame, tensors=made.tensors, raw_score=raw_score, title=title)
        data = replace(data, made_up=made.what)
        if output is None:
            print(text(data), end="")
        else:
            write(data, output)
            print(f"wrote {output}")
    except ArgumentError as error:
        raise UsageError(error.message, error.span, error.hint) from error


def _check_params(program: Program) -> None:
    lacking = [param.name for param in program.params if param.default is None]
    if lacking:
        raise UsageError(
            f"no value is given for {', '.join(lacking)}",
            hint="add " + " ".join(f"-p {name}=..." for name in lacking),
        )
