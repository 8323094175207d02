"""What editors are told of names: hovers, definitions, completion, symbols, layout, problems."""

import gc
import subprocess
import sys
import weakref

import pytest

from attndsl.editors import diagnostics
from attndsl.editors.builtin_docs import all_meanings, meaning_of
from attndsl.editors.completion import proposals_at
from attndsl.editors.diagnostics import Level, problems_in
from attndsl.editors.document_symbols import symbols_in
from attndsl.editors.embedded_programs import programs_in
from attndsl.editors.formatting import edits_of
from attndsl.editors.hover import definition_at, note_at
from attndsl.errors import ArgumentError
from attndsl.frontend import read
from attndsl.frontend.vocabulary import Kind, kinds

PROGRAM = """\
# How far keys may be.
param window: int = 4
tensor gain[heads]: float
tensor doc[batch, n]: int
def twice(x) = x * 2.0
distance = q - kv
mask = causal() and distance < window and doc[b, q] == doc[b, kv]
score = softcap(score, 50.0) * gain[h]
score = where(q > kv, twice(score), -inf)
late = score * 2.0
weights = sigmoid(score) + n
broken = = 3
"""


def program(text=PROGRAM, path="/nowhere/a.attn"):
    (found,) = programs_in(text, path).programs
    return found


def note(at, text=PROGRAM):
    """What hovering at the last character of ``at`` says."""
    found = note_at(program(text), text.index(at) + len(at) - 1)
    return None if found is None else found.markdown


@pytest.mark.parametrize(
    ("at", "parts"),
    [
        ("def", ["def NAME(x, ...) = ..."]),
        ("param window", ["param window: int = 4", "How far keys may be.", "`int`, the same for"]),
        ("< window", ["param window: int = 4"]),
        ("tensor gain", ["A tensor of `float`, read as `gain[h]`",
                         "d score / d gain[h] = 2.0 * (50.0 * tanh(score / 50.0))"]),
        ("doc[batch, n", ["`n` is a size that the tensor brings"]),
        (" doc", ["tensor doc[batch, n]: int"]),
        ("def twice", ["def twice(x) = x * 2.0"]),
        ("def twice(x) = x", ["A parameter of `twice`."]),
        ("distance", ["distance = q - kv", "`int`, depends on `q`, `kv`."]),
        ("mask", ["All mask lines: `bool`, depends on `b`, `q`, `kv`; reads `doc`, `window`."]),
        ("causal", ["def causal() = q >= kv", "Causal, aligned to the upper left"]),
        ("score", ["`float`, depends on `h`, `score`; reads `gain`.",
                   "Its derivative by the raw score: `gain[h] * 50.0 * (1.0 - tanh"]),
        ("kv, twice(score", ["depends on `h`, `score`"]),
        ("late", ["`float`"]),
        ("weights", ["Its derivative by the final score: `sigmoid(score) - "]),
        ("sigmoid", ["sigmoid(x)", "`1 / (1 + exp(-x))`."]),
        ("-inf", ["A score of `-inf` from `where` is a mask."]),
    ],
)  # fmt: skip
def test_hovers(at, parts):
    said = note(at)
    for part in parts:
        assert part in said


def test_a_line_reads_the_score_before_it():
    read = note("kv, twice(score")
    written = note("[h]\nscore")
    assert "`q`" not in read
    assert written.startswith("```attn\nscore")
    text = "param cap: float = 1.0\nscore = softcap(score, cap) + score"
    first = note("softcap(score, cap) + score", text)
    assert "Here" not in first


@pytest.mark.parametrize("at", ["# How", "= 4", "broken", "broken ="])
def test_nothing_is_said_of_comments_numbers_and_what_is_broken(at):
    assert note(at) is None


def test_derivatives_of_scores_that_are_masked_or_too_large():
    text = "score = where(q >= kv, score * 3.0, -inf)\n"
    assert "Its derivative by the raw score: `3.0`" in note("score", text)
    long = "score = " + " + ".join(f"tanh(score * {n}.5)" for n in range(200))
    assert "derivative" not in note("score", long)
    assert "`float`" in note("score", long)


@pytest.mark.parametrize(
    ("at", "to"),
    [
        ("< window", "window: int"),
        ("== doc", "doc[batch"),
        ("+ n", "n]: int"),
        ("kv, twice", "twice(x)"),
        ("def twice(x) = x", "x) = x * 2.0"),
        ("distance", "distance = "),
    ],
)
def test_definitions(at, to):
    found = definition_at(program(), PROGRAM.index(at) + len(at) - 1)
    assert found.text is None
    assert PROGRAM[found.start :].startswith(to)


