"""Count what makes the house hard to read and to change, at any commit, and hold it by limits.

``python tools/house.py f354b1a5 HEAD`` prints one column a commit; without commits it counts the
working tree. ``--json`` prints the same as JSON. These list what is counted, with its places:
``--doors``, ``--caches``, ``--duplicates``, ``--openings``, ``--references`` and ``--folders``.

``--ratchet`` writes the figures of the working tree into ``house_limits.json``, where these are
lower than the limits there. It raises no limit: who means to raise one edits the file, and says why
in the commit. A test fails if a figure is above its limit, or so far below that the limit is stale.

What is counted in ``attndsl/`` and ``backends/``, tests and other folders left out:

- *Doors* and *caches*: see ``caches.py``.
- *Names used more than once* of classes are those of two or more classes at the top of a module. Of
  modules they are those of two or more files, whatever folders these are in; ``__init__`` and
  ``__main__`` do not count.
- *Odd openings*: see ``openings.py``. Strings under attributes count.
- *Dangling references*: see ``references.py``. Those of ``grammar/`` and ``tools/`` count too.
- *Lines* are of docstrings, comments, blank or code. Imports are among the code, and blank lines
  within a docstring among the docstrings.
- *Tokens* are names, operators, numbers and strings, without docstrings.
- *Modules at the root* are the files of ``attndsl/`` itself, ``__init__`` and ``__main__`` too.
- *Host functions* and *signatures* that are long: see ``tests/test_limits.py``, whose list
  ``PUBLIC`` names the signatures that do not count.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import caches
import openings
import references
from sources import (
    FOLDERS,
    docstrings_of,
    lines_of,
    lines_of_function,
    list_paths,
    module_of,
    over,
    parameters_of,
    parse,
    read_commit,
    read_file,
    statements_of,
    table,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from sources import Sources

    Figure = int | float

LIMITS = Path(__file__).with_name("house_limits.json")
MOST_LINES = 60
"""Of a function of the host, without its docstring."""
MOST_PARAMETERS = 8
"""Of a function of the host, without ``self``, ``cls`` and autograd's ``ctx``."""
STEPS = {"lines": 100, "tokens": 1000}
"""Limits of these are multiples of that, so that not each small change is one of limits."""
SLACK = 0.02
"""The share of a limit that a figure may be below it."""
HELD = (
    "doors",
    "caches",
    "caches outside the owner",
    "names of classes used more than once",
    "names of modules used more than once",
    "odd openings of docstrings, %",
    "dangling references",
    "modules at the root of attndsl",
    "host functions over 60 lines",
    "host signatures over 8 parameters",
    "fmt: skip",
    "type: ignore",
    "lines",
    "tokens",
)
"""Figures that have a limit."""
_PUBLIC = "tests/test_limits.py"


def read(commit: str | None) -> tuple[Sources, Collection[str], frozenset[str]]:
    """The sources of a commit, the paths of all its files, and its public signatures."""
    sources = read_commit(commit, (*FOLDERS, "grammar", "tools"))
    return sources, list_paths(commit), public_signatures(read_file(commit, _PUBLIC))


def public_signatures(text: str) -> frozenset[str]:
    """The list ``PUBLIC`` of the test of limits, whose text this is."""
    for node in parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def product(sources: Sources) -> dict[str, str]:
    """The files of ``attndsl/`` and ``backends/``."""
    return {p: text for p, text in sources.items() if p.partition("/")[0] in FOLDERS}


def class_names(sources: Sources) -> dict[str, list[str]]:
    """Modules that each name of a class at the top of a module is in."""
    found = defaultdict(list)
    for path, text in sources.items():
        for node in parse(text).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module_of(path))
    return dict(found)


def module_names(sources: Sources) -> dict[str, list[str]]:
    """Modules that have each file name."""
    found = defaultdict(list)
    for path in sources:
        name = PurePosixPath(path).stem
        if name not in ("__init__", "__main__"):
            found[name].append(module_of(path))
    return dict(found)


