"""Kernels for few rows over many keys: their results, their calls, their texts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from support.fork_server import compiling, run_python
from support.no_waiting import no_waiting
from support.parts import PROGRAMS, Sizes, make_case, whole_of, widened

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.emit.facts import PageFacts
from attndsl.backends.engine.describe import describe_kernels
from attndsl.backends.engine.kernel_listing import source_of
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.work_counters import Counts
from attndsl.backends.triton import decode_family, serve_launch
from attndsl.backends.triton.decode_family import Decode, DecodeForwardLaunch
from attndsl.backends.triton.decode_kernels import FORWARDS
from attndsl.backends.triton.decode_tiles import (
    LEAST_PARTS,
    MANY_TILES,
    MOST_PARTS,
    PARTS_OF_GROUP,
    DecodeShape,
    Sharing,
    UnitPrograms,
    members_of,
    most_parts,
    shape_of,
    sharing_of,
)
from attndsl.backends.triton.family import Portable
from attndsl.call.dispatch import get_backend
from attndsl.foundation.caches import CACHES, Reason

SOME = (
    "all", "by head", "by key head", "nothing for some", "alibi", "by score", "groups", "gains",
    "bias", "documents", "flags", "sink", "dropped sigmoid",
)  # fmt: skip
FAMILIES = (Decode(), Portable())
KEYS = 100
"""Seven parts at most: under the interpreter a tile has 16 keys."""


@pytest.fixture
def ran(monkeypatch):
    """How many calls the family has run."""
    found = []
    real = Decode.forward

    def seen(self, *args):
        found.append(args)
        return real(self, *args)

    monkeypatch.setattr(Decode, "forward", seen)
    return found


def check(name, sizes, device, dtype, tolerance):
    """The reference runs in fp64: in bf16 it rounds scores, and ``relu`` then cuts other pairs."""
    found = {}
    for backend in ("decode", "reference"):
        torch.manual_seed(0)
        case = make_case(name, backend, dtype, sizes, device)
        if backend == "reference":
            case = widened(case)
        found[backend] = [x.detach() for x in whole_of(case) if x is not None]
    for own, other in zip(found["decode"], found["reference"], strict=True):
        # Weights of the program's own are not divided by anything, and their sums grow with keys.
        size = max(1.0, float(other.double().std())) if "weights" in PROGRAMS[name] else 1.0
        torch.testing.assert_close(
            own.double(), other.double(), rtol=tolerance, atol=tolerance * size, equal_nan=True
        )


def few_rows(heads=4, kv_heads=2, q_len=3, kv_len=KEYS, **more):
    return Sizes(batch=2, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, **more)


@pytest.mark.parametrize("name", SOME)
def test_programs(device, name, ran):
    check(name, few_rows(), device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert bool(ran) == ("dropped" not in name)


@pytest.mark.parametrize("kv_len", [1, 16, 33, 65, 200])
def test_lengths(device, kv_len, ran):
    sizes = few_rows(2, 1, q_len=2, kv_len=kv_len)
    check("lower right", sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert ran


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len"),
    [(1, 1, 1), (3, 1, 1), (6, 2, 5), (12, 1, 7), (2, 2, 64), (8, 2, 17), (130, 1, 1)],
)
def test_groups_of_heads(device, heads, kv_heads, q_len, ran):
    """Groups that are no powers of two, more rows than a tile has, more heads than a tile has."""
    sizes = few_rows(heads, kv_heads, q_len, 70)
    check("alibi", sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert ran


def parts_in_interpreter(tiles):
    """Parts of a unit that is alone, as ``parts_of`` and ``most_parts_of`` say."""
    most = max(LEAST_PARTS, min(tiles // MANY_TILES, MOST_PARTS))
    return -(-tiles // -(-tiles // min(tiles, most)))


@pytest.mark.parametrize("name", ["lower right", "relu"])
@pytest.mark.parametrize(
    ("keys", "parts"), [(1152, 18), (2496, 39), (2600, 33)],
    ids=["merged by one", "16, 16 and 7", "16, 16 and 1"],
)  # fmt: skip
def test_more_parts_than_are_merged_at_once(device, name, keys, parts, ran):
    """One tile of rows has many parts of 4 or 5 tiles, all with live pairs."""
    assert parts_in_interpreter(-(-keys // 16)) == parts
    assert (parts > Sharing(256, LEAST_PARTS).most_in_one) == (keys > 2000)
    sizes = few_rows(2, 1, q_len=1, kv_len=28 * keys if device == "cuda" else keys)
    check(name, sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert ran


RAGGED = {
    "causal": ("causal()", {}),
    "window": ("causal() and q - kv < 40", {}),
    "soft cap and sink": ("mask = causal(); score = softcap(score, 3.0); sink = 0.5", {}),
    "per head": ("causal() and q - kv < 20 * (h + 1)", {}),
    "nothing": ("mask = kv < 0", {}),
    "own weights": ("mask = causal(); weights = sigmoid(score)", {}),
}


def ragged_call(device, entries, room=KEYS, heads=4, dim=16, dtype=torch.float32):
    """Queries and a cache, one entry for each of ``entries`` (numbers of keys)."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)

    batch = len(entries)
    lengths = torch.tensor(entries, dtype=torch.int32, device=device)
    q, k, v = random(batch, heads, 1, dim), *(random(batch, 2, room, dim) for _ in range(2))
    return q, k, v, lengths


