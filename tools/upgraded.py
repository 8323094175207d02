"""Say which programs of a commit still compute what they did, once ``fmt --upgrade`` rewrites them.

    python tools/upgraded.py BASE [--write FILE]

Every text of a program that BASE has is looked for: program files, configurations, blocks of
Markdown, and texts in Python and notebooks, where ``{...}`` of an f-string stands for a 7. The
package of BASE makes a program of each and gives its digest. The working tree rewrites the text and
gives a digest of its own. Names that a text does not declare are floats, ints or bools, whichever
BASE takes.

Passes change too, and with them a digest. So a program of BASE is also lowered by the working tree:
what counts is that this digest is that of the new text.

``--write`` keeps the texts that are rewritten as the data of a test.

Exit status: 0 where all are equal but for programs with ``alibi()``, whose mask does not say which
of q and kv is larger, or that add it to the score already. Texts that are refused are printed too.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("attndsl", "backends", "grammar")
_BLOCK = re.compile(r"^( *)```(attn|python|pycon)\b[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SPEAKS = re.compile(r"\b(q|kv|score)\b|^\s*(mask|score|sink|weights)\s*=|\b\w+\(", re.MULTILINE)
"""The mark of a program, which words with a sign between them lack."""
_RECORDS = ("benchmarks/results/",)


def main() -> int:
    """Compare, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", help="A commit.")
    parser.add_argument("--write", type=Path, help="Keep rewritten texts and digests of BASE here.")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.digests:
        json.dump([_digest_of(text, None) for text in json.load(sys.stdin)], sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "sources"
        _lay_out(chosen.base, sources, (".",))
        texts = found_in(sources)
        package = Path(folder) / "package"
        _lay_out(chosen.base, package, PARTS)
        for part in PARTS[1:]:
            (package / part).rename(package / "attndsl" / part)
        before = _digests(package, texts)
    programs = {text: found for text, found in zip(texts, before, strict=True) if found["digest"]}
    return _compared(programs, texts, chosen.write)


def _compared(
    programs: dict[str, dict[str, Any]], places: dict[str, str], write: Path | None
) -> int:
    """Upgrade and compare; the exit status."""
    from attndsl.errors import AttnDSLError
    from attndsl.frontend.upgrade import upgraded
    from attndsl.pipeline import lower_program
    from attndsl.serialise import program_from_json
    from attndsl.source import Source

    new: dict[str, str] = {}
    refused: dict[str, str] = {}
    for text in programs:
        try:
            new[text] = upgraded(Source(text))
        except AttnDSLError as error:
            refused[text] = error.message
    again = [text for text in new if upgraded(Source(new[text])) != new[text]]
    same, equal = 0, 0
    other: dict[str, str] = {}
    for text in new:
        before = programs[text]
        after = _digest_of(new[text], before["declared"])
        same += after["digest"] == before["digest"]
        if after["digest"] == lower_program(program_from_json(before["program"])).digest:
            equal += 1
        else:
            other[text] = after.get("error") or "another digest"
    changed = [text for text in new if new[text] != text]
    print(f"{len(programs)} programs, {len(changed)} of them rewritten")
    print(f"{same} have the digest that they had")
    print(f"{equal} have the digest of the program that they were, lowered by the same passes")
    for what, texts in (("refused", refused), ("differs", other)):
        for text, why in texts.items():
            print(f"{what} ({why}): {places[text]}: {text!r}")
    for text in again:
        print(f"rewritten twice: {places[text]}: {text!r}")
    if write is not None:
        rows = [
            {"text": text, "new": new[text], "declared": programs[text]["declared"],
             "same": text not in other, "place": places[text]}
            for text in changed
        ]  # fmt: skip
        write.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if again or any("alibi()" not in text for text in other) else 0


def found_in(folder: Path) -> dict[str, str]:
    """Texts below ``folder`` that may be programs, and where the first of each stands."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(_RECORDS):
            for line, text in _texts(path):
                if _SPEAKS.search(text) and len(text) < 1 << 14:
                    found.setdefault(text, f"{name}:{line}")
    return found


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a file that may be programs, and their lines."""
    suffix = path.suffix
    if suffix == ".attn":
        yield 1, path.read_text("utf-8")
    elif suffix == ".py":
        yield from _strings(path.read_text("utf-8"))
    elif suffix == ".md":
        text = path.read_text("utf-8")
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            body = re.sub(rf"^{block[1]}", "", block[3], flags=re.MULTILINE)
            if block[2] == "attn":
                yield line, body
            else:
                yield from ((line, each) for _, each in _strings(_without_prompts(body)))
    elif suffix == ".ipynb":
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                head, _, rest = source.partition("\n")
                yield from [(1, rest)] if head.startswith("%%attn") else _strings(source)
    elif suffix in (".yaml", ".yml", ".toml", ".json"):
        from attndsl.editors.embedded_programs import programs_in

        for program in programs_in(path.read_text("utf-8"), path.name).programs:
            yield program.source.first_line, program.source.text


def _without_prompts(code: str) -> str:
    lines = code.split("\n")
    if not any(line.startswith(">>> ") for line in lines):
        return code
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))


