"""Write docs/gallery.md and its pictures: every function of the prelude, and every example.

python docs/gallery.py

Programs of prelude functions are those of `attndsl play`; examples contain their own. Descriptions
are the comments of the prelude and the docstrings of the examples. attndsl/picture/ draws.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import attndsl
from attndsl.frontend.format import format_source
from attndsl.inspection.example_captures import make_for_picture
from attndsl.passes.tiles.tile_plan import FULL, PARTIAL
from attndsl.picture import Frame, PictureData, picture_data, svg
from attndsl.play.examples import examples as of_play

from dark import themed

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "gallery"
TIMES = ROOT / "benchmarks" / "results" / "gallery_times.json"
DRAWN, LONG, TILE = 64, 8192, 128
HEADS = 8

INTRODUCTION = f"""# Gallery

This page shows all [prelude](language.md#the-prelude) functions and all programs in `examples/`. To
edit them interactively, run [`attndsl play`](play.md).

Each section shows a program and its picture; prelude sections also show the function's
definition. Pictures show {DRAWN} queries and {DRAWN} keys in tiles of 16 x 16, and list the tensors
and params with made-up values. FULL tiles are blue, PARTIAL tiles orange, EMPTY tiles gray.

The tables count tiles of {TILE} x {TILE} pairs at length {LONG}. Kernels visit only *live*
tiles and evaluate the mask only in *PARTIAL* tiles. Dense attention visits 100 %."""
OF_TIMES = """The last column lists times in ms, forward / backward, on one {machine}: batch 2,
16 heads, length 8192, head dim 128, bf16. [Benchmarks](benchmarks.md) compares other systems."""
OF_EXAMPLES = """Each script compares its program with plain torch or trains it. The programs shown
here declare the params that the scripts pass to `compile`."""


@dataclass(frozen=True)
class Setting:
    """Values that a program is drawn and counted with; tensors by a function of the length."""

    drawn: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    """What ``counted`` holds, in the table."""
    heads: int = 1
    """Heads that are counted, where they differ."""


class Counts(NamedTuple):
    """Tiles of a program, by kind."""

    full: int
    partial: int
    total: int

    @property
    def live(self) -> int:
        """Tiles that kernels visit."""
        return self.full + self.partial

    def share(self, tiles: int) -> str:
        """A number of tiles as a part of all."""
        return f"{100 * tiles / self.total:.3g} %"


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


def _documents(length: int, batched: bool = True, size: int = 1000) -> torch.Tensor:
    ids = torch.arange(length) // size
    return ids[None] if batched else ids


def _lists(number: int, size: int, *outer: int, rows: int = 1) -> Callable[[int], torch.Tensor]:
    """Random lists (*outer, length // rows, number) of blocks of ``size`` earlier keys, by length.

    -1 stands for blocks that a row lacks; ``rows`` is 0 for lists of all queries.
    """

    def made(length: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(7)
        ends = torch.arange(1, length // rows + 1) * rows if rows else torch.tensor([length])
        drawn = torch.rand((*outer, len(ends), length // size), generator=dice)
        later = torch.arange(length // size) * size >= ends[:, None]
        found = drawn.masked_fill(later, -1.0).topk(number)
        lists = torch.where(found.values < 0, -1, found.indices)
        return lists if rows else lists.squeeze(-2)

    return made


def _retrieval(length: int) -> torch.Tensor:
    """Two heads of eight that see all keys."""
    return torch.arange(HEADS) % 4 == 0


_DOCUMENTS = "documents of 1000"
_OF_PRELUDE = {
    "sliding_window": Setting(counted={"w": 1024}, words="`w = 1024`"),
    "local_window": Setting(counted={"w": 512}, words="`w = 512`"),
    "prefix_lm": Setting(counted={"n": 1024}, words="`n = 1024`"),
    "same": Setting(counted={"ids": _documents}, words=_DOCUMENTS),
    "same_1d": Setting(
        counted={"ids": lambda n: _documents(n, batched=False)}, words=_DOCUMENTS
    ),
    "document_causal": Setting(counted={"ids": _documents}, words=_DOCUMENTS),
    "dilated": Setting(counted={"w": 1024, "d": 4}, words="`w = 1024, d = 4`"),
    "strided": Setting(counted={"w": 512, "s": 512}, words="`w = 512, s = 512`"),
    "block_diagonal": Setting(counted={"n": 1024}, words="`n = 1024`"),
    "block_causal": Setting(counted={"n": 1024}, words="`n = 1024`"),
    "global_tokens": Setting(counted={"n": 16, "w": 512}, words="`n = 16, w = 512`"),
    "valid_keys": Setting(
        drawn={"lengths": lambda n: torch.tensor([44])},
        counted={"lengths": lambda n: torch.tensor([6000])}, words="length 6000",
    ),
    "block_diffusion": Setting(counted={"n": 4096, "w": 64}, words="`n = 4096, w = 64`"),
    "window_start": Setting(counted={"side": 1025}, words="`side = 1025`"),
    "in_window": Setting(counted={"side": 1025}, words="`side = 1025`"),
    "natten2d": Setting(
        counted={"width": 128, "side": 13}, words="grid 128 x 64, `side = 13`"
    ),
    "sta2d": Setting(
        counted={"across": 16, "tile": 64}, words="16 x 8 tiles of 64"
    ),
    "sta3d": Setting(
        counted={"across": 8, "down": 4, "tile": 64}, words="8 x 4 x 4 tiles of 64"
    ),
}  # fmt: skip
_OF_EXAMPLES = {
    "block_diffusion": Setting(
        {"n": 32, "block": 8}, {"n": 4096, "block": 64}, "`n = 4096, block = 64`"
    ),
    "big_bird": Setting(
        {"size": 8, "random": _lists(3, 8, HEADS, rows=8)},
        {"size": 64, "random": _lists(3, 64, HEADS, rows=64)}, "`size = 64`", HEADS,
    ),
    "dilated": Setting(heads=2),
    "dsa": Setting(
        {"chosen": _lists(8, 1)}, {"chosen": _lists(2048, 1)}, "2048 random tokens",
    ),
    "joined": Setting(counted={"near": 1024}, words="`near = 1024`"),
    "key_groups": Setting(
        {"size": 4, "chosen": _lists(3, 4, 1)}, {"chosen": _lists(512, 4, 1)},
        "512 random groups",
    ),
    "latent": Setting({"heat": 1.0}),
    "lengths": Setting(
        {"lengths": lambda n: torch.tensor([44])}, {"lengths": lambda n: torch.tensor([6000])},
        "length 6000",
    ),
    "moba": Setting(
        {"size": 8, "chosen": _lists(2, 8, 1, HEADS)},
        {"size": 512, "chosen": _lists(3, 512, 1, 1)}, "3 random blocks of 512",
    ),
    "msa": Setting(
        {"size": 8, "chosen": _lists(2, 8, 1, HEADS), "doc": lambda n: _documents(n, size=40)},
        {"size": 128, "chosen": _lists(16, 128, 1, 1), "doc": _documents},
        "16 random blocks of 128, documents of 1000",
    ),
    "neighbourhood_2d": Setting(
        {"width": 8, "height": 8, "side": 5}, {"width": 128, "height": 64, "side": 13},
        "grid 128 x 64, `side = 13`",
    ),
    "nsa": Setting(
        {"size": 8, "chosen": _lists(2, 8, 1, HEADS)},
        {"size": 64, "chosen": _lists(16, 64, 1, 1)}, "16 random blocks of 64",
    ),
    "packed_documents": Setting(counted={"doc": _documents}, words=_DOCUMENTS),
    "prefix_lm": Setting({"n": 20}, {"n": 1024}, "`n = 1024`"),
    "retrieval_heads": Setting(
        {"size": 8, "window": 12, "full": _retrieval, "chosen": _lists(2, 8, 1, HEADS, rows=0)},
        {"size": 16, "window": 256, "chosen": _lists(64, 16, 1, HEADS, rows=0)},
        "64 random blocks of 16", HEADS,
    ),
    "sigmoid": Setting({"heat": 1.0}),
    "sinks": Setting({"heat": 1.0}),
    "sliding_window": Setting({"window": 16}, {"window": 1024}, "`window = 1024`"),
    "soft_cap": Setting({"window": 16}, {"window": 4096}, "`window = 4096`"),
    "gemma2": Setting({"window": 16}, {"window": 4096}, "`window = 4096`"),
    "video_tiles": Setting(
        {"size": 8, "chosen": _lists(3, 8, 1, HEADS, rows=8)},
        {"size": 64, "chosen": _lists(16, 64, 1, 1, rows=64)}, "16 random tiles of 64",
    ),
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


def section(entry: Entry) -> str:
    """What the page says of one program."""
    relative = entry.picture.relative_to(PAGE.parent).as_posix()
    lines = [f"### {entry.heading}", _linked(entry.said), f"```attn\n{entry.text.rstrip()}\n```"]
    if entry.definition:
        lines.append(f"```text\n{entry.definition}\n```")
    return "\n\n".join([*lines, f"![{entry.name}: {tiles_of(entry)}]({relative})"])


def page() -> str:
    """The whole page."""
    functions, scripts = prelude_entries(), example_entries()
    parts = [INTRODUCTION, OF_TIMES.format(machine=_times()["machine"])]
    for heading, said, kind, entries in (
        ("## The prelude", "", "function", functions),
        ("## Examples", OF_EXAMPLES, "example", scripts),
    ):
        rows = [f"| {kind} | counted with | live | PARTIAL | ms |", "|---|---|---:|---:|---:|"]
        rows += [_row(entry, counts(entry)) for entry in entries]
        parts += [heading, *([said] if said else []), "\n".join(rows), *map(section, entries)]
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


def tiles_of(entry: Entry) -> str:
    """The tiles of its picture, by kind."""
    return data(entry).summary.partition(";")[0] + " tiles"


def timed(entry: Entry) -> str:
    """Milliseconds forward and backward, where the committed file has them for this very text."""
    row = next((row for row in _times()["rows"] if row["name"] == entry.heading), None)
    if row is None or row["text"] != entry.text or "why" in row:
        return "-"
    return f"{row['forward_ms']:.3g} / {row['backward_ms']:.3g}"


def _times() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TIMES.read_text("utf-8"))
    return found


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


def _row(entry: Entry, found: Counts) -> str:
    anchor = entry.heading.replace(".", "")
    cells = [entry.setting.words, found.share(found.live), found.share(found.partial), timed(entry)]
    return f"| [`{entry.heading}`](#{anchor}) | {' | '.join(cells)} |"


def _declared(text: str, values: dict[str, Any]) -> str:
    """``text`` with a line for each param that its script gives to ``compile``."""
    words = set(re.findall(r"^ *(?:param|tensor) (\w+)", text, re.MULTILINE))
    lines = [f"param {name}: int" for name in values if name not in words]
    return "\n".join([*lines, text.strip()]) + "\n"


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
