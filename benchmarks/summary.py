"""A line for each question that the result files answer: the first table of docs/benchmarks.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import against as every_peer
import decoding
from decoding import count, span, versus

import common

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Rows = Sequence[Mapping[str, Any]]

_PLAIN = ("full", "causal")
_MASKS = ("causal", "documents1000", "neighbourhood128x6", "window1024", "prefix1024")
_LEARNED = ("gain", "key_bias", "query_bias", "relative", "full_bias", "buckets")
_SHORT = 512
NO_OTHER = "-"
"""Cell of a row that compares attndsl only with itself."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of a page of docs/results."""

    page: str
    """Name of the page, without its ending."""
    heading: str

    @property
    def link(self) -> str:
        """The way from docs/benchmarks.md, with the anchor that GitHub makes of a heading."""
        words = re.sub(r"[^\w -]", "", self.heading.lower())
        return f"results/{self.page}.md#{words.replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class Question:
    """One row of the table."""

    text: str
    file: str
    """Name of the result file, without its ending."""
    section: Section
    """Section with the figures."""
    answer: Callable[[Rows], str]
    """A sentence from the rows of the file."""
    speeds: Callable[[Rows], Sequence[float]] | None = None
    """attndsl's speed over that of the fastest other system, case by case; None without others."""


def speeds_beside(
    column: str, direction: str, cases: Sequence[str],
    lengths: Callable[[int], bool] | None = None, dim: int | None = None,
) -> Callable[[Rows], list[float]]:  # fmt: skip
    """The speeds of attndsl over those of another system, in rows of benchmarks/attention.py.

    Args:
        column: Column of the result file, without ``_ms``.
        direction: ``forward`` or ``backward``.
        cases: Names of the programs that count.
        lengths: True for the lengths that count; all by default.
        dim: The head dim that counts; all by default.
    """

    def speeds(rows: Rows) -> list[float]:
        return [
            row[f"{column}_ms"] / row["attndsl_ms"]
            for row in rows
            if row["direction"] == direction
            and row["case"] in cases
            and (lengths is None or lengths(row["S"]))
            and (dim is None or row["D"] == dim)
            and row.get(f"{column}_ms") is not None
            and row["attndsl_ms"] is not None
        ]

    return speeds


def against(
    text: str,
    where: tuple[str, Section],
    other: tuple[str, str],
    direction: str,
    cases: Sequence[str],
    length: int | None = None,
) -> Question:
    """A question about attndsl's speed relative to one other system.

    Args:
        text: The question, without its direction.
        where: Name of the result file, and the section of its figures.
        other: The system's column, without ``_ms``, and its name.
        direction: As for the rows.
        cases: As for the rows.
        length: As for the rows.
    """
    column, name = other
    lengths = None if length is None else length.__eq__
    speeds = speeds_beside(column, direction, cases, lengths)

    def answer(rows: Rows) -> str:
        found = speeds(rows)
        return versus(found, name) if found else "not measured"

    return Question(f"{text}, {direction}", *where, answer, speeds)


def _decoding_speeds(plain: bool) -> Callable[[Rows], list[float]]:
    """Speeds over the faster of SDPA and FlexAttention, of plain calls or of all others."""

    def speeds(rows: Rows) -> list[float]:
        found = [row for row in decoding.calls(rows) if decoding.is_plain(row) == plain]
        best = (
            [one for peer in ("sdpa", "flex") for one in decoding.ratios([row], peer, "device")]
            for row in found
        )
        return [min(each) for each in best if each]

    return speeds


def _eager_speeds(rows: Rows) -> list[float]:
    plain = (row["best_eager"] for row in decoding.calls(rows) if decoding.is_plain(row))
    return [speed for speed in plain if speed]


def _flashinfer_speeds(rows: Rows) -> list[float]:
    return decoding.ratios_of(rows, "flashinfer", "pages")


def _learned(rows: Rows) -> str:
    found = [1 / row["cost"] for row in rows if row["case"] in _LEARNED]
    return f"{versus(found, 'a backward pass without them')} ({count(found)})"


def _deterministic(rows: Rows) -> str:
    found = [row["attndsl_ms"] / row["deterministic_ms"] for row in rows]
    return f"{versus(found, 'the default backward pass')} ({count(found)})"