@pytest.mark.parametrize("name", RAGGED)
def test_each_entry_has_its_own_keys(device, name, ran):
    text, captures = RAGGED[name]
    q, k, v, lengths = ragged_call(device, (1, 17, 100))
    found, wanted = (
        attndsl.compile(text, backend=backend)(
            q.to(kind), k.to(kind), v.to(kind), q_offset=lengths - 1, kv_lengths=lengths, **captures
        )
        for backend, kind in (("decode", q.dtype), ("reference", torch.float64))
    )
    torch.testing.assert_close(found.double(), wanted, atol=2e-3, rtol=2e-3)
    assert len(ran) == 1


def test_bits_do_not_depend_on_the_batch(device):
    """Of a request alone, and in batches of other requests in other places."""
    attention = attndsl.compile(
        "mask = causal() and q - kv < 80; score = score + alibi()", backend="decode"
    )
    entries = (1, 100, 33, 66, 98)
    q, k, v, lengths = ragged_call(device, entries)
    whole = attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths, return_lse=True)
    for some in ([1], [3, 1], [4, 2, 0, 1], [1, 1, 1]):
        part = torch.tensor(some, device=device)
        own = lengths[part]
        found = attention(
            q[part], k[part], v[part], q_offset=own - 1, kv_lengths=own, return_lse=True
        )
        for x, y in zip(found, whole, strict=True):
            assert torch.equal(x, y[part])


def test_bits_do_not_depend_on_the_room(device):
    """A cache with room for more keys has more programs, some of which have nothing to do."""
    attention = attndsl.compile("causal()", backend="decode")
    q, k, v, lengths = ragged_call(device, (100, 7))
    small = attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    k, v = (torch.cat((x, torch.zeros(2, 2, 300, 16, device=device)), 2) for x in (k, v))
    assert torch.equal(small, attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths))


def test_requests_of_some_and_of_many_parts(device):
    """Their bits are those of each alone, with as much room or less, and counts are 0 again."""
    entries, room = (2500, 1200, 500, 1, 3000, 520, 529, 600), 3000
    scale = 28 if device == "cuda" else 1
    entries, room = tuple(scale * x for x in entries), scale * room
    q, k, v, lengths = ragged_call(device, entries, room, heads=2)
    k, v = (x[:, :1].contiguous() for x in (k, v))

    def served(backend, some, keys):
        part = torch.tensor(some, device=device)
        own = lengths[part]
        attention = attndsl.compile("causal()", backend=backend)
        return attention(
            q[part], k[part, :, :keys], v[part, :, :keys], q_offset=own - 1, kv_lengths=own,
            return_lse=True,
        )  # fmt: skip

    everyone = list(range(len(entries)))
    whole = served("decode", everyone, room)
    for own, other in zip(whole, served("reference", everyone, room), strict=True):
        torch.testing.assert_close(own, other, rtol=2e-3, atol=2e-3)
    for some, keys in ((everyone, room), ([1], room), ([4], room), ([2, 5], room),
                       ([0], entries[0]), ([1, 2, 5, 7], entries[1])):  # fmt: skip
        for own, other in zip(served("decode", some, keys), whole, strict=True):
            assert torch.equal(own, other[some])
    family = get_backend("decode", False).families[0]
    assert not any(bool(counts.any()) for counts in family._counts._found.values())


