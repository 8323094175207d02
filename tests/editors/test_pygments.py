"""Programs as Pygments colours them: in docs, in notebooks, in terminals."""

import subprocess
import sys
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String

from attndsl.editors.pygments_lexer import AttnLexer
from attndsl.frontend.prelude import prelude_names

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted([*ROOT.glob("examples/*.attn"), ROOT / "grammar" / "prelude.attn"])


def test_pygments_finds_it_by_name_and_by_file():
    assert isinstance(get_lexer_by_name("attn"), AttnLexer)
    assert isinstance(get_lexer_for_filename("window.attn"), AttnLexer)


def test_kinds():
    text = 'import "w.attn"\nparam w: int = 4 # hi\nmask = not causal() == (1.5 > tanh(q)) $\n'
    found = [(kind, said) for kind, said in AttnLexer().get_tokens(text) if said.strip()]
    assert found == [
        (Keyword.Declaration, "import"), (String, '"w.attn"'),
        (Keyword.Declaration, "param"), (Name, "w"), (Punctuation, ":"), (Keyword.Type, "int"),
        (Operator, "="), (Number.Integer, "4"), (Comment.Single, "# hi"),
        (Name.Builtin.Pseudo, "mask"), (Operator, "="), (Operator.Word, "not"),
        (Name.Function, "causal"), (Punctuation, "("), (Punctuation, ")"),
        (Operator, "=="), (Punctuation, "("), (Number.Float, "1.5"), (Operator, ">"),
        (Name.Builtin, "tanh"), (Punctuation, "("), (Name.Variable, "q"),
        (Punctuation, ")"), (Punctuation, ")"), (Error, "$"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_of_the_project_have_no_errors_and_lose_nothing(path):
    text = path.read_text("utf-8")
    found = list(AttnLexer(stripnl=False, ensurenl=False).get_tokens(text))
    assert "".join(said for _, said in found) == text
    assert not [said for kind, said in found if kind is Error]


def test_the_prelude_is_known():
    for name in prelude_names():
        (kind, _), *_ = AttnLexer().get_tokens(f"{name}(q)")
        assert kind is Name.Function


def test_torch_is_not_needed():
    code = (
        "from pygments.lexers import get_lexer_by_name; import sys\n"
        "list(get_lexer_by_name('attn').get_tokens('q >= kv'))\n"
        "assert not {'torch', 'lark', 'pygls'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
