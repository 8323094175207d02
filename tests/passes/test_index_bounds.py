"""Lookups that need no clamp: the rule against every value that indices have."""

from __future__ import annotations

import itertools

import pytest

from attndsl.ir import DType, Node, Op, const, load, node, size, toposort, var
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.index_bounds import dim_of, reads_inside, stays_inside
from attndsl.passes.int_ranges import ranges
from attndsl.pipeline import lower
from attndsl.source import Source

INDICES = ("b", "h", "hkv", "q", "kv", "0", "3", "h % n", "q % heads", "kv % 3", "q % n + 1", "-h")
DIMS = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "n", "3", "4", "2 * heads")


def _index(text: str, dim: str) -> tuple[Node, Node]:
    """An index and the dim that it looks up along."""
    tensors = f"tensor t[{dim}]: float; tensor u[n]: float"
    lowered = lower(Source(f"{tensors}; score = score + t[{text}] + u[0]"), {})
    (found,) = [x for x in toposort(lowered.program.score) if x.value == "t"]
    (decl,) = [decl for decl in lowered.program.tensors if decl.name == "t"]
    return found.args[0], decl.dims[0]


def _values(index: Node, dim: Node) -> list[tuple[int, int]]:
    """An index and its dim, for all pairs of calls of several sizes."""
    found = []
    for batch, kv_heads, group, n in itertools.product((1, 3), (1, 2), (1, 2), (1, 2, 5)):
        heads = kv_heads * group
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "n": n}
        sizes |= {"q_len": 2, "kv_len": 3, "head_dim": 8}
        for b, h, q, kv in itertools.product(range(batch), range(heads), (-2, 0, 6), (0, 9)):
            pair = {"b": b, "h": h, "hkv": h // group, "q": q, "kv": kv}
            names = Environment({**sizes, **pair})
            found.append((int(evaluate(index, names)), int(evaluate(dim, names))))
    return found


@pytest.mark.parametrize("dim", DIMS)
def test_what_stays_inside_never_leaves(dim: str) -> None:
    for text in INDICES:
        index, declared = _index(text, dim)
        if stays_inside(index, dim_of(declared), ranges((index,), {})[index]):
            assert all(0 <= value < n for value, n in _values(index, declared)), text


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        ("b", "batch"), ("h", "heads"), ("hkv", "kv_heads"), ("hkv", "heads"), ("0", "3"),
        ("kv % 3", "4"), ("h % n", "n"), ("q % heads", "heads"),
    ],
)  # fmt: skip
def test_what_the_rule_knows(text: str, dim: str) -> None:
    index, declared = _index(text, dim)
    assert stays_inside(index, dim_of(declared), ranges((index,), {})[index])


def test_remainders_by_a_size_below_zero_are_not_among_them() -> None:
    index = node(Op.MOD, var("q"), const(-3))
    assert not stays_inside(index, 3, ranges((index,), {})[index])
    assert not stays_inside(load("t", DType.INT, var("h")), "heads", (0, 0))
    assert dim_of(node(Op.ADD, size("heads"), const(1))) is None


def test_numbers_of_a_call() -> None:
    assert reads_inside([(0, 3), (2, 4)], (3, 4))
    assert not reads_inside([(0, 3), (2, 5)], (3, 4))
    assert not reads_inside([(-1, 3)], (3,))
