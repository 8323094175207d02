"""Times of other systems beside attndsl's, from result files of benchmarks/attention.py."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from table import COLUMNS, DIRECTIONS, ROOT, SHAPE, conditions, shapes, size

if TYPE_CHECKING:
    from pathlib import Path

# Result file: the columns that attndsl is compared with.
SOURCES = {"sparse_attention": ("flex", "cudnn"), "attention": ("fa4", "cudnn")}


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one case: its time divided by attndsl's, a number a direction.

    None where one of the two was not measured.
    """

    case: str
    column: str
    ratios: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """All rows of one shape: a panel a direction."""

    size: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """What one result file says: the systems in it, its shapes, and where it was measured."""

    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    conditions: str

    @property
    def heading(self) -> str:
        """The systems by name."""
        return f"Beside {' and '.join(COLUMNS[column] for column in self.columns)}"


def read(path: Path, columns: tuple[str, ...]) -> Section:
    """The comparisons of one result file.

    Args:
        path: A result file of benchmarks/attention.py.
        columns: The systems to compare attndsl with.

    Raises:
        ValueError: There is no such file, it is no result file, or has not all the columns.
    """
    if not path.is_file():
        raise ValueError(f"there is no {_shown(path)}: benchmarks/attention.py writes it")
    try:
        results = json.loads(path.read_text("utf-8"))
        groups = tuple(_group(results, shape, columns) for shape in shapes(results))
        groups = tuple(group for group in groups if group.rows)
        found = Section(columns, groups, conditions(results))
    except json.JSONDecodeError as error:
        raise ValueError(f"{_shown(path)} is no JSON: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{_shown(path)} is no result file of benchmarks/attention.py"
        raise ValueError(f"{message}: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{_shown(path)}: {error}") from error
    if not found.groups:
        raise ValueError(f"{_shown(path)}: attndsl and another system have no case in common")
    return found


def sections(folder: Path) -> list[Section]:
    """The comparisons of all result files of ``folder`` that are drawn."""
    return [read(folder / f"{name}.json", columns) for name, columns in SOURCES.items()]


def ratios(found: list[Section]) -> list[float]:
    """All that was measured, in one list."""
    rows = [row for section in found for group in section.groups for row in group.rows]
    return [ratio for row in rows for ratio in row.ratios if ratio is not None]


def _group(results: dict[str, Any], shape: tuple[int, ...], columns: tuple[str, ...]) -> Group:
    rows = {
        (row["case"], row["direction"]): row
        for row in results["rows"]
        if tuple(row[key] for key in SHAPE) == shape
    }
    found = [
        Row(case, column, tuple(_ratio(rows.get((case, d)), column) for d in DIRECTIONS))
        for case in dict.fromkeys(case for case, _ in rows)
        for column in columns
    ]
    return Group(size(shape), tuple(row for row in found if any(row.ratios)))


def _ratio(row: dict[str, Any] | None, column: str) -> float | None:
    if row is None:
        return None
    for key in (f"{column}_ms", "attndsl_ms"):
        if key not in row:
            where = f"{row['case']} {row['direction']}"
            raise ValueError(f"no column '{key}' at {where}: measure with that column")
        if row[key] is not None and not 0 < row[key] < math.inf:
            raise ValueError(f"'{key}' is {row[key]}, which is no time")
    theirs, ours = row[f"{column}_ms"], row["attndsl_ms"]
    return None if theirs is None or ours is None else theirs / ours


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
