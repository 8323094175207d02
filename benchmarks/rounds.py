"""The plan of ``run.py --missing``: which measurements there are, in order of worth."""

from __future__ import annotations

import importlib
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_rows import Shape

if TYPE_CHECKING:
    from kept_rows import Results

ROOT = Path(__file__).resolve().parents[1]


_BY_NAME = Shape(("name",), "attndsl_device")


class Unknown(Exception):
    """A commit that git does not know."""


@dataclass(frozen=True)
class Round:
    """One script, and how its rows are asked for.

    Arguments may have ``{seconds}`` or ``{minutes}``, the time that the script has, ``{gpus}``, how
    many GPUs it has, ``{record}``, a file that goes on from run to run of a commit, and ``{work}``,
    a folder of its own, which is empty at first.
    """

    name: str
    seconds: float
    """That all of its rows are expected to take on one H100."""
    rows: str | tuple[str, ...] = ()
    """Names of what is asked for, or where they stand: ``module:NAME``."""
    shape: Shape = _BY_NAME
    item: str = "name"
    """The field of a row that has the name."""
    ours: tuple[str, str] | None = None
    """A field and its value, of the rows that have to be there. Peers may fail."""
    each: int = 1
    """How many of these rows there are of a name."""
    choose: str = ""
    """The option that takes names; without one, all rows are measured together."""
    between: str = ";"
    """What stands between names; a blank for separate arguments."""
    arguments: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """Arguments of Python that run before the script."""
    script: str = ""
    stem: str | None = ""
    """Of its result file. None for a script that keeps its own record."""
    timeout: float = 540.0
    least: float = 30.0
    """With fewer seconds left it does not begin."""
    gpus: int = 1
    """How many it needs at least."""
    alone: bool = False
    """Whether nothing may run beside it; it then has all GPUs."""

    @property
    def file(self) -> str | None:
        """The stem of its result file, or None."""
        return self.stem if self.stem is None else self.stem or self.name

    @property
    def path(self) -> Path:
        """Its script."""
        return ROOT / (self.script or f"benchmarks/{self.name}.py")

    def names(self) -> tuple[str, ...]:
        """Of all that can be asked for."""
        return self.rows if isinstance(self.rows, tuple) else _read(self.rows)

    def missing(self, results: Results | None, since: Since) -> tuple[str, ...]:
        """Names without a figure in ``results``, or with one of an older commit."""
        found = results or {"rows": [], "versions": {}}

        def is_there(name: str) -> bool:
            own = [row for row in found["rows"] if str(row.get(self.item)) == name]
            if self.ours:
                own = [row for row in own if row.get(self.ours[0]) == self.ours[1]]
            return len(own) >= self.each and all(
                self.shape.has_figure(row)
                and not since.is_older(row.get("commit") or found["versions"].get("commit"))
                for row in own
            )

        return tuple(name for name in self.names() if not is_there(name))

    def choosing(self, names: tuple[str, ...]) -> list[str]:
        """Arguments that ask for ``names``."""
        if not self.choose or names == self.names():
            return []
        if self.between == " ":
            return [self.choose, *names]
        return [self.choose, self.between.join(names)]

    def expected(self, names: tuple[str, ...]) -> float:
        """Seconds that ``names`` should take."""
        share = len(names) / max(1, len(self.names())) if self.choose else 1.0
        return self.seconds * share


@dataclass(frozen=True)
class Since:
    """The commit from which on figures count; any, if there is none."""

    commit: str | None = None

    def check(self) -> None:
        """Refuse a commit that nobody can tell from others.

        Raises:
            Unknown: Git does not know it.
        """
        if self.commit and _has_git() and not _git("cat-file", "-e", f"{self.commit}^{{commit}}"):
            raise Unknown(f"git knows no commit {self.commit!r}")

    def is_older(self, commit: str | None) -> bool:
        """Whether figures of ``commit`` are to be measured again.

        Where git is absent, only those of the very commit are not.
        """
        if self.commit is None:
            return False
        named = (commit or "").rstrip("+")
        if len(named) >= 7 and (self.commit.startswith(named) or named.startswith(self.commit)):
            return False
        return not (named and _git("merge-base", "--is-ancestor", self.commit, named))


