"""What the page is told about programs, without a server."""

import json

import pytest
import torch

import attndsl
from attndsl.errors import ArgumentError, LimitError
from attndsl.frontend.limits import MAX_SOURCE
from attndsl.frontend.prelude import prelude_names
from attndsl.pipeline import stages
from attndsl.play.answers import answer
from attndsl.play.examples import examples, words
from attndsl.play.messages import PageRequest, PictureCall, RequestKind, TextProblem, read_asked
from attndsl.source import Source

GEMMA = """\
param window: int = 24
param cap: float
mask = causal() and q - kv < window
score = cap * tanh(score / cap)
"""


def ask(kind, text, **more):
    """The answer to a request as JSON, which is sent as JSON."""
    found = answer(read_asked(json.loads(json.dumps({"kind": kind, "text": text, **more}))))
    json.dumps(found.as_json(), allow_nan=False)
    return found


def test_a_picture_is_that_of_the_library():
    found = ask("picture", GEMMA, params={"cap": "30"}, view={"q_len": 32, "kv_len": 48, "h": 2})
    assert found.problems == ()
    attention = attndsl.compile(GEMMA)
    expected = attention.plot(q_len=32, kv_len=48, heads=4, h=2, window=24, cap=30.0)
    assert found.result.svg == str(expected)
    assert "head 2 of 4" in found.result.summary
    assert found.result.curve.startswith("score of a raw score")
    assert [(p.name, p.dtype, p.value, p.made_up) for p in found.result.params] == [
        ("window", "int", "24", False), ("cap", "float", "30", False)
    ]  # fmt: skip


def test_what_nobody_gives_is_made_up_and_said():
    text = "param w: int\ntensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv] and q < w"
    found = ask("picture", text).result
    assert found.made_up == "w = 16, doc (sorted ids)"
    assert found.made_up in found.svg
    assert [(p.value, p.made_up) for p in found.params] == [("16", True)]
    # Another seed, other tensors.
    assert ask("picture", text, view={"seed": 1}).result.svg != found.svg
    assert ask("picture", text, params={"w": "3"}).result.made_up == "doc (sorted ids)"
    # Tensors have the shapes that params say.
    sized = "param n: int\ntensor t[n]: float\nscore = score + t[kv % n]"
    assert ask("picture", sized, params={"n": "7"}).problems == ()


def test_a_param_that_may_be_absent_is_left_out_by_none():
    text = "param cap: float = none\nparam w: int = none\nmask = q - kv < w\n"
    text += "score = softcap(score, cap)"
    found = ask("picture", text, params={"cap": "none", "w": "5"}).result
    assert found.svg == str(attndsl.compile(text).plot(q_len=64, kv_len=64, heads=4, w=5))
    assert [(p.name, p.value, p.optional) for p in found.params] == [
        ("cap", "none", True), ("w", "5", True)
    ]  # fmt: skip
    whole = ask("picture", text).result
    assert [p.value for p in whole.params] != ["none", "none"]
    assert whole.curve
    assert not found.curve
    kernels = [ask("kernel", text, params=x).result.text for x in ({"cap": "none"}, {})]
    assert "tanh" not in kernels[0]
    assert "tanh" in kernels[1]
    details = ask("details", text, params={"w": "none"}).result
    assert details.cost_problem is None
    assert details.cost == ask("details", "score = softcap(score, 5.0)").result.cost
    wrong = ask("picture", text.replace("int = none", "int"), params={"w": "none"})
    assert wrong.problems == ()  # A required one has a made-up value then.


def test_params_that_the_text_no_longer_has_are_left_out():
    assert ask("picture", "q >= kv", params={"gone": "3"}).problems == ()
    wrong = ask("picture", "param w: int\nmask = q < w", params={"w": "1.5"})
    assert [p.message for p in wrong.problems] == ["w is 1.5"]


def test_errors_come_all_at_once_at_their_places():
    text = "mask = foo < 1  # \N{GRINNING FACE}\nscore = bar + 1.0"
    found = ask("picture", text)
    assert found.result is None
    units = text.encode("utf-16-le")
    assert [units[2 * p.start : 2 * p.end].decode("utf-16-le") for p in found.problems] == [
        "foo", "bar"
    ]  # fmt: skip
    assert [p.where for p in found.problems] == ["line 1, column 8", "line 2, column 9"]
    assert all(p.hint for p in found.problems)


