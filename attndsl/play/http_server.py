"""The HTTP server of the page: static files, and requests that worker processes answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from attndsl.errors import ArgumentError, AttnDSLError

from .examples import examples, words
from .messages import Answer, PageRequest, RequestKind, TextProblem, read_asked
from .request_guard import HEADERS, RequestGuard
from .worker_pool import COMMAND, PATIENT, Helper, Helpers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
PORT = 7878
"""Default port, if it is free, so that links of an earlier day still lead here."""
MOST_BYTES = 1 << 18
"""Bytes of a request: a program of the greatest length in the longest encoding, and settings."""
QUICK, SLOW = 10.0, 30.0
"""Seconds that an answer may take: quick ones while people type, and slow ones."""
REQUEST_SECONDS = 5.0
"""Seconds that a request may take to come. The server has room for few connections at a time, and
one on which nothing comes would keep its place for ever."""
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_TOKEN_MARK = "{{token}}"


class Answering(Protocol):
    """Interface that answers requests: :class:`~.worker_pool.Helpers`, or a stand-in for tests."""

    async def start(self) -> None:
        """Start, before the first request."""

    async def stop(self) -> None:
        """Stop, after the last request."""

    async def ask(self, asked: PageRequest) -> dict[str, Any]:
        """The answer, as JSON values."""


def helpers() -> Helpers:
    """The processes of a server."""
    quick, slow = Helper(QUICK), Helper(SLOW, (*COMMAND, PATIENT))
    return Helpers(
        {
            RequestKind.PICTURE: quick,
            RequestKind.LAYOUT: quick,
            RequestKind.DETAILS: slow,
            RequestKind.KERNEL: slow,
        }
    )


def make_app(answering: Answering, guard: RequestGuard) -> ASGIApp:
    """The application, with its guard around it."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await answering.start()
        yield
        await answering.stop()

    async def answer(request: Request) -> Response:
        return await _answer(request, answering)

    routes = [Route("/answer", answer, methods=["POST"])]
    for path, (content, kind) in _files(guard.token).items():
        routes.append(Route(path, _fixed(content, kind), methods=["GET"]))
    return _Guarded(Starlette(routes=routes, lifespan=lifespan), guard)


@dataclass(frozen=True, slots=True)
class _Guarded:
    app: ASGIApp
    guard: RequestGuard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        # Two headers of one name would be two answers to one question.
        listed = Headers(scope=scope)
        headers = {name.lower(): ",".join(listed.getlist(name)) for name in listed}
        objection = self.guard.objection(scope["method"], headers)
        if objection is None:
            await self.app(scope, receive, send_with_headers)
        else:
            refused = PlainTextResponse(objection + "\n", status_code=403)
            await refused(scope, receive, send_with_headers)


async def _answer(request: Request, answering: Answering) -> Response:
    try:
        body = await asyncio.wait_for(_body(request), REQUEST_SECONDS)
    except TimeoutError:
        return _problem(ArgumentError("the request does not come to its end"), 408)
    except ClientDisconnect:
        return Response(status_code=499)  # Nobody reads it.
    if body is None:
        return _problem(ArgumentError(f"the request is longer than {MOST_BYTES} bytes"), 413)
    try:
        asked = read_asked(_values(body))
    except AttnDSLError as error:
        return _problem(error, 400)
    begin = time.perf_counter()
    work = asyncio.ensure_future(answering.ask(asked))
    gone = asyncio.ensure_future(_gone(request))
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not work.done():
        work.cancel()
        return Response(status_code=499)  # Nobody reads it.
    taken = 1000 * (time.perf_counter() - begin)
    return JSONResponse(work.result(), headers={"Server-Timing": f"{asked.kind};dur={taken:.1f}"})


async def _gone(request: Request) -> None:
    """Return once the browser waits no longer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes | None:
    """The bytes of a request; None where there are too many."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return body


def _values(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ArgumentError("the request is no JSON") from None


def _problem(error: AttnDSLError, status: int) -> Response:
    found = Answer((TextProblem(error.message, error.hint),))
    return JSONResponse(found.as_json(), status_code=status)


def _files(token: str) -> dict[str, tuple[bytes, str]]:
    """All that the browser loads, by path: content and type."""
    found = {}
    for file in resources.files("attndsl.play").joinpath("static").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[f"/{file.name}"] = (file.read_bytes(), kind)
    page, kind = found.pop("/index.html")
    found["/"] = (page.replace(_TOKEN_MARK.encode(), token.encode()), kind)
    listed = {"groups": examples(), "words": words()}
    found["/examples.json"] = (json.dumps(listed).encode(), "application/json")
    return found


def _fixed(content: bytes, kind: str) -> Callable[[Request], Response]:
    def endpoint(_: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


def listen(port: int | None) -> socket.socket:
    """A socket of this machine's own address that listens on ``port``.

    Args:
        port: Which port; by default :data:`PORT`, or any where that is taken.

    Raises:
        ArgumentError: Another program listens there.
    """
    for each in (PORT, 0) if port is None else (port,):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # A server that has just ended leaves its port busy for a minute.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, each))
            listening.listen(128)
        except OSError as error:
            listening.close()
            reason = error.strerror or str(error)
        else:
            return listening
    raise ArgumentError(
        f"cannot listen on port {port}: {reason}", hint="give another --port, or none"
    )


class _Connection(H11Protocol):
    """A connection that is closed if its next request takes long to come."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self.transport.close()


def server_of(app: ASGIApp) -> uvicorn.Server:
    """A server of the page."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, date_header=False,
        limit_concurrency=64, timeout_graceful_shutdown=1, lifespan="on", ws="none",
        http=_Connection,
    )  # fmt: skip
    return uvicorn.Server(config)


def run(listening: socket.socket) -> None:
    """Serve the page on ``listening`` until the process is interrupted."""
    server_of(make_app(helpers(), RequestGuard())).run(sockets=[listening])