def _odd(rows: Rows) -> str:
    found = [1 / row["cost"] for row in rows]
    return f"{versus(found, 'the next larger aligned shape')} ({count(found)})"


def _started(rows: Rows, system: str, cache: str) -> list[float]:
    """Seconds to the first step."""
    return [
        row["first_step_ms"] / 1000
        for row in rows
        if (row["system"], row["cache"]) == (system, cache) and "first_step_ms" in row
    ]


def _start(rows: Rows) -> str:
    parts = []
    for cache in ("cold", "warm"):
        own = (_started(rows, system, cache) for system in ("attndsl", "flex"))
        ours, theirs = (f"{min(x):.1f} to {max(x):.1f} s" if x else "" for x in own)
        parts.append(f"{ours} with {cache} caches (FlexAttention: {theirs})")
    return ", ".join(parts)


def _start_speeds(rows: Rows) -> list[float]:
    steps = {
        (row["program"], row["cache"], row["system"]): row["first_step_ms"]
        for row in rows
        if "first_step_ms" in row
    }
    return [
        steps[program, cache, "flex"] / step
        for (program, cache, system), step in steps.items()
        if system == "attndsl" and (program, cache, "flex") in steps
    ]


_PEER = "the best peer (cuDNN or FlashAttention-2, else FlexAttention)"


def _short(kind: str, direction: str | None = None) -> Question:
    """A question about short calls, in a CUDA graph (``device``) or from Python (``eager``)."""

    def speeds(rows: Rows) -> list[float]:
        return [
            row[f"best_{kind}"]
            for row in rows
            if row.get("direction")
            and direction in (None, row["direction"])
            and row[f"best_{kind}"] is not None
        ]

    def answer(rows: Rows) -> str:
        found = speeds(rows)
        return f"{versus(found, _PEER)}, geometric mean {geometric_mean(found):.2f}x"

    way = "in a CUDA graph" if kind == "device" else "from Python"
    text = ", ".join(part for part in ("Short shapes", way, direction) if part)
    return Question(text, "short", SHORT_SHAPES, answer, speeds)


def _tuned(rows: Rows) -> str:
    found = [1 / row["gain"] for row in rows if "gain" in row]
    return f"{versus(found, 'the tiles that `tune` finds')} ({count(found)})"


def _step_speeds(rows: Rows) -> dict[str, float]:
    times = {row["attention"]: row["step_ms"] for row in rows}
    own = times.pop("attndsl")
    return {name: time / own for name, time in times.items()}


def _step(rows: Rows) -> str:
    found = _step_speeds(rows)
    return f"{versus([found['sdpa']], 'SDPA')}, {versus([found['flex']], 'FlexAttention')}"


def _lists(rows: Rows) -> str:
    found = {row["what"]: row for row in rows}
    step, forward, backward = (found[what] for what in ("step", "forward", "backward"))
    return (
        f"{versus([step['cost']], 'lists built in each call')} in a step of {step['layers']} "
        f"layers, {span([forward['cost']])} in a forward pass; "
        f"{versus([forward['ahead'], backward['ahead']], 'FlexAttention')}"
    )


def _training_speeds(rows: Rows, way: str) -> list[float]:
    steps = {(row["model"], row["attention"]): row["step_ms"] for row in rows if "step_ms" in row}
    return [step / steps[model, "attndsl"] for (model, used), step in steps.items() if used == way]


def _training(rows: Rows) -> str:
    sdpa, flex = (_training_speeds(rows, way) for way in ("sdpa", "flex"))
    return f"{versus(sdpa, 'SDPA')}, {versus(flex, 'FlexAttention')}"


def _generation_speeds(rows: Rows) -> list[float]:
    def speed(row: Mapping[str, Any]) -> float:
        return next(
            one["tokens_per_s"]
            for one in rows
            if (one["batch"], one["context"]) == (row["batch"], row["context"])
            and one["implementation"] == "attndsl"
        )

    return [speed(row) / row["tokens_per_s"] for row in rows if row["implementation"] == "sdpa"]


