"""The form of configurations: ``{name: program}`` or ``{name: {program, params, description}}``.

All kinds of documents are held to it here, by the same code.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attndsl.errors import AttnDSLError, ConfigError, raise_all
from attndsl.frontend.declare import Absent, Bound
from attndsl.frontend.limits import MAX_ERRORS
from attndsl.source import Source

from .documents import shown
from .key_paths import find_place, key_of, told_place
from .size_limits import MAX_DESCRIPTION, check_counts

if TYPE_CHECKING:
    from attndsl.source import Span

    from .documents import Document, Item
    from .key_paths import DocumentPlace

KEYS = ("program", "params", "description")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
"""Name of a param, as the schema says."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One program of a configuration."""

    name: str
    text: str
    source_name: str
    """Name of the text in errors."""
    first_line: int = 1
    """Line of the file where the text begins, where that is known."""
    params: dict[str, Bound | Absent] = field(default_factory=dict)
    """Values to bind, which know where they stand; absent ones are null."""
    description: str | None = None
    """The file's description of the program, for people."""
    file: str | None = None
    """Path of the file, beside which imported files lie; None for a mapping."""
    written: Span | None = field(default=None, compare=False)
    """Place of the text in the file; see :attr:`.documents.Text.written`."""

    @property
    def source(self) -> Source:
        """The text, and where it stands."""
        return Source(self.text, self.source_name, self.first_line, self.name, self.file)


def read_entries(document: Document, place: DocumentPlace) -> list[ConfigEntry]:
    """The programs at ``place``, in their order.

    Raises:
        ConfigError: They are not of the form; several errors come as
            :class:`~attndsl.errors.ProgramErrors`.
    """
    entries, errors = read_right_entries(document, place)
    raise_all(errors)
    return entries


def read_right_entries(
    document: Document, place: DocumentPlace
) -> tuple[list[ConfigEntry], list[AttnDSLError]]:
    """The programs at ``place`` that are of the form, and the errors of the other entries.

    Raises:
        ConfigError: Nothing there is of the form, or there is too much.
    """
    where = told_place(document, place)
    items = document.items(place.value)
    if items is None:
        raise ConfigError(
            f"{where} holds no mapping", document.span(place.value), "write 'name: program' entries"
        )
    _refuse_one_program(document, items, where)
    check_counts(len(items), 0, where)
    reader = _FormReader(document, place.parts)
    for item in items:
        reader.take(item)
        check_counts(len(items), reader.keys, where)
        if reader.is_full:
            break
    return list(reader.found.values()), reader.errors[:MAX_ERRORS]


def _refuse_one_program(document: Document, items: list[Item], where: str) -> None:
    """Tell who gives one program without a name that this is what it is."""
    values = {item.name: item.value for item in items}
    if not {"program", "params"} <= set(values) <= set(KEYS):
        return
    params = document.items(values["params"])
    is_entry = params is not None and "program" in [item.name for item in params]
    if document.text(values["program"]) is not None and params is not None and not is_entry:
        raise ConfigError(
            f"{where} holds one program, which has no name",
            items[0].span,
            "write {name: {program: ..., params: ...}}",
        )


