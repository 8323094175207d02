"""Tile plans as device functions: the n-th tile of many segments, and the structure of modules."""

from __future__ import annotations

import pytest

from attndsl import ir
from attndsl.backends.triton.loops import print_loop
from attndsl.ir import Program, node, var
from attndsl.passes.tiles.plan import LoopPlan, Segment, plan_tiles


def _run(loop: LoopPlan, kind: str, tile: int) -> list[int]:
    """The tiles that the printed functions visit, read as plain Python."""
    texts = (
        "\n".join(print_loop("p", loop, []))
        .replace("@triton.jit\n", "")
        .replace(": tl.constexpr", "")
    )

    class tl:
        @staticmethod
        def maximum(a: int, b: int) -> int:
            return max(a, b)

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

        @staticmethod
        def where(c: bool, a: int, b: int) -> int:
            return a if c else b

    scope: dict[str, object] = {"tl": tl}
    exec(texts, scope)
    count, nth = scope[f"p_{kind}_count"], scope[f"p_{kind}_tile"]
    assert callable(count)
    assert callable(nth)
    arguments = (tile, 1000, 1000, 128, 128)
    return [nth(step, *arguments) for step in range(count(*arguments))]


@pytest.mark.parametrize(
    "segments",
    [
        (Segment("0", "4"),),
        (Segment("tile", "tile + 3"),),
        (Segment("0", "2"), Segment("tile", "9", 3)),
        (Segment("5", "5"), Segment("7", "3"), Segment("1", "4"), Segment("10", "21", 5)),
    ],
)
@pytest.mark.parametrize("tile", [0, 1, 6])
def test_flattened_loop_visits_each_segment_in_order(
    segments: tuple[Segment, ...], tile: int
) -> None:
    expected = [
        t
        for s in segments
        for t in range(eval(s.start, {"tile": tile}), eval(s.stop, {"tile": tile}), s.step)
    ]
    assert _run(LoopPlan(full=segments, partial=segments), "full", tile) == expected
    assert _run(LoopPlan(full=segments, partial=segments), "partial", tile) == expected


def test_masked_programs_have_partial_tiles_only() -> None:
    plan = plan_tiles(Program(ir.SCORE, node(ir.Op.LE, var("kv"), var("q"))))
    for loop in (plan.forward, plan.backward_q, plan.backward_kv):
        assert not loop.full
        assert _run(loop, "partial", 0) == list(range(8))


def test_unmasked_programs_have_one_ragged_partial_tile() -> None:
    plan = plan_tiles(Program(ir.SCORE))
    assert _run(plan.forward, "full", 0) == list(range(7))
    assert _run(plan.forward, "partial", 0) == [7]
    assert _run(plan.backward_kv, "full", 0) == list(range(8))
