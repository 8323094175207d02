"""Find habits of prose that slow a reader, in the user pages and in docstrings.

``python tools/prose.py`` lists what the pages have, with a line, a reason and another form each.
Names of files list those of these files, ``--docstrings`` those of all docstrings, and ``--counts``
one number for each page and each habit. ``--ratchet`` lowers the limits of docstrings in
``prose_limits.json`` to their numbers. It raises none.

Pages have none of :data:`HABITS` and few words. Docstrings have no more of a habit than its limit.
How they open is the subject of ``openings.py``.

Text in code is no prose, and a heading or a question may open with any word.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from house import SLACK
from openings import ODD
from sources import ROOT, docstrings_of, read_commit, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sources import Sources

LIMITS = Path(__file__).with_name("prose_limits.json")
MOST_WORDS_OF_A_PAGE, MOST_WORDS = 3500, 35_000
_MOST_WORDS_OF = {"docs/gallery.md": 4000}
"""Most words of a page that has a section for each program."""
_FOLDERS = ("attndsl", "backends", "grammar")


class Habit(NamedTuple):
    """A pattern, why it slows a reader, and what to write."""

    name: str
    pattern: re.Pattern[str]
    reason: str
    instead: str
    of_pages: bool = False
    """True where docstrings may have it."""


class Hit(NamedTuple):
    """A habit at a place."""

    path: str
    line: int
    habit: Habit
    text: str

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.habit.name}: {self.text!r}: "
            f"{self.habit.reason}; {self.habit.instead}"
        )


def _words(pattern: str) -> re.Pattern[str]:
    """``pattern`` as whole words, in any case, over ends of lines."""
    spaced = pattern.replace(" ", r"\s+")
    return re.compile(rf"(?<![\w-])(?:{spaced})(?![\w-])", re.IGNORECASE)


_PLAIN_OPENINGS = ("How", "When", "Why", "Who", "That")
"""Words that open no docstring, and may open a later sentence."""
_START = r"(?:\A|(?<=\n\n)|(?<=[.!?] )|(?<=[.!?]\n)|(?<=\x00))"
"""Beginning of a sentence; :func:`marked` has marks where items and cells begin."""
OPENING = re.compile(
    rf"{_START}[ ]*(?!(?:{'|'.join(_PLAIN_OPENINGS)})\b)(?=[A-Z])"
    rf"(?:{ODD.pattern})(?![^.!?\x00]*\?)(?!\s+(?:a result|an example|course)\b)"
)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_THINGS = (
    "pages?|tables?|texts?|names?|numbers?|sections?|columns?|lines?|rows?|files?|fields?|"
    "entry|entries|cells?|notes?|keys?|params?|rest|values?|it|this|which|that"
)
_AFTER_OWN = "and|or|in|for|with|which|that"
HABITS = (
    Habit("opening", OPENING, "the subject comes late", "open with the subject"),
    Habit("stands", _words("stands?"), "names no action", "write is, holds, or means"),
    Habit("a thing says", _words(rf"(?:{_THINGS}) says?"), "things do not speak",
          "write gives, lists, or shows"),
    Habit("say what", _words("(?:say|says|said|tell|tells) (?:what|which|where|who|whether)"),
          "things do not speak", "write the fact, or name it"),
    Habit("such a", re.compile(rf"{_START}[ ]*Such an?\b"),
          "refers back without a name", "repeat the noun"),
    Habit("of its own",
          re.compile(rf"\bof\s+(?:its|their)\s+own(?=\s*[.,;:)]|\s+(?:{_AFTER_OWN})\b)"),
          "two words for one", "write its own X, or separate"),
    Habit("alone", _words(r"(?:by|of|in|with|for) (?:\w+ )?\w+ alone"), "reads as lonely",
          "write only before the noun"),
    Habit("like one before", _words("like (?:one|those|the one) before"), "names nothing",
          "write repeated"),
    Habit("is told", _words("(?:is|are|was|were|be|been) told"), "who tells is missing",
          "write warns, prints, or knows"),
    Habit("one as a pronoun",
          _words("one (?:types|writes|has|gets|reads|wants|needs|can|may|knows|would|calls)"),
          "the reader is 'you'", "write you"),
    Habit("hardly", _words("hardly"), "vague", "write rarely, or give the number"),
    Habit("nobody", _words("nobody|somebody|anybody"), "names no actor", "name the actor"),
    Habit("whose chain", re.compile(r"\bwhose\b[^.!?\x00]*\bwhose\b"), "two relations at once",
          "make two sentences"),
    Habit("that there is", _words("that there (?:is|are|was|were)"), "filler",
          "name the thing alone, or write available"),
    Habit("is asked of", _words("(?:is|are|be) asked (?:of|for)"), "turned around",
          "say who requests what"),
    Habit("there is none", _words("there (?:is|are) (?:none|nothing)"), "says little",
          "say what is missing"),
    Habit("beside", _words("beside"), "means next to", "write compared with, or besides"),
    Habit("has to be", _words("(?:has|have|had) to be"), "passive without an actor",
          "write must, or give the command"),
    Habit("the same of", _words("the same of"), "no owner", "name the thing again"),
    Habit("times as long", _words("times as (?:long|much|many)"), "a ratio turned around",
          "write 2.1x faster than X at Y"),
    Habit("of today", _words("of today|today(?:'s)?"), "history", "write what holds", True),
    Habit("history", _words("before there (?:was|were)|used to (?:be|have)|until now"),
          "history", "write what holds", True),
    Habit("measurement number", re.compile(r"(?<!MiniMax )\bM\d{1,3}\b"),
          "belongs to docs/dev/measured.md", "give the figure", True),
    Habit("date", re.compile(rf"\b20\d\d-\d\d-\d\d\b|\b(?:{_MONTHS}) (?:\d\d?, )?20\d\d\b"),
          "history", "leave it out", True),
    Habit("commit", re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b"),
          "history", "leave it out", True),
)  # fmt: skip
_CODE = re.compile(
    r"^(?: *)```.*?^ *```$|<!--.*?-->|^ *>>> .*?(?=\n *\n|\Z)|^Traceback.*?(?=\n\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
_NAMES = re.compile(
    r":\w+:`[^`]*`|``.+?``|`[^`\n]+(?:\n[^`\n]+)?`|\]\([^)]*\)|https?://\S+", re.DOTALL
)
_ITEM = re.compile(r"(?:(?<=\n)|\A)([ ]*)(?:[-*]|\d+\.)[ ]|\|[ ]?")
_ENTRY = re.compile(r"(?:(?<=\n)|\A)[ ]*\*{0,2}\w[\w, ]*:[ ](?=[A-Z])")
"""An argument's name in a docstring."""
_FIGURES = re.compile(r"<!-- figures: begin.*?<!-- figures: end -->", re.DOTALL)
_OF_FIGURES = ("commit", "date")
"""Habits that figures may have: where they come from."""
_HEADING = re.compile(r"^#.*$", re.MULTILINE)


