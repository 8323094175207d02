"""Files, functions and parameter lists stay short; lists of those that are not may only shrink."""

import ast
import functools
import re
from pathlib import Path

import counts
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("attndsl", "backends", "grammar", "tools")
MOST_FILE_LINES = 600
MOST_LINES = 60
"""Of a function, without its docstring."""
MOST_PARAMETERS = 8
"""Of a function, without ``self``, ``cls`` and autograd's ``ctx``."""

MOST_DEVICE_PARAMETERS = 12
"""Of a device function, but not of an entry: the launcher takes what it takes."""

LONG_FUNCTIONS = {
    "attndsl/attention.py:Attention._called": 131,
}
MANY_PARAMETERS = {
    "attndsl/cli/plotting.py:plot": 10,
    "attndsl/cli/running.py:run": 10,
    "attndsl/flex/block_mask.py:_create": 9,
    "attndsl/picture/data.py:picture_data": 16,
}
PUBLIC = {
    "attndsl/analysis.py:Analysis.tiles",
    "attndsl/analysis.py:Analysis.explain",
    "attndsl/analysis.py:Analysis.reach",
    "attndsl/analysis.py:Analysis.plot",
    "attndsl/analysis.py:Analysis.call_of_lengths",
    "attndsl/api.py:verify",
    "attndsl/attention.py:Attention._called",
    "attndsl/comparing.py:compare",
    "attndsl/cli/__init__.py:build",
    "attndsl/cli/__init__.py:explain",
    "attndsl/cli/__init__.py:show",
    "attndsl/cli/__init__.py:run",
    "attndsl/cli/__init__.py:plot",
    "attndsl/cli/__init__.py:warmup",
    "attndsl/compat/flash.py:flash_attn_func",
    "attndsl/compat/flash.py:flash_attn_varlen_func",
    "attndsl/compat/flash.py:flash_attn_with_kvcache",
    "attndsl/compiled.py:Compiled.backward",
    "attndsl/flex/attention.py:flex_attention",
    "attndsl/flex/block_mask.py:create_block_mask",
    "attndsl/serving.py:Serving.serve",
    "attndsl/nn.py:MultiheadAttention.__init__",
    "attndsl/views.py:Views.mask",
}
"""Signatures that users write, where each parameter is an option of its own."""

FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def functions_of(text):
    """Each function of the host by its qualified name; device code has limits of its own."""
    found = {}

    def visit(node, names):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                within = (*names, child.name)
                if not isinstance(child, ast.ClassDef) and not is_device_code(child):
                    found[".".join(within)] = child
                visit(child, within)
            else:
                visit(child, names)

    visit(ast.parse(text), ())
    return found


def is_device_code(function):
    return any(
        ast.unparse(decorator).partition("(")[0] in ("triton.jit", "gluon.jit")
        for decorator in function.decorator_list
    )


def lines_of(function):
    """Lines from ``def`` on, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def parameters_of(function):
    own = [*function.args.posonlyargs, *function.args.args]
    implied = bool(own) and own[0].arg in ("self", "cls", "ctx")
    return len(own) - implied + len(function.args.kwonlyargs)


def over(measure, most):
    """What ``measure`` says of each function that is over a limit."""
    found = {}
    for path, text in FILES.items():
        for name, function in functions_of(text).items():
            if measure(function) > most:
                found[f"{path}:{name}"] = measure(function)
    return found


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
    check(over(lines_of, MOST_LINES), LONG_FUNCTIONS, "lines", MOST_LINES)


def test_functions_have_few_parameters():
    found = over(parameters_of, MOST_PARAMETERS)
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
    assert {name: (lines_of(f), parameters_of(f)) for name, f in found.items()} == {
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


ODD = re.compile(r"(What|Whether|Which|Of|As|Where|How|When|Why|Who)\b")
"""Words that open no noun phrase and no imperative."""
EXEMPT = re.compile(
    r"backends/(emit|triton)/templates/|backends/hopper/templates/diagonals\.py|tools/"
)
"""Device code, its records and tools: their openings are not all in order yet."""


@pytest.mark.parametrize("path", [path for path in FILES if not EXEMPT.match(path)])
def test_docstrings_open_with_a_noun_or_an_imperative(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(FILES[path])) if isinstance(node, kinds)]
    odd = [text for text in map(ast.get_docstring, nodes) if text and ODD.match(text)]
    assert not odd, odd[0].splitlines()[0]
