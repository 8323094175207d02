"""Counters of the house on small sources, and limits of their figures for the project."""

import json

import house
import pytest
from caches import caches, doors
from openings import odd_openings
from references import dangling
from sources import ROOT, list_paths, tokens_of

CACHES = """\
from functools import cache, lru_cache
import functools

HOMES: WeakValueDictionary[int, Home] = WeakValueDictionary()
_memo = {}
NAMES = {"a": 1}

@cache
def version():
    return 1

@functools.cache
def of_device(device):
    return device

@lru_cache(maxsize=64)
def bounded(text): ...

@memoised("languages", 16)
def languages(text) -> Language: ...

called = lru_cache(_MOST)(bounded)

class Full:
    table: dict[str, int] = field(default_factory=dict)

    def __init__(self):
        self._cleared: dict[str, Plan] = {}
        self._passed: dict[Any, Plan] = {}
        self._stopped: dict[tuple[Any, ...], int] = {}
        self._used = OrderedDict[object, int]()
        self._walk: dict[Node, str] = {}
        self._order: dict[Edit, None] = {}
        self._calls: BoundedCache[Prepared] = BoundedCache("calls", 64)
        use(BoundedCache("others", 2))

    def plan(self, key):
        kept = self._cleared
        if len(kept) >= 16:
            kept.clear()
        kept[key] = 1
        self._keep(self._passed, key)
        if len(self._stopped) < 16:
            self._stopped[key] = 1
        self._used.move_to_end(key)

    def _keep(self, plans, key):
        if len(plans) >= 16:
            plans.clear()

class DiskCache: ...
class PagedCache: ...
"""
OWNER = "class BoundedCache:\n    _younger: dict[Hashable, int] = field(default_factory=dict)\n"
FOUND = {
    "HOMES": "weak",
    "_memo": "unbounded",
    "version": "once",
    "of_device": "unbounded",
    "bounded": "lru_cache 64",
    "languages": "owned",
    "called": "lru_cache _MOST",
    "Full._cleared": "clear-all",
    "Full._passed": "clear-all",
    "Full._stopped": "stops",
    "Full._used": "LRU",
    "Full._calls": "owned",
    "'others'": "owned",
    "DiskCache": "class",
}
REFERENCES = '''\
"""See :func:`own`, :mod:`.other`, :class:`~.other.Base`, ``other.py`` and ``docs/page.md``."""

from typing import NamedTuple

from .other import Base as Renamed, helper
from torch import Tensor

class Row(NamedTuple):
    width: int
    """References such as :attr:`width`, :meth:`_replace` and :meth:`Inner.deep`."""

    class Inner:
        def deep(self):
            """:attr:`Row.width`, :attr:`width`; :meth:`deep`."""

class Child(Renamed):
    def run(self):
        # As :meth:`inherited` and :attr:`assigned`; :func:`helper`, :meth:`Tensor.item`.
        """:func:`~attndsl.other.helper`, :class:`ValueError`, :func:`torch.compile`."""

def own(): ...
'''
OTHER = (
    "class Base:\n    def __init__(self):\n        self.assigned = 1\n"
    "    def inherited(self): ...\n"
    "def helper(): ...\n"
)
PATHS = ("attndsl/here.py", "attndsl/other.py", "docs/page.md")


def found_dangling(text, path="attndsl/here.py"):
    sources = {path: text, "attndsl/other.py": OTHER}
    return [(each.line, each.target) for each in dangling(sources, PATHS)]


def test_caches_and_their_idioms():
    found = caches({"attndsl/a.py": CACHES, "attndsl/owner.py": OWNER})
    assert {cache.name: cache.idiom for cache in found} == FOUND
    assert len(found) == len(FOUND)
    assert {cache.module for cache in found} == {"attndsl.a"}


def test_dicts_are_found_where_another_class_declares_them():
    base = (
        "class Base:\n    _kept: dict[Any, int]\n\n    def keep(self, key):\n"
        "        if len(self._kept) > 9:\n            self._kept.clear()\n"
    )
    made = "class Made(Base):\n    def __init__(self):\n        self._kept = {}\n"
    (found,) = caches({"attndsl/made.py": made, "attndsl/base.py": base})
    assert (found.name, found.idiom, found.holds) == ("Made._kept", "clear-all", "dict[Any, int]")


def test_doors_are_those_listed_and_those_that_keep_prepared_calls():
    listed = (
        "class Repeated:\n    def __init__(self):\n        self._known = None\n"
        "class Job:\n    known: dict[tuple[int, bool], Any] = {}\n"
        "@cache\ndef kept_calls():\n    return {}\n"
    )
    sources = {"attndsl/a.py": CACHES, "attndsl/b.py": listed, "backends/a.py": CACHES}
    assert doors(sources, caches(sources)) == [
        "F attndsl.b: Repeated._known, attndsl.b: Job.known",
        "I attndsl.b: kept_calls",
        "- attndsl.a: Full._calls",
    ]


