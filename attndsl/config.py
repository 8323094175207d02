"""Programs in YAML, TOML and JSON files: ``{name: program}`` or ``{name: {program, params}}``.

Files are read without making Python objects of them beyond text and numbers, and without expanding
YAML aliases, so that no file, however hostile, runs or fills anything.

Non-goals: checking the programs themselves. Never imports torch.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attndsl.errors import AttnDSLError, ConfigError, raise_all, visible
from attndsl.frontend.declare import Bound
from attndsl.frontend.limits import MAX_ERRORS, MAX_SOURCE
from attndsl.reading import read_text
from attndsl.source import Source, Span

if TYPE_CHECKING:
    from os import PathLike

MAX_ENTRIES = 1000
"""Programs of a file, as its schema says."""
MAX_KEYS = 6000
"""Keys within all entries of a file: params, and the words ``program`` and ``params``."""
MAX_DEPTH = 3
"""Mappings within each other: the file, an entry, its params."""
_JSON_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_TOML_TOKENS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5})?'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?|#[^\n]*+|[\[\]{}.,=\n]",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
"""Of a param, as the schema says."""
_KEYS = ("program", "params")
_LONGEST_NUMBER = 400
"""Characters of a number in YAML."""
_SHOWN = 60
"""Characters of an entry's name in errors."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One program of a file."""

    name: str
    text: str
    source_name: str
    """Name of the text in errors."""
    first_line: int = 1
    """Line of the file where the text begins, where that is known."""
    params: dict[str, Bound] = field(default_factory=dict)
    """Values to bind, which know where they stand."""


def read_config(path: str | PathLike[str]) -> list[ConfigEntry]:
    """The programs of the file at ``path``, in its order.

    Raises:
        ConfigError: The file cannot be read, or is not of that form; several of them come as
            :class:`~attndsl.errors.ProgramErrors`.
    """
    name = os.fspath(path)
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}
    reader = readers.get(Path(path).suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{name} is no YAML, TOML or JSON file", hint="name it *.yaml, *.toml or *.json"
        )
    entries = reader(read_text(path), name)
    for entry in entries:
        _check_letters(entry)
    return entries


def _read_json(text: str, name: str) -> list[ConfigEntry]:
    _check_nesting(text, name, _JSON_TOKENS)
    try:
        data = json.loads(
            text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_float
        )
    except json.JSONDecodeError as error:
        at = Span(Source(text, name), min(error.pos, max(len(text) - 1, 0)), error.pos + 1)
        raise ConfigError(f"not JSON: {error.msg}", at) from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", hint=error.hint) from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    return _entries(data, name)


def _read_toml(text: str, name: str) -> list[ConfigEntry]:
    # Python's reader takes quadratic time for keys of many parts.
    _check_nesting(text, name, _TOML_TOKENS)
    try:
        data = tomllib.loads(text, parse_float=_float)
    except ValueError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    return _entries(data, name)


def _check_nesting(text: str, name: str, tokens: re.Pattern[str]) -> None:
    """Refuse brackets and keys with dots that nest deeper than any program, before a parser does.

    Args:
        text: The file's text.
        name: Its name.
        tokens: Matches strings and comments as a whole, brackets, and where keys with dots end.
    """
    depth = dots = 0
    for match in tokens.finditer(text):
        token = match[0]
        if token in "[]{},=\n":
            depth += (token in "[{") - (token in "]}")
            dots = 0
        dots += token == "."
        if max(depth, dots) > MAX_DEPTH:
            at = Span(Source(text, name), match.start(), match.end())
            raise _too_deep(at)


def _check_counts(entries: int, keys: int, name: str, at: Span | None = None) -> None:
    """Refuse a file of more entries, or of more keys within them, than any model has."""
    for count, most, what in ((entries, MAX_ENTRIES, "entries"), (keys, MAX_KEYS, "keys in them")):
        if count > most:
            raise ConfigError(f"{name} has more than {most} {what}", at, "split it")


