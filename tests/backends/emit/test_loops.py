"""Loop plans as device functions: the n-th tile of many segments, read as plain Python."""

from __future__ import annotations

from typing import Any

import pytest

from attndsl.backends.device.records import Head, Scope, Shift, Sizes, Visits
from attndsl.backends.emit.leaf_names import LeafNames
from attndsl.backends.emit.loops import print_loop
from attndsl.ir import DType, Node, Op, const, node, param
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.tiles.tile_plan import DIRECTIONS, TILE, LoopPlan, Segment
from attndsl.pipeline import lower
from attndsl.source import Source

LENGTH = 1000


class _Language:
    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def where(c: bool, a: int, b: int) -> int:
        return a if c else b


def _run(
    loop: LoopPlan, kind: str, tile: int, along: str = "kv", sizes: tuple[int, int] = (128, 128)
) -> list[int]:
    """The tiles that the printed functions visit."""
    texts, helpers = print_loop("p", along, loop, [], LeafNames({}, {}, 64))
    text = "\n".join(texts).replace("@triton.jit\n", "").replace(": tl.constexpr", "")

    class tl(_Language):
        int32 = None

        @staticmethod
        def maximum(a: int, b: int) -> int:
            return max(a, b)

        @staticmethod
        def minimum(a: int, b: int) -> int:
            return min(a, b)

        @staticmethod
        def full(shape: list[int], value: int, dtype: None) -> int:
            return value

    floordiv = {"int_floordiv": lambda a, b: a // b}
    assert helpers <= floordiv.keys()
    module: dict[str, object] = {"tl": tl, "Visits": Visits, **floordiv}
    module |= {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1]}
    exec(text, module)
    count, nth = module["p_visits"], module["p_tile"]
    assert callable(count)
    assert callable(nth)
    scope = Scope(Head(0, 0, 0), Sizes(1, 1, 1, LENGTH, LENGTH), None)
    common = (Shift(0, 0), scope)
    visits = count(tile, *common)
    steps = range(visits.full if kind == "full" else visits.partial)
    return [nth(step, visits, tile, *common, kind == "partial") for step in steps]


def _add(item: Node, number: int) -> Node:
    return node(Op.ADD, item, const(number))


def _quarter(item: Node) -> Node:
    return node(Op.FLOORDIV, item, const(4))


def _visited(segments: tuple[Segment, ...], known: Environment) -> list[int]:
    return [
        t
        for s in segments
        if s.guard is None or evaluate(s.guard, known)
        for t in range(int(evaluate(s.start, known)), int(evaluate(s.stop, known)), s.step)
    ]


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(const(0), const(4)),),
        (Segment(TILE, _add(TILE, 3)),),
        (Segment(TILE, _add(TILE, 1)),),
        (Segment(const(0), const(2)), Segment(TILE, const(9), 3)),
        (Segment(_quarter(TILE), _add(TILE, 1)),),
        (Segment(_quarter(TILE), const(3), 2), Segment(_quarter(_add(TILE, 9)), _add(TILE, 4))),
        (
            Segment(const(5), const(5)), Segment(const(7), const(3)),
            Segment(const(1), const(4)), Segment(const(10), const(21), 5),
        ),
        (
            Segment(const(0), const(3), 1, node(Op.LT, TILE, const(1))),
            Segment(const(4), const(9), 2, node(Op.LE, const(1), TILE)),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tile", [0, 1, 6])
def test_flattened_loop_visits_each_segment_in_order(
    segments: tuple[Segment, ...], tile: int
) -> None:
    known = Environment({"$tile": tile})
    expected = _visited(segments, known)
    assert _run(LoopPlan(full=segments, partial=segments), "full", tile) == expected
    assert _run(LoopPlan(full=segments, partial=segments), "partial", tile) == expected


# The text is of Triton, whose ~ negates a bool: here it is Python's, and & leaves its last bit.
@pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")
@pytest.mark.parametrize(
    "text", ["sliding_window(50)", "abs(q - kv) < 70 and kv < 900", "dilated(90, 2)"]
)
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 128), (128, 32), (48, 16)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_loops_of_masks_visit_what_is_planned(
    text: str, sizes: tuple[int, int], direction: str
) -> None:
    """At tiles of other shapes too than those that are squares, whose bounds are divisions."""
    found = DIRECTIONS[direction]
    loop = lower(Source(text), {}).sparsity.loop(found, *sizes, False, False)
    assert loop.listed is None
    own, along = sizes if found.along == "kv" else sizes[::-1]
    for tile in range(-(-LENGTH // own)):
        known = Environment(
            {"$tile": tile, "$tiles": -(-LENGTH // along), "$whole": LENGTH // along,
             "q_len": LENGTH, "kv_len": LENGTH}
        )  # fmt: skip
        for kind, segments in (("full", loop.full), ("partial", loop.partial)):
            visited = _run(loop, kind, tile, found.along, sizes)
            assert visited == _visited(segments, known)


def test_tiles_have_32_bits_whatever_was_taken_from_the_step() -> None:
    # The number of tiles of the first segment has 64 bits, and where segments begin has 32.
    count = node(Op.ADD, node(Op.MUL, param("n", DType.INT), const(3)), const(1))
    one, two = Segment(const(0), count), Segment(const(4), const(9))
    names = LeafNames({}, {"n": 32}, 64)
    texts, _ = print_loop("p", "kv", LoopPlan((one, two), ()), [], names)
    (nth,) = (text for text in texts if "def p_tile" in text)
    last = nth.splitlines()[-1].strip()
    assert last == "return tl.cast(tl.where(step >= 0, 4 + step, found), tl.int32)"


def test_no_list_is_read_outside_of_its_row() -> None:
    """Kernels ask for steps before the first and behind the last, and leave out what they get."""
    texts, _ = print_loop("p", "kv", LoopPlan(listed="no form"), [], LeafNames({}, {}, 64))
    text = "\n".join(texts).replace("@triton.jit\n", "").replace(": tl.constexpr", "")
    text = text.replace(".to(tl.int64)", "")
    tiles, read = -(-LENGTH // 128), []

    class tl(_Language):
        @staticmethod
        def load(address: int, mask: bool, other: int) -> int:
            if mask:
                read.append(address)
            return other

    class given:
        tile_rows, tile_list, list_step_b, list_step_h = 0, 1000, 0, 0

    module: dict[str, Any] = {"tl": tl, "Visits": Visits, "BLOCK_N": 128}
    exec(text, module)
    scope = Scope(Head(0, 0, 0), Sizes(1, 1, 1, LENGTH, LENGTH), given)
    for partial in (True, False):
        for step in range(-5, tiles + 5):
            module["p_tile"](step, Visits(3, 3, -1, 0), 2, Shift(0, 0), scope, partial)
    row = 1000 + 2 * tiles
    assert sorted(read) == sorted([*range(row, row + tiles)] * 2)
