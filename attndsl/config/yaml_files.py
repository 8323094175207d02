"""YAML texts as documents, with anchors, aliases and merge keys, and without making objects.

An alias is the node that it names, not a copy of that. So a few aliases of aliases are small until
somebody reads all that they stand for: what is read is counted.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import yaml

from attndsl.errors import ConfigError
from attndsl.source import Source, Span

from .documents import Document, Item, Text
from .json_toml import too_deep
from .size_limits import MAX_DEPTH, MAX_NODES, check_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+")
"""A float that YAML 1.1 takes for a text, such as 1e3."""
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*[|>]?")
"""Anchors and tags before a text, and how a block begins."""
_NULLS = frozenset({"null", "Null", "NULL", "~"})
_LONGEST_NUMBER = 400
"""Characters of a number."""
_MAX_MERGES = 16
"""Merge keys within each other."""


def read_yaml(text: str, name: str, all_programs: bool) -> YamlDocument:
    """The document that a YAML text is.

    Args:
        text: The file's text.
        name: Its name.
        all_programs: Whether it holds programs alone, so that a file of too many is refused early.

    Raises:
        ConfigError: It is none, or too large or deep.
    """
    source = Source(text, name)
    try:
        composer = _Composer(source, all_programs)
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = None if mark is None else Span(source, mark.index, mark.index + 1)
        raise ConfigError(f"not YAML: {error.problem}", at) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from None
    return YamlDocument(source, root)


class _Composer(yaml.SafeLoader):
    """Composer of nodes that refuses too many and too deep ones before it makes them."""

    def __init__(self, source: Source, all_programs: bool) -> None:
        super().__init__(source.text)
        self.source = source
        self.all_programs = all_programs
        self.depth = self.total = 0
        self.counts = [0] * (MAX_DEPTH + 2)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The node that comes next."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        at = Span(self.source, mark.index, mark.index + 1)
        if self.depth > MAX_DEPTH:
            raise too_deep(at)
        self.counts[self.depth] += 1
        if self.all_programs:
            # A key and its value are two nodes.
            inside = self.counts[2] + self.counts[3]
            check_counts((self.counts[1] + 1) // 2, (inside + 1) // 2, self.source.name, at)
        self.total += 1
        if self.total > MAX_NODES:
            raise _too_many(at)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class YamlDocument(Document):
    """A document of YAML's nodes."""

    has_lines = True

    def __init__(self, source: Source, root: Any) -> None:
        self.name = self.file = source.name
        self.root = root
        self._source = source
        self._read = 0
        self._merges = 0

    def items(self, value: Any) -> list[Item] | None:
        """The items, those of merge keys first; a name's own item overrides that of a merge key.

        Raises:
            ConfigError: A merge key does not name mappings, or brings too many.
        """
        if not isinstance(value, yaml.MappingNode):
            return None
        own: list[Item] = []
        merged: dict[str | None, Item] = {}
        for key, part in value.value:
            self._read += 2
            if self._read > MAX_NODES:
                raise _too_many(self.span(key))
            if key.tag == f"{_TAG}merge":
                for item in self._merged(key, part):
                    merged.setdefault(item.name, item)
            else:
                name = key.value if isinstance(key, yaml.ScalarNode) else None
                own.append(Item(name, part, self.span(key)))
        names = {item.name for item in own}
        return [*(item for name, item in merged.items() if name not in names), *own]

    def _merged(self, key: Any, part: Any) -> list[Item]:
        """The items of the mapping or mappings that a merge key names, the first one's first."""
        if self._merges == _MAX_MERGES:
            raise ConfigError(
                "the merge keys nest too deeply", self.span(key), "write some of the items out"
            )
        self._merges += 1
        try:
            sources = part.value if isinstance(part, yaml.SequenceNode) else [part]
            found: list[Item] = []
            for each in sources:
                items = self.items(each)
                if items is None:
                    raise ConfigError(
                        "a merge key names what is no mapping",
                        self.span(part),
                        "write '<<: *name', where '&name' stands before a mapping",
                    )
                found += items
            return found
        finally:
            self._merges -= 1

    def elements(self, value: Any) -> Sequence[Any] | None:
        """The nodes of a list."""
        return value.value if isinstance(value, yaml.SequenceNode) else None

    def text(self, value: Any) -> Text | None:
        """A text, with the line where it begins."""
        if not isinstance(value, yaml.ScalarNode) or value.tag != f"{_TAG}str":
            return None
        start = value.start_mark.index
        head = _PROPERTIES.match(self._source.text, start)
        before = head[0] if head is not None else ""
        # The text of a block begins in the line after its indicator; its columns are shifted.
        line = value.start_mark.line + 1 + before.count("\n") + (value.style in ("|", ">"))
        written = Span(self._source, start, value.end_mark.index)
        return Text(value.value, line, written)

    def number(self, value: Any) -> bool | int | float | None:
        """The number that a scalar is in YAML 1.1 or 1.2.

        Numbers of base 60 are none: who writes 1:30 does not mean 90.
        """
        kind = str(value.tag).removeprefix(_TAG)
        text = value.value if isinstance(value, yaml.ScalarNode) else ""
        if not 0 < len(text) <= _LONGEST_NUMBER or ":" in text:
            return None
        if kind == "str" and value.style is None and _EXPONENT.fullmatch(text):
            kind, found = "float", float(text)
        elif kind in ("bool", "int", "float"):
            try:
                found = yaml.constructor.SafeConstructor().construct_object(value)
            except (ValueError, IndexError, KeyError, yaml.YAMLError):
                return None  # A tag that does not fit the text.
        else:
            return None
        overflows = isinstance(found, float) and math.isinf(found) and "inf" not in text.lower()
        return None if overflows else found

    def is_none(self, value: Any) -> bool:
        """``null`` or ``~``; a key without a value is more likely unfinished."""
        written = isinstance(value, yaml.ScalarNode) and value.value in _NULLS
        return written and value.tag == f"{_TAG}null"

    def span(self, value: Any) -> Span | None:
        """The first line of a node."""
        if value is None:
            return None
        start, end = value.start_mark.index, value.end_mark.index
        line_end = self._source.text.find("\n", start)
        stop = min(end, line_end if line_end >= 0 else end)
        return Span(self._source, start, max(start + 1, stop))

    def written(self, value: Any) -> str:
        """A scalar as the file has it."""
        if value is None or value.tag == f"{_TAG}null":
            return "nothing"
        return str(value.value)


def _too_many(at: Span | None) -> ConfigError:
    return ConfigError(
        f"the file has more than {MAX_NODES} names and values, aliases written out",
        at,
        "move the programs to a file of their own",
    )