def test_counts_are_zero_again(device, ran):
    # A GPU's programs take more keys each than the interpreter's.
    room = 2000 if device == "cuda" else KEYS
    q, k, v, lengths = ragged_call(device, (room, 90, 2), room)
    attention = attndsl.compile("causal()", backend="decode")
    for _ in range(3):
        attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    family = get_backend("decode", False).families[0]
    kept = list(family._counts._found.values())
    assert kept
    assert not any(bool(counts.any()) for counts in kept)


def test_counts_grow_and_are_shared_by_a_stream():
    counts = Counts()
    device = torch.device("cpu")
    first = counts.of(device, 0)
    assert counts.of(device, 0, 1000) is first
    assert counts.of(device, 1) is not first
    more = counts.of(device, 0, 5000)
    assert more.numel() >= 5000
    assert not more.any()
    assert counts.of(device, 0, 3000) is more


def test_gradients_come_from_another_family(device, ran):
    torch.manual_seed(0)
    found = []
    operands = [torch.randn(1, 4, n, 16, device=device).requires_grad_() for n in (2, 70, 70)]
    text = "mask = causal_lower_right(); score = score + alibi()"
    for backend in ("decode", "reference"):
        out = attndsl.compile(text, backend=backend)(*operands)
        found.append(torch.autograd.grad((out * out).sum(), operands))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, atol=2e-3, rtol=2e-3)
    assert len(ran) == 1


def test_shapes():
    assert members_of(8, together=True) == 8
    assert members_of(8, together=False) == 1
    assert members_of(128, together=True) == 64
    assert members_of(130, together=True) == 26
    assert members_of(97, together=True) == 1
    for q_len in (1, 2, 3, 16, 64):
        for heads in (1, 3, 7, 8, 26, 64):
            shape = shape_of(q_len, heads, 2, 256)
            assert shape in FORWARDS
            assert shape.group >= heads
            assert 16 <= shape.rows <= 128
            for element_bytes, columns in ((1, 256), (4, 128), (2, 320)):
                assert shape_of(q_len, heads, element_bytes, columns).rows == min(64, shape.rows)
    assert shape_of(64, 4, 2, 256) == DecodeShape(4, 32)


