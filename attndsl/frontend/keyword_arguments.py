"""Arguments with names, ``sliding_window(w=4)``: which parameter of a function each is for.

Only functions that the language itself defines have names for their parameters: those of a program
and those of the prelude.

Non-goals: the values of arguments; defaults, which parameters do not have.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from attndsl.errors import NameResolutionError, RankError, counted

from .builtin_functions import FORMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from . import surface as s


def parameters_of(call: s.FunctionCall, wanted: Sequence[str]) -> list[str]:
    """The parameter that each argument of ``call`` is for, in the order written.

    Args:
        call: Its arguments without a name come first, as in Python.
        wanted: The function's parameters.

    Raises:
        RankError: Too many or too few arguments.
        NameResolutionError: A name that is no parameter, or that has its value already.
    """
    form = f"{call.name}({', '.join(wanted)})"
    count = len(call.args) + len(call.keywords)
    if len(call.args) > len(wanted) or (not call.keywords and count < len(wanted)):
        raise RankError(
            f"{call.name} takes {counted(len(wanted), 'argument')}, and has {count}",
            call.span,
            f"write {form}",
        )
    found = list(wanted[: len(call.args)])
    for keyword in call.keywords:
        name = keyword.name.name
        if name not in wanted:
            close = difflib.get_close_matches(name[:100], wanted, n=1)
            raise NameResolutionError(
                f"{call.name} has no parameter '{name[:40]}'",
                keyword.name.span,
                f"did you mean '{close[0]}'?" if close else f"write {form}",
            )
        if name in found:
            raise NameResolutionError(
                f"{call.name} gets '{name}' twice", keyword.name.span, "remove one of the two"
            )
        found.append(name)
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise RankError(
            f"{call.name} lacks {', '.join(map(repr, lacking))}", call.span, f"write {form}"
        )
    return found


def refuse_keywords(call: s.FunctionCall) -> None:
    """Refuse names for the arguments of a built-in function, whose parameters have none.

    Raises:
        RankError: There is one.
    """
    if call.keywords:
        raise RankError(
            f"{call.name} takes its arguments by their places, without names",
            call.keywords[0].span,
            f"write {FORMS.get(call.name, f'{call.name}(x)')}",
        )
