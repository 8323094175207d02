"""Results that are put where the caller says: rows of a part among those of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attndsl
from attndsl.backends.base import Signature
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.kernels.arguments import template_argument
from attndsl.backends.kernels.call_signature import signature_of
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.errors import (
    ArgumentError,
    AttnDSLError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from attndsl.pipeline import lower
from attndsl.source import Source

LENGTH, ROWS = 320, (64, 192)
PROGRAMS = {
    "window": ("causal() and q - kv < 100", {}),
    "gain": ("tensor x[heads]: float\nmask = causal(); score = x[h] * score",
             {"x": lambda heads: torch.linspace(0.5, 1.5, heads)}),
    "weights": ("mask = causal(); weights = sigmoid(score - log(kv_len))", {}),
}  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_part_is_put_among_the_whole(place, name, transposed):
    """The bits of a call, twice; rows beside it stay as they are; the backward reads them there."""
    text, made = PROGRAMS[name]
    batch, heads, _, width = place.shape
    kind = torch.float32 if place.device == "cpu" else torch.bfloat16
    shapes = [(batch, n, LENGTH, width) for n in (heads, heads, heads)]
    if transposed:
        shapes = [(b, n, h, d) for b, h, n, d in shapes]
    q, k, v, grad = (torch.randn(s, device=place.device, dtype=kind) for s in (*shapes, shapes[0]))
    if transposed:
        q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v, grad))
    attention = attndsl.compile(text, backend=place.backend)
    captures = {n: x(heads).to(place.device) for n, x in made.items()}
    own = slice(*ROWS)
    where = {"q_offset": ROWS[0], "q_len": LENGTH, "kv_len": LENGTH, "captures": captures}
    part = q[:, :, own], k, v
    has_lse = name != "weights"
    found = attention(*part, return_lse=has_lse, **where)
    out, lse = found if has_lse else (found, None)
    for _ in range(2):
        whole = torch.full_like(q, 7)
        room = whole[:, :, own]
        made = attention(*part, out=room, return_lse=has_lse, **where)
        put, told = made if has_lse else (made, None)
        assert put is room
        assert torch.equal(room, out)
        assert lse is None or torch.equal(told, lse)
        assert _beside(whole) == {7.0}
    results = lse, grad[:, :, own]
    wide = {"grad_dtype": torch.float32} if kind is torch.bfloat16 else {}
    names = list(captures)
    plain = attention.backward(*part, out, *results, wants_captures=names, **wide, **where)
    room = torch.full_like(q, 7)
    put = attention.backward(
        *part, whole[:, :, own], *results, wants_captures=names, room=room[:, :, own],
        **wide, **where,
    )  # fmt: skip
    assert put.q.data_ptr() == room[:, :, own].data_ptr()
    assert _beside(room) == {7.0}
    exact = place.device == "cpu"  # Elsewhere sums of dQ have no fixed order.
    for x, y in ((put.q, plain.q.to(kind)), (put.k, plain.k), (put.v, plain.v)):
        assert x.dtype is y.dtype
        torch.testing.assert_close(x, y, **({"rtol": 0, "atol": 0} if exact else {}))


def _beside(whole):
    """The elements of rows beside the part."""
    start, stop = ROWS
    return {*whole[:, :, :start].unique().tolist(), *whole[:, :, stop:].unique().tolist()}


def test_dq_alone_is_narrow_where_it_has_room():
    lowered = lower(Source("causal()"), {})
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    facts = replace(facts_of(lowered.program, call), wide_gradients=True, narrow_dq=True)
    kinds = [template_argument(name, facts).type for name in ("DQ", "DK", "DV_OUT")]
    assert kinds == ["*bf16", "*fp32", "*fp32"]


def test_each_kind_of_room_has_a_layout_of_its_own():
    """Descriptors have the steps of the room that a layout was made for."""
    lowered = lower(Source("causal()"), {})
    call = example_call(lowered, 64, 64, torch.bfloat16, {})._replace(signature=Signature("x"))
    rooms = [
        torch.empty(*call.q.shape[:2], 2 * call.q.shape[2] + more, 64, dtype=torch.bfloat16)
        for more in (0, 8)
    ]
    rooms = [None, *(room[:, :, : call.q.shape[2]] for room in rooms)]
    rooms.append(torch._neg_view(rooms[1]))  # Kernels write none of which torch changes the signs.
    keys = {signature_of(lowered, call._replace(room=room), Task.FORWARD, None) for room in rooms}
    assert len(keys) == len(rooms)


def _operands(kind=torch.float32):
    return [torch.randn(1, 2, 8, 16, dtype=kind) for _ in range(3)]


@pytest.mark.parametrize(
    ("room", "error", "said"),
    [
        ([1], ArgumentError, "{} is a list"),
        (torch.empty(4, 2, 8, 16), ShapeError, r"shape \(4, 2, 8, 16\)"),
        (torch.empty(1, 2, 8, 16, dtype=torch.int16), DTypeError, "torch.int16"),
        (torch.empty(1, 2, 8, 16, device="meta"), DeviceError, "on meta"),
        (torch.empty(1, 2, 8, 16, requires_grad=True), ArgumentError, "{} requires grad"),
    ],
)
def test_room_that_does_not_fit_is_refused(room, error, said):
    q, k, v = _operands()
    attention = attndsl.compile("causal()")
    with pytest.raises(error, match=said.format("out")):
        attention(q, k, v, out=room)
    out, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(error, match=said.format("room")):
        attention.backward(q, k, v, out, lse, torch.ones_like(out), room=room)


def test_dropout_is_put():
    q, k, v = _operands()
    attention = attndsl.compile("weights = dropout(softmax(score), 0.5)")
    room = torch.empty_like(q)
    attention(q, k, v, out=room, seed=3)
    assert torch.equal(room, attention(q, k, v, seed=3))
    torch.manual_seed(0)
    attention(q, k, v, out=room)
    torch.manual_seed(0)
    assert torch.equal(room, attention(q, k, v))


def test_gradients_of_what_is_put_are_refused():
    q, k, v = (x.requires_grad_() for x in _operands())
    attention, out = attndsl.compile("causal()"), torch.empty(1, 2, 8, 16)
    with pytest.raises(UnsupportedError, match="an input requires grad"):
        attention(q, k, v, out=out)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, out=out), attention(q, k, v))


def test_graphs_put_nothing():
    q, k, v = _operands()
    attention = attndsl.compile("causal()")
    graph = torch.compile(lambda out: attention(q, k, v, out=out), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="have no out"):
        graph(torch.empty_like(q))


def test_numbers_of_known_calls_are_looked_at():
    """A float may stand for an int if it is whole, in the second call as in the first."""
    q, k, v = _operands()
    attention = attndsl.compile("param n: int\nmask = q - kv < n and kv <= q")
    out, lse = attention(q, k, v, n=2, return_lse=True)
    wanted = attention.backward(q, k, v, out, lse, torch.ones_like(out), n=2)
    for _ in range(2):
        found = attention.backward(q, k, v, out, lse, torch.ones_like(out), n=2.0)
        assert torch.equal(found.q, wanted.q)
    with pytest.raises(AttnDSLError, match="n"):
        attention.backward(q, k, v, out, lse, torch.ones_like(out), n=2.5)


def test_torch_knows_that_room_was_written():
    q, k, v = _operands()
    room = torch.zeros_like(q)
    before = room._version
    attndsl.compile("causal()")(q, k, v, out=room)
    assert room._version > before