def marked(text: str) -> str:
    """``text`` as long as it was, with ``x`` for code and a mark before each item or cell."""
    text = _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    text = _NAMES.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), text)
    for start in (_ITEM, _ENTRY):
        text = start.sub(lambda found: " " * (len(found[0]) - 1) + "\x00", text)
    return text


def hits_in(path: str, text: str, first: int = 1, is_page: bool = True) -> Iterator[Hit]:
    """Habits of a page, or of a docstring whose line is ``first``."""
    prose = marked(text)
    headings = [found.span() for found in _HEADING.finditer(text)] if is_page else []
    figures = [found.span() for found in _FIGURES.finditer(text)]
    for habit in HABITS:
        if habit.of_pages and not is_page:
            continue
        for found in habit.pattern.finditer(prose):
            place = found.start()
            heading = any(start <= place < end for start, end in headings)
            if habit.name == "opening" and (heading or (not is_page and not prose[:place].strip())):
                continue
            if habit.name in _OF_FIGURES and any(start <= place < end for start, end in figures):
                continue
            line = first + text.count("\n", 0, found.start() + len(found[0]) - 1)
            around = text[max(0, place - 20) : found.end() + 30]
            yield Hit(path, line, habit, " ".join(around.split()))


def pages() -> dict[str, str]:
    """User pages by their paths: the README and those at the top of docs/."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def page_hits(texts: Mapping[str, str]) -> list[Hit]:
    """Habits of pages, in the order of their lines."""
    return sorted(
        (hit for path, text in texts.items() for hit in hits_in(path, text)),
        key=lambda hit: (hit.path, hit.line),
    )


def docstring_hits(sources: Sources) -> Iterator[Hit]:
    """Habits of docstrings and of the strings under attributes."""
    for path, text in sources.items():
        for each in docstrings_of(text):
            yield from hits_in(path, each.text, each.node.lineno, is_page=False)


def long_pages(texts: Mapping[str, str]) -> list[str]:
    """Complaints about pages with too many words, and about all pages of docs/ together."""
    words = {path: len(text.split()) for path, text in texts.items()}
    found = [
        f"{path} has {number} words: at most {_MOST_WORDS_OF.get(path, MOST_WORDS_OF_A_PAGE)}"
        for path, number in words.items()
        if number > _MOST_WORDS_OF.get(path, MOST_WORDS_OF_A_PAGE)
    ]
    total = sum(number for path, number in words.items() if path.startswith("docs/"))
    if total > MOST_WORDS:
        found.append(f"the pages have {total} words: at most {MOST_WORDS}")
    return found


def counts(hits: Iterable[Hit]) -> dict[str, int]:
    """The number of hits of each habit that docstrings are judged by."""
    found = Counter(hit.habit.name for hit in hits)
    return {habit.name: found[habit.name] for habit in HABITS if not habit.of_pages}


def excesses(found: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Complaints about numbers above their limits, and about limits that are stale."""
    complaints = []
    for name, number in found.items():
        limit = limits.get(name, 0)
        if number > limit:
            complaints.append(f"{name}: {number} in docstrings is above the limit {limit}")
        elif number < limit * (1 - SLACK):
            complaints.append(
                f"{name}: {number} in docstrings is below the limit {limit}: "
                "run python tools/prose.py --ratchet"
            )
    return complaints


