"""Several mask lines are one mask: what ``and`` between them says."""

from __future__ import annotations

import pytest

from attndsl.errors import ProgramErrors, TypeMismatchError
from attndsl.frontend import read
from attndsl.pipeline import lower
from attndsl.source import Source

DOC = "tensor doc[batch, kv_len]: int\n"


@pytest.mark.parametrize(
    ("lines", "one"),
    [
        ("mask = causal()\nmask = q - kv < 8", "mask = causal() and q - kv < 8"),
        ("mask = q > 3 or kv < 2\nmask = q != kv", "mask = (q > 3 or kv < 2) and q != kv"),
        (
            DOC + "mask = h < 4\nscore = 2 * score; mask = doc[b, q] == doc[b, kv]\nmask = h > 1",
            DOC + "score = 2 * score\nmask = h < 4 and doc[b, q] == doc[b, kv] and h > 1",
        ),
        ("mask = causal()\nmask = causal()", "mask = causal() and causal()"),
        # Each reads the score at its own line.
        (
            "mask = score > 0\nscore = score + 1\nmask = score < 5\nscore = 2 * score",
            "mask = score > 0 and score + 1 < 5\nscore = 2 * (score + 1)",
        ),
        # Masks of score lines stand beside them.
        (
            "mask = kv < 9\nscore = where(causal(), score, -inf)\nmask = score > 0\n"
            "score = softcap(score, 3.0)",
            "mask = kv < 9 and score > 0 and causal()\nscore = softcap(score, 3.0)",
        ),
    ],
)
def test_mask_lines_compose_by_and(lines, one):
    assert lower(Source(lines), {}).digest == lower(Source(one), {}).digest


def test_mask_lines_are_the_node_that_and_writes():
    lines = read(Source("mask = causal()\nmask = q - kv < 8\nmask = h > 1"), {})
    assert lines.mask is read(Source("causal() and q - kv < 8 and h > 1"), {}).mask


def test_every_wrong_mask_line_is_reported():
    with pytest.raises(ProgramErrors) as caught:
        read(Source("mask = q\nmask = causal()\nmask = kv"), {})
    assert [(type(e), e.span.line) for e in caught.value.errors] == [
        (TypeMismatchError, 1), (TypeMismatchError, 3)
    ]  # fmt: skip
    with pytest.raises(TypeMismatchError, match="only where it is the whole program"):
        read(Source("mask = causal()\nq > 3"), {})