def test_definitions_in_other_files(tmp_path):
    found = definition_at(program(), PROGRAM.index("causal"))
    assert found.path.endswith("prelude.attn")
    assert found.text[found.start : found.end] == "causal"
    assert definition_at(program(), PROGRAM.index("sigmoid")) is None
    (tmp_path / "part.attn").write_text("def near(x) = x < 3\n")
    text = 'import "part.attn"\nmask = near(q)\n'
    own = program(text, str(tmp_path / "a.attn"))
    found = definition_at(own, text.index("near"))
    assert (found.path, found.start) == (str(tmp_path / "part.attn"), 4)
    assert definition_at(own, text.index("part.attn")).path == str(tmp_path / "part.attn")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.attn").write_text("")
    other = program('import "../part.attn"', str(tmp_path / "inner" / "a.attn"))
    assert definition_at(other, 10) is None
    for name in ("none.attn", "/etc/passwd", "../a.attn"):
        other = program(f'import "{name}"', str(tmp_path / "a.attn"))
        assert definition_at(other, 10) is None
    assert definition_at(program(text), text.index("part.attn")) is None


def labels(text, line):
    """What is proposed at the end of ``line`` behind ``text``."""
    return {each.label: each for each in proposals_at(program(text + line), len(text + line))}


def test_completion():
    found = labels(PROGRAM, "mask = ")
    own = {"window", "gain", "doc", "n", "twice", "distance", "late"}
    assert own | set(kinds()) - {"def", "param", "tensor", "import"} == set(found)
    assert found["gain"].insert == "gain[${1:h}]"
    assert found["doc"].insert == "doc[${1:b}, ${2:i}]"
    assert found["twice"].insert == "twice(${1:x})"
    assert found["sliding_window"].insert == "sliding_window(${1:w})"
    assert found["causal"].insert == "causal()"
    assert found["clamp"].insert == "clamp(${1:x}, ${2:low}, ${3:high})"
    assert found["distance"].detail == "int: distance = q - kv"
    assert found["window"].markdown == "How far keys may be."
    assert "arXiv 2004.05150" in found["sliding_window"].markdown
    assert set(labels(PROGRAM, "s")) > {"score", "sink", "param", "def"}
    assert labels(PROGRAM, "s")["score"].insert == "score = "


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("param x: ", {"int", "float", "bool"}),
        ("tensor y[heads, n]: fl", {"int", "float", "bool"}),
        ("tensor y[he", {"window", "n", "batch", "heads", "kv_heads", "q_len", "kv_len",
                         "head_dim"}),
        ("param ", set()),
        ("def f", set()),
        ("mask = q # ", set()),
        ('import "', set()),
    ],
)  # fmt: skip
def test_completion_knows_where_it_is(line, wanted):
    assert set(labels(PROGRAM, line)) == wanted


def test_names_that_a_configuration_binds():
    text = "a:\n  program: |\n    param w: int\n    mask = q - kv < w + more\n    mask = m\n"
    text += "  params: {w: 3, more: 4}\n"
    (found,) = programs_in(text, "/x/a.yaml").programs
    own = found.source.text

    def said(at):
        return note_at(found, own.index(at)).markdown

    assert said("w: int").endswith("The configuration binds it to `3`.")
    assert said("more") == "The configuration binds it to `4`."
    place = definition_at(found, own.index("more"))
    assert (place.path, place.text[place.start :][:7]) == ("/x/a.yaml", "more: 4")
    assert own[definition_at(found, own.index("w + ")).start :].startswith("w: int")
    labels = {each.label for each in proposals_at(found, own.index("m\n") + 1)}
    assert {"w", "more"} <= labels


def test_every_word_has_a_meaning():
    found = list(all_meanings())
    assert {meaning.name for meaning in found} == set(kinds())
    for meaning in found:
        assert meaning.said.endswith("." if not meaning.said.endswith(")") else ")")
        if meaning.kind in (Kind.FUNCTION, Kind.PRELUDE):
            assert meaning.form.startswith(f"{meaning.name}(")
    assert meaning_of("dot").parameters == ("u[b, h, q, :]", "w[b, hkv, kv, :]")
    assert meaning_of("nonsense") is None


def test_symbols():
    names = [(each.name, each.kind) for each in symbols_in(programs_in(PROGRAM, "a.attn"))]
    assert names[:4] == [("window", "param"), ("gain", "tensor"), ("doc", "tensor"),
                         ("twice", "function")]  # fmt: skip
    assert ("late", "local") in names
    text = "a: q >= kv\nb: mask = causal()\n"
    found = symbols_in(programs_in(text, "a.yaml"))
    assert [(x.name, text[x.start : x.end], [c.name for c in x.children]) for x in found] == [
        ("a", "q >= kv", ["expression"]),
        ("b", "mask = causal()", ["mask"]),
    ]


