"""What people write who know Python, torch or FlexAttention gets a hint that says what to write."""

import time

import pytest

from attndsl.errors import AttnDSLError, flatten
from attndsl.frontend import hints
from attndsl.frontend.declare import Bound, ParamSpec, TensorSpec
from attndsl.frontend.program_names import is_free
from attndsl.pipeline import check, lower, warnings_of
from attndsl.source import Source

TENSOR = "tensor doc[batch, kv_len]: int\n"
CASES = [
    ("weights = 2 * softmax(score)", "to scale weights, scale v"),
    ("score = log10(score)", "write log(x) / log(10.0)"),
    ("mask = q => kv", "write '>=' to compare"),
    ("mask = q =< kv", "write '<='"),
    ("mask = q \u2265 kv", "write '>='"),
    ("mask = q \u2260 kv", "write '!='"),
    ("score = score \u2212 1", "write '-'"),
    ("param window = 4\nmask = q - kv < window", "write 'param window: int = 4'"),
    ("param c = 4.5\nscore = c * score", "write 'param c: float = 4.5'"),
    ("param on = True\nmask = on", "write 'param on: bool = true'"),
    ("score += 1", "write 'score = score + ...'"),
    ("score -= 0.1 * (q - kv)", "write 'score = score - ...'"),
    ("x = 2; score **= x", "write 'score = score ** ...'"),
    ("tensor doc: int[batch, n]\nmask = doc[b, q] == 0", "write 'tensor doc[batch, n]: int'"),
    ("tensor doc: int\nmask = doc[b, q] == 0", "write 'tensor doc[batch, kv_len]: int'"),
    ("tensor s: float\nscore = s * score", "a scalar is a param: 'param s: float'"),
    ("tensor s: float\nscore = s * score", "write 'tensor s[heads]: float'"),
    ("tensor s[heads]\nscore = s[h] * score", "add a type: tensor s[heads]: float"),
    ("tensor s[heads]:  # one a head\nscore = s[h] * score", "add a type: tensor s[heads]: float"),
    ("param c\nscore = c * score", "add a type: param c: float"),
    ("tensor s\nscore = s[h] * score", "write 'tensor s[heads]: float', or 'param s: float'"),
    (
        "param s[heads]\nscore = s[h] * score",
        "a param is one number: write 'tensor s[heads]: float'",
    ),
    (
        "param p[batch, kv_len]: int\nmask = p[b, kv] > 0",
        "a param is one number: write 'tensor p[batch, kv_len]: int'",
    ),
    ("param p[2 * n]: bool = true\nmask = p[q]", "write 'tensor p[2 * n]: bool'"),
    ("param p: int[batch]\nmask = p[b] > 0", "write 'tensor p[batch]: int'"),
    ("tensor p: int[]", "a scalar is a param: 'param p: int'"),
    ("param p: int[]\nmask = p > 0", "a param is one number: write 'param p: int'"),
    ("param p[]: int\nmask = p > 0", "a param is one number: write 'param p: int'"),
    ("param p[\nmask = p > 0", "add ']'"),
    ("tensor p[]", "write 'tensor p[heads]: float', or 'param p: float'"),
    ("tensor p[ ]:", "write 'tensor p[heads]: float', or 'param p: float'"),
    ("tensor p[]: int", "write 'param p: int'"),
    *(
        (text, f"'{name}' always has its own meaning: choose another name")
        for text, name in (
            ("tensor q: float", "q"),
            ("tensor heads: int", "heads"),
            ("tensor mask: bool", "mask"),
            ("tensor kv: int[batch]", "kv"),
            ("tensor q", "q"),
            ("tensor e[heads]:", "e"),
            ("param inf", "inf"),
            ("param h = 3", "h"),
            ("param q[heads]: int", "q"),
        )
    ),
    ("score = score + bias[h, q, kv]", "declare it ('tensor bias[...]: int'"),
    ("score = score + logs[h]", "declare it ('tensor logs[...]: int'"),
    ("def f(x) = sin_[x]\nscore = f(kv)", "'tensor sin_[...]: float'), or give it to compile()"),
    ("mask = casual[q]", "declare it ('tensor casual[...]: int'"),
    ("tensor document[kv_len]: int\nmask = documents[q] == document[kv]", "mean 'document'?"),
    ("mask = q >= kv and given(doc)", "declare it ('tensor doc[...]: int = none'"),
    ("score = nan", "a program has no NaN"),
    ("mask = score == NaN", "a program has no NaN"),
    (
        "score = score + man",
        "declare 'param man: float' or 'tensor man[...]: float', or pass man=...",
    ),
    ("mask = near(3)\nnear = q - kv", "remove the call; 'near' is bound in line 2: move"),
    ("near = q - kv\nmask = near(3)", "remove the call"),
    ("near = near(3)\nmask = near > q", "define it: 'def near(...) = ...'"),
    ("mask = mask and causal()", "several masks are joined by 'and': write 'mask = causal()'"),
    ("mask = (mask) and (q > 3 or b == 0)", "write 'mask = (q > 3 or b == 0)'"),
    ("mask = q > 3 and (mask and b  == 0)", "write 'mask = q > 3 and b == 0'"),
    (f"mask = mask and q {'+ kv ' * 30} > 3", "write 'mask = ...'"),
    ("mask = mask or causal()", "'mask' cannot be read"),
    ("mask = near\nnear = q - kv < 3", "'near' is bound in line 2: move that line up"),
    ("mask = near; near = q - kv < 3", "'near' is bound behind this"),
    ("near = q - kv < 3\nmask = causal() and naer", "did you mean 'near'?"),
    ("mask = causal() and naer\nnear = q - kv < 3", "did you mean 'near'?"),
    ("near = q - kv < 3\nmask = causal() and naer()", "did you mean 'near', which is no function?"),
    ("mask = casual and q - kv < 3", "did you mean the function 'causal(...)'?"),
    ("mask = i >= kv", "write 'q'"),
    ("mask = q >= j", "write 'kv'"),
    ("score = score / sqrt(d)", "write 'head_dim'; the score already has the factor"),
    ("score = tanh(score, 30)", "write tanh(x)"),
    ("score = clamp(score, 30)", "write clamp(x, low, high)"),
    ("tensor doc[batch, n] int\nmask = doc[b, q] == 0", "write ': int'"),
    ("mask = q_idx >= kv", "write 'q'"),
    ("mask = q >= kv_idx", "write 'kv'"),
    ("mask = q >= k_idx", "write 'kv'"),
    ("mask = batch_idx == 0", "write 'b'"),
    ("score = score / num_heads", "write 'heads'"),
    ("mask = q >= kv and True", "write 'true'"),
    ("mask = alibi()", "write 'score = score + alibi()'"),
    ("mask = tanh(score)  # capped", "write 'score = tanh(score)'"),
    (f"mask = {' + '.join(['score'] * 20)}", "write 'score = ...'"),
    ("mask = q - kv", "compare it with something, such as '!= 0'"),
    ("score = score * rope(q)", "rotate q and k before the call"),
    ("score = score + random()", "weights = dropout(softmax(score), p)"),
    ("mask = top_k(score, 5)", "choose keys before the call"),
    ("score = matmul(q, kv)", "dot(u[q, :], w[kv, :])"),
    ("mask = tril(q)", "write q >= kv"),
    ("mask = lambda q, kv: q >= kv", "attndsl.trace(score_mod, mask_mod) makes programs of Python"),
    ("def mask_mod(b, h, q, kv): return q >= kv", "attndsl.trace(score_mod, mask_mod)"),
    ("score = score ^ 2", "write x ** y for a power"),
    ("score = score + logsigmoid(score)", "write -softplus(-x)"),
    ("mask = window(128)", "write sliding_window(w)"),
    ("weights = entmax(score)", "this needs all scores of a row at once"),
    ("weights = sparsemax(score)", "this needs all scores of a row at once"),
    ("mask = rank(score) < 8", "this needs all scores of a row at once"),
    ("mask = softmax(score) > 0.1", "weights have no threshold: compare the score"),
    ("weights = softmax(score) > 0.1", "weights have no threshold: compare the score"),
    (f"{TENSOR}mask = doc[q] == 3", "write doc[b, q]"),
    (f"{TENSOR}mask = doc[kv] == 3", "write doc[b, kv]"),
    (f"{TENSOR}mask = doc[b, q, kv] == 3", "write doc[b, kv]"),
    (f"{TENSOR}mask = doc == 3", "write doc[b, kv]"),
    (f"{TENSOR}mask = doc[(q + 1) * 2 + (kv - 1) * 3] == 3", "write doc[b, ...]"),
    ("tensor t[n, 2]: int\nmask = t[q] == 3", "write t[..., q]"),
    ("def f(x): return x + 1\nscore = f(score)", "write 'def f(x) = ...', without 'return'"),
    ("for i in range(3): x = i", "there are no loops"),
    ("while true", "there are no loops"),
    ("return q >= kv", "write 'mask = ...' or 'score = ...'"),
    ("class A: pass", "there are no classes"),
    ("from torch import nn", 'write import "FILE.attn"'),
    ("param window: int = 4.0\nmask = q - kv < window", "write 4"),
    ("param window: int = 4.5\nmask = q - kv < window", "write 'param window: float = 4.5'"),
    ("param window: int = inf\nmask = q - kv < window", "write 'param window: float = inf'"),
    ("param c: float = true\nscore = c * score", "write 1.0"),
    ("param on: bool = 1\nmask = on", "write true or false, or 'param on: int = 1'"),
]