def _strings(code: str) -> Iterator[tuple[int, str]]:
    """The strings of Python code."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    inside = {id(x) for f in ast.walk(tree) if isinstance(f, ast.JoinedStr) for x in f.values}
    for item in ast.walk(tree):
        if isinstance(item, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else "7" for x in item.values)
            yield item.lineno, "".join(map(str, parts))
        elif id(item) in inside or not isinstance(item, ast.Constant):
            continue
        elif isinstance(item.value, str):
            yield item.lineno, item.value


def _lay_out(commit: str, folder: Path, parts: tuple[str, ...]) -> None:
    """The files of a commit."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit, *parts], cwd=ROOT, check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def _digests(package: Path, texts: Iterable[str]) -> list[dict[str, Any]]:
    """Results of the package in a folder for texts, from a process of its own."""
    told = subprocess.run(
        [sys.executable, "-P", __file__, ".", "--digests"], input=json.dumps([*texts]),
        env=os.environ | {"PYTHONPATH": str(package)}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return list(json.loads(told.stdout))


def _digest_of(text: str, declared: dict[str, Any] | None) -> dict[str, Any]:
    """The digest and the program of a text and what had to be declared for it, or its error."""
    from attndsl.errors import AttnDSLError
    from attndsl.frontend import ParamSpec, TensorSpec
    from attndsl.pipeline import lower
    from attndsl.serialise import program_to_json
    from attndsl.source import Source

    source = Source(text)
    error = ""
    for guess in [declared] if declared is not None else _guesses(source):
        names = {
            name: TensorSpec(tuple(dims), kind) if dims else ParamSpec(kind)
            for name, (kind, dims) in guess.items()
        }
        try:
            lowered = lower(source, names)
        except AttnDSLError as found:
            error = error or str(found)
        else:
            program = program_to_json(lowered.written)
            return {"digest": lowered.digest, "declared": guess, "program": program}
    return {"digest": None, "declared": {}, "program": None, "error": error}


def _guesses(source: Any) -> Iterator[dict[str, Any]]:
    """Declarations of what a text does not declare, in all types."""
    from attndsl.errors import AttnDSLError
    from attndsl.frontend import parsed
    from attndsl.frontend import surface as s

    yield {}
    try:
        tree = parsed(source)
    except AttnDSLError:
        return
    bound = {"q", "kv", "b", "h", "hkv", "score", "mask", "token", "tokens", "inf", "pi", "e"}
    bound |= {"true", "false", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"}
    dims: dict[str, list[str]] = {}
    for statement in tree.statements:
        if isinstance(statement, s.TensorDef):
            bound |= {x.name for x in statement.dims if isinstance(x, s.Name)}
        if not isinstance(statement, s.Bare | s.Import):
            bound.add(statement.name.name)
        if isinstance(statement, s.Define):
            bound |= {x.name for x in statement.parameters}
    for statement in tree.statements:
        for item in (x for root in s.expressions(statement) for x in s.walk(root)):
            if isinstance(item, s.Index) and item.name not in bound:
                dims[item.name] = [f"{item.name}_{n}" for n in range(len(item.indices))]
    for statement in tree.statements:
        for item in (x for root in s.expressions(statement) for x in s.walk(root)):
            if isinstance(item, s.Name) and item.name not in bound:
                dims.setdefault(item.name, [])
    kinds = ("float", "int", "bool")
    for scalar, element in itertools.product(kinds, kinds) if dims else ():
        yield {name: (element if found else scalar, found) for name, found in dims.items()}


if __name__ == "__main__":
    sys.exit(main())
