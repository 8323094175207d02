"""Write what follows from the table of call options into the text of ``Attention.__call__``.

    python tools/call_options.py [--write]

The table is ``attndsl/call/options.py``. The overloads of ``__call__`` and its docstring's list of
arguments follow from it. Without ``--write`` they are compared with the text, and the exit status
is 1 where they differ.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "attndsl" / "call" / "options.py"
TEXT = ROOT / "attndsl" / "attention.py"
RECORDS = ("CallOptions", "Location")
WIDTH = 100
_ROWS = "self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor"
_LAST_ROW = "            v: (B, Hkv, Lk, Dv).\n"
_RETURNS = (
    ("Literal[False] = False", "torch.Tensor"),
    ("Literal[True]", "tuple[torch.Tensor, torch.Tensor]"),
    ("bool", "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"),
)
"""Types of ``return_lse``, and what a call returns then."""


def options() -> list[tuple[str, str, str, str]]:
    """Name, type, default and description of each option, in the order of the table."""
    found = []
    for record in ast.parse(TABLE.read_text("utf-8")).body:
        if not isinstance(record, ast.ClassDef) or record.name not in RECORDS:
            continue
        for field, text in zip(record.body, record.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.value, ast.Call):
                continue
            assert isinstance(field.target, ast.Name)
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            default = next(x.value for x in field.value.keywords if x.arg == "default")
            described = " ".join(str(text.value.value).split())
            found.append(
                (field.target.id, ast.unparse(field.annotation), ast.unparse(default), described)
            )
    return found


def overloads() -> str:
    """The overloads of ``__call__``."""
    found = []
    for kind, returned in _RETURNS:
        parts = [*_ROWS.split(", "), "*"]
        for name, annotation, default, _ in options():
            is_lse = name == "return_lse"
            parts.append(f"{name}: {kind}" if is_lse else f"{name}: {annotation} = {default}")
        parts += ["captures: Captures | None = None", "**named: torch.Tensor | Scalar"]
        # No line ends within a parameter.
        line = ", ".join(part.replace(" ", "\0") for part in parts) + ","
        body = _filled(line, 8, 8).replace("\0", " ")
        head = f"    @overload\n    def __call__(\n{body}\n"
        found.append(f"{head}    ) -> {returned}: ...  # fmt: skip\n")
    return "\n".join(found)


def arguments() -> str:
    """The options in the docstring's list of arguments."""
    return "\n".join(_filled(f"{name}: {text}", 12, 16) for name, _, _, text in options())


def _filled(line: str, first: int, rest: int) -> str:
    return textwrap.fill(
        line, WIDTH, initial_indent=" " * first, subsequent_indent=" " * rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def written(text: str) -> str:
    """``text`` of attention.py with what follows from the table."""
    begin = text.index("    @overload\n")
    end = text.index(f"    def __call__({_ROWS}, **given")
    text = text[:begin] + overloads() + "\n" + text[end:]
    begin = text.index(_LAST_ROW) + len(_LAST_ROW)
    end = text.index("            captures: The program's tensors", begin)
    return text[:begin] + arguments() + "\n" + text[end:]


def main() -> None:
    before = TEXT.read_text("utf-8")
    after = written(before)
    if "--write" in sys.argv[1:]:
        TEXT.write_text(after, "utf-8")
    elif after != before:
        sys.exit("attention.py differs from the table of options: run it with --write")


if __name__ == "__main__":
    main()