def repeated(names: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The names that are used more than once."""
    return {name: places for name, places in sorted(names.items()) if len(places) > 1}


def lines_by_kind(sources: Sources) -> dict[str, int]:
    """Lines that are code, of docstrings, blank and comments; and imports, which are code too."""
    found = dict.fromkeys(("code", "docstrings", "blank", "comments", "imports"), 0)
    for text in sources.values():
        tokens = tokens_of(text)
        documented = _lines(docstring.node for docstring in docstrings_of(text))
        code = tokens.lines - documented
        comments = {line for line, _ in tokens.comments} - code - documented
        found["code"] += len(code)
        found["docstrings"] += len(documented)
        found["comments"] += len(comments)
        found["blank"] += text.count("\n") - len(code | documented | comments)
        imports = (n for n in statements_of(text) if isinstance(n, ast.Import | ast.ImportFrom))
        found["imports"] += len(_lines(imports))
    return found


def tokens_in(sources: Sources) -> int:
    """Tokens of all files, without docstrings."""
    texts = sources.values()
    return sum(tokens_of(text).number - len(docstrings_of(text)) for text in texts)


def by_folder(sources: Sources) -> dict[str, dict[str, str]]:
    """The files of each folder, by its name: of ``attndsl`` and ``backends`` each a level deep."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path, text in sorted(sources.items()):
        found["/".join(path.split("/")[:-1][:2])][path] = text
    return dict(sorted(found.items()))


def folders(sources: Sources) -> dict[str, dict[str, object]]:
    """Lines, tokens and shares of the kinds of lines of each folder, a column each."""
    columns: dict[str, dict[str, object]] = defaultdict(dict)
    for folder, files in {**by_folder(sources), "all": sources}.items():
        lines = lines_of(files)
        columns["lines"][folder] = lines
        columns["tokens"][folder] = tokens_in(files)
        for kind, number in lines_by_kind(files).items():
            columns[kind][folder] = f"{100 * number / max(1, lines):.1f}%"
    return columns


@contextmanager
def uncollected() -> Iterator[None]:
    """Do without collections of garbage: syntax trees are none, and take half of the time so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def count(
    sources: Sources, paths: Collection[str], public: Collection[str] = ()
) -> dict[str, Figure]:
    """All figures, by what they are figures of.

    Args:
        sources: Files of the product, and others whose references are to be resolved.
        paths: All files that references may name.
        public: Signatures that may have any number of parameters, as ``FILE:NAME``.
    """
    own = product(sources)
    found = caches.caches(own)
    idioms = [cache.idiom.partition(" ")[0] for cache in found]
    classes, modules = class_names(own), module_names(own)
    lines, kinds = lines_of(own), lines_by_kind(own)
    documented = openings.number_of_docstrings(own)
    odd = sum(1 for _ in openings.odd_openings(own))
    wide = [name for name, _ in over(own, parameters_of, MOST_PARAMETERS) if name not in public]
    root = [path for path in own if path.startswith("attndsl/") and path.count("/") == 1]
    return {
        "doors": len(caches.doors(own, found)),
        "caches": len(found),
        "caches outside the owner": sum(not cache.is_owned for cache in found),
        **{f"caches: {idiom}": idioms.count(idiom) for idiom in sorted(set(idioms))},
        "names of classes": len(classes),
        "names of classes used more than once": len(repeated(classes)),
        "names of modules": len(modules),
        "names of modules used more than once": len(repeated(modules)),
        "docstrings": documented,
        "odd openings of docstrings, %": _percent(odd, documented),
        "dangling references": sum(1 for _ in references.dangling(sources, paths)),
        "modules at the root of attndsl": len(root),
        "host functions over 60 lines": len(list(over(own, lines_of_function, MOST_LINES))),
        "host signatures over 8 parameters": len(wide),
        "fmt: skip": _comments(own, "# fmt: skip"),
        "type: ignore": _comments(own, "# type: ignore"),
        "lines": lines,
        **{f"lines: {kind}, %": _percent(number, lines) for kind, number in kinds.items()},
        **{f"lines: {folder}": lines_of(files) for folder, files in by_folder(own).items()},
        "tokens": tokens_in(own),
        **{f"tokens: {folder}": tokens_in(files) for folder, files in by_folder(own).items()},
    }


def excesses(figures: Mapping[str, Figure], limits: Mapping[str, Figure]) -> list[str]:
    """Complaints about figures above their limits, and about limits that are stale."""
    found = []
    for name in HELD:
        figure, limit = figures[name], limits[name]
        if figure > limit:
            found.append(f"{name}: {figure} is above the limit {limit}")
        elif figure < limit * (1 - SLACK):
            found.append(
                f"{name}: {figure} is below the limit {limit}: run python tools/house.py --ratchet"
            )
    return found


def tightened(figures: Mapping[str, Figure], limits: Mapping[str, Figure]) -> dict[str, Figure]:
    """Limits for these figures, none above the present ones; figures without a limit get one."""
    found = {}
    for name in HELD:
        step = STEPS.get(name, 1)
        figure = figures[name] if step == 1 else -(-figures[name] // step) * step
        found[name] = min(figure, limits.get(name, figure))
    return found


def read_limits() -> dict[str, Figure]:
    """The limits of the working tree; none where the file is not there."""
    return json.loads(LIMITS.read_text("utf-8")) if LIMITS.is_file() else {}


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / max(1, whole), 1)


def _comments(sources: Sources, start: str) -> int:
    """Comments that begin so."""
    comments = (text for each in sources.values() for _, text in tokens_of(each).comments)
    return sum(start in text for text in comments)


def _list_duplicates(sources: Sources) -> list[str]:
    return [
        f"{kind} {name}: {', '.join(places)}"
        for kind, names in (("class", class_names(sources)), ("module", module_names(sources)))
        for name, places in repeated(names).items()
    ]


def listings(sources: Sources, paths: Collection[str]) -> dict[str, Callable[[], list[str]]]:
    """Makers of the lists of what is counted, by their options."""
    own = product(sources)
    return {
        "doors": lambda: caches.doors(own, caches.caches(own)),
        "caches": lambda: [
            f"{cache.module}:{cache.line} {cache.name}: {cache.idiom}"
            for cache in caches.caches(own)
        ],
        "duplicates": lambda: _list_duplicates(own),
        "openings": lambda: [f"{o.path}:{o.line} {o.text}" for o in openings.odd_openings(own)],
        "references": lambda: [
            f"{each.path}:{each.line} {each.target}" for each in references.dangling(sources, paths)
        ],
        "folders": lambda: table(folders(own)).splitlines(),
    }


def main(arguments: Sequence[str] | None = None, echo: Callable[[str], object] = print) -> int:
    """Print the table, or the lists that are asked for, or write the limits."""
    parser = argparse.ArgumentParser(description="Count what makes the house hard to change.")
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="the working tree if none")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--ratchet", action="store_true", help="lower the limits to the figures")
    for name in listings({}, ()):
        parser.add_argument(f"--{name}", action="store_true", help=f"list {name}")
    options = parser.parse_args(arguments)
    if options.ratchet:
        return _ratchet(echo)
    asked = [name for name in listings({}, ()) if getattr(options, name)]
    columns = {}
    for commit in options.commits or (None,):
        sources, paths, public = read(commit)
        lists = listings(sources, paths)
        for name in asked:
            echo("\n".join(lists[name]()))
        if not asked:
            columns[commit or "now"] = count(sources, paths, public)
    if columns:
        echo(json.dumps(columns, indent=1) if options.json else table(columns))
    return 0


def _ratchet(echo: Callable[[str], object]) -> int:
    """Write lower limits; 1 where a figure is above its limit, which stays as it is."""
    figures, limits = count(*read(None)), read_limits()
    found = tightened(figures, limits)
    LIMITS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    above = [each for each in excesses(figures, found) if "above" in each]
    for line in above or [f"{len(found)} limits, none raised"]:
        echo(line)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
