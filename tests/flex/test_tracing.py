"""What functions are traced into, and what is said of those that cannot be."""

import enum
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attndsl
from attndsl.errors import AttnDSLError, TraceError
from attndsl.flex import and_masks, flex_attention, noop_mask
from attndsl.frontend import read
from attndsl.frontend.format import format_source
from attndsl.source import Source

TABLE = torch.arange(12.0).reshape(3, 4)
GAIN = torch.tensor(2.0)


class Size(enum.IntEnum):
    SMALL = 3


PROGRAMS = {
    "causal": (lambda b, h, q, kv: q >= kv, "mask = kv <= q"),
    "both": (
        and_masks(lambda b, h, q, kv: q >= kv, noop_mask, lambda b, h, q, kv: q - kv < 4),
        "mask = kv <= q and q - kv < 4",
    ),
    "everything": (noop_mask, "score = score"),
    "nothing": (lambda b, h, q, kv: b.new_zeros((), dtype=torch.bool), "mask = false"),
    "negation": (lambda b, h, q, kv: ~(q == kv) ^ (h != 0), "mask = (not q == kv) != (h != 0)"),
    "cap": (
        lambda score, b, h, q, kv: GAIN * torch.tanh(score / GAIN),
        "param GAIN: float\nscore = GAIN * tanh(score / GAIN)",
    ),
    "lookup": (
        lambda score, b, h, q, kv: score + TABLE[h][kv],
        "tensor TABLE[TABLE_0, TABLE_1]: float\nscore = score + TABLE[h, kv]",
    ),
    "lookup of the other dim": (
        lambda score, b, h, q, kv: score + TABLE[:, kv][h],
        "tensor TABLE[TABLE_0, TABLE_1]: float\nscore = score + TABLE[h, kv]",
    ),
    "from the end": (
        lambda score, b, h, q, kv: score + TABLE[-1, q - kv],
        "tensor TABLE[TABLE_0, TABLE_1]: float\nt0 = q - kv\n"
        "score = score + TABLE[2, where(t0 < 0, t0 + TABLE_1, t0)]",
    ),
    "whole lookup cast": (
        lambda score, b, h, q, kv: score + TABLE[h].long()[kv],
        "tensor TABLE[TABLE_0, TABLE_1]: float\nscore = score + float(int(TABLE[h, kv]))",
    ),
    "numbers of other classes": (
        lambda score, b, h, q, kv: score * np.float64(0.5) + Size.SMALL * np.int64(2),
        "score = score * 0.5 + 6.0",
    ),
    "numpy on the left": (
        lambda score, b, h, q, kv: np.float32(0.5) * score,
        "score = 0.5 * score",
    ),
    "powers": (
        lambda score, b, h, q, kv: score ** 2 + 2 ** h + q ** 2,
        "score = score ** 2.0 + float(where(h <= 63, 1 << h, 0)) + float(q ** 2)",
    ),
    "quotients": (
        lambda score, b, h, q, kv: score + q // 3 + q % 5 / 2,
        "score = score + float(q // 3) + float(q % 5) / 2.0",
    ),
    "masked": (
        lambda score, b, h, q, kv: score.masked_fill(q < kv, -math.inf),
        "score = where(q < kv, -inf, score)",
    ),
    "activation": (lambda score, b, h, q, kv: F.silu(score), "score = silu(score)"),
    "an int": (lambda score, b, h, q, kv: q - kv, "score = float(q - kv)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    function, text = PROGRAMS[name]
    found = attndsl.trace(function)
    assert str(found).strip() == text
    assert format_source(str(found)) == str(found)
    read(Source(str(found)), {})


def test_score_and_mask_together():
    table = torch.arange(3)
    found = attndsl.trace(lambda s, b, h, q, kv: s * table[h], lambda b, h, q, kv: q >= table[h])
    lines = ["t0 = table[h]", "mask = t0 <= q", "score = score * float(t0)"]
    assert str(found).splitlines()[1:] == lines
    assert found.captures["table"] is table


def test_captures_are_named_as_the_user_names_them():
    b, score, t1, same = (torch.rand(3) for _ in range(4))
    capture = same
    found = attndsl.trace(
        lambda s, b_, h, q, kv: s + b[h] + score[h] + t1[h] + same[h] + capture[h]
    )
    # Names that the language has, or that locals of printed programs have, get an underscore.
    assert list(found.captures) == ["b_", "score_", "t1_", "capture"]
    read(Source(str(found)), {})


def test_captures_named_like_arguments_of_a_call():
    scale, tiles, k = torch.tensor(0.5), torch.ones(2), torch.tensor(2)
    mod = lambda s, b, h, q, kv: s * scale + tiles[h] * k  # noqa: E731
    q = torch.randn(1, 2, 4, 4)
    assert list(attndsl.trace(mod).captures) == ["scale_", "tiles_", "k_"]
    wanted = attndsl.compile("score * 0.5 + 2.0")(q, q, q, scale=0.25)
    torch.testing.assert_close(flex_attention(q, q, q, mod, scale=0.25), wanted)


def test_captured_tensors_may_be_converted_and_walked_through():
    def mod(s, b, h, q, kv):
        for row in TABLE.float()[:2].to(torch.float64):
            s = s + row[kv] * len(TABLE) / TABLE.shape[1]
        return s + TABLE.T[kv, h]

    found = attndsl.trace(mod)
    assert not found.stable
    values = list(found.captures.values())
    assert [tuple(value.shape) for value in values] == [(4,), (4,), (4, 3)]
    torch.testing.assert_close(values[1], TABLE[1].double())


def test_operands_by_keyword():
    found = attndsl.trace(
        lambda s, b, h, q, kv: torch.where(
            q > kv, input=torch.add(input=s, other=1.0), other=torch.clamp(s, min=0.5, max=2)
        )
    )
    text = "score = where(kv < q, score + 1.0, min(max(score, 0.5), 2.0))"
    assert str(found).strip() == text


def test_a_trace_runs_as_a_program():
    slopes = torch.rand(2)
    found = attndsl.trace(
        lambda s, b, h, q, kv: s - slopes[h] * (q - kv), lambda b, h, q, kv: q > kv
    )
    q = k = v = torch.randn(1, 2, 8, 4)
    wanted = attndsl.compile("mask = q > kv; score = score - slopes[h] * (q - kv)", slopes=slopes)
    out = attndsl.compile(str(found))(q, k, v, **found.captures)
    torch.testing.assert_close(out, wanted(q, k, v))


def test_dtype_and_device_are_those_asked_for():
    def score(score, b, h, q, kv):
        assert score.dtype is torch.float64
        assert (b.dtype, (q > kv).dtype, score.device.type) == (torch.int64, torch.bool, "cpu")
        assert (score.shape, score.ndim, score.numel(), score.dim()) == ((), 0, 1, 0)
        assert score.is_floating_point()
        assert not score.is_cuda
        return score + torch.finfo(score.dtype).eps

    assert str(torch.finfo(torch.float64).eps) in str(attndsl.trace(score, dtype=torch.float64))


def branches(score, b, h, q, kv):
    if q >= kv:
        return score
    return score * 0


def chained(b, h, q, kv):
    return 0 <= q - kv < 4


def shows(score, b, h, q, kv):
    print(f"score {score}")
    return score


def loops(score, b, h, q, kv):
    for _ in range(h):
        score = score + 1
    return score


def forgets(score, b, h, q, kv):
    score + 1


REFUSED = {
    "if": (branches, "differs from pair to pair", "torch.where", "if q >= kv"),
    "chain": (chained, "differs from pair to pair", "(a <= b) & (b < c)", "0 <= q - kv < 4"),
    "and": (lambda b, h, q, kv: q > kv and h > 0, "differs from pair", "join conditions", "q > kv"),
    "print": (shows, "nothing to show", "print(attndsl.trace", "{score}"),
    "item": (lambda s, b, h, q, kv: s * h.item(), "asks for a number", "torch.where", "h.item()"),
    "captured item": (lambda s, b, h, q, kv: s * GAIN.item(), "'item' of a", "0-d", "GAIN"),
    "captured if": (
        lambda s, b, h, q, kv: s if GAIN > 0 else -s, "'bool' of a captured", "0-d", "GAIN > 0",
    ),
    "sum": (lambda s, b, h, q, kv: s + TABLE.sum(), "reduce", "before the call", "TABLE.sum()"),
    "softmax": (lambda s, b, h, q, kv: s + TABLE[h].softmax(-1), "reduce", "before", "TABLE[h]"),
    "math": (lambda s, b, h, q, kv: s * math.exp(h), "asks for the number", "torch.exp", "math"),
    "range": (loops, "asks for the number", "torch.exp", "range(h)"),
    "list": (lambda s, b, h, q, kv: s + [1, 2][h], "asks for the number", "lists", "[1, 2][h]"),
    "dict": (lambda s, b, h, q, kv: s + {0: 1}[h], "no key", "index tensors", "{0: 1}[h]"),
    "random": (lambda s, b, h, q, kv: s + torch.rand(()), "draws numbers", "before", "torch.rand"),
    "unknown": (lambda s, b, h, q, kv: torch.atan2(s, s), "no counterpart of 'atan2'", "", "atan2"),
    "close": (lambda s, b, h, q, kv: s.sigmoidd(), "'sigmoidd'", "'sigmoid'", "sigmoidd"),
    "float index": (lambda s, b, h, q, kv: s + TABLE[s, h], "this is a float", "int64", "TABLE[s"),
    "far index": (lambda s, b, h, q, kv: s + TABLE[h, 9], "index 9 of a dim of size", "", "9"),
    "many indices": (lambda s, b, h, q, kv: s + TABLE[h, q, kv], "3 indices", "", "TABLE[h, q"),
    "index of a score": (lambda s, b, h, q, kv: s[0], "no elements", "", "s[0]"),
    "whole tensor": (lambda s, b, h, q, kv: s + TABLE, "shape (3, 4)", "table[h]", "+ TABLE"),
    "partly indexed": (lambda s, b, h, q, kv: s + TABLE[h], "1 dim left", "2 dims", "s + TABLE"),
    "int power": (lambda s, b, h, q, kv: s + 3 ** h, "an int that varies", ".float()", "3 ** h"),
    "bits": (lambda s, b, h, q, kv: s & 1, "bits of a float", ".float()", "s & 1"),
    "narrow": (lambda s, b, h, q, kv: s + s.to(torch.int8), "does not fit", "int64", "torch.int8"),
    "assignment": (lambda s, b, h, q, kv: s.__setitem__(0, 1), "assigned to", "torch.where", "s."),
    "captured change": (lambda s, b, h, q, kv: s + GAIN.add_(1), "changes a captured", "", "GAIN"),
    "in-place type": (lambda s, b, h, q, kv: q.add_(s), "a float of a int", "x + y", "q.add_"),
    "nan": (lambda s, b, h, q, kv: s * math.nan, "NaN", "inf", "math.nan"),
    "detach": (lambda s, b, h, q, kv: s.detach(), "hide a gradient", "before", "s.detach()"),
    "bool score": (lambda s, b, h, q, kv: q > kv, "gives a bool", "mask_mod", '"bool score"'),
    "float mask": (lambda b, h, q, kv: q - kv, "gives a int", "!= 0", '"float mask"'),
    "nothing": (forgets, "gives nothing", "return", "def forgets"),
    "arguments": (lambda score, h: score, "2 arguments", "(b, h, q_idx, kv_idx)", '"arguments"'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_said_at_its_line(name):
    function, message, hint, code = REFUSED[name]
    with pytest.raises(TraceError) as caught:
        attndsl.trace(function)
    error = caught.value
    assert message in error.message
    assert hint in error.hint
    assert Path(error.span.source.name) == Path(__file__)
    assert code in error.span.source.line(error.span.line)
    assert f"{__file__}:{error.span.line}:" in str(error)


def test_functions_without_source_are_named_too():
    names = {}
    exec(
        compile("def score(s, b, h, q, kv):\n    return s if q > kv else -s\n", "made.py", "exec"),
        names,
    )
    with pytest.raises(TraceError, match=r"made\.py:2"):
        attndsl.trace(names["score"])


def test_what_is_no_function_is_refused():
    with pytest.raises(TraceError, match="3 is no function"):
        attndsl.trace(3)


def test_any_sum_of_traced_operations_is_a_program():
    # Every function of the table with one operand, nested at random: what is printed is read back.
    from attndsl.flex.torch_functions import FUNCTIONS

    rng = random.Random(0)
    names = ["sigmoid", "tanh", "abs", "neg", "floor", "relu", "gelu", "square", "sinh", "round"]
    assert set(names) <= set(FUNCTIONS)
    for _ in range(20):
        chosen = [rng.choice(names) for _ in range(30)]

        def score(score, b, h, q, kv, chosen=chosen):
            for name in chosen:
                score = getattr(score, name)() + score
            return score

        try:
            read(Source(str(attndsl.trace(score))), {})
        except AttnDSLError as error:
            pytest.fail(str(error))