def test_openings():
    text = (
        '"""Whether it is odd."""\n'
        "class A:\n"
        '    """A class."""\n'
        "    x: int = 1\n"
        '    """Of an attribute."""\n'
        "    def f(self):\n"
        '        """Those."""\n'
        '        """What no docstring is."""\n'
        '    """What stands after no attribute."""\n'
        "def g():\n"
        '    """Ofttimes."""\n'
    )
    found = [(each.line, each.of_attribute) for each in odd_openings({"attndsl/a.py": text})]
    assert sorted(found) == [(1, False), (5, True), (7, False)]


def test_references_that_lead_somewhere():
    assert found_dangling(REFERENCES) == []


@pytest.mark.parametrize(
    "reference",
    [
        ":func:`gone`", ":mod:`.gone`", ":func:`.other.gone`", ":class:`~attndsl.other.Gone`",
        ":func:`..other.helper`", ":attr:`Row.height`", ":meth:`Child.gone`", ":meth:`deep`",
        ":attr:`width`", ":class:`Base`", ":func:`helper.gone`", ":meth:`str.gone`",
    ],
)  # fmt: skip
def test_references_that_lead_nowhere(reference):
    target = reference.split("`")[1]
    expected = [(REFERENCES.count("\n") + 1, target)]
    assert found_dangling(REFERENCES + f"# See {reference}.\n") == expected
    assert found_dangling(REFERENCES + f'def last():\n    """See\n    {reference}."""\n') == [
        (expected[0][0] + 2, target)
    ]


@pytest.mark.parametrize(
    ("name", "leads"),
    [
        ("other.py", True), ("attndsl/other.py", True), ("docs/page.md", True), ("KEY.py", True),
        ("torch/_inductor/ir.py", True), ("gone.py", False), ("ndsl/other.py", False),
        ("docs/gone.md", False),
    ],
)  # fmt: skip
def test_names_of_files(name, leads):
    assert found_dangling(f"# See ``{name}``.\n") == ([] if leads else [(1, name)])


def test_templates_are_put_together_of_others():
    sources = {
        "backends/hopper/templates/forward.py": "# :func:`load`, :func:`factor`, :func:`gone`\n",
        "backends/hopper/templates/produce.py": "def load(): ...\n",
        "backends/hopper/program_functions.py": 'NAMES = ("factor",)\n',
    }
    assert [each.target for each in dangling(sources, ())] == ["gone"]


def test_names_used_more_than_once():
    sources = {
        "attndsl/__init__.py": "class A: ...\n",
        "attndsl/plan.py": "class A:\n    class B: ...\n",
        "attndsl/x/__init__.py": "class B: ...\nclass _A: ...\n",
        "backends/plan.py": "",
    }
    assert house.repeated(house.class_names(sources)) == {"A": ["attndsl", "attndsl.plan"]}
    assert house.repeated(house.module_names(sources)) == {
        "plan": ["attndsl.plan", "attndsl.backends.plan"]
    }


def test_a_string_is_one_token():
    found = tokens_of('x = f\'{a}b\'  # c\n\ny = f"""{\nf\'{b}\'}"""\n')
    assert (found.number, found.comments, found.lines) == (6, ((1, "# c"),), {1, 3, 4})


def test_all_figures_of_a_small_tree():
    long = "def long():\n" + "    f()  # type: ignore[x]\n" * 60
    sources = {
        "attndsl/a.py": (
            '"""What\n\nis here."""\n\nimport os  # fmt: skip\n# Alone.\nTEXT = """a\n\nb"""\n'
            "def wide(a, b, c, d, e, f, g, h, i): ...\ndef public(a, b, c, d, e, f, g, h, i): ...\n"
        ),
        "backends/x/y/b.py": long,
        "grammar/c.py": "# :func:`gone`\n",
    }
    found = house.count(sources, (), {"attndsl/a.py:public"})
    assert {name: found[name] for name in house.HELD} == {
        "doors": 0, "caches": 0, "caches outside the owner": 0,
        "names of classes used more than once": 0, "names of modules used more than once": 0,
        "odd openings of docstrings, %": 100.0, "dangling references": 1,
        "modules at the root of attndsl": 1, "host functions over 60 lines": 1,
        "host signatures over 8 parameters": 1, "fmt: skip": 1, "type: ignore": 60,
        "lines": 72, "tokens": 236,
    }  # fmt: skip
    own = house.product(sources)
    assert house.lines_by_kind(own) == {
        "code": 67, "docstrings": 3, "blank": 1, "comments": 1, "imports": 1
    }  # fmt: skip
    assert found["lines: attndsl"] == 11
    assert found["lines: backends/x"] == 61
    assert house.folders(own)["docstrings"] == {
        "attndsl": "27.3%", "backends/x": "0.0%", "all": "4.2%"
    }  # fmt: skip


