"""Reading programs: forms, errors and their places, hostile text, the prelude by brute force."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl import errors, ir
from attndsl.frontend import Bound, ParamSpec, TensorSpec, read
from attndsl.frontend.format import format_source
from attndsl.ir import DType, Program
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable


def program(text: str, **declared: object) -> Program:
    return read(Source(text, "p.attn"), declared)  # type: ignore[arg-type]


def failure(text: str, **declared: object) -> errors.AttnDSLError:
    with pytest.raises(errors.AttnDSLError) as caught:
        program(text, **declared)
    str(caught.value)
    return caught.value


def test_every_form_of_statement() -> None:
    found = program(
        """
        param window: int = 4096      # a comment
        param cap: float; param flag: bool = true
        tensor doc[batch, kv_len]: int
        tensor table[heads, 2 * kv_len, buckets]: float
        def near(a, b) = abs(a - b) < window
        distance = (q
                    - kv)
        mask = near(q, kv) and doc[b, q] == doc[b, kv] and flag
        score = cap * tanh(score / cap)
        score = score + table[h, distance + kv_len, buckets - 1]
        sink = 0.5
        weights = dropout(softmax(score), 0.1)
        """
    )
    assert [p.name for p in found.params] == ["window", "cap", "flag"]
    assert [p.default for p in found.params] == [4096, None, True]
    assert found.dim_names() == ("buckets",)
    assert found.weights is None
    assert found.dropout is ir.const(0.1)
    assert found.sink is ir.const(0.5)
    assert found.mask is not None


def test_one_expression_is_a_mask_or_a_score() -> None:
    assert program("q >= kv").mask is not None
    assert program("score * 2").mask is None


def test_names_given_in_python() -> None:
    found = program("score * gain[h] + t", gain=TensorSpec(("heads",)), t=ParamSpec("float"))
    assert [t.name for t in found.tensors] == ["gain"]
    assert [p.name for p in found.params] == ["t"]
    assert program("q - kv < w", w=Bound(7)) == program("q - kv < 7")
    assert program("param c: float\nscore * c", c=Bound(2)) == program("score * 2.0")
    unused = "'windw' was given to compile(), but the program never uses it"
    assert failure("q >= kv", windw=Bound(7)).message == unused


CASES = [
    ("q >= kv & q - kv < 3", errors.TypeMismatchError, 1, 6, "and"),
    ("mask = qq >= kv", errors.NameResolutionError, 1, 8, "declare 'param qq: int'"),
    ("x = 1\nx = 2\nq >= x", errors.NameResolutionError, 2, 1, "once"),
    ("score = softcp(3)", errors.NameResolutionError, 1, 9, "softcap"),
    ("score + sum(q)", errors.NameResolutionError, 1, 9, "reduce"),
    ("mask = q", errors.TypeMismatchError, 1, 8, "compare"),
    ("q >= kv and 3", errors.TypeMismatchError, 1, 13, "compare"),
    ("score + (q >= kv)", errors.TypeMismatchError, 1, 9, "int("),
    ("tensor t[heads]: float\nscore * t[h, q]", errors.RankError, 2, 9, "t[h]"),
    ("tensor t[heads]: float\nscore * t", errors.RankError, 2, 9, "t[h]"),
    ("tensor t[heads]: float\nscore * t[score]", errors.TypeMismatchError, 2, 11, "int("),
    ("tensor t[heads]: flot\nscore", errors.TypeMismatchError, 1, 18, "float"),
    ("sink = 1\nmask = q > kv\nsink = 2", errors.NameResolutionError, 3, 1, "one 'sink'"),
    ("weights = score\nweights = score", errors.NameResolutionError, 2, 1, "one 'weights'"),
    ("mask = q > kv\nmask = q", errors.TypeMismatchError, 2, 8, "compare"),
    ("q >= (kv", errors.ParseError, 1, 6, "')'"),
    ("q >= kv)", errors.ParseError, 1, 8, "bracket"),
    ("q && kv", errors.ParseError, 1, 3, "'and'"),
    ("score = 'x'", errors.LexError, 1, 9, "quotes"),
    ("score = 1 +", errors.ParseError, 1, 11, "complete"),
    ("q kv", errors.ParseError, 1, 3, "operator"),
    ("q \x00>= kv", errors.LexError, 1, 3, "remove"),
    ("def f(a) = f(a)\nscore = f(1)", errors.NameResolutionError, 1, 12, "inlined"),
    ("score = where(q, 1, 2)", errors.TypeMismatchError, 1, 15, "compare"),
    ("score = exp(1, 2)", errors.RankError, 1, 9, None),
    ("score = 99999999999999999999", errors.TypeMismatchError, 1, 9, "1e30"),
    ("sink = q", errors.TypeMismatchError, 1, 8, "only"),
    ("weights = softmax(q)", errors.TypeMismatchError, 1, 11, "softmax(score)"),
    ("score = softmax(score)", errors.NameResolutionError, 1, 9, "weights"),
    ("weights = dropout(softmax(score), 2.0)", errors.TypeMismatchError, 1, 35, "0.1"),
]


@pytest.mark.parametrize(("text", "kind", "line", "column", "hint"), CASES)
def test_errors_say_where_and_what_instead(
    text: str, kind: type, line: int, column: int, hint: str | None
) -> None:
    found = failure(text)
    assert type(found) is kind
    assert found.span is not None
    assert (found.span.line, found.span.column) == (line, column)
    assert hint is None or hint in (found.hint or "")
    shown = str(found)
    assert shown.startswith(f"p.attn:{line}:{column}: ")
    assert "^" in shown


def test_all_errors_come_at_once() -> None:
    found = failure("mask = qq >= kv\nscore = scor + 1\nx = sum(q)\ny = (3")
    assert isinstance(found, errors.AttnDSLError)
    found = failure("mask = qq >= kv\nscore = scor + 1\nx = sum(q)")
    assert isinstance(found, errors.ProgramErrors)
    assert [e.span.line for e in found.errors if e.span] == [1, 2, 3]
    assert str(found).endswith("3 errors")


DOT = "tensor u[q_len, 4]: float; tensor w[kv_len, 4]: float; tensor z[kv_len, 5]: float\n"


@pytest.mark.parametrize(
    ("text", "kind", "column", "said"),
    [
        ("dot(u[q, :])", errors.RankError, 17, "dot takes 2 rows, and has 1"),
        ("dot(u, w)", errors.RankError, 21, "dot multiplies rows"),
        ("dot(u[q, 0], w[kv, :])", errors.RankError, 21, "this is one element of 'u'"),
        ("dot(u[q, :], 2 * w[kv, :])", errors.RankError, 30, "dot multiplies rows"),
        ("dot(u[q, :], z[kv, :])", errors.RankError, 17, "4 and 5 elements"),
        ("dot(u[q - kv, :], w[kv, :])", errors.TypeMismatchError, 21, "as many rows as pairs"),
        ("dot(u[q, :], w[q, :])", errors.TypeMismatchError, 17, "both rows are chosen by q"),
        ("dot(u[int(score), :], w[0, :])", errors.TypeMismatchError, 21, "the score chooses"),
        ("u[q, :]", errors.RankError, 22, "':' is no index"),
        ("dto(u[q, 0], w[0, 0])", errors.NameResolutionError, 17, "no function 'dto'"),
    ],
)
def test_contractions_that_make_no_sense(text: str, kind: type, column: int, said: str) -> None:
    found = failure(f"{DOT}score = score + {text}")
    assert type(found) is kind
    assert found.span is not None
    assert (found.span.line, found.span.column) == (2, column)
    assert said in found.message
    assert found.hint


def test_rows_of_a_contraction_stand_in_either_order() -> None:
    texts = ("dot(u[q, :], w[kv, :])", "dot((w[kv, :]), u[q, :])", "f(u, w, q)")
    programs = [
        program(f"{DOT}def f(a, b, i) = dot(a[i, :], b[kv, :])\nscore = score + {text}")
        for text in texts
    ]
    assert programs[0] == programs[1] == programs[2]
    laid = format_source("score=dot( u[q,:],w[ kv , : ])")
    assert laid == "score = dot(u[q, :], w[kv, :])\n"


def test_weights_read_the_final_score_alone() -> None:
    found = failure("x = sigmoid(score)\nscore = 2 * score\nweights = x * kv")
    assert "in 'weights' the score is the final one" in found.message
    assert found.span is not None
    assert (found.span.line, found.span.column) == (3, 11)
    assert program("x = sigmoid(score)\nweights = x") == program("weights = sigmoid(score)")


HOSTILE = {
    "parentheses": "(" * 1_000_000,
    "functions": "\n".join(f"def f{i}(x) = f{i + 1}(x)" for i in range(100_000)),
    "exponential": "\n".join(f"def f{i + 1}(x) = f{i}(x) + f{i}(x)" for i in range(60))
    + "\ndef f0(x) = x\nscore = f60(score)",
    "minus": "score = " + "-" * 16_000 + "1",
    "not": "mask = " + "not " * 4_000 + "true",
    "sum": "score = " + "1+" * 8_000 + "1",
    "powers": "score = " + "2**" * 5_000 + "2",
    "ternaries": "score = " + "1 if true else " * 2_000 + "1",
    "statements": ";" * 16_000,
    "names": "x" * 1_000_000,
    "errors": "\n".join(f"x{i} = y{i}" for i in range(2_000)),
    "digits": "score = " + "9" * 30_000,
    "controls": "".join(map(chr, range(32))) * 500,
    "deep brackets": "score = " + "(" * 5_000 + "1" + ")" * 5_000,
    "combining": "e\N{COMBINING ACUTE ACCENT}" * 9_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_read_or_refused_quickly(
    name: str, quickest: Callable[[Callable[[], object]], float]
) -> None:
    def read_or_refuse() -> None:
        if name in ("statements", "sum"):
            assert program(HOSTILE[name]).mask is None
        else:
            found = failure(HOSTILE[name])
            assert len(str(found)) < 20_000

    assert quickest(read_or_refuse) < 1.0


def _ints() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(["q", "kv", "1", "2", "3", "7"])

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        ops = st.sampled_from(["+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>"])
        binary = st.builds(lambda a, op, b: f"{a} {op} {b}", inner, ops, inner)
        return binary | inner.map(lambda a: f"({a})") | inner.map(lambda a: f"-{a}")

    return st.recursive(leaves, extend, max_leaves=8)


@settings(deadline=None)
@given(_ints())
def test_formatting_keeps_the_meaning_and_is_idempotent(text: str) -> None:
    squeezed = f"score={text.replace(' ', '')}#why\n\n\n\nmask=q>=kv"
    shown = format_source(squeezed)
    assert format_source(shown) == shown
    assert "# why" in shown
    assert program(shown) == program(squeezed)


def test_statements_after_a_bracket_of_the_line_before_are_laid_out() -> None:
    text = "x=(q\n- kv) ;y=(\nkv);mask=x<y  # why\nscore=score*2"
    shown = "x = (q\n    -kv); y = (\n    kv); mask = x < y  # why\nscore = score * 2\n"
    assert format_source(text) == shown
    assert format_source(shown) == shown
    assert program(shown) == program(text)


def _live(text: str, n: int, **sizes: int) -> list[list[bool]]:
    mask = program(text).mask
    assert mask is not None
    return [
        [bool(evaluate(mask, Environment({"q": q, "kv": k, "q_len": n, "kv_len": n, **sizes})))
         for k in range(n)]
        for q in range(n)
    ]  # fmt: skip


def _window(x: int, n: int, k: int) -> range:
    start = min(max(x - k // 2, 0), max(n - k, 0))
    return range(start, start + k)


@pytest.mark.parametrize(
    ("text", "live"),
    [
        ("causal()", lambda q, k: k <= q),
        ("sliding_window(5)", lambda q, k: 0 <= q - k < 5),
        ("prefix_lm(6)", lambda q, k: k <= q or k < 6),
        ("dilated(9, 3)", lambda q, k: q - k in (0, 3, 6)),
        ("strided(4, 5)", lambda q, k: k <= q and (q - k < 4 or (q - k) % 5 == 0)),
        ("block_diagonal(7)", lambda q, k: q // 7 == k // 7),
        ("block_causal(7)", lambda q, k: k // 7 <= q // 7),
        ("global_tokens(2)", lambda q, k: q < 2 or k < 2),
        (
            "natten2d(6, 4, 3, 3)",
            lambda q, k: k % 6 in _window(q % 6, 6, 3) and k // 6 in _window(q // 6, 4, 3),
        ),
        (
            "block_diffusion(12, 4)",
            lambda q, k: (
                (q < 12 and k < 12 and q // 4 == k // 4)
                or (q < 12 <= k and (k - 12) // 4 < q // 4)
                or (q >= 12 and k >= 12 and (k - 12) // 4 <= (q - 12) // 4)
            ),
        ),
    ],
)
def test_prelude_masks(text: str, live: object) -> None:
    assert callable(live)
    assert _live(text, 24) == [[live(q, k) for k in range(24)] for q in range(24)]


def test_alibi_softcap_and_relative_bias() -> None:
    environment = Environment({"score": 2.0, "q": 9, "kv": 4, "h": 1, "heads": 8, "kv_len": 16})
    assert evaluate(program("score = score + alibi()").score, environment) == 2.0 - 2.0**-2 * 5
    capped = program("score = softcap(score, 30.0)").score
    assert evaluate(capped, environment) == pytest.approx(1.997, abs=1e-3)
    biased = program("tensor t[heads, 2 * kv_len]: float\nscore = score + rel_bias(t)").score
    table = Environment(environment.names, lambda name, index: float(index[1]))
    assert evaluate(biased, table) == 2.0 + 21


def test_constants_and_types() -> None:
    assert program("score = 7 / 2").score is not program("score = 7 // 2").score
    assert program("score = q ** 2").score.args[0].dtype is DType.INT
    assert program("score = q ** -2").score.dtype is DType.FLOAT


def test_statements_of_several_texts_have_their_own_places():
    """A statement that was read before in another text is not read again."""
    line = "mask = q >= kvv"
    for before in ("", "# A comment.\n", "x = q\n"):
        with pytest.raises(errors.NameResolutionError) as caught:
            read(Source(before + line, before), {})
        assert caught.value.span.start == len(before) + line.index("kvv")
        assert caught.value.span.source.name == before