def laid_out(text, path):
    for edit in sorted(edits_of(text, path), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


BLOCK = "a:\n  program: {}\n    mask=q>=kv # x\n\n\n    score=tanh( score )\n{}  params: {{}}\n"
LAID = "a:\n  program: {}\n    mask = q >= kv  # x\n\n    score = tanh(score)\n{}  params: {{}}\n"


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("a.attn", "mask=q>=kv", "mask = q >= kv\n"),
        ("a.attn", "mask = = q", "mask = = q"),
        ("a.yaml", BLOCK.format("|", ""), LAID.format("|", "")),
        ("a.yaml", BLOCK.format("|  # x", ""), LAID.format("|  # x", "")),
        # What the formatter would not give back is left as it is.
        ("a.yaml", BLOCK.format("|-", ""), BLOCK.format("|-", "")),
        ("a.yaml", BLOCK.format("|+", "\n"), LAID.format("|+", "")),
        ("a.yaml", BLOCK.format(">", ""), BLOCK.format(">", "")),
        ("a.yaml", "a: &x |\n  q>=kv\nb: *x\n", "a: &x |\n  q >= kv\nb: *x\n"),
        ("a.yaml", "a: |\r\n  q>=kv\r\n", "a: |\r\n  q>=kv\r\n"),
        ("a.yaml", "a: |\n  q>=\nb: |\n  q>=kv\n", "a: |\n  q>=\nb: |\n  q >= kv\n"),
        ("a.yaml", "a: 'q>=kv'\n", "a: 'q>=kv'\n"),
        ("a.toml", "a = '''\nq>=kv\n'''\n", "a = '''\nq>=kv\n'''\n"),
    ],
)
def test_layout(path, text, wanted):
    assert laid_out(text, path) == wanted
    assert laid_out(wanted, path) == wanted


def test_problems_of_params_and_of_the_form():
    text = "a:\n  program: q - kv < w\n  params: {w: 3, x: 4}\nb:\n  program: q >= kv\n"
    (found,) = problems_in(text, "a.yaml")
    assert text[found.start : found.end] == "x"
    assert found.kind == "NameResolutionError"
    unused, found = problems_in(text + "  desc: x\n", "a.yaml")
    assert unused.message.startswith("'x' is bound")
    assert "unknown key 'desc'" in found.message
    # An entry that is not written yet hides nothing of the others.
    unused, found = problems_in(f"{text}c:\n", "a.yaml")
    assert "the program of 'c' is no text: nothing" in found.message
    # What is remembered of a program moves with it.
    (moved,) = problems_in("# Another line.\n" + text, "a.yaml")
    assert moved.start == text.index("x: 4") + len("# Another line.\n")
    assert problems_in("", "a.attn") == []
    (found,) = problems_in("a.program = 'q >= kv'\n[d]\nprogram = 3\n", "a.toml")
    assert (found.start, found.end) == (0, 21)
    assert "the program of 'a.toml:d' is no text" in found.message


def test_warnings_are_problems_of_a_lower_level():
    text = "a: |\n  near = q - kv\n  mask = causal()\n"
    (found,) = problems_in(text, "/x/a.yaml")
    assert (found.level, found.kind) == (Level.WARNING, "UnusedWarning")
    assert text[found.start : found.end] == "near"
    assert found.message.startswith("nothing reads 'near'\nhint: ")
    wrong = problems_in(text.replace("kv\n", "kvv\n"), "/x/a.yaml")
    assert [each.level for each in wrong] == [Level.ERROR]


def test_a_file_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr("attndsl.editors.diagnostics.MOST_SECONDS", -1.0)
    text = "a: q >= kv\nb: q >= kvv\n"
    (found,) = problems_in(text, "/x/a.yaml")
    assert found.level is Level.REMARK
    monkeypatch.undo()
    monkeypatch.setattr("attndsl.editors.diagnostics._MOST", 1)
    wrong, remark = problems_in("a: q >= kvv\nb: q >= kvv\n", "/x/a.yaml")
    assert (wrong.level, remark.level) == (Level.ERROR, Level.REMARK)
    assert remark.message.startswith("there are 1 errors: programs from 'b' on")
    assert "programs from 'a' on are not checked\nhint: run attndsl check a.yaml" in found.message


def test_errors_that_are_remembered_keep_no_program():
    """Editors send a text for each key that is pressed: what led to an error is let go."""
    held = weakref.WeakSet()

    class Local:
        """What a frame keeps, and nothing else does."""

    def checked(source, declared):
        local = Local()
        held.add(local)
        read(source, declared)
        raise ArgumentError("wrong")

    text = "mask = q - kv < 4321\nscore = score * 8765.0"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(diagnostics, "warnings_of", checked)
        found = problems_in(text, "kept.attn")
    assert [each.message for each in found] == ["wrong"]
    gc.collect()
    assert not held


def test_the_server_begins_with_what_checks_need():
    """What takes long at the first check is over before it, and no collection looks at it again."""
    code = (
        "import gc, sys; from attndsl.editors import language_server; language_server.warm_up()\n"
        "assert 'sympy' in sys.modules and gc.get_freeze_count() > 10_000"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
