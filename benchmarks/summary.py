"""A line for each question that the result files answer: the first table of docs/benchmarks.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import decoding
from decoding import count, span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Rows = Sequence[Mapping[str, Any]]

_PLAIN = ("full", "causal")
_MASKS = ("causal", "documents1000", "neighbourhood128x6", "window1024", "prefix1024")
_LEARNED = ("gain", "key_bias", "query_bias", "relative", "full_bias", "buckets")
_SHORT = 512


@dataclass(frozen=True, slots=True)
class Question:
    """One row of the table."""

    text: str
    file: str
    """Name of the result file, without its ending."""
    section: str
    """Heading of the section that has the figures."""
    answer: Callable[[Rows], str]
    """A sentence from the rows of the file."""


def beside(
    column: str, name: str, direction: str, cases: Sequence[str], length: int | None = None
) -> Callable[[Rows], str]:
    """How many times as long another system takes as attndsl.

    Args:
        column: Column of the result file, without ``_ms``.
        name: The system in words.
        direction: ``forward`` or ``backward``.
        cases: Names of the programs that count.
        length: Rows of this length alone.
    """

    def answer(rows: Rows) -> str:
        found = [
            row[f"{column}_ms"] / row["attndsl_ms"]
            for row in rows
            if row["direction"] == direction
            and row["case"] in cases
            and row.get(f"{column}_ms") is not None
            and row["attndsl_ms"] is not None
            and (length is None or row["S"] == length)
        ]
        if not found:
            return "not measured"
        return f"{name} takes {span(found)} times as long ({count(found)})"

    return answer


def _learned(rows: Rows) -> str:
    found = [row["cost"] for row in rows if row["case"] in _LEARNED]
    return f"a backward with them takes {span(found)} times as long as without ({count(found)})"


def _deterministic(rows: Rows) -> str:
    found = [row["deterministic_ms"] / row["attndsl_ms"] for row in rows]
    return f"a backward takes {span(found)} times as long with the option ({count(found)})"


def _odd(rows: Rows) -> str:
    found = [row["cost"] for row in rows]
    return f"an odd shape takes {span(found)} times as long as an even one ({count(found)})"


def _start(rows: Rows) -> str:
    parts = []
    for cache in ("cold", "warm"):
        own = {
            system: [
                row["first_step_ms"] / 1000
                for row in rows
                if (row["system"], row["cache"]) == (system, cache) and "first_step_ms" in row
            ]
            for system in ("attndsl", "flex")
        }
        ours, theirs = (f"{min(x):.1f} to {max(x):.1f} s" if x else "" for x in own.values())
        parts.append(f"{ours} with {cache} caches, FlexAttention {theirs}")
    return "; ".join(parts)


def _short(direction: str) -> Callable[[Rows], str]:
    def answer(rows: Rows) -> str:
        found = [
            row["best_device"]
            for row in rows
            if row.get("direction") == direction and row["best_device"] is not None
        ]
        behind = sum(ratio < 1.0 for ratio in found)
        return (
            "the faster one of cuDNN and FlashAttention-2, or FlexAttention where neither runs, "
            f"takes {span(found)} times as long, {geometric_mean(found):.2f} in the geometric mean "
            f"of {len(found)} shapes, and is faster at {behind}"
        )

    return answer


def _tuned(rows: Rows) -> str:
    found = [row["gain"] for row in rows if "gain" in row]
    return (
        f"with the tiles that are chosen a call takes {span(found)} times as long as with those "
        f"that `tune` finds ({len(found)} lines)"
    )


def _step(rows: Rows) -> str:
    times = {row["attention"]: row["step_ms"] for row in rows}
    own = times.pop("attndsl")
    names = {"sdpa": "SDPA", "flex": "FlexAttention"}
    parts = [f"with {names[name]} {time / own:.2f} times" for name, time in times.items()]
    return f"a step takes {' and '.join(parts)} as long"


def _lists(rows: Rows) -> str:
    found = {row["what"]: row for row in rows}
    step, forward, backward = (found[what] for what in ("step", "forward", "backward"))
    return (
        f"a step of {step['layers']} layers takes {step['cost']:.2f} times as long where each call "
        f"makes its own, a forward {forward['cost']:.2f} times; FlexAttention takes "
        f"{forward['ahead']:.2f} times as long forward and {backward['ahead']:.2f} times backward"
    )


def _training(rows: Rows) -> str:
    steps = {(row["model"], row["attention"]): row["step_ms"] for row in rows if "step_ms" in row}
    parts = []
    for way, name in (("sdpa", "SDPA"), ("flex", "FlexAttention")):
        found = [
            step / steps[model, "attndsl"] for (model, used), step in steps.items() if used == way
        ]
        parts.append(f"with {name} {span(found)} times")
    return f"a step takes {' and '.join(parts)} as long ({count(found)})"


def _generation(rows: Rows) -> str:
    def speed(row: Mapping[str, Any]) -> float:
        return next(
            one["tokens_per_s"]
            for one in rows
            if (one["batch"], one["context"]) == (row["batch"], row["context"])
            and one["implementation"] == "attndsl"
        )

    found = [speed(row) / row["tokens_per_s"] for row in rows if row["implementation"] == "sdpa"]
    return f"with SDPA a step takes {span(found)} times as long ({count(found)})"


def _plans(rows: Rows) -> str:
    found = [row["plan_ms"] for row in rows if row.get("plan_ms") is not None]
    other = [row["flex_compiled_ms"] for row in rows if row.get("plan_ms") is not None]
    return (
        f"closed forms take {min(found):.0f} to {max(found):.0f} ms, compiled `create_block_mask` "
        f"{min(other):.0f} to {max(other):.0f} ms"
    )


def _calls(rows: Rows) -> str:
    found = [row["call_us"] for row in rows]
    return f"a call takes {min(found):.0f} to {max(found):.0f} us of host time"


def _in_graphs(rows: Rows) -> str:
    found = [row["above_us"] for row in rows if row["attention"] == "attndsl"]
    return (
        f"a layer's forward and backward take {min(found):.0f} to {max(found):.0f} us of host time "
        "more than with SDPA"
    )


def _on_cpus(rows: Rows) -> str:
    kinds = {"causal": "causal", "growing cache": "a query over a growing cache"}
    parts: dict[str, list[float]] = {}
    for row in rows:
        kind = kinds.get(row["case"], "other masks and scores")
        parts.setdefault(kind, []).append(row["speedup"])
    return "SDPA takes " + ", ".join(
        f"{span(found)} times as long for {name}" for name, found in parts.items()
    )


BESIDE_FA4 = "Beside FlashAttention-4 and cuDNN"
BESIDE_FLEX = "Masks and scores beside FlexAttention"
DETERMINISTIC = "Deterministic gradients"
OTHER_SHAPES = "Other shapes"
WIDE_HEADS = "Head dim 256"
GRADIENTS = "Gradients of captures"
ODD_SHAPES = "Odd shapes"
SHORT_SHAPES = "Short shapes"
DECODING = "Decoding"
SERVING = "Serving over pages"
PORTABLE = "Portable kernels"
OTHER_FILES = "Host and CPU"

_SECTIONS = {decoding.DECODE: DECODING, decoding.SERVING: SERVING}
QUESTIONS = (
    Question(
        "Forward, full and causal", "attention", BESIDE_FA4,
        beside("fa4", "FlashAttention-4", "forward", _PLAIN),
    ),
    Question(
        "Forward, full and causal", "attention", BESIDE_FA4,
        beside("cudnn", "cuDNN", "forward", _PLAIN),
    ),
    Question(
        "Backward, full and causal", "attention", BESIDE_FA4,
        beside("fa4", "FlashAttention-4", "backward", _PLAIN),
    ),
    Question(
        "Backward, full and causal", "attention", BESIDE_FA4,
        beside("cudnn", "cuDNN", "backward", _PLAIN),
    ),
    Question(
        "Soft cap, forward", "attention", BESIDE_FA4,
        beside("fa4", "FlashAttention-4", "forward", ("softcap",)),
    ),
    Question(
        "Soft cap, backward", "attention", BESIDE_FA4,
        beside("fa4", "FlashAttention-4", "backward", ("softcap",)),
    ),
    Question(
        "Masks, forward", "sparse_attention", BESIDE_FLEX,
        beside("flex", "FlexAttention", "forward", _MASKS),
    ),
    Question(
        "Masks, backward", "sparse_attention", BESIDE_FLEX,
        beside("flex", "FlexAttention", "backward", _MASKS),
    ),
    Question("Learned biases and factors", "gradients", GRADIENTS, _learned),
    Question("`deterministic=True`", "deterministic", DETERMINISTIC, _deterministic),
    Question(
        "Short, 512 rows, forward", "other_shapes", OTHER_SHAPES,
        beside("cudnn", "cuDNN", "forward", _PLAIN, _SHORT),
    ),
    Question(
        "Short, 512 rows, backward", "other_shapes", OTHER_SHAPES,
        beside("cudnn", "cuDNN", "backward", _PLAIN, _SHORT),
    ),
    Question(
        "Head dim 256, forward", "wide_heads", WIDE_HEADS,
        beside("cudnn", "cuDNN", "forward", _PLAIN),
    ),
    Question(
        "Head dim 256, backward", "wide_heads", WIDE_HEADS,
        beside("cudnn", "cuDNN", "backward", _PLAIN),
    ),
    Question("Odd shapes", "odd_shapes", ODD_SHAPES, _odd),
    Question("Short shapes, device time, forward", "short", SHORT_SHAPES, _short("forward")),
    Question("Short shapes, device time, backward", "short", SHORT_SHAPES, _short("backward")),
    Question("Tiles of short shapes", "short_tune", SHORT_SHAPES, _tuned),
    *(Question(text, file, _SECTIONS[file], answer) for text, file, answer in decoding.ANSWERS),
    Question("Start to first step", "start_cuda", OTHER_FILES, _start),
    Question("Training step of a GPT", "gpt", OTHER_FILES, _step),
    Question("Training steps of five models", "training", OTHER_FILES, _training),
    Question("Steps of `generate`, Llama 1B", "huggingface_speed", OTHER_FILES, _generation),
    Question("Lists of data masks that are kept", "lists", OTHER_FILES, _lists),
    Question("Tiles of a mask of 1048576 rows", "sparsity", OTHER_FILES, _plans),
    Question("A call without its kernel, in Python", "call_overhead", OTHER_FILES, _calls),
    Question(
        "A compiled layer without its kernels", "graph_overhead", OTHER_FILES, _in_graphs,
    ),
    Question("CPUs, beside SDPA", "cpu", OTHER_FILES, _on_cpus),
)  # fmt: skip
"""In the order of the table."""


def anchor(heading: str) -> str:
    """The link to a section of the same page."""
    return "#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def summary(load: Callable[[str], dict[str, Any] | None]) -> str:
    """The table: a question, its answer, the result file and its section.

    Args:
        load: The content of a result file by its name, or None where there is none.
    """
    lines = [["question", "answer", "result file"], ["---"] * 3]
    for question in QUESTIONS:
        results = load(question.file)
        if results is not None:
            link = f"[`{question.file}.json`]({anchor(question.section)})"
            lines.append([question.text, question.answer(results["rows"]), link])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
