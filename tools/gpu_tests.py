"""Run the tests that need a GPU, on all GPUs of this machine, and record each result as it comes.

One pytest has many workers. Each worker has one of the GPUs. All of them share the folders of
compiled kernels, so that a kernel is compiled once. Tests of one function and program run one after
another on one worker, since several workers would compile the same kernels at the same time. Tests
of several GPUs follow. What failed runs once more with few workers, since others can have had the
memory that it wanted. ``gpu_worker.py`` is the part inside of pytest.

The record has a line of JSON a test: ``test``, ``outcome``, what it took, and the end of a failure.
A run that was cut off goes on with ``--continue RECORD``: what passed or was skipped stays out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu_tests"
USES = re.compile(r"\b(gpu|place|kernels|device)\b")
"""What a file says whose tests may need a GPU: the mark, or a fixture that has cases for GPUs."""
FEW = 2
"""Workers a GPU for what failed before."""
EVERY = 15.0
"""Seconds between two lines of progress."""
CACHE_MB = 8192
"""Of texts of kernels, which no test of the run removes."""


class Run:
    """One run: its record, its environment and the time that it has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.record: Path = (arguments.go_on or arguments.record).resolve()
        self.marks: str = arguments.marks
        self.paths: list[str] = arguments.paths or files_with_gpu_tests()
        self.begin = time.monotonic()
        self.end = self.begin + 60 * arguments.minutes if arguments.minutes else None
        self.gpus = gpus()
        self.workers: int = arguments.workers * max(1, len(self.gpus))
        self.selected: list[str] = []
        self.several: set[str] = set()
        """Tests that use several GPUs."""

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.begin

    def collect(self) -> None:
        """Find what to run: what the record does not say has passed or was skipped."""
        listed = BUILD / "collected.json"
        command = self._pytest("-m", self.marks, "--collect-only", "-q", "--list", str(listed))
        found = subprocess.run(command, cwd=ROOT, env=self._environment(), capture_output=True,
                               text=True)  # fmt: skip
        if found.returncode:
            sys.exit(f"gpu_tests: pytest cannot collect tests:\n{found.stdout}{found.stderr}")
        lists = json.loads(listed.read_text("utf-8"))
        names = [*lists["one"], *lists["several"]]
        self.several = set(lists["several"])
        done = {name for name, line in last(read(self.record)).items() if is_done(line)}
        self.selected = [name for name in names if name not in done]
        print(f"gpu_tests: {len(self.selected)} tests, {len(names) - len(self.selected)} more are "
              f"done; {self.workers} workers on {len(self.gpus)} GPUs; {self.seconds:.0f} s; "
              f"record: {self.record}", flush=True)  # fmt: skip

    def go(self, names: list[str], workers: int) -> bool:
        """Run tests, with ``workers`` or, if 0, in one process that has all GPUs.

        Returns:
            Whether there was time for all of them.
        """
        only = BUILD / "only.txt"
        only.write_text("\n".join(names), "utf-8")
        files = sorted({name.partition("::")[0] for name in names})
        command = self._pytest("-m", self.marks, "--only", str(only), "--record", str(self.record),
                               "-q", "--tb=short", files=files)  # fmt: skip
        if workers:
            command += ["-n", str(workers), "--dist", "worksteal"]
            command += ["--max-worker-restart", "1000"]
        with (BUILD / "pytest.log").open("a") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(), stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                return self._follow(process, len(names))
            finally:
                stop(process)

    def _follow(self, process: subprocess.Popen[bytes], number: int) -> bool:
        progress = Progress(self.record, number)
        while process.poll() is None:
            if self.end is not None and time.monotonic() > self.end:
                print(f"gpu_tests: time is up after {self.seconds:.0f} s", flush=True)
                return False
            time.sleep(0.5)
            progress.tell(self.seconds, process.poll() is not None)
        progress.tell(self.seconds, True)
        # 0: all passed. 1: some failed. 5: none was selected. The record has all of these.
        if process.returncode not in (0, 1, 5):
            print(f"gpu_tests: pytest ended with {process.returncode}; see {BUILD}/pytest.log")
        return process.returncode in (0, 1, 5)

    def _pytest(self, *options: str, files: list[str] | None = None) -> list[str]:
        # Some installations have a plugin that refuses runs of several workers.
        return [sys.executable, "-P", "-m", "pytest", "-p", "gpu_worker", "-p", "no:benchmark",
                "-p", "no:cacheprovider", *options, *(files or self.paths)]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        folders = {"ATTNDSL_TESTS_CACHE": BUILD / "kernels", "TRITON_CACHE_DIR": BUILD / "triton"}
        found = os.environ | {name: str(folder) for name, folder in folders.items()}
        # Workers would each read and rewrite all test files anew.
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        tools = str(ROOT / "tools")
        path = found.get("PYTHONPATH")
        return found | {
            "PYTHONPATH": f"{tools}{os.pathsep}{path}" if path else tools,
            "PYTHONPYCACHEPREFIX": str(BUILD / "pycache"),
            "ATTNDSL_CACHE_MB": str(CACHE_MB),
            "GPU_TESTS_DEVICES": ",".join(self.gpus),
            "OMP_NUM_THREADS": "1",
        }


