"""The VS Code extension: its grammars are those of the language, and colour what they should.

The slow tests take the libraries that VS Code itself uses, and grammars of YAML, TOML, JSON and
Markdown, from npm.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import textmate

from attndsl.frontend.vocabulary import Kind, kinds, tokens

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools" / "vscode"
PACKAGES = ("vscode-textmate@9", "vscode-oniguruma@2", "tm-grammars@1")
SAMPLE = """import "w.attn"  # A file.
param window: int = 1_000.5e3
tensor doc[batch, n]: bool = none
def near(x, y) = abs(x - y) <= window_
mask = causal() and not q - kv < window; mask = doc[b, q] == true
score = where(int(score) >> 2 > -inf, maskq * qmask, max(q_len ** 2, .5)) $ é
"""
INJECTIONS = {
    "yaml": (
        "a:\n  program: |\n    mask = causal()\n\n    score = 1.0\n  mask: causal()\n"
        "b:\n  program: q >= kv # q\nc: {program: q >= kv, params: {q: 3}}\n"
        'd:\n  program: "q >= kv"\n  kv: 3\n- program: >-\n    q >= kv\n- x: mask\n'
        "programs: q\n"
    ),
    "toml": (
        'kv = 2\n[a]\nprogram = """\nmask = causal()\nscore = 1.0\n"""\nx = "mask"\n'
        "[b]\nprogram = 'q >= kv'\nq = 3\n[c]\nprogram = \"q >= kv\"\n"
        "[d]\nprogram = '''\nq >= kv\n'''\nmask = 1\n"
    ),
    "json": '{"q": {"program": "q >= kv", "params": {"q": 3}}, "b": "mask", "program": "q >= kv"}',
    "markdown": "mask\n\n```attn\nmask = causal()\nscore = 1.0\n```\nmask q >= kv\n",
}
WANTED = {
    "yaml": "mask = causal ( ) score = 1.0 q >= kv q >= kv q >= kv q >= kv",
    "toml": "mask = causal ( ) score = 1.0 q >= kv q >= kv q >= kv",
    "json": "q >= kv q >= kv",
    "markdown": "mask = causal ( ) score = 1.0",
}
ROOTS = {"yaml": "source.yaml", "toml": "source.toml", "json": "source.json",
         "markdown": "text.html.markdown"}  # fmt: skip


def scope_of(token):
    """The scopes that a token may have."""
    if token.kind is Kind.NAME:
        return {textmate.OTHER, textmate.CALL}
    if token.kind is Kind.OTHER:
        return {"invalid.illegal.attn"}
    if token.kind is Kind.SYMBOL:
        return {textmate.SCOPES[Kind.SYMBOL], textmate.PUNCTUATION}
    return {textmate.SCOPES[token.kind]}


def by_the_rules(line):
    """What the patterns of the grammar make of a line, as an editor applies them."""
    rules = [(re.compile(rule["match"]), rule["name"]) for rule in textmate.rules()]
    at = 0
    while at < len(line):
        matches = [(rule.search(line, at), name) for rule, name in rules]
        found = [(match, name) for match, name in matches if match is not None]
        if not found:
            return
        match, name = min(found, key=lambda each: each[0].start())
        assert match.end() > at
        yield match[0], name
        at = match.end()


def test_files_are_what_the_script_writes():
    written = textmate.files()
    assert set((FOLDER / "syntaxes").iterdir()) == set(written)
    for path, text in written.items():
        assert path.read_text("utf-8") == text, "run tools/textmate.py"


def test_patterns_classify_the_vocabulary():
    for name in kinds():
        ((said, scope),) = by_the_rules(name)
        assert said == name
        assert scope == textmate.SCOPES[kinds()[name]]
        ((said, scope),) = by_the_rules(f"{name}x")
        assert (said, scope) == (f"{name}x", textmate.OTHER)


def test_patterns_agree_with_the_tokens():
    for line in SAMPLE.split("\n"):
        found, wanted = list(by_the_rules(line)), list(tokens(line))
        assert [said for said, _ in found] == [token.text for token in wanted]
        for (_, scope), token in zip(found, wanted, strict=True):
            assert scope in scope_of(token), token


def test_the_extension_names_files_that_are_there():
    package = json.loads((FOLDER / "package.json").read_text("utf-8"))
    gives = package["contributes"]
    files = [each["path"] for each in gives["grammars"]]
    files += [each["configuration"] for each in gives["languages"]] + [package["main"]]
    for file in files:
        assert (FOLDER / file).is_file(), file
    scopes = {each["scopeName"] for each in gives["grammars"]}
    written = [json.loads(text) for text in textmate.files().values()]
    assert scopes == {each["scopeName"] for each in written}
    for grammar in gives["grammars"][1:]:
        (text,) = (each for each in written if each["scopeName"] == grammar["scopeName"])
        selectors = [part.split()[0] for part in text["injectionSelector"].split(", ")]
        assert selectors == [f"L:{scope}" for scope in grammar["injectTo"]]
    json.loads((FOLDER / "language-configuration.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Folder of the packages of npm."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here: apt-get install -y npm")
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"]
    done = subprocess.run(
        [*command, folder, *PACKAGES], capture_output=True, text=True, timeout=300, cwd=folder
    )
    if done.returncode != 0:
        pytest.skip(f"npm gives no packages here: {done.stderr[-200:]}")
    return folder / "node_modules"


def tokenise(modules, scope, text, *grammars):
    """Lines of (text, scopes) as VS Code's own library makes them."""
    files = [FOLDER / "syntaxes" / "attn.tmLanguage.json", *grammars]
    done = subprocess.run(
        ["node", ROOT / "tests" / "support" / "tokenise.js", modules, scope, *files],
        input=text, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_programs_in_vs_code(modules):
    lines = tokenise(modules, "source.attn", SAMPLE)
    for line, written in zip(lines, SAMPLE.split("\n"), strict=True):
        found = [(said, scopes[-1]) for said, scopes in line if said.strip()]
        wanted = list(tokens(written))
        assert [said for said, _ in found] == [token.text for token in wanted]
        for (_, scope), token in zip(found, wanted, strict=True):
            assert scope in scope_of(token), token


@pytest.mark.slow
@pytest.mark.parametrize("kind", INJECTIONS)
def test_programs_within_other_files_in_vs_code(modules, kind):
    host = modules / "tm-grammars" / "grammars" / f"{kind}.json"
    more = sorted(host.parent.glob("yaml*.json")) if kind == "yaml" else [host]
    grammars = [FOLDER / "syntaxes" / f"{kind}.injection.json", *more]
    lines = tokenise(modules, ROOTS[kind], INJECTIONS[kind], *grammars)
    scopes = {*textmate.SCOPES.values(), textmate.OTHER, textmate.CALL, textmate.PUNCTUATION}
    coloured = [said for line in lines for said, found in line if scopes & set(found)]
    assert " ".join(" ".join(said.strip() for said in coloured).split()) == WANTED[kind]


STUB = """
const Module = require("module"), load = Module._load;
const said = [];
const documents = [{ languageId: "attn" }];
class LanguageClient {
  constructor(...given) { said.push(given); }
  async start() { if (FAILS) throw new Error("spawn ENOENT"); }
  stop() { return "stopped"; }
}
const stubs = {
  vscode: {
    window: { showErrorMessage: (text) => said.push(text) },
    workspace: {
      textDocuments: documents, getConfiguration: () => ({ get: () => ["attndsl", "lsp"] })
    },
  },
  "vscode-languageclient/node": { LanguageClient, TransportKind: { stdio: 0 } },
};
Module._load = (name, ...more) => stubs[name] || load(name, ...more);
const extension = require(PATH);
extension.activate().then(() => console.log(JSON.stringify([said, extension.deactivate()])));
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_extension_starts_the_server(tmp_path, fails):
    if shutil.which("node") is None:
        pytest.skip("no node here: apt-get install -y nodejs")
    script = tmp_path / "stub.js"
    path = json.dumps(str(FOLDER / "extension.js"))
    script.write_text(f"const FAILS = {json.dumps(fails)}, PATH = {path};\n{STUB}")
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (client, *errors), stopped = json.loads(done.stdout)
    assert client[2] == {"command": "attndsl", "args": ["lsp"], "transport": 0}
    selected = {each["language"] for each in client[3]["documentSelector"]}
    assert selected == {"attn", "yaml", "toml", "json"}
    assert stopped == "stopped"
    assert bool(errors) is fails
    assert all("pip install 'attndsl[lsp]'" in error for error in errors)
