"""The vocabulary that editors show is that of the grammar and of the checker's tables."""

import re
import subprocess
import sys
import time

import pytest

from attndsl import ir
from attndsl.frontend import builtin_functions, program_names, reserved_names, vocabulary
from attndsl.frontend.parse import lexer
from attndsl.frontend.prelude import prelude_comment, prelude_names
from attndsl.frontend.reserved_names import ALWAYS
from attndsl.frontend.vocabulary import Kind, kinds, terminals, tokens
from attndsl.pipeline import lower
from attndsl.source import Source

WORDS = ("import", "param", "tensor", "def", "if", "else", "and", "or", "not", "in", "none")


def test_terminals_are_those_that_the_parser_has():
    found = terminals()
    plain, patterns = set(), {}
    for terminal in lexer().terminals:
        pattern = terminal.pattern
        # lark makes one pattern of several symbols of a terminal.
        several = re.fullmatch(r"\(\?:(.+)\)", pattern.value)
        if terminal.name in found.patterns:
            patterns[terminal.name] = pattern.value
        elif several and type(pattern).__name__ == "PatternRE":
            plain |= {each.replace("\\", "") for each in several[1].split("|")}
        else:
            plain.add(pattern.value)
    assert plain == {*found.words, *found.symbols}
    assert {name: p.replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")
            for name, p in patterns.items()} == found.patterns  # fmt: skip


def test_words_and_names_are_all_there():
    known = kinds()
    assert set(terminals().words) == set(WORDS) == reserved_names.WORDS
    assert vocabulary.declarations() == ("def", "import", "param", "tensor")
    assert {n for n, k in known.items() if k is Kind.PRELUDE} == set(prelude_names())
    assert (
        reserved_names.TARGETS | ALWAYS | builtin_functions.NAMES | {d.value for d in ir.DType}
        <= known.keys()
    )
    # A name is free exactly if it is no part of the vocabulary, but for words that only fail.
    for name in known:
        assert not program_names.is_free(name) or name in ("int", "float", "bool")
    for name in ("window", "doc", "q_idx"):
        assert program_names.is_free(name)
        assert name not in known


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_names_that_always_stand_for_a_value_are_declared(name):
    lower(Source(f"mask = {name} == {name} and q >= kv"), {})


@pytest.mark.parametrize("name", prelude_names())
def test_prelude_functions_have_comments(name):
    assert len(prelude_comment(name)) > 20
    assert "#" not in prelude_comment(name)


def test_tokens_of_a_program():
    text = 'import "w.attn"\nparam w: int = 1_0.5e3 # hi\nmask = causal() and int(q)<=foo;$'
    found = [(t.kind.value, t.text) for t in tokens(text)]
    assert found == [
        ("declaration", "import"), ("file", '"w.attn"'),
        ("declaration", "param"), ("name", "w"), ("symbol", ":"), ("type", "int"),
        ("symbol", "="), ("number", "1_0.5e3"), ("comment", "# hi"),
        ("target", "mask"), ("symbol", "="), ("prelude", "causal"), ("symbol", "("),
        ("symbol", ")"), ("word", "and"), ("function", "int"), ("symbol", "("),
        ("variable", "q"), ("symbol", ")"), ("symbol", "<="), ("name", "foo"), ("symbol", ";"),
        ("other", "$"),
    ]  # fmt: skip
    assert all(text[t.start : t.end] == t.text for t in tokens(text))


def test_tokens_of_any_text_are_found_in_linear_time():
    start = time.perf_counter()
    for text in ('"' * 100_000, "int " * 50_000, "1e" * 50_000, "\x00é🙂" * 30_000, "((" * 50_000):
        found = list(tokens(text))
        assert "".join(t.text for t in found) == re.sub(r"[ \t\r\n]", "", text)
    assert time.perf_counter() - start < 10


def test_torch_is_not_needed():
    code = (
        "import sys, attndsl.frontend.vocabulary as v; list(v.tokens('q >= kv'))\n"
        "assert not {'torch', 'lark', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
