"""``attndsl lsp`` as an editor meets it: over standard input and output.

Programs are hostile here too: the server answers whatever it is sent, runs none of it, and ends.
"""

import json
import statistics
import subprocess
import sys
import time

import pytest

pytest.importorskip("pygls")

import latency
from support.editor import Editor, covered, uri_of

PROGRAM = """\
# How far keys may be.
param window: int = 4
tensor doc[batch, kv_len]: int
def near(x, y) = abs(x - y) < window
mask = causal() and near(q, kv) and doc[b, q] == doc[b, kv]
score = softcap(score, 50.0)
"""
CONFIG = """\
seed: 3
model:
  attention:
    local:
      program: |
        mask = causal()
        score = softcapp(50.0)
      params: {window: 3}
    global: causa()
"""
WITHOUT_TORCH = """
import sys
from attndsl.cli import main
try:
    main()
finally:
    print(sorted({'torch', 'triton', 'islpy'} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def editor():
    snippets = {"completion": {"completionItem": {"snippetSupport": True}}}
    with Editor({"textDocument": snippets}) as found:
        yield found


@pytest.fixture
def uri(tmp_path):
    return uri_of(tmp_path / "a.attn")


def test_an_editor_is_served(tmp_path):
    """A smoke test of all there is; the slow ones look closer."""
    uri = uri_of(tmp_path / "a.attn")
    with Editor(code=f"import sys; sys.argv = ['attndsl', 'lsp']\n{WITHOUT_TORCH}") as editor:
        assert editor.abilities["textDocumentSync"]["change"] == 1
        wrong = PROGRAM.replace("causal", "cauzal")
        (found,) = editor.open(uri, wrong)
        assert covered(wrong, found["range"]) == "cauzal()"
        assert found["message"] == ("there is no function 'cauzal'\nhint: did you mean 'causal'?")
        assert (found["severity"], found["code"]) == (1, "NameResolutionError")
        assert editor.change(uri, PROGRAM) == []
        said = editor.at("hover", uri, 5, 1)["contents"]["value"]
        assert "Its derivative by the raw score: `50.0 * (1.0 - tanh(" in said
        labels = {each["label"] for each in editor.at("completion", uri, 5, 8)}
        assert {"window", "doc", "near", "causal", "tanh", "kv_len", "and"} <= labels
        place = editor.at("definition", uri, 4, 21)
        assert (place["uri"], covered(PROGRAM, place["range"])) == (uri, "near")
        place = editor.at("definition", uri, 4, 8)
        assert place["uri"].endswith("/grammar/prelude.attn")
        names = [each["name"] for each in editor.at("documentSymbol", uri, 0, 0)]
        assert names == ["window", "doc", "near", "mask", "score"]
        code, said = editor.end()
    assert code == 0
    assert said == "[]\n"
    assert list(tmp_path.iterdir()) == []


def test_without_pygls_it_says_what_to_install(monkeypatch, capsys):
    from attndsl import cli

    monkeypatch.setitem(sys.modules, "attndsl.editors.language_server", None)
    monkeypatch.delitem(sys.modules, "pygls", raising=False)
    code = (
        "import sys; sys.modules['pygls'] = None; sys.argv = ['attndsl', 'lsp']\n"
        "from attndsl.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pygls" in done.stderr
    assert "pip install 'attndsl[lsp]'" in done.stderr
    assert cli.lsp.__doc__


@pytest.mark.slow
def test_programs_in_a_configuration(editor, tmp_path):
    uri = uri_of(tmp_path / "train.yaml")
    found = editor.open(uri, CONFIG, "yaml")
    said = [(covered(CONFIG, each["range"]), each["message"]) for each in found]
    assert said == [
        ("softcapp(50.0)", "there is no function 'softcapp'\nhint: did you mean 'softcap'?"),
        ("window", "'window' is bound in the params of 'local', but the program never uses it\n"
         "hint: remove it, or use it"),
        ("causa()", "there is no function 'causa'\nhint: did you mean 'causal'?"),
    ]  # fmt: skip
    right = CONFIG.replace("softcapp", "softcap").replace("causa()", "causal()")
    assert len(editor.change(uri, right.replace("  params: {window: 3}\n", "\n"))) == 0
    hover = editor.at("hover", uri, 5, 17)
    assert "q >= kv" in hover["contents"]["value"]
    assert editor.at("hover", uri, 0, 1) is None
    assert editor.at("completion", uri, 0, 3) == []
    symbols = editor.at("documentSymbol", uri, 0, 0)
    assert [each["name"] for each in symbols] == ["local", "global"]
    assert [each["name"] for each in symbols[0]["children"]] == ["mask", "score"]


@pytest.mark.slow
def test_configurations_of_other_software_are_left_alone(editor, tmp_path):
    for name, text, language in [
        ("compose.yaml", "services:\n  web:\n    image: nginx\n    command: run q >= 3\n", "yaml"),
        ("broken.yaml", "a: [\nb: }", "yaml"),
        ("pyproject.toml", "[project]\nname = 'x'\n", "toml"),
        ("package.json", '{"name": "x", "scripts": {"test": "jest"}}', "json"),
        ("a.py", "q >= kv", "python"),
    ]:
        uri = uri_of(tmp_path / name)
        if language == "python":
            editor.versions[uri] = 1
            document = {"uri": uri, "languageId": language, "version": 1, "text": text}
            editor.tell("textDocument/didOpen", {"textDocument": document})
            assert editor.at("hover", uri, 0, 1) is None
        else:
            assert editor.open(uri, text, language) == [], name


@pytest.mark.slow
def test_errors_of_imported_files_stand_at_the_import(editor, tmp_path):
    part = tmp_path / "part.attn"
    part.write_text("def near(x) = x < 3\nmask = nonsense\n")
    uri = uri_of(tmp_path / "a.attn")
    text = 'mask = near(q)\nimport "part.attn"\n'
    (found,) = editor.open(uri, text)
    assert covered(text, found["range"]) == 'import "part.attn"'
    assert found["message"].startswith("part.attn:2:8: 'nonsense' is not declared")
    (related,) = found["relatedInformation"]
    assert related["location"]["uri"] == uri_of(part)
    assert related["location"]["range"]["start"] == {"line": 1, "character": 7}
    place = editor.at("definition", uri, 0, 8)
    assert place["uri"] == uri_of(part)
    assert place["range"]["start"] == {"line": 0, "character": 4}
    assert editor.at("definition", uri, 1, 12)["uri"] == uri_of(part)
    part.write_text("def near(x) = x < 3\n")
    editor.tell("textDocument/didSave", {"textDocument": {"uri": uri}})
    assert editor.diagnostics(uri) == []


@pytest.mark.slow
def test_layout(editor, tmp_path):
    def laid(name, text, language):
        uri = uri_of(tmp_path / name)
        editor.open(uri, text, language)
        edits = editor.ask(
            "textDocument/formatting",
            {"textDocument": {"uri": uri}, "options": {"tabSize": 4, "insertSpaces": True}},
        )
        lines = text.split("\n")
        for edit in sorted(edits, key=lambda e: -e["range"]["start"]["line"]):
            start, end = edit["range"]["start"], edit["range"]["end"]
            before = "\n".join(
                [*lines[: start["line"]], lines[start["line"]][: start["character"]]]
            )
            after = "\n".join([lines[end["line"]][end["character"] :], *lines[end["line"] + 1 :]])
            lines = (before + edit["newText"] + after).split("\n")
        return "\n".join(lines)

    assert laid("b.attn", "mask=q>=kv", "attn") == "mask = q >= kv\n"
    assert laid("c.attn", "mask = = q", "attn") == "mask = = q"
    text = "a:\n  program: |\n    mask={}  # é🙂\n    score={}\n  params: {{}}\nb:  q>=kv\n"
    written = text.format("q>=kv", "tanh( score )")
    wanted = text.replace("=", " = ").replace("> = kv", ">=kv").format("q >= kv", "tanh(score)")
    assert laid("d.yaml", written, "yaml") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_places_in_the_encoding_that_the_editor_speaks(encoding, uri):
    text = "# é🙂\nmask = q >= kv  # é🙂\nscore = scor  # 🙂\n"
    broken = "mask = (q >= kv); # 🙂🙂\nx = 3; score = x * 2; # é"
    with Editor({"general": {"positionEncodings": [encoding]}}) as editor:
        assert editor.abilities["positionEncoding"] == encoding
        (found,) = editor.open(uri, text)
        assert covered(text, found["range"]) == "scor"
        assert editor.change(uri, broken) == []
        # The letter before is 1, 2 or 4 units wide.
        text = "a = q;# 🙂\nmask = a >= kv"
        assert editor.change(uri, text) == []
        data = editor.ask("textDocument/semanticTokens/full", {"textDocument": {"uri": uri}})
        lengths = data["data"][2::5]
        width = {"utf-8": 4, "utf-16": 2, "utf-32": 1}[encoding]
        assert lengths[3] == 2 + width  # The comment.
        editor.end()


@pytest.mark.slow
def test_colours_are_those_of_programs_wherever_they_stand(editor, tmp_path):
    uri = uri_of(tmp_path / "e.yaml")
    text = 'seed: 3\nmodel:\n  a: causal() and q < 3\n  b: "causal()"\n'
    editor.open(uri, text, "yaml")
    legend = editor.abilities["semanticTokensProvider"]["legend"]["tokenTypes"]
    data = editor.ask("textDocument/semanticTokens/full", {"textDocument": {"uri": uri}})["data"]
    line = character = 0
    found = []
    for shift, by, length, kind, _ in zip(*[iter(data)] * 5, strict=True):
        line, character = line + shift, by if shift else character + by
        found.append((text.split("\n")[line][character : character + length], legend[kind]))
    assert found == [
        ("causal", "function"), ("and", "keyword"), ("q", "parameter"), ("<", "operator"),
        ("3", "number"), ("causal", "function"),
    ]  # fmt: skip


HOSTILE = {
    "empty": "",
    "blank": "\n" * 1000,
    "separators": "\u2028\x85\x0b\x0c\x1c mask = q\u2028 >= kv\r\r\n\x00",
    "brackets": "(" * 100_000,
    "quotes": '"' * 100_000,
    "a megabyte": "x = q\n" * 170_000,
    "one line": "q + " * 50_000,
    "optional": "".join(f"param p{i}: float = none\n" for i in range(16))
    + "score = score"
    + "".join(f" + p{i % 16} * q" for i in range(1500)),
    "growth": "def f(x) = x * x\n" + "score = f(score)\n" * 900,
    "halves": "# \ud83d\n",
    "imports": 'import "../../etc/passwd"\nimport "/dev/zero"\nimport "a.attn"\n',
}
HOSTILE_YAML = {
    "bombs": "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(5000)),
    "aliases": "a: &a\n  program: &p q >= kv\n" + "".join(f"b{i}: *a\n" for i in range(3000)),
    "deep": "[" * 10_000,
    "large": "program: q >= kv\n" + "# x\n" * 200_000,
    "many": "".join(f"a{i}: q - kv < {i} and kv % {i} == 0\n" for i in range(900)),
    "python": "a: !!python/object/apply:os.system ['touch {}']\nb: q >= kv\n",
    "one line of programs": "{"
    + ", ".join(f'a{n}: "q + 🙂; q + é; x = y z; q + é; é + é; q + kvv"' for n in range(900))
    + "}",
    "slow": "".join(
        f"s{i}:\n  program: |\n    " + f"score = softcap(score, {i}.5) + alibi()\n    " * 400 + "\n"
        for i in range(15)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*HOSTILE, *HOSTILE_YAML])
def test_hostile_files_harm_nothing(editor, tmp_path, case):
    is_yaml = case in HOSTILE_YAML
    mark = tmp_path / "was-here"
    text = HOSTILE_YAML[case] if is_yaml else HOSTILE[case]
    if case == "python":
        text = text.format(mark)
    folder = tmp_path / "home"
    folder.mkdir()
    uri = uri_of(folder / ("a.yaml" if is_yaml else "a.attn"))
    start = time.perf_counter()
    editor.open(uri, text, "yaml" if is_yaml else "attn")
    for method in ("hover", "definition", "completion", "documentSymbol"):
        editor.at(method, uri, 1, 8)
    where = {"textDocument": {"uri": uri}}
    options = {"options": {"tabSize": 2, "insertSpaces": True}}
    editor.ask("textDocument/formatting", {**where, **options})
    editor.ask("textDocument/semanticTokens/full", where)
    assert time.perf_counter() - start < 60
    assert list(folder.iterdir()) == []
    assert not mark.exists()
    other = uri_of(folder / "b.attn")
    assert len(editor.open(other, "mask = q >= kvv")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [{"line": -1, "character": 0}, {"line": 0, "character": 1 << 70}, {"line": "a"}, {}, None],
    ids=str,
)
def test_places_that_are_none_are_answered(editor, uri, place):
    editor.open(uri, "mask = q >= kv\n")
    asked = {"textDocument": {"uri": uri}, "position": place}
    editor.number += 1
    editor.tell("textDocument/hover", asked, editor.number)
    while (message := editor.messages.get(timeout=60)).get("id") != editor.number:
        editor.seen.append(message)
    assert message["error"]["code"] == -32602
    assert editor.at("hover", uri, 0, 8)


def test_the_server_listens_while_it_checks(editor, tmp_path):
    slow, quick = uri_of(tmp_path / "slow.yaml"), uri_of(tmp_path / "quick.attn")
    editor.open(quick, PROGRAM)
    document = {"uri": slow, "languageId": "yaml", "version": 1, "text": HOSTILE_YAML["slow"]}
    editor.tell("textDocument/didOpen", {"textDocument": document})
    start = time.perf_counter()
    assert editor.at("hover", quick, 5, 10) is not None
    assert time.perf_counter() - start < 2
    editor.versions[slow] = 1
    # Not all of its programs are checked where that takes too long, which depends on the machine.
    found = editor.diagnostics(slow)
    assert all("run attndsl check slow.yaml" in each["message"] for each in found)
    assert {each["severity"] for each in found} <= {3}


@pytest.mark.slow
def test_only_the_newest_text_counts(editor, uri):
    editor.open(uri, "mask = q >= kv")
    for number in range(50):
        editor.versions[uri] += 1
        place = {"uri": uri, "version": editor.versions[uri]}
        change = {"textDocument": place, "contentChanges": [{"text": f"mask = q >= kvv{number}"}]}
        editor.tell("textDocument/didChange", change)
    (found,) = editor.diagnostics(uri)
    assert "'kvv49'" in found["message"]
    editor.tell("textDocument/didClose", {"textDocument": {"uri": uri}})
    assert editor.at("hover", uri, 0, 8) is None


@pytest.mark.slow
def test_diagnostics_come_within_100_ms(tmp_path):
    times = latency.measure(tmp_path)
    for case in ("a program", "50 programs in YAML"):
        assert len(times[case]) == 20
        assert statistics.median(times[case]) < 100, (case, times[case])
    # 40 and 80 ms where nothing else runs.
    for case in ("a program of 16,000 characters", "a program of 341 score lines"):
        assert statistics.median(times[case][1::2]) < 400, (case, times[case])


def test_json_of_the_protocol_is_all_that_is_written(uri):
    """A stray print would end the conversation."""
    code = (
        "import sys; sys.argv = ['attndsl', 'lsp']\n"
        "import attndsl.editors.diagnostics as p\n"
        "old = p.warnings_of\n"
        "p.warnings_of = lambda *a: (print('stray'), old(*a))[1]\n"
        "from attndsl.cli import main; main()"
    )
    with Editor(code=code) as editor:
        assert editor.open(uri, "mask = q >= kv  # stray") == []
        code, said = editor.end()
    assert code == 0
    assert "stray" in said
    json.dumps(said)
