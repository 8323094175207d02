"""Gradients of everything captured: right, and the same bits each time, asked for or not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import attndsl

if TYPE_CHECKING:
    from collections.abc import Callable

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)


@dataclass(frozen=True)
class Sizes:
    """Of a call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int = 16


@dataclass(frozen=True)
class Pattern:
    """How a program looks up what it learns."""

    declared: str
    """Dims of ``t``; none for a param."""
    score: str
    shape: Callable[[Sizes], tuple[int, ...]]
    types: bool = False
    """Whether it reads ``ty``, a type for each token."""


PATTERNS = {
    "scalar": Pattern("", "score * t", lambda s: ()),
    "heads": Pattern("heads", "score * t[h]", lambda s: (s.heads,)),
    "batch": Pattern("batch", "tanh(score * t[b])", lambda s: (s.batch,)),
    "rows": Pattern("q_len", "score * t[q]", lambda s: (s.q_len,)),
    "columns": Pattern("kv_len", "score + t[kv] * score", lambda s: (s.kv_len,)),
    "distance": Pattern(
        "heads, 2 * kv_len", "score + t[h, q - kv + kv_len]", lambda s: (s.heads, 2 * s.kv_len)
    ),
    "buckets": Pattern(
        "n, heads",
        "score + t[min(int(floor(log2(abs(q - kv) + 1.0))), 4), h]",
        lambda s: (5, s.heads),
    ),
    "b_h_q_kv": Pattern(
        "batch, heads, q_len, kv_len",
        "score + t[b, h, q, kv]",
        lambda s: (s.batch, s.heads, s.q_len, s.kv_len),
    ),
    "h_q_kv": Pattern(
        "heads, q_len, kv_len", "score + t[h, q, kv]", lambda s: (s.heads, s.q_len, s.kv_len)
    ),
    "b_q_kv": Pattern(
        "batch, q_len, kv_len", "tanh(score * t[b, q, kv])", lambda s: (s.batch, s.q_len, s.kv_len)
    ),
    "hkv_q_kv": Pattern(
        "kv_heads, q_len, kv_len",
        "score + t[hkv, q, kv]",
        lambda s: (s.kv_heads, s.q_len, s.kv_len),
    ),
    "q_kv": Pattern("q_len, kv_len", "score + t[q, kv]", lambda s: (s.q_len, s.kv_len)),
    "kv_q": Pattern("kv_len, q_len", "score * t[kv, q]", lambda s: (s.kv_len, s.q_len)),
    "both ways": Pattern("n, n", "score + t[q, kv] + 0.5 * t[kv, q]", lambda s: (64, 64)),
    "nested": Pattern("n, n", "score + t[ty[b, q], ty[b, kv]]", lambda s: (3, 3), types=True),
    "two buckets": Pattern(
        "heads, m, n",
        "score * t[h, min(abs(q - kv), 3), ty[b, kv]]",
        lambda s: (s.heads, 4, 3),
        types=True,
    ),
    "hashed": Pattern("n", "score + t[(q * 7 + kv * kv) % n]", lambda s: (23,)),
    "twice": Pattern("n", "score + t[q] * t[(q * kv) % n] + t[0] * t[kv]", lambda s: (64,)),
}
MASKS = {
    "none": "true",
    "causal": "causal()",
    "window": "sliding_window(5)",
    "documents": "q >= kv and doc[b, q] == doc[b, kv]",
}
SIZES = {
    "even": Sizes(1, 2, 2, 16, 16),
    "batch": Sizes(2, 1, 1, 13, 15),
    "grouped": Sizes(1, 2, 1, 14, 11),
    "two tiles": Sizes(1, 1, 1, 9, 35),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Each pattern once, with all masks, sizes, dtypes and layouts among them.
SAMPLE = [
    (name, mask, size, dtype, layout)
    for name, mask, size, dtype, layout in zip(
        PATTERNS,
        itertools.cycle(["causal", "none", "documents", "window"]),
        itertools.cycle(["batch", "grouped", "batch", "grouped", "two tiles"]),
        itertools.cycle(["fp32", "bf16", "fp32", "fp16", "fp32"]),
        itertools.cycle(["plain", "transposed", "strided"]),
        strict=False,
    )
]


def lay_out(table: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if table.dim() == 0 or layout == "plain":
        return table.clone()
    if layout == "transposed":
        return table.permute(*reversed(range(table.dim()))).contiguous().permute(
            *reversed(range(table.dim()))
        )  # fmt: skip
    wide = table.new_zeros((*table.shape[:-1], 2 * table.shape[-1]))
    wide[..., ::2] = table
    return wide[..., ::2]


def program_of(name: str, mask: str) -> str:
    pattern = PATTERNS[name]
    lines = [f"tensor t[{pattern.declared}]: float" if pattern.declared else "param t: float"]
    lines += ["tensor ty[batch, positions]: int"] * pattern.types
    lines += ["tensor doc[batch, positions]: int"] * (mask == "documents")
    return "\n".join([*lines, f"mask = {MASKS[mask]}", f"score = {pattern.score}"])


def inputs_of(check, name, mask, size, dtype, layout, device="cpu", q_dtype=torch.float32):
    pattern, sizes = PATTERNS[name], size
    table = 0.5 + 0.3 * torch.randn(pattern.shape(sizes), device=device)
    captures: dict[str, Any] = {"t": lay_out(table.to(dtype), layout).requires_grad_()}
    tokens = max(sizes.q_len, sizes.kv_len)
    if pattern.types:
        captures["ty"] = torch.randint(0, 3, (sizes.batch, tokens), device=device)
    if mask == "documents":
        doc = torch.arange(tokens, device=device) // 6
        captures["doc"] = doc.expand(sizes.batch, tokens).int()
    place = SimpleNamespace(device=device, shape=(sizes.batch, sizes.heads, sizes.q_len, sizes.dim))
    inputs = check.inputs(
        place, q_dtype, kv_heads=sizes.kv_heads, kv_len=sizes.kv_len, captures=captures
    )
    for leaf in (inputs.q, inputs.k, inputs.v):
        leaf.requires_grad_()
    return inputs


def gradients(attention, inputs, leaves, runs, **options):
    """Of ``leaves``, ``runs`` times from one forward."""
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.captures, **options)
    return [
        torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True) for _ in range(runs)
    ]


