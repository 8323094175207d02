"""A plugin of pytest for runs that :mod:`gpu_tests` starts: what each of its processes does.

A worker has one GPU of those that the run may use, and shares its memory with other workers: a
test begins when there is some, and begins again if it ran out of it. A worker whose GPU failed, or
whose test takes too long, ends; pytest-xdist starts another one. The process that hands tests out
records each result as soon as it has it.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_GPUS = [name for name in os.environ.get("GPU_TESTS_DEVICES", "").split(",") if name]
if _WORKER and _GPUS:
    # Before torch looks for GPUs. A worker that replaces another has a number of its own.
    os.environ["CUDA_VISIBLE_DEVICES"] = _GPUS[int(_WORKER.removeprefix("gw")) % len(_GPUS)]
ATTEMPTS = 4
"""Runs of a test that finds no memory."""
ENOUGH, PLENTY = 8 << 30, 24 << 30
"""Bytes that are free when a test begins, and when one begins again; or nothing frees them."""
PATIENCE = 60.0
"""Seconds in which something may free them."""
MOST_SECONDS = 480
"""Of a test."""
OF_A_CALL = {
    "index", "kv_len", "kv_offset", "length", "lengths", "moving", "offsets", "q_len", "rows",
    "seed", "shape", "shares", "size", "sizes", "split", "value", "way", "which",
}  # fmt: skip
"""Parameters of tests that say how a kernel is called: another value compiles few others."""
SLOW = ("tests/fuzz/", "::test_every_length_and_head_dim[", "::test_the_grid_in_kernels[")
"""Names of tests that take a minute or more have one of these."""
LAST_LINES = 60
"""Of a failure, in the record."""
_NO_MEMORY = ("CUDA out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA error: out of memory",
              "CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory")  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu_tests")
    group.addoption("--record", type=Path, help="file that results are added to, a line each")
    group.addoption("--list", type=Path, help="file that names of tests are written to, as JSON")
    group.addoption("--only", type=Path, help="file with the tests to run, a line each")


def pytest_configure(config: pytest.Config) -> None:
    if not _WORKER and config.option.record is not None:
        config.pluginmanager.register(Recorder(config.option.record))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.only is not None:
        names = set(config.option.only.read_text("utf-8").splitlines())
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        items[:] = spread([item for item in items if item.nodeid in names], workers)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.list is not None:
        lists: dict[str, list[str]] = {"one": [], "several": []}
        for item in session.items:
            several = item.get_closest_marker("several_gpus") is not None
            lists["several" if several else "one"].append(item.nodeid)
        session.config.option.list.write_text(json.dumps(lists), "utf-8")


def spread(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Tests in the order in which workers take equal pieces: alike ones together, slow ones first.

    Each piece begins with its share of the slow tests: the last ones of a run would leave most
    workers with nothing to do.
    """
    slow = [item for item in items if is_slow(item)]
    found = iter(sorted((item for item in items if not is_slow(item)), key=group_of))
    ends = [len(items) * number // workers for number in range(workers + 1)]
    # Shares are as even as the pieces, which can be smaller than a share where tests are few.
    begins = [len(slow) * number // workers for number in range(workers + 1)]
    order: list[pytest.Item] = []
    for number in range(workers):
        order += slow[begins[number] : begins[number + 1]]
        order += itertools.islice(found, max(0, ends[number + 1] - len(order)))
    return [*order, *found]


def is_slow(item: pytest.Item) -> bool:
    """Whether it takes a minute or more."""
    return any(words in item.nodeid for words in SLOW)


def group_of(item: pytest.Item) -> tuple[str, int, list[tuple[str, int]]]:
    """What tests that mostly compile the same kernels have alike: function, program, dtype."""
    file, _, rest = item.nodeid.partition("::")
    values = item.callspec.indices if hasattr(item, "callspec") else {}
    kept = sorted((name, index) for name, index in values.items() if name not in OF_A_CALL)
    return f"{file}::{rest.partition('[')[0]}", len(kept), kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the test, again if it found no memory."""
    if not _WORKER:
        return None
    state = _GPU if item.get_closest_marker("gpu") and _GPUS else _NoGPU()
    state.leave_if_broken()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(ATTEMPTS):
        state.begin(PLENTY if attempt else ENOUGH)
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        faulthandler.cancel_dump_traceback_later()
        if not any(found_no_memory(report) for report in reports):
            break
    seconds = round(sum(report.duration for report in reports), 1)
    facts = {"attempts": attempt + 1, "seconds": seconds} | state.facts()
    for report in reports:
        report.user_properties += facts.items()
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    state.look(any(report.failed for report in reports))
    return True


def found_no_memory(report: pytest.TestReport) -> bool:
    """Whether a test failed since others have the memory that it wanted."""
    return report.failed and any(words in report.longreprtext for words in _NO_MEMORY)


class _NoGPU:
    """Of tests that use none."""

    def leave_if_broken(self) -> None:
        """There is nothing to leave for."""

    def begin(self, wanted: int) -> None:
        """Nothing is waited for."""

    def facts(self) -> dict[str, Any]:
        """Nothing is measured."""
        return {}

    def look(self, failed: bool) -> None:
        """Nothing can be broken."""


class _OneGPU(_NoGPU):
    """The GPU of this worker."""

    def __init__(self) -> None:
        self._broken = False

    def leave_if_broken(self) -> None:
        # After a fault each call fails. Another process can use the GPU.
        if self._broken:
            os._exit(70)

    def begin(self, wanted: int) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        end = time.monotonic() + PATIENCE
        while torch.cuda.mem_get_info()[0] < wanted and time.monotonic() < end:
            time.sleep(random.uniform(0.2, 1.0))
        torch.cuda.reset_peak_memory_stats()

    def facts(self) -> dict[str, Any]:
        import torch

        return {"megabytes": torch.cuda.max_memory_allocated() >> 20}

    def look(self, failed: bool) -> None:
        import torch

        if failed:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self._broken = True


_GPU = _OneGPU()


class Recorder:
    """Adds a line of JSON to a file for each test that is done."""

    def __init__(self, path: Path) -> None:
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        # A run that was killed can have left half of a line.
        self._file.write("\n" * cut)
        self._failed: set[str] = set()
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test at its first failure, or when its fixtures are gone."""
        name = report.nodeid
        if report.failed and name not in self._failed:
            self._failed.add(name)
            lines = report.longreprtext.splitlines()[-LAST_LINES:]
            self._write(report, "failed", {"phase": report.when, "text": "\n".join(lines)})
        elif report.skipped:
            self._skipped.add(name)
        elif report.when == "teardown" and name not in self._failed:
            self._write(report, "skipped" if name in self._skipped else "passed", {})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be read as a failure."""
        if report.failed:
            self._write(report, "failed", {"phase": "collect", "text": report.longreprtext})

    def _write(self, report: Any, outcome: str, more: dict[str, Any]) -> None:
        line = {"test": report.nodeid, "outcome": outcome}
        line |= dict(getattr(report, "user_properties", ())) | more
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
