"""``attndsl run --decode``: the last rows of a cache of keys."""

from __future__ import annotations

import json

import pytest

TEXT = """
tensor logit[heads]: float
mask = causal() and (q - kv < 16 or kv < 2)
score = score + alibi()
sink = logit[h]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.attn"
    path.write_text(TEXT, "utf-8")
    return path


def test_lengths_of_each_entry(attndsl, file):
    done = attndsl(
        "run", file, "--decode", "--lengths", "100,40,7", "--heads", 4, "--kv-heads", 2,
        "--q-len", 3, "--head-dim", 16, "--value-dim", 8, "--json",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    found = json.loads(done.out)
    assert found["ok"]
    assert found["shapes"]["kv_len"] == 100
    assert found["shapes"]["lengths"] == [100, 40, 7]
    # The last row sees 16 keys and the two sinks, two rows before it two more; 7 keys are few.
    keys = 2 * (20 + 20 + 7)
    size = 4 * (16 + 8) * (3 * 4 * 3 + keys)
    (timing,) = found["timings"]
    assert timing["live_gbs"] * timing["ms"] * 1e6 == pytest.approx(size)


def test_entries_fill_the_room(attndsl, file):
    done = attndsl("run", file, "--decode", "--kv-len", 50, "--batch", 2, "--head-dim", 16)
    assert done.code == 0, done.out + done.err
    assert "L 1x50, D 16/16, 50 keys" in done.out.replace("\n", "")
    assert "GB/s, live keys" in done.out
    assert "out" in done.out


def test_a_mask_of_scores_sees_all_keys(attndsl, tmp_path):
    path = tmp_path / "a.attn"
    path.write_text("mask = score > -100.0", "utf-8")
    done = attndsl("run", path, "--decode", "--lengths", "9,5", "--head-dim", 16, "--json",
                   "--heads", 1)  # fmt: skip
    (timing,) = json.loads(done.out)["timings"]
    assert timing["live_gbs"] * timing["ms"] * 1e6 == pytest.approx(4 * 32 * (2 + 14))


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--lengths", "3"), "those of a cache", "add --decode"),
        (("--decode", "--backward"), "no backward", "leave --backward"),
        (("--decode", "--lengths", "a,b"), "'a,b' are no whole numbers", "--lengths 100,2000"),
        (("--decode", "--lengths", "3,"), "are no whole numbers", "--lengths 100,2000"),
        (("--decode", "--lengths", "-3"), "are no whole numbers", "--lengths 100,2000"),
        (("--decode", "--lengths", "1,2", "--batch", "3"), "2 lengths and 3", "leave --batch out"),
        (("--decode", "--lengths", "9", "--kv-len", "5"), "9 keys", "as much room"),
        (("--decode", "--lengths", "3", "--q-len", "4"), "3 keys, with 4 rows", "as many keys"),
    ],
)
def test_what_cannot_be_is_refused(attndsl, file, arguments, message, hint):
    done = attndsl("run", file, *arguments)
    assert done.code == 2
    assert message in done.err
    assert hint in done.err
    assert not done.out
