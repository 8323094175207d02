"""Parts of a score that are evaluated once for each distance, and looked up for each pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.emit.facts import MAX_ROWS
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.gradients.gradient_terms import names_by_distance
from attndsl.backends.tiled import distance_lookups
from attndsl.backends.tiled.distance_lookups import (
    ON_CPUS,
    ON_GPUS,
    DistanceLookups,
    empty_values,
    evaluated_values,
)
from attndsl.backends.triton.values_by_distance import work_by_distance
from attndsl.call.attention_base import located_call
from attndsl.passes.look_up_distance import MARGIN
from attndsl.runtime.program_store import default_cache
from attndsl.serialise import digest

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 40, 52
TEXTS = {
    "buckets": "tensor t[heads, 32]: float; score = score + t[h, t5_bucket(q - kv, 32, 128)]",
    "causal": "tensor t[heads, 32]: float; mask = causal()\n"
    "score = score + t[h, t5_bucket_causal(q - kv, 32, 128)]",
    "of entries": "tensor t[batch, 32]: float; param g: float\n"
    "score = score + g * t[b, t5_bucket(q - kv, 32, 128)]",
    "of none": "tensor t[32]: float; mask = q != 3\nscore = score + t[t5_bucket(kv - q, 32, 128)]",
    "a logarithm": "tensor r[heads]: float; tensor a[heads]: float; mask = causal()\n"
    "score = score - r[h] * log(1.0 + a[h] * (q - kv))",
    "two parts": "tensor r[heads]: float; tensor t[heads, 32]: float\n"
    "score = 2 * tanh(score - r[h] * log(2.0 + abs(q - kv)))\n"
    "score = score + t[h, t5_bucket(q - kv, 32, 128)]",
    "with a sink": "tensor t[heads, 32]: float; tensor z[heads]: float\n"
    "score = score + t[h, t5_bucket(q - kv, 32, 128)] - z[h] * (q - kv); sink = z[h]",
    "with own weights": "tensor t[heads, 32]: float\n"
    "weights = sigmoid(score + t[h, t5_bucket(q - kv, 32, 128)]) / kv_len\n"
    "score = score + t[h, t5_bucket(q - kv, 32, 128)]",
    "keys of a head": "tensor t[kv_heads, 32]: float\n"
    "score = score + t[hkv, t5_bucket(q - kv, 32, 128)]",
    "with sizes": "tensor r[heads]: float\n"
    "score = score - r[h] * log(1.0 + abs(q - kv)) / log(2.0 + kv_len + q_len * heads)",
    "with bounds": "tensor t[heads, q_len + kv_len]: float\n"
    "score = score + tanh(t[h, q - kv + kv_len]) * log(2.0 + abs(q - kv))",
    "a window": "tensor r[heads]: float; tensor a[heads]: float\n"
    "mask = causal() and sliding_window(17); score = score - r[h] * log(1.0 + a[h] * (q - kv))",
    "infinite if dead": "tensor r[heads]: float; mask = q != kv\n"
    "score = score - r[h] * (1 / abs(q - kv) + log(abs(q - kv)))",
}
SHAPES = {
    "buckets": {"t": (HEADS, 32)},
    "causal": {"t": (HEADS, 32)},
    "of entries": {"t": (BATCH, 32), "g": ()},
    "of none": {"t": (32,)},
    "a logarithm": {"r": (HEADS,), "a": (HEADS,)},
    "two parts": {"r": (HEADS,), "t": (HEADS, 32)},
    "with a sink": {"t": (HEADS, 32), "z": (HEADS,)},
    "with own weights": {"t": (HEADS, 32)},
    "keys of a head": {"t": (KV_HEADS, 32)},
    "with sizes": {"r": (HEADS,)},
    "with bounds": {"t": (HEADS, Q_LEN + KV_LEN)},
    "a window": {"r": (HEADS,), "a": (HEADS,)},
    "infinite if dead": {"r": (HEADS,)},
}
PLACES = {
    "from zero": {},
    "at an offset": {"q_offset": KV_LEN - Q_LEN},
    "at offsets in memory": {"q_offset": torch.tensor(30), "kv_offset": 7},
}
LONG = "score = score + t[h, t5_bucket(q - kv, 32, 128)]"


@pytest.fixture
def looked_up(monkeypatch):
    """Lookups in calls of any size; the tensors that are looked up, in the order of their calls."""
    monkeypatch.setattr(DistanceLookups, "_pays", lambda self, found, pairs: True)
    monkeypatch.setattr(distance_lookups, "LEAST_PAIRS", 0)
    names = []
    real = DistanceLookups.call

    def call(self, found, given, made=True):
        names.append(found.tensor)
        return real(self, found, given, made)

    monkeypatch.setattr(DistanceLookups, "call", call)
    return names


def operands(q_len=Q_LEN, kv_len=KV_LEN, dim=16):
    lengths = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))
    return [torch.randn(BATCH, heads, n, dim).requires_grad_() for heads, n in lengths]


def captures(name):
    return {n: (torch.rand(shape) + 0.1).requires_grad_() for n, shape in SHAPES[name].items()}


def results(backend, name, tensors, named, options):
    attention = attndsl.compile(TEXTS[name], backend=backend)
    out = attention(*tensors, **named, **options)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), [*tensors, *named.values()])


@interpreted
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::attndsl.errors.ProgramWarning")
def test_results_and_gradients_are_those_of_the_reference(name, place, backend, looked_up):
    torch.manual_seed(0)
    tensors, named = operands(), captures(name)
    found = results(backend, name, tensors, named, PLACES[place])
    assert looked_up
    before = len(looked_up)
    wanted = results("reference", name, tensors, named, PLACES[place])
    assert len(looked_up) == before
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=2e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("lengths", [(1, 130), (129, 65), (200, 7)])
def test_any_lengths(lengths, backend, looked_up):
    tensors, named = operands(*lengths), captures("buckets")
    found = results(backend, "buckets", tensors, named, {})
    assert looked_up == ["by_distance"] * 2
    for got, right in zip(found, results("reference", "buckets", tensors, named, {}), strict=True):
        torch.testing.assert_close(got, right, rtol=2e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_margins_without_a_value_spoil_nothing(backend, looked_up):
    # Rows and keys of a tile behind those of the call look up NaN, and nothing masks that.
    text = "score = score + (sqrt(kv_len - 0.5 - abs(q - kv)) - log(kv_len - 0.5 - (kv - q)))"
    tensors = operands()
    found, right = (
        torch.autograd.grad(attndsl.compile(text, backend=name)(*tensors).square().sum(), tensors)
        for name in (backend, "reference")
    )
    assert looked_up
    for got, wanted in zip(found, right, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_lengths": torch.tensor([KV_LEN, 33])},
        {"q_offset": torch.tensor([3, 11])},
        {"q_offset": (1 << 30) - 200, "kv_offset": (1 << 30) - 220},
        {"q_offset": -(1 << 29), "kv_offset": 20 - (1 << 29)},
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::attndsl.errors.ProgramWarning")
def test_values_follow_captures_that_change_in_place(options, backend, looked_up):
    text = (
        "tensor r[heads]: float; mask = causal_lower_right()\n"
        "score = score - r[h] * log(1.0 + abs(q - kv))"
    )
    tensors, slopes = operands(), torch.rand(HEADS)
    attentions = [attndsl.compile(text, backend=name) for name in (backend, "reference")]
    for scale in (0.5, 3.0):
        slopes.mul_(scale)
        found, right = (attention(*tensors, r=slopes, **options) for attention in attentions)
        torch.testing.assert_close(found, right, rtol=2e-4, atol=2e-5)
        with torch.no_grad():
            torch.testing.assert_close(attentions[0](*tensors, r=slopes, **options), found)
    assert len(looked_up) == 4


def lookup_of(text, q_len=1024, kv_len=1024, wanted=None, least=ON_CPUS, **given):
    attention = attndsl.compile(text)
    q, k, v = operands(q_len, kv_len)
    lowered, call = located_call(attention, (q, k, v), given)
    lookups = DistanceLookups(evaluated_values, work_by_distance, names_by_distance, least)
    if wanted is not None:
        return lookups.of_backward(lowered, call, wanted), call
    return lookups.of(lowered, call), call


TABLE = {"t": torch.rand(HEADS, 32)}


def test_few_pairs_and_cheap_parts_are_evaluated_as_they_are():
    head = "tensor t[heads, 32]: float\n"
    assert lookup_of(head + LONG, **TABLE)[0] is not None
    assert lookup_of(head + LONG, 128, 128, **TABLE)[0] is None
    assert lookup_of(head + LONG, 1, 1 << 15, **TABLE)[0] is None
    index = torch.arange(1024)
    assert lookup_of(head + LONG, **TABLE, q_index=index)[0] is None
    for cheap in ("t[h, clamp(q - kv, -15, 15) + 16]", "t[h, 0] * (q - kv)", "t[h, q // 64]"):
        assert lookup_of(f"{head}score = score + {cheap}", **TABLE)[0] is None
    far = "t[h, t5_bucket(2 * q - kv, 32, 128)]"
    assert lookup_of(f"{head}score = score + {far}", **TABLE)[0] is None


@interpreted
def test_what_is_described_is_what_each_direction_does():
    text = "tensor r[heads]: float\nscore = score - r[h] * log(1.0 + abs(q - kv))"
    for backend, told in (("triton", "looked up, in forwards alone: "), ("cpu", "looked up: ")):
        shown = attndsl.compile(text, backend=backend).explain()
        assert told in next(line for line in shown.split("\n") if "by distance" in line)


def test_gpus_look_up_what_saves_more():
    head = "tensor t[heads, 32]: float\n"
    assert lookup_of(head + LONG, least=ON_GPUS, **TABLE)[0] is None
    assert lookup_of(head + LONG, 4096, 4096, least=ON_GPUS, **TABLE)[0] is not None
    shape = {"q_len": 8192, "kv_len": 8192, "least": ON_GPUS}
    kerple = "param r: float; score = score - r * log(1.0 + abs(q - kv))"
    assert lookup_of(kerple, **shape, r=1.0)[0] is not None
    assert lookup_of(kerple, **shape, r=1.0, wanted=Wants())[0] is None
    assert lookup_of(head + LONG, **shape, **TABLE, wanted=Wants())[0] is not None


def test_masks_stay_as_they_were_written():
    text = (
        "tensor t[heads, 32]: float\nmask = t5_bucket(q - kv, 32, 128) < 20\n"
        "score = score + t[h, t5_bucket(q - kv, 32, 128)]"
    )
    found, _ = lookup_of(text, **TABLE)
    assert found is not None
    whole = attndsl.compile(text).lowered
    assert found.lowered.program.mask is whole.program.mask
    assert found.lowered.sparsity == whole.sparsity


def test_gradients_along_rows_are_left_to_the_whole_program():
    # That of a capped score is no sum by distance, with or without a lookup.
    text = "param g: float\nscore = tanh(score + g * log(2.0 + abs(q - kv)))"
    learned = Wants(params=frozenset({"g"}))
    assert lookup_of(text, g=1.0, wanted=Wants())[0] is not None
    assert lookup_of(text, g=1.0, wanted=learned)[0] is None


@pytest.mark.parametrize("offset", [0, 5])
def test_values_are_those_of_distances(offset):
    text = "tensor t[heads, 32]: float\n" + LONG
    found, call = lookup_of(text, **TABLE, q_offset=offset)
    values = evaluated_values(found, call)
    assert values.shape == empty_values(found, call).shape == (HEADS, 2048 + 2 * MARGIN)
    scores = attndsl.compile(text).scores(*(torch.zeros(1, HEADS, 1024, 16),) * 2, **TABLE)[0]
    for row, column in ((0, 0), (5, 900), (1000, 3)):
        at = 1024 + MARGIN + row - column
        assert torch.equal(values[:, at], scores[:, row + offset, column])


def test_programs_that_look_up_are_told_from_written_ones():
    found, _ = lookup_of("tensor t[heads, 32]: float\n" + LONG, **TABLE)
    program = found.lowered.program
    written = tuple(replace(decl, is_padded=False) for decl in program.tensors)
    assert digest(program) != digest(replace(program, tensors=written))


@interpreted
@pytest.mark.parametrize("learned", [False, True])
def test_tuning_runs_the_program_that_looks_up(learned, looked_up):
    attention = attndsl.compile("tensor t[heads, 32]: float\n" + LONG, backend="triton")
    table = torch.rand(HEADS, 32, requires_grad=learned)
    lowered, call = located_call(attention, operands(1024, 1024), {"t": table})
    backend = generated_backend(("triton",), default_cache())
    for direction in ("forward", "backward"):
        _, found, own = backend.runner(lowered, call, direction)
        assert own.tensors["by_distance"].requires_grad is learned
        assert found.program.tensors[-1].is_padded


def test_tuning_runs_what_each_direction_does(looked_up):
    """Backwards of a logarithm evaluate it for each pair on GPUs."""
    text = "tensor r[heads]: float\nscore = score - r[h] * log(1.0 + abs(q - kv))"
    attention = attndsl.compile(text, backend="triton")
    lowered, call = located_call(attention, operands(1024, 1024), {"r": torch.rand(HEADS)})
    backend = generated_backend(("triton",), default_cache())
    assert backend.runner(lowered, call, "forward")[1] is not lowered
    assert backend.runner(lowered, call, "backward")[1] is lowered


def test_tiles_have_no_more_rows_than_the_margin():
    assert MARGIN >= MAX_ROWS
