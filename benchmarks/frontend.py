"""Text to IR, and to what backends get, for every function of the prelude, warm.

    python benchmarks/frontend.py

Each figure is the median of at least 20 runs in one process whose parser is already built.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.frontend import TensorSpec, read
from attndsl.pipeline import lower_program
from attndsl.source import Source

import common

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = {
    "causal": "causal()",
    "causal_lower_right": "causal_lower_right()",
    "sliding_window": "sliding_window(1024)",
    "local_window": "local_window(512)",
    "prefix_lm": "prefix_lm(1024)",
    "same": "same(ids, q, kv)",
    "same_1d": "same_1d(row, q, kv)",
    "document_causal": "document_causal(ids)",
    "dilated": "dilated(1024, 4)",
    "strided": "strided(512, 64)",
    "block_diagonal": "block_diagonal(128)",
    "block_causal": "block_causal(128)",
    "global_tokens": "global_tokens(16)",
    "valid_keys": "valid_keys(lengths)",
    "block_diffusion": "block_diffusion(4096, 64)",
    "in_window": "in_window(q, kv, kv_len, 13)",
    "natten2d": "natten2d(128, 128, 13, 13)",
    "sta2d": "sta2d(16, 64, 3, 3)",
    "sta3d": "sta3d(8, 8, 64, 2, 2, 2)",
    "alibi": "score + alibi()",
    "softcap": "softcap(score, 50.0)",
    "rel_bias": "score + rel_bias(table)",
    "t5_bucket_causal": "score + near[h, t5_bucket_causal(q - kv, 32, 128)]",
    "t5_bucket": "score + near[h, t5_bucket(kv - q, 32, 128)]",
    "window_start": "window_start(q, kv_len, 13) <= kv",
}
TENSORS = {
    "ids": TensorSpec(("batch", "kv_len"), "int"),
    "row": TensorSpec(("kv_len",), "int"),
    "lengths": TensorSpec(("batch",), "int"),
    "table": TensorSpec(("heads", "2 * kv_len")),
    "near": TensorSpec(("heads", 32)),
}


def median_us(function: Callable[[], object]) -> float:
    """Median microseconds of at least 20 runs and 0.1 s."""
    function()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 20 or time.perf_counter() - begin < 0.1:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure(name: str, text: str) -> dict[str, Any]:
    """The row of one program."""
    words = re.findall(r"\w+", text)
    declared = {key: spec for key, spec in TENSORS.items() if key in words}
    source = Source(text)
    program = read(source, declared)
    return {
        "program": name,
        "read_us": median_us(lambda: read(source, declared)),
        "lower_us": median_us(lambda: lower_program(program)),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    rows = [measure(name, text) for name, text in PROGRAMS.items()]
    common.write("frontend", "cpu", rows, options.output)
    common.print_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
