"""Run the benchmarks that this machine can run, or those named (``make bench``).

    python benchmarks/run.py [NAME ...]
    python benchmarks/run.py --missing [NAME ...] --minutes 9 [--into FOLDER] [--since COMMIT]
    python benchmarks/run.py --list [NAME ...] [--into FOLDER] [--since COMMIT]

``--missing`` is for GPUs that one has for minutes: it measures what the result files lack. Scripts
run side by side, one on each GPU of CUDA_VISIBLE_DEVICES, in the order of ``rounds.py``. Rows are
in FOLDER (``benchmarks/results``) as soon as a script has written them, beside the rows that were
there. FOLDER/logs has what scripts print. The same command goes on with what is left. ``--since``
measures rows of older commits too. Where git is absent, ATTNDSL_COMMIT names the commit of the
rows. ``--list`` prints what is missing, and needs no GPU.

Exit status: 1 if a script failed or was cut, 2 if nothing could be run as asked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kept_rows
from kept_rows import Machine, Unreadable
from lanes import Busy, Job, Kept, Lanes, locked
from rounds import PLAN, Since, Unknown, commit_is_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lanes import Outcome
    from rounds import Round

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
HELPERS = (
    "against_peers", "against_rows",
    "bundles", "chart", "columns", "commits", "common", "comparison", "decode_chart", "decoding",
    "exponentials", "kept_rows", "lanes", "relative", "rounds", "run", "scaling", "scaling_parts",
    "scaling_peers", "scaling_picture", "scaling_profile", "scaling_programs", "scaling_run",
    "scaling_times", "scaling_told", "speed", "summary", "table", "turns", "worker",
)  # fmt: skip
"""Modules, and scripts that do nothing without arguments."""
ON_GPUS = (
    "against", "attention", "costs", "decode", "gallery_times", "gradients", "gpt",
    "huggingface_speed", "layouts", "lists", "odd_shapes", "serving", "short", "short_tune",
    "training",
)  # fmt: skip
EVERYWHERE = tuple(
    path.stem
    for path in sorted(FOLDER.glob("*.py"))
    if path.stem not in HELPERS and path.stem not in ON_GPUS
)
_MOST_MINUTES = 24 * 60.0


def machine_here() -> Machine | None:
    """The GPUs that this process may use, or None without any. It uses no memory of them."""
    script = "import common, json, torch; n = torch.cuda.device_count(); print(json.dumps("
    script += "[n, n and common.machine('cuda'), n and common.versions()]))"
    asked = subprocess.run(
        [sys.executable, "-c", script], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    count, name, versions = json.loads(asked.stdout.splitlines()[-1])
    if not count:
        return None
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",")[:count] if given else [str(number) for number in range(count)]
    return Machine(tuple(names), name, versions)


def jobs_of(
    plan: Sequence[Round], folders: Sequence[Path], since: Since, here: Machine | None
) -> list[Job]:
    """What each round of a plan lacks.

    Args:
        plan: The rounds.
        folders: Where a run writes, and where committed results lie.
        since: From which commit on figures count.
        here: Whose figures count; those of any machine if None.
    """
    return [_job_of(each, folders, since, here) for each in plan]


def _job_of(own: Round, folders: Sequence[Path], since: Since, here: Machine | None) -> Job:
    if own.file is None:
        return Job(own, ())
    try:
        results = (
            kept_rows.place(own.file, here.results(own.gpus), folders)[1] if here
            else kept_rows.first(f"{own.file}.json", folders)
        )  # fmt: skip
    except Unreadable as error:
        return Job(own, (), str(error))
    names = own.missing(results, since)
    return Job(own, names, "" if names else "nothing is missing")


def listing(jobs: Sequence[Job]) -> str:
    """The plan as a table: each job, how much it lacks, how long that should take."""
    lines = [f"{'name':18} {'seconds':>7}  {'GPUs':4}  missing"]
    for job in jobs:
        own = job.round
        seconds = 0.0 if job.why_not else own.expected(job.names)
        number = "all" if own.alone else str(own.gpus)
        what = job.why_not or "; ".join(job.names) or "what its record lacks"
        count = f"{len(job.names)} of {len(own.names())}: " if job.names else ""
        lines.append(f"{own.name:18} {seconds:7.0f}  {number:4}  {count}{what}")
    total = sum(job.round.expected(job.names) for job in jobs if not job.why_not)
    return "\n".join([*lines, f"{total / 60:.0f} minutes on one GPU"])


def summary(outcomes: Sequence[Outcome]) -> str:
    """How each job ended, as a table."""
    lines = [f"{'name':18} {'state':18} {'seconds':>7} {'rows':>5}"]
    for each in outcomes:
        lines.append(f"{each.name:18} {each.state:18} {each.seconds:7.0f} {each.rows:5}")
        lines += [f"    {line}" for line in each.said]
    return "\n".join(lines)


def measure_missing(
    plan: Sequence[Round], here: Machine, seconds: float, folders: Sequence[Path], since: Since
) -> int:
    """Run what a plan lacks, in some seconds; the exit status.

    Raises:
        Busy: Another run writes into the first of ``folders``.
    """
    lanes = Lanes(here.gpus, seconds, folders)
    with locked(folders[0]):
        for each in plan:
            kept = Kept(each, folders)
            if kept.path.exists():
                kept.recover()
        outcomes = lanes.run(jobs_of(plan, folders, since, here))
    print(summary(outcomes))
    return int(any(each.state.split()[0] not in ("done", "nothing") for each in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all that can run by default")
    parser.add_argument("--missing", action="store_true", help="what result files lack, on GPUs")
    parser.add_argument("--list", action="store_true", help="print what is missing")
    parser.add_argument("--minutes", type=float, help="after which the run has ended")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--since", metavar="COMMIT", help="measure what is older than this, too")
    return parser


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _of_plan(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """``--missing`` and ``--list``; the exit status."""
    known = {each.name: each for each in PLAN}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"the plan has no {unknown[0]!r}; it has {', '.join(known)}")
    plan = [each for each in PLAN if not options.names or each.name in options.names]
    since, into = Since(options.since), options.into.resolve()
    folders = tuple(dict.fromkeys((into, RESULTS.resolve())))
    try:
        since.check()
    except Unknown as error:
        parser.error(str(error))
    if options.list:
        print(listing(jobs_of(plan, folders, since, None)))
        return 0
    if options.minutes is None or not 0 < options.minutes <= _MOST_MINUTES:
        parser.error("--missing needs --minutes, from 0 to 1440")
    begin = time.monotonic()
    here = machine_here()
    if here is None:
        parser.error("there is no CUDA device here; --list says what is missing")
    if not commit_is_known():
        print("rows will not say their commit: there is no git here, nor ATTNDSL_COMMIT")
    signal.signal(signal.SIGTERM, _interrupted)
    seconds = 60 * options.minutes - (time.monotonic() - begin)
    try:
        return measure_missing(plan, here, seconds, folders, since)
    except Busy as error:
        parser.error(str(error))


def main() -> int:
    """Parse the command line and do what it says; see the exit status above."""
    import torch

    parser = _parser()
    options = parser.parse_args()
    if options.missing or options.list:
        return _of_plan(options, parser)
    if options.minutes is not None or options.since or options.into != RESULTS:
        parser.error("--minutes, --into and --since go with --missing or --list")
    names = options.names or [*EVERYWHERE, *(ON_GPUS if torch.cuda.is_available() else ())]
    unknown = [name for name in names if name not in (*EVERYWHERE, *ON_GPUS)]
    if unknown:
        known = ", ".join((*EVERYWHERE, *ON_GPUS))
        print(f"there is no benchmark '{unknown[0]}'; there are: {known}", file=sys.stderr)
        return 2
    if not options.names and not torch.cuda.is_available():
        print(f"no CUDA device here: leaving out {', '.join(ON_GPUS)}\n")
    failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        failed |= subprocess.run([sys.executable, FOLDER / f"{name}.py"]).returncode != 0
        print(flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