def _plan_times(rows: Rows) -> list[tuple[float, float]]:
    """Milliseconds of closed forms and of compiled ``create_block_mask``."""
    return [
        (row["plan_ms"], row["flex_compiled_ms"]) for row in rows if row.get("plan_ms") is not None
    ]


def _plans(rows: Rows) -> str:
    found, other = zip(*_plan_times(rows), strict=True)
    return (
        f"{min(found):.0f} to {max(found):.0f} ms with closed forms; compiled `create_block_mask` "
        f"needs {min(other):.0f} to {max(other):.0f} ms"
    )


def _calls(rows: Rows) -> str:
    found = [row["call_us"] for row in rows]
    return f"{min(found):.0f} to {max(found):.0f} us"


def _in_graphs(rows: Rows) -> str:
    found = [f"{row['above_us']:.0f}" for row in rows if row["attention"] == "attndsl"]
    low, high = min(found, key=float), max(found, key=float)
    return f"{low if low == high else f'{low} to {high}'} us more than SDPA"


def _in_graphs_speeds(rows: Rows) -> list[float]:
    times = {(x["model"], x["attention"]): x["forward_us"] + x["backward_us"] for x in rows}
    return [times[x, "sdpa"] / time for (x, used), time in times.items() if used == "attndsl"]


def _on_cpus(rows: Rows) -> str:
    kinds = {"causal": "for causal masks", "growing cache": "for one query over a growing cache"}
    parts: dict[str, list[float]] = {}
    for row in rows:
        kind = kinds.get(row["case"], "for other masks and scores")
        parts.setdefault(kind, []).append(row["speedup"])
    first, *rest = parts.items()
    said = [f"{versus(first[1], 'SDPA')} {first[0]}"]
    return ", ".join(said + [f"{span(found)} {name}" for name, found in rest])


BESIDE_FLEX = Section("attention", "Masks and scores: FlexAttention")
BESIDE_FA4 = Section("attention", "Plain attention: FlashAttention-4 and cuDNN")
DETERMINISTIC = Section("attention", "Deterministic gradients")
OTHER_SHAPES = Section("attention", "Other shapes")
WIDE_HEADS = Section("attention", "Head dim 256")
AGAINST = Section("attention", "Every peer, at fixed and drawn shapes")
PORTABLE = Section("attention", "Portable kernels")
GRADIENTS = Section("shapes", "Gradients of captured tensors")
ODD_SHAPES = Section("shapes", "Odd shapes")
SHORT_SHAPES = Section("shapes", "Short shapes")
DECODING = Section("decoding", "Decoding")
SERVING = Section("decoding", "Serving over pages")
START = Section("host", "Process start-up")
GPT = Section("host", "Training step of a GPT")
MODELS = Section("host", "Training steps of five models")
GENERATION = Section("host", "Generation with Hugging Face")
LISTS = Section("host", "Reused tile lists")
SPARSITY = Section("host", "Live tiles of long masks")
CALLS = Section("host", "Calls from Python")
IN_GRAPHS = Section("host", "Compiled layers")
ON_CPUS = Section("host", "CPU backend")

_SECTIONS = {decoding.DECODE: DECODING, decoding.SERVING: SERVING}
_OTHERS = {
    decoding.plain_decoding: _decoding_speeds(plain=True),
    decoding.eager_decoding: _eager_speeds,
    decoding.masked_decoding: _decoding_speeds(plain=False),
    decoding.beside_flashinfer: _flashinfer_speeds,
}
_FA4, _CUDNN, _FLEX = ("fa4", "FlashAttention-4"), ("cudnn", "cuDNN"), ("flex", "FlexAttention")
_IN_ATTENTION, _IN_SPARSE = ("attention", BESIDE_FA4), ("sparse_attention", BESIDE_FLEX)
_IN_OTHER, _IN_WIDE = ("other_shapes", OTHER_SHAPES), ("wide_heads", WIDE_HEADS)


def _once_measured(question: Question) -> tuple[Question, ...]:
    """A question whose result file may be missing."""
    return (question,) * (common.RESULTS / f"{question.file}.json").exists()


