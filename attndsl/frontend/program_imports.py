"""``import "window.attn"``: the text of a program with other files' text in place of such lines.

A file lies in the folder of the file that imports it, or below that folder, after all links are
followed. So whoever writes a program can read no other file of the machine. The result mentions no
file: it is the program's own text, wherever it goes from here.

Non-goals: names of their own for what a file binds; a folder that changes while it is read.
"""

from __future__ import annotations

import difflib
import os
from itertools import islice
from pathlib import PurePath, PurePosixPath

from attndsl.errors import AttnDSLError, ConfigError, LimitError, ProgramErrors, raise_all, visible
from attndsl.foundation.bounded_io import read_text
from attndsl.source import Source, TextPiece

from . import surface as s
from .limits import MAX_ERRORS, MAX_IMPORT_DEPTH, MAX_IMPORTS, MAX_SOURCE, MAX_STATEMENTS
from .parse import parse

SUFFIX = ".attn"
_SHOWN = 60
"""Characters of a file's name in errors."""
_LISTED = 1000
"""Files of a folder that are looked through for a name like a missing one."""


def expand(source: Source) -> Source:
    """``source`` with the text of the files that it imports in place of its import lines.

    Spans of the result know their places in those files (:meth:`~attndsl.source.Span.origin`). A
    file counts once, where it is first imported. A text that stands in no file stays as it is.

    Raises:
        AttnDSLError: A file cannot be imported, or does not parse; all that is wrong comes at once.
    """
    if source.file is None or "import" not in source.text:
        return source
    reader = _ImportReader(source)
    whole = source
    try:
        whole = reader.expanded(source, (os.path.realpath(source.file),))
    except LimitError as error:
        reader.errors.append(error)
    raise_all(reader.errors[:MAX_ERRORS])
    return whole


def homeless(statement: s.Import) -> ConfigError:
    """The error of an import in a text that stands in no file."""
    return ConfigError(
        f"'{_shown(statement)}' cannot be found: this text stands in no file",
        statement.span,
        'load the program from a file, attndsl.load("FILE.attn"), or write the text out here',
    )


class _ImportReader:
    """Reader of the files that one program imports."""

    def __init__(self, source: Source) -> None:
        self.errors: list[AttnDSLError] = []
        self.names = {os.path.realpath(source.file or ""): source.name}
        """Names of files in errors, by real paths: those read so far."""
        self.characters = len(source.text)
        self.statements = 0

    def expanded(self, source: Source, chain: tuple[str, ...]) -> Source:
        """``source`` with its imports; ``chain`` has the real paths from the program to it."""
        try:
            statements = parse(source).statements
        except AttnDSLError as error:
            self._report(error)
            return source
        imports = [(x, Source("")) for x in statements if isinstance(x, s.Import)]
        self.statements += len(statements) - len(imports)
        for number, (statement, _) in enumerate(imports):
            if len(self.errors) >= MAX_ERRORS:
                break
            try:
                imports[number] = statement, self._imported(statement, source, chain)
            except LimitError:
                raise
            except AttnDSLError as error:
                self._report(error)
        return _spliced(source, imports) if imports else source

    def _report(self, error: AttnDSLError) -> None:
        self.errors += error.errors if isinstance(error, ProgramErrors) else [error]

    def _imported(self, statement: s.Import, source: Source, chain: tuple[str, ...]) -> Source:
        assert source.file is not None
        path = os.path.join(os.path.dirname(source.file), *_parts(statement))
        real = _within(path, source.file, statement)
        if real in chain:
            names = [visible(self.names[each]) for each in chain[chain.index(real) :]]
            raise ConfigError(
                f"the file imports itself: {' -> '.join([*names, names[0]])}",
                statement.span,
                "move what both files need to a third one",
            )
        if real in self.names:
            return Source("")
        for count, most, what in ((len(chain), MAX_IMPORT_DEPTH, "imports in a chain"),
                                  (len(self.names), MAX_IMPORTS, "imported files")):  # fmt: skip
            if count > most:
                raise LimitError(
                    f"the program has more than {most} {what}", statement.span, "join some files"
                )
        self.names[real] = path
        text = _text(path, statement)
        self.characters += len(text)
        _check_size(self.characters, MAX_SOURCE, "characters", statement)
        found = self.expanded(Source(text, path, file=path), (*chain, real))
        _check_size(self.statements, MAX_STATEMENTS, "statements", statement)
        return found