@pytest.mark.parametrize(
    ("text", "q_len", "page", "known"),
    [("causal()", 1, None, (256, 16)), ("causal()", 32, None, (128, 8)),
     ("causal()", 1, 16, (512, 16)), ("causal()", 8, 16, (256, 8)), ("causal()", 4, 16, (512, 16)),
     ("causal()", 32, 16, (128, 8))],
)  # fmt: skip
def test_how_programs_share_keys(text, q_len, page, known):
    """Without pages, and with them in narrow kernels, others, and those of 128 rows."""
    lowered, call = call_of(text, q_len, heads=8, head_dim=128)
    facts = FAMILIES[0].jobs(lowered, call, Task.FORWARD, None, None)[0].facts
    if page:
        pages = PageFacts(page, "bf16", "i32", "i32", "i32", 0, 0, True, True, False, False, True)
        facts = replace(facts, pages=pages)
    shape = shape_of(q_len, 4, 2, 256)
    sharing = sharing_of(shape, lowered.program, facts)
    assert sharing[:2] == known
    assert sharing.several == (shape.rows <= 32)
    config = Config(1, 64, 4, 3)
    few = [most_parts(keys, 8, config, sharing) for keys in (0, 1, 256, 257)]
    assert few == {16: [1, 1, 4, 5], 32: [1, 1, 2, 3]}.get(shape.rows, [1, 1, 1, 1])
    least = sharing.least
    assert most_parts(1 << 20, 64, config, sharing) == least
    assert most_parts(1 << 20, 1, config, sharing) == 128
    assert [sharing.counts_of(parts) for parts in (1, 2, 2 * least, 2 * least + 1)] == [
        0, 1, 1, 2 + 2 * least // PARTS_OF_GROUP
    ]  # fmt: skip
    rows = [sharing.lines_at_once(shape, width) for width in (16, 64, 128)]
    most = 8192 * (1 + (shape.rows > 64)) // least
    assert rows == [min(shape.lines, most // width) for width in (16, 64, 128)]


def call_of(text, q_len, heads=4, head_dim=64):
    lowered = attndsl.compile(text).lowered
    q = torch.empty(1, heads, q_len, head_dim, dtype=torch.bfloat16)
    k = torch.empty(1, 2, 4096, head_dim, dtype=torch.bfloat16)
    return lowered, example_call(lowered, head_dim, head_dim, q.dtype, {})._replace(q=q, k=k, v=k)


def test_what_other_families_run():
    def why(text, q_len, **more):
        lowered, call = call_of(text, q_len, **more)
        return FAMILIES[0].why_not(lowered, call, Task.FORWARD, None, None)

    assert why("causal()", 64) is None
    assert "up to 64 rows" in why("causal()", 65)
    assert "do not drop weights" in why("weights = dropout(softmax(score), 0.5)", 1)
    assert "65535" in why("causal()", 1, heads=65536)


def test_texts_are_plain_and_the_same_each_time():
    lowered, call = call_of("causal()", 1)
    text = source_of(FAMILIES, lowered, call, "forward", Wants())
    assert text == source_of(FAMILIES, lowered, call, "forward", Wants())
    assert "def attention_decode" in text
    assert "def attention_forward" not in text
    for absent in ("dropout", "sink", "score_of_pair", "weight_of_pair"):
        assert absent not in text
    assert "attention_decode" in attndsl.compile("causal()").source(backend="decode")


def test_they_are_described():
    backend = get_backend("decode", False)
    lowered = attndsl.compile("score").lowered
    (line,) = describe_kernels(backend, FAMILIES, lowered, 128)
    assert line.strip() == "forward    decode kernels, up to 64 rows of queries"
    lowered = attndsl.compile("weights = dropout(softmax(score), 0.5)").lowered
    (line,) = describe_kernels(backend, FAMILIES, lowered, 128)
    assert line.strip() == "forward    decode kernels, none: the decode kernels do not drop weights"


COMPILE = textwrap.dedent(
    """
    import sys
    import torch
    import attndsl
    from support.cross import compile_jobs
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.kernels.kernel import Task
    from attndsl.backends.triton.decode_family import Decode

    dtype, target, plain = getattr(torch, sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rich = "tensor n[batch]: int; mask = valid_keys(n)"
    rich += "; score = softcap(score, 9.0) + h; sink = 0.5 * h"
    sizes = (
        (1, 8, 128), (1, 2, 64), (16, 8, 64), (1, 16, 256), (64, 8, 128), (64, 8, 256), (64, 8, 512)
    )
    for text, number in ((rich, 5), ("causal()", plain)):
        lowered = attndsl.compile(text).lowered
        for q_len, heads, dim in sizes[:number]:
            q = torch.empty(2, heads, q_len, dim, dtype=dtype)
            k = torch.empty(2, 2, 4096, dim, dtype=dtype)
            call = example_call(lowered, dim, dim, dtype, {})._replace(q=q, k=k, v=k)
            jobs = Decode().jobs(lowered, call, Task.FORWARD, None, None)
            for kernel in compile_jobs(jobs, target):
                print(kernel.name, kernel.shared, dim)
    """
)


@pytest.mark.parametrize(
    ("dtype", "target", "plain"),
    [
        ("bfloat16", "cuda:90", 1),
        pytest.param("bfloat16", "cuda:90", 7, marks=pytest.mark.slow),
        pytest.param("bfloat16", "cuda:80", 7, marks=pytest.mark.slow),
        pytest.param("bfloat16", "cuda:86", 6, marks=pytest.mark.slow),
        pytest.param("float32", "cuda:90", 7, marks=pytest.mark.slow),
    ],
)
def test_they_compile_for_gpus_that_are_not_there(dtype, target, plain):
    """A program of all features at five sizes, and a plain one at the first ``plain`` of them."""
    done = run_python(COMPILE, dtype, target, plain, env=compiling())
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    shapes = ["4x1", "1x1", "4x16", "8x1", *["4x32"] * (dtype == "bfloat16")]
    assert {name for name, *_ in rows} == {f"forward_{shape}" for shape in shapes}
    # Two programs fit a processor. Those of 128 rows, and of 64 rows of many columns, are alone.
    large = [("forward_4x32", "128"), ("forward_4x16", "256"), ("forward_4x16", "512")]
    found = [int(shared) for name, shared, dim in rows if (name, dim) not in large]
    assert max(found) <= 113 * 1024, rows


@pytest.mark.parametrize("text", ["causal()", "mask = causal(); sink = 0.5"])
def test_entries_with_wrong_numbers_of_keys_are_nan(device, text, ran, monkeypatch):
    """On GPUs nobody looks at the numbers before."""
    entries = [50, KEYS + 1, KEYS, -1, 60]
    q, k, v, lengths = ragged_call(device, entries)
    starts = torch.tensor([49, 9, KEYS - 1, 9, (1 << 30) - 1], dtype=torch.int32, device=device)
    attention = attndsl.compile(text, backend="decode")

    def run():
        with torch.no_grad():
            return attention(q, k, v, q_offset=starts, kv_lengths=lengths, return_lse=True)

    if device == "cpu":
        with pytest.raises(attndsl.errors.ArgumentError, match="q_offset has values from 9"):
            run()
        monkeypatch.setattr("attndsl.call.value_checks._check_tensor", lambda *given: None)
        with pytest.raises(attndsl.errors.ArgumentError, match="kv_lengths has values from -1"):
            run()
        monkeypatch.setattr("attndsl.call.value_checks.check_range", lambda *given: None)
    for _ in range(2):
        out, lse = run()
        for found in (out, lse):
            assert found.flatten(1).isnan().all(1).tolist() == [False, True, False, True, True]
            assert not found[[0, 2]].isnan().any()
    assert ran


def test_numbers_are_looked_at_where_gradients_or_transforms_may_follow(monkeypatch):
    """Those make no results NaN. Here calls on CPUs do as calls on GPUs do."""
    monkeypatch.setattr("attndsl.call.prepared._marks_entries", lambda *given: True)
    q, k, v, lengths = ragged_call("cpu", [50, KEYS + 1])
    attention = attndsl.compile("causal()", backend="decode")

    def run(q):
        return attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)

    with torch.no_grad():
        assert run(q)[1].isnan().all()
        with pytest.raises(attndsl.errors.ArgumentError, match="kv_lengths"):
            torch.func.jvp(run, (q,), (torch.ones_like(q),))
    assert run(q)[1].isnan().all()
    with pytest.raises(attndsl.errors.ArgumentError, match="kv_lengths"):
        run(q.clone().requires_grad_())


def test_calls_with_lengths_run_bound_where_kernels_look_at_them(monkeypatch):
    """Here calls on CPUs do as calls on GPUs do."""
    monkeypatch.setattr("attndsl.call.prepared._marks_entries", lambda *given: True)
    made = []
    real = DecodeForwardLaunch.__call__
    monkeypatch.setattr(
        DecodeForwardLaunch, "__call__", lambda *given: made.append(1) or real(*given)
    )
    attention = attndsl.compile("param w: int; causal() and q - kv < w", backend="decode")
    reference = attndsl.compile(attention.text, backend="reference")
    for turn, w in enumerate((9, 9, 9, 9, 30, 30)):
        q, k, v, lengths = ragged_call("cpu", [50 + turn, KEYS - turn])
        out = attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths, w=w)
        wanted = reference(q, k, v, q_offset=lengths - 1, kv_lengths=lengths, w=w)
        torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    assert len(made) == 3
    wide = lengths.long()  # Kernels take 32 bits.
    torch.testing.assert_close(attention(q, k, v, q_offset=wide - 1, kv_lengths=wide, w=w), wanted)
    with pytest.raises(attndsl.errors.ArgumentError, match="kv_lengths"):
        attention(q, k, v, q_offset=wide - 1, kv_lengths=wide + KEYS, w=w)
    assert len(made) == 3


