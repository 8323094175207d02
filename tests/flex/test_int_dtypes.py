"""Ints of captured tensors against torch's own: dtypes, wraps, shifts, and what is refused."""

import enum
import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

import attndsl
from attndsl.backends.dense.interpret import evaluate, scope_of
from attndsl.errors import TraceError
from attndsl.flex import create_block_mask, flex_attention
from attndsl.flex.trace_cache import TraceCache

L = 8
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def captures(seed, extreme=True):
    """One tensor a dtype, with values at the ends of its range, and one of no dims."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for dtype in DTYPES:
        ends = torch.iinfo(dtype)
        low, high = (ends.min, ends.max) if extreme else (0, 4)
        ints = torch.randint(max(low, -(1 << 62)), min(high, 1 << 62), (L,), generator=generator)
        ints[:3] = torch.tensor([low, high, max(low, -1)])
        name = str(dtype).rpartition(".")[2]
        found[name], found[f"{name}_"] = ints.to(dtype), ints[3].to(dtype)
    return found


def of_torch(function):
    """What ``function`` of positions gives for all pairs, and its dtype."""
    rows = torch.arange(L)
    found = _vmap_for_bhqkv(lambda b, h, q, kv: function(q, kv), prefix=())(
        rows[:1], rows[:1], rows, rows
    )
    return found[0, 0]


def of_ours(function):
    """The same by the program that it makes."""
    dtypes = []

    def score(s, b, h, q, kv):
        found = function(q, kv)
        dtypes.append(found.dtype)
        # In parts that floats hold.
        parts = [(found.to(torch.int64) >> 16 * n & 0xFFFF).to(s.dtype) for n in range(4)]
        return parts[part]

    found = torch.zeros(L, L, dtype=torch.int64)
    for part in range(4):
        traced = attndsl.trace(score, dtype=torch.float64)
        program = attndsl.compile(str(traced), backend="reference")
        call = program.call_of_lengths(traced.captures, L, L, 1, 1)
        scope = scope_of(call, torch.zeros(1, 1, L, L, dtype=torch.float64))
        (values,) = evaluate((program.lowered.program.score,), scope)
        found |= values.expand(1, 1, L, L)[0, 0].to(torch.int64) << 16 * part
    if dtypes[-1] is torch.bool:
        return found != 0
    return found.to(dtypes[-1])


def check(function):
    expected, found = of_torch(function), of_ours(function)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


class Expressions:
    """Random expressions of ints, as text, in which torch raises nothing."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def whole(self, depth):
        pick = self.random.choice
        if depth == 0:
            name = pick(["q", "kv", *(str(d).rpartition(".")[2] for d in DTYPES)])
            # Without vmap's dim torch takes a tensor of no dims for a number in places.
            scalar = f"({name}_ + q.to(torch.{name}) * 0)"
            return name if name in ("q", "kv") else pick([f"{name}[q]", f"{name}[kv]", scalar])
        a, b = self.whole(depth - 1), self.whole(self.random.randrange(depth))
        return pick([
            f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"(-{a})", f"(~{a})", f"{a}.abs()",
            f"({a} + {self.literal()})", f"({self.literal()} - {a})", f"({a} * {self.literal()})",
            f"({a} & {b})", f"({a} | {b})", f"({a} ^ {b})", f"({a} ^ -1)", f"({a} << {b})",
            f"({a} >> {b})", f"({a} << {self.random.randrange(12)})", f"({a} >> 3)",
            f"torch.minimum({a}, {b})", f"torch.maximum({a}, {b})", f"torch.sign({a})",
            f"({a} // {self.random.randrange(1, 9)})", f"({a} % {self.random.randrange(1, 9)})",
            f"torch.where({self.test(depth - 1)}, {a}, {b})", f"({a} + ({self.test(depth - 1)}))",
            f"torch.where({self.test(depth - 1)}, {a}, {self.literal()})", f"{a}.square()",
            f"{a}.to({pick(DTYPES)})", f"torch.relu({a})",
            f"{a}.clamp(3, {self.random.randrange(4, 90)})", f"({a} ** 3)",
            f"({a} ^ {b}).add_({b})",
            f"{a}.masked_fill({self.test(depth - 1)}, {self.literal()})", f"torch.ones_like({a})",
            f"torch.add({a}, {b}, alpha=3)", f"torch.full_like({a}, -1) - {b}",
        ])  # fmt: skip

    def test(self, depth):
        a, b = self.whole(depth), self.whole(max(0, depth - 1))
        compare = self.random.choice(["<", "<=", "==", "!=", ">", ">="])
        return self.random.choice([f"({a} {compare} {b})", f"({a} {compare} {self.literal()})"])

    def literal(self):
        return str(self.random.choice([0, 1, 2, 3, 7, 100, 127, -1, -2, -100]))


@pytest.mark.parametrize("seed", range(48))
def test_random_expressions(seed):
    text = Expressions(seed).whole(1 + seed % 4)
    names = {"torch": torch, **captures(seed, extreme=seed % 3 > 0)}
    exec(f"def function(q, kv): return {text}", names)
    check(names["function"])


class Sizes(enum.IntEnum):
    LARGE = 300


