"""Run seeded mutants of the product's code against the tests that are for that code.

``mutants.py`` draws the mutants. Each is written into a copy of the working tree, whose files are
as they were again afterwards: the working tree itself never changes. A mutant is *killed* if a test
fails, or if tests that take seconds take a quarter of an hour. It *survives* if all pass, and its
change is printed: a survivor that changes results asks for a test.

``TESTS`` says which tests are for which package. Those that mention the changed module come first,
and there are as many as take two minutes. A file of tests that fails runs once more without any
change, unless it has done so before: if it fails then, it judges no mutant.

The record has a line of JSON a mutant: ``mutant``, ``outcome``, ``seconds``, ``tests``, ``by`` (the
test that failed) and ``diff``. A run goes on where one with the same record was cut off. A survivor
that no test can kill, as results are the same, is noted with ``--equivalent NAME --reason WHY``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mutants import FOLDERS, ROOT, Mutant, drawn, mutants_of

BUILD = ROOT / "build" / "mutate"
TIMES = BUILD / "files.jsonl"
_OF_SERVING = ("tests/behaviours/test_serving.py", "tests/behaviours", "tests/backends/triton")
TESTS = {
    "attndsl/building": ("tests/building", "tests/runtime/test_bundles.py"),
    "attndsl/cli/build_command": ("tests/building",),
    "attndsl/cli": ("tests/cli", "tests/test_cli.py", "tests/test_cli_output.py"),
    "attndsl/inspection/reference_check.py": ("tests/inspection/test_reference_check.py",
                                              "tests/inspection/test_judging.py"),
    "attndsl/compat": ("tests/libraries",),
    "attndsl/config": ("tests/config", "tests/test_api.py", "tests/test_hostile_files.py"),
    "attndsl/editors": ("tests/editors",),
    "attndsl/flex": ("tests/flex", "tests/flex/test_flex.py"),
    "attndsl/frontend": ("tests/frontend", "tests/test_program_join.py", "tests/test_cli.py"),
    "attndsl/hf": ("tests/hf",),
    "attndsl/parallel/cp_attention": ("tests/parallel/test_context_parallel.py", "tests/parallel"),
    "attndsl/parallel": ("tests/parallel", "tests/compat/test_distributed.py"),
    "attndsl/passes/tiles": ("tests/passes/tiles", "tests/fuzz/test_tiles.py",
                             "tests/behaviours/test_sparsity.py"),
    "attndsl/passes": ("tests/passes", "tests/behaviours/test_scores.py", "tests/behaviours"),
    "attndsl/picture": ("tests/test_picture.py", "tests/test_picture_command.py"),
    "attndsl/play": ("tests/play",),
    "attndsl/serving/": _OF_SERVING,
    "attndsl/call": ("tests/call", "tests/behaviours", "tests/compat"),
    "attndsl/inspection": ("tests/inspection", "tests/behaviours"),
    "attndsl/runtime": ("tests/runtime", "tests/behaviours"),
    "attndsl/torch_api": ("tests/torch_api",),
    "attndsl/torchtitan": ("tests/libraries",),
    "attndsl": ("tests/test_api.py", "tests/behaviours", "tests/call"),
    "backends/dense/dense_jvp": ("tests/call/test_chunked_autograd.py", "tests/behaviours"),
    "backends/dense": ("tests/backends/test_reference.py", "tests/backends/test_interpret.py",
                       "tests/backends/test_nan_checks.py", "tests/behaviours"),
    "backends/emit": ("tests/backends/emit", "tests/behaviours/test_scores.py"),
    "backends/engine": ("tests/backends/engine", "tests/backends/kernels"),
    "backends/gradients": ("tests/backends/gradients", "tests/behaviours/test_captures.py",
                           "tests/behaviours/test_determinism.py", "tests/behaviours"),
    "backends/hopper": ("tests/backends/hopper",),
    "backends/kernels": ("tests/backends/kernels", "tests/behaviours"),
    "backends/tiled": ("tests/backends/tiled", "tests/backends/test_cpu.py",
                       "tests/behaviours"),
    "backends/triton": ("tests/backends/triton", "tests/behaviours"),
    "backends": ("tests/backends", "tests/behaviours"),
}  # fmt: skip
"""Tests of each package, the nearest first; the longest beginning of a path counts."""
BUDGET = 120.0
"""Seconds that the tests of one mutant take, about, by what they took before."""
USUAL = 15.0
"""Seconds for a file of tests that has not run yet."""
PATIENCE = 900.0
"""Seconds after which tests hang."""
OUTCOMES = {"failed": "killed", "passed": "survived"}
"""The verdict on a mutant, by how its tests end."""
KILLED = ("killed", "hangs")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Copy:
    """A copy of the working tree, as a run imports it."""

    def __init__(self, name: str) -> None:
        self.root = BUILD / name
        shutil.rmtree(self.root, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for path in filter(None, listed.stdout.split("\0")):
            if (ROOT / path).is_file():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, self.root / path)
        for name in ("backends", "grammar"):  # Where an installation has them.
            (self.root / "attndsl" / name).symlink_to(f"../{name}")

    def test(self, files: list[str], seconds: float) -> tuple[str, str]:
        """``passed``, ``failed``, ``hangs`` or ``broken``, and the end of what pytest says."""
        report = self.root / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   "--tb=short", f"--junitxml={report}", *files]  # fmt: skip
        known = os.environ | {
            "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"
        }  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.root, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return "hangs", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # A process that dies of a signal, or an import that fails, is noticed as well.
        outcome = {0: "passed", 5: "passed"}.get(process.returncode, "failed")
        if outcome == "passed":
            self._note(report, files)
        return outcome, said[-4000:]

    def _note(self, report: Path, files: list[str]) -> None:
        """Write down how long files of tests took that all passed."""
        total = dict.fromkeys(files, 0.0)
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            if file in total:
                total[file] += float(case.get("time", 0.0))
        for file, seconds in total.items():
            append(TIMES, {"file": file, "seconds": seconds})

    @staticmethod
    def seconds() -> dict[str, float]:
        """How long files of tests took when they passed last."""
        return {line["file"]: line["seconds"] for line in read(TIMES)}


class Run:
    """One part of a run: its record, its copy and the time that it has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        part, parts = map(int, arguments.part.split("/"))
        self.record: Path = arguments.record
        self.again: bool = arguments.survivors
        every = (
            survivors(self.record)
            if self.again
            else drawn(arguments.seed, arguments.count, arguments.only)
        )
        self.mutants = every[part - 1 :: parts]
        self.end = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
        self.copy = Copy(f"tree-{part}-of-{parts}")
        self.known: dict[str, bool] = {}
        """True if files of tests that a mutant has failed pass without a change."""

    def go(self) -> None:
        """Judge all mutants that the record does not have."""
        done = set() if self.again else {line["mutant"] for line in read(self.record)}
        left = [mutant for mutant in self.mutants if mutant.name not in done]
        print(f"mutate: {len(left)} of {len(self.mutants)} mutants to judge; record: "
              f"{self.record}", flush=True)  # fmt: skip
        for number, mutant in enumerate(left, 1):
            if self.end is not None and time.monotonic() > self.end:
                print("mutate: time is up", flush=True)
                return
            line = self.judge(mutant)
            append(self.record, line)
            print(f"{number}/{len(left)} {line['outcome']:9} {line['seconds']:5.0f} s "
                  f"{mutant.name} {line['by']}", flush=True)  # fmt: skip

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """Run the tests of one mutant. Returns its line of the record."""
        place = self.copy.root / mutant.path
        text = place.read_text("utf-8")
        begin = time.monotonic()
        while True:
            files = self.judges(mutant.path)
            try:
                place.write_text(mutant.applied(text), "utf-8")
                outcome, said = self.copy.test(files, PATIENCE) if files else ("unjudged", "")
            finally:
                place.write_text(text, "utf-8")
            by = (FAILED.findall(said) or [""])[0]
            file = by.partition("::")[0]
            if outcome != "failed" or file not in files or self.passes(file):
                break
        return {
            "mutant": mutant.name, "outcome": OUTCOMES.get(outcome, outcome),
            "seconds": time.monotonic() - begin, "tests": files, "by": by,
            "diff": mutant.diff(text),
        }  # fmt: skip

    def judges(self, path: str) -> list[str]:
        """Files of tests for a module, as many as there is time for."""
        chosen, total = [], 0.0
        seconds = self.copy.seconds()
        for file in tests_of(path, self.copy.root):
            total += seconds.get(file, USUAL)
            if total > BUDGET and chosen:
                break
            if self.known.get(file, True):
                chosen.append(file)
        return chosen

    def passes(self, file: str) -> bool:
        """Tell whether a file of tests that has failed passes without a change."""
        if file not in self.known:
            outcome, said = self.copy.test([file], PATIENCE)
            self.known[file] = outcome == "passed"
            if not self.known[file]:
                print(f"mutate: {file} {outcome} as it is, and judges nothing\n{said}", flush=True)
        return self.known[file]


