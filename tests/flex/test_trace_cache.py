"""Traces are kept by what functions reach, and stay right whatever changes there."""

import functools
from types import SimpleNamespace

import pytest
import torch

import attndsl
from attndsl.flex import flex_attention, trace_cache
from attndsl.flex.closures import reach, replaced
from attndsl.flex.trace_cache import TraceCache

B, H, L, D = 1, 2, 12, 4
CPU = torch.device("cpu")
WINDOW = 3


def q_k_v():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, H, L, D, generator=generator) for _ in range(3))


@pytest.fixture
def traces(monkeypatch):
    """A fresh cache, and how often it traced since."""
    found = SimpleNamespace(cache=TraceCache(), count=0)
    plain = trace_cache.trace_mods

    def counting(*args):
        found.count += 1
        return plain(*args)

    monkeypatch.setattr(trace_cache, "trace_mods", counting)
    monkeypatch.setattr("attndsl.flex.flex_call.default_traces", lambda: found.cache)

    def text(score_mod, mask_mod=None, length=L):
        lengths = {"b": (0, 0), "h": (0, 1), "q": (0, length - 1), "kv": (0, length - 1)}
        return found.cache.trace(score_mod, mask_mod, torch.float32, CPU, lengths)

    found.trace = text
    return found


def scaled(table, factor=2.0):
    def score(score, b, h, q, kv):
        return score * factor + table[h]

    return score


def test_other_tensors_trace_nothing(traces):
    for seed in range(3):
        table = torch.randn(H, generator=torch.Generator().manual_seed(seed))
        found = traces.trace(scaled(table))
        assert found.captures["table"] is table
    assert traces.count == 1


@pytest.mark.parametrize("other", [torch.ones(H + 1), torch.ones(H).double(), torch.ones(1, H)])
def test_tensors_of_another_kind_are_traced_anew(traces, other):
    traces.trace(scaled(torch.ones(H)))
    if other.dim() == 1:
        traces.trace(scaled(other))
    else:
        with pytest.raises(attndsl.AttnDSLError, match="1 dim"):
            traces.trace(scaled(other))
    assert traces.count == 2


def test_two_names_of_one_tensor_may_part(traces):
    def both(one, two):
        return lambda score, b, h, q, kv: score + one[h] - two[h]

    same, other = torch.ones(H), torch.zeros(H)
    assert len(traces.trace(both(same, same)).captures) == 1
    found = traces.trace(both(same, other))
    assert (found.captures["one"], found.captures["two"]) == (same, other)
    assert len(traces.trace(both(other, other)).captures) == 1


def test_a_number_that_keeps_changing_becomes_a_param(traces):
    table = torch.ones(H)
    for factor in (2.0, 3.0, 4.0, 5.0, 2.0):
        assert f"score * {factor}" in str(traces.trace(scaled(table, factor)))
    assert traces.count == 4
    texts = set()
    for factor in (6.0, 7.0, 8.0, 2.0):
        found = traces.trace(scaled(table, factor))
        assert found.captures["factor"] == factor
        texts.add(str(found))
    (text,) = texts
    assert text.startswith("param factor: float\n")
    # Once to see whether it can be a param, once as a param.
    assert traces.count == 6


def test_equal_numbers_in_two_places_may_part(traces):
    def window(low, high):
        return lambda b, h, q, kv: (q - kv <= high) & (kv - q <= low)

    for number in range(6):
        traces.trace(None, window(number, number))
    for low, high in ((1, 1), (5, 5), (5, 7), (6, 7)):
        found = traces.trace(None, window(low, high))
        assert (found.captures["low"], found.captures["high"]) == (low, high)


def test_a_number_that_counts_stays_a_constant(traces):
    def doubled(times, bias):
        def score(score, b, h, q, kv):
            for _ in range(times):
                score = score * 2.0
            return score + bias

        return score

    for times in (1, 2, 3, 4, 5, 6, 2):
        found = traces.trace(doubled(times, 0.25 * times))
        assert str(found).count("2.0") == times
        assert found.captures.get("bias", 0.25 * times) == 0.25 * times
    assert list(found.captures) == ["bias"]
    before = traces.count
    traces.trace(doubled(2, 0.125))
    assert traces.count == before


