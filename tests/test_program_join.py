"""``attndsl.join``: one program of several, whose names stay apart and whose text says it all."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from fuzz.generate import generate
from fuzz.program import Given
from fuzz.text import text as text_of
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support.graph_errors import shown

import attndsl
from attndsl.errors import (
    ArgumentError,
    AttnDSLError,
    LimitError,
    NameResolutionError,
    TypeMismatchError,
)
from attndsl.frontend.format import format_source
from attndsl.frontend.parse import lexer
from attndsl.frontend.statements import split_statements
from attndsl.source import Source

compiled = attndsl.compile

WRITTEN = {
    "expressions without a name": (
        ["causal()", "score + alibi()", "softcap(score, 3.0)", "q - kv < 8"], {},
        "mask = causal()\nscore = score + alibi()\nscore = softcap(score, 3.0)\nmask = q - kv < 8",
    ),
    "a bare condition after declarations": (
        ["param w: int = 3\nnear = (q\n  - kv) < w; (near\n and causal())", "kv > 0"], {},
        "param w: int = 3\nnear = (q\n - kv) < w; mask = (near\n and causal())\nmask = kv > 0",
    ),
    "comments stay": (
        ["# First.\nmask = causal()  # why", "# Second.\nq - kv < 8  # and why"], {},
        "# First.\nmask = causal()  # why\n\n# Second.\nmask = q - kv < 8  # and why",
    ),
    "locals and functions of one name": (
        ["t0 = q - kv\ndef f(x) = x < 3\nmask = f(t0)",
         "t0 = q + kv\ndef f(x) = x > 3\nmask = f(x=t0)", "t0 = h\nf = b\nmask = t0 > f"], {},
        "t0 = q - kv\ndef f(x) = x < 3\nmask = f(t0)\nt0_2 = q + kv\ndef f_2(x) = x > 3\n"
        "mask = f_2(x=t0_2)\nt0_3 = h\nf_3 = b\nmask = t0_3 > f_3",
    ),
    "new names are free ones": (
        ["t0 = q; t0_2 = kv; mask = t0 > t0_2", "t0 = q; t0_3 = h; mask = t0 < t0_3"], {},
        "t0 = q; t0_2 = kv; mask = t0 > t0_2\nt0_4 = q; t0_3 = h; mask = t0_4 < t0_3",
    ),
    "captures go before locals": (
        ["w = 3\nmask = q < w", "param w: int\nmask = q < w"], {},
        "w_2 = 3\nmask = q < w_2\nparam w: int\nmask = q < w",
    ),
    "a function replaces none of another program": (
        ["def causal() = q > kv\nmask = causal()", "mask = causal()"], {},
        "def causal_2() = q > kv\nmask = causal_2()\nmask = causal()",
    ),
    "nor one that the prelude calls for it": (
        ["def in_window(x) = x > 3\nmask = in_window(q)", "natten2d(4, 4, 3, 3)"], {},
        "def in_window_2(x) = x > 3\nmask = in_window_2(q)\nmask = natten2d(4, 4, 3, 3)",
    ),
    "nor one of the language": (
        ["def tanh(x) = x\nscore = tanh(score)", "score = tanh(score)"], {},
        "def tanh_2(x) = x\nscore = tanh_2(score)\nscore = tanh(score)",
    ),
    "dropout and softmax of weights stand for themselves": (
        ["def softmax(s) = 2 * s\ndef dropout(s) = s\nscore = softmax(dropout(score))\n"
         "weights = dropout(softmax(score), 0.1)", "def dropout(x) = x > 2\nmask = dropout(q)"], {},
        "def softmax(s) = 2 * s\ndef dropout(s) = s\nscore = softmax(dropout(score))\n"
        "weights = dropout(softmax(score), 0.1)\ndef dropout_2(x) = x > 2\nmask = dropout_2(q)",
    ),
    "dims that tensors introduce": (
        ["tensor t[n, 2 * n]: int\nmask = t[q % n, 0] > n",
         "tensor u[n]: int\nmask = u[q % n] > n"], {},
        "tensor t[n, 2 * n]: int\nmask = t[q % n, 0] > n\n"
        "tensor u[n_2]: int\nmask = u[q % n_2] > n_2",
    ),
    "prefixes": (
        ["tensor doc[batch, kv_len]: int\nparam w: int = 3\nmask = same(doc, q, kv) or q < w",
         "param w: int\ntensor doc[n, w]: int\nlow = doc[q, kv]\nmask = low > n + w"],
        {"prefixes": ("", "m_")},
        "tensor doc[batch, kv_len]: int\nparam w: int = 3\nmask = same(doc, q, kv) or q < w\n"
        "param m_w: int\ntensor m_doc[m_n, m_w]: int\nlow = m_doc[q, kv]\nmask = low > m_n + m_w",
    ),
    "a prefix hides nothing of functions": (
        ["param w: int\ndef f(m_w, x) = m_w < w + x\nmask = f(q, x=3) and f(m_w=kv, x=2)", "q > 1"],
        {"prefixes": ("m_", "")},
        "param m_w: int\ndef f(m_w_2, x) = m_w_2 < m_w + x\n"
        "mask = f(q, x=3) and f(m_w_2=kv, x=2)\nmask = q > 1",
    ),
    "parameters of functions are no names of the program": (
        ["def f(w, t) = t[w]\ntensor t[8]: int\nw = q\nmask = f(w=w, t=t) > 1",
         "param w: int\nmask = q < w"], {},
        "def f(w, t) = t[w]\ntensor t[8]: int\nw_2 = q\nmask = f(w=w_2, t=t) > 1\n"
        "param w: int\nmask = q < w",
    ),
    "shared captures": (
        ["tensor doc[batch, n]: int\nparam w: int = 3\nmask = doc[b, q % n] == w",
         "tensor u[n]: int; tensor doc[ batch,n ]: int  # again\n"
         "param w: int=3\nmask = doc[b, kv % n] == w + u[n - 1]"],
        {"share": ("doc", "w"), "prefixes": ("a_", "c_")},
        "tensor doc[batch, n]: int\nparam w: int = 3\nmask = doc[b, q % n] == w\n"
        "tensor c_u[n]: int;mask = doc[b, kv % n] == w + c_u[n - 1]",
    ),
}  # fmt: skip


def squeezed(text: str) -> str:
    """``text`` in its layout, without blank lines."""
    return "\n".join(filter(None, format_source(text).split("\n")))


@pytest.mark.parametrize("name", WRITTEN)
def test_the_text_is_what_one_would_have_written(name):
    programs, options, wanted = WRITTEN[name]
    joined = attndsl.join(*programs, **options)
    assert squeezed(joined.text) == squeezed(wanted)
    assert format_source(joined.text) == joined.text
    assert joined == compiled(joined.text)
    assert joined.lowered.digest == compiled(wanted).lowered.digest


def test_values_and_declarations_of_python_are_in_the_text():
    window = compiled("param w: int = 9  # keys\n# Near.\nmask = abs(q - kv) < w ** 2", w=-3)
    capped = compiled(
        "param c: float\nscore = c * tanh(score / c) * gain[h] + off - 2 * low",
        c=30, gain=attndsl.tensor("heads"), off=torch.tensor(1.0), low=-1.5,
    )  # fmt: skip
    sized = compiled("mask = t[q % n, m - 1] and flag == (m > big)", n=4, big=float("inf"),
                     flag=True, t=attndsl.tensor("n", "m", dtype="bool"))  # fmt: skip
    joined = attndsl.join(window, capped, sized)
    assert joined.text == (
        "# Near.\nmask = abs(q - kv) < (-3) ** 2\n\n"
        "tensor gain[heads]: float\nparam off: float\n"
        "score = 30.0 * tanh(score / 30.0) * gain[h] + off - 2 * (-1.5)\n\n"
        "tensor t[4, m]: bool\nmask = t[q % 4, m - 1] and true == (m > inf)\n"
    )
    alone = compiled(
        "tensor gain[heads]: float\nparam off: float\ntensor t[4, m]: bool\n"
        "mask = abs(q - kv) < 9 and t[q % 4, m - 1] and m > inf\n"
        "score = 30.0 * tanh(score / 30.0) * gain[h] + off + 3.0"
    )
    lowest = compiled("mask = q > n", n=-(1 << 63))
    assert attndsl.join(lowest).lowered.digest == lowest.lowered.digest
    # The order of captures and of sums is that of the programs.
    assert {p.name for p in joined.lowered.program.params} == {"off"}
    assert joined.lowered.program.tensors == alone.lowered.program.tensors
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    t = torch.rand(4, 3) < 0.9
    given = {"gain": torch.rand(2, dtype=torch.float64), "t": t}
    torch.testing.assert_close(joined(q, k, v, **given), alone(q, k, v, off=1.0, **given))


@pytest.mark.parametrize("name", ["inf", "true"])
def test_a_value_means_itself_in_functions_that_call_a_parameter_so(name):
    value = {"inf": float("inf"), "true": True}[name]
    program = compiled(
        f"def f({name}, x) = {name} if n == n else x\nscore = f(score, x=0.0)", n=value
    )
    assert attndsl.join(program).lowered.digest == program.lowered.digest


def test_captured_tensors_stay_values_of_captures():
    doc = torch.arange(8)[None] // 3
    other = torch.arange(8)[None] // 5
    first, second = (compiled("doc[b, q] == doc[b, kv]", doc=x) for x in (doc, other))
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    joined = attndsl.join(first, second, prefixes=("", "own_"))
    live = (doc[0, :, None] == doc[0]) & (other[0, :, None] == other[0])
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live)
    torch.testing.assert_close(joined(q, k, v), wanted)
    torch.testing.assert_close(joined(q, k, v, own_doc=doc), first(q, k, v))
    again = pickle.loads(pickle.dumps(joined))
    torch.testing.assert_close(again(q, k, v), wanted)
    with pytest.raises(ArgumentError, match="two programs were compiled with a tensor each"):
        attndsl.join(first, second, share=("doc",))
    late = compiled(
        "doc[b, q] == doc[b, kv]", doc=attndsl.tensor("doc_dim0", "doc_dim1", dtype="int")
    )
    shared = attndsl.join(first, late, "causal()", share=["doc"])
    assert shared.text.count("tensor doc") == 1
    torch.testing.assert_close(shared(q, k, v), attndsl.join(first, "causal()")(q, k, v))


def test_a_joined_program_is_trained_as_the_written_one():
    slopes = compiled("tensor slope[heads]: float\nscore = score - slope[h] * (q - kv)")
    capped = compiled(
        "param cap: float\nd = q - kv\nmask = d >= 0\nscore = cap * tanh(score / cap)"
    )
    sunk = compiled("tensor logit[heads]: float\nd = logit[h]\nsink = d")
    joined = attndsl.join(slopes, capped, sunk)
    written = compiled(
        "tensor slope[heads]: float; param cap: float; tensor logit[heads]: float\n"
        "score = score - slope[h] * (q - kv)\nmask = q - kv >= 0\n"
        "score = cap * tanh(score / cap)\nsink = logit[h]"
    )
    assert joined.lowered.digest == written.lowered.digest
    q, k, v = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64)
    leaves = {"slope": torch.rand(2), "logit": torch.rand(2), "cap": torch.tensor(2.0)}
    leaves = {name: x.double().requires_grad_() for name, x in leaves.items()}
    out = joined(q, k, v, **leaves)
    raw = (q @ k.mT) / 2
    away = torch.arange(7)[:, None] - torch.arange(7)
    score = leaves["cap"] * torch.tanh(
        (raw - leaves["slope"][:, None, None] * away) / leaves["cap"]
    )
    score = score.masked_fill(away < 0, -torch.inf)
    sink = leaves["logit"][None, :, None, None].expand(2, 2, 7, 1)
    wanted = torch.cat([score, sink], -1).softmax(-1)[..., :-1] @ v
    torch.testing.assert_close(out, wanted)
    grads = [torch.autograd.grad(x.square().sum(), [*leaves.values()]) for x in (out, wanted)]
    torch.testing.assert_close(*grads)


def test_without_sink_stays_without_sink():
    text = "tensor s[heads]: float\nmask = causal(); sink = s[h]; score = softcap(score, 2.0)"
    sunk = compiled(text)
    joined = attndsl.join(sunk.without_sink(), "sink = 1.5")
    assert joined.text == (
        "tensor s[heads]: float\nmask = causal(); score = softcap(score, 2.0)\n\nsink = 1.5\n"
    )
    assert joined.lowered.program.sink.value == 1.5


CLASH = ["tensor doc[n]: int\nmask = doc[q] > 0", "param doc: int\nmask = q > doc", "causal()"]


@pytest.mark.parametrize(
    ("programs", "options", "message", "hint"),
    [
        ([], {}, "there is no program to join", "pass compiled programs"),
        (["causal()", 3], {}, "program 2 is a int", "pass a compiled program or a text"),
        (CLASH, {}, "of one name: 'doc' (programs 1 and 2)", "prefixes=('', 'p2_', 'p3_')"),
        (CLASH[:1] * 3, {}, "of one name: 'doc' (programs 1, 2 and 3)", "share=('doc',)"),
        (CLASH, {"share": ["doc"]},
         "is 'tensor doc[n]: int' in program 1 and 'param doc: int' in program 2", "same words"),
        (["param w: int = 3\nq < w", "param w: int = 4\nq < w"], {"share": ["w"]},
         "it is 'param w: int = 3' in program 1 and 'param w: int = 4' in program 2", "same words"),
        (["param n: int\ntensor t[n]: int\nq < t[n - 1]", "tensor t[n]: int\nq < t[n - 1]"],
         {"share": ["t"]},
         "'tensor t[n]: int' in program 1 and 'tensor t[n_2]: int' in program 2", "same words"),
        (CLASH, {"share": ["dok"]}, "share names 'dok', which no program has", "mean 'doc'?"),
        (CLASH[1:], {"share": ["doc"]}, "'doc', which only program 1 has", "at least two"),
        (CLASH, {"share": "doc"}, "share is no list", 'share=("doc",)'),
        (CLASH, {"share": (1,)}, "share is no list", 'share=("doc",)'),
        (["param a_w: int\nq < a_w", "param w: int\nq < w"], {"prefixes": ("", "a_")},
         "of one name: 'a_w' (programs 1 and 2)", "choose prefixes"),
        (CLASH, {"prefixes": "abc"}, "prefixes is no list of 3", "('', 'p2_', 'p3_')"),
        (CLASH, {"prefixes": ("", "b_")}, "prefixes is no list of 3", "('', 'p2_', 'p3_')"),
        (CLASH, {"prefixes": ("", "1", "")}, "the prefix '1' begins no name", "letters"),
        (CLASH, {"prefixes": ("", "a.", "")}, "the prefix 'a.' begins no name", "letters"),
        (CLASH, {"prefixes": ("", "\N{CYRILLIC SMALL LETTER A}", "")}, "begins no name", ""),
        (["param v: int\nq < v", "q > 1"], {"prefixes": ("k", "")},
         "the prefix 'k' makes 'kv' of 'v'", "another prefix"),
        (["param f: int\nq < f", "q > 1"], {"prefixes": ("i", "")}, "makes 'if' of 'f'", "another"),
        (["sink = 1", "causal()", "sink = 2"], {}, "programs 1 and 3 each have 'sink'",
         "without_sink()"),
        (["weights = score", "weights = softmax(score)"], {},
         "programs 1 and 2 each have 'weights'", "one 'weights' line"),
        (["def in_window(x, y, n, k) = x > y\nnatten2d(4, 4, 3, 3)", "natten2d(4, 4, 3, 3)"], {},
         "the function 'in_window' of program 1 works within the prelude's", "another name"),
        (["causal()"], {"backend": 3}, "backend is a int", "backend='auto'"),
        (["causal()"], {"exact": 1}, "exact is a int", "exact=False"),
        (["causal()"], {"checked": "yes"}, "checked is a str", "checked=False"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(programs, options, message, hint):
    with pytest.raises(ArgumentError) as caught:
        attndsl.join(*programs, **options)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_options_agree_or_are_given():
    first = compiled("causal()", backend="cpu", exact=True)
    second = compiled("q - kv < 8", backend="reference", checked=True)
    for option in ("backend", "exact", "checked"):
        rest = {"backend": "cpu", "exact": False, "checked": False}
        rest.pop(option)
        with pytest.raises(ArgumentError, match=f"the programs were compiled with {option}="):
            attndsl.join(first, second, **rest)
    joined = attndsl.join(first, second, "kv > 0", backend="reference", exact=True, checked=True)
    assert joined == compiled(joined.text, backend="reference", exact=True, checked=True)
    # Texts have no options of their own.
    assert attndsl.join(first, "kv > 0") == compiled(
        "mask = causal()\n\nmask = kv > 0\n", backend="cpu", exact=True
    )
    with pytest.raises(AttnDSLError, match="cdp"):
        attndsl.join("causal()", backend="cdp")


def test_errors_of_texts_and_of_the_whole_say_where():
    with pytest.raises(NameResolutionError) as caught:
        attndsl.join("causal()", "q < 3 and causl()")
    assert str(caught.value).startswith("<program 2>:1:11: there is no function 'causl'")
    masked = compiled("score = where(causal(), score, -inf)")
    with pytest.raises(TypeMismatchError, match="this line leaves out the score") as caught:
        attndsl.join(masked, "score = 0.5 * (q - kv)")
    assert caught.value.span.source.name == "<joined>"
    assert caught.value.span.text == "score = 0.5 * (q - kv)"
    with pytest.raises(TypeMismatchError, match="in 'weights' the score is the final one"):
        attndsl.join("w = sigmoid(score)\nweights = w", "score = softcap(score, 3.0)")
    large = "\n".join(f"a{n} = {'9' * 18}" for n in range(450))
    with pytest.raises(LimitError):
        attndsl.join(large, large)


ROWS, KEYS = torch.arange(6)[:, None], torch.arange(6)
DOC = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
GAIN = torch.tensor([0.5, -2.0], dtype=torch.float64)
SAMPLES = [
    ("causal()", {}, lambda s: (s, ROWS >= KEYS)),
    ("w = 3; abs(q - kv) < w", {}, lambda s: (s, (ROWS - KEYS).abs() < 3)),
    ("param w: int\nt0 = q - kv\nmask = t0 < w", {"w": 4}, lambda s: (s, ROWS - KEYS < 4)),
    (
        "tensor doc[batch, n]: int\nt0 = doc[b, q]\nt0 == doc[b, kv] or n < 3",
        {"doc": DOC},
        lambda s: (s, (DOC[:, :, None] == DOC[:, None])[:, None]),
    ),
    (
        "tensor doc[n]: float\nscore = score * doc[h % n]",
        {"doc": GAIN},
        lambda s: (s * GAIN[:, None, None], True),
    ),
    (
        "def w(x) = 0.1 * x\nscore = score - w(q - kv)",
        {},
        lambda s: (s - 0.1 * (ROWS - KEYS), True),
    ),
    ("param c: float = 2; t = score / c; c * tanh(t)", {}, lambda s: (2 * (s / 2).tanh(), True)),
    ("score = where(kv != 2, score, -inf)", {}, lambda s: (s, KEYS != 2)),
    ("def causal() = score > -0.7\ncausal()", {}, lambda s: (s, s > -0.7)),
]
"""Programs, what their calls give, and what they do to scores: the new ones, and which are live."""


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=4))
def test_the_reference_does_what_all_programs_say_in_their_order(chosen):
    prefixes = [f"{letter}_" for letter in "wxyz"[: len(chosen)]]
    joined = attndsl.join(*(x[0] for x in chosen), prefixes=prefixes, backend="reference")
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64, generator=torch.Generator())
    score, live, captures = (q @ k.mT) / 2, torch.tensor(True), {}
    for prefix, (_, given_to_it, does) in zip(prefixes, chosen, strict=True):
        score, some = does(score)
        live = live & some
        captures |= {prefix + name: value for name, value in given_to_it.items()}
    weights = score.masked_fill(~live, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(joined(q, k, v, **captures), weights @ v)


def test_a_traced_mask_joins_a_window():
    offset = torch.tensor([2, 0])

    def padded(b, h, q_idx, kv_idx):
        return (kv_idx >= offset[b]) & (q_idx >= kv_idx)

    found = attndsl.trace(padded)
    mask = compiled(found.text, **found.captures)
    window = "t0 = q - kv\nmask = t0 < 4 or t0 > 100"
    stricter = found.text.replace("<=", "<")
    joined = attndsl.join(mask, window, stricter, prefixes=("", "", "other_"))
    q, k, v = torch.randn(3, 2, 1, 9, 4)
    at = torch.arange(9)
    live = (at >= offset[:, None])[:, None, None] & (at[:, None] - at < 4) & (at[:, None] > at)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live)
    out = joined(q, k, v, other_offset=offset - 1)
    some = live.any(-1, keepdim=True)
    torch.testing.assert_close(out, torch.where(some, wanted, 0.0))


def test_graphs_join_nothing():
    def joined(q):
        return attndsl.join("causal()", "q > 1")(q, q, q)

    with pytest.raises(Exception, match=shown("graphs of torch", "UnsupportedError")):
        torch.compile(joined, fullgraph=True, backend="eager")(torch.randn(1, 1, 4, 4))


def _renamed(text: str, names: dict[str, str]) -> str:
    """``text`` with other names, token by token: no function of random programs hides one."""
    spans, _ = split_statements(Source(text))
    lines = [[names.get(t, t) for t in map(str, lexer().lex(span.text))] for span in spans]
    return "\n".join(map(" ".join, lines))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 30), st.booleans())
def test_random_programs_join_to_what_one_would_write(seed, prefixed):
    rng = random.Random(seed)
    texts, bound, own = [], [], []
    for _ in range(2):
        case = generate(rng)
        texts.append(text_of(case))
        bound.append({p.name: p.value for p in case.params if p.given is Given.BOUND})
        outer = {x.name for x in (*case.params, *case.tensors)}
        inner = {line.name for line in case.lines if line.name} | {name for name, _ in case.dims}
        own.append((outer, inner | {f.name for f in case.functions if not f.prelude}))
    (outer, inner), (outer2, inner2) = own
    apart = {name: f"z_{name}" for name in outer2}
    second, prefixes = texts[1], ("", "z_")
    if not prefixed:  # The others clash all the more.
        second, prefixes = _renamed(second, apart), None
        bound[1] = {apart[name]: value for name, value in bound[1].items()}
    try:
        both = zip((texts[0], second), bound, strict=True)
        programs = [compiled(text, **values) for text, values in both]
    except AttnDSLError:
        reject()  # A score line that replaces what one before has masked.
    # Dims are part of a program's meaning, so they are called here as there.
    dims = {str(x) for x in programs[1].lowered.program.dim_names()} & inner2
    for name in inner2:
        clash = f"{name}_2" if name in inner | outer else name
        apart[name] = f"z_{name}" if prefixed and name in dims else clash
    written = f"{texts[0]}\n{_renamed(texts[1], apart)}"
    values = {**bound[0], **{f"z_{n.removeprefix('z_')}": x for n, x in bound[1].items()}}
    if any(all(f"\n{target} = " in f"\n{x}" for x in texts) for target in ("sink", "weights")):
        with pytest.raises(ArgumentError, match="each have"):
            attndsl.join(*programs, prefixes=prefixes)
        return
    try:
        wanted = compiled(written, **values)
    except AttnDSLError as error:
        with pytest.raises(type(error)):
            attndsl.join(*programs, prefixes=prefixes)
        return
    for program in programs:
        assert attndsl.join(program).lowered.digest == program.lowered.digest
    joined = attndsl.join(*programs, prefixes=prefixes)
    assert joined.lowered.digest == wanted.lowered.digest, joined.text
    assert joined == compiled(joined.text)
