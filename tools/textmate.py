"""Write the TextMate grammars of the VS Code extension: `.venv/bin/python tools/textmate.py`.

The words, names, numbers and symbols are those of the language's own tables, so that no one has to
remember to add a function here. A test compares the files with what this script would write.

All patterns match within a line and mean the same to Python and to Oniguruma. Only the grammars
that colour programs within other files have beginnings and ends.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from attndsl.frontend.vocabulary import Kind, declarations, kinds, terminals

FOLDER = Path(__file__).parent / "vscode" / "syntaxes"
SCOPES = {
    Kind.COMMENT: "comment.line.number-sign.attn",
    Kind.FILE: "string.quoted.double.attn",
    Kind.NUMBER: "constant.numeric.attn",
    Kind.DECLARATION: "keyword.declaration.attn",
    Kind.WORD: "keyword.operator.word.attn",
    Kind.TYPE: "storage.type.attn",
    Kind.CONSTANT: "constant.language.attn",
    Kind.VARIABLE: "variable.language.attn",
    Kind.TARGET: "keyword.other.target.attn",
    Kind.FUNCTION: "support.function.builtin.attn",
    Kind.PRELUDE: "support.function.prelude.attn",
    Kind.SYMBOL: "keyword.operator.attn",
}
CALL = "entity.name.function.attn"
OTHER = "variable.other.attn"
PUNCTUATION = "punctuation.separator.attn"
_SCHEMA = "https://raw.githubusercontent.com/martinring/tmlanguage/master/tmlanguage.json"
_KEY = "entity.name.tag.{0}"
_ESCAPE = {
    "name": "constant.character.escape.attn",
    "match": r"\\(?:u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|x[0-9A-Fa-f]{2}|.)",
}
_ATTN = {"include": "source.attn"}


def rules() -> list[dict[str, Any]]:
    """The patterns of programs; of two that match at one place the first counts."""
    found = terminals()
    name = found.patterns["NAME"]
    known = [kind for kind in SCOPES if kind in set(kinds().values())]
    type_names = _words(Kind.TYPE)
    punctuation = [symbol for symbol in (*found.symbols, ";") if symbol in "()[],:;"]
    operators = [symbol for symbol in found.symbols if symbol not in punctuation]
    numbers = found.patterns["NUMBER"].replace("(", "(?:")
    return [
        _rule(Kind.COMMENT, found.patterns["COMMENT"]),
        _rule(Kind.FILE, found.patterns["FILE"]),
        _rule(Kind.NUMBER, numbers),
        # A name has no word before it: whatever matches first takes all of its letters.
        {"name": SCOPES[Kind.FUNCTION], "match": rf"(?:{type_names})(?=\()"},
        *(_rule(kind, rf"(?:{_words(kind)})(?![A-Za-z_0-9])") for kind in known),
        {"name": CALL, "match": rf"{name}(?=\s*\()"},
        {"name": OTHER, "match": name},
        _rule(Kind.SYMBOL, _any(operators)),
        {"name": PUNCTUATION, "match": _any(punctuation)},
        {"name": "invalid.illegal.attn", "match": r"[^ \t\r\n]"},
    ]


def _rule(kind: Kind, match: str) -> dict[str, str]:
    return {"name": SCOPES[kind], "match": match}


def _words(kind: Kind) -> str:
    """The words of a kind as alternatives."""
    return "|".join(sorted(name for name, each in kinds().items() if each is kind))


def _any(symbols: list[str]) -> str:
    return "|".join(re.escape(symbol) for symbol in symbols)


def program_grammar() -> dict[str, Any]:
    """The grammar of program files."""
    assert set(declarations()) <= set(terminals().words)
    return {
        "$schema": _SCHEMA,
        "name": "attndsl",
        "scopeName": "source.attn",
        "fileTypes": ["attn"],
        "patterns": rules(),
    }


def _injection(language: str, selector: str, patterns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "$schema": _SCHEMA,
        "scopeName": f"inline.{language}.attn",
        "injectionSelector": selector,
        "patterns": patterns,
    }


def _captures(*names: str | None) -> dict[str, Any]:
    return {str(n): {"name": name} for n, name in enumerate(names, 1) if name is not None}


def _quoted(language: str, before: str, body: str, quote: str) -> dict[str, Any]:
    """A program in one line between quotes, behind what ``before`` matches in two groups."""
    inner = [_ESCAPE, _ATTN] if quote == '"' else [_ATTN]
    captures = _captures(_KEY.format(language), f"punctuation.separator.{language}")
    captures["3"] = {"name": "meta.embedded.inline.attn", "patterns": inner}
    return {"match": f"{before}{quote}({body}){quote}", "captures": captures}


def yaml_grammar() -> dict[str, Any]:
    """``program:`` in YAML: a block, a text in quotes, or a plain one in the line."""
    key, colon = _KEY.format("yaml"), "punctuation.separator.key-value.mapping.yaml"
    plain = r"(?![\s|>'\"&*!])"
    block = {
        "begin": r"^( *)((?:- +)*)(program)( *:)\s+([|>][-+0-9]*)\s*(#.*)?$",
        "beginCaptures": _captures(
            None, "punctuation.definition.block.sequence.item.yaml", key, colon,
            "keyword.control.flow.block-scalar.yaml", "comment.line.number-sign.yaml",
        ),
        "while": r"^(?:\1 +|\s*$)",
        "contentName": "meta.embedded.block.attn",
        "patterns": [_ATTN],
    }  # fmt: skip
    before = r"(?<![\w.-])(program)( *:)\s+"
    one_line = {
        "match": rf"(?<=^|[ -])(program)( *:) +{plain}([^#\n]*)(?=$|#)",
        "captures": {
            **_captures(key, colon),
            "3": {"name": "meta.embedded.inline.attn", "patterns": [_ATTN]},
        },
    }
    in_flow = {
        "match": rf"(?<=[{{,])(\s*program)( *:) +{plain}([^#,{{}}\n]*)(?=[,}}])",
        "captures": one_line["captures"],
    }
    quoted = [
        _quoted("yaml", before, r"(?:[^\"\\]|\\.)*", '"'),
        _quoted("yaml", before, r"(?:[^']|'')*", "'"),
    ]
    return _injection("yaml", "L:source.yaml -comment", [block, *quoted, in_flow, one_line])


def toml_grammar() -> dict[str, Any]:
    """``program =`` in TOML: a text of several lines, or of one."""
    key = _KEY.format("toml")
    several = [
        {
            "begin": rf"(?<![\w.-])(program)(\s*=\s*)({quotes})",
            "beginCaptures": _captures(key, "punctuation.eq.toml", "punctuation.definition.string"),
            "end": quotes,
            "endCaptures": {"0": {"name": "punctuation.definition.string"}},
            "contentName": "meta.embedded.block.attn",
            "patterns": [_ESCAPE, _ATTN] if quotes[0] == '"' else [_ATTN],
        }
        for quotes in ('"""', "'''")
    ]
    before = r"(?<![\w.-])(program)(\s*=\s*)"
    one = [
        _quoted("toml", before, r"(?:[^\"\\]|\\.)*", '"'),
        _quoted("toml", before, r"[^']*", "'"),
    ]
    return _injection("toml", "L:source.toml -comment -string", [*several, *one])


