"""Pictures say what the mask, the tiles and the score are, and draw any program safely."""

import builtins
import copy
import pickle
import re
import xml.etree.ElementTree as ET
from itertools import product

import pytest
import torch

import attndsl
from attndsl.backends.base import Call
from attndsl.backends.tiled.tile_kinds import tile_kinds
from attndsl.call.options import Location
from attndsl.errors import ArgumentError, AttnDSLError, DTypeError, ShapeError, UnsupportedError
from attndsl.picture import Frame, highlighted, picture_data, png, svg, text, write
from attndsl.source import shorten

SVG = "{http://www.w3.org/2000/svg}"
EMPTY, PARTIAL, FULL = 0, 1, 2


def _data(program, q_len=32, kv_len=32, block_m=8, block_n=8, names=None, **options):
    lowered = attndsl.compile(program, **(names or {})).lowered
    offsets = {name: options.pop(name) for name in ("q_offset", "kv_offset") if name in options}
    captures = {name: options.pop(name) for name in ("tensors", "params") if name in options}
    said = {name: options.pop(name) for name in ("title", "raw_score") if name in options}
    frame = Frame(q_len, kv_len, block_m, block_n, **{"location": Location(**offsets), **options})
    return picture_data(lowered, frame, **{"title": program, **captures, **said})


def _brute(mask, block_m, block_n):
    """Kinds of the tiles of ``mask`` (q_len, kv_len), one tile at a time."""
    rows, columns = (
        range(0, size, block) for size, block in zip(mask.shape, (block_m, block_n), strict=True)
    )
    kinds = torch.zeros(len(rows), len(columns), dtype=torch.int8)
    for (i, y), (j, x) in product(enumerate(rows), enumerate(columns)):
        tile = mask[y : y + block_m, x : x + block_n]
        kinds[i, j] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
    return kinds


def _pairs(q_len, kv_len, q_offset=0, kv_offset=0):
    return torch.arange(q_len)[:, None] + q_offset, torch.arange(kv_len) + kv_offset


