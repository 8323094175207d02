"""Lines of generated modules: device functions and lists of arguments."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INDENT = "    "


def device_function(name: str, arguments: str, doc: str, body: Sequence[str]) -> str:
    """A device function that takes ``arguments`` and returns in its ``body``."""
    return "\n".join(
        [
            "@triton.jit",
            *_folded(f"def {name}({arguments}):", 96, 2 * INDENT),
            f'{INDENT}"""{doc}"""',
            *(INDENT + line for line in body),
        ]
    )


def scope_function(
    name: str, arguments: str, doc: str, body: Sequence[str], constants: str = ""
) -> str:
    """The same of one that takes a ``Scope`` behind ``arguments`` and before ``constants``.

    Its ``body`` calls the parts of the scope by their names.
    """
    parts = [
        f"{part} = scope.{part}"
        for part in ("head", "sizes", "given")
        if any(re.search(rf"\b{part}\.", line) for line in body)
    ]
    taken = ", ".join(filter(None, (arguments, "scope", constants)))
    return device_function(name, taken, doc, [*parts, *body])


def wrapped(names: Sequence[str]) -> list[str]:
    """``names`` as lines of arguments."""
    return _folded(", ".join(names) + ",", 88) if names else []


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    """``text`` in lines that end at spaces: a name may be longer than a line."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