def _check_letters(entry: ConfigEntry) -> None:
    """Refuse halves of letters, which JSON can spell and nothing can write."""
    for text in (entry.name, entry.text, *entry.params):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"'{_shown(entry.name)}' in {entry.source_name} holds half a letter, "
                f"{text[error.start]!a}",
                hint="write the letter itself, or both halves",
            ) from None


def _shown(key: object) -> str:
    """A key in errors: short, and in one line."""
    return visible(str(key)[:_SHOWN])


def _no_constant(constant: str) -> NoReturn:
    raise ConfigError(f"'{constant}' is not JSON", hint="write a number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value) and "inf" not in text:
        raise ConfigError(f"{text[:_SHOWN]} is too large for a float", hint="write a smaller one")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key '{_shown(key)}' stands twice", hint="rename one of them")
        found[key] = value
    return found


def _entries(data: object, name: str) -> list[ConfigEntry]:
    """Entries of a parsed JSON or TOML file, whose lines are not known."""
    if not isinstance(data, dict):
        raise ConfigError(f"{name} holds no mapping", hint="write 'name: program' entries")
    _check_counts(len(data), sum(map(_keys_in, data.values())), name)
    errors: list[AttnDSLError] = []
    found = []
    for key, value in data.items():
        label = f"{name}:{_shown(key)}"
        params: object = {}
        if isinstance(value, dict):
            errors += [_unknown_key(label, str(k)) for k in value if k not in _KEYS]
            params, value = value.get("params", {}), value.get("program")
        if not isinstance(value, str):
            errors.append(_no_program(label, value))
        elif not _are_params(params):
            errors.append(_bad_params(label))
        else:
            assert isinstance(params, dict)
            bound = {param: Bound(number, _origin(label)) for param, number in params.items()}
            found.append(ConfigEntry(str(key), value, label, 1, bound))
        if len(errors) >= MAX_ERRORS:
            break
    raise_all(errors[:MAX_ERRORS])
    return found


def _keys_in(value: object) -> int:
    """Keys of a parsed JSON or TOML entry and of what it holds."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(map(_keys_in, value.values()))


def _read_yaml(text: str, name: str) -> list[ConfigEntry]:
    import yaml

    source = Source(text, name)
    try:
        _check_yaml_events(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = None if mark is None else Span(source, mark.index, mark.index + 1)
        raise ConfigError(f"not YAML: {error.problem}", at) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        at = None if root is None else _yaml_span(source, root)
        raise ConfigError(f"{name} holds no mapping", at, "write 'name: program' entries")
    errors: list[AttnDSLError] = []
    found: dict[str, ConfigEntry] = {}
    for key, value in root.value:
        try:
            entry = _yaml_entry(source, name, key, value)
            if entry.name in found:
                raise ConfigError(
                    f"'{_shown(entry.name)}' stands twice",
                    _yaml_span(source, key),
                    "rename one of them",
                )
            found[entry.name] = entry
        except AttnDSLError as error:
            errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
    raise_all(errors)
    return list(found.values())


def _check_yaml_events(text: str, name: str) -> None:
    """Refuse depth, size and aliases before a tree is built of them."""
    import yaml

    source = Source(text, name)
    depth = 0
    nodes = [0] * (MAX_DEPTH + 1)
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        start = 0 if event.start_mark is None else event.start_mark.index
        at = Span(source, start, start + 1)
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError("aliases are not allowed here", at, "write the text out")
        if isinstance(event, yaml.NodeEvent):
            nodes[depth] += 1
            # A key and its value are two nodes.
            _check_counts((nodes[1] + 1) // 2, (nodes[2] + nodes[3] + 1) // 2, name, at)
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SOURCE:
            raise ConfigError(f"a text has more than {MAX_SOURCE} characters", at, "shorten it")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _too_deep(at)


def _yaml_entry(source: Source, name: str, key: Any, value: Any) -> ConfigEntry:
    import yaml

    if not isinstance(key, yaml.ScalarNode):
        raise ConfigError("a name is text", _yaml_span(source, key), "write 'name: program'")
    label = _shown(key.value)
    params: dict[str, Bound] = {}
    if isinstance(value, yaml.MappingNode):
        parts = {}
        for inner, part in value.value:
            if inner.value not in _KEYS:
                raise _unknown_key(label, str(inner.value), _yaml_span(source, inner))
            if inner.value in parts:
                raise ConfigError(
                    f"'{inner.value}' stands twice", _yaml_span(source, inner), "remove one"
                )
            parts[inner.value] = part
        if "params" in parts:
            params = _yaml_params(source, label, parts["params"])
        value = parts.get("program", value)
    if not isinstance(value, yaml.ScalarNode) or value.tag != "tag:yaml.org,2002:str":
        raise _no_program(label, getattr(value, "value", None), _yaml_span(source, value))
    line = value.start_mark.line + 1
    # The text of a block begins in the line after its indicator; its columns are shifted.
    first = line + 1 if value.style in ("|", ">") else line
    return ConfigEntry(key.value, value.value, name, first, params)


def _yaml_params(source: Source, label: str, written: Any) -> dict[str, Bound]:
    import yaml

    if not isinstance(written, yaml.MappingNode):
        raise _bad_params(label, _yaml_span(source, written))
    found: dict[str, Bound] = {}
    for key, value in written.value:
        if not (isinstance(key, yaml.ScalarNode) and _NAME.fullmatch(key.value)):
            raise _bad_params(label, _yaml_span(source, key))
        if key.value in found:
            raise ConfigError(
                f"'{_shown(key.value)}' stands twice", _yaml_span(source, key), "remove one"
            )
        number = _yaml_number(value)
        if number is None:
            raise _bad_params(label, _yaml_span(source, value))
        found[key.value] = Bound(number, _origin(label), _yaml_span(source, key))
    return found


def _yaml_number(written: Any) -> bool | int | float | None:
    """The number that a scalar is in YAML 1.1, or None.

    Numbers of base 60 are none: who writes 1:30 does not mean 90.
    """
    import yaml

    kind = str(written.tag).removeprefix("tag:yaml.org,2002:")
    text = written.value if isinstance(written, yaml.ScalarNode) else ""
    if kind not in ("bool", "int", "float") or not 0 < len(text) <= _LONGEST_NUMBER or ":" in text:
        return None
    constructor = yaml.constructor.SafeConstructor()
    try:
        number: bool | int | float = constructor.construct_object(written)
    except (ValueError, IndexError, KeyError, yaml.YAMLError):
        return None  # A tag that does not fit the text.
    overflows = isinstance(number, float) and math.isinf(number) and "inf" not in text.lower()
    return None if overflows else number


def _yaml_span(source: Source, written: Any) -> Span:
    start, end = written.start_mark.index, written.end_mark.index
    line_end = source.text.find("\n", start)
    stop = min(end, line_end if line_end >= 0 else end)
    return Span(source, start, max(start + 1, stop))


def _too_deep(at: Span) -> ConfigError:
    return ConfigError("the file nests too deeply", at, "write {program: ..., params: {...}}")


def _no_program(label: str, value: object, span: Span | None = None) -> ConfigError:
    kind = "nothing" if value is None else f"a {type(value).__name__}"
    shown = repr(value)[:40] if isinstance(value, str | int | float) else kind
    return ConfigError(
        f"the program of '{label}' is no text: {shown}",
        span,
        'write the program as a string, such as "q >= kv"',
    )


def _bad_params(label: str, span: Span | None = None) -> ConfigError:
    return ConfigError(
        f"the params of '{label}' are not all names with numbers",
        span,
        "write params: {window: 1024}",
    )


def _unknown_key(label: str, key: str, span: Span | None = None) -> ConfigError:
    close = difflib.get_close_matches(key[:40], _KEYS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "the keys are 'program' and 'params'"
    return ConfigError(f"'{label}' has an unknown key '{_shown(key)}'", span, hint)


def _origin(label: str) -> str:
    return f"is bound in the params of '{label}'"


def _are_params(params: object) -> bool:
    return isinstance(params, dict) and all(
        _NAME.fullmatch(k) and isinstance(v, bool | int | float) for k, v in params.items()
    )