WINDOW = "declare 'param window: int', or pass window=... to compile()"


@pytest.mark.parametrize(
    "text",
    [
        "mask = causal() and q - kv < window",
        "mask = causal() and 0 <= q - kv < window",
        "mask = sliding_window(window)",
        "mask = sliding_window(w=window)",
        "mask = causal() and kv >= q - window + 1",
        "mask = q // window == kv // window",
        "mask = q < window or causal()",
        "mask = -window < q - kv",
        "mask = abs(q - kv) < min(window, kv_len)",
        "near = q - kv - window\nmask = near < 0",
        "def near(x, w) = abs(x) < w\nmask = near(q - kv, window)",
        "tensor w[kv_len]: int\nmask = w[kv] > window",
        "score = score if q - kv < window else -inf",
        "score = where(q - kv < 2 * window, score, -inf)",
        "tensor ids[kv_len]: int\nmask = ids[kv - window] == 0",
        "mask = q - kv < window and (window & 1) == 0",
        "mask = q - kv < window\nscore = score / window",
    ],
)
def test_a_name_beside_positions_is_declared_as_an_int(text):
    with pytest.raises(AttnDSLError) as caught:
        check(Source(text), {})
    assert {each.hint for each in flatten(caught.value)} == {WINDOW}
    check(Source(f"param window: int\n{text}"), {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("score = cap * tanh(score / cap)", "cap"),
        ("score = score * std", "std"),
        ("score = score * scale", "scale"),
        ("score = score - w * (q - kv)", "w"),
        ("mask = score > bound", "bound"),
        ("mask = w * q < kv", "w"),
        ("sink = stride + 1", "stride"),
        ("bias = slope * (q - kv)\nscore = score + bias", "slope"),
    ],
)
def test_other_numbers_are_declared_as_floats(text, name):
    with pytest.raises(AttnDSLError) as caught:
        check(Source(text), {})
    declared = f"declare 'param {name}: float' or 'tensor {name}[...]: float', or pass {name}=..."
    for each in flatten(caught.value):
        assert each.hint.startswith(declared)
    check(Source(f"param {name}: float\n{text}"), {})