FAR = (1 << 31) - 1


@pytest.mark.parametrize("kv_len", [16, 64])
@pytest.mark.parametrize(
    "text", ["q >= kv", "q - kv < 20", "q >= kv or kv < 20", "q >= kv and q // 16 == kv // 16"]
)
def test_positions_beyond_all_limits_change_nothing_else(device, text, kv_len, ran, monkeypatch):
    """Formulas of tiles say anything for them: no tile is visited, and all counts stay 0."""
    for name in ("_check_tensor", "check_range"):
        monkeypatch.setattr(f"attndsl.call.value_checks.{name}", lambda *given: None)
    attention = attndsl.compile(text, backend="decode")
    q, k, v, lengths = ragged_call(device, [kv_len] * 2, kv_len)
    starts = torch.full_like(lengths, kv_len - 1)
    with torch.no_grad():
        wanted = attention(q, k, v, q_offset=starts, kv_lengths=lengths)
        for first in (FAR, FAR - 1, -FAR - 1, -FAR + 2, 1 << 30):
            for length in (kv_len, FAR, -FAR):
                bad_starts, bad_lengths = starts.clone(), lengths.clone()
                bad_starts[0], bad_lengths[0] = first, length
                out = attention(q, k, v, q_offset=bad_starts, kv_lengths=bad_lengths)
                assert out[0].isnan().all()
                assert torch.equal(out[1], wanted[1])
        assert torch.equal(attention(q, k, v, q_offset=starts, kv_lengths=lengths), wanted)
    assert ran


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4, 2, 1, 1000), (12, 4, 7, 3000), (8, 8, 64, 600)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_gpus(name, sizes):
    heads, kv_heads, q_len, kv_len = sizes
    own = few_rows(heads, kv_heads, q_len, kv_len, head_dim=64)
    check(name, own, "cuda", torch.bfloat16, 3e-2)


