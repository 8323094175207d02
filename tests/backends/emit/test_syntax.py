"""What passes over generated modules see in Python's syntax trees."""

import ast

import pytest

from attndsl.backends.emit.syntax import reads


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = y", False),
        ("y = x", True),
        ("x += 1", True),
        ("y += x", True),
        ("y += 1", False),
        ("x[0] = 1", True),
        ("if a: y = f(x)", True),
        ("for x in y: pass", False),
    ],
)
def test_who_reads_a_local(text, expected):
    assert reads(ast.parse(text), "x") is expected
