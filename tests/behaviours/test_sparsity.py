"""Calls whose tiles are skipped: by closed form, by lists, by maps made before."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.errors import ArgumentError, PlanError, UnsupportedError

DOCUMENTS = "tensor doc[batch, kv_len]: int\nmask = q >= kv and doc[b, q] == doc[b, kv]"
MASKS = {
    "causal": "causal()",
    "window": "sliding_window(70)",
    "strided": "strided(40, 64)",
    "neighbourhood": "natten2d(20, 8, 5, 3)",
    "block diagonal": "block_diagonal(50)",
    "tiles": "sta2d(4, 16, 2, 1)",
    "lower right": "causal_lower_right()",
    "nothing": "q < 0",
    "some rows": "q >= 64 and q < 70",
    "bits": "((q ^ kv) & 40) == 0 and q >= kv",
    "scores": "score > 0.0 and q >= kv",
    "param": "param w: int = 33\nmask = abs(q - kv) < w",
    "flag": "param all: bool = false\nmask = q >= kv or all",
}


def _length(place) -> int:
    return 2048 if place.device == "cuda" else 150


@pytest.mark.few_when_interpreted(name=set(MASKS) - {"causal", "strided", "tiles", "lower right"})
@pytest.mark.parametrize("name", MASKS)
def test_skipped_tiles_change_nothing(check, place, name):
    length = _length(place)
    # Interpreted kernels take seconds a head; heads that share keys are in one of these.
    heads = 1 if (place.backend, place.device) == ("triton", "cpu") and name != "window" else 2
    inputs = check.inputs(
        place, torch.float32, batch=1, heads=heads, kv_heads=1, q_len=length, kv_len=length + 13,
        with_lse=True,
    )  # fmt: skip
    check(place, MASKS[name], inputs)


@pytest.mark.few_when_interpreted(offsets=[(0, 70), (-30, 5)])
@pytest.mark.parametrize("offsets", [(200, 0), (0, 70), (-30, 5)])
def test_offsets(check, place, offsets):
    length = _length(place)
    inputs = check.inputs(
        place, torch.float32, batch=1, heads=1, q_len=64, kv_len=length, with_lse=True,
        options={"q_offset": offsets[0], "kv_offset": offsets[1]},
    )  # fmt: skip
    check(place, "q >= kv and q - kv < 100", inputs)


@pytest.mark.few_when_interpreted(sort=[True])
@pytest.mark.parametrize("sort", [True, False])
def test_documents(check, place, sort):
    length = _length(place)
    ids = torch.randint(0, 6, (2, length), device=place.device)
    ids = ids.sort().values if sort else ids
    inputs = check.inputs(
        place, torch.float32, batch=2, heads=1, q_len=length, with_lse=True,
        captures={"doc": ids},
    )  # fmt: skip
    check(place, DOCUMENTS, inputs)


CAPTURED = {
    "nested": (
        "tensor seg[q_len]: int\ntensor start[8]: int\n"
        "mask = seg[q] == seg[kv] and q - start[seg[q]] >= kv - start[seg[kv]]",
        lambda n: {"seg": torch.randint(0, 8, (n,)).sort().values, "start": torch.arange(8) * 3},
    ),
    "lengths": ("tensor n[batch]: int\nmask = kv < n[b]", lambda n: {"n": torch.tensor([5, n])}),
    "windows": (
        "tensor n[heads]: int\nmask = abs(q - kv) < n[h]",
        lambda n: {"n": torch.tensor([n // 2, 3])},
    ),
    "thresholds": (
        "tensor f[kv_len]: float\nmask = f[q] - f[kv] > 0.25",
        lambda n: {"f": torch.randn(n).sort().values},
    ),
    "flags": (
        "tensor g[kv_len]: bool\nmask = g[kv] or q == kv",
        lambda n: {"g": torch.rand(n) < 0.05},
    ),
    "table": (
        "tensor m[q_len, kv_len]: bool\nmask = m[q, kv]",
        lambda n: {"m": torch.rand(n, n) < 0.001},
    ),
}


@pytest.mark.few_when_interpreted(name=["nested", "thresholds", "flags", "table"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_masks(check, place, name):
    text, make = CAPTURED[name]
    length = _length(place)
    captures = {key: value.to(place.device) for key, value in make(length).items()}
    alike = place.device == "cpu" and name not in ("lengths", "windows")
    inputs = check.inputs(
        place, torch.float32, batch=1 if alike else 2, heads=1 if alike else 2, q_len=length,
        with_lse=True, captures=captures,
    )  # fmt: skip
    check(place, text, inputs)


def test_index_vectors_find_their_tiles(check, place):
    length = _length(place)
    order = torch.randperm(length, device=place.device)
    inputs = check.inputs(
        place, torch.float32, batch=1, heads=1, q_len=length, with_lse=True,
        options={"q_index": order, "kv_index": order},
    )  # fmt: skip
    check(place, "q >= kv and q - kv < 60", inputs)


def test_a_hundred_lengths_and_windows_share_one_kernel(counted, device):
    """Closed forms depend on neither, and nothing is planned again."""
    from attndsl.backends.base import Call
    from attndsl.passes.tiles.closed_form import closed_segments
    from attndsl.pipeline import lower
    from attndsl.source import Source

    lowered = lower(Source("param w: int\nmask = q >= kv and q - kv < w"), {})
    planned = None
    for step in range(100):
        length, window = 1 + 7 * step % 97, 1 + step % 50
        q, k, v = (torch.randn(1, 1, length, 16, device=device) for _ in range(3))
        sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 16}
        sizes |= {"q_len": length, "kv_len": length}
        out, _ = counted.forward(lowered, Call(q, k, v, 0.25, sizes, {}, {"w": window}))
        rows = torch.arange(length, device=device)
        away = rows[:, None] - rows
        live = (away >= 0) & (away < window)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, live, scale=0.25)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
        if planned is None:
            planned = closed_segments.cache_info().misses
    assert counted.kernels_built == 1
    assert closed_segments.cache_info().misses == planned


def test_a_mask_in_the_score_is_the_same_program():
    written = attndsl.compile("score = where(q >= kv, score, -inf)")
    assert written.lowered.digest == attndsl.compile("causal()").lowered.digest


def test_a_map_is_used_again(device, monkeypatch):
    from attndsl.backends.kernels import tile_lists

    length = 150
    ids = torch.randint(0, 5, (2, length), device=device).sort().values
    attention = attndsl.compile(DOCUMENTS, backend="triton")
    found = attention.tiles(length, length, 16, 16, batch=2, doc=ids)
    q, k, v = (torch.randn(2, 1, length, 16, device=device) for _ in range(3))
    expected = attndsl.compile(DOCUMENTS, backend="reference")(q, k, v, doc=ids)
    attention(q, k, v, doc=ids)

    def refuse(*args):
        raise AssertionError("tiles are looked for again")

    monkeypatch.setattr(tile_lists, "find_kinds", refuse)
    for _ in range(2):
        out = attention(q, k, v, doc=ids, tiles=found)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    with pytest.raises(AssertionError):
        attention(q, k, v, doc=ids.clone())  # Not those whose lists are kept.


def test_a_map_of_other_sizes_is_refused():
    attention = attndsl.compile("q >= kv and ((q ^ kv) & 8) == 0", backend="cpu")
    q = torch.randn(1, 1, 40, 8)
    with pytest.raises(ArgumentError, match="40 x 48"):
        attention(q, q, q, tiles=attention.tiles(40, 48))
    with pytest.raises(ArgumentError, match="tiles is a str"):
        attention(q, q, q, tiles="map")


def test_maps_are_kept_in_files(tmp_path):
    attention = attndsl.compile("sliding_window(20)")
    found = attention.tiles(100, 90, 16, 32)
    found.save(tmp_path / "a.npz")
    again = attndsl.TileMap.load(tmp_path / "a.npz")
    assert again == found
    assert (again.kind == found.kind).all()
    assert again.kind.dtype == "int8"
    assert again.kind.shape == (1, 1, 7, 3)
    assert 0.0 < again.sparsity < 1.0
    with pytest.raises(UnsupportedError, match="no mask function"):
        again.to_flex()
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:50])
    for name in ("b.npz", "c.npz"):
        with pytest.raises(ArgumentError, match="holds no tile map"):
            attndsl.TileMap.load(tmp_path / name)


def test_pictures_of_maps():
    found = attndsl.compile("causal()").tiles(64, 64, 16, 16)
    assert str(found).splitlines()[-4:] == ["+...", "#+..", "##+.", "###+"]
    assert "6 FULL (#), 4 PARTIAL (+), 6 EMPTY (.); sparsity 37.5%" in str(found)


@pytest.mark.parametrize("text", ["causal()", "sliding_window(100)", DOCUMENTS])
def test_maps_for_flex_attention(text):
    from torch.nn.attention.flex_attention import create_block_mask

    length = 500
    ids = torch.randint(0, 4, (2, length)).sort().values
    captures = {"doc": ids} if "doc" in text else {}
    attention = attndsl.compile(text)
    batch = 2 if captures else None
    found = attention.tiles(length, length, 128, 128, batch=batch or 1, **captures).to_flex()
    theirs = create_block_mask(
        found.mask_mod, batch, None, length, length, device="cpu", BLOCK_SIZE=128
    )
    assert torch.equal(found.to_dense(), theirs.to_dense())
    assert found.shape == theirs.shape


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"q_len": -1, "kv_len": 4}, "q_len is -1"),
        ({"q_len": 4, "kv_len": 4, "block_m": 0}, "block_m is 0"),
        ({"q_len": 1 << 24, "kv_len": 1 << 24}, "would have 17179869184 tiles"),
        ({"q_len": 1, "kv_len": 1 << 40}, "there are 1099511627776 keys"),
        ({"q_len": 4, "kv_len": 4, "direction": "up"}, "no direction 'up'"),
        ({"q_len": 4, "kv_len": 4, "doc": 3}, "no tensor or run-time param 'doc'"),
    ],
)
def test_sizes_that_cannot_be(arguments, match):
    with pytest.raises(ArgumentError, match=match):
        attndsl.compile("causal()").tiles(**arguments)


def test_empty_lengths():
    attention = attndsl.compile("causal()")
    assert attention.tiles(0, 100).kind.shape == (1, 1, 0, 1)
    assert attention.tiles(100, 0).sparsity == 1.0
    assert "0 x 1 tiles" in str(attention.tiles(0, 100))


class TestVerify:
    def test_plans_are_right(self):
        report = attndsl.verify("natten2d(20, 10, 5, 3)", 200, 200, block_m=32, block_n=16)
        assert report.tiles == 3 * 7 * 13
        # Ragged tiles, which loops take as whole.
        assert report.surplus < 5
        ids = torch.randint(0, 9, (2, 100))
        assert attndsl.verify(DOCUMENTS, 100, 100, batch=2, doc=ids).live > 0
        assert "tiles checked" in str(report)

    @pytest.mark.parametrize("end", ["start", "stop"])
    @pytest.mark.parametrize("kind", ["full", "partial"])
    def test_a_wrong_bound_is_caught(self, monkeypatch, kind, end):
        from dataclasses import replace

        from attndsl.ir import Op, const, node
        from attndsl.passes.tiles import sparsity

        derive = sparsity.closed_segments

        def wrong(*args):
            segments = dict(zip(("full", "partial"), derive(*args), strict=True))
            first, *others = segments[kind]
            moved = node(Op.ADD, getattr(first, end), const(-1 if end == "stop" else 1))
            segments[kind] = (replace(first, **{end: moved}), *others)
            return segments["full"], segments["partial"]

        monkeypatch.setattr(sparsity, "closed_segments", wrong)
        with pytest.raises(PlanError, match="defect of attndsl"):
            attndsl.verify("sliding_window(100)", 400, 400, block_m=32, block_n=32)

    def test_wrong_bounds_of_intervals_are_caught(self, monkeypatch):
        from attndsl.backends.tiled import tile_kinds

        extremes = tile_kinds._extremes

        def wrong(values, dim, block):
            low, _high = extremes(values, dim, block)
            return low, low

        monkeypatch.setattr(tile_kinds, "_extremes", wrong)
        with pytest.raises(PlanError):
            attndsl.verify(DOCUMENTS, 100, 100, block_m=16, doc=torch.arange(100)[None] // 30)

    def test_each_first_call_is_checked_when_asked(self, monkeypatch):
        from attndsl.inspection import tile_search as module

        checked = []
        verify = module.verify_call

        def count(*args):
            checked.append(args[-1])
            return verify(*args)

        monkeypatch.setattr(module, "verify_call", count)
        monkeypatch.setenv("ATTNDSL_VERIFY", "1")
        attention = attndsl.compile("causal()")
        q = torch.randn(1, 1, 70, 8)
        for _ in range(2):
            attention(q, q, q)
        assert checked == ["forward", "backward_q", "backward_kv"]

    def test_masks_of_scores_cannot_be_checked(self):
        with pytest.raises(UnsupportedError, match="depends on the score"):
            attndsl.verify("score > 0.0", 10, 10)


@pytest.mark.gpu
def test_cuda_graphs_hold_the_search_for_tiles():
    length = 1000
    ids = torch.arange(length, device="cuda")[None] // 130
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda", dtype=torch.half) for _ in range(3))
    attention = attndsl.compile(DOCUMENTS, doc=ids)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    ids.copy_(torch.arange(length, device="cuda")[None] // 77)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, attention(q, k, v), atol=0.0, rtol=0.0)


@pytest.mark.gpu
def test_keys_of_more_than_two_to_the_31_elements():
    length, dim = (1 << 24) + 1000, 128
    k = torch.zeros(1, 1, length, dim, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros(1, 1, length, dim, device="cuda", dtype=torch.bfloat16)
    assert k.numel() > 1 << 31
    place = length - 5
    v[:, :, place] = 1.0
    q = torch.randn(1, 1, 70, dim, device="cuda", dtype=torch.bfloat16)
    out = attndsl.compile(f"kv >= {place} and kv < {place + 4}")(q, k, v)
    torch.testing.assert_close(out, torch.full_like(out, 0.25))


@pytest.mark.gpu
def test_a_captured_table_of_60k_by_60k():
    length = 60_000
    table = torch.zeros(length, length, device="cuda", dtype=torch.bfloat16)
    table[-1, -3] = 20.0
    q, k, v = (torch.randn(1, 1, length, 16, device="cuda", dtype=torch.half) for _ in range(3))
    attention = attndsl.compile("score + table[q, kv]", table=table)
    out = attention(q[:, :, :], k, v)
    score = (q[0, 0, -1:].double() @ k[0, 0].double().T) * 16**-0.5 + table[-1:].double()
    expected = torch.softmax(score, -1) @ v[0, 0].double()
    torch.testing.assert_close(out[0, 0, -1:].double(), expected, atol=2e-3, rtol=2e-2)
