"""Lists of keys that layers share: one map for all of them, and never one of other numbers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import attndsl
from attndsl.call import list_maps
from attndsl.errors import ArgumentError, DTypeError

TOKENS = "tensor chosen[batch, q_len, n]: int\nmask = causal() and kv in chosen[b, q, :]"
BLOCKS = "tensor chosen[batch, q_len, n]: int\nmask = kv // 8 not in chosen[b, q, :]"


@pytest.fixture
def made(monkeypatch):
    """Maps that were made."""
    found = []
    real = list_maps._new_map

    def counted(*args):
        found.append(args)
        return real(*args)

    monkeypatch.setattr(list_maps, "_new_map", counted)
    return found


def inputs_of(device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 70, 16, device=device).requires_grad_() for _ in range(3))
    return q, k, v, torch.randint(-2, 75, (2, 70, 9), device=device)


def results(attention, q, k, v, chosen):
    out = attention(q, k, v, chosen=chosen)
    return (out, *torch.autograd.grad((out * out).sum(), (q, k, v)))


def equal(one, other):
    return all(map(torch.equal, one, other))


def test_layers_make_one_map(device, made):
    q, k, v, chosen = inputs_of(device)
    attention = attndsl.compile(TOKENS)
    wanted = results(attention, q, k, v, chosen)
    assert len(made) > 0
    made.clear()
    shared = attndsl.shared_list(chosen)
    for _ in range(3):
        assert equal(results(attention, q, k, v, shared), wanted)
    assert len(made) == 1


def test_what_is_written_to_the_list_does_not_reach_the_copy(device, made):
    q, k, v, chosen = inputs_of(device)
    attention = attndsl.compile(TOKENS)
    wanted = results(attention, q, k, v, chosen)
    shared = attndsl.shared_list(chosen)
    chosen.data.fill_(3)
    assert equal(results(attention, q, k, v, shared), wanted)
    assert not equal(results(attention, q, k, v, chosen), wanted)


def test_a_changed_copy_has_a_new_map(device, made):
    q, k, v, chosen = inputs_of(device)
    attention = attndsl.compile(TOKENS)
    shared = attndsl.shared_list(chosen)
    results(attention, q, k, v, shared)
    shared[1] = 5
    chosen[1] = 5
    assert equal(results(attention, q, k, v, shared), results(attention, q, k, v, chosen))


def test_programs_and_parts_have_their_own_maps(device, made):
    q, k, v, chosen = inputs_of(device)
    shared = attndsl.shared_list(chosen)
    for text in (TOKENS, BLOCKS, TOKENS):
        attention = attndsl.compile(text)
        for given in (slice(0, 2), slice(1, 2)):
            own = [x[given] for x in (q, k, v)]
            found = attention(*own, chosen=shared[given])
            assert torch.equal(found, attention(*own, chosen=chosen[given]))
    of_shared = [args for args in made if args[0].data_ptr() != chosen.data_ptr()]
    assert len({tuple(args[1:]) for args in made}) == 2
    assert len(of_shared) >= 4


def test_few_maps_are_kept(device, made):
    q, k, v, chosen = inputs_of(device)
    attention, shared = attndsl.compile(TOKENS), attndsl.shared_list(chosen)
    for length in (*range(40, 70, 3), 67):
        rows = [x[:, :, :length] for x in (q, k, v)]
        found = attention(*rows, chosen=shared[:, :length])
        assert torch.equal(found, attention(*rows, chosen=chosen[:, :length]))
    (kept,) = vars(shared).values()
    assert len(kept) == 4


def test_copies_and_files_have_no_maps(device, made):
    q, k, v, chosen = inputs_of(device)
    attention, shared = attndsl.compile(TOKENS), attndsl.shared_list(chosen)
    before = len(pickle.dumps(shared))
    wanted = results(attention, q, k, v, shared)
    assert len(pickle.dumps(shared)) == before
    for other in (pickle.loads(pickle.dumps(shared)), copy.deepcopy(shared), shared.clone()):
        assert torch.equal(other, chosen)
        assert equal(results(attention, q, k, v, other), wanted)


def test_in_inference_mode_writes_are_seen(device, made):
    q, k, v, chosen = inputs_of(device)
    attention = attndsl.compile(TOKENS)
    with torch.inference_mode():
        shared = attndsl.shared_list(chosen + 0)
        one, other = (attention(q, k, v, chosen=shared) for _ in range(2))
        assert torch.equal(one, other)
        assert len(made) == 1
        shared.fill_(2)
        wanted = attention(q, k, v, chosen=torch.full_like(chosen, 2))
        assert torch.equal(attention(q, k, v, chosen=shared), wanted)


def test_compiled_functions_take_and_make_them():
    q, k, v, chosen = inputs_of("cpu")
    attention = attndsl.compile(TOKENS)
    wanted = attention(q, k, v, chosen=chosen)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(listed, makes):
        return attention(q, k, v, chosen=attndsl.shared_list(listed) if makes else listed)

    torch.testing.assert_close(run(chosen, True), wanted)
    torch.testing.assert_close(run(attndsl.shared_list(chosen), False), wanted)


def test_transforms_take_them():
    q, k, v, chosen = inputs_of("cpu")
    shared, attention = attndsl.shared_list(chosen), attndsl.compile(TOKENS)
    wanted = attention(q, k, v, chosen=chosen)
    found = torch.func.vmap(
        lambda *rows: attention(*(x[None] for x in rows[:3]), chosen=rows[3][None])[0]
    )(q, k, v, shared)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [([1, 2], ArgumentError, "is a tensor, not list"), (torch.ones(3), DTypeError, "has ints, not"),
     (torch.ones(3, dtype=torch.bool), DTypeError, "topk")],
)  # fmt: skip
def test_other_things_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        attndsl.shared_list(given)
