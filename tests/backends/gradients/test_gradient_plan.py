"""Which kernels make which gradients, and in what buffers pairs are added up."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.engine.kernel_listing import source_of
from attndsl.backends.gradients.gradient_plan import GradientKind, Rest, key_of, plan_gradients
from attndsl.backends.gradients.gradient_terms import terms_of
from attndsl.backends.kernels.example import example_call
from attndsl.backends.triton.captures import KINDS
from attndsl.backends.triton.captures.pair_gradients import PROGRAMS, buffers_of, parts_of, rest_of
from attndsl.backends.triton.family import Portable

CASES = {
    "heads": ("tensor t[heads]: float; score = score * t[h]", "lines"),
    "param": ("param t: float; score = t * tanh(score / t)", "lines"),
    "columns": ("tensor t[heads, kv_len]: float; score = score + t[h, kv]", "lines"),
    "rows by type": (
        "tensor t[n]: float; tensor ty[q_len]: int; score = score * t[ty[q]]", "lines",
    ),
    "both lines": ("tensor t[n]: float; score = score * t[q] + t[kv]", "lines"),
    "no gradient": ("tensor t[n]: float; score = score + floor(t[q])", "lines"),
    "distance": ("tensor t[n]: float; score = score + t[q - kv]", "distances"),
    "distance with dropout": (
        "tensor t[n]: float; score = score + t[q - kv]; weights = dropout(softmax(score), 0.1)",
        "distances",
    ),
    "pairs": ("tensor t[heads, q_len, kv_len]: float; score = score + t[h, q, kv]", "pairs"),
    "pairs, turned": ("tensor t[kv_len, q_len]: float; score = score * t[kv, q]", "pairs"),
    "pairs in weights": (
        "tensor t[q_len, kv_len]: float; weights = sigmoid(score) * t[q, kv]", "pairs",
    ),
    "pairs of types": (
        "tensor t[n, n]: float; tensor ty[batch, kv_len]: int; "
        "score = score + t[ty[b, q], ty[b, kv]]",
        "scattered",
    ),
    "pairs of types, by score": (
        "tensor t[n, n]: float; tensor ty[batch, kv_len]: int; "
        "score = score * t[ty[b, q], ty[b, kv]]",
        "scattered",
    ),
    "pairs of types, by weight": (
        "tensor t[n, n]: float; tensor ty[batch, kv_len]: int; "
        "weights = sigmoid(score) * t[ty[b, q], ty[b, kv]]",
        "scattered",
    ),
    "one query for all": (
        "tensor t[q_len, kv_len]: float; score = score + t[0, kv] + t[q, kv]", "scattered",
    ),
    "by score": ("tensor t[n]: float; score = score + t[int(score)]", "scattered"),
    "diagonal": (
        "tensor t[n, n]: float; score = score + t[q, q] * t[q, kv] + t[kv, kv]", "scattered",
    ),
}  # fmt: skip


def call_of(text, **changes):
    lowered = attndsl.compile(text).lowered
    call = example_call(lowered, 16, 16, torch.float32, {})
    return lowered, call._replace(**changes)


def where(lowered, call):
    """In which share ``t`` is."""
    program = lowered.program
    wants = Wants(
        tensors=frozenset({"t"} & {decl.name for decl in program.tensors}),
        params=frozenset(decl.name for decl in program.params),
    )
    plan = plan_gradients(KINDS, lowered, call, wants)
    assert plan.lines.q
    assert all(share.names for share in plan.shares)
    lines = plan.lines.tensors | plan.lines.params
    return ["lines"] * bool(lines) + [share.kind for share in plan.shares]


@pytest.mark.parametrize("name", CASES)
def test_each_gradient_has_one_maker(name):
    text, share = CASES[name]
    assert where(*call_of(text)) == [share]


def test_the_first_kind_that_takes_a_capture_makes_its_gradient():
    kind = GradientKind(name="own", takes=lambda lowered, call, names: [(names & {"t"}, None)])
    text = "tensor t[q_len, kv_len]: float; tensor u[q_len, kv_len]: float; "
    lowered, call = call_of(text + "score = score + t[q, kv] + u[q, kv]")
    plan = plan_gradients((kind, *KINDS), lowered, call, Wants(tensors=frozenset("tu")))
    assert [(share.kind, share.names) for share in plan.shares] == [
        ("own", {"t"}),
        ("pairs", {"u"}),
    ]
    moved = plan.with_feature("FLAG", frozenset("t"))
    assert moved.lines.features == (("FLAG", {"t"}),)
    assert moved.shares == plan.of_kind("pairs")
    read = plan.with_feature("FLAG", frozenset("tu"), "stored")
    assert [(share.kind, share.names) for share in read.shares] == [
        ("stored", {"t"}),
        ("stored", {"u"}),
    ]


TEXT = "tensor t[m, n]: float; score = score + t[q, kv]"


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"tensors": {"t": torch.zeros(2, 2)}}, "pairs"),
        ({"tensors": {"t": torch.zeros(5, 3)}, "q_offset": 3, "kv_offset": 1}, "pairs"),
        ({"tensors": {"t": torch.zeros(5, 3)}, "q_offset": 4}, "scattered"),
        ({"tensors": {"t": torch.zeros(5, 3)}, "q_offset": -1}, "scattered"),
        ({"tensors": {"t": torch.zeros(1, 2)}}, "scattered"),
        ({"q_offset": torch.tensor(0)}, "scattered"),
        ({"kv_index": torch.zeros(2, dtype=torch.int32)}, "scattered"),
        ({"tensors": {"t": torch.zeros(0, 2)}}, "lines"),
    ],
)
def test_pairs_meet_where_positions_leave_the_tensor_or_are_not_known(changes, share):
    lowered, call = call_of(TEXT, **changes)
    assert where(lowered, call) == [share]
    assert key_of(lowered, call, Wants()) != key_of(*call_of("score"), Wants())


def test_tensors_go_together_where_they_do_not_tell_the_same_apart():
    text = """
        tensor t[q_len, kv_len]: float
        tensor u[kv_len, q_len]: float
        tensor w[heads, q_len, kv_len]: float
        score = score * t[q, kv] + u[kv, q] + w[h, q, kv]
    """
    plan = plan_gradients(KINDS, *call_of(text), Wants(tensors=frozenset("tuw")))
    assert {share.names for share in plan.of_kind("pairs")} == {frozenset("tu"), frozenset("w")}


@pytest.mark.parametrize(
    ("index", "dims", "rest"),
    [
        ("b, h, q, kv", "batch, heads, q_len, kv_len", Rest(1, 1)),
        ("h, q, kv", "heads, q_len, kv_len", Rest(3, 1)),
        ("hkv, q, kv", "kv_heads, q_len, kv_len", Rest(3, 2)),
        ("b, q, kv", "batch, q_len, kv_len", Rest(1, 4)),
        ("q, kv", "q_len, kv_len", Rest(3, 4)),
    ],
)
def test_what_is_not_told_apart(index, dims, rest):
    text = f"tensor t[{dims}]: float; score = score + t[{index}]"
    q, k = torch.empty(3, 4, 70, 16), torch.empty(3, 2, 130, 16)
    sizes = {"batch": 3, "heads": 4, "kv_heads": 2, "q_len": 70, "kv_len": 130}
    shape = [sizes[dim.strip()] for dim in dims.split(",")]
    table = torch.empty(shape[::-1], dtype=torch.float16).permute(*range(len(shape))[::-1])
    lowered, call = call_of(text, q=q, k=k, v=k, tensors={"t": table})
    (term,) = terms = terms_of(lowered, {"t"})
    assert rest_of(term, call) == rest
    # Tiles of 64 are 2 x 3 here: few, so that all that is not told apart is a part of its own.
    parts = rest.batches * rest.heads
    assert parts_of(rest, call) == parts
    (sums,) = buffers_of(terms, call)
    assert sums.total.shape == (parts, *shape)
    assert sums.total.dtype is (torch.float16 if parts == 1 else torch.float32)
    if parts == 1:
        assert sums.total[0].stride() == table.stride()
    # Its first dim is the one with stride 1.
    assert sums.unit == ("kv" if parts > 1 else "q" if index.startswith("q") else "")
    assert len(sums.arguments()) == (5 if sums.unit else 6)


def test_long_sequences_have_one_part():
    q = torch.empty(2, 3, 64 * 32, 16, device="meta")
    _, call = call_of(CASES["pairs"][0], q=q, k=q, v=q)
    assert PROGRAMS < 32 * 32 * 3
    assert parts_of(Rest(2, 1), call) == 1


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("heads", []),
        ("distance", ["distances"]),
        ("pairs", ["pairs"]),
        ("pairs of types", ["pairs"]),
        ("pairs of types, by score", ["pairs"]),
        ("pairs of types, by weight", ["scattered", "pairs"]),
        ("by score", ["scattered"]),
    ],
)
def test_the_text_of_a_backward_has_all_its_kernels(name, kernels):
    lowered, call = call_of(CASES[name][0])
    text = source_of((Portable(),), lowered, call, "backward", Wants(tensors=frozenset({"t"})))
    apart = [
        line[4:-1] for line in text.split("\n")
        if line in ("def distances(", "def pairs(", "def scattered(")
    ]  # fmt: skip
    assert apart == kernels
    assert "tl.atomic" not in text