QUESTIONS = (
    against("Full and causal", _IN_ATTENTION, _FA4, "forward", _PLAIN),
    against("Full and causal", _IN_ATTENTION, _CUDNN, "forward", _PLAIN),
    against("Full and causal", _IN_ATTENTION, _FA4, "backward", _PLAIN),
    against("Full and causal", _IN_ATTENTION, _CUDNN, "backward", _PLAIN),
    against("Soft cap", _IN_ATTENTION, _FA4, "forward", ("softcap",)),
    against("Soft cap", _IN_ATTENTION, _FA4, "backward", ("softcap",)),
    against("Block-sparse masks", _IN_SPARSE, _FLEX, "forward", _MASKS),
    against("Block-sparse masks", _IN_SPARSE, _FLEX, "backward", _MASKS),
    against("Head dim 256", _IN_WIDE, _CUDNN, "forward", _PLAIN),
    against("Head dim 256", _IN_WIDE, _CUDNN, "backward", _PLAIN),
    against("Length 512, from Python", _IN_OTHER, _CUDNN, "forward", _PLAIN, _SHORT),
    against("Length 512, from Python", _IN_OTHER, _CUDNN, "backward", _PLAIN, _SHORT),
    _short("device", "forward"),
    _short("device", "backward"),
    _short("eager"),
    Question("Default tiles of short shapes", "short_tune", SHORT_SHAPES, _tuned),
    Question("Odd shapes", "odd_shapes", ODD_SHAPES, _odd),
    Question("Gradients of learned biases and factors", "gradients", GRADIENTS, _learned),
    Question("`deterministic=True`", "deterministic", DETERMINISTIC, _deterministic),
    *(
        Question(text, file, _SECTIONS[file], answer, _OTHERS.get(answer))
        for text, file, answer in decoding.ANSWERS
    ),
    Question("Process start to first training step", "start_cuda", START, _start, _start_speeds),
    Question(
        "Training step of a GPT", "gpt", GPT, _step, lambda rows: list(_step_speeds(rows).values())
    ),
    Question(
        "Training steps of five models", "training", MODELS, _training,
        lambda rows: [*_training_speeds(rows, "sdpa"), *_training_speeds(rows, "flex")],
    ),
    Question(
        "`generate`, Llama 1B", "huggingface_speed", GENERATION,
        lambda rows: versus(_generation_speeds(rows), "SDPA"), _generation_speeds,
    ),
    Question(
        "Reused tile lists of data masks", "lists", LISTS, _lists,
        lambda rows: [row["ahead"] for row in rows if "ahead" in row],
    ),
    Question(
        "Live tiles of a mask with 1,048,576 rows", "sparsity", SPARSITY, _plans,
        lambda rows: [other / own for own, other in _plan_times(rows)],
    ),
    Question("Host time of one call", "call_overhead", CALLS, _calls),
    Question(
        "Host time of one compiled layer", "graph_overhead", IN_GRAPHS, _in_graphs,
        _in_graphs_speeds,
    ),
    Question("CPU backend", "cpu", ON_CPUS, _on_cpus, lambda rows: [x["speedup"] for x in rows]),
    *_once_measured(
        Question(
            "Fixed and drawn shapes, device time", every_peer.NAME, AGAINST, every_peer.answer,
            every_peer.speeds,
        )
    ),
)  # fmt: skip
"""In the order of the table."""


def wins(question: Question, rows: Rows) -> str:
    """In how many cases another system is faster than attndsl, in bold where there are any."""
    if question.speeds is None:
        return NO_OTHER
    found = question.speeds(rows)
    behind = sum(speed < 1.0 for speed in found)
    said = f"{behind} of {len(found)}"
    return f"**{said}**" if behind else said


def summary(load: Callable[[str], dict[str, Any] | None]) -> str:
    """The table: a question, its answer, the cases that others win, and where the figures are.

    Args:
        load: The content of a result file by its name, or None where there is none.
    """
    lines = [["question", "answer", "others win", "details"], ["---"] * 4]
    for question in QUESTIONS:
        results = load(question.file)
        if results is not None:
            rows = results["rows"]
            link = f"[`{question.file}.json`]({question.section.link})"
            lines.append([question.text, question.answer(rows), wins(question, rows), link])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
