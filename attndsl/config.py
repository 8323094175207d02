"""Programs in YAML, TOML and JSON files: ``{name: program}`` or ``{name: {program, params}}``.

Files are read without making Python objects of them beyond text and numbers, and without expanding
YAML aliases, so that no file, however hostile, runs or fills anything.

Non-goals: checking the programs themselves. Never imports torch.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.errors import AttnDSLError, ConfigError, raise_all
from attndsl.frontend.declare import Bound
from attndsl.source import Source, Span

if TYPE_CHECKING:
    from os import PathLike

MAX_FILE = 1 << 20
"""Bytes of a file."""
MAX_ENTRIES = 1000
_KEYS = ("program", "params")
_SHOWN = 60
"""Characters of an entry's name in errors."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One program of a file."""

    name: str
    text: str
    source_name: str
    """What errors call the text."""
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
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(
                f"{path} is larger than {MAX_FILE} bytes", hint="split it, or move data to tensors"
            )
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from error
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path} is no YAML, TOML or JSON file", hint="name it *.yaml, *.toml or *.json"
        )
    return reader(text, str(path))


def _read_json(text: str, name: str) -> list[ConfigEntry]:
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        at = Span(Source(text, name), min(error.pos, max(len(text) - 1, 0)), error.pos + 1)
        raise ConfigError(f"not JSON: {error.msg}", at) from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", hint=error.hint) from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} nests too deeply") from None
    return _entries(data, name)


def _read_toml(text: str, name: str) -> list[ConfigEntry]:
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} nests too deeply") from None
    return _entries(data, name)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key '{key[:40]}' stands twice", hint="rename one of them")
        found[key] = value
    return found


def _entries(data: object, name: str) -> list[ConfigEntry]:
    """Entries of a parsed JSON or TOML file, whose lines are not known."""
    if not isinstance(data, dict):
        raise ConfigError(f"{name} holds no mapping", hint="write 'name: program' entries")
    errors: list[AttnDSLError] = []
    found = []
    for key, value in data.items():
        label = f"{name}:{str(key)[:_SHOWN]}"
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
    raise_all(errors)
    return found


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
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            "the file holds no mapping", _yaml_span(source, root), "write 'name: program' entries"
        )
    errors: list[AttnDSLError] = []
    found: dict[str, ConfigEntry] = {}
    for key, value in root.value:
        try:
            entry = _yaml_entry(source, name, key, value)
            if entry.name in found:
                raise ConfigError(
                    f"'{entry.name}' stands twice", _yaml_span(source, key), "rename one of them"
                )
            found[entry.name] = entry
        except AttnDSLError as error:
            errors.append(error)
    raise_all(errors)
    return list(found.values())


def _check_yaml_events(text: str, name: str) -> None:
    """Refuse depth, size and aliases before a tree is built of them."""
    import yaml

    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        start = 0 if event.start_mark is None else event.start_mark.index
        at = Span(Source(text, name), start, start + 1)
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError("aliases are not allowed here", at, "write the text out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > 3:
            raise ConfigError(
                "the file nests too deeply", at, "write {program: ..., params: {...}}"
            )
        if count > 8 * MAX_ENTRIES:
            raise ConfigError(f"the file has more than {MAX_ENTRIES} entries", at, "split it")


def _yaml_entry(source: Source, name: str, key: Any, value: Any) -> ConfigEntry:
    import yaml

    if not isinstance(key, yaml.ScalarNode):
        raise ConfigError("a name is text", _yaml_span(source, key), "write 'name: program'")
    label = key.value[:_SHOWN]
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
    constructor = yaml.constructor.SafeConstructor()
    for key, value in written.value:
        is_number = isinstance(value, yaml.ScalarNode) and value.tag in (
            "tag:yaml.org,2002:int",
            "tag:yaml.org,2002:float",
            "tag:yaml.org,2002:bool",
        )
        if not is_number:
            raise _bad_params(label, _yaml_span(source, value))
        if not isinstance(key, yaml.ScalarNode):
            raise _bad_params(label, _yaml_span(source, key))
        if key.value in found:
            raise ConfigError(f"'{key.value}' stands twice", _yaml_span(source, key), "remove one")
        try:
            number = constructor.construct_object(value)
        except (ValueError, yaml.YAMLError):
            raise _bad_params(label, _yaml_span(source, value)) from None
        found[key.value] = Bound(number, _origin(label), _yaml_span(source, key))
    return found


def _yaml_span(source: Source, written: Any) -> Span:
    start, end = written.start_mark.index, written.end_mark.index
    line_end = source.text.find("\n", start)
    stop = min(end, line_end if line_end >= 0 else end)
    return Span(source, start, max(start + 1, stop))


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
    return ConfigError(f"'{label}' has an unknown key '{key[:40]}'", span, hint)


def _origin(label: str) -> str:
    return f"is bound in the params of '{label}'"


def _are_params(params: object) -> bool:
    return isinstance(params, dict) and all(
        isinstance(k, str) and isinstance(v, bool | int | float) for k, v in params.items()
    )