def test_int_and_float_are_told_apart(traces):
    power = lambda base: lambda score, b, h, q, kv: score + (q // base)  # noqa: E731
    assert "q // 2)" in str(traces.trace(power(2)))
    assert "/ 2.0" in str(traces.trace(power(2.0))) or "// 2.0" in str(traces.trace(power(2.0)))
    assert traces.count == 2


def test_globals_defaults_and_partials_are_seen(traces, monkeypatch):
    def window(b, h, q, kv, size=4):
        return (q - kv < WINDOW) & (kv - q < size)

    values = []
    for number in (3, 8, 9, 10, 11, 12):
        monkeypatch.setitem(globals(), "WINDOW", number)
        window.__defaults__ = (number + 1,)
        found = traces.trace(None, functools.partial(window))
        values.append((found.captures.get("WINDOW"), found.captures.get("size")))
        if number < 11:
            assert f"q - kv < {number} " in str(found)
    assert values == [(None, None)] * 4 + [(11, 12), (12, 13)]


def test_a_number_that_a_partial_holds_becomes_a_param(traces):
    def window(size, b, h, q, kv):
        return (q - kv < size) & (kv <= q)

    for size in range(3, 10):
        found = traces.trace(None, functools.partial(window, size))
    assert found.captures == {"arg0": 9}
    assert str(found).endswith("mask = q - kv < arg0 and kv <= q\n")
    assert traces.count < 7


def test_a_partial_whose_function_or_argument_changed_is_another():
    def window(size, b, h, q, kv, more=2):
        return q - kv < size + more

    made, named = functools.partial(window, 4), functools.partial(window, 4, more=3)
    assert (reach(made).numbers, reach(named).numbers) == ([2, 4], [2, 4, 3])
    assert replaced(made, {}) is made
    for other, last in (
        (replaced(made, {1: 40}), 41), (replaced(made, {0: 20}), 23), (replaced(named, {2: 30}), 33)
    ):  # fmt: skip
        assert other(0, 0, last, 0)
        assert not other(0, 0, last + 1, 0)


def test_globals_of_functions_within_are_seen(traces, monkeypatch):
    def window(b, h, q, kv):
        return (lambda distance: distance < WINDOW)(q - kv)

    for number in (3, 8):
        monkeypatch.setitem(globals(), "WINDOW", number)
        assert f"q - kv < {number}" in str(traces.trace(None, window))


def test_objects_are_traced_each_time(traces):
    owner = SimpleNamespace(table=torch.ones(H), factor=2.0)

    def score(score, b, h, q, kv):
        return score * owner.factor + owner.table[h]

    first = traces.trace(score)
    owner.factor, owner.table = 3.0, torch.zeros(H)
    second = traces.trace(score)
    assert "2.0" in str(first)
    assert "3.0" in str(second)
    assert second.captures["table"] is owner.table


def test_tensors_computed_inside_are_computed_each_time(traces):
    q, k, v = q_k_v()
    for gain in (0.5, 2.0):
        log_gain = torch.tensor(gain).log()
        out = flex_attention(q, k, v, lambda s, b, h, i, j, x=log_gain: s * torch.exp(x))
        torch.testing.assert_close(out, attndsl.compile(f"score * {gain}")(q, k, v))


def test_changes_in_place_are_seen(traces):
    q, k, v = q_k_v()
    table = torch.ones(H)
    before = flex_attention(q, k, v, scaled(table, 1.0))
    table.copy_(torch.tensor([0.0, float("nan")]))
    after = flex_attention(q, k, v, scaled(table, 1.0))
    assert torch.isfinite(before).all()
    assert torch.isnan(after[:, 1]).all()


def test_lengths_matter_only_where_an_index_may_be_negative(traces):
    table = torch.ones(30)
    plain = lambda s, b, h, q, kv: s + table[kv]  # noqa: E731
    moved = lambda s, b, h, q, kv: s + table[q - kv + 15]  # noqa: E731
    for length in (8, 12):
        traces.trace(plain, length=length)
    assert traces.count == 1
    ids = torch.arange(30)
    looked_up = lambda s, b, h, q, kv: s + table[ids[q] - 1]  # noqa: E731
    for length in (8, 12):
        assert "where" in str(traces.trace(looked_up, length=length))
    assert traces.count == 2
    assert "where" not in str(traces.trace(moved, length=16))
    assert "where" in str(traces.trace(moved, length=17))


def test_recursion_and_cycles_end():
    def score(score, b, h, q, kv):
        return score if chain is None else score * 2.0

    chain = [score]
    chain.append(chain)
    assert reach(score).tensors == []
    assert str(attndsl.trace(score)).strip() == "score = score * 2.0"


def test_replacement_leaves_the_user_s_objects_alone():
    settings = {"size": 4, "more": [1, 2]}

    def mask(b, h, q, kv, size=5):
        return q - kv < settings["size"] + settings["more"][1] + size + WINDOW

    found = reach(mask)
    assert found.numbers == [4, 1, 2, 5, WINDOW]
    other = replaced(mask, {0: 40, 2: 20, 3: 50, 4: 30})
    assert other(0, 0, 139, 0)
    assert not other(0, 0, 140, 0)
    assert settings == {"size": 4, "more": [1, 2]}
    assert (mask.__defaults__, WINDOW) == ((5,), 3)
    assert not mask(0, 0, 14, 0)