def test_errors_of_equal_nodes_point_into_the_text_at_hand():
    # Expressions are shared between programs, and remember where they were first written.
    for before in ("", "# a line before\n"):
        text = f"{before}tensor t[heads]: float\nscore = score + t[1.5]"
        (found,) = ask("picture", text).problems
        assert text[found.start : found.end] in ("1.5", "t[1.5]")


def test_settings_that_cannot_be_are_problems_without_a_place():
    (found,) = ask("picture", "q >= kv", view={"h": 9}).problems
    assert found == TextProblem("h is 9, and heads is 4", "give 0 to 3, or a larger heads")
    (found,) = ask("picture", "q >= kv", view={"q_len": 1024, "block_m": 1}).problems
    assert "256" in found.hint


def test_details_are_those_of_the_command():
    expected = stages(Source(GEMMA), {})
    assert ask("picture", GEMMA).result.derivative == expected["derivative"]
    found = ask("details", GEMMA, params={"cap": "30"}, view={"cost_len": 4096}).result
    assert found.loops == expected["tiles"]
    attention = attndsl.compile(GEMMA)
    assert found.explanation == attention.explain(
        q_len=4096, kv_len=4096, heads=4, window=24, cap=30.0
    )
    assert found.cost == found.explanation.split("\n")[0]
    assert found.cost.startswith("About")
    assert found.costs.startswith("at 4096 queries x 4096 keys, 1 x 4 heads of 64\n  live ")
    assert found.cost_problem is None
    assert found.made_up == ""


def test_costs_of_made_up_tensors_say_so():
    found = ask("details", "tensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv]").result
    assert found.made_up == "doc (random)"
    assert "at 8192 queries" in found.costs
    found = ask("details", "param w: int\nmask = q - kv < w").result
    assert found.made_up == "w = 16"


def test_details_without_costs_have_the_rest():
    text = "tensor t[kv_len - 10000]: int\nmask = t[kv] < q"
    found = ask("details", text).result
    assert "would be -1808" in found.cost_problem.message
    assert found.costs == ""
    assert found.loops
    assert found.explanation


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("family", ["triton", "hopper"])
def test_kernels_are_those_of_the_library(direction, family):
    text = "causal() and q - kv < 100"
    kernel = {"direction": direction, "family": family, "dtype": "fp16", "head_dim": 128}
    found = ask("kernel", text, kernel=kernel).result
    expected = attndsl.compile(text).source(
        direction, backend=family, dtype=torch.float16, head_dim=128
    )
    assert found.text == expected


def test_a_kernel_that_there_is_none_of_is_a_problem():
    kernel = {"direction": "forward", "family": "hopper", "dtype": "fp32", "head_dim": 64}
    (found,) = ask("kernel", "q >= kv", kernel=kernel).problems
    assert found.hint


def test_layout():
    assert ask("layout", "mask=q>=kv").result.text == "mask = q >= kv\n"
    assert ask("layout", "mask = (").result is None


@pytest.mark.parametrize(
    "text",
    [
        "", "\0", "(" * 5000, "mask = " + "not " * 4000 + "true", "score = " + "-" * 9000 + "1",
        "x = 1\n" * 2700, "#" * MAX_SOURCE, "mask = q >= kv\n\r\x1b[31m", "q" * MAX_SOURCE,
        "score = " + " + ".join(["tanh(score)"] * 1100), "score = 1e308 * 1e308 * score",
        "score = 0 * inf", f"mask = q < {9**400}", "tensor t[1 << 40]: float\nscore = t[q]",
        "tensor t[kv_len * 1000000000]: float\nscore = t[q]", 'import "/etc/passwd"',
        "def f(x) = f(x)\nmask = f(q)", "score = <script>alert(1)</script>",
    ],
    ids=range(18),
)  # fmt: skip
def test_no_text_raises(text):
    for kind in RequestKind:
        found = ask(kind, text)
        assert (found.result is None) == (found.problems != ())
        assert not any("compiler failed" in p.message for p in found.problems), found.problems


def test_program_text_is_escaped_in_pictures():
    found = ask("picture", "mask = q >= kv  # <script>\nscore = score + 1.0 * (q < kv)")
    assert found.result is None
    svg = ask("picture", "x = q < kv  # </title><script>alert(1)</script>\nmask = x").result.svg
    assert "<script" not in svg
    assert "q &lt; kv" in svg


