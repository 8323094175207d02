"""The language server: requests of editors over standard input, answers over standard output.

It reads the texts that editors send, and files that they import. It runs nothing of them, and
writes nothing. Whatever takes long runs in two threads, one for checks and one for answers, so
that the server goes on listening.

This module alone needs pygls.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lsprotocol import types as t
from pygls import uris
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol

from attndsl import __version__
from attndsl.config import PROGRAM_SUFFIX, SUFFIXES

from .completion import Proposal, proposals_at
from .diagnostics import FileProblem, Level, problems_in
from .document_symbols import DocumentSymbol, symbols_in
from .embedded_programs import program_at, programs_in
from .formatting import Edit, edits_of
from .hover import Definition, Note, definition_at, note_at
from .semantic_tokens import LEGEND, colours_in
from .text_positions import Point, TextPositions, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable

_R = TypeVar("_R")
_LANGUAGES = {"attn": ".attn", "yaml": ".yaml", "toml": ".toml", "json": ".json"}
"""Suffixes for files without a name."""
_SEVERITIES = {
    Level.ERROR: t.DiagnosticSeverity.Error,
    Level.WARNING: t.DiagnosticSeverity.Warning,
    Level.REMARK: t.DiagnosticSeverity.Information,
}
_COMPLETIONS = {
    "param": t.CompletionItemKind.Variable,
    "tensor": t.CompletionItemKind.Variable,
    "local": t.CompletionItemKind.Variable,
    "size": t.CompletionItemKind.Constant,
    "variable": t.CompletionItemKind.Variable,
    "constant": t.CompletionItemKind.Constant,
    "target": t.CompletionItemKind.Keyword,
    "function": t.CompletionItemKind.Function,
    "prelude": t.CompletionItemKind.Function,
    "type": t.CompletionItemKind.TypeParameter,
    "word": t.CompletionItemKind.Keyword,
    "declaration": t.CompletionItemKind.Keyword,
}
_SYMBOLS = {
    "param": t.SymbolKind.Constant,
    "tensor": t.SymbolKind.Array,
    "function": t.SymbolKind.Function,
    "local": t.SymbolKind.Variable,
    "import": t.SymbolKind.Module,
    "program": t.SymbolKind.Namespace,
}


class OpenFile(NamedTuple):
    """A file that an editor has open."""

    uri: str
    path: str
    """Its suffix says how it is read."""
    lines: TextPositions
    version: int | None

    def range(self, start: int, end: int) -> t.Range:
        """A part of its text."""
        return as_range(self.lines, start, end)

    def offset(self, position: t.Position) -> int:
        """A place in its text."""
        return self.lines.offset(Point(position.line, position.character))


def as_range(lines: TextPositions, start: int, end: int) -> t.Range:
    """A part of a text."""
    first, last = lines.range(start, end)
    return t.Range(t.Position(*first), t.Position(*last))


class _Protocol(LanguageServerProtocol):
    """The protocol of pygls, which answers requests that it cannot read."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """The content of a message; a request without content gets an error as its answer."""
        try:
            return super().structure_message(data)
        except JsonRpcException as error:
            if "id" in data and "method" in data:
                self._send_response(data["id"], error=error.to_response_error())
            raise


class AttnServer(LanguageServer):
    """Files that are open, and the threads that look at them."""

    def __init__(self) -> None:
        super().__init__(
            "attndsl",
            __version__,
            text_document_sync_kind=t.TextDocumentSyncKind.Full,
            protocol_cls=_Protocol,
        )
        self.checks = ThreadPoolExecutor(1, "attndsl-checks")
        self.answers = ThreadPoolExecutor(1, "attndsl-answers")
        self.changed: dict[str, None] = {}
        """Files that have not been checked since they changed, in that order."""
        self.checking: asyncio.Task[None] | None = None

    def file(self, uri: str) -> OpenFile | None:
        """The open file at ``uri``; None if it is not open, or can hold no programs."""
        document = self.workspace.text_documents.get(uri)
        if document is None:
            return None
        path = uris.to_fs_path(uri) or os.path.basename(uri)
        if os.path.splitext(path)[1].lower() not in (PROGRAM_SUFFIX, *SUFFIXES):
            suffix = _LANGUAGES.get(document.language_id or "")
            if suffix is None:
                return None
            path += suffix
        encoding = self.workspace.position_encoding or t.PositionEncodingKind.Utf16
        lines = lines_of(document.source, t.PositionEncodingKind(encoding).value)
        return OpenFile(uri, path, lines, document.version)

    async def answer(self, work: Callable[..., _R], *arguments: Any) -> _R:
        """``work(*arguments)``, while the server goes on listening."""
        return await asyncio.get_running_loop().run_in_executor(self.answers, work, *arguments)

    def check(self, uri: str) -> None:
        """Check a file soon."""
        self.changed.pop(uri, None)
        self.changed[uri] = None
        if self.checking is None or self.checking.done():
            self.checking = asyncio.get_running_loop().create_task(self._check_all())

    async def _check_all(self) -> None:
        """Check the files that have changed, each as it is when its turn comes."""
        loop = asyncio.get_running_loop()
        while self.changed:
            uri = next(iter(self.changed))
            del self.changed[uri]
            file = self.file(uri)
            if file is None:
                continue
            found = await loop.run_in_executor(self.checks, safe_problems, file)
            # What has changed meanwhile will be checked again.
            if uri in self.workspace.text_documents and uri not in self.changed:
                self.text_document_publish_diagnostics(
                    t.PublishDiagnosticsParams(uri, found, file.version)
                )

    def forget(self, uri: str) -> None:
        """Take back what was said of a file that is closed."""
        self.changed.pop(uri, None)
        self.text_document_publish_diagnostics(t.PublishDiagnosticsParams(uri, []))

    def shutdown(self) -> None:
        """End without waiting for checks that are still running."""
        self.checks.shutdown(wait=False, cancel_futures=True)
        self.answers.shutdown(wait=False, cancel_futures=True)
        super().shutdown()  # type: ignore[no-untyped-call]


def safe_problems(file: OpenFile) -> list[t.Diagnostic]:
    """The problems of a file; a failure of the compiler is a problem like any other."""
    try:
        return [_diagnostic(each, file) for each in problems_in(file.lines.text, file.path)]
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        message = f"the compiler failed: {said}\nhint: please report this program"
        return [
            t.Diagnostic(file.range(0, 1), message, t.DiagnosticSeverity.Error, source="attndsl")
        ]


def _diagnostic(problem: FileProblem, file: OpenFile) -> t.Diagnostic:
    related = None
    span = problem.elsewhere
    if span is not None and span.source.file is not None:
        place = as_range(lines_of(span.source.text, file.lines.encoding), span.start, span.end)
        uri = uris.from_fs_path(span.source.file) or ""
        said = problem.message.partition("\n")[0]
        related = [t.DiagnosticRelatedInformation(t.Location(uri, place), said)]
    severity = _SEVERITIES[problem.level]
    return t.Diagnostic(
        file.range(problem.start, problem.end), problem.message, severity, problem.kind,
        source="attndsl", related_information=related,
    )  # fmt: skip


def note_in(file: OpenFile, position: t.Position) -> t.Hover | None:
    """Text that hovering at a position shows; None for no text."""
    offset = file.offset(position)
    at = program_at(programs_in(file.lines.text, file.path), offset)
    note: Note | None = None if at is None else note_at(*at)
    if at is None or note is None:
        return None
    place = file.range(*at[0].in_file(note.start, note.end))
    return t.Hover(t.MarkupContent(t.MarkupKind.Markdown, note.markdown), place)


def completions_in(file: OpenFile, position: t.Position, snippets: bool) -> list[t.CompletionItem]:
    """Completions at a position."""
    at = program_at(programs_in(file.lines.text, file.path), file.offset(position))
    return [] if at is None else [_completion(each, snippets) for each in proposals_at(*at)]


def _completion(proposal: Proposal, snippets: bool) -> t.CompletionItem:
    return t.CompletionItem(
        proposal.label,
        kind=_COMPLETIONS[proposal.kind],
        detail=proposal.detail,
        documentation=t.MarkupContent(t.MarkupKind.Markdown, proposal.markdown),
        sort_text=f"{proposal.rank} {proposal.label}",
        insert_text=proposal.insert if snippets else proposal.label,
        insert_text_format=t.InsertTextFormat.Snippet if snippets else t.InsertTextFormat.PlainText,
    )


def location_in(file: OpenFile, position: t.Position) -> t.Location | None:
    """Location of the definition of the name at a position; None if none is known."""
    at = program_at(programs_in(file.lines.text, file.path), file.offset(position))
    found: Definition | None = None if at is None else definition_at(*at)
    if at is None or found is None:
        return None
    if found.text is None:
        return t.Location(file.uri, file.range(*at[0].in_file(found.start, found.end)))
    place = as_range(lines_of(found.text, file.lines.encoding), found.start, found.end)
    return t.Location(uris.from_fs_path(found.path) or "", place)


def layout_of(file: OpenFile) -> list[t.TextEdit]:
    """Edits that lay out the programs of a file."""
    edits: list[Edit] = edits_of(file.lines.text, file.path)
    return [t.TextEdit(file.range(each.start, each.end), each.text) for each in edits]


def outline_of(file: OpenFile) -> list[t.DocumentSymbol]:
    """The statements of a file."""
    found = symbols_in(programs_in(file.lines.text, file.path))
    return [_symbol(each, file) for each in found]


def colours_of(file: OpenFile) -> t.SemanticTokens:
    """The tokens of a file's programs."""
    return t.SemanticTokens(colours_in(programs_in(file.lines.text, file.path), file.lines))


