"""The table of all caches, from the places in the code that make them.

``--write`` puts it into ``docs/dev/architecture.md``; without it the table is printed.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("attndsl", "backends")
PAGE = ROOT / "docs" / "dev" / "architecture.md"
BEGIN, END = "<!-- caches: begin (tools/cache_table.py --write) -->", "<!-- caches: end -->"
KINDS = ("memoised", "BoundedCache", "RecentEntries", "KeptLists")


class Made(NamedTuple):
    """A cache as the code makes it."""

    name: str
    key: str
    """Words for the key of a cache's entries; empty if the code does not say it."""
    module: str
    bound: str
    reasons: str


def numbers_in(text: str) -> dict[str, str]:
    """Constants of a module by their names."""
    return {
        statement.targets[0].id: ast.unparse(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }


def caches_in(text: str, module: str, others: dict[str, str]) -> list[Made]:
    """Caches that a module makes, in the order of its text; ``others`` are constants to import."""
    tree, numbers = ast.parse(text), others | numbers_in(text)
    functions = {
        id(decorator): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
            name, _, key = str(ast.literal_eval(node.args[0])).partition(" by ")
            if (function := functions.get(id(node))) is not None:
                names = [argument.arg for argument in function.args.args]
                key = ", ".join(names).replace("_", " ") or "nothing"
            bound, *reasons = [ast.unparse(argument) for argument in node.args[1:]] or ["64"]
            bound = {"None": "few"}.get(bound, numbers.get(bound, bound))
            words = [reason.rpartition(".")[2].lower() for reason in reasons]
            found.append((node.lineno, Made(name, key, module, bound, ", ".join(words))))
    return [made for _, made in sorted(found)]


def caches() -> list[Made]:
    """All caches of the package, by module."""
    texts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    numbers = {name: n for text in texts.values() for name, n in numbers_in(text).items()}
    return [made for module, text in texts.items() for made in caches_in(text, module, numbers)]


def table_of(found: list[Made]) -> str:
    """Caches as a table of the page."""
    lines = ["| what is kept | by | module | bound | emptied for |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(made._replace(module=f'`{made.module}`'))} |" for made in found]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description="The table of all caches.")
    parser.add_argument("--write", action="store_true", help="into docs/dev/architecture.md")
    table = table_of(caches())
    if not parser.parse_args(arguments).write:
        print(table)
        return
    before, begin, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        parser.error(f"{PAGE} has not both {BEGIN!r} and {END!r}")
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