MASKS = {
    "causal": ("causal()", lambda q, kv: q >= kv),
    "window": ("0 <= q - kv < 5", lambda q, kv: (q - kv >= 0) & (q - kv < 5)),
    "prefix": ("q >= kv or kv < 7", lambda q, kv: (q >= kv) | (kv < 7)),
    "dilated": ("(q - kv) % 3 == 0", lambda q, kv: (q - kv) % 3 == 0),
    "blocks": ("q // 6 == kv // 6", lambda q, kv: q // 6 == kv // 6),
    "product": ("q * kv % 7 < 3", lambda q, kv: q * kv % 7 < 3),
    "where": (
        "score = where(q >= kv and q - kv < 9, score, -inf)",
        lambda q, kv: (q >= kv) & (q - kv < 9),
    ),
    "all": ("score", lambda q, kv: (q >= 0) & (kv >= 0)),
    "none": ("q < 0", lambda q, kv: (q < 0) & (kv < 0)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "block_m", "block_n"),
    [(32, 32, 8, 8), (33, 20, 16, 4), (5, 40, 8, 64), (1, 1, 1, 1)],
)
def test_mask_and_kinds_are_those_of_brute_force(name, q_len, kv_len, block_m, block_n):
    program, formula = MASKS[name]
    data = _data(program, q_len, kv_len, block_m, block_n)
    mask = formula(*_pairs(q_len, kv_len)).expand(q_len, kv_len)
    assert torch.equal(data.mask, mask)
    assert data.kinds.dtype is torch.int8
    assert torch.equal(data.kinds, _brute(mask, block_m, block_n))
    assert (data.could_be_empty, data.could_be_full) == (0, 0)
    assert data.remarks == ()


@pytest.mark.parametrize("offset", [int, torch.tensor], ids=["int", "tensor"])
def test_offsets_move_positions(offset):
    data = _data("q - kv < 5", 12, 20, 4, 4, q_offset=offset(30), kv_offset=offset(16))
    q, kv = _pairs(12, 20, 30, 16)
    assert torch.equal(data.mask, q - kv < 5)
    assert torch.equal(data.kinds, _brute(data.mask, 4, 4))
    assert (data.q_offset, data.kv_offset) == (30, 16)
    assert "\n30 ..++#\n" in text(data)


def test_each_head_and_batch_entry_has_its_own_picture():
    program = (
        "tensor doc[batch, kv_len]: int\ntensor lengths[batch]: int\ntensor gain[heads]: float\n"
        "param cap: float\n"
        "mask = doc[b, q] == doc[b, kv] and kv < lengths[b] and q - kv < 4 * (h + 1)\n"
        "score = gain[h] * score + cap * hkv"
    )
    doc = torch.stack([torch.arange(32) // 9, torch.arange(32) // 13])
    lengths, gain = torch.tensor([20, 31]), torch.randn(4, requires_grad=True)
    lowered = attndsl.compile(program).lowered
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 32, "kv_len": 32, "head_dim": 64}
    q, k = torch.zeros(2, 4, 32, 64), torch.zeros(2, 2, 32, 64)
    tensors, params = {"doc": doc, "lengths": lengths, "gain": gain}, {"cap": 3.0}
    every = tile_kinds(lowered, Call(q, k, k, 1.0, sizes, tensors, params), 8, 4)
    for b, h in ((0, 0), (0, 3), (1, 1), (1, 2)):
        data = picture_data(
            lowered, Frame(32, 32, 8, 4, batch=2, heads=4, kv_heads=2, b=b, h=h),
            tensors=tensors, params=params, raw_score=2.0,
        )  # fmt: skip
        q, kv = _pairs(32, 32)
        mask = (doc[b, :, None] == doc[b]) & (kv < lengths[b]) & (q - kv < 4 * (h + 1))
        assert torch.equal(data.mask, mask)
        assert torch.equal(data.kinds, every[min(b, every.shape[0] - 1), h])
        score = gain.detach()[h].double() * 2 + 3.0 * (h // 2)
        expected = torch.where(mask, score, torch.nan)
        torch.testing.assert_close(data.score, expected, equal_nan=True)
        assert data.score.dtype is torch.float64
        assert f"batch entry {b} of 2, head {h} of 4" in svg(data)


def test_a_part_is_shown_as_the_whole_shows_it():
    program = (
        "tensor gain[heads]: float\nmask = q - kv < 4 * (h + 1) and kv < kv_len - b\n"
        "score = gain[h] * score + q_len * hkv"
    )
    gain = torch.randn(4)
    whole = _data(
        program, 24, 32, 8, 8, batch=3, heads=4, kv_heads=2, b=2, h=3, tensors={"gain": gain}
    )
    sizes = {"q_len": 24, "heads": 4, "kv_heads": 2, "batch": 3}
    place = Location(q_offset=8, h_offset=2, b_offset=1, **sizes)
    for given in (gain, gain[2:]):
        part = _data(
            program, 16, 32, 8, 8, batch=2, heads=2, kv_heads=1, b=1, h=1, location=place,
            tensors={"gain": given},
        )  # fmt: skip
        assert torch.equal(part.mask, whole.mask[8:])
        assert torch.equal(part.kinds, whole.kinds[1:])
        torch.testing.assert_close(part.score, whole.score[8:], equal_nan=True)
        assert part.place == whole.place
        assert (part.q_offset, part.kv_offset) == (8, 0)
    drawn = attndsl.compile(program).plot(
        q_len=16, kv_len=32, block_m=8, block_n=8, batch=2, heads=2, kv_heads=1, b=1, h=1,
        q_offset=8, h_offset=2, b_offset=1, whole_sizes=sizes, gain=gain,
    )  # fmt: skip
    assert "batch entry 2 of 3, head 3 of 4" in drawn
    with pytest.raises(ArgumentError, match="q_len is 24"):
        attndsl.compile("causal()").plot(q_len=16, q_offset=9, whole_sizes={"q_len": 24})


def test_entries_show_their_own_positions():
    lengths, firsts = torch.tensor([32, 9]), torch.tensor([0, 5])
    place = Location(q_offset=firsts, kv_lengths=lengths)
    data = _data("causal()", 8, 32, 4, 8, batch=2, b=1, location=place)
    q, kv = _pairs(8, 32, 5)
    assert torch.equal(data.mask, (q >= kv) & (kv < 9))
    assert (data.q_offset, data.kv_offset) == (5, 0)


def test_kinds_are_the_compilers_and_their_slack_is_counted():
    # Least and greatest values cannot tell even ids from odd ones.
    ids = torch.arange(32) * 2
    ids[16:] += 1 - 32
    program = "tensor ids[batch, kv_len]: int\nmask = ids[b, q] == ids[b, kv] or ids[b, q] > 99"
    data = _data(program, tensors={"ids": ids[None]})
    exact = _brute(data.mask, 8, 8)
    known = data.kinds != PARTIAL
    assert torch.equal(data.kinds[known], exact[known])
    slack = int((data.kinds[exact == EMPTY] == PARTIAL).sum())
    assert data.could_be_empty == slack > 0
    assert f"{slack} of the PARTIAL tiles have no live pair" in svg(data)
    assert f"{slack} of the PARTIAL tiles have no live pair" in text(data)


def test_a_mask_that_reads_the_score_is_that_of_the_raw_score():
    data = _data("mask = causal() and score > 1.0", raw_score=2.0)
    assert torch.equal(data.mask, _pairs(32, 32)[0] >= _pairs(32, 32)[1])
    assert not (data.kinds == FULL).any()
    assert data.could_be_full == 0
    assert data.remarks == ("the mask depends on the score: pairs are those of 2",)
    assert not _data("mask = causal() and score > 1.0").mask.any()


def test_long_pictures_are_evaluated_in_parts():
    data = _data("mask = causal(); score = score - (q - kv)", 1500, 1500, 64, 64)
    q, kv = _pairs(1500, 1500)
    assert torch.equal(data.mask, q >= kv)
    assert torch.equal(data.score.nan_to_num(1.0), torch.where(q >= kv, (kv - q).double(), 1.0))
    assert "each cell is the mean of 6 x 6 pairs" in svg(data)
    assert len(svg(data)) < 500_000


def _panels(data):
    root = ET.fromstring(svg(data))
    assert root.tag == f"{SVG}svg"
    return {each.get("data-panel"): each for each in root.iter(f"{SVG}g") if each.get("data-panel")}


def _said(element):
    return [each.text for each in element.iter(f"{SVG}text")]


def test_svg_has_a_score_only_where_the_program_changes_it():
    assert list(_panels(_data("causal()"))) == ["mask", "tiles", "legend"]
    found = _panels(_data("mask = causal(); score = score - (q - kv)"))
    assert list(found) == ["mask", "tiles", "score", "legend"]
    for name in ("mask", "tiles", "score"):
        assert {"key position", "query position", "0", "16"} <= set(_said(found[name]))
    assert {"score of a raw score of 0", "0", "-31"} <= set(_said(found["score"]))


def test_labels_of_the_legend_stand_beside_their_boxes():
    legend = _panels(_data("causal()", 64, 64, 16, 16))["legend"]
    boxes = [(float(box.get("x")), float(box.get("width"))) for box in legend.iter(f"{SVG}rect")]
    labels = [float(label.get("x")) for label in legend.iter(f"{SVG}text")]
    assert len(boxes) == 4
    for (start, width), label, (after, _) in zip(
        boxes, labels, [*boxes[1:], (1e9, 0)], strict=False
    ):
        assert start + width < label < after


def test_a_narrow_picture_has_room_for_its_legend():
    root = ET.fromstring(svg(_data("causal()", 999, 1)))
    legend = _panels(_data("causal()", 999, 1))["legend"]
    last = max(float(each.get("x")) + 6 * len(each.text) for each in legend.iter(f"{SVG}text"))
    assert float(root.get("width")) > last


def test_tiles_that_bounds_leave_open_are_told_by_their_pairs():
    """The compiler evaluates such masks, which no interval decides."""
    data = _data(
        "(q * kv - kv * q) * (q - kv) + q // 8 * 100 - kv // 8 * 100 >= 0 and q * kv % 2 < 9"
    )
    assert torch.equal(data.kinds, _brute(data.mask, 8, 8))
    assert data.counts["FULL"] > data.counts["PARTIAL"]


def test_legend_counts():
    data = _data("causal()", 64, 64, 16, 16)
    assert data.counts == {"FULL": 6, "PARTIAL": 4, "EMPTY": 6}
    assert data.summary == "6 FULL, 4 PARTIAL, 6 EMPTY; live pairs 51 % (2080 of 4096)"
    legend = _said(_panels(data)["legend"])
    assert legend[:4] == ["6 FULL", "4 PARTIAL", "6 EMPTY", "live pairs 51 % (2080 of 4096)"]
    assert data.summary in svg(data)
    assert data.summary in text(data)
    assert "live pairs 0.024 % (1 of 4096)" in text(_data("q == 1 and kv == 1", 64, 64))


def _painted(group, columns, rows, which=0, shape=None):
    """How often each cell is painted by the strokes of one of a panel's rasters."""
    painted = torch.zeros(shape or (rows, columns), dtype=torch.int64)
    raster = list(group.iter(f"{SVG}svg"))[which]
    assert raster.get("viewBox") == f"0 -0.5 {columns:g} {rows:g}"
    for path in raster.iter(f"{SVG}path"):
        x = y = 0
        for kind, numbers in re.findall(r"([Mmh])([^Mmh]+)", path.get("d")):
            values = [int(number) for number in numbers.split()]
            if kind == "h":
                painted[y, x : x + values[0]] += 1
                x += values[0]
            elif kind == "m":
                x, y = x + values[0], y + values[1]
            else:
                x, y = values
    return painted


def test_svg_paints_every_live_pair_once():
    data = _data("mask = (q * kv) % 5 < 2; score = score + q % 7 - kv % 3", 40, 29)
    panels = _panels(data)
    for name in ("mask", "score"):
        assert torch.equal(_painted(panels[name], 29, 40), data.mask.to(torch.int64))


def test_svg_paints_the_tiles():
    # The last ones are cut off: the picture ends within them.
    data = _data("0 <= q - kv < 12", 40, 28, 8, 16)
    panels = _panels(data)
    for name, which in (("mask", 1), ("tiles", 0)):
        painted = _painted(panels[name], 1.75, 5, which, (5, 2))
        assert torch.equal(painted, (data.kinds != EMPTY).to(torch.int64))


def test_svg_of_the_worst_scores_stays_small():
    noise = torch.randn(256, 256)
    noise[torch.rand(256, 256) < 0.1] = torch.nan
    data = _data(
        "tensor x[n, n]: float\nmask = x[q, kv] == x[q, kv]\nscore = score + x[q, kv]",
        256, 256, 16, 16, tensors={"x": noise},
    )  # fmt: skip
    assert len(svg(data)) < 500_000
    # No tile is as its neighbours, and each is a pixel.
    assert len(svg(_data("(q + kv) % 2 == 0", 256, 256, 1, 1))) < 500_000


HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a & b ]]> &lt; &#0;",
    "mask\x00 = \x1b[31m causal() \x08 \ud800 \ufffe \x85",
    "",
    "x" * 100_000,
    "# only a comment",
    "\n".join("(" * 500 for _ in range(20)),
    "日本語 \u202e \N{GRINNING FACE}",
)


