"""Say which kernels of two commits differ, and by how many lines, without a GPU.

    python tools/kernel_diff.py BASE [NEW] [--sample | --part 2/5] [--show] [--only TEXT]

A commit is what git knows, or ``.`` for the working tree (the default of NEW). Some 60 programs
(``kernel_cases.py``) run forward, backward and with tangents at 13 settings, and some of them at
five more for few rows: all families of kernels, three dtypes, head dims 64 to 256, compute
capabilities 8.0 and 9.0. ``kernel_trace.py`` keeps what each of their kernels is compiled from.

Two kernels are equal where their intermediate forms are, with names and places taken out and
parameters called by their roles: the compiler makes the same of the same. Where these differ, both
are compiled to PTX, and normalised PTX decides. Launches are compared as well: each argument by its
name, and how many programs there are. What a commit gives is kept by its trees (``--cache``), so
that a base is traced once.

Exit status: 0 where nothing differs, 1 where something does, 2 where a call failed.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from kernel_cases import CASES, SETTINGS, cases_of

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("attndsl", "backends", "grammar")
SAMPLE = (
    "hopper-bf16-64-cuda90", "hopper-bf16-128-cuda90", "triton-bf16-64-cuda90",
    "decode-bf16-128-cuda90", "serve-bf16-128-cuda90", "short-bf16-64-cuda90",
)  # fmt: skip
"""Settings of ``--sample``."""
TRACER = ROOT / "tools" / "kernel_trace.py"
TRACING = (TRACER, TRACER.with_name("kernel_calls.py"))
BY_NAME = {case.name: case for case in CASES}

Call = tuple[str, str]


class Tree:
    """One commit's package, laid out as it is installed, and what its calls gave."""

    def __init__(self, commit: str, cache: Path) -> None:
        self.commit = commit
        self._cache = cache
        self.digest = _digest(commit)
        self.folder = cache / "trees" / self.digest
        self._results = cache / "results" / self.digest
        self._results.mkdir(parents=True, exist_ok=True)
        self.texts = cache / "texts"
        self.texts.mkdir(parents=True, exist_ok=True)
        if not self.folder.exists():
            self._lay_out()

    def _lay_out(self) -> None:
        with tempfile.TemporaryDirectory(dir=self._cache) as found:
            folder = Path(found)
            if self.commit == ".":
                for part in PARTS:
                    subprocess.run(["cp", "-r", str(ROOT / part), str(folder)], check=True)
            else:
                archive = subprocess.run(
                    ["git", "archive", self.commit, *PARTS], cwd=ROOT, check=True,
                    capture_output=True,
                ).stdout  # fmt: skip
                subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
            for part in PARTS[1:]:
                (folder / part).rename(folder / "attndsl" / part)
            # At once: of half a tree, Python would find the rest where the package is installed.
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            whole = folder.with_suffix(".whole")
            whole.mkdir()
            (folder / "attndsl").rename(whole / "attndsl")
            whole.rename(self.folder)

    def known(self, call: Call, ptx: bool) -> dict[str, Any] | None:
        """What ``call`` gave before, or None."""
        path = self._path(call, ptx)
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, call: Call, ptx: bool, reply: dict[str, Any]) -> None:
        """Keep what ``call`` gave, unless it failed."""
        if "error" not in reply:
            self._path(call, ptx).write_text(json.dumps(reply))

    def _path(self, call: Call, ptx: bool) -> Path:
        case, setting = call
        meant = [repr(BY_NAME[case]), setting, ptx, _tracer_digest()]
        name = hashlib.sha256(json.dumps(meant).encode()).hexdigest()[:24]
        return self._results / f"{name}.json"