@lru_cache(maxsize=1024)
def _git(*arguments: str) -> bool:
    """Whether git says yes."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def _has_git() -> bool:
    return _git("rev-parse", "--git-dir")


def commit_is_known() -> bool:
    """Whether rows will say their commit."""
    return "ATTNDSL_COMMIT" in os.environ or _has_git()


def _read(where: str) -> tuple[str, ...]:
    """Names that a script has: of rows, of cases, keys of a table, or what a function gives."""
    module, _, name = where.partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    found = found() if callable(found) else found
    return tuple(each if isinstance(each, str) else str(each.name) for each in found)


_BUNDLED = str(ROOT / "benchmarks" / "bundled.yaml")
PLAN = (
    Round("serving", 150.0, "serving:ROWS", Shape(("name",), "pages_device"), choose="--rows"),
    Round("decode", 200.0, "decode:ROWS", choose="--rows"),
    Round(
        "gallery_times", 240.0, "gallery_times:entries", Shape(("name",), "forward_ms"),
        choose="--rows",
    ),
    Round(
        "short", 400.0, "short:ROWS", Shape(("name", "direction"), "attndsl_device"),
        choose="--rows", arguments=("--limit", "{seconds}"), least=90.0,
    ),
    Round(
        "training", 300.0, "training:PARTS", Shape(("model", "attention"), "step_ms"), "model",
        ("attention", "attndsl"), choose="--only", between=",", least=90.0,
    ),
    Round(
        "huggingface_speed", 240.0, ("4096", "32768"),
        Shape(("implementation", "batch", "context"), "tokens_per_s"), "context",
        ("implementation", "attndsl"), 2, "--contexts", " ", least=60.0,
    ),
    Round(
        "costs", 300.0, "costs:CASES", Shape(("case", "direction"), "ms"), "case",
        choose="--only", between=",", least=90.0,
    ),
    Round("lists", 60.0, ("step", "forward", "backward"), Shape(("what",), "kept_ms"), "what"),
    Round(
        "bundles", 120.0, ("causal", "window"), Shape(("program", "with"), "forward_s"),
        "program", before=(
            "-m", "attndsl", "build", _BUNDLED, "--target", "cuda:90", "--head-dim", "128",
            "--heads", "16/16", "--lengths", "4096", "--backward", "-o", "{work}/bundle",
        ), arguments=(_BUNDLED, "--bundle", "{work}/bundle"),
    ),
    Round(
        "start", 170.0, "start:PROGRAMS", Shape(("program", "system", "cache"), "first_step_ms"),
        "program", ("system", "attndsl"), 2, "--programs", stem="start_cuda",
        arguments=("--device", "cuda", "--seconds", "{seconds}"), alone=True,
    ),
    Round(
        "scaling", 300.0, "scaling:TEXTS",
        Shape(("program", "ranks", "tokens", "heads"), "attndsl_forward_ms"), "program", None, 3,
        "--programs", ",", arguments=("--run", "{gpus}", "--limit", "{seconds}"), gpus=2,
        alone=True, least=60.0,
    ),
    Round(
        "short_tune", 400.0, "short_tune:ROWS", Shape(("name", "direction"), "gain"),
        choose="--rows", arguments=("--limit", "{seconds}"), least=90.0,
    ),
    # Last, since they take all the time that there is: name them to have them alone.
    Round(
        "tests", 500.0, script="tools/gpu_tests.py", stem=None, alone=True, least=120.0,
        arguments=("--minutes", "{minutes}", "--continue", "{record}"),
    ),
)  # fmt: skip
"""In order of worth: what comes first begins first."""