def hold(check, backend, case, runs, device="cpu", q_dtype=torch.float32, sizes=None):
    """Gradients are right by the tolerance method, and the same bits each time."""
    name, mask, size, dtype, layout = case
    text = program_of(name, mask)
    oracle = attndsl.compile(text, backend="reference")
    attention = attndsl.compile(text, backend=backend)
    names = ["t", "q", "k", "v"]
    results, numbers = [], 0.0
    # Few numbers do not tell what errors are usual: on GPUs there is time for more inputs.
    while not results or (device == "cuda" and numbers < 64 and len(results) < 16):
        inputs = inputs_of(
            check, name, mask, sizes or SIZES[size], DTYPES[dtype], layout, device, q_dtype
        )
        golden = check.run(oracle, inputs.to(torch.float64))
        ref = check.run(oracle, inputs)
        leaves = [inputs.captures["t"], inputs.q, inputs.k, inputs.v]
        found = gradients(attention, inputs, leaves, runs)
        for run in found[1:]:
            # The Hopper kernels add up dQ in no fixed order unless they are told not to.
            count = 1 if backend == "hopper" else len(names)
            assert all(map(torch.equal, run[:count], found[0])), case
        fixed = gradients(attention, inputs, leaves[:1], 2, deterministic=True)
        assert torch.equal(*fixed[0], *fixed[1]), case
        # Hopper's backward makes gradients by distance itself, unless it is told to be so.
        if backend != "hopper":
            assert torch.equal(*fixed[0], found[0][0]), case
        spread = check.spread_of(text, inputs, q_dtype)
        results.append((golden, ref, dict(zip(names, found[0], strict=True)), spread))
        numbers += check.number_of(golden["t"] - ref["t"].double())
    golden, ref, wanted, spread = (
        check.pooled([{name: one[name] for name in names} for one in each])
        for each in zip(*results, strict=True)
    )
    # Backwards take rowsum(dO * O) of an output that is rounded, one error for all pairs of a row,
    # which shows where these are few: 1.6 times the usual error of a bias in documents of 6 tokens.
    # A tensor by rows adds up just these (1.25 times the usual error, measured).
    rows = case[0] == "twice"
    slack = (1.5 if rows else 1.25) if q_dtype is torch.bfloat16 else 1.0
    check.close(golden, ref, wanted, q_dtype, slack, spread)