def test_a_condition_is_declared_as_a_bool():
    for text in ("mask = causal() and on", "mask = not on", "score = 2 * score if on else score"):
        with pytest.raises(AttnDSLError) as caught:
            check(Source(text), {})
        assert caught.value.hint == "declare 'param on: bool', or pass on=... to compile()"
        check(Source(f"param on: bool\n{text}"), {})


def test_slips_of_the_keys_name_what_is_meant():
    for slip, name in (("heasd", "heads"), ("KV", "kv"), ("head_dmi", "head_dim"), ("Q", "q")):
        with pytest.raises(AttnDSLError) as caught:
            check(Source(f"mask = causal() and {slip} > 3"), {})
        assert caught.value.hint == f"did you mean '{name}'?"


def test_hints_of_many_names_come_quickly():
    start = time.perf_counter()
    calls = "def f0(x) = x + a\n" + "".join(
        f"def f{i + 1}(x) = f{i}(x) + f{i}(x)\n" for i in range(60)
    )
    for text in (
        "mask = q < " + " + ".join(f"n{i}" for i in range(2_000)),
        "mask = q < " + " + ".join(["n"] * 7_000),
        f"{calls}mask = f60(q) < n",
    ):
        with pytest.raises(AttnDSLError):
            check(Source(text), {})
        with pytest.raises(AttnDSLError):
            check(Source(text), {"n": Bound(16.0)})
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "text", ["mask = sliding_window(w)", "mask = causal() and kv >= q - w", "mask = q // w == 0"]
)
def test_a_whole_float_beside_positions_is_an_int(text):
    given, whole = (lower(Source(text), {"w": Bound(value)}) for value in (16.0, 16))
    assert given.digest == whole.digest
    assert warnings_of(Source(text), {"w": Bound(16.0)}) == ()


