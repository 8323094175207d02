"""The measured figures in README.md and pages of docs/, from the result files.

python benchmarks/table.py           # print them
python benchmarks/table.py --write   # put them between the marks of each file
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import against
import decoding
import relative
import summary
from decoding import conditions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin (benchmarks/table.py --write) -->", "<!-- figures: end -->"
COLUMNS = {
    "attndsl": "attndsl",
    "deterministic": "deterministic",
    "flex": "FlexAttention",
    "cudnn": "cuDNN",
    "fa2": "FA-2",
    "fa4": "FA-4",
}
_OF_GRADIENTS = (
    "The rows `dropout` and `sigmoid` compare the plain causal program with one that adds the "
    "feature, and include both forward passes. The row `jvp` compares a forward pass with one that "
    "also computes the tangents of the output and the log-sum-exp along q, k and v."
)
_PORTABLE = "attndsl uses these Triton kernels on GPUs other than the H100 and H200."
_OF_LISTS = (
    "`step` runs 4 attention layers forward and backward; `forward` and `backward` run one call."
)
_OF_ODD = "odd shapes and the next larger aligned shapes, in ms, bf16"
_GRADIENTS = {
    "case": "case", "without_ms": "without", "with_ms": "with", "cost": "with / without",
    "plain_forward_ms": "forward without", "forward_ms": "with",
    "flex_without_ms": "FlexAttention without", "flex_ms": "with",
}  # fmt: skip
_ODD = {
    "what": "odd shape", "case": "mask", "direction": "direction", "odd_ms": "odd",
    "even_ms": "aligned", "cost": "odd / aligned",
}  # fmt: skip
_START = {
    "program": "program", "system": "system", "device": "device", "cache": "caches",
    "first_output_ms": "first output, ms", "first_step_ms": "first step, ms",
    "context_ms": "CUDA context, ms", "import_torch_ms": "import torch, ms",
}  # fmt: skip
_STEP = {
    "attention": "attention", "step_ms": "step, ms", "tokens_per_second": "tokens per second",
    "peak_gb": "peak memory, GB",
}  # fmt: skip
_GENERATION = {
    "implementation": "implementation", "batch": "batch", "context": "context",
    "tokens_per_s": "tokens per second", "ms_per_step": "step, ms",
}  # fmt: skip
_TRAINING = {
    "model": "model", "attention": "attention", "step_ms": "step, ms",
    "ratio": "speed vs. SDPA", "peak_gb": "peak memory, GB",
}  # fmt: skip
_COSTS = {
    "case": "program", "direction": "direction", "ms": "measured, ms",
    "predicted_ms": "predicted, ms", "ratio": "measured / predicted",
}  # fmt: skip
_BUNDLES = {
    "program": "program", "with": "with", "forward_s": "forward, s", "backward_s": "backward, s",
    "compiled": "compiled",
}  # fmt: skip
_TILES = {
    "case": "mask", "plan_ms": "closed form, ms", "find_ms": "lists, ms",
    "flex_compiled_ms": "create_block_mask, compiled, ms", "flex_eager_length": "eager: length",
    "flex_eager_ms": "eager, ms",
}  # fmt: skip
_CALLS = {
    "program": "program", "call_us": "call, us", "with_grad_us": "with grad, us",
    "with_backward_us": "with backward, us",
}  # fmt: skip
_IN_GRAPHS = {
    "model": "model", "attention": "attention", "guards": "guards",
    "forward_us": "forward, us", "backward_us": "backward, us", "above_us": "more than SDPA, us",
}  # fmt: skip
_LISTS = {
    "what": "measured", "kept_ms": "reused lists, ms", "new_ms": "new documents, ms",
    "anew_ms": "lists built in each call, ms", "flex_ms": "FlexAttention, ms",
}  # fmt: skip
_OF_SHORT = "device time of one call in a CUDA graph"
_SHORT = {
    "name": "shape", "program": "program", "direction": "direction",
    "attndsl_device": "attndsl, us", "cudnn_device": "cuDNN, us", "fa2_device": "FA-2, us",
    "flex_device": "FlexAttention, us", "limit_us": "limit, us",
    "attndsl_eager": "attndsl from Python, us", "best_eager": "speed vs. best peer from Python",
}  # fmt: skip
_TUNED = {
    "name": "shape", "direction": "direction", "chosen_us": "default, us",
    "tuned_us": "`tune`, us", "gain": "default / `tune`",
}  # fmt: skip
_ON_CPUS = {
    "case": "mask or score", "direction": "direction", "S": "length", "attndsl_ms": "attndsl, ms",
    "sdpa_ms": "SDPA, ms",
}  # fmt: skip
FAR = 100
"""Quotient from which on a time is said in words too."""
OPTIONS = {
    "sparse_attention": "--columns attndsl,flex,cudnn --cases causal,softcap,alibi,window1024,"
    "documents1000,prefix1024 --shapes 2x16x8192x128",
    "attention": "--columns attndsl,fa4,cudnn --cases full,causal,softcap --shapes 1x16x16384x128,"
    "1x32x16384x64,2x16x8192x128,4x16x4096x128,2x32x8192x64,4x32x4096x64",
}
"""Options of benchmarks/attention.py that repeat the first rows of a result file."""
SHAPE = ("B", "H", "Hkv", "S", "D")
DIRECTIONS = {"forward": "forward", "backward": "backward"}


def shapes(results: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shapes measured, in the order of the file."""
    found = [tuple(row[key] for key in SHAPE) for row in results["rows"]]
    return list(dict.fromkeys(found))