def tests_of(path: str, root: Path) -> list[str]:
    """Files of tests for a module: those that are named like it or mention it, then its package's.

    Shorter ones go first within each kind, since they are likely to be faster.
    """
    packages = sorted(TESTS, key=len, reverse=True)
    package = next(key for key in packages if path.startswith(key))
    stem = Path(path).stem
    named = re.compile(rf"\b{Path(path).parent.name}\.{stem}\b|\bimport .*\b{stem}\b")
    every = sorted((root / "tests").rglob("test_*.py"), key=lambda file: file.stat().st_size)
    texts = {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in every}
    first = [name for name in texts if Path(name).stem == f"test_{stem}"]
    first += [name for name in texts if stem in Path(name).stem]
    first += [name for name, text in texts.items() if named.search(text)]
    for place in TESTS[package]:
        first += [name for name in texts if name == place or name.startswith(f"{place}/")]
    return list(dict.fromkeys(first))


def read(record: Path) -> list[dict[str, Any]]:
    """Lines of a record; one that was cut off is none."""
    found = []
    for line in record.read_text("utf-8").splitlines() if record.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def append(record: Path, line: dict[str, Any]) -> None:
    """Add a line to a record, on a line of its own even after one that was cut off."""
    record.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line) + "\n"
    if record.exists() and not record.read_bytes().endswith(b"\n"):
        text = "\n" + text
    with record.open("a", encoding="utf-8") as file:
        file.write(text)


