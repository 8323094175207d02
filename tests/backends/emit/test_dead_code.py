"""What is left of a generated module: what its entries need, as it was written."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.backends.emit.conditions import decide
from attndsl.backends.emit.dead_code import only_needed
from attndsl.backends.kernels.module_headers import FIRST_LINE, TAIL
from attndsl.errors import UnsupportedError

from kernel_cases import CASES

HEAD = """
YES = tl.constexpr(True)
NO = tl.constexpr(False)
SIZE = tl.constexpr(64)
KIND = tl.constexpr('offset')
"""


def left_of(body: str) -> str:
    """What is left of statements of a function ``entry(P, x)`` with the constants of ``HEAD``."""
    lines = "".join(f"    {line}\n" for line in dedent(body).strip().split("\n"))
    text = only_needed(f"{HEAD}\n\ndef entry(P, x):\n{lines}", ["entry"])
    return dedent(text.partition("def entry(P, x):\n")[2]).strip()


BODIES = {
    "a branch that is taken": ("if YES:\n    f(1)\nelse:\n    f(2)", "f(1)"),
    "the other one": ("if NO:\n    f(1)\nelse:\n    f(2)\n    f(3)", "f(2)\nf(3)"),
    "none": ("if NO:\n    f(1)\nf(2)", "f(2)"),
    "nothing at all": ("if NO:\n    f(1)", "pass"),
    "chains": (
        "if NO:\n    f(1)\nelif P:\n    f(2)\nelif YES:\n    f(3)\nelse:\n    f(4)",
        "if P:\n    f(2)\nelse:\n    f(3)",
    ),
    "an if below else is no elif": (
        "if P:\n    f(1)\nelse:\n    if YES:\n        f(2)\n    f(3)",
        "if P:\n    f(1)\nelse:\n    f(2)\n    f(3)",
    ),
    "comparisons": (
        'if SIZE == 64 and KIND != "index" and SIZE < x:\n    f(1)',
        "if SIZE < x:\n    f(1)",
    ),
    "what is left reads well": (
        "if (P and YES) or not (x == 1 and YES) or NO:\n    f(1)",
        "if P or not (x == 1):\n    f(1)",
    ),
    "and in or": (
        "if (P and YES and x == 1) or (NO or x == 2):\n    f(1)",
        "if (P and x == 1) or x == 2:\n    f(1)",
    ),
    "the last branches": (
        "if P:\n    f(1)\nelif x == 1:\n    y = 1\nelse:\n    y = 2",
        "if P:\n    f(1)",
    ),
    "the first branches": (
        "if P:\n    y = 1\nelif x == 1:\n    f(1)\nelse:\n    y = 2",
        "if P:\n    pass\nelif x == 1:\n    f(1)",
    ),
    "opposites": ("if (P and YES) or (not P and YES):\n    f(1)", "f(1)"),
    "calls are made": ("if f(x) and NO:\n    f(1)", "if f(x) and NO:\n    f(1)"),
    "expressions": (
        "f(1 if YES else 2, (x + 1) if NO else (x + 2), [x] * (2 if YES else 1))",
        "f(1, x + 2, [x] * 2)",
    ),
    "expressions that are left": ("f(1 if P and YES else 2)", "f(1 if P else 2)"),
    "behind a return": ("if YES:\n    return f(1)\nf(2)\nreturn 3", "return f(1)"),
    "comments": (
        "# Of all.\nif YES:\n    # Of one.\n    f(1)  # Beside.\n# Of none.\nif NO:\n    # Gone.\n"
        "    f(2)\n\n# Of the last.\nf(3)",
        "# Of all.\n# Of one.\nf(1)  # Beside.\n\n# Of the last.\nf(3)",
    ),
    "lines of a call": ("if YES:\n    f(\n        1,\n        2,\n    )", "f(\n    1,\n    2,\n)"),
    "locals": (
        "y = x + 1\nz = y * 2\nw = f(x)\nfor i in range(3):\n    y = y + i\nf(y)",
        "y = x + 1\nw = f(x)\nfor i in range(3):\n    y = y + i\nf(y)",
    ),
    "what is assigned again": ("y = 0\nif YES:\n    y = f(x)\nf(y)", "y = f(x)\nf(y)"),
    "what is read before": ("y = 0\nf(y)\ny = 1\nf(y)", "y = 0\nf(y)\ny = 1\nf(y)"),
    "loops of nothing": ("y = 0\nfor i in range(3):\n    y += i\nf(x)", "f(x)"),
    "loops that are computed": ("while f(x) < 3:\n    y = 1", "while f(x) < 3:\n    pass"),
    "a local of a flag's name": ("NO = f(x)\nif NO:\n    f(1)", "NO = f(x)\nif NO:\n    f(1)"),
    "constants of its own": ("WIDTH: tl.constexpr = SIZE // 2\nf(x)", "f(x)"),
}


@pytest.mark.parametrize("name", BODIES)
def test_statements(name):
    body, expected = BODIES[name]
    assert left_of(body) == expected
    assert left_of(expected) == expected


MODULE = '''"""About the module."""

import os
from typing import NamedTuple

import triton
from library import (
    first, second,
)
from library import unused

# About sizes.
SIZE = tl.constexpr(64)
UNREAD = tl.constexpr(3)
FLAG = tl.constexpr(True)
HALF = tl.constexpr(SIZE // 2)

LAST = tl.constexpr(2)


class Pair(NamedTuple):
    """Two."""

    left: object


class Triple(NamedTuple):
    left: object


# About the helper.
@triton.jit
def helper(x, unread, PARTIAL: tl.constexpr, other):
    """Twice, or once."""
    if PARTIAL:
        if PARTIAL and FLAG:
            return first(x) * HALF
    return x


@triton.jit
def idle(x, given):
    if not FLAG:
        first(x)


@triton.jit
def uncalled(x):
    return helper(x, x, True, second(x))


@triton.jit
def entry(x, y, z):
    """About the entry."""
    pair = Pair(
        x,
    )
    unread = Triple(y)
    idle(x, unread)
    return helper(
        pair.left, unread, PARTIAL=False, other=y + 1
    ) + helper(pair.left, y, LAST, x)
'''
LEFT = '''"""About the module."""

from typing import NamedTuple

import triton
from library import first

# About sizes.
SIZE = tl.constexpr(64)
HALF = tl.constexpr(SIZE // 2)

LAST = tl.constexpr(2)


class Pair(NamedTuple):
    """Two."""

    left: object


# About the helper.
@triton.jit
def helper(x, PARTIAL: tl.constexpr):
    """Twice, or once."""
    if PARTIAL:
        return first(x) * HALF
    return x


@triton.jit
def entry(x, y, z):
    """About the entry."""
    pair = Pair(
        x,
    )
    return helper(pair.left, PARTIAL=False) + helper(pair.left, LAST)
'''


def test_a_module():
    assert only_needed(MODULE, ["entry"]) == LEFT
    assert only_needed(LEFT, ["entry"]) == LEFT


def test_entries_and_functions_that_are_handed_over_keep_their_parameters():
    text = "def inner(x, y):\n    return x\n\n\ndef entry(x, y):\n    run(inner)\n"
    assert only_needed(text, ["entry"]) == text
    both = only_needed(text + "\n\ndef other(x):\n    return inner(x, 1)\n", ["entry", "other"])
    assert "return inner(x, 1)" in both


def test_what_warpgroups_run_is_called():
    text = dedent("""
        def work(x, y):
            f(x)


        def entry(x, y):
            run([(work, (x, y)), (work, (y, x))])
    """).lstrip()
    expected = text.replace("work(x, y)", "work(x)").replace("(x, y))", "(x,))")
    assert only_needed(text, ["entry"]) == expected.replace("(y, x))", "(y,))")


def test_arguments_with_effects_and_with_comments_stay():
    text = dedent("""
        def inner(x, y, z):
            return z


        def other(x, y):
            return y


        def entry(x, y):
            a = other(
                x,  # The first one.
                y,
            )
            return a + inner(x, f(y), y)
    """).lstrip()
    expected = text.replace("inner(x, y, z)", "inner(y, z)").replace("inner(x, f(y)", "inner(f(y)")
    assert only_needed(text, ["entry"]) == expected


def test_a_constant_that_is_true_is_not_one():
    text = dedent("""
        def inner(PART: gl.constexpr, x):
            if PART:
                if PART == 1:
                    f(x)
                if PART:
                    f(2)
            elif PART == 0:
                f(3)


        def entry(x):
            inner(2, x)
    """).lstrip()
    expected = text.replace("        if PART:\n            f(2)", "        f(2)")
    assert only_needed(text, ["entry"]) == expected


NAMES = st.sampled_from(["YES", "NO", "P", "Q", "SIZE == 64", "KIND == 'index'", "P == 3"])
CONDITIONS = st.recursive(
    NAMES,
    lambda inner: st.one_of(
        inner.map(lambda x: f"not ({x})"),
        st.tuples(inner, inner).map(" and ".join).map("({})".format),
        st.tuples(inner, inner, inner).map(" or ".join).map("({})".format),
    ),
    max_leaves=8,
)
KNOWN = {"YES": True, "NO": False, "SIZE": 64, "KIND": "offset"}


@settings(max_examples=200, deadline=None)
@given(CONDITIONS)
def test_a_decision_is_what_the_condition_comes_to(text):
    test = ast.parse(text, mode="eval").body
    found = decide(test, KNOWN)
    left = ast.unparse(found) if isinstance(found, ast.expr) else str(found)
    for p, q in itertools.product((0, 1, 3), repeat=2):
        names = {**KNOWN, "P": p, "Q": q}
        assert bool(eval(left, names)) == bool(eval(text, names))
    if isinstance(found, ast.expr):
        assert not {"YES", "NO", "KIND"} & {
            node.id for node in ast.walk(found) if isinstance(node, ast.Name)
        }


def _indented(block: str) -> str:
    return "".join(f"    {line}\n" for line in block.splitlines())


SIMPLE = st.sampled_from(
    ["note(x)\n", "x = x + 1\n", "y = x * 2\n", "x = y if NO else x + y\n", "# About x.\nx += y\n",
     "note(inner(y, x, P))\n", "y = inner(x, y, not P)\n", "return x\n", "\nz = y\n"]
)  # fmt: skip
BLOCKS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(CONDITIONS, inner).map(lambda x: f"if {x[0]}:\n{_indented(x[1])}"),
        st.tuples(CONDITIONS, inner, CONDITIONS, inner, inner).map(
            lambda x: (
                f"if {x[0]}:\n{_indented(x[1])}elif {x[2]}:\n{_indented(x[3])}"
                f"else:\n{_indented(x[4])}"
            )
        ),
        inner.map(lambda x: f"for i in range(2):\n{_indented(x)}"),
    ),
    max_leaves=12,
)


def _ran(text: str, p: int, q: int) -> tuple[object, list[object]]:
    noted: list[object] = []
    names = {"note": noted.append, "other": lambda *parts: sum(parts)}
    names["tl"] = SimpleNamespace(constexpr=lambda value: value)
    exec(text, names)
    return names["entry"](p, q, 5), noted


@settings(max_examples=200, deadline=None)
@given(BLOCKS, BLOCKS)
def test_what_is_left_computes_the_same(first, second):
    # Device code does not call itself.
    first = first.replace("inner", "other")
    text = (
        f"{HEAD}\n\ndef inner(x, y, P):\n    Q = P\n{_indented(first)}    return y\n"
        f"\n\ndef entry(P, Q, x):\n    y = 1\n{_indented(second)}    return x\n"
    )
    left = only_needed(text, ["entry"])
    for p, q in itertools.product((0, 3), repeat=2):
        assert _ran(left, p, q) == _ran(text, p, q)


DIRECTIONS = ("forward", "backward", "tangent")
KERNELS = ("stored", "distances", "pairs", "scattered")
"""Those whose names do not begin with ``attention``."""


def modules_of(case):
    """The modules of a program's kernels, of both families where they have them."""
    attention = attndsl.compile(case.text)
    learned = {
        name: torch.ones(case.tensors[name][0], requires_grad=True)
        for name in case.learned
        if name in case.tensors
    }
    for backend, direction in itertools.product(("triton", "hopper"), DIRECTIONS):
        captures = learned if (backend, direction) != ("hopper", "forward") else {}
        try:
            text = attention.source(direction, backend=backend, **captures)
        except UnsupportedError:
            continue
        yield from re.split(rf"\n\n\n(?={FIRST_LINE}\n)", text.removesuffix(TAIL))