def test_public_signatures_are_those_of_the_test_of_limits():
    text = (ROOT / "tests/test_limits.py").read_text("utf-8")
    assert "attndsl/inspection/reference_check.py:compare" in house.public_signatures(text)
    assert house.public_signatures("") == frozenset()


def test_limits_only_go_down():
    limits = dict.fromkeys(house.HELD, 100)
    assert house.excesses(dict.fromkeys(house.HELD, 98), limits) == []
    above = house.excesses({**limits, "caches": 101}, limits)
    assert above == ["caches: 101 is above the limit 100"]
    below = house.excesses({**limits, "doors": 97}, limits)
    assert below == ["doors: 97 is below the limit 100: run python tools/house.py --ratchet"]
    figures = {**limits, "doors": 2, "caches": 101, "lines": 77_730, "tokens": 99}
    found = house.tightened(figures, {**limits, "lines": 80_000})
    assert (found["doors"], found["caches"], found["lines"]) == (2, 100, 77_800)
    assert house.tightened(figures, {})["tokens"] == 1000


def test_what_is_new_is_above_the_limits():
    before = {"attndsl/a.py": '"""A module."""\n'}
    limits = house.tightened(house.count(before, ()), {})
    new = (
        '"""What it is, see :mod:`.gone`."""\n'
        "class New:\n    _found: dict[Any, int] = field(default_factory=dict)\n"
    )
    assert house.excesses(house.count(before, ()), {**limits, "lines": 1, "tokens": 0}) == []
    assert house.excesses(house.count({**before, "attndsl/x/b.py": new}, ()), limits) == [
        "caches: 1 is above the limit 0",
        "caches outside the owner: 1 is above the limit 0",
        "odd openings of docstrings, %: 50.0 is above the limit 0.0",
        "dangling references: 1 is above the limit 0",
        "lines: 4 is below the limit 100: run python tools/house.py --ratchet",
        "tokens: 18 is above the limit 0",
    ]


def test_the_ratchet_writes_no_higher_limit(tmp_path, monkeypatch):
    figures = {**dict.fromkeys(house.HELD, 100), "tokens": 1000}
    monkeypatch.setattr(house, "LIMITS", tmp_path / "limits.json")
    monkeypatch.setattr(house, "read", lambda commit: ({}, (), ()))
    monkeypatch.setattr(house, "count", lambda *given: figures)
    lines = []
    assert house.main(["--ratchet"], lines.append) == 0
    limits = json.loads(house.LIMITS.read_text("utf-8"))
    assert house.excesses(figures, limits) == []
    house.LIMITS.write_text(json.dumps({**limits, "caches": 1, "doors": 120}))
    assert house.main(["--ratchet"], lines.append) == 1
    assert lines[-1] == "caches: 100 is above the limit 1"
    assert json.loads(house.LIMITS.read_text("utf-8")) == {**limits, "caches": 1}


def test_the_command_prints_tables_json_and_lists(monkeypatch):
    sources = {"attndsl/here.py": "# :func:`gone`\n@cache\ndef f(a):\n    '''Of.'''\n"}
    monkeypatch.setattr(house, "read", lambda commit: (sources, PATHS, ()))
    lines = []
    house.main([], lines.append)
    house.main(["--json", "a", "b"], lines.append)
    house.main(["--caches", "--references", "--openings"], lines.append)
    house.main(["--folders"], lines.append)
    assert lines[0].splitlines()[0].split() == ["now"]
    found = json.loads(lines[1])
    assert found["a"] == found["b"]
    assert found["a"]["dangling references"] == 1
    assert lines[2:5] == [
        "attndsl.here:2 f: unbounded", "attndsl/here.py:4 Of.", "attndsl/here.py:1 gone"
    ]  # fmt: skip
    assert lines[5].splitlines()[0].split()[:2] == ["lines", "tokens"]


def test_paths_of_the_working_tree():
    paths = list_paths(None)
    assert {"tools/house.py", "docs/README.md"} <= paths
    assert not [path for path in paths if path.startswith((".git/", ".venv/", "build/"))]


def test_the_project_is_within_its_limits():
    complaints = house.excesses(house.count(*house.read(None)), house.read_limits())
    assert not complaints, "\n".join(complaints)