def test_a_fraction_beside_positions_is_warned_of():
    text = Source("mask = sliding_window(w)")
    (found,) = warnings_of(text, {"w": Bound(16.5)})
    assert found.hint == "pass a whole number, such as 17"
    typed = Source("param w: float; mask = sliding_window(w)")
    assert warnings_of(typed, {"w": Bound(16.5)}) == ()
    assert warnings_of(text, {"w": Bound(float("inf"))}) == ()
    slope = Source("mask = causal(); score = score - w * (q - kv)")
    assert warnings_of(slope, {"w": Bound(16.5)}) == ()
    ratio = Source("mask = w * q >= kv")
    assert warnings_of(ratio, {"w": Bound(0.5)}) == ()


@pytest.mark.parametrize(("text", "hint"), CASES)
def test_hints_say_what_to_write(text, hint):
    with pytest.raises(AttnDSLError) as caught:
        check(Source(text), {})
    (found,) = (each for each in flatten(caught.value) if hint in (each.hint or ""))
    assert found.span is not None


def test_an_indexed_name_is_no_function():
    with pytest.raises(AttnDSLError) as caught:
        check(Source("mask = doc[q] == doc[kv]"), {})
    wanted = (
        "declare it ('tensor doc[...]: int', 'tensor doc[...]: float'), or give it to compile()"
    )
    assert [each.hint for each in flatten(caught.value)] == [wanted, wanted]
    check(Source("tensor doc[q_len]: int\nmask = doc[q] == doc[kv]"), {})


def test_a_later_name_that_is_called_is_no_function():
    with pytest.raises(AttnDSLError) as caught:
        check(Source("mask = near(3)\nnear = q - kv"), {})
    assert caught.value.message == "'near' is no function"
    check(Source("near = q - kv\nmask = near > 3"), {})


