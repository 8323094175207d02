"""Lists of keys: what every backend makes of them is what a comparison with each element makes."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.call.list_maps import _map_of
from attndsl.errors import ProgramErrors, TypeMismatchError, UnsupportedError

B, H, HKV, ROWS, KEYS = 2, 4, 2, 30, 45
Q, KV = torch.arange(ROWS).view(1, 1, -1, 1), torch.arange(KEYS)
PER_HEAD = "tensor c[batch, kv_heads, q_len, n]: int; "
PER_ROW = "tensor c[batch, q_len, n]: int; "
ONE_FOR_EACH_HEAD = "tensor c[batch, heads, n]: int; "


def has(x, rows):
    """Pairs whose ``x`` is one of the elements of their row (..., n)."""
    return (x[..., None] == rows).any(-1)


def by_head(c):
    return c.repeat_interleave(H // HKV, 1)


CASES = {
    "blocks of a key head": (
        PER_HEAD + "mask = causal() and kv // 8 in c[b, hkv, q, :]", (B, HKV, ROWS, 4),
        lambda c: (Q >= KV) & has(KV // 8, by_head(c)[:, :, :, None]),
    ),
    "tokens of a row": (
        PER_ROW + "mask = kv in c[b, q, :]", (B, ROWS, 9), lambda c: has(KV, c[:, None, :, None]),
    ),
    "tiles": (
        "tensor c[batch, heads, tiles, n]: int; mask = kv // 16 in c[b, h, q // 16, :]",
        (B, H, 2, 2), lambda c: has(KV // 16, c[:, :, torch.arange(ROWS) // 16][:, :, :, None]),
    ),
    "a list or the same block": (
        "param size: int; " + PER_ROW
        + "mask = causal() and (q // size == kv // size or kv // size in c[b, q, :])",
        (B, ROWS, 3),
        lambda c: (Q >= KV) & ((Q // 6 == KV // 6) | has(KV // 6, c[:, None, :, None])),
    ),
    "all but a list": (
        PER_ROW + "mask = kv // 4 not in c[b, q, :]", (B, ROWS, 5),
        lambda c: ~has(KV // 4, c[:, None, :, None]),
    ),
    "one list of a head, a window": (
        ONE_FOR_EACH_HEAD + "mask = causal() and (q - kv < 5 or kv // 8 in c[b, h, :])", (B, H, 2),
        lambda c: (Q >= KV) & ((Q - KV < 5) | has(KV // 8, c[:, :, None, None])),
    ),
    "distances": (
        "tensor c[heads, n]: int; mask = q - kv in c[h, :]", (H, 20),
        lambda c: has(Q - KV, c[None, :, None, None]),
    ),
    "rows that a key chooses": (
        "tensor c[batch, kv_len, n]: int; mask = q in c[b, kv, :]", (B, KEYS, 9),
        lambda c: has(Q, c[:, None, None]),
    ),
    "two lists": (
        PER_ROW + "mask = kv // 4 in c[b, q, :] and kv % 7 in c[b, 3, :]", (B, ROWS, 9),
        lambda c: has(KV // 4, c[:, None, :, None]) & has(KV % 7, c[:, 3][:, None, None, None]),
    ),
    "a list in a side": (
        PER_ROW + "mask = where(kv in c[b, q, :], 1, kv // 9) in c[b, 2, :]", (B, ROWS, 9),
        lambda c: has(
            torch.where(has(KV, c[:, None, :, None]), 1, KV // 9), c[:, 2][:, None, None, None]
        ),
    ),
    "tokens of each token": (
        "tensor c[tokens, n]: int; mask = causal() and kv in c[token, :]", (B * ROWS, 9),
        lambda c: (Q >= KV) & has(KV, c.view(B, 1, ROWS, 1, -1)),
    ),
    "tokens of each token and head": (
        "tensor c[heads, tokens, n]: int; mask = kv in c[h, token, :]", (H, B * ROWS, 9),
        lambda c: has(KV, c.view(H, B, ROWS, 1, -1).transpose(0, 1)),
    ),
    "tokens in more rows than there are": (
        "tensor c[most, n]: int; mask = kv in c[token, :]", (B * ROWS + 7, 9),
        lambda c: has(KV, c[: B * ROWS].view(B, 1, ROWS, 1, -1)),
    ),
    "tokens in fewer rows than there are": (
        "tensor c[some, n]: int; mask = kv in c[token, :]", (5, 9),
        lambda c: has(KV, c[torch.arange(B * ROWS).clamp(max=4)].view(B, 1, ROWS, 1, -1)),
    ),
    "empty lists": (
        PER_ROW + "mask = kv < 3 or kv in c[b, q, :]", (B, ROWS, 0), lambda c: KV < 3,
    ),
}  # fmt: skip


def operands(**how):
    q = torch.randn(B, H, ROWS, 16, **how)
    return q, torch.randn(B, HKV, KEYS, 16, **how), torch.randn(B, HKV, KEYS, 16, **how)


def expected(q, k, v, live):
    """Attention in fp64 by torch's operations; rows without live pairs are 0."""
    k, v = (x.double().repeat_interleave(H // HKV, 1) for x in (k, v))
    score = (q.double() @ k.mT * 0.25).masked_fill(~live, float("-inf"))
    return score.softmax(-1).nan_to_num(0.0) @ v


def given_for(name, shape):
    # Elements that no pair has, and the same ones several times.
    c = torch.randint(-3, 12 if "tokens" not in name else KEYS + 3, shape)
    return {"c": c, "size": 6} if "same block" in name else {"c": c}


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_lists_are_comparisons_with_each_element(name, backend):
    text, shape, live_of = CASES[name]
    attention = attndsl.compile(text, backend=backend)
    for turn in range(2):
        given = given_for(name, shape)
        if turn:
            given["c"] = given["c"].int()
        q, k, v = (x.requires_grad_() for x in operands())
        live = live_of(given["c"].long()).expand(B, H, ROWS, KEYS)
        out, wanted = attention(q, k, v, **given), expected(q, k, v, live)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        if turn:
            continue
        rows = live.any(-1, keepdim=True)  # torch's softmax has no gradient without live pairs.
        grad = torch.randn_like(out) * rows
        found = torch.autograd.grad(out, (q, k, v), grad)
        safe = expected(q, k, v, live | ~rows)
        for one, other in zip(
            found, torch.autograd.grad(safe, (q, k, v), grad.double()), strict=True
        ):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


TEXT = CASES["blocks of a key head"][0]


def one_call(backend="cpu"):
    q, k, v = operands()
    c = torch.randint(-2, 8, (B, HKV, ROWS, 4))
    live = CASES["blocks of a key head"][2](c)
    return attndsl.compile(TEXT, backend=backend), (q, k, v), c, expected(q, k, v, live)


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_elements_that_change_in_place_count():
    attention, (q, k, v), c, wanted = one_call()
    own = torch.zeros_like(c)
    for _ in range(3):
        attention(q, k, v, c=own)
    own.copy_(c)
    close(attention(q, k, v, c=own), wanted)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_parts_of_calls_read_the_list_of_the_whole(backend):
    attention, (q, k, v), c, wanted = one_call(backend)
    rows = [
        attention(q[:, :, i : i + 15], k, v, c=given, q_offset=i, q_len=ROWS)
        for i, given in ((0, c), (15, c[:, :, 15:]))
    ]
    close(torch.cat(rows, 2), wanted)
    heads = [
        attention(
            q[:, 2 * i : 2 * i + 2], k[:, i : i + 1], v[:, i : i + 1], c=given, heads=H,
            kv_heads=HKV, h_offset=2 * i,
        )
        for i, given in ((0, c), (1, c[:, 1:]))
    ]  # fmt: skip
    close(torch.cat(heads, 1), wanted)
    keys = [
        attention(q, k[:, :, i : i + n], v[:, :, i : i + n], c=c, kv_offset=i, return_lse=True)
        for i, n in ((0, 20), (20, 25))
    ]
    close(attndsl.merge(keys)[0], wanted)
    lengths = torch.full((B,), KEYS)
    longer = [torch.cat([x, x], 2) for x in (k, v)]
    close(attention(q, *longer, c=c, kv_lengths=lengths), wanted)


def test_served_requests_read_their_lists():
    attention = attndsl.compile(
        "tensor c[tokens, n]: int; mask = causal() and kv in c[token, :]", backend="triton"
    )
    lengths, rows = [30, 17, 41], [4, 1, 7]
    pages = [torch.randn(18, 8, HKV, 16) for _ in range(2)]
    table = torch.randperm(18, dtype=torch.int32).view(3, 6)
    cache = attndsl.PagedCache(*pages, table, torch.tensor(lengths, dtype=torch.int32))
    q, c = torch.randn(12, H, 16), torch.randint(-1, 41, (12, 20))
    out = attention.serve(q, cache, torch.tensor([0, 4, 5, 12], dtype=torch.int32), c=c)
    first = 0
    for request, (length, number) in enumerate(zip(lengths, rows, strict=True)):
        k, v = (
            x[table[request].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in pages
        )
        own = slice(first, first + number)
        position, key = torch.arange(length - number, length), torch.arange(length)
        live = (position[:, None] >= key) & has(key, c[own][:, None])
        wanted = expected(q[own].transpose(0, 1)[None], k, v, live)
        close(out[own].transpose(0, 1)[None], wanted)
        first += number


def test_elements_that_numpy_changes_count():
    """No version of a tensor tells of that, or of what a kernel of the user's own writes."""
    attention, (q, k, v), c, wanted = one_call()
    own = torch.zeros_like(c)
    attention(q, k, v, c=own)
    own.numpy()[...] = c.numpy()
    close(attention(q, k, v, c=own), wanted)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("options", [{"q_offset": 3}, {"q_offset": 3, "q_len": 40}])
def test_rows_by_token_are_those_of_this_call_wherever_it_begins(backend, options):
    """Several calls by one attention, whose maps have other dims."""
    attention = attndsl.compile(
        "tensor c[tokens, n]: int; mask = kv in c[token, :]", backend=backend
    )
    q, k, v = operands()
    for more in ({}, options, {}):
        c = torch.randint(-2, KEYS, (B * ROWS, 9))
        if "q_len" in more:
            c = torch.randint(-2, KEYS, (B * 40, 9))
            rows = c.view(B, 1, 40, 1, 9)[:, :, 3 : 3 + ROWS]
        else:
            rows = c.view(B, 1, ROWS, 1, 9)
        close(attention(q, k, v, c=c, **more), expected(q, k, v, has(KV, rows)))


def test_tokens_may_be_on_either_side():
    attention = attndsl.compile(
        "tensor c[batch, kv_len, n]: int; mask = token in c[b, kv, :]", backend="cpu"
    )
    q, k, v = operands()
    c = torch.randint(0, B * ROWS, (B, KEYS, 20))
    token = torch.arange(B * ROWS).view(B, 1, ROWS, 1)
    close(attention(q, k, v, c=c), expected(q, k, v, has(token, c[:, None, None])))


def test_keys_in_front_of_position_0_are_in_no_list_of_others():
    """-1 is what kv // 8 is there, and equal to an element -1."""
    attention = attndsl.compile(PER_ROW + "mask = kv // 8 in c[b, q, :]", backend="cpu")
    q, k, v = operands()
    c = torch.tensor([-1, 2, 9]).expand(B, ROWS, 3)
    live = has((KV - 16) // 8, c[:, None, :, None])
    assert live.any()
    close(attention(q, k, v, c=c, kv_offset=-16), expected(q, k, v, live))


def test_offsets_and_params_of_calls_like_the_one_before():
    """Maps of some begin at 0, and of others before it; calls of one shape may have either."""
    attention = attndsl.compile(
        "param far: int; " + PER_ROW + "mask = kv - far in c[b, q, :] or kv // far in c[b, 3, :]",
        backend="cpu",
    )
    q, k, v = operands()
    for offset, far in ((0, 3), (0, -3), (-16, 3), (100, 3), (100, 200), (0, 0), (-16, -7), (0, 3)):
        c = torch.randint(-30, 50, (B, ROWS, 9)) + offset
        key = KV + offset
        quotient = key // far if far else torch.zeros_like(key)
        live = has(key - far, c[:, None, :, None]) | has(quotient, c[:, 3][:, None, None, None])
        out = attention(q, k, v, c=c, kv_offset=offset, far=far)
        close(out, expected(q, k, v, live.expand(B, H, ROWS, KEYS)))


def test_graphs_read_the_elements_of_each_call():
    attention, (q, k, v), c, wanted = one_call()
    compiled = torch.compile(lambda *x: attention(*x[:3], c=x[3]), fullgraph=True)
    for _ in range(3):
        compiled(q, k, v, torch.zeros_like(c))
    close(compiled(q, k, v, c), wanted)


def test_what_has_no_bounds_is_refused():
    attention, (q, k, v), c, _ = one_call()
    for given in ({"kv_offset": torch.tensor(0)}, {"kv_index": torch.arange(KEYS)}):
        with pytest.raises(UnsupportedError, match="whose positions only a tensor tells"):
            attention(q, k, v, c=c, **given)
    far = attndsl.compile(
        "tensor far[kv_len]: int; " + PER_ROW + "mask = far[kv] in c[b, q, :]", backend="cpu"
    )
    with pytest.raises(UnsupportedError, match="no bounds"):
        far(q, k, v, c=c[:, 0], far=torch.arange(KEYS))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("kv in c[b, kv, :]", "kv chooses the row of 'c' and is looked for in it"),
        ("q in c[b, q, :]", "q chooses the row"), ("kv in c[b, q, 0]", "one element of 'c'"),
        ("kv in c[b, :]", "'c' has 3 dims"), ("kv / 2 in c[b, q, :]", "this is float"),
        ("int(score) in c[b, q, :]", "score"), ("kv in x[b, q, :]", "'x' has float"),
        ("kv in heads[0, :]", "has no elements"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(mask, said):
    declared = PER_ROW + "tensor x[batch, q_len, m]: float; score = score + x[b, q, 0]; mask = "
    with pytest.raises((TypeMismatchError, attndsl.errors.RankError, ProgramErrors), match=said):
        attndsl.compile(declared + mask)


def test_maps():
    found = _map_of(torch.tensor([[0, 3, -1], [3, 99, 3]]), 16, 0)
    assert found.nonzero().tolist() == [[0, 0], [0, 3], [0, 15], [1, 3], [1, 15]]
    assert _map_of(torch.tensor([-2, 5]), 16, 2).nonzero().flatten().tolist() == [0, 7]