class Progress:
    """Prints how far a run is, and failures as they come."""

    def __init__(self, record: Path, number: int) -> None:
        self._record, self._number = record, number
        self._read = len(read(record))
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._said = time.monotonic()

    def tell(self, seconds: float, ended: bool) -> None:
        """Print failures since the last call, and sums at the end or after some seconds."""
        lines = read(self._record)[self._read :]
        self._read += len(lines)
        for line in lines:
            self._outcomes[line["outcome"]] += 1
            if line["outcome"] == "failed":
                reason = line["text"].strip().rpartition("\n")[2]
                print(f"FAILED {line['test']}: {reason[:200]}", flush=True)
        if ended or time.monotonic() - self._said >= EVERY:
            self._said = time.monotonic()
            sums = ", ".join(f"{number} {what}" for what, number in self._outcomes.items())
            done = self._outcomes.total()
            print(f"{seconds:5.0f} s: {done} of {self._number}; {sums}", flush=True)


def read(record: Path) -> list[dict[str, Any]]:
    """Lines of a record, without those that were cut off while they were written."""
    found = []
    for line in record.read_text("utf-8").split("\n")[:-1] if record.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def last(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last line of each test."""
    return {line["test"]: line for line in lines}


def is_done(line: dict[str, Any]) -> bool:
    """Whether a test need not run again."""
    return line["outcome"] in ("passed", "skipped")


def gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")[: torch.cuda.device_count()]
    return [str(number) for number in range(torch.cuda.device_count())]


def files_with_gpu_tests() -> list[str]:
    """Test files that may have some."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if USES.search(file.read_text("utf-8"))]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run and its workers."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_all(run: Run) -> bool:
    """Run what is to run, and what failed again. Returns whether there was time for all."""
    one = [name for name in run.selected if name not in run.several]
    several = [name for name in run.selected if name in run.several]
    in_time = run.go(one, run.workers) if one else True
    if in_time and several:
        in_time = run.go(several, 0)
    failed = {name for name, line in last(read(run.record)).items() if not is_done(line)}
    again = [name for name in one if name in failed]
    if in_time and again:
        print(f"gpu_tests: {len(again)} that failed run again, {FEW} at a time on each GPU")
        in_time = run.go(again, FEW * max(1, len(run.gpus)))
    return in_time


def _outcome(name: str, final: dict[str, dict[str, Any]], fresh: set[str]) -> str:
    """What became of a test; ``fresh`` are those that this run has a line of."""
    if name in fresh:
        return str(final[name]["outcome"])
    return f"{final[name]['outcome']} before and not run" if name in final else "not run"


def summarise(run: Run, before: int) -> int:
    """Print the result of all tests that were selected. Returns the exit status."""
    lines = read(run.record)
    final = last(lines)
    fresh = {line["test"] for line in lines[before:]}
    outcomes = collections.Counter(_outcome(name, final, fresh) for name in run.selected)
    failed_before = {line["test"] for line in lines[before:] if line["outcome"] == "failed"}
    again = sorted(name for name in failed_before if is_done(final[name]))
    for name in again:
        print(f"FAILED ONCE {name}")
    for name in run.selected:
        if name in fresh and not is_done(final[name]):
            print(f"FAILED {name}\n{final[name]['text']}")
    large = sorted(final.values(), key=lambda line: -line.get("megabytes", 0))[:10]
    for line in large:
        if line.get("megabytes"):
            print(f"{line['megabytes']:6d} MB {line['test']}")
    sums = ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items()))
    print(f"gpu_tests: {sums or 'nothing to run'}; {len(again)} failed once and then passed; "
          f"{run.seconds:.0f} s; record: {run.record}")  # fmt: skip
    return 0 if set(outcomes) <= {"passed", "skipped"} else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and tests; all if not given")
    parser.add_argument("-m", dest="marks", default="gpu", help="marks, as pytest has them")
    parser.add_argument("--workers", type=int, default=14, help="on each GPU")
    parser.add_argument("--minutes", type=float, help="after which the run ends itself")
    parser.add_argument("--record", type=Path, default=BUILD / "record.jsonl")
    parser.add_argument("--continue", dest="go_on", metavar="RECORD", type=Path)
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    if arguments.go_on is None:
        arguments.record.unlink(missing_ok=True)
    run = Run(arguments)
    before = len(read(run.record))
    run.collect()
    run_all(run)
    return summarise(run, before)


if __name__ == "__main__":
    sys.exit(main())
