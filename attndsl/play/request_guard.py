"""Rules on requests that the page's server takes, and on what browsers may do with its answers.

The server listens on this machine alone. Browsers on it open pages of anybody, and those must not
reach it: neither by requests of another origin, nor by a name of their own that leads here (DNS
rebinding), which the Host header tells, nor within a frame.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL = frozenset({"127.0.0.1", "localhost"})
TOKEN_HEADER = "x-attndsl-token"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""


@dataclass(frozen=True, slots=True)
class RequestGuard:
    """Refuses what the page itself would not send."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """Secret in the page, which no other origin can read."""

    def objection(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Reason why a request is refused; None where it is not.

        Args:
            method: ``GET``, ``POST``, ...
            headers: By their names in lower case.
        """
        host = headers.get("host", "")
        # Another port is that of a tunnel from another machine.
        name, _, port = host.partition(":")
        if name not in LOCAL or not (port == "" or (port.isascii() and port.isdigit())):
            return "this server answers to 127.0.0.1 and localhost only"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "requests of other origins are refused"
        follows_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        own_site = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        if not (own_site or follows_link):
            return "requests of other sites are refused"
        if method in ("GET", "HEAD"):
            return None
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return "requests are JSON"
        given = headers.get(TOKEN_HEADER, "")
        if not secrets.compare_digest(given.encode("latin-1", "replace"), self.token.encode()):
            return "the page is of an earlier server: load it again"
        return None
