"""The content of a configuration, independent of its format: YAML, TOML, JSON or a mapping.

A document is a tree of mappings, lists, texts and numbers. Its values are those of its parser; only
the document itself looks into them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.errors import ConfigError, visible
from attndsl.foundation.scalars import as_number

from .size_limits import MAX_KEYS

if TYPE_CHECKING:
    from attndsl.source import Span

_SHOWN = 60
"""Characters of a name or a value in errors."""
_LONGEST_REASON = 300


class Item(NamedTuple):
    """A name of a mapping, and what it names."""

    name: str | None
    """The key; None for a key that is no text."""
    value: Any
    """The value that the name has in the document."""
    span: Span | None = None
    """Place of the name in the file."""


class Text(NamedTuple):
    """A text of a document."""

    text: str
    first_line: int = 1
    """Line of the file where it begins, where that is known."""
    written: Span | None = None
    """Its place in the file, with quotes, escapes and indentation, where that is known."""


class DocumentMapping(list[tuple[str, Any]]):
    """A mapping as a file has it: a name may stand in it twice."""


class Unusable(NamedTuple):
    """A value that no program can use, with the error to raise once it is read."""

    message: str
    hint: str | None = None


class Document(ABC):
    """One configuration, with all that may stand around it."""

    name: str
    """The document's name in errors: its file."""
    file: str | None
    """Path of the file; None for a mapping."""
    root: Any
    has_lines: bool
    """True if the places of its texts in the file are known."""

    @abstractmethod
    def items(self, value: Any) -> list[Item] | None:
        """The items of a mapping, in order; None if ``value`` is none.

        Raises:
            ConfigError: The mapping cannot be read.
        """

    @abstractmethod
    def elements(self, value: Any) -> Sequence[Any] | None:
        """The elements of a list; None if ``value`` is none."""

    @abstractmethod
    def text(self, value: Any) -> Text | None:
        """A text; None if ``value`` is none."""

    @abstractmethod
    def number(self, value: Any) -> bool | int | float | None:
        """A number; None if ``value`` is none.

        Raises:
            ConfigError: It is a number that no program can use.
        """

    @abstractmethod
    def is_none(self, value: Any) -> bool:
        """Return True if ``value`` stands for no value: null."""

    def names(self, value: Any) -> list[str] | None:
        """The names of a mapping; None if ``value`` is none."""
        items = self.items(value)
        return None if items is None else [item.name for item in items if item.name is not None]

    def named(self, value: Any, name: str) -> list[Item]:
        """The items of the mapping ``value`` that are called ``name``."""
        return [item for item in self.items(value) or () if item.name == name]

    def span(self, value: Any) -> Span | None:
        """Span of ``value`` in its file, if that is known."""
        return None

    def told(self, value: Any) -> str:
        """``value`` in an error: itself if it is short and simple, otherwise its kind."""
        if self.items(value) is not None:
            return "a mapping"
        if self.elements(value) is not None:
            return "a list"
        written = self.text(value)
        return shown(self.written(value)) if written is None else repr(written.text[:_SHOWN])

    def written(self, value: Any) -> str:
        """Notation of a value that is no text, mapping or list, for errors."""
        return "nothing" if value is None else repr(value)


class PlainDocument(Document):
    """A document of Python's own values and of any Mapping, whose lines are not known."""

    has_lines = False

    def __init__(self, file: str | None, root: Any) -> None:
        self.name = "<mapping>" if file is None else file
        self.file = file
        self.root = root

    def items(self, value: Any) -> list[Item] | None:
        """The items; a value that cannot be had is :class:`Unusable`."""
        self._check(value)
        if isinstance(value, DocumentMapping):
            return [Item(*pair) for pair in value]
        if not isinstance(value, Mapping):
            return None
        return [self._item(value, key) for key in self._keys(value)]

    def names(self, value: Any) -> list[str] | None:
        """The names, without a look at the values: a mapping may compute these."""
        if not isinstance(value, Mapping):
            return super().names(value)
        return [key for key in self._keys(value) if isinstance(key, str)]

    def named(self, value: Any, name: str) -> list[Item]:
        """The item, without a look at the others."""
        if not isinstance(value, Mapping):
            return super().named(value, name)
        keys = self._keys(value)
        known = name in keys or (len(keys) > MAX_KEYS and name in value)
        return [self._item(value, name)] if known else []

    def elements(self, value: Any) -> Sequence[Any] | None:
        """The elements of any Sequence."""
        if isinstance(value, str | bytes | DocumentMapping | Unusable) or not isinstance(
            value, Sequence
        ):
            return None
        return value

    def text(self, value: Any) -> Text | None:
        """A text, of unknown line."""
        self._check(value)
        return Text(str(value)) if isinstance(value, str) else None

    def number(self, value: Any) -> bool | int | float | None:
        """A number of Python or of numpy."""
        self._check(value)
        number = as_number(value)
        if type(number) is int and not -1 << 63 <= number < 1 << 63:
            raise ConfigError(f"{self.name}: {_HUGE}", hint="write a float, such as 1e30")
        return number

    def written(self, value: Any) -> str:
        """Python's own text, which it has not for all ints."""
        number = as_number(value)
        huge = type(number) is int and not -1 << 63 <= number < 1 << 63
        return _HUGE if huge else super().written(value)

    def is_none(self, value: Any) -> bool:
        """None, which TOML cannot say."""
        return value is None

    def _check(self, value: Any) -> None:
        if isinstance(value, Unusable):
            raise ConfigError(f"{self.name}: {value.message}", hint=value.hint)

    def _keys(self, value: Mapping[Any, Any]) -> list[Any]:
        """The keys of a mapping of whatever library."""
        try:
            return list(islice(value, MAX_KEYS + 1))
        except Exception as error:
            raise ConfigError(f"{self.name}: a mapping has no keys: {_reason(error)}") from error

    def _item(self, value: Mapping[Any, Any], key: Any) -> Item:
        """An item. Reading its value may fail, as an interpolation of OmegaConf may."""
        name = str(key) if isinstance(key, str) else None
        try:
            return Item(name, value[key])
        except Exception as error:
            return Item(name, Unusable(f"'{shown(str(key))}' cannot be read: {_reason(error)}"))


_HUGE = "an int of more than 64 bits"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"


def shown(name: str) -> str:
    """A name or a value in errors: short, and in one line."""
    return visible(name[:_SHOWN])