IDS = torch.tensor([0, 1, 2, 1, 0, 5, 3, 4], dtype=torch.uint8)
DOC = IDS.to(torch.int32)
ROWS = captures(3)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda q, kv: torch.stack([ROWS["int8"]] * L)[q].sum(-1),
        lambda q, kv: torch.stack([ROWS["int8"]] * L)[q].amax(-1) + 1,
        lambda q, kv: torch.stack([ROWS["int8"]] * L)[q].any(),
        lambda q, kv: ~torch.stack([ROWS["uint8"]] * L)[q].any(),
        lambda q, kv: ROWS["int16"][q].new_ones(()) + ROWS["int16"][q],
        lambda q, kv: q.new_tensor(0.7) + q,
        lambda q, kv: torch.scalar_tensor(200, dtype=torch.uint8) + ROWS["uint8"][q],
        lambda q, kv: torch.tensor(200) + ROWS["uint8"][q],
        lambda q, kv: ROWS["uint8"][q].short() - ROWS["int8"][kv].byte(),
        lambda q, kv: (q + 5) << (kv - 2),
        lambda q, kv: (q - 5) >> (kv - 2),
        lambda q, kv: 1 << (q * 20),
        lambda q, kv: (q - 5) >> 70,
        lambda q, kv: 2 ** (q * 20 - kv),
        lambda q, kv: ROWS["int8"][q] // -1,
        lambda q, kv: torch.div(ROWS["uint8"][q] - 1, -2, rounding_mode="trunc"),
        lambda q, kv: torch.fmod(ROWS["int8"][q], -7),
        lambda q, kv: torch.isin(q * 256, ROWS["uint8"]),
        lambda q, kv: torch.addcmul(ROWS["uint8"][q], ROWS["uint8"][kv], ROWS["uint8"][q], value=2),
    ],
)
def test_functions_keep_dtypes(function):
    check(function)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, i, j: IDS[i] - IDS[j] <= 1,
        lambda b, h, i, j: (IDS[i] - IDS[j]).abs() <= 1,
        lambda b, h, i, j: ~IDS[i] > IDS[j],
        lambda b, h, i, j: IDS[i] + 255 > IDS[j],
        lambda b, h, i, j: IDS[i].to(torch.int16) - IDS[j] <= 1,
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_mask_what_torch_masks(mask, compiled):
    torch._dynamo.reset()
    zeros, eye = torch.zeros(1, 1, L, L), torch.eye(L)[None, None]

    def call(q):
        return flex_attention(
            q, q, eye, lambda s, b, h, i, j: torch.where(mask(b, h, i, j), s, -torch.inf)
        )

    live = (torch.compile(call, backend="eager") if compiled else call)(zeros) > 0
    expected = of_torch(lambda q, kv: mask(0, 0, q, kv))
    assert torch.equal(live[0, 0], expected)
    if not compiled:
        blocks = create_block_mask(mask, None, None, L, L, device="cpu", BLOCK_SIZE=1)
        assert torch.equal(blocks.to_dense()[0, 0] != 0, expected)


def test_what_stays_in_range_is_written_as_it_is():
    def mask(b, h, q, kv):
        near = (DOC[q] - kv < 3) & (IDS[q] // 2 == IDS[kv] % 3) & (DOC[q] != DOC[kv])
        return near & (IDS[q].long() - IDS[kv] < 2) & ((IDS[q] & 3) > 1)

    text = str(attndsl.trace(mask))
    assert "255" not in text
    assert "^" not in text
    assert "DOC[q] - DOC[kv] & 4294967295" in str(
        attndsl.trace(lambda b, h, q, kv: DOC[q] - DOC[kv] < 3)
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, q, kv: IDS[q] < 300, "300 joins a value of torch.uint8"),
        (lambda b, h, q, kv: IDS[q] < np.int64(300), "300 joins a value of torch.uint8"),
        (lambda b, h, q, kv: IDS[q] < Sizes.LARGE, "300 joins a value of torch.uint8"),
        (lambda b, h, q, kv: torch.where(q > kv, IDS[q], -256) < 3, "-256 joins"),
        (lambda b, h, q, kv: torch.full_like(IDS[q], 256) < 3, "256 joins"),
        (lambda b, h, q, kv: DOC[IDS[q]] < 3, "takes for a mask"),
        (lambda b, h, q, kv: (q * 0.5).byte() < 3, "does not fit"),
        (lambda b, h, q, kv: DOC.to(torch.uint16)[q] < 3, "torch.uint16"),
    ],
)
def test_what_torch_would_change_is_refused(function, message):
    with pytest.raises(TraceError, match=message):
        attndsl.trace(function)


def test_a_number_that_varies_stays_a_constant_beside_narrow_ints():
    zeros, eye = torch.zeros(1, 1, L, L), torch.eye(L)[None, None]

    def of(number):
        return lambda b, h, q, kv: IDS[q] - IDS[kv] <= number

    for number in (1, 2, 3, 4, 5, 6, 7, 200):
        blocks = create_block_mask(of(number), None, None, L, L, device="cpu", BLOCK_SIZE=1)
        expected = of_torch(lambda q, kv, n=number: of(n)(0, 0, q, kv))
        assert torch.equal(blocks.to_dense()[0, 0] != 0, expected)
        live = flex_attention(zeros, zeros, eye, block_mask=blocks)[0, 0] > 0
        assert torch.equal(live, expected)


def test_a_number_that_varies_is_a_param_beside_int32():
    traces = TraceCache()

    def text(number):
        lengths = dict.fromkeys(("b", "h", "q", "kv"), (0, 0))
        found = traces.trace(
            None, lambda b, h, q, kv: DOC[q] < number, torch.float32, torch.device("cpu"), lengths
        )
        return str(found)

    assert len({text(number) for number in range(8)}) == 5
    assert "param number: int" in text(9)
    text_of_numpy = str(attndsl.trace(lambda b, h, q, kv: IDS[q] < np.int64(3)))
    assert "IDS[q] < 3" in text_of_numpy
