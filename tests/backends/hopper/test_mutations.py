"""The defects that tests put into kernels' texts: found however a call's arguments are written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.kernel_text import module_of
from support.mutation import (
    before,
    drop,
    early,
    is_noticed,
    number_of,
    swap,
    with_constants,
)  # fmt: skip

TEXT = """
SIZE = gl.constexpr(8)
HALF = gl.constexpr(SIZE // 2)
def load(place, stage):
    wait(place.full.index(stage), stage & 1)
    return tiles + stage
def store(full, stage):
    wait(full.index(0), 0)
    wait(full.index(stage), stage ^ 1, count=1)
    if stage > 1:
        leave(stage)
    else:
        leave(0)
"""


def lines_of(mutation):
    """What is in the text alone, and what is in the changed one alone."""
    same = swap("_a + _b", "_a + _b")(TEXT)
    plain, changed = same.splitlines(), mutation(TEXT).splitlines()
    gone = [line.strip() for line in plain if line not in changed]
    return gone, [line.strip() for line in changed if line not in plain]


@pytest.mark.parametrize(
    ("mutation", "gone", "new"),
    [
        (drop("wait(full.index(...), ...)", "load"),
         ["wait(place.full.index(stage), stage & 1)"], ["pass"]),
        (swap("wait(full.index(_n), _x ^ 1, ...)", "wait(full.index(_n), _x)"),
         ["wait(full.index(stage), stage ^ 1, count=1)"], ["wait(full.index(stage), stage)"]),
        (swap("wait(full.index(_n), ...)", "wait(full.index(_n), 7)", nth=1),
         ["wait(place.full.index(stage), stage & 1)"], ["wait(place.full.index(stage), 7)"]),
        (swap("wait(_bar, *_rest)", "wait(stage, *_rest)", "store"),
         ["wait(full.index(0), 0)"], ["wait(stage, 0)"]),
        (swap("if stage > _n: ...", "leave(_n)"),
         ["if stage > 1:", "leave(stage)", "else:", "leave(0)"], ["leave(1)"]),
        (before("return _all", "note(_all)"), [], ["note(tiles + stage)"]),
        (early("leave(stage)", to="wait(full.index(0), ...)"), ["leave(stage)"],
         ["leave(stage)", "pass"]),
        (lambda text: with_constants(text, {"SIZE": 4}), ["SIZE = gl.constexpr(8)"],
         ["SIZE = gl.constexpr(4)"]),
    ],
)  # fmt: skip
def test_a_mutation_changes_what_it_says(mutation, gone, new):
    found = lines_of(mutation)
    assert [*map(sorted, found)] == [sorted(gone), sorted(new)]


@pytest.mark.parametrize(
    "mutation",
    [
        drop("wait(empty.index(...), ...)"),
        drop("leave(...)", "load"),
        drop("leave(...)", nth=3),
        swap("wait(full.index(...))", "leave(0)"),
        swap("full - stage", "0"),
        early("leave(9)", to="leave(0)"),
        lambda text: with_constants(text, {"WIDTH": 4}),
    ],
)
def test_a_mutation_that_changes_nothing_is_an_error(mutation):
    with pytest.raises(LookupError):
        mutation(TEXT)


def test_what_a_text_has():
    assert number_of(TEXT, "wait(full.index(...), ...)") == 3
    assert number_of(TEXT, "wait(full.index(...))") == 0


def test_errors_of_the_machine_alone_are_noticed():
    def fails(seed):
        assert seed < 3

    def breaks(seed):
        raise LookupError(seed)

    assert is_noticed(fails, 3)
    assert not is_noticed(fails, 2)
    with pytest.raises(LookupError):
        is_noticed(breaks, 1)


RECORD = """
import gl
from typing import NamedTuple
SIZE: int = gl.constexpr(8)
HALF = gl.constexpr(SIZE // 2)
LAYOUT = SIZE.type.layout
class Tiles(NamedTuple):
    size: int
    def larger(self):
        return self.size + HALF
"""


def test_constants_are_those_of_the_machine():
    language = SimpleNamespace(constexpr=lambda value: value)
    module = module_of(RECORD, {"gl": language}, {"SIZE": 6, "WIDTH": 3})
    assert (module["HALF"], module["LAYOUT"]) == (3, None)
    assert module["Tiles"](1).larger() == 4
