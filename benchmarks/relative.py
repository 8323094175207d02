"""attndsl's speed relative to other systems: the figures of README.md and docs/compared.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import decoding
from summary import speeds_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Row = Mapping[str, Any]
    Rows = Sequence[Row]
    Load = Callable[[str], dict[str, Any] | None]

SPARSE, DENSE, OTHER = "sparse_attention", "attention", "other_shapes"
_PLAIN = ("full", "causal")
_SCORES = (
    "causal", "documents1000", "neighbourhood128x6", "softcap", "alibi", "window1024", "prefix1024",
)  # fmt: skip
_LEARNED = ("head_gain",)
_SHORT = 512
_DIRECTIONS = ("forward", "backward")
NEEDED = (SPARSE, DENSE, OTHER, decoding.DECODE, decoding.SERVING)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the tables."""

    other: str
    """The system that attndsl is compared with."""
    what: str
    """The calls."""
    file: str
    """Name of the result file, without its ending."""
    forward: Callable[[Rows], list[float]]
    """Speeds of its rows: 2 where the other system takes twice as long."""
    backward: Callable[[Rows], list[float]] | None = None
    is_headline: bool = False
    """True if README.md has it."""


def _line(
    other: str,
    system: str,
    what: str,
    file: str,
    cases: Sequence[str],
    is_headline: bool,
    **more: Any,
) -> Line:
    """A row of benchmarks/attention.py, forward and backward."""
    forward, backward = (speeds_beside(system, way, cases, **more) for way in _DIRECTIONS)
    return Line(other, what, file, forward, backward, is_headline)


def _decoded(system: str, *, is_plain: bool) -> Callable[[Rows], list[float]]:
    """Device times of one plain query, or of all other rows of benchmarks/decode.py."""

    def speeds(rows: Rows) -> list[float]:
        chosen = [row for row in decoding.calls(rows) if decoding.is_plain(row) is is_plain]
        return decoding.ratios(chosen, system, "device")

    return speeds


def _few_keys(rows: Rows) -> list[float]:
    chosen = [
        row
        for row in decoding.calls(rows)
        if decoding.is_plain(row) and row["live_bytes"] < decoding.FEW_BYTES
    ]
    return decoding.ratios(chosen, "sdpa", "eager")


def _paged(rows: Rows) -> list[float]:
    return decoding.ratios_of(rows, "flashinfer", "pages")


def _is_short(length: int) -> bool:
    return length <= _SHORT


def _is_long(length: int) -> bool:
    return length > _SHORT


_DECODE = decoding.DECODE
LINES = (
    _line("FlexAttention", "flex", "7 masks and scores", SPARSE, _SCORES, True, dim=128),
    _line("FlexAttention", "flex", "learned factor per head", SPARSE, _LEARNED, False, dim=128),
    Line("FlexAttention", "decoding, 1 query", _DECODE, _decoded("flex", is_plain=True)),
    Line("FlexAttention", "other decoding", _DECODE, _decoded("flex", is_plain=False)),
    _line("FlashAttention-4", "fa4", "full and causal", DENSE, _PLAIN, True),
    _line("FlashAttention-4", "fa4", "soft cap", DENSE, ("softcap",), False),
    _line("FlashAttention-2", "fa2", "full and causal", OTHER, _PLAIN, False, lengths=_is_long),
    _line("cuDNN", "cudnn", "full and causal", DENSE, _PLAIN, True),
    _line("cuDNN", "cudnn", "512 tokens, from Python", OTHER, _PLAIN, True, lengths=_is_short),
    Line("SDPA", "decoding, 1 query", _DECODE, _decoded("sdpa", is_plain=True), is_headline=True),
    Line("SDPA", "decoding, 1024 keys, from Python", _DECODE, _few_keys, is_headline=True),
    Line("SDPA", "other decoding", _DECODE, _decoded("sdpa", is_plain=False)),
    Line("FlashInfer", "decoding, pages", decoding.SERVING, _paged),
)


def headlines(load: Load) -> str:
    """Sentences and the short table, for README.md."""
    files = {name: load(name) for name in NEEDED}
    if any(results is None for results in files.values()):
        return ""
    flex, fa4 = LINES[0], next(line for line in LINES if line.other == "FlashAttention-4")
    forward, backward = _speeds(flex, files)
    level = [speed for speeds in _speeds(fa4, files) for speed in speeds]
    return "\n\n".join([
        f"Masks and scores run at {_round(forward)} FlexAttention's speed in the forward pass and "
        f"{_round(backward)} in the backward pass. Full and causal attention is on par with "
        f"FlashAttention-4 ({decoding.span(level)}). Below 1x, attndsl is slower.",
        table(files, [line for line in LINES if line.is_headline]),
        conditions(files),
    ])  # fmt: skip


def everything(load: Load) -> str:
    """The long table, for docs/compared.md."""
    files = {name: load(name) for name in NEEDED}
    if any(results is None for results in files.values()):
        return ""
    return f"{table(files, LINES)}\n\n{conditions(files)}"


def table(files: Mapping[str, dict[str, Any] | None], lines: Sequence[Line]) -> str:
    """A row for each line: the system and the calls, and the speeds in both directions."""
    cells = [["attndsl's speed relative to", "forward", "backward"], ["---", "---:", "---:"]]
    for line in lines:
        forward, backward = _speeds(line, files)
        cells.append([f"{line.other}, {line.what}", _cell(forward), _cell(backward)])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def conditions(files: Mapping[str, dict[str, Any] | None]) -> str:
    """The machine, the versions, and the commits of the files."""
    found = {name: results for name, results in files.items() if results}
    machines = {results["machine"] for results in found.values()}
    if len(machines) != 1:
        raise ValueError(f"the files are of several machines: {sorted(machines)}")
    versions = found[DENSE]["versions"]
    cudnn = versions["cudnn"]
    commits = dict.fromkeys(results["versions"]["commit"][:7] for results in found.values())
    lengths = [row["S"] for row in found[DENSE]["rows"]]
    return (
        f"One {machines.pop()}, bf16, torch {versions['torch'].partition('+')[0]}, Triton "
        f"{versions['triton']}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}. Lengths "
        f"{min(lengths)} to {max(lengths)} unless specified; FlexAttention at "
        f"{_shape(found[SPARSE])}. Commits {', '.join(commits)}."
    )


def _shape(results: Mapping[str, Any]) -> str:
    row = next(row for row in results["rows"] if row["D"] == 128)
    return f"length {row['S']}, head dim {row['D']}"


def _speeds(
    line: Line, files: Mapping[str, dict[str, Any] | None]
) -> tuple[list[float], list[float]]:
    results = files[line.file]
    assert results is not None
    rows = results["rows"]
    return line.forward(rows), line.backward(rows) if line.backward else []


def _cell(speeds: Sequence[float]) -> str:
    if not speeds:
        return "-"
    if min(speeds) >= 100:
        return f"{min(speeds):.0f}x"
    return decoding.span(speeds)


def _round(speeds: Sequence[float]) -> str:
    return f"{min(speeds):.1f}x to {max(speeds):.1f}x"
