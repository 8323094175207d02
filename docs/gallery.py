"""Write docs/gallery.md and its pictures: every function of the prelude, and every example.

python docs/gallery.py

Texts of prelude functions are those of `attndsl play`, and those of examples stand in the examples.
Papers are named by the comments beside them. Pictures are the package's own (attndsl/picture/).
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attndsl
from attndsl.frontend.format import format_source
from attndsl.inspection.example_captures import make_for_picture
from attndsl.passes.tiles.tile_plan import FULL, PARTIAL
from attndsl.picture import Frame, PictureData, picture_data, svg
from attndsl.play.examples import examples as of_play

from dark import themed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "gallery"
TIMES = ROOT / "benchmarks" / "results" / "gallery_times.json"
DRAWN, LONG, TILE = 64, 8192, 128
HEADS = 8
MEASURED_AT = {"B": 2, "H": 16, "Hkv": 16, "S": 8192, "D": 128}

INTRODUCTION = f"""# Gallery

Every function of the [prelude](language.md#the-prelude), and every program of `examples/`.
Each has its text, its picture, its source and its cost. `attndsl play` opens
[a page](play.md) on which you change them.

Pictures show {DRAWN} queries and {DRAWN} keys in tiles of 16 x 16. [The glossary](glossary.md)
explains the words FULL, PARTIAL and EMPTY. Tensors and params without a value are made up, and a
line of the picture names them.

The cost of a program is the number of tiles of {TILE} x {TILE} pairs that kernels visit, at a
length of {LONG}. Dense attention visits all tiles, and a causal mask leaves about half of them.
Times are in ms, for batch 2, 16 heads, length 8192, head dim 128 and bf16. Those of the tables
are of one kind of GPU, and each program says which. Some programs have been measured beside
FlexAttention, on another kind. [Benchmarks](benchmarks.md) describes the method.

`python docs/gallery.py` writes this page."""
OF_EXAMPLES = """Each script of `examples/` compares its program with plain torch, or
trains it. Params that a script gives to `compile` are declared here, so that each text stands for
itself."""


@dataclass(frozen=True)
class Setting:
    """Values that a program is drawn and counted with; tensors by a function of the length."""

    drawn: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    """What ``counted`` holds, after "with"."""
    heads: int = 1
    """Heads that are counted, where they differ."""
    measured: str = ""
    """``file:case`` of another committed result."""


class Counts(NamedTuple):
    """Tiles of a program, by kind."""

    full: int
    partial: int
    total: int

    @property
    def share(self) -> str:
        """The part of all tiles that kernels visit."""
        return f"{100 * (self.full + self.partial) / self.total:.3g} %"


@dataclass(frozen=True)
class Entry:
    """One section of the page."""

    name: str
    said: str
    """What it is, as Markdown."""
    text: str
    setting: Setting
    definition: str = ""
    """That of the prelude."""
    file: str = ""
    """That of an example."""

    @property
    def heading(self) -> str:
        """Of its section: no two are the same."""
        return self.file or self.name

    @property
    def picture(self) -> Path:
        """Its file."""
        kind = "prelude" if self.definition else "example"
        return PICTURES / f"{kind}_{self.name}.svg"


def _documents(length: int, batched: bool = True) -> torch.Tensor:
    ids = torch.arange(length) // 1000
    return ids[None] if batched else ids


_DOCUMENTS = "documents of 1000 positions"
_OF_PRELUDE = {
    "causal": Setting(measured="sparse_attention:causal"),
    "sliding_window": Setting(
        counted={"w": 1024}, words="`w = 1024`", measured="sparse_attention:window1024"
    ),
    "local_window": Setting(counted={"w": 512}, words="`w = 512`"),
    "prefix_lm": Setting(
        counted={"n": 1024}, words="`n = 1024`", measured="sparse_attention:prefix1024"
    ),
    "same": Setting(counted={"ids": _documents}, words=_DOCUMENTS),
    "same_1d": Setting(
        counted={"ids": lambda n: _documents(n, batched=False)}, words=_DOCUMENTS,
        measured="sparse_attention:documents1000",
    ),
    "document_causal": Setting(counted={"ids": _documents}, words=_DOCUMENTS),
    "dilated": Setting(counted={"w": 1024, "d": 4}, words="`w = 1024` and `d = 4`"),
    "strided": Setting(counted={"w": 512, "s": 512}, words="`w = 512` and `s = 512`"),
    "block_diagonal": Setting(counted={"n": 1024}, words="`n = 1024`"),
    "block_causal": Setting(counted={"n": 1024}, words="`n = 1024`"),
    "global_tokens": Setting(counted={"n": 16, "w": 512}, words="`n = 16` and `w = 512`"),
    "valid_keys": Setting(
        drawn={"lengths": lambda n: torch.tensor([44])},
        counted={"lengths": lambda n: torch.tensor([6000])}, words="a length of 6000",
    ),
    "block_diffusion": Setting(counted={"n": 4096, "w": 64}, words="`n = 4096` and `w = 64`"),
    "window_start": Setting(counted={"side": 1025}, words="`side = 1025`"),
    "in_window": Setting(counted={"side": 1025}, words="`side = 1025`"),
    "natten2d": Setting(
        counted={"width": 128, "side": 13}, words="a grid of 128 x 64 and `side = 13`"
    ),
    "sta2d": Setting(
        counted={"across": 16, "tile": 64}, words="16 x 8 tiles of 64 positions each"
    ),
    "sta3d": Setting(
        counted={"across": 8, "down": 4, "tile": 64}, words="8 x 4 x 4 tiles of 64 positions each"
    ),
    "alibi": Setting(measured="sparse_attention:alibi"),
    "softcap": Setting(measured="sparse_attention:softcap"),
    "rel_bias": Setting(measured="gradients:relative"),
    "t5_bucket": Setting(measured="gradients:buckets"),
}  # fmt: skip
_OF_EXAMPLES = {
    "alibi": Setting(measured="sparse_attention:alibi"),
    "block_diffusion": Setting(
        {"n": 32, "block": 8}, {"n": 4096, "block": 64}, "`n = 4096` and `block = 64`"
    ),
    "causal": Setting(measured="sparse_attention:causal"),
    "dilated": Setting(heads=2),
    "joined": Setting(counted={"near": 1024}, words="`near = 1024`"),
    "latent": Setting({"heat": 1.0}),
    "lengths": Setting(
        {"lengths": lambda n: torch.tensor([44])}, {"lengths": lambda n: torch.tensor([6000])},
        "a length of 6000",
    ),
    "neighbourhood_2d": Setting(
        {"width": 8, "height": 8, "side": 5}, {"width": 128, "height": 64, "side": 13},
        "a grid of 128 x 64 and `side = 13`",
    ),
    "packed_documents": Setting(counted={"doc": _documents}, words=_DOCUMENTS),
    "prefix_lm": Setting(
        {"n": 20}, {"n": 1024}, "`n = 1024`", measured="sparse_attention:prefix1024"
    ),
    "relative_bias": Setting(measured="gradients:relative"),
    "sigmoid": Setting({"heat": 1.0}, measured="gradients:sigmoid"),
    "sinks": Setting({"heat": 1.0}, measured="gradients:sinks"),
    "sliding_window": Setting(
        {"window": 16}, {"window": 1024}, "`window = 1024`",
        measured="sparse_attention:window1024",
    ),
    "soft_cap": Setting({"window": 16}, {"window": 4096}, "`window = 4096`"),
    "gemma2": Setting({"window": 16}, {"window": 4096}, "`window = 4096`"),
}  # fmt: skip


def prelude_entries() -> list[Entry]:
    """One for each function of the prelude, in its order."""
    prelude = (ROOT / "grammar" / "prelude.attn").read_text("utf-8")
    definitions = dict(re.findall(r"^def (\w+)(.*)$", prelude, re.MULTILINE))
    functions = {example.name: example.text for example in of_play()[1].examples}
    if set(functions) != set(definitions):
        raise ValueError(f"no program for {set(definitions) ^ set(functions)}")
    return [
        Entry(name, *_parted(functions[name]), _OF_PRELUDE.get(name, Setting()),
              definition=f"def {name}{rest}")
        for name, rest in definitions.items()
    ]  # fmt: skip


def example_entries() -> list[Entry]:
    """One for each program of examples/, by name."""
    found = []
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix == ".py" and path.stem != "picture":
            tree = ast.parse(path.read_text("utf-8"))
            said = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
            text = next(_strings(tree))
        elif path.suffix == ".attn":
            said, text = _parted(path.read_text("utf-8"))
        else:
            continue
        setting = _OF_EXAMPLES.get(path.stem, Setting())
        text = format_source(_declared(text, setting.drawn))
        found.append(Entry(path.stem, said, text, setting, file=path.name))
    return found


def section(entry: Entry, found: Counts) -> str:
    """What the page says of one program."""
    relative = entry.picture.relative_to(PAGE.parent).as_posix()
    lines = [f"### {entry.heading}", _linked(entry.said), f"```attn\n{entry.text.rstrip()}\n```"]
    if entry.definition:
        lines.append(f"In the prelude:\n\n```text\n{entry.definition}\n```")
    lines.append(f"![{entry.name}: {data(entry).summary}]({relative})")
    facts = [f"- Cost at length {LONG}{_with(entry)}: {cost(entry, found)}"]
    facts.append(f"- Measured: {timed(entry)}")
    if entry.setting.measured:
        facts.append(f"- Also measured: {measured(entry.setting.measured)}")
    if entry.file:
        facts.append(f"- File: `examples/{entry.file}`")
    return "\n\n".join([*lines, "\n".join(facts)])


def page() -> str:
    """The whole page."""
    functions, scripts = prelude_entries(), example_entries()
    tiles = {entry.heading: counts(entry) for entry in (*functions, *scripts)}
    head = (
        f"| {{}} | what it is | live tiles at {LONG} | ms forward, backward |\n"
        "| --- | --- | ---: | ---: |"
    )
    tables = [
        "\n".join([head.format(kind), *(_row(e, tiles[e.heading]) for e in entries)])
        for kind, entries in (("function", functions), ("example", scripts))
    ]
    parts = [INTRODUCTION, "## The prelude", tables[0]]
    parts += [section(entry, tiles[entry.heading]) for entry in functions]
    parts += ["## Examples", OF_EXAMPLES, tables[1]]
    parts += [section(entry, tiles[entry.heading]) for entry in scripts]
    return "\n\n".join(parts) + "\n"


def data(entry: Entry) -> PictureData:
    """What its picture shows."""
    attention = attndsl.compile(entry.text, backend="reference")
    program = attention.lowered.program
    given = _values(entry.setting.drawn, DRAWN)
    frame = Frame(DRAWN, DRAWN, 16, 16, heads=HEADS, h=2)
    made = make_for_picture(program, frame.sizes(), 0, given)
    params = {decl.name for decl in program.params}
    found = picture_data(
        attention.lowered, frame,
        tensors={**made.tensors, **{n: x for n, x in given.items() if n not in params}},
        params={**made.params, **{n: x for n, x in given.items() if n in params}},
        title=entry.name,
    )  # fmt: skip
    return replace(found, made_up=made.what)


def picture(entry: Entry) -> str:
    """Its picture, for both backgrounds."""
    return themed(svg(data(entry)))


def counts(entry: Entry) -> Counts:
    """The tiles of a program at the long length."""
    given = _values({**entry.setting.drawn, **entry.setting.counted}, LONG)
    kinds = attndsl.compile(entry.text).tiles(
        q_len=LONG, kv_len=LONG, block_m=TILE, block_n=TILE, heads=entry.setting.heads,
        captures=given,
    ).kinds  # fmt: skip
    return Counts(int((kinds == FULL).sum()), int((kinds == PARTIAL).sum()), kinds.numel())


def cost(entry: Entry, found: Counts) -> str:
    """The tiles of a program in words."""
    of_heads = f" of {entry.setting.heads} heads" if entry.setting.heads > 1 else ""
    live = found.full + found.partial
    return (
        f"{live} of {found.total} tiles{of_heads} ({found.share}), {found.partial} of them PARTIAL"
    )


def measured(where: str) -> str:
    """Times of a result file, and of FlexAttention where the file has them."""
    file, _, case = where.partition(":")
    results = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text("utf-8"))
    rows, where = results["rows"], f"on one {results['machine']} (`{file}.json`)"
    program = _benchmarked(file, case)
    if file == "gradients":
        (row,) = (r for r in rows if r["case"] == case and r["shape"] == [2, 16, 8192, 128])
        times = [f"{_ms(row['with_ms'])} ms backward, with the gradients of what it captures"]
        if row.get("forward_ms"):
            times.insert(0, f"{_ms(row['forward_ms'])} ms forward")
        return f"{program}: {', '.join(times)}, {where}"
    found = {
        row["direction"]: row
        for row in rows
        if row["case"] == case and all(row[key] == size for key, size in MEASURED_AT.items())
    }
    forward, backward = found["forward"], found["backward"]
    return (
        f"{program}: {_ms(forward['attndsl_ms'])} ms forward, {_ms(backward['attndsl_ms'])} ms "
        f"backward; FlexAttention {_ms(forward['flex_ms'])} and {_ms(backward['flex_ms'])} ms, "
        f"{where}"
    )


def timed(entry: Entry) -> str:
    """Times of the program itself, where a committed file has them."""
    forward, backward, machine = times_of(entry)
    if not machine:
        return "not yet"
    return f"{forward} ms forward, {backward} ms backward, on one {machine} (`{TIMES.name}`)"


def times_of(entry: Entry) -> tuple[str, str, str]:
    """Milliseconds forward and backward, and the machine; empty where no file has them."""
    if not TIMES.exists():
        return "", "", ""
    found = json.loads(TIMES.read_text("utf-8"))
    row = next((row for row in found["rows"] if row["name"] == entry.heading), None)
    if row is None or row["text"] != entry.text or "why" in row:
        return "", "", ""
    return _ms(row["forward_ms"]), _ms(row["backward_ms"]), found["machine"]


@cache
def _cases(script: str) -> dict[str, str]:
    """Programs that a benchmark measures, by case; read, since benchmarks import one another."""
    tree = ast.parse((ROOT / "benchmarks" / f"{script}.py").read_text("utf-8"))
    (table,) = (
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    )  # fmt: skip
    assert isinstance(table, ast.Dict)
    return {
        ast.literal_eval(key): ast.literal_eval(value.args[0])
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(value, ast.Call) and key is not None
    }


def _benchmarked(file: str, case: str) -> str:
    program = _cases("gradients" if file == "gradients" else "attention")[case]
    return f"`{program.replace(chr(10), '; ')}`"


def _values(named: dict[str, Any], length: int) -> dict[str, Any]:
    return {name: value(length) if callable(value) else value for name, value in named.items()}


def _parted(text: str) -> tuple[str, str]:
    """The comment before a program, as a sentence, and the program."""
    comment = re.match(r"(?:#[^\n]*\n)*", text)
    assert comment is not None
    lines = [line.lstrip("# ") for line in comment[0].splitlines()]
    return " ".join(lines), format_source(text[comment.end() :])


def _strings(tree: ast.Module) -> Any:
    """Texts of constants, in order: the first one is an example's program."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield node.value.value


def _linked(said: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", said)


def _with(entry: Entry) -> str:
    return f" with {entry.setting.words}" if entry.setting.words else ""


def _row(entry: Entry, found: Counts) -> str:
    anchor = entry.heading.replace(".", "")
    forward, backward, machine = times_of(entry)
    times = f"{forward}, {backward}" if machine else "-"
    return f"| [`{entry.heading}`](#{anchor}) | {_linked(entry.said)} | {found.share} | {times} |"


def _declared(text: str, values: dict[str, Any]) -> str:
    """``text`` with a line for each param that its script gives to ``compile``."""
    words = set(re.findall(r"^ *(?:param|tensor) (\w+)", text, re.MULTILINE))
    lines = [f"param {name}: int" for name in values if name not in words]
    return "\n".join([*lines, text.strip()]) + "\n"


def _ms(value: float) -> str:
    return f"{value:.3g}"


def main() -> None:
    """Write the page and all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for path in PICTURES.glob("*.svg"):
        path.unlink()
    for entry in (*prelude_entries(), *example_entries()):
        entry.picture.write_text(picture(entry), "utf-8")
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
