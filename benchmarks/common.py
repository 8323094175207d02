"""What the benchmarks share: facts of the machine, and result files."""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results"


def machine(device: str) -> str:
    """Name of the GPU or CPU."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or "CPU"


@cache
def with_bytecode() -> dict[str, str]:
    """The environment of processes that find the package's bytecode, as where pip installed it.

    Without bytecode a process compiles all of the package's Python first.
    """
    import attndsl
    import attndsl.backends

    for package in (attndsl, attndsl.backends):
        compileall.compile_dir(package.__path__[0], quiet=1)
    return {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def versions() -> dict[str, Any]:
    """Versions of all that has a part in the figures."""
    import torch

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cudnn": torch.backends.cudnn.version(),
        "attndsl": metadata.version("attndsl"),
        "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, with a + where files differ from it; None where that is not known.

    ``ATTNDSL_COMMIT`` says it for a copy of the files that is no checkout.
    """
    if "ATTNDSL_COMMIT" in os.environ:
        return os.environ["ATTNDSL_COMMIT"]
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(describe, cwd=RESULTS.parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def rows_with_figures(benchmark: str, path: Path | None) -> list[dict[str, Any]]:
    """What a run that was cut has left in its result file, to go on with.

    Args:
        benchmark: As for :func:`write`.
        path: As for :func:`write`.
    """
    path = path or RESULTS / f"{benchmark}.json"
    if not path.exists():
        return []
    return [row for row in json.loads(path.read_text("utf-8"))["rows"] if "why" not in row]


def write(benchmark: str, device: str, rows: list[dict[str, Any]], path: Path | None) -> Path:
    """Write a result file; called again after every row, so that nothing measured is lost.

    Args:
        benchmark: Name of the benchmark.
        device: What it ran on.
        rows: Its rows.
        path: Where to; ``benchmarks/results/BENCHMARK.json`` if None.
    """
    path = path or RESULTS / f"{benchmark}.json"
    head = {
        "benchmark": benchmark,
        "machine": machine(device),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": versions(),
        "rows": rows,
    }
    put_results(path, head)
    return path


def put_results(path: Path, results: dict[str, Any]) -> None:
    """Write a result file at once: whoever reads it, or ends this process, meets a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    part.replace(path)


def print_or_draw(
    script: str, purpose: str, output: Path, made: Callable[[], Any], text: Callable[[Any], str],
    svg: Callable[[Any], str],
) -> int:  # fmt: skip
    """The command line of a script that prints a chart, or with ``--write`` draws it.

    Args:
        script: Its file.
        purpose: What it is for, in its first line.
        output: Where the picture lies.
        made: The chart of the committed results; a ``ValueError`` says what is wrong with these.
        text: The chart as text.
        svg: The chart as a picture.

    Returns:
        The exit status: 1 if there is no chart.
    """
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    shown = output.relative_to(RESULTS.parents[1])
    parser.add_argument("--write", action="store_true", help=f"draw {shown}")
    options = parser.parse_args()
    try:
        found = made()
    except ValueError as error:
        print(f"{Path(script).name}: {error}", file=sys.stderr)
        return 1
    if options.write:
        output.write_text(svg(found), "utf-8")
    else:
        print(text(found), end="")
    return 0


def print_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print ``columns`` of ``rows``, aligned; a dash for what is null."""
    texts = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, each)) for each in zip(columns, *texts, strict=True)]
    for cells in (columns, *texts):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
