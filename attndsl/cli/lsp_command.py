"""``attndsl lsp``: the language server. Never imports torch."""

from __future__ import annotations

from .usage_errors import module_of_extra


def serve() -> None:
    """Serve an editor over standard input and output until it ends the server.

    Raises:
        UnsupportedError: pygls is not installed.
    """
    module_of_extra(
        "attndsl.editors.language_server", "the language server needs pygls", "lsp"
    ).run()