@pytest.mark.parametrize("title", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_only_text(title, tmp_path):
    data = _data("causal()", 4, 4, 2, 2, title=title)
    drawn = svg(data)
    root = ET.fromstring(drawn.encode("utf-8"))
    tags = {each.tag.removeprefix(SVG) for each in root.iter()}
    assert tags == {"svg", "title", "desc", "rect", "text", "g", "path"}
    # Nothing that a page could be changed by: no ids, styles, handlers or links.
    names = {name for each in root.iter() for name in each.attrib}
    assert not [n for n in names if n in ("id", "class", "style", "href") or n.startswith("on")]
    assert len(drawn) < 10_000
    plain = text(data)
    assert plain.isascii()
    assert plain.replace("\n", "").isprintable()
    for name in ("a.svg", "a.html", "a.txt"):
        write(data, tmp_path / name)
    assert "<script" not in (tmp_path / "a.html").read_text("utf-8").lower()
    assert "<img" not in (tmp_path / "a.html").read_text("utf-8").lower()


def test_titles_leave_comments_and_declarations_out():
    program = (
        "# Gemma 2\nparam cap: float = 50.0  # as published\ntensor x[n]: int\n"
        "mask = (q >= kv and\n  q - kv < 8);\nscore = cap * tanh(score / cap)\n"
    )
    shown = "mask = (q >= kv and q - kv < 8); score = cap * tanh(score / cap)"
    assert shorten(program, 100) == shown
    assert shorten("param w: int; tensor x[n]: int; q - kv < w", 100) == "q - kv < w"
    assert shorten(program, 20) == "mask = (q >= kv a..."
    data = _data(program, tensors={"x": torch.arange(3)}, title=None)
    assert "mask = kv <= q and q - kv < 8" in text(data)


def test_text_of_a_causal_mask():
    assert text(_data("causal()", 16, 16, 4, 4)) == (
        "causal()\n"
        "batch entry 0 of 1, head 0 of 1, tiles of 4 x 4 (queries x keys)\n"
        "\n"
        "   0  12\n"
        "   |  |\n"
        " 0 +...\n"
        " 4 #+..\n"
        " 8 ##+.\n"
        "12 ###+\n"
        "\n"
        "rows are queries, columns are keys; # FULL, + PARTIAL, . EMPTY\n"
        "6 FULL, 4 PARTIAL, 6 EMPTY; live pairs 53 % (136 of 256)\n"
    )


def test_text_of_a_window_with_a_score():
    program = "mask = 0 <= q - kv < 6\nscore = score - 0.5 * (q - kv)"
    assert text(_data(program, 8, 16, 2, 2, q_offset=8)) == (
        "mask = 0 <= q - kv < 6; score = score - 0.5 * (q - kv)\n"
        "batch entry 0 of 1, head 0 of 1, tiles of 2 x 2 (queries x keys)\n"
        "\n"
        "   0  6  12\n"
        "   |  |  |\n"
        " 8 .+##+...\n"
        "10 ..+##+..\n"
        "12 ...+##+.\n"
        "14 ....+##+\n"
        "\n"
        "rows are queries, columns are keys; # FULL, + PARTIAL, . EMPTY\n"
        "8 FULL, 8 PARTIAL, 16 EMPTY; live pairs 38 % (48 of 128)\n"
        "scores of live pairs, from a raw score of 0: -2.5 to 0\n"
    )


def test_scores_that_are_not_finite_are_told_apart():
    data = _data("mask = causal(); score = log(float(kv))", 8, 8, 4, 4)
    assert int(data.score.isinf().sum()) == 8
    assert "8 scores that are not finite" in _said(_panels(data)["legend"])
    assert data.score_range == (0.0, pytest.approx(1.9459101))
    never = _data("score = log(-1.0) + score", 8, 8, 4, 4)
    assert never.score_range is None
    assert "nowhere finite" in text(never)
    assert "64 scores that are not finite" in svg(never)


def test_scores_as_far_apart_as_they_can_be():
    data = _data("score = where(q >= kv, 1.7e308, -1.7e308)", 8, 8, 4, 4)
    score = _panels(data)["score"]
    colours = {path.get("stroke") for path in next(score.iter(f"{SVG}svg"))}
    assert colours == {"#440154", "#fde725"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"q_len": 0}, "q_len"),
        ({"kv_len": 0}, "kv_len"),
        ({"q_len": 4097}, "4096"),
        ({"kv_len": 10**30}, "4096"),
        ({"q_len": True}, "q_len"),
        ({"kv_len": 8.5}, "kv_len"),
        ({"block_m": 0}, "block_m"),
        ({"block_n": 10**9}, "block_n"),
        ({"q_len": 1000, "block_m": 2}, "at least 4"),
        ({"kv_len": 4096, "block_n": 15}, "at least 16"),
        ({"batch": 0}, "batch"),
        ({"heads": 0}, "heads"),
        ({"heads": 10**12}, "heads"),
        ({"h": 1}, "0 to 0"),
        ({"h": -1}, "0 to 0"),
        ({"b": 2, "batch": 2}, "0 to 1"),
        ({"raw_score": float("nan")}, "finite"),
        ({"raw_score": float("inf")}, "finite"),
        ({"q_offset": 0.5}, "q_offset"),
        ({"tensors": {"doc": torch.zeros(3)}}, "doc"),
        ({"params": {"windw": 3}}, "windw"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(options, names):
    with pytest.raises(ArgumentError) as caught:
        _data("causal()", **options)
    assert caught.value.hint
    assert names in str(caught.value)


def test_captures_are_checked_as_in_a_call():
    program = "tensor doc[kv_len]: int\nparam w: int\nq - kv < w + doc[kv]"
    good = torch.zeros(32, dtype=torch.int64)
    _data(program, tensors={"doc": good}, params={"w": 3})
    with pytest.raises(ArgumentError, match="lacks 'doc', 'w'"):
        _data(program)
    with pytest.raises(ShapeError):
        _data(program, tensors={"doc": good[:5]}, params={"w": 3})
    with pytest.raises(DTypeError):
        _data(program, tensors={"doc": good.float()}, params={"w": 3})
    with pytest.raises(ShapeError):
        _data("causal()", heads=4, kv_heads=3)


def test_files_are_of_the_kind_that_their_suffix_names(tmp_path):
    data = _data("mask = causal(); score = softcap(score, 5.0) + log(float(kv))", 12, 20)
    for name in ("a.svg", "a.HTML", "a.txt", "a.png"):
        write(data, tmp_path / name)
    assert ET.parse(tmp_path / "a.svg").getroot().tag == f"{SVG}svg"
    page = (tmp_path / "a.HTML").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert svg(data) in page
    assert (tmp_path / "a.txt").read_text() == text(data)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    png(_data("causal()", 5, 300, 64, 64, title="$\\frac$ 日本 \x00"), str(tmp_path / "b.png"))


@pytest.mark.parametrize("name", ["a.jpeg", "a", "a.svg.gz", ""])
def test_other_suffixes_are_refused(name, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        write(_data("causal()"), tmp_path / name if name else "")
    assert ".svg, .png, .html, .txt" in caught.value.hint


@pytest.mark.parametrize("suffix", ["svg", "png", "txt"])
def test_files_that_cannot_be_written_are_an_error(suffix, tmp_path):
    with pytest.raises(ArgumentError, match="cannot write"):
        write(_data("causal()"), tmp_path / "nowhere" / f"a.{suffix}")


def test_png_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    usual = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError) as caught:
        write(_data("causal()"), tmp_path / "a.png")
    assert "attndsl[plot]" in caught.value.hint
    assert isinstance(caught.value, AttnDSLError)
    assert not list(tmp_path.iterdir())
    write(_data("causal()"), tmp_path / "a.svg")


def _curve(program, **options):
    return _data(program, **options).curve


@pytest.mark.parametrize(
    ("program", "formula", "end"),
    [
        ("score = 50 * tanh(score / 50)", lambda x: 50 * torch.tanh(x / 50), 100),
        ("score = relu(score - 2)", lambda x: torch.relu(x - 2), 10),
        ("score = 3 * score", lambda x: 3 * x, 10),
        ("score = relu(score - 0.5 * (q - kv))", lambda x: torch.relu(x - 0.5 * (31 - 16)), 10),
    ],
)
def test_a_curve_is_the_formula_at_the_pair_that_it_states(program, formula, end):
    curve = _curve(f"mask = causal(); {program}")
    assert (curve.q, curve.kv, float(curve.raw[0]), float(curve.raw[-1])) == (31, 16, -end, end)
    torch.testing.assert_close(curve.value, formula(curve.raw))
    assert bool(curve.live.all())
    assert curve.caption == "score of a raw score, at q = 31, kv = 16"


@pytest.mark.parametrize("program", ["causal()", "mask = causal(); score = score - (q - kv)"])
def test_scores_that_are_only_added_to_have_no_curve(program):
    assert _curve(program) is None


def test_a_curve_stands_in_place_of_a_flat_panel_and_beside_others():
    capped = _data("mask = causal(); score = softcap(score, 5.0)")
    assert list(_panels(capped)) == ["mask", "tiles", "curve", "legend"]
    both = _data("mask = causal(); score = softcap(score, 5.0) - (q - kv)")
    assert list(_panels(both)) == ["mask", "tiles", "score", "curve", "legend"]
    curve = _panels(capped)["curve"]
    assert {"score of a raw score, at q = 31, kv = 16", "raw score", "-10", "10"} <= set(
        _said(curve)
    )
    (line,) = [path for path in curve.iter(f"{SVG}path") if path.get("stroke-width")]
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", line.get("d"))[1:]]
    assert len(points) == capped.curve.raw.numel()
    # Upwards, in pixels from the top: tanh is odd, and 0 at the middle.
    assert points[0][1] == 256
    assert points[-1] == (256, 0)
    assert points[len(points) // 2] == (128, 128)


def test_text_has_a_line_of_the_curve():
    lines = text(_data("mask = causal(); score = softcap(score, 5.0)", 16, 16, 4, 4)).splitlines()
    assert lines[-1] == (
        "score of a raw score, at q = 15, kv = 8: "
        "-10 -> -4.82, -5 -> -3.808, 0 -> 0, 5 -> 3.808, 10 -> 4.82"
    )
    assert not any("from a raw score" in line for line in lines)


def test_weights_of_the_programs_own_have_a_curve():
    data = _data("mask = causal(); score = 2 * score; weights = sigmoid(score - 1)")
    assert data.curve.what == "weight"
    torch.testing.assert_close(data.curve.value, torch.sigmoid(2 * data.curve.raw - 1))
    assert list(_panels(data)) == ["mask", "tiles", "curve", "legend"]


def test_curves_of_scores_that_are_not_everywhere():
    masked = _curve("mask = causal() and score > 1.0; score = softcap(score, 5.0)", raw_score=2.0)
    assert torch.equal(masked.live, masked.raw > 1)
    assert "-10 -> left out" in masked.line
    log = _data("score = log(score)")
    assert log.curve.line.endswith("-10 -> nan, -5 -> nan, 0 -> -inf, 5 -> 1.609, 10 -> 2.303")
    assert "nan" not in svg(log)
    never = _data("score = sqrt(-1.0 - score * score)")
    assert never.curve.ends is None
    # Where no pair is live, the curve is that of the last query and the first key.
    nowhere = _curve("mask = q < 0; score = relu(score)")
    assert (nowhere.q, nowhere.kv) == (31, 0)
    huge = _data("score = where(score < 5, 1.7e308, -1.7e308) + 0 * score")
    assert ET.fromstring(svg(huge)).tag == f"{SVG}svg"


def test_curves_are_drawn_by_matplotlib_too(tmp_path):
    data = _data("mask = causal(); score = softcap(score, 5.0) - (q - kv)", 8, 8)
    for name, head in (("a.pdf", b"%PDF-"), ("a.png", b"\x89PNG")):
        write(data, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    first = (tmp_path / "a.pdf").read_bytes()
    write(data, tmp_path / "b.pdf")
    assert (tmp_path / "b.pdf").read_bytes() == first


def test_plot_gives_text_that_notebooks_draw(tmp_path):
    attention = attndsl.compile("causal()")
    picture = attention.plot(tmp_path / "a.svg", q_len=32, kv_len=48)
    assert isinstance(picture, str)
    assert type(str(picture)) is str
    assert (tmp_path / "a.svg").read_text().endswith(picture)
    assert picture._repr_svg_() == picture._repr_html_() == str(picture)
    shown = f"<picture of 'causal()', 32 x 48 pairs; {len(picture)} characters of SVG>"
    assert repr(picture) == shown
    for again in (pickle.loads(pickle.dumps(picture)), copy.deepcopy(picture)):
        assert (again, repr(again)) == (picture, shown)


def test_programs_are_drawn_with_made_up_captures():
    program = (
        "param w: int\nparam cap: float = 3.0\nparam on: bool\n"
        "tensor doc[batch, kv_len]: int  # <ids>\ntensor gain[heads, n]: float\n"
        "mask = q - kv < w and doc[b, q] == doc[b, kv] and on\n"
        "score = gain[h, 0] * softcap(score, cap)"
    )
    page = attndsl.compile(program)._repr_html_()
    drawing, _, rest = page.rpartition("</svg>\n")
    root = ET.fromstring(f"{drawing}</svg>")
    notes = "made up: w = 16, on = True, doc (sorted ids), gain (normal numbers)"
    assert notes in _said(root)
    assert "".join(ET.fromstring(rest).itertext()) == program
    assert attndsl.compile(program)._repr_html_() == page
    # Captures that are bound are drawn.
    text = "mask = doc[b, q] == doc[b, kv]"
    bound = attndsl.compile(text, doc=torch.arange(64)[None])._repr_html_()
    assert "live pairs 2 % (64 of 4096)" in bound
    assert "made up" not in bound


def test_programs_that_cannot_be_drawn_are_text():
    program = "tensor x[head_dim - 100]: float; score = score + x[0]"
    page = attndsl.compile(program)._repr_html_()
    assert "<svg" not in page
    assert "no picture: dim 1 of &#x27;x&#x27; would be -36" in page


@pytest.mark.parametrize("title", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_only_highlighted(title):
    drawn = highlighted(title)
    root = ET.fromstring(drawn.encode("utf-8", "surrogatepass"))
    assert {each.tag for each in root.iter()} <= {"pre", "span"}
    assert {name for each in root.iter() for name in each.attrib} <= {"style"}
