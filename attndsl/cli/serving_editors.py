"""``attndsl lsp``: the language server. Never imports torch."""

from __future__ import annotations

from importlib import import_module

from attndsl.errors import UnsupportedError


def serve() -> None:
    """Serve an editor over standard input and output until it ends the server.

    Raises:
        UnsupportedError: pygls is not installed.
    """
    try:
        server = import_module("attndsl.editors.server")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("attndsl"):
            raise
        module = error.name.partition(".")[0]
        raise UnsupportedError(
            f"the language server needs pygls, and there is no module '{module}'",
            hint="pip install 'attndsl[lsp]'",
        ) from error
    server.run()
