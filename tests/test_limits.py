"""Files, functions and parameter lists stay short; lists of those that are not may only shrink."""

import re

import counts
import pytest
from house import MOST_LINES, MOST_PARAMETERS
from openings import odd_openings
from sources import functions_of, lines_of_function, over, parameters_of, read_commit

MOST_FILE_LINES = 600
MOST_DEVICE_PARAMETERS = 12
"""Of a device function, but not of an entry: the launcher takes what it takes."""

LONG_FUNCTIONS = {}
MANY_PARAMETERS = {}
PUBLIC = {
    "attndsl/inspection/analysis.py:Analysis.tiles",
    "attndsl/inspection/analysis.py:Analysis.explain",
    "attndsl/inspection/analysis.py:Analysis.reach",
    "attndsl/inspection/analysis.py:Analysis.plot",
    "attndsl/inspection/analysis.py:Analysis.call_of_lengths",
    "attndsl/api.py:verify",
    "attndsl/inspection/reference_check.py:compare",
    "attndsl/cli/__init__.py:build",
    "attndsl/cli/__init__.py:explain",
    "attndsl/cli/__init__.py:show",
    "attndsl/cli/__init__.py:run",
    "attndsl/cli/__init__.py:plot",
    "attndsl/cli/__init__.py:warmup",
    "attndsl/compat/flash.py:flash_attn_func",
    "attndsl/compat/flash.py:flash_attn_varlen_func",
    "attndsl/compat/flash.py:flash_attn_with_kvcache",
    "attndsl/call/attention_base.py:Compiled.backward",
    "attndsl/flex/flex_call.py:flex_attention",
    "attndsl/flex/block_mask.py:create_block_mask",
    "attndsl/serving/serve_call.py:Serving.serve",
    "attndsl/nn.py:MultiheadAttention.__init__",
    "attndsl/inspection/dense_views.py:DenseViews.mask",
}
"""Signatures that users write, where each parameter is an option of its own."""

FILES = read_commit(None, ("attndsl", "backends", "grammar", "tools"))


def check(found, listed, what, most):
    for name in sorted(found.keys() - listed.keys()):
        raise AssertionError(f"{name} has {found[name]} {what}: at most {most}")
    for name in sorted(listed.keys() - found.keys()):
        raise AssertionError(f"{name} is within the limit, or gone: take it out of the list")
    for name, number in sorted(found.items()):
        assert number <= listed[name], f"{name} has grown to {number} {what}"


@pytest.mark.parametrize("path", FILES)
def test_files_are_short(path):
    lines = FILES[path].count("\n")
    assert lines <= MOST_FILE_LINES, f"{path} has {lines} lines"


def test_functions_are_short():
    check(dict(over(FILES, lines_of_function, MOST_LINES)), LONG_FUNCTIONS, "lines", MOST_LINES)


def test_functions_have_few_parameters():
    found = dict(over(FILES, parameters_of, MOST_PARAMETERS))
    gone = sorted(PUBLIC - found.keys())
    assert not gone, f"no longer over the limit: {gone}"
    others = {name: number for name, number in found.items() if name not in PUBLIC}
    check(others, MANY_PARAMETERS, "parameters", MOST_PARAMETERS)


def test_device_functions_have_few_parameters():
    found = counts.device_functions(FILES)
    entries = counts.entries(found)
    assert len(found) > 100
    assert len(entries) > 10
    for function in found:
        if function not in entries:
            assert function.parameters <= MOST_DEVICE_PARAMETERS, function


def test_what_is_counted():
    text = (
        "class A:\n"
        "    def own(self, a, *more, b=1, **rest):\n"
        '        """One.\n\n        Two.\n        """\n'
        "        def inner(c, /, d):\n"
        "            return c\n"
        "        return inner\n"
        "@triton.jit\n"
        "def kernel(a, b):\n    pass\n"
        "@gluon.jit(noinline=True)\n"
        "def other(a, b):\n    pass\n"
    )
    found = functions_of(text)
    assert {name: (lines_of_function(f), parameters_of(f)) for name, f in found.items()} == {
        "A.own": (4, 2), "A.own.inner": (2, 2)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": 70, "b": 61}, "b has 61 lines: at most 60"),
        ({}, "a is within the limit, or gone"),
        ({"a": 71}, "a has grown to 71 lines"),
    ],
)
def test_lists_may_only_shrink(found, message):
    check({"a": 70}, {"a": 70}, "lines", 60)
    check({"a": 69}, {"a": 70}, "lines", 60)
    with pytest.raises(AssertionError, match=message):
        check(found, {"a": 70}, "lines", 60)


EXEMPT = re.compile(
    r"backends/(emit|triton)/templates/|backends/hopper/templates/diagonals\.py|tools/"
)
"""Device code, its records and tools: their openings are not all in order yet."""


@pytest.mark.parametrize("path", [path for path in FILES if not EXEMPT.match(path)])
def test_docstrings_open_with_a_noun_or_an_imperative(path):
    odd = [
        f"{path}:{opening.line} {opening.text}"
        for opening in odd_openings({path: FILES[path]})
        if not opening.of_attribute
    ]
    assert not odd, odd[0]
