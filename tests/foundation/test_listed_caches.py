"""All caches are of the kinds that their owner knows, and stand in a table of the docs."""

import ast

import cache_table
import pytest

LEFT = {
    "attndsl/parallel/context_parallel.py": 1,  # Ranks agreed on it: none forgets it alone.
    "backends/kernels/tile_list_cache.py": 1,  # A kind of its own.
}
"""Caches of other kinds by file. The numbers may only fall."""
OWNER = "attndsl/foundation/caches.py"


def others_in(text):
    """Caches of other kinds: functools' decorators, and containers that are emptied."""
    for node in ast.walk(ast.parse(text)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            names = [alias.name for alias in node.names]
        if {"cache", "lru_cache"} & set(names) and "functools" in ast.unparse(node):
            yield node
        if isinstance(node, ast.If | ast.While) and "len(" in ast.unparse(node.test):
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            if {"clear", "popitem"} & {getattr(call.func, "attr", "") for call in calls}:
                yield node


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("from functools import cache, lru_cache", 1),
        ("import functools\n@functools.lru_cache(8)\ndef f(x): pass", 1),
        ("if len(kept) >= 8:\n    kept.clear()", 1),
        ("while len(kept) > 8 or size() > 9:\n    kept.popitem(last=False)", 1),
        ("from functools import partial\nself.cache.clear()\nif len(x) > 8:\n    x.append(1)", 0),
    ],
)
def test_caches_of_other_kinds_are_seen(text, number):
    assert len(list(others_in(text))) == number


def test_there_are_no_caches_of_other_kinds():
    found = {
        path.relative_to(cache_table.ROOT).as_posix(): len(list(others_in(path.read_text("utf-8"))))
        for folder in cache_table.FOLDERS
        for path in (cache_table.ROOT / folder).rglob("*.py")
    }
    assert {path: number for path, number in found.items() if number and path != OWNER} == LEFT


def test_names_are_given_once_and_keys_are_named():
    found = cache_table.caches()
    names = [made.name for made in found]
    assert len(names) == len(set(names)) > 50
    assert all(made.key and (made.bound == "few" or int(made.bound) > 1) for made in found)


def test_the_page_has_the_caches_of_today():
    table = cache_table.table_of(cache_table.caches())
    assert table in cache_table.PAGE.read_text("utf-8"), "run python tools/cache_table.py --write"
