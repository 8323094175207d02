"""Habits of prose: none in user pages, and ever fewer in docstrings."""

import json

import prose
import pytest

SLOW = {
    "opening": "One sentence. What the kernel makes is kept.",
    "stands": "The program stands in the file.",
    "a thing says": "The page says more.",
    "say what": "The results say what the optimizer wrote.",
    "such a": "Such a capture goes into the mapping.",
    "of its own": "It has a kernel of its own.",
    "alone": "It sees rows of this rank alone.",
    "like one before": "A step like one before is fast.",
    "is told": "The user is told about it.",
    "one as a pronoun": "A page where one\ntypes a program.",
    "hardly": "It may hardly matter.",
    "nobody": "Nobody reads it.",
    "whose chain": "A tensor whose row, whose key is dead, is zero.",
    "that there is": "All biases that there are.",
    "is asked of": "They are asked of a second stream.",
    "there is none": "The key, or 0 where there is none.",
    "beside": "The time beside FA4.",
    "has to be": "So this has to be asked for.",
    "the same of": "The same of keys.",
    "times as long": "SDPA takes 1.2 times as long.",
    "of today": "The kernels of today.",
    "history": "Before there were kernels for Hopper.",
    "measurement number": "See M44.",
    "date": "Measured on 2026-11-28.",
    "commit": "Measured at a756a7b.",
}
FAST = """\
# What is supported

Where does it run?

Everywhere. As a result, you need no GPU. How it works: see [Of today](a756a7b.md).

The kernel is 2.1x faster than `nobody` at 8,192 keys on MiniMax M2.

```text
Whether one types 2026-11-28
```

<!-- What stands here -->

<!-- figures: begin -->

One GPU; commit a756a7b.

<!-- figures: end -->

- The mask is a stand-in, and you understand it. When you call it, pass `q`.
- A 1024000-row table.
"""


def test_each_habit_is_found():
    assert list(SLOW) == [habit.name for habit in prose.HABITS]
    for name, text in SLOW.items():
        assert name in [hit.habit.name for hit in prose.hits_in("a.md", text)], name
    for habit in prose.HABITS:
        assert habit.reason
        assert habit.instead


def test_what_is_no_habit():
    assert [str(hit) for hit in prose.hits_in("a.md", FAST)] == []


@pytest.mark.parametrize(
    "text",
    ["Of a call.", "## Title\n\nOf a call.", "- Of a call.", "1. Of a call.", "| a | Of a call |",
     "One. Of a call.", "One.\nOf a call.", "Is it?\n\nOf a call."],
)  # fmt: skip
def test_openings_of_sentences_items_and_cells(text):
    (hit,) = prose.hits_in("a.md", text)
    assert hit.habit.name == "opening"


def test_a_hit_has_its_line():
    text = "# Title\n\nFine.\n\n- one\n  nobody\n\n```attn\nnobody\n```\n\nIt\nstands.\n"
    assert [(hit.line, hit.habit.name) for hit in prose.hits_in("a.md", text)] == [
        (13, "stands"), (6, "nobody")
    ]  # fmt: skip
    first, last = map(str, prose.page_hits({"a.md": text}))
    assert first.startswith("a.md:6: nobody: '")
    assert "Fine. - one nobody" in first
    assert last.endswith("': names no action; write is, holds, or means")


def test_docstrings_are_judged_after_their_openings():
    text = (
        'def f(a):\n    """What it does, seen 2026-11-28.\n\n    Nobody calls :func:`stands`.\n\n'
        "    Args:\n        a: Of a call.\n\n    Example:\n        >>> 'it stands'\n    "
        '"""\nB = 1\n"""Whether. Where it stands."""\n'
    )
    hits = list(prose.docstring_hits({"a.py": text}))
    assert sorted((hit.line, hit.habit.name) for hit in hits) == [
        (4, "nobody"), (7, "opening"), (13, "opening"), (13, "stands")
    ]  # fmt: skip
    found = prose.counts(hits)
    assert {name: number for name, number in found.items() if number} == {
        "opening": 2, "nobody": 1, "stands": 1
    }  # fmt: skip


def test_limits_only_shrink(monkeypatch, tmp_path, capsys):
    found = {"stands": 8, "beside": 100, "nobody": 3}
    limits = {"stands": 8, "beside": 101, "nobody": 2}
    assert prose.excesses(found, limits) == ["nobody: 3 in docstrings is above the limit 2"]
    (stale,) = prose.excesses({"stands": 90}, {"stands": 100})
    assert "run python tools/prose.py --ratchet" in stale
    assert prose.tightened(found, limits) == {"stands": 8, "beside": 100, "nobody": 2}
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"stands": 0, "beside": 3}))
    monkeypatch.setattr(prose, "LIMITS", path)
    sources = {"a.py": '"""It stands beside."""'}
    monkeypatch.setattr(prose, "sources_of_docstrings", lambda: sources)
    assert prose.main(["--ratchet"]) == 1
    assert capsys.readouterr().out == "stands: 1 in docstrings is above the limit 0\n"
    read = prose.read_limits()
    assert (read["stands"], read["beside"], read["nobody"]) == (0, 1, 0)


def test_files_on_the_command_line(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("All is fine.\n")
    assert prose.main([str(page)]) == 0
    page.write_text("It stands.\n")
    assert prose.main([str(page)]) == 1
    assert "page.md:1: stands: 'It stands.': " in capsys.readouterr().out


def test_budgets_of_words():
    most = prose.MOST_WORDS_OF_A_PAGE
    assert prose.long_pages({"docs/a.md": "word " * most}) == []
    assert prose.long_pages({"docs/a.md": "word " * (most + 1)}) == [
        f"docs/a.md has {most + 1} words: at most {most}"
    ]
    many = {f"docs/{n}.md": "word " * most for n in range(10)}
    assert prose.long_pages({**many, "README.md": "word"}) == []
    assert prose.long_pages({**many, "docs/b.md": "word"}) == [
        "the pages have 35001 words: at most 35000"
    ]


def test_the_pages_have_none():
    texts = prose.pages()
    found = [*map(str, prose.page_hits(texts)), *prose.long_pages(texts)]
    assert not found, "\n".join(found)


def test_docstrings_have_no_more_than_their_limits():
    found = prose.counts(prose.docstring_hits(prose.sources_of_docstrings()))
    limits = prose.read_limits()
    assert limits.keys() == found.keys()
    complaints = prose.excesses(found, limits)
    assert not complaints, "\n".join(complaints)