def _check_size(count: int, most: int, what: str, statement: s.Import) -> None:
    if count > most:
        raise LimitError(
            f"with this import the program has {count} {what}; at most {most} are allowed",
            statement.span,
            "import less, or move repeated text into functions",
        )


def _shown(statement: s.Import) -> str:
    return visible(statement.file[:_SHOWN])


def _parts(statement: s.Import) -> tuple[str, ...]:
    """The folders and the name of a file, as written.

    Raises:
        ConfigError: They may lead anywhere, or name no program file.
    """
    written, shown = statement.file, _shown(statement)
    path = PurePosixPath(written)
    if "\\" in written or ":" in written:
        raise ConfigError(
            f"'{shown}' holds '\\' or ':', which mean other things on other systems",
            statement.span,
            "write '/' between folders, and a name without ':'",
        )
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"'{shown}' leads out of the folder of this file",
            statement.span,
            "import files of this folder and of those in it: copy or move that file there",
        )
    if path.suffix != SUFFIX:
        raise ConfigError(
            f"'{shown}' is no program file", statement.span, f'write import "FILE{SUFFIX}"'
        )
    return path.parts


def _within(path: str, importer: str, statement: s.Import) -> str:
    """Real path of ``path``, which is in the folder of ``importer`` or below.

    Raises:
        ConfigError: A link leads elsewhere.
    """
    try:
        folder, real = (os.path.realpath(x) for x in (os.path.dirname(importer), path))
    except (OSError, ValueError) as error:  # A name that this system cannot have.
        raise ConfigError(f"cannot read {path}: {error}", statement.span) from None
    if not PurePath(real).is_relative_to(folder):
        raise ConfigError(
            f"'{_shown(statement)}' is a link out of the folder of this file",
            statement.span,
            "import files of this folder and of those in it: copy or move that file there",
        )
    if PurePath(real).suffix != SUFFIX:
        raise ConfigError(
            f"'{_shown(statement)}' is a link to a file that is no program file",
            statement.span,
            f"import files whose own names end in {SUFFIX}",
        )
    return real


def _text(path: str, statement: s.Import) -> str:
    try:
        return read_text(path, pipes=False)
    except ConfigError as error:
        hint = error.hint
        if not os.path.lexists(path):
            folder, name = os.path.split(path)
            near = difflib.get_close_matches(name[:100], _programs_in(folder), n=1)
            hint = f"did you mean '{visible(near[0])}'?" if near else hint
        raise ConfigError(error.message, statement.span, hint) from None


def _programs_in(folder: str) -> list[str]:
    """Names of program files in ``folder``."""
    try:
        with os.scandir(folder or os.curdir) as entries:
            return [each.name for each in islice(entries, _LISTED) if each.name.endswith(SUFFIX)]
    except OSError:
        return []


def _spliced(source: Source, imports: list[tuple[s.Import, Source]]) -> Source:
    """``source`` with texts in place of import statements."""
    text, position = "", 0
    pieces: list[TextPiece] = []
    for statement, found in imports:
        before = source.text[: statement.span.start].rstrip(" \t")
        pieces.append(TextPiece(len(text), source, position))
        text += before[position:]
        if text and not text.endswith("\n"):
            text += "\n"
        own = found.text.rstrip()
        for piece in found.pieces or (TextPiece(0, found, 0),):
            start = len(text) + min(piece.start, len(own))
            pieces.append(TextPiece(start, piece.source, piece.offset))
        text += own
        position = statement.span.end
        line = source.text[position:].partition("\n")[0]
        if line.strip():
            position += len(line) - len(line.lstrip(" \t;"))
            if not text.endswith("\n"):
                text += "\n"  # What goes on in this line is no part of a comment there.
    pieces.append(TextPiece(len(text), source, position))
    text += source.text[position:]
    return Source(text, source.name, source.first_line, source.key, None, tuple(pieces))
