"""``%load_ext attndsl``: the cell magic ``%%attn``, which compiles a cell of a notebook.

Needs nothing of IPython but the shell that it is given.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from attndsl.api import Options, compile_source
from attndsl.errors import ArgumentError, AttnDSLError
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.attention import Attention

_MAGIC = "attn"
_FORM = "write %%attn NAME [PARAM=NUMBER ...], such as %%attn local window=1024"
_WORDS = {"true": True, "false": False}
"""The language's spelling of bools; Python's own are literals."""
_RENDERED = "_render_traceback_"


def load_ipython_extension(shell: Any) -> None:
    """Give ``shell``, an ``InteractiveShell``, the magic; ``%load_ext attndsl`` calls this."""
    shell.register_magic_function(Cells(shell).attn, "cell", _MAGIC)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magic away again; ``%unload_ext attndsl`` calls this."""
    shell.magics_manager.magics["cell"].pop(_MAGIC, None)


class Cells:
    """The magic of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def attn(self, line: str, cell: str) -> Attention:
        """Compile the cell, an attention program, to a variable, and show it.

        Use:
            %%attn NAME [PARAM=NUMBER ...]

        ``NAME`` is the variable, and the program's name in profilers. A param may also be given a
        variable of the notebook, a number or a tensor: ``doc=doc_ids``. The variable stays as it
        was where the program has errors, which count the lines of the cell.
        """
        try:
            name, found = self._compiled(line, cell)
        except AttnDSLError as error:
            # IPython shows what this gives in place of a traceback: no frame is the reader's.
            shown = f"{type(error).__name__}: {error}".split("\n")
            setattr(error, _RENDERED, lambda: shown)
            raise
        self._shell.user_ns[name] = found
        return found

    def _compiled(self, line: str, cell: str) -> tuple[str, Attention]:
        """The variable's name, and the program."""
        name, *bindings = line.split() or [""]
        if not name.isidentifier():
            raise ArgumentError(
                f"{name!r} is no name of a variable" if name else "there is no name", hint=_FORM
            )
        declared = dict(self._binding(binding) for binding in bindings)
        return name, compile_source(
            Source(cell, f"%%attn {name}", 2, name), declared, Options(warns=True)
        )

    def _binding(self, text: str) -> tuple[str, Any]:
        """The name and the value of ``PARAM=VALUE``."""
        name, equals, written = text.partition("=")
        if not (name.isidentifier() and equals and written):
            raise ArgumentError(f"{text!r} gives no param a value", hint=_FORM)
        try:
            return name, ast.literal_eval(written)
        except (ValueError, SyntaxError):
            pass
        if written in _WORDS:
            return name, _WORDS[written]
        if written not in self._shell.user_ns:
            raise ArgumentError(
                f"{written!r} is neither a number nor a variable of the notebook",
                hint=f"write {name}=8, or give a variable that value first",
            )
        return name, self._shell.user_ns[written]