class _FormReader:
    """Reader of entries, which collects their errors."""

    def __init__(self, document: Document, parts: tuple[str, ...]) -> None:
        self.document = document
        self.parts = parts
        self.errors: list[AttnDSLError] = []
        self.found: dict[str, ConfigEntry] = {}
        self.keys = 0

    @property
    def is_full(self) -> bool:
        """True if as many errors are known as are shown."""
        return len(self.errors) >= MAX_ERRORS

    def take(self, item: Item) -> None:
        """Keep an entry, or its error."""
        before = len(self.errors)
        try:
            entry = self._entry(item)
            if item.name in self.found:
                self._tell_twice(item.name, item.span, "rename one of them")
            elif entry is not None and len(self.errors) == before:
                _check_letters(entry)
                self.found[entry.name] = entry
        except AttnDSLError as error:
            self.errors.append(error)

    def _entry(self, item: Item) -> ConfigEntry | None:
        """An entry. Errors of its parts are kept, and then it is of no use, or None.

        Raises:
            ConfigError: It has no name or no text.
        """
        document, before = self.document, len(self.errors)
        if item.name is None:
            raise ConfigError(
                f"a name in {document.name} is no text", item.span, "write 'name: program'"
            )
        label = shown(item.name)
        if not document.has_lines:
            label = f"{document.name}:{'.'.join(filter(None, (key_of(self.parts), label)))}"
        inner = document.items(item.value)
        parts = {"program": item.value} if inner is None else self._parts(label, inner)
        params = self._params(label, parts["params"]) if "params" in parts else {}
        description = None
        if "description" in parts:
            description = self._description(label, parts["description"])
        program = None
        if "program" in parts:
            program = document.text(parts["program"])
            if program is None:
                raise self._no_program(label, parts["program"])
        elif len(self.errors) == before:
            raise ConfigError(
                f"'{label}' has no program", document.span(item.value), "write program: q >= kv"
            )
        if program is None:
            return None
        source_name = document.name if document.has_lines else label
        return ConfigEntry(
            item.name, program.text, source_name, program.first_line, params, description,
            document.file, program.written,
        )  # fmt: skip

    def _parts(self, label: str, items: list[Item]) -> dict[str, Any]:
        """The values of an entry by their keys."""
        self.keys += len(items)
        found: dict[str, Any] = {}
        for item in items:
            if self.is_full:
                break
            if item.name not in KEYS:
                self.errors.append(_unknown_key(label, item))
            elif item.name in found:
                self._tell_twice(item.name, item.span, "remove one")
            else:
                found[item.name] = item.value
        return found

    def _params(self, label: str, value: Any) -> dict[str, Bound | Absent]:
        """The params of an entry, each with where it stands."""
        items = self.document.items(value)
        if items is None:
            self.errors.append(self._bad_params(label, value))
            return {}
        self.keys += len(items)
        found: dict[str, Bound | Absent] = {}
        for item in items:
            if self.is_full:
                break
            is_name = item.name is not None and _NAME.fullmatch(item.name)
            absent = is_name and self.document.is_none(item.value)
            number = self._number(item.value) if is_name and not absent else None
            if item.name is None or not is_name:
                span = item.span
                self.errors.append(_params_error(label, span, _PARAMS_HINT))
            elif item.name in found:
                self._tell_twice(item.name, item.span, "remove one")
            elif absent:
                found[item.name] = Absent(f"is given in the params of '{label}'", item.span)
            elif number is None:
                self.errors.append(self._bad_params(label, item.value))
            else:
                origin = f"is bound in the params of '{label}'"
                found[item.name] = Bound(number, origin, item.span)
        return found

    def _number(self, value: Any) -> bool | int | float | None:
        """A number, or the one at the key that a text such as ``${model.window}`` names."""
        found = self.document.number(value)
        text = self.document.text(value) if found is None else None
        key = None if text is None else _INTERPOLATION.fullmatch(text.text.strip())
        if key is None:
            return found
        try:
            return self.document.number(find_place(self.document, key[1]).value)
        except AttnDSLError:
            return None

    def _description(self, label: str, value: Any) -> str | None:
        """The description of an entry."""
        found = self.document.text(value)
        span = self.document.span(value)
        if found is None:
            told = self.document.told(value)
            self.errors.append(
                ConfigError(
                    f"the description of '{label}' is no text: {told}", span, "write a string"
                )
            )
            return None
        if len(found.text) > MAX_DESCRIPTION:
            self.errors.append(
                ConfigError(
                    f"the description of '{label}' has more than {MAX_DESCRIPTION} characters",
                    span,
                    "shorten it",
                )
            )
        return found.text

    def _tell_twice(self, name: str, span: Span | None, hint: str) -> None:
        where = "" if span is not None else f"{self.document.name}: the key "
        self.errors.append(ConfigError(f"{where}'{shown(name)}' stands twice", span, hint))

    def _no_program(self, label: str, value: Any) -> ConfigError:
        return ConfigError(
            f"the program of '{label}' is no text: {self.document.told(value)}",
            self.document.span(value),
            'write the program as a string, such as "q >= kv"',
        )

    def _bad_params(self, label: str, value: Any) -> ConfigError:
        """The error of params that are no mapping, or of one that is no number."""
        text = self.document.text(value)
        interpolated = text is not None and "${" in text.text
        hint = _INTERPOLATED if interpolated else None
        return _params_error(label, self.document.span(value), hint or _PARAMS_HINT)


_INTERPOLATION = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_INTERPOLATED = (
    "'${key}' stands for a number of this file, by its whole key; "
    "load(OmegaConf.load(path)) resolves all interpolations"
)
_PARAMS_HINT = "write params: {window: 1024}; null leaves out what is declared with '= none'"


def _params_error(label: str, span: Span | None, hint: str) -> ConfigError:
    return ConfigError(f"the params of '{label}' are not all names with numbers", span, hint)


def _unknown_key(label: str, item: Item) -> ConfigError:
    key = item.name or "?"
    close = difflib.get_close_matches(key[:40], KEYS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"the keys are {', '.join(KEYS)}"
    return ConfigError(f"'{label}' has an unknown key '{shown(key)}'", item.span, hint)


def _check_letters(entry: ConfigEntry) -> None:
    """Refuse halves of letters, which JSON can spell and nothing can write."""
    for text in (entry.name, entry.text, *entry.params, entry.description or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"'{shown(entry.name)}' in {entry.source_name} holds half a letter, "
                f"{text[error.start]!a}",
                hint="write the letter itself, or both halves",
            ) from None