@interpreted
@pytest.mark.parametrize("case", SAMPLE, ids="-".join)
def test_every_pattern(check, case):
    hold(check, "triton", case, runs=2)


@pytest.mark.parametrize("case", SAMPLE, ids="-".join)
def test_every_pattern_on_cpus(check, case):
    hold(check, "cpu", case, runs=3)


@pytest.mark.parametrize(
    "backend",
    ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "hopper"))],
)
def test_what_is_added_to_rows_learns_nothing(check, backend):
    """Its gradient is 0, but for what a backward takes rowsum(dO * O) of: a rounded output.

    So the tolerance method has nothing to hold it to: the reference's row of dS sums up to less.
    """
    device = "cpu" if backend == "cpu" else "cuda"
    text = "tensor t[n]: float; mask = causal(); score = score + t[q % n]"
    place = SimpleNamespace(device=device, shape=(2, 4, 60, 64))
    table = torch.randn(8, device=device).requires_grad_()
    inputs = check.inputs(place, torch.bfloat16, captures={"t": table})
    golden = check.run(attndsl.compile(text, backend="reference"), inputs.to(torch.float64))
    assert golden["t"].abs().max() < 1e-12
    found = check.run(attndsl.compile(text, backend=backend), inputs.to(torch.bfloat16))
    # bf16 rounds by up to 2^-9 of each element, which are independent.
    deviation = 2.0**-9 * (found["out"].double() * inputs.grad_out.double()).square().sum(-1)
    rows = deviation.new_zeros(8).index_add(
        0, torch.arange(60, device=device) % 8, (2.0**-9 * deviation).sum((0, 1))
    )
    assert (found["t"].double().abs() <= 6 * rows.sqrt() + 1e-6).all()