def tightened(found: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, int]:
    """Limits for these numbers, none above the present ones."""
    return {name: min(number, limits.get(name, number)) for name, number in found.items()}


def read_limits() -> dict[str, int]:
    """The limits of docstrings; none where the file is not there."""
    return json.loads(LIMITS.read_text("utf-8")) if LIMITS.is_file() else {}


def sources_of_docstrings() -> dict[str, str]:
    """The Python files of the package."""
    return read_commit(None, _FOLDERS)


def _counted() -> str:
    """A table of pages, and a list of the habits of docstrings."""
    texts = pages()
    by_page: dict[str, dict[str, object]] = {"words": {}, "hits": {}}
    found = Counter(hit.path for hit in page_hits(texts))
    for path, text in texts.items():
        by_page["words"][path] = len(text.split())
        by_page["hits"][path] = found[path]
    of_docstrings = counts(docstring_hits(sources_of_docstrings()))
    return "\n".join([table(by_page), "", table({"docstrings": of_docstrings})])


def _listed(options: argparse.Namespace) -> list[str]:
    """What is wrong with files, with docstrings, or with all pages."""
    if options.docstrings:
        return [str(hit) for hit in docstring_hits(sources_of_docstrings())]
    if not options.files:
        texts = pages()
        return [*map(str, page_hits(texts)), *long_pages(texts)]
    found: list[Hit] = []
    for name in options.files:
        text = Path(name).read_text("utf-8")
        found += docstring_hits({name: text}) if name.endswith(".py") else hits_in(name, text)
    return [str(hit) for hit in sorted(found, key=lambda hit: (hit.path, hit.line))]


def main(arguments: Sequence[str] | None = None, echo: Callable[[str], object] = print) -> int:
    """List habits, count them, or lower the limits; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description="Find habits of prose that slow a reader.")
    parser.add_argument("files", nargs="*", metavar="FILE", help="all user pages if none")
    parser.add_argument("--docstrings", action="store_true", help="list those of docstrings")
    parser.add_argument("--counts", action="store_true", help="count by page and by habit")
    parser.add_argument("--ratchet", action="store_true", help="lower the limits of docstrings")
    options = parser.parse_args(arguments)
    if options.counts:
        echo(_counted())
        return 0
    if options.ratchet:
        found, limits = counts(docstring_hits(sources_of_docstrings())), read_limits()
        LIMITS.write_text(json.dumps(tightened(found, limits), indent=1) + "\n", "utf-8")
        complaints = [each for each in excesses(found, read_limits()) if "above" in each]
    else:
        complaints = _listed(options)
    for each in complaints:
        echo(each)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
