"""Calls that read lists which earlier calls made, and calls that may not."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import attndsl
from attndsl.backends.kernels.tile_list_cache import KeptLists
from attndsl.call.dispatch import get_backend

DOCUMENTS = "tensor doc[batch, kv_len]: int\nmask = q >= kv and doc[b, q] == doc[b, kv]"
LENGTH = 70


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The backend's kept lists, as in a process that has made no graph."""
    found = get_backend("triton", False).modules.kept_lists
    monkeypatch.setattr(found, "_seen_capture", False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    return found


@contextmanager
def making(number):
    """Lists are made so many times within."""
    found = get_backend("triton", False).modules.kept_lists
    before = found.made
    yield
    assert found.made - before == number


def documents(device, batch=1, length=LENGTH):
    return torch.randint(0, 5, (batch, length), device=device).sort().values


def operands(device, batch=1, length=LENGTH):
    return [torch.randn(batch, 1, length, 16, device=device) for _ in range(3)]


def check(text, qkv, **arguments):
    """The call is what the reference makes of it."""
    found = attndsl.compile(text, backend="triton")(*qkv, **arguments)
    wanted = attndsl.compile(text, backend="reference")(*qkv, **arguments)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


def layers(x, doc, number=3):
    """The output of layers that share their documents, and the gradient of their input."""
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    x = out = x.clone().requires_grad_()
    for _ in range(number):
        out = out + attention(out, out, out, doc=doc)
    return out.detach(), *torch.autograd.grad(out.square().sum(), [x])


def test_layers_and_the_backward_share_lists(device, kept, monkeypatch):
    doc, x = documents(device), operands(device)[0]
    layers(x, doc.clone(), 1)  # Compiles.
    before = kept.made
    first = layers(x, doc, 1)
    of_one_layer = kept.made - before
    # The interpreter has one tile size, so that dQ's kernel reads the forward's lists.
    assert of_one_layer == 2 if device == "cpu" else of_one_layer <= 3
    with making(0):
        again = layers(x, doc, 1)
        several = layers(x, doc)
    doc = doc.clone()
    with making(of_one_layer):
        layers(x, doc)
        layers(x, doc)
    monkeypatch.setattr(KeptLists, "_may_keep", lambda *args: False)
    with making(3 * 3):  # A forward and two kernels of a backward.
        anew = layers(x, doc)
    for one, other in zip((*first, *several), (*again, *anew), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_is_computed_again_finds_its_lists(device):
    doc, (q, k, v) = documents(device), operands(device)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    q.requires_grad_()
    attention(q, k, v, doc=doc).sum().backward()
    with making(0):
        checkpoint(lambda q: attention(q, k, v, doc=doc), q, use_reentrant=False).sum().backward()


def test_what_the_mask_does_not_read_may_change(device):
    text = (
        "tensor doc[kv_len]: int\ntensor gain[heads]: float\nparam temp: float\n"
        "mask = doc[q] == doc[kv]\nscore = gain[h] * score * temp"
    )
    doc, qkv = documents(device)[0], operands(device)
    gain = torch.ones(1, device=device)
    check(text, qkv, doc=doc, gain=gain, temp=1.0)
    with making(0):
        gain.mul_(2)
        check(text, qkv, doc=doc, gain=gain, temp=0.5)
        check(text, operands(device), doc=doc, gain=gain.clone(), temp=0.5, scale=0.1)
    with making(1):
        check(text, operands(device, length=50), doc=doc[:50], gain=gain, temp=0.5)


def test_documents_that_change_in_place(device):
    doc, qkv = documents(device, 2), operands(device, 2)
    for change in (
        lambda: doc.copy_(documents(device, 2)),
        lambda: doc[1].fill_(3),
        lambda: doc.detach()[:, :30].zero_(),
        lambda: setattr(doc, "data", documents(device, 2)),
    ):
        with making(1):
            check(DOCUMENTS, qkv, doc=doc)
            check(DOCUMENTS, qkv, doc=doc)
        change()
    with making(1):
        check(DOCUMENTS, qkv, doc=doc)


def test_lengths_that_grow_in_place(device):
    lengths, qkv = torch.tensor([3, 40], dtype=torch.int32, device=device), operands(device, 2)
    text = "tensor n[batch]: int\nmask = kv < n[b] and (q ^ kv) % 2 == 0"
    for _ in range(3):
        with making(2):
            for _ in range(2):
                check(text, qkv, n=lengths)
                check("(q ^ kv) % 2 == 0", qkv, kv_lengths=lengths)
        lengths.add_(7)


def test_positions_that_move(device):
    doc, (_, k, v) = documents(device), operands(device)
    q = torch.randn(1, 1, 20, 16, device=device)
    text = "tensor doc[kv_len]: int\nmask = q >= kv and doc[q] == doc[kv]"
    offset = torch.tensor(5, device=device)
    rows = torch.arange(20, device=device)
    for _ in range(2):
        with making(2):
            for _ in range(2):
                check(text, (q, k, v), doc=doc[0], q_offset=offset)
                check(text, (q, k, v), doc=doc[0], q_index=rows)
        offset.add_(17)
        rows.add_(9)
    check(text, (q, k, v), doc=doc[0], q_offset=4)
    with making(1):
        check(text, (q, k, v), doc=doc[0], q_offset=6)
        check(text, (q, k, v), doc=doc[0], q_offset=4)


def test_numbers_that_are_equal_and_not_the_same(device):
    """A mask can tell 0.0 from -0.0, and a param of a tensor changes where the tensor does."""
    text = "param p: float\nmask = (q ^ kv) % 2 == 0 and 1.0 / p > 0.0 or q == kv"
    qkv = operands(device)
    for number in (-0.0, 0.0, -0.0, 2.0):
        check(text, qkv, p=number)
    number = torch.tensor(0.5, device=device)
    check(text, qkv, p=number)
    number.neg_()
    with making(1):
        check(text, qkv, p=number)
        check(text, qkv, p=number)


def test_sizes_that_a_mask_reads(device):
    text = "tensor t[n]: float\nmask = (q ^ kv) % (40 * n) < 8\nscore = score + t[0]"
    qkv, t = operands(device), torch.randn(3, device=device)
    for number in (3, 1, 2):
        check(text, qkv, t=t[:number])


def test_views_of_one_table(device):
    """They have one version, and each has lists of its own."""
    table = torch.rand(2, LENGTH, LENGTH, device=device) < 0.2
    text, qkv = "tensor m[q_len, kv_len]: bool\nmask = m[q, kv]", operands(device)
    for _ in range(2):
        for _ in range(2):
            for view in (table[0], table[1], table[0].mT, table[0, :1].expand(LENGTH, LENGTH)):
                check(text, qkv, m=view)
        table[0, :, 40:] = False


def test_maps_that_are_given(device):
    """Their lists are kept for as long as the map is as it was."""
    doc, qkv = documents(device), operands(device)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    wanted = attention(*qkv, doc=doc)
    found = attention.tiles(LENGTH, LENGTH, 16, 16, doc=doc)
    with making(1):
        for _ in range(2):
            assert torch.equal(attention(*qkv, doc=doc, tiles=found), wanted)
    found.kinds.zero_()
    assert (attention(*qkv, doc=doc, tiles=found) == 0).all()
    assert torch.equal(attention(*qkv, doc=doc), wanted)


def test_where_no_version_can_be_seen(device):
    doc, qkv = documents(device), operands(device)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    with torch.inference_mode(), making(3):
        for _ in range(3):
            attention(*qkv, doc=doc)
    with torch.inference_mode():
        doc = documents(device)
    for _ in range(2):
        with making(1):
            check(DOCUMENTS, qkv, doc=doc)
        with torch.inference_mode():
            doc.add_(torch.arange(LENGTH, device=device) // 20)


def test_graphs_of_torch_make_them_each_time(device):
    doc, (q, k, v) = documents(device), operands(device)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    attention(q, k, v, doc=doc)
    compiled = torch.compile(
        lambda q: attention(attention(q, k, v, doc=doc), k, v, doc=doc), backend="aot_eager"
    )
    wanted = attention(attention(q, k, v, doc=doc), k, v, doc=doc)
    for _ in range(2):
        with making(2):
            assert torch.equal(compiled(q), wanted)


@pytest.mark.slow
def test_memory_that_a_graph_uses_again(device):
    """Inductor gives both calls one tensor of one version, whose values differ."""
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    tokens, (q, k, v) = torch.arange(LENGTH, device=device)[None], operands(device)

    def both(tokens):
        first = tokens // 20 * 3
        out = attention(q, k, v, doc=first)
        second = (first + (out[0, 0, 0, 0] > 1e9).long()) // 1000  # One document.
        return attention(out, k, v, doc=second)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(both)(tokens), both(tokens))


ACTIONS = ("call", "a part of it", "backward", "write", "write a part", "new", "give memory")


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=6))
def test_any_changes(actions):
    """Whatever happens between calls, they are those of the reference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    doc, (q, k, v) = documents(device, 2), operands(device)
    text = "tensor doc[kv_len]: int\nmask = doc[q] == doc[kv]"
    for action in (*actions, "call"):
        match action:
            case "call":
                check(text, (q, k, v), doc=doc[0])
            case "a part of it":
                check(text, (q, k, v), doc=doc[1])
            case "backward":
                grads = [
                    torch.autograd.grad(
                        attndsl.compile(text, backend=backend)(q, k, v, doc=doc[0]).sum(), [q]
                    )[0]
                    for backend in ("triton", "reference")
                    if q.requires_grad_() is q
                ]
                torch.testing.assert_close(*grads, atol=2e-3, rtol=2e-3)
                q = q.detach()
            case "write":
                doc.copy_(documents(device, 2))
            case "write a part":
                doc[0, 10:50] = 9
            case "new":
                doc = documents(device, 2)
            case "give memory":
                doc.data = documents(device, 2)


@pytest.mark.gpu
def test_streams_have_lists_of_their_own():
    doc, qkv = documents("cuda", length=4096), operands("cuda", length=4096)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    wanted = attention(*qkv, doc=doc)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(2):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with making(1 - turn), torch.cuda.stream(stream):
                out = attention(*qkv, doc=doc)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_replays_read_what_the_tensor_holds_then():
    doc, qkv = documents("cuda", length=512), operands("cuda", length=512)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    fresh = documents("cuda", length=512)
    attention(*qkv, doc=doc)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), making(1):
        doc.copy_(fresh)
        out = attention(*qkv, doc=doc)
    for _ in range(3):
        fresh.copy_(documents("cuda", length=512))
        graph.replay()
        wanted = attndsl.compile(DOCUMENTS, backend="reference")(*qkv, doc=fresh)
        torch.testing.assert_close(out, wanted, atol=2e-3, rtol=2e-3)
        # The replay has written ``doc``, whose version has stayed.
        with making(1):
            torch.testing.assert_close(attention(*qkv, doc=doc), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
def test_lists_that_a_graph_reads_are_its_own():
    """Those of eager calls may go, and a replay reads its own."""
    doc, qkv = documents("cuda", length=512), operands("cuda", length=512)
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    wanted = attention(*qkv, doc=doc).clone()
    static = doc.clone()
    attention(*qkv, doc=static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = attention(*qkv, doc=static)
    del doc
    torch.randint(0, 99, (1 << 22,), device="cuda")
    graph.replay()
    assert torch.equal(out, wanted)