def json_grammar() -> dict[str, Any]:
    """``"program":`` in JSON."""
    rule = _quoted("json", r'("program")(\s*:\s*)', r"(?:[^\"\\]|\\.)*", '"')
    selector = "L:source.json -comment -string, L:source.json.comments -comment -string"
    # Editors load a grammar that is included in a list of patterns, not one of captures alone.
    loads = {"begin": "(?!)", "end": "(?!)", "patterns": [_ATTN]}
    return _injection("json", selector, [rule, loads])


def markdown_grammar() -> dict[str, Any]:
    """Snippets of Markdown."""
    fence = {
        "begin": r"(^|\G)(\s*)(`{3,}|~{3,})\s*(?i:(attn|attndsl)(\s[^`~]*)?$)",
        "end": r"(^|\G)(\2|\s{0,3})(\3)\s*$",
        "name": "markup.fenced_code.block.markdown",
        "beginCaptures": {
            "3": {"name": "punctuation.definition.markdown"},
            "4": {"name": "fenced_code.block.language.markdown"},
        },
        "endCaptures": {"3": {"name": "punctuation.definition.markdown"}},
        "patterns": [
            {
                "begin": r"(^|\G)(\s*)(.*)",
                "while": r"(^|\G)(?!\s*([`~]{3,})\s*$)",
                "contentName": "meta.embedded.block.attn",
                "patterns": [_ATTN],
            }
        ],
    }
    return _injection("markdown", "L:text.html.markdown", [fence])


def files() -> dict[Path, str]:
    """What each file holds."""
    grammars = {
        "attn.tmLanguage.json": program_grammar(),
        "yaml.injection.json": yaml_grammar(),
        "toml.injection.json": toml_grammar(),
        "json.injection.json": json_grammar(),
        "markdown.injection.json": markdown_grammar(),
    }
    return {
        FOLDER / name: json.dumps(grammar, indent=1, ensure_ascii=False) + "\n"
        for name, grammar in grammars.items()
    }


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, "utf-8")
        print(f"wrote {path.relative_to(FOLDER.parents[2])}")


if __name__ == "__main__":
    main()
