"""Names that nothing reads, and texts without a statement."""

import pytest

from attndsl.errors import UnusedWarning
from attndsl.frontend import read_unused
from attndsl.source import Source


def messages(text):
    return [each.message for each in read_unused(Source(text))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = q - kv\nmask = causal()", ["nothing reads 'x'"]),
        ("param w: int\nmask = causal()", ["nothing reads the param 'w'"]),
        ("tensor t[heads]: float\nmask = causal()", ["nothing reads the tensor 't'"]),
        ("x = q\ny = x\nmask = causal()", ["nothing reads 'x'", "nothing reads 'y'"]),
        ("param w: int\nx = w\nmask = causal()",
         ["nothing reads the param 'w'", "nothing reads 'x'"]),
        ("", ["the program is empty, so it is plain attention"]),
        ("# a comment", ["the program is empty, so it is plain attention"]),
        # All that a result reads, in whichever way.
        ("x = q - kv\nmask = x >= 0", []),
        ("def f(a) = a < w\nparam w: int\nmask = f(q - kv)", []),
        ("param w: int\nmask = sliding_window(w=w)", []),
        ("param n: int\ntensor t[n]: float\nscore = score + t[kv]", []),
        ("param c: float = none\nscore = score * 2 if given(c) else score", []),
        ("tensor u[kv_len, r]: float\nscore = score + dot(u[q, :], u[kv, :])", []),
        ("x = logit\ntensor g[heads]: float\nlogit = g[h]\nsink = g[h]",
         ["nothing reads 'x'", "nothing reads 'logit'"]),
        ("score", []),
        # A function may serve several programs.
        ("def f(a) = a\nmask = causal()", []),
        # The parameter of a function is no local.
        ("x = q\ndef f(x) = x >= kv\nmask = f(q)", ["nothing reads 'x'"]),
    ],
)  # fmt: skip
def test_what_nothing_reads(text, found):
    assert messages(text) == found


def test_a_warning_has_a_place_and_a_hint():
    (found,) = read_unused(Source("mask = causal()\nnear = q - kv", "a.attn"))
    assert isinstance(found, UnusedWarning)
    assert (found.span.line, found.span.column, found.span.text) == (2, 1, "near")
    assert str(found) == (
        "a.attn:2:1: nothing reads 'near'\n"
        "    near = q - kv\n"
        "    ^^^^\n"
        "  hint: use it, as in 'mask = near', or remove the line"
    )
    (alone,) = read_unused(Source("near = q - kv"))
    assert alone.hint == "write 'mask = ...' or 'score = ...'"


def test_an_imported_file_may_have_more_than_is_used(tmp_path):
    (tmp_path / "lib.attn").write_text("near = q - kv < 5\nfar = q - kv > 50\n")
    path = tmp_path / "a.attn"
    path.write_text('import "lib.attn"\nmine = q\nmask = near\n')
    source = Source(path.read_text(), str(path), file=str(path))
    assert [each.message for each in read_unused(source)] == ["nothing reads 'mine'"]