KINDS = [("fp32", "plain"), ("bf16", "transposed"), ("fp16", "strided")]
GRID = [(mask, size, *kind) for mask, size, kind in itertools.product(MASKS, SIZES, KINDS)]
ON_GPUS = [
    (mask, size, *kind)
    for (mask, kind), size in itertools.product(
        zip(MASKS, itertools.cycle(KINDS), strict=False), SIZES
    )
]
"""Fewer, since each mask and kind has kernels of its own to compile."""


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_the_grid(check, backend, name):
    for case in GRID:
        hold(check, backend, (name, *case), runs=3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_grid_in_kernels(check, backend, name):
    large = {
        "even": Sizes(1, 4, 4, 512, 512, 64),
        "batch": Sizes(2, 4, 2, 333, 417, 64),
        "grouped": Sizes(3, 4, 1, 400, 130, 64),
        "two tiles": Sizes(1, 2, 2, 70, 1030, 64),
    }
    if name in ("both ways", "twice"):
        large = {size: replace(one, q_len=60, kv_len=64) for size, one in large.items()}
    for case in ON_GPUS:
        hold(check, backend, (name, *case), 3, "cuda", torch.bfloat16, large[case[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_hundred_times(check, backend, name):
    sizes = Sizes(2, 4, 2, 60, 64, 64)
    if name not in ("both ways", "twice"):
        sizes = replace(sizes, q_len=1030, kv_len=1030)
    case = (name, "causal", "even", "fp32", "plain")
    hold(check, backend, case, 100, "cuda", torch.bfloat16, sizes)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradcheck_on_cpus(name, backend):
    sizes = Sizes(2, 2, 1, 5, 6, 4)
    table = 0.5 + 0.1 * torch.randn(PATTERNS[name].shape(sizes), dtype=torch.float64)
    operands = [
        torch.randn(2, heads, rows, 4, dtype=torch.float64)
        for heads, rows in ((2, 5), (1, 6), (1, 6))
    ]
    captures = {"ty": torch.randint(0, 3, (2, 6))} if PATTERNS[name].types else {}
    attention = attndsl.compile(program_of(name, "causal"), backend=backend)
    assert torch.autograd.gradcheck(
        lambda t: attention(*operands, t=t, **captures), (table.requires_grad_(),), fast_mode=True
    )


@interpreted
def test_shifted_and_mapped_positions(check):
    """Where pairs look up parts of a tensor, and where they meet in its elements."""
    for shape, options in (
        ((20, 24), {"q_offset": 3, "kv_offset": 5}),
        ((6, 9), {}),
        ((20, 20), {"q_offset": torch.tensor(4)}),
        ((20, 20), {"kv_index": torch.arange(15) // 2}),
    ):
        text = "tensor t[m, n]: float; score = score + t[q, kv]"
        place = SimpleNamespace(device="cpu", backend="triton", shape=(2, 1, 13, 16))
        table = torch.randn(shape, requires_grad=True)
        inputs = check.inputs(
            place, torch.float32, kv_len=15, captures={"t": table}, options=options
        )
        check(place, text, inputs)


@interpreted
@pytest.mark.parametrize("mask", ["none", "documents"])
def test_one_program_goes_through_all_batch_entries_and_heads(check, monkeypatch, mask):
    """As on GPUs where tiles are many; the documents differ from batch entry to batch entry."""
    from attndsl.backends.triton.captures import pair_gradients

    monkeypatch.setattr(pair_gradients, "PROGRAMS", 1)
    place = SimpleNamespace(device="cpu", backend="triton", shape=(2, 2, 9, 16))
    captures = {"t": torch.randn(9, 35).half().requires_grad_()}
    text = "tensor t[q_len, kv_len]: float; score = score + 1.5 * t[q, kv]"
    if mask == "documents":
        text += "; tensor doc[batch, kv_len]: int; mask = doc[b, q] == doc[b, kv]"
        captures["doc"] = torch.stack([torch.arange(35) // 40, torch.arange(35) // 8])
    inputs = check.inputs(place, torch.float32, kv_heads=1, kv_len=35, captures=captures)
    check(place, text, inputs)


@interpreted
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (1, 1)])
@pytest.mark.parametrize("name", ["q_kv", "hashed", "columns", "rows"])
def test_lengths_of_nothing(name, q_len, kv_len):
    sizes = Sizes(1, 1, 1, q_len, kv_len)
    table = torch.randn(PATTERNS[name].shape(sizes), requires_grad=True)
    attention = attndsl.compile(program_of(name, "none"), backend="triton")
    leaves = [torch.randn(1, 1, n, 8, requires_grad=True) for n in (q_len, kv_len, kv_len)]
    found, *_ = torch.autograd.grad(attention(*leaves, t=table).sum(), [table, *leaves])
    # One key has all the weight, whatever its score.
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-6, rtol=0)
    assert found.shape == table.shape


@interpreted
@pytest.mark.parametrize("name", ["q_kv", "hashed"])
def test_what_is_not_finite_comes_out_as_such(name):
    """At the elements that it concerns, and nowhere else."""
    sizes = Sizes(1, 1, 1, 34, 34)
    table = torch.zeros(PATTERNS[name].shape(sizes), requires_grad=True)
    found = []
    for backend in ("reference", "triton"):
        torch.manual_seed(2)
        q, k, v = (torch.randn(1, 1, 34, 16) for _ in range(3))
        grad = torch.randn(1, 1, 34, 16)
        grad[0, 0, 7] = torch.inf
        grad[0, 0, 33] = torch.nan
        attention = attndsl.compile(program_of(name, "causal"), backend=backend)
        found += torch.autograd.grad(attention(q, k, v, t=table), table, grad)
    finite = found[0].isfinite()
    assert 0 < int(finite.sum()) < finite.numel()
    assert torch.equal(finite, found[1].isfinite())
    torch.testing.assert_close(found[1][finite], found[0][finite], atol=1e-5, rtol=1e-5)