@pytest.mark.gpu
def test_a_graph_serves_other_lengths_with_the_same_bits():
    """Without a wait for the device, and with what the same requests give alone."""
    attention = attndsl.compile("causal() and q - kv < 3000", backend="decode")
    entries = [4096, 1, 777, 2048]
    q, k, v, lengths = ragged_call("cuda", entries, 4096, 16, 128, torch.bfloat16)
    attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    with no_waiting():
        attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    for more in (entries, [5, 4000, 256, 257], [4096] * 4, entries):
        lengths.copy_(torch.tensor(more))
        graph.replay()
        for number in range(4):
            one = slice(number, number + 1)
            alone = attention(
                q[one], k[one], v[one], q_offset=lengths[one] - 1, kv_lengths=lengths[one]
            )
            assert torch.equal(out[one], alone)


@pytest.mark.gpu
def test_graphs_of_torch_find_nothing_of_ours_in_their_memory():
    """The first call of a process is one that torch makes with a graph's memory."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", IN_GRAPHS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


IN_GRAPHS = """
import torch, attndsl
attention = attndsl.compile("causal()")
q, k, v = (torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 4096, 4096))
lengths = torch.tensor([4096, 1000], dtype=torch.int32, device="cuda")

@torch.compile(fullgraph=True, mode="reduce-overhead")
def step(q, k, v, lengths):
    return attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths) * 2.0

wanted = 2.0 * attndsl.compile("causal()", backend="reference")(
    q, k, v, q_offset=lengths - 1, kv_lengths=lengths
)
with torch.no_grad():
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(step(q, k, v, lengths), wanted, atol=2e-2, rtol=2e-2)
"""


@pytest.mark.gpu
def test_graphs_have_numbers_of_their_own():
    attention = attndsl.compile("causal()", backend="decode")
    q, k, v, lengths = ragged_call("cuda", [4096, 4000], 4096, 16, 128, torch.bfloat16)
    wanted = attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    starts = lengths - 1
    counts = get_backend("decode", False).families[0]._counts._of_graphs
    left = [x.numel() for x in counts.values()]
    graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            found.append(attention(q, k, v, q_offset=starts, kv_lengths=lengths))
    assert [x.numel() for x in counts.values()] == [left[0] - 2 * 2 * 2]
    # The two run at the same time, and again.
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in found)


@pytest.mark.gpu
def test_a_graph_has_one_kernel_a_call():
    """In a process of its own. A profile may have what ran before it, but none of that so often."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROFILED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = done.stdout.splitlines()
    assert ["attention_decode" in name for name in names] == [True], names