def test_a_failure_of_the_compiler_is_a_problem(monkeypatch):
    def fails(*_):
        raise KeyError("no such node")

    monkeypatch.setitem(answer.__globals__["_WAYS"], RequestKind.PICTURE, fails)
    (found,) = answer(PageRequest(RequestKind.PICTURE, "q >= kv")).problems
    assert found.message == "the compiler failed: KeyError: 'no such node'"
    assert "report" in found.hint


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 9 bytes")])
def test_lack_of_memory_is_a_problem(monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setitem(answer.__globals__["_WAYS"], RequestKind.PICTURE, fails)
    (found,) = answer(PageRequest(RequestKind.PICTURE, "q >= kv")).problems
    assert "memory" in found.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "no mapping"),
        ({}, "'kind' is none of picture"),
        ({"kind": "exec", "text": ""}, "'kind'"),
        ({"kind": ["picture"], "text": ""}, "'kind'"),
        ({"kind": "picture"}, "'text' is no text"),
        ({"kind": "picture", "text": 3}, "'text' is no text"),
        ({"kind": "picture", "text": "\ud83d"}, "half a character"),
        ({"kind": "picture", "text": "", "more": 1}, "unknown names"),
        ({"kind": "picture", "text": "", "view": {"q_len": 1025}}, "'q_len' is out of bounds"),
        ({"kind": "picture", "text": "", "view": {"q_len": True}}, "'q_len'"),
        ({"kind": "picture", "text": "", "view": {"q_len": 1.5}}, "'q_len'"),
        ({"kind": "picture", "text": "", "view": {"depth": 1}}, "unknown names"),
        ({"kind": "picture", "text": "", "view": {"raw_score": float("nan")}}, "'raw_score'"),
        ({"kind": "picture", "text": "", "view": {"raw_score": float("inf")}}, "'raw_score'"),
        ({"kind": "picture", "text": "", "view": {"cost_len": 1 << 18}}, "'cost_len'"),
        ({"kind": "kernel", "text": "", "kernel": {"family": "cpu"}}, "'family' is no choice"),
        ({"kind": "kernel", "text": "", "kernel": {"family": {}}}, "'family' is no choice"),
        ({"kind": "kernel", "text": "", "kernel": {"head_dim": 0}}, "'head_dim'"),
        ({"kind": "picture", "text": "", "params": {"w": 3}}, "the value of 'w' is no number"),
        ({"kind": "picture", "text": "", "params": {"w": "9" * 500}}, "no number"),
        ({"kind": "picture", "text": "", "params": {"w": "1e999"}}, "no number"),
        ({"kind": "picture", "text": "", "params": {f"p{i}": "1" for i in range(101)}}, "100"),
    ],
    ids=lambda value: None,
)
def test_what_is_no_request_is_refused(values, message):
    with pytest.raises(ArgumentError, match=message):
        read_asked(values)


def test_a_program_beyond_the_limit_is_refused():
    read_asked({"kind": "picture", "text": "#" * MAX_SOURCE})
    with pytest.raises(LimitError, match="longer than 16384 characters"):
        read_asked({"kind": "picture", "text": "#" * (MAX_SOURCE + 1)})


def test_requests_go_through_json_unchanged():
    params = {"a": 1 << 62, "b": float("inf"), "c": True, "d": 0.1}
    asked = PageRequest(RequestKind.DETAILS, "q >= kv", params, PictureCall(q_len=7, raw_score=0.5))
    assert read_asked(json.loads(json.dumps(asked.as_json()))) == asked


@pytest.mark.parametrize("example", [e for group in examples() for e in group.examples],
                         ids=lambda e: e.name)  # fmt: skip
def test_examples_have_pictures_and_costs(example):
    found = ask("picture", example.text)
    assert found.problems == ()
    assert "; live pairs 0 %" not in found.result.summary
    details = ask("details", example.text, view={"cost_len": 1024}).result
    assert details.cost_problem is None
    assert ask("layout", example.text).result.text == example.text


def test_every_function_of_the_prelude_has_an_example():
    whole, functions = examples()
    assert {e.name for e in functions.examples} == set(prelude_names())
    for each in functions.examples:
        assert f"{each.name}(" in each.text
    assert "arXiv 2004.05150" in dict(functions.examples)["sliding_window"]
    assert len(whole.examples) > 10


def test_words_are_those_of_the_language():
    found = words()
    assert {"score", "tanh", "causal", "mask", "softmax", "kv_heads"} <= set(found["name"])
    assert {"param", "tensor", "def", "and"} <= set(found["statement"])