@pytest.mark.parametrize(
    "text",
    [
        "tensor mask[q_len, kv_len]: bool\nscore = where(mask[q, kv], score, -inf)",
        "param mask: bool\nmask = mask and causal()",
        "param mask: bool\nscore = where(mask, score, -inf)",
        "param sink: float\nsink = sink + 1.0",
        "tensor weights[heads]: float\nscore = score * weights[h]",
    ],
)
def test_names_whose_declaration_is_refused_are_no_second_error(text):
    with pytest.raises(AttnDSLError) as caught:
        check(Source(text), {})
    (found,) = flatten(caught.value)
    assert found.hint == "choose another name"


def test_a_refused_name_of_the_caller_is_no_second_error():
    with pytest.raises(AttnDSLError) as caught:
        check(Source("mask = mask and causal()"), {"mask": ParamSpec("bool")})
    (found,) = flatten(caught.value)
    assert found.hint == "choose another name"


def test_a_type_that_the_caller_misspells_gets_the_hint_of_the_text():
    for text, given in (("c", ParamSpec("flaot")), ("c[h]", TensorSpec(("heads",), "flaot"))):
        with pytest.raises(AttnDSLError) as caught:
            check(Source(text), {"c": given})
        assert caught.value.hint == "did you mean 'float'?"


def test_the_mask_is_no_line_to_move():
    with pytest.raises(AttnDSLError) as caught:
        check(Source("near = mask\nmask = near"), {})
    assert caught.value.hint.startswith("'mask' cannot be read: bind what it is to a name")


def test_a_later_line_of_an_imported_file_is_named_with_the_file(tmp_path):
    (tmp_path / "lib.attn").write_text("near = q - kv < 5\n")
    path = tmp_path / "a.attn"
    path.write_text('mask = near\nimport "lib.attn"\n')
    with pytest.raises(AttnDSLError) as caught:
        check(Source(path.read_text(), str(path), file=str(path)), {})
    assert caught.value.hint.startswith("'near' is bound in line 1 of ")
    assert caught.value.hint.endswith("lib.attn: move that line up")


def test_a_function_that_is_used_too_early_names_the_line():
    with pytest.raises(AttnDSLError) as caught:
        check(Source("def f(x) = x < far\nmask = f(q)\nfar = 3"), {})
    assert caught.value.hint == "'far' is bound in line 3: move that line up"
    check(Source("def f(x) = x < far\nfar = 3\nmask = f(q)"), {})


def test_defaults_of_the_other_number_are_as_they_were():
    check(Source("param c: float = 4\nscore = c * score"), {})


def test_names_of_others_are_free_here():
    """A program may bind them, and then they mean what it says."""
    for name in hints._MEANT | hints._FUNCTIONS:
        assert is_free(name), name
    check(Source("param q_idx: int\nmask = q - kv < q_idx"), {})
    check(Source("def rope(x) = x + 1\nmask = rope(q) > kv"), {})


def test_hints_of_long_statements_come_quickly():
    start = time.perf_counter()
    for text in (
        "a" * 16_000 + " += = 1",
        "tensor " * 2_000,
        "param a" + "=" * 16_000,
        "tensor a" + "[" * 16_000,
    ):
        with pytest.raises(AttnDSLError):
            check(Source(text), {})
    assert time.perf_counter() - start < 5


def test_calls_of_no_version_get_the_hint_of_today():
    """``softcap(score)`` has forgotten its limit, and ``alibi`` never had arguments."""
    for text, hint in (("softcap(score)", "'softcap(score, 30.0)'"), ("alibi(slopes)", "alibi()")):
        with pytest.raises(AttnDSLError) as caught:
            check(Source(f"score = {text}"), {})
        assert f"write {hint}" in str(caught.value)
        assert "--upgrade" not in str(caught.value)


@pytest.mark.parametrize("name", ["torch.tanh", "math.exp", "np.abs"])
def test_functions_of_modules_are_named(name):
    with pytest.raises(AttnDSLError) as caught:
        check(Source(f"score = {name}(score)"), {})
    assert f"write '{name.partition('.')[2]}(x)', not '{name}(x)'" in str(caught.value)