def table(results: dict[str, Any], shape: tuple[int, ...]) -> str:
    """Median milliseconds at one shape, a row a case; a dash where a system cannot run it."""
    rows = {
        (row["case"], row["direction"]): row
        for row in results["rows"]
        if tuple(row[key] for key in SHAPE) == shape
    }
    # Columns that nothing was measured in at this shape are none.
    columns = [
        (direction, key)
        for direction in DIRECTIONS
        for key in COLUMNS
        if any(
            row.get(f"{key}_ms") is not None
            for (_, found), row in rows.items()
            if found == direction
        )
    ]
    head = ["ms", *(f"{DIRECTIONS[d]}: {COLUMNS[key]}" for d, key in columns)]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for case in dict.fromkeys(case for case, _ in rows):
        cells = [_ms(rows.get((case, d), {}).get(f"{key}_ms")) for d, key in columns]
        lines.append([case, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(shape: tuple[int, ...]) -> str:
    """A shape in words."""
    batch, heads, kv_heads, length, dim = shape
    grouped = f" on {kv_heads} kv heads" if kv_heads != heads else ""
    return f"Batch {batch}, {heads} heads{grouped}, length {length}, head dim {dim}, bf16"


def far(results: dict[str, Any], shape: tuple[int, ...]) -> str:
    """In words, the times of other systems that are far from attndsl's; empty if none is."""
    found = [
        f"For `{row['case']}`, attndsl's {row['direction']} pass is "
        f"{row[f'{key}_ms'] / row['attndsl_ms']:.0f}x faster than {COLUMNS[key]}'s."
        for row in results["rows"]
        if tuple(row[size] for size in SHAPE) == shape
        for key in COLUMNS
        if key != "attndsl" and row.get(f"{key}_ms") and row["attndsl_ms"]
        if row[f"{key}_ms"] > FAR * row["attndsl_ms"]
    ]
    return " ".join(found)


def tables(name: str) -> str:
    """A table for each shape of a result file of benchmarks/attention.py."""
    results = load(name)
    if results is None:
        return ""
    parts = [f"`{name}.json`: times in ms, on one {conditions(results)}"]
    if name in OPTIONS:
        parts.append(
            f"To repeat the first tables, run `python benchmarks/attention.py {OPTIONS[name]}`."
        )
    for shape in shapes(results):
        parts += [f"{size(shape)}:", table(results, shape), far(results, shape)]
    return "\n\n".join(part for part in parts if part)


def rows(name: str, title: str, columns: dict[str, str], note: str = "") -> str:
    """A table with a line for each row of a result file, ``columns`` of it by their headings.

    The device of a row that was measured elsewhere than the others is its machine. A ``note``
    explains rows.
    """
    results = load(name)
    if results is None:
        return ""
    lines = [list(columns.values()), ["---"] * len(columns)]
    for row in results["rows"]:
        if len(columns.keys() & row.keys()) > 1:  # The line of ceilings has a name alone.
            own = row | ({"device": row["machine"]} if "machine" in row else {})
            lines.append([_cell(own.get(key)) for key in columns])
    head = f"`{name}.json`: {title}; one {conditions(results)} {note}".rstrip()
    return f"{head}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headed(section: summary.Section, *parts: str) -> tuple[summary.Section, str]:
    """A section with its heading."""
    inside = (part for part in parts if part)
    return section, "\n\n".join([f"## {section.heading}", *inside])


def _once_measured(section: summary.Section, text: str) -> list[tuple[summary.Section, str]]:
    """A section whose result file may be missing."""
    return [headed(section, text)] if text else []


def load(name: str) -> dict[str, Any] | None:
    """Committed results of benchmarks/attention.py, if any."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def replace(text: str, part: str) -> str:
    """``text`` with ``part`` between the marks.

    Raises:
        ValueError: It has not both marks, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the marks {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def sections() -> list[tuple[summary.Section, str]]:
    """The sections of all pages of docs/results that have tables of this script, in their order."""
    return [
        headed(summary.BESIDE_FLEX, tables("sparse_attention")),
        headed(summary.BESIDE_FA4, tables("attention")),
        headed(summary.DETERMINISTIC, tables("deterministic")),
        headed(summary.OTHER_SHAPES, tables("other_shapes")),
        headed(summary.WIDE_HEADS, tables("wide_heads")),
        *_once_measured(summary.AGAINST, against.section(load(against.NAME))),
        headed(summary.PORTABLE, _PORTABLE, tables("portable"), tables("portable_sparse")),
        headed(
            summary.GRADIENTS,
            rows(
                "gradients",
                "backward passes with and without gradients of captured tensors, bf16, ms",
                _GRADIENTS,
                _OF_GRADIENTS,
            ),
        ),
        headed(summary.ODD_SHAPES, rows("odd_shapes", _OF_ODD, _ODD)),
        headed(
            summary.SHORT_SHAPES,
            rows("short", _OF_SHORT, _SHORT),
            rows("short_tune", f"default tiles and tuned tiles, {_OF_SHORT}", _TUNED),
        ),
        headed(summary.DECODING, decoding.decode_tables(load(decoding.DECODE))),
        headed(summary.SERVING, decoding.serving_tables(load(decoding.SERVING))),
        headed(
            summary.START,
            rows("start_cuda", "process start-up on a GPU", _START),
            rows("start_cpu", "process start-up on a CPU", _START),
        ),
        headed(summary.GPT, rows("gpt", "a training step of a GPT with 124 M parameters", _STEP)),
        headed(summary.MODELS, rows("training", "training steps of five models", _TRAINING)),
        headed(summary.GENERATION, generation()),
        headed(
            summary.LISTS,
            rows("lists", "masks that compare documents or images", _LISTS, _OF_LISTS),
        ),
        headed(
            summary.SPARSITY,
            rows("sparsity", "finding the live tiles of masks with 1,048,576 rows", _TILES),
        ),
        headed(summary.CALLS, rows("call_overhead", "host time of a call", _CALLS)),
        headed(
            summary.IN_GRAPHS, rows("graph_overhead", "host time of a compiled layer", _IN_GRAPHS)
        ),
        headed(
            summary.ON_CPUS,
            rows("cpu", "the CPU backend and SDPA, fp32, 4 heads, head dim 64", _ON_CPUS),
        ),
    ]


def pages() -> dict[Path, str]:
    """The generated text of each page of docs/results with tables of this script."""
    found: dict[str, list[str]] = {}
    for section, text in sections():
        found.setdefault(section.page, []).append(text)
    return {
        ROOT / "docs" / "results" / f"{page}.md": "\n\n".join(parts)
        for page, parts in found.items()
    }


def generation() -> str:
    """Tokens a second of ``generate``, for docs/huggingface.md."""
    title = (
        "`generate` with a randomly initialized Llama 3.2 1B, in bf16, with a static cache and "
        "compiled steps"
    )
    return rows("huggingface_speed", title, _GENERATION)


def targets() -> dict[Path, str]:
    """What stands between the marks of each file."""
    decode, serving = load(decoding.DECODE), load(decoding.SERVING)
    return {
        ROOT / "README.md": relative.headlines(load),
        ROOT / "docs" / "compared.md": relative.everything(load),
        ROOT / "docs" / "serving.md": decoding.points(decode, serving),
        ROOT / "docs" / "deployment.md": rows(
            "bundles",
            "the first forward and backward passes of a fresh process, including the import of "
            "attndsl; 16 heads, 4096 rows, D128",
            _BUNDLES,
        ),
        ROOT / "docs" / "huggingface.md": generation(),
        ROOT / "docs" / "dev" / "kernels.md": decoding.of_memory(decode, serving),
        ROOT / "docs" / "dev" / "costs.md": rows(
            "costs", "measured times and those that a model predicts", _COSTS
        ),
        ROOT / "docs" / "benchmarks.md": summary.summary(load),
        **pages(),
    }


def main() -> None:
    """Print the tables, or write them into the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change README.md and docs")
    options = parser.parse_args()
    for path, part in targets().items():
        if options.write:
            path.write_text(replace(path.read_text("utf-8"), part), "utf-8")
        else:
            print(f"{path.relative_to(ROOT)}:\n\n{part}\n")


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) else _ms(value)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