def survivors(record: Path) -> list[Mutant]:
    """Mutants that the record has as survivors, and that today's sources still have."""
    last = {line["mutant"]: line for line in read(record)}
    found = []
    for name, line in last.items():
        if line["outcome"] == "survived":
            path = name.partition(":")[0]
            text = (ROOT / path).read_text("utf-8")
            same = [each for each in mutants_of(path, text) if each.diff(text) == line["diff"]]
            found += same[:1]
            if not same:
                print(f"mutate: {name} is of other sources", flush=True)
    return found


def summarise(record: Path) -> int:
    """Print survivors and the share of mutants that tests kill. Returns the exit status."""
    last = {line["mutant"]: line for line in read(record)}
    outcomes = collections.Counter(line["outcome"] for line in last.values())
    for line in last.values():
        if line["outcome"] == "survived":
            print(f"\nSURVIVED {line['mutant']}\n{line['diff']}")
        if line["outcome"] == "equivalent":
            print(f"\nEQUIVALENT {line['mutant']}: {line['reason']}\n{line['diff']}")
    killed = sum(outcomes[name] for name in KILLED)
    counted = killed + outcomes["survived"]
    share = f" ({killed / counted:.1%})" if counted else ""
    others = ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()))
    print(f"mutate: {killed} of {counted} that change something are killed{share}; {others}")
    return 1 if outcomes["survived"] else 0


def note(arguments: argparse.Namespace) -> None:
    """Write down that a survivor changes no result."""
    lines = {line["mutant"]: line for line in read(arguments.record)}
    if arguments.equivalent not in lines or not arguments.reason:
        sys.exit("mutate: give the name of a mutant of the record, and --reason")
    line = lines[arguments.equivalent]
    append(arguments.record, {**line, "outcome": "equivalent", "reason": arguments.reason})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", help=f"beginnings of paths, such as {FOLDERS[0]}/passes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="of all parts")
    parser.add_argument("--part", default="1/1", help="2/5 is the second of five")
    parser.add_argument("--minutes", type=float, help="after which no mutant is begun")
    parser.add_argument("--record", type=Path, default=BUILD / "record.jsonl")
    parser.add_argument("--afresh", action="store_true", help="forget the record")
    parser.add_argument("--report", action="store_true", help="print what the record has")
    parser.add_argument("--survivors", action="store_true", help="judge those of the record again")
    parser.add_argument("--equivalent", metavar="NAME", help="a survivor with the same results")
    parser.add_argument("--reason", help="why these are the same")
    arguments = parser.parse_args()
    if arguments.equivalent:
        note(arguments)
    elif not arguments.report:
        if arguments.afresh:
            for path in (arguments.record, TIMES):
                path.unlink(missing_ok=True)
        Run(arguments).go()
    return summarise(arguments.record)


if __name__ == "__main__":
    sys.exit(main())