def _symbol(symbol: DocumentSymbol, file: OpenFile) -> t.DocumentSymbol:
    place = file.range(symbol.start, symbol.end)
    children = [_symbol(each, file) for each in symbol.children]
    return t.DocumentSymbol(
        symbol.name or "-", _SYMBOLS[symbol.kind], place, place, children=children or None
    )


def make_server() -> AttnServer:
    """A server that knows what to do with each request."""
    server = AttnServer()

    @server.feature(t.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: t.DidOpenTextDocumentParams) -> None:
        server.check(params.text_document.uri)

    @server.feature(t.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: t.DidChangeTextDocumentParams) -> None:
        server.check(params.text_document.uri)

    @server.feature(t.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: t.DidSaveTextDocumentParams) -> None:
        # Other open files may import this one.
        for uri in list(server.workspace.text_documents):
            server.check(uri)

    @server.feature(t.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: t.DidCloseTextDocumentParams) -> None:
        server.forget(params.text_document.uri)

    @server.feature(t.TEXT_DOCUMENT_HOVER)
    async def hover(params: t.HoverParams) -> t.Hover | None:
        file = server.file(params.text_document.uri)
        return None if file is None else await server.answer(note_in, file, params.position)

    @server.feature(t.TEXT_DOCUMENT_COMPLETION, t.CompletionOptions(trigger_characters=[":", "["]))
    async def completion(params: t.CompletionParams) -> list[t.CompletionItem] | None:
        file = server.file(params.text_document.uri)
        if file is None:
            return None
        snippets = takes_snippets(server.client_capabilities)
        return await server.answer(completions_in, file, params.position, snippets)

    @server.feature(t.TEXT_DOCUMENT_DEFINITION)
    async def definition(params: t.DefinitionParams) -> t.Location | None:
        file = server.file(params.text_document.uri)
        return None if file is None else await server.answer(location_in, file, params.position)

    @server.feature(t.TEXT_DOCUMENT_FORMATTING)
    async def formatting(params: t.DocumentFormattingParams) -> list[t.TextEdit] | None:
        file = server.file(params.text_document.uri)
        return None if file is None else await server.answer(layout_of, file)

    @server.feature(t.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    async def symbols(params: t.DocumentSymbolParams) -> list[t.DocumentSymbol] | None:
        file = server.file(params.text_document.uri)
        return None if file is None else await server.answer(outline_of, file)

    legend = t.SemanticTokensLegend(list(LEGEND), [])

    @server.feature(t.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL, legend)
    async def colours(params: t.SemanticTokensParams) -> t.SemanticTokens | None:
        file = server.file(params.text_document.uri)
        return None if file is None else await server.answer(colours_of, file)

    return server


def takes_snippets(capabilities: t.ClientCapabilities) -> bool:
    """Return True if the editor fills in the places of a snippet."""
    documents = capabilities.text_document
    item = documents and documents.completion and documents.completion.completion_item
    return bool(item and item.snippet_support)


def run() -> None:
    """Serve standard input and output until the editor ends it."""
    # Streams of its own, which it closes; and nothing else may write between its answers.
    with (
        os.fdopen(os.dup(0), "rb") as requests,
        os.fdopen(os.dup(1), "wb") as answers,
        contextlib.redirect_stdout(sys.stderr),
    ):
        server = make_server()
        server.checks.submit(warm_up)
        server.start_io(requests, answers)


def warm_up() -> None:
    """Have everything imported and read that checks need, and out of the way of collections.

    A full collection would look at all of it again, for about 50 ms, while somebody types.
    """
    text = "param w: int\nscore = tanh(score)\nmask = q - kv < w + 1 + w + 1"  # Needs sympy.
    problems_in(text, f"warm{PROGRAM_SUFFIX}")
    gc.collect()
    gc.freeze()
