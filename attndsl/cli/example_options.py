"""Options for made-up captures; a wrong value is an error of usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ArgumentError
from attndsl.inspection import example_captures
from attndsl.ir import SIZES

from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch

    from attndsl.ir import Program


def make_captures(
    program: Program,
    sizes: Mapping[str, int],
    device: str,
    generator: torch.Generator,
    read: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Call :func:`attndsl.inspection.example_captures.make_captures` for a command.

    Raises:
        UsageError: What that refuses.
    """
    try:
        return example_captures.make_captures(program, sizes, device, generator, read)
    except ArgumentError as error:
        raise UsageError(error.message, error.span, error.hint) from None


def check_dim_names(programs: Iterable[Program], given: Mapping[str, int]) -> None:
    """Refuse sizes of dims that no program has.

    Raises:
        UsageError: Names the dims that there are.
    """
    known = dict.fromkeys(name for program in programs for name in program.dim_names())
    for name in given:
        if name not in known:
            standard = f"; give --{name.replace('_', '-')}" if name in SIZES else ""
            raise UsageError(
                f"--dim gives '{name}', which no tensor of the program introduces",
                hint=f"its dims are: {', '.join(known) or 'none'}{standard}",
            )
