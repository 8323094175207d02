"""``attndsl play``: the page on which programs are tried."""

from __future__ import annotations

import re
import threading
import webbrowser
from typing import TYPE_CHECKING
from urllib.parse import quote

from attndsl.errors import ArgumentError
from attndsl.frontend import Absent
from attndsl.frontend.program_imports import expand
from attndsl.play.messages import ABSENT

from .usage_errors import UsageError, module_of_extra

if TYPE_CHECKING:
    from .program_inputs import NamedProgram


def play(program: NamedProgram | None, port: int | None, browser: bool) -> None:
    """Serve the page until the command is interrupted.

    Args:
        program: What the page begins with; an example by default.
        port: Where to listen; None for any.
        browser: Whether to open a browser.

    Raises:
        UnsupportedError: starlette or uvicorn is not installed.
        UsageError: Another program listens on that port.
        AttnDSLError: A file that ``program`` imports cannot be read.
    """
    server = module_of_extra(
        "attndsl.play.http_server", "the page needs starlette and uvicorn", "play"
    )
    try:
        listening = server.listen(port)
    except ArgumentError as error:
        raise UsageError(error.message, error.span, error.hint) from error
    address = f"http://{server.HOST}:{listening.getsockname()[1]}/{_fragment(program)}"
    print(f"attndsl play: {address}\nPress Ctrl+C to end it.", flush=True)
    if browser:
        # Browsers of terminals take the terminal until they are left.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    server.run(listening)


def _fragment(program: NamedProgram | None) -> str:
    """Fragment of the address: the program, and values that a configuration gives it."""
    if program is None:
        return ""
    text, fragment = expand(program.source).text, ""
    for name, declared in program.params.items():
        if isinstance(declared, Absent):
            fragment += f"&param.{quote(name)}={ABSENT}"
        elif re.search(rf"^\s*param\s+{re.escape(name)}\b", text, re.MULTILINE):
            fragment += f"&param.{quote(name)}={declared.value}"
        else:
            kind = type(declared.value).__name__
            text = f"param {name}: {kind} = {str(declared.value).lower()}\n{text}"
    return f"#program={quote(text, safe='')}{fragment}"