KINDS = [
    pytest.param(case, id=case.name, marks=[] if number % 5 == 0 else [pytest.mark.slow])
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", KINDS)
def test_generated_texts_hold_nothing_else(case):
    modules = list(modules_of(case))
    assert len(modules) >= 3
    for module in modules:
        assert unneeded(module) == []
        names = [x.name for x in ast.parse(module).body if isinstance(x, ast.FunctionDef)]
        entries = [name for name in names if name.startswith(("attention_", *KERNELS))]
        assert only_needed(module, entries).strip() == module.strip()


def unneeded(text: str) -> list[str]:
    """What a module defines and does not read, but for kernels, and conditions of constants."""
    tree = ast.parse(text)
    loads = [x.id for x in ast.walk(tree) if isinstance(x, ast.Name)]
    found = []
    constants = set()
    for item in tree.body:
        match item:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found += [x.name for x in names if (x.asname or x.name).split(".")[0] not in loads]
            case ast.Assign(targets=[ast.Name(id=name)]):
                constants.add(name)
                found += [name] * (loads.count(name) == 1)
            case ast.ClassDef(name=name):
                found += [name] * (name not in loads)
            case ast.FunctionDef(name=name, args=args, body=body):
                if name.startswith(("attention_", *KERNELS)):
                    continue
                found += [name] * (name not in loads)
                inside = [x.id for y in body for x in ast.walk(y) if isinstance(x, ast.Name)]
                found += [f"{name}({x.arg})" for x in args.args if x.arg not in inside]
    tests = [x.test for x in ast.walk(tree) if isinstance(x, ast.If | ast.IfExp)]
    for test in tests:
        names = {x.id for x in ast.walk(test) if isinstance(x, ast.Name)}
        if names <= constants:
            found.append(ast.unparse(test))
    return found


def test_the_same_program_has_the_same_text_in_every_process():
    program = "mask = causal(); score = softcap(score, 30.0)"
    code = f"import attndsl; print(attndsl.compile({program!r}).source(backend='triton'), end='')"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found == [attndsl.compile(program).source(backend="triton")] * 2