def _digest(commit: str) -> str:
    """Digest of the sources of a commit, or of the working tree."""
    if commit == ".":
        found = hashlib.sha256()
        for part in PARTS:
            for path in sorted((ROOT / part).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
        return found.hexdigest()[:24]
    names = [f"{commit}:{part}" for part in PARTS]
    told = subprocess.run(
        ["git", "rev-parse", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if told.returncode:
        sys.exit(f"kernel_diff: git knows no commit {commit!r} with {', '.join(PARTS)}")
    return hashlib.sha256(told.stdout.encode()).hexdigest()[:24]


def _tracer_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in TRACING)).hexdigest()


def _compiler() -> str:
    """Triton and its version, on which all that is kept depends."""
    return f"triton-{metadata.version('triton')}"


class Worker:
    """A process that traces calls of one tree."""

    def __init__(self, tree: Tree, ptx: bool) -> None:
        rest = filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree.folder), str(ROOT / "tools"), *rest]),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        arguments = [sys.executable, "-P", str(TRACER), "--tree", str(tree.folder)]
        arguments += ["--texts", str(tree.texts)] + ["--ptx"] * ptx
        self._process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, call: Call) -> dict[str, Any]:
        """What ``call`` gives."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"case": call[0], "setting": call[1], "error": "the process ended"}
        return dict(json.loads(line))

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def trace(
    tree: Tree, calls: list[Call], processes: int, ptx: bool = False
) -> dict[Call, dict[str, Any]]:
    """What each call of one tree gives."""
    found = {call: reply for call in calls if (reply := tree.known(call, ptx)) is not None}
    waiting: queue.SimpleQueue[Call] = queue.SimpleQueue()
    missing = [call for call in calls if call not in found]
    for call in missing:
        waiting.put(call)
    start, lock = time.perf_counter(), threading.Lock()

    def work() -> None:
        worker = Worker(tree, ptx)
        while True:
            try:
                call = waiting.get_nowait()
            except queue.Empty:
                break
            reply = worker.ask(call)
            tree.keep(call, ptx, reply)
            if reply.get("error") == "the process ended":
                worker = Worker(tree, ptx)
            with lock:
                found[call] = reply
                done = sum(call in found for call in missing)
                _tell(f"{tree.commit[:12]} {done}/{len(missing)} calls", start)
        worker.stop()

    threads = [threading.Thread(target=work) for _ in range(min(processes, len(missing)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if missing and sys.stderr.isatty():
        print(file=sys.stderr)
    return found


def _tell(text: str, start: float) -> None:
    if sys.stderr.isatty():
        seconds = time.perf_counter() - start
        print(f"\r{text}, {seconds:.0f} s ", end="", file=sys.stderr, flush=True)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str]]:
    """Where two replies differ: (kernel of a task, in what)."""
    found = []
    kernels = [_by_name(reply["kernels"]) for reply in (old, new)]
    for name in sorted({*kernels[0], *kernels[1]}):
        before, after = kernels[0].get(name), kernels[1].get(name)
        if before is None or after is None:
            found.append((name, "is new" if before is None else "is gone"))
            continue
        if before["ir"] != after["ir"] and before.get("ptx", 0) != after.get("ptx", 1):
            found.append((name, "code"))
        if before["options"] != after["options"]:
            found.append((name, "options"))
        if _launches(before, after) != _launches(after, before):
            found.append((name, "launch"))
    return found


def _by_name(kernels: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    counts: Counter[str] = Counter()
    found = {}
    for kernel in kernels:
        name = f"{kernel['task']} {kernel['kernel']}"
        counts[name] += 1
        found[f"{name} #{counts[name]}"] = kernel
    return found


def _launches(kernel: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """The launches of ``kernel``, with the arguments that ``other`` has too."""
    shared = {name for launch in other.get("launches", []) for name in launch}
    return [
        {name: value for name, value in launch.items() if name in shared}
        for launch in kernel.get("launches", [])
    ]


def lines_between(tree: Tree, old: str, new: str) -> list[str]:
    """The lines that differ between two kept texts, whatever labels are called."""
    texts = [named_labels((tree.texts / digest).read_text()) for digest in (old, new)]
    return [
        line
        for line in difflib.unified_diff(*texts, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]


def named_labels(ptx: str) -> list[str]:
    """Lines of PTX without labels that nothing jumps to, the others numbered in their order.

    Triton 3.6 leaves a label where a block of an inlined function ended.
    """
    used = set(re.findall(r"\b(L\d+);", ptx))
    lines = [line for line in ptx.split("\n") if not _is_label(line) or line.strip()[:-1] in used]
    numbers: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return numbers.setdefault(found.group(), f"L{len(numbers)}")

    return [re.sub(r"\bL\d+\b", numbered, line) for line in lines]


def _is_label(line: str) -> bool:
    return re.fullmatch(r"L\d+:", line.strip()) is not None


def calls_of(arguments: argparse.Namespace) -> list[Call]:
    """The calls to look at."""
    settings = [x for x in SETTINGS if not arguments.sample or x.name in SAMPLE]
    found = [(case.name, setting.name) for setting in settings for case in cases_of(setting)]
    if arguments.only:
        found = [call for call in found if any(text in " ".join(call) for text in arguments.only)]
    part, _, parts = arguments.part.partition("/")
    return found[int(part) - 1 :: int(parts)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="a commit")
    parser.add_argument("new", nargs="?", default=".", help="another; by default the working tree")
    parser.add_argument("--sample", action="store_true", help="six settings instead of eighteen")
    parser.add_argument("--part", default="1/1", help="k/n: every n-th call from the k-th on")
    parser.add_argument("--only", action="append", help="calls whose case or setting has this text")
    parser.add_argument("--show", action="store_true", help="print the lines that differ")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "attndsl-kernel-diff" / _compiler()
    )
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    calls = calls_of(arguments)
    trees = [Tree(commit, arguments.cache) for commit in (arguments.base, arguments.new)]
    replies = [trace(tree, calls, arguments.processes) for tree in trees]
    return report(trees, replies, calls, arguments)


def _reason(error: str) -> str:
    """The line of a traceback that says what was raised, or its last one."""
    lines = error.strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (raised or lines)[-1]


def report(
    trees: list[Tree],
    replies: list[dict[Call, dict[str, Any]]],
    calls: list[Call],
    arguments: argparse.Namespace,
) -> int:
    """Print what differs; compile to PTX where intermediate forms do."""
    failed = [
        (call, tree.commit, found[call]["error"])
        for tree, found in zip(trees, replies, strict=True)
        for call in calls
        if "error" in found[call]
    ]
    for call, commit, error in failed:
        print(f"FAILED at {commit}: {' | '.join(call)}\n{error if arguments.show else ''}".rstrip())
        print(f"    {_reason(error)}")
    lost = {call for call, *_ in failed}
    good = [call for call in calls if call not in lost]
    doubtful = [call for call in good if compare(*(found[call] for found in replies))]
    for tree, found in zip(trees, replies, strict=True):
        found.update(trace(tree, doubtful, arguments.processes, ptx=True))
    differing, kernels = 0, 0
    for call in good:
        old, new = (found[call] for found in replies)
        kernels += len(new["kernels"])
        for name, what in compare(old, new):
            if what == "code" and not _code_between(trees[0], old, new, name):
                continue
            differing += 1
            print(f"{' | '.join(call)} | {name}: {what}{_count(trees[0], old, new, name, what)}")
            if arguments.show:
                _show(trees[0], old, new, name, what)
    same_text = len(good) - len(doubtful)
    print(
        f"{len(good)} calls, {kernels} kernels: {differing} differ; "
        f"{same_text} calls with the same intermediate form, {len(doubtful)} compared as PTX; "
        f"{len(lost)} calls failed"
    )
    return 2 if failed else int(bool(differing))


def _count(tree: Tree, old: dict[str, Any], new: dict[str, Any], name: str, what: str) -> str:
    if what != "code":
        return ""
    return f", {len(_code_between(tree, old, new, name))} lines of PTX"


def _code_between(tree: Tree, old: dict[str, Any], new: dict[str, Any], name: str) -> list[str]:
    pair = [_by_name(reply["kernels"])[name]["ptx"] for reply in (old, new)]
    return lines_between(tree, *pair)


def _show(tree: Tree, old: dict[str, Any], new: dict[str, Any], name: str, what: str) -> None:
    before, after = (_by_name(reply["kernels"]).get(name, {}) for reply in (old, new))
    if what == "code":
        print("\n".join(f"    {line}" for line in lines_between(tree, before["ptx"], after["ptx"])))
    elif what in ("options", "launch"):
        key = what if what == "options" else "launches"
        print(f"    - {before.get(key)}\n    + {after.get(key)}")


if __name__ == "__main__":
    sys.exit(main())