PROFILED = r"""
import torch, attndsl
from torch.profiler import ProfilerActivity, profile
attention = attndsl.compile("causal()", backend="decode")
q, k, v = (torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 4096, 4096))
lengths = torch.tensor([4096, 4000], dtype=torch.int32, device="cuda")
starts = lengths - 1
graph = torch.cuda.CUDAGraph()
with torch.no_grad():  # Elsewhere other kernels look at the numbers before.
    attention(q, k, v, q_offset=starts, kv_lengths=lengths)
    with torch.cuda.graph(graph):
        attention(q, k, v, q_offset=starts, kv_lengths=lengths)
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CUDA]) as found:
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
names = [x.name for x in found.events() if x.device_type == torch.autograd.DeviceType.CUDA]
for name in set(names):
    for _ in range(names.count(name) // 50):
        print(name)
"""


@pytest.mark.gpu
def test_a_hundred_calls_have_the_same_bits():
    attention = attndsl.compile("mask = causal(); score = score + alibi()", backend="decode")
    q, k, v, lengths = ragged_call("cuda", [8192, 100] * 8, 8192, 32, 128, torch.bfloat16)
    first = attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
    for _ in range(100):
        assert torch.equal(first, attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths))


MANY = 40 * 16
"""Keys of 40 tiles under the interpreter, in 14 parts."""


@pytest.mark.parametrize("name", ["causal", "softcap", "sink", "sigmoid", "ragged"])
@pytest.mark.parametrize("pages", [False, True])
def test_bits_do_not_depend_on_how_many_parts_a_program_has(device, name, pages, monkeypatch):
    """One, groups of eight, all; also where some requests have far fewer keys than others."""
    texts = {**PROGRAMS, "sink": "mask = causal(); sink = 0.5", "ragged": "causal()"}
    texts["sigmoid"] = "mask = causal(); weights = sigmoid(score)"
    text = texts[name]
    q, k, v, lengths = ragged_call(device, [MANY, 70, 333], MANY, heads=8)
    table = torch.arange(3 * 40, device=device).view(3, 40).int()
    cache = attndsl.PagedCache(
        *(x.unflatten(2, (40, 16)).permute(0, 2, 3, 1, 4).flatten(0, 1).clone() for x in (k, v)),
        table, lengths,
    )  # fmt: skip
    seen = []

    def run(joins, programs):
        CACHES.invalidate(Reason.RESET)
        for module in (decode_family, serve_launch):
            monkeypatch.setattr(module, "joins_parts", lambda *given: joins)
            monkeypatch.setattr(module, "programs_of", lambda *given: seen.append(1) or programs)
        attention = attndsl.compile(text, backend="decode")
        with torch.no_grad():
            if pages:
                starts = torch.arange(4, device=device)
                return attention.serve(q[:, :, 0], cache, starts, most_queries=1)
            if name == "ragged":
                return attention(q, k, v, q_offset=lengths - 1, kv_lengths=lengths)
            return attention(q, k, v, q_offset=MANY - 1)

    wanted = run(False, None)
    assert not seen
    for programs in (
        UnitPrograms(1, 1),
        UnitPrograms(2, 1),
        UnitPrograms(14, 1),
        UnitPrograms(14, 40),
    ):
        assert torch.equal(run(True, programs), wanted), programs
    assert len(seen) >= 4


@pytest.mark.parametrize("dim", [16, 256])
def test_values_behind_lengths_that_are_not_finite_reach_nothing(device, dim, monkeypatch):
    """However many parts a program has, also where a request has one part alone."""
    q, k, v, lengths = ragged_call(device, [MANY - 3, 7, 333], MANY, heads=8, dim=dim)
    spoilt = v.clone()
    for b, length in enumerate(lengths.tolist()):
        spoilt[b, :, length:] = float("nan")
    spoilt[0, 1, 200] = float("inf")

    def run(values, shares):
        CACHES.invalidate(Reason.RESET)
        monkeypatch.setattr(decode_family, "joins_parts", lambda *given: shares is not None)
        monkeypatch.setattr(decode_family, "programs_of", lambda *given: UnitPrograms(*shares))
        attention = attndsl.compile("causal()", backend="decode")
        with torch.no_grad():
            return attention(q, k, values, q_offset=lengths - 1, kv_lengths=lengths)

    wanted = run(v, None)
    for shares in (None, (1, 1), (2, 1), (14, 1), (14, 40)):
        found = run(spoilt, shares)
        assert not found[0, 4:].isfinite().any(), shares
        assert torch.equal(found[0, :4], wanted[0, :4]), shares
        assert torch.equal(found[1:], wanted[1:]), shares
