"""Tables and sentences from the results of benchmarks/decode.py and benchmarks/serving.py."""

from __future__ import annotations

from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Row = Mapping[str, Any]
    Rows = Sequence[Row]

DECODE, SERVING = "decode", "serving"
"""Names of the result files, without their endings."""
CEILINGS = "ceilings"
SYSTEMS = {"attndsl": "attndsl", "sdpa": "SDPA", "flex": "FlexAttention"}
WAYS = {
    "pages": "pages", "planned": "planned", "gathered": "gathered", "dense": "dense",
    "flashinfer": "FlashInfer",
}  # fmt: skip
PLAIN = "plain"
REASONS = {
    "it has no ": "cannot", "no answer within": "slow", "OutOfMemory": "memory",
    "not measured": "-", "No module named": "-",
}  # fmt: skip
"""Words of a reason, and the one word that tables have for it."""
FAILED = "failed"
FEW_BYTES = 1 << 24
"""Calls that read fewer wait for more than memory, and are compared by time."""
MEANINGS = (
    "`eager` is the time of the same calls from Python, so it includes what the host needs. "
    "TB/s count live bytes: keys and values that some query may see, queries, and output"
)
ABSENT = (
    "`cannot`: the system has no such score, or no sinks. `failed`: the benchmark did not get the "
    "system to run the row."
)


def calls(rows: Rows) -> list[Row]:
    """The rows that are calls."""
    return [row for row in rows if row["name"] != CEILINGS]


def copy_tbs(results: Mapping[str, Any]) -> float | None:
    """Terabytes a second of a copy, where the file has them."""
    found = [row.get("copy") for row in results["rows"] if row["name"] == CEILINGS]
    return found[0] * 1e-12 if found and found[0] else None


def word(row: Row, system: str) -> str:
    """Why a row has no time of a system, in one word."""
    why = row.get(f"{system}_why") or row.get(f"{system}_device_why") or ""
    return next((name for said, name in REASONS.items() if said in why), FAILED)


def shape(row: Row) -> str:
    """Batch, keys, heads, head dim and queries."""
    keys = f"up to {row['kv_len']}" if row.get("ragged") else f"{row['kv_len']}"
    queries = "1 query" if row["q_len"] == 1 else f"{row['q_len']} queries"
    heads = f"{row['heads']}/{row['kv_heads']} heads"
    return f"{row['batch']} x {keys}, {heads}, D{row['dim']}, {queries}"


def decode_tables(results: Mapping[str, Any] | None) -> str:
    """Times within CUDA graphs with bandwidths, and times as Python calls."""
    if results is None:
        return ""
    rows = calls(results["rows"])
    copy = copy_tbs(results)
    of_copy = f" A copy has {copy:.2f} TB/s, what it reads and what it writes." if copy else ""
    device = _table(rows, SYSTEMS, "device", ("of the copy", lambda row: _number(row["of_copy"])))
    best = ("best peer / attndsl", lambda row: _number(row["best_eager"]))
    eager = _table(rows, SYSTEMS, "eager", best)
    return "\n\n".join([
        f"{_head(results)} Device time of one call in a CUDA graph. {MEANINGS}.{of_copy} {ABSENT}",
        device, "The same rows, called from Python:", eager,
    ])  # fmt: skip


def serving_tables(results: Mapping[str, Any] | None) -> str:
    """Times over pages, over gathered keys and over dense caches."""
    if results is None:
        return ""
    rows = calls(results["rows"])
    quotient = ("dense / pages", lambda row: _number(row["of_dense"]))
    return "\n\n".join([
        f"{_head(results)} Device time of one step in a CUDA graph. `pages` are the kernels that "
        "read pages, `planned` the same with a plan that was made before, `gathered` is the "
        "default of `serve`, and `dense` are the kernels for few rows over a cache without pages, "
        "in bf16. FlashInfer, where it was there, runs its paged FA2 kernels, planned before. "
        f"{MEANINGS}, in the dtype of the pages: at the row `fp8`, `dense` reads twice as many.",
        _table(rows, WAYS, "device", quotient), "The same rows, called from Python:",
        _table(rows, WAYS, "eager", None),
    ])  # fmt: skip


def plain_decoding(rows: Rows) -> str:
    """Plain scores and one query, beside both peers."""
    found = [row for row in calls(rows) if _is_plain(row)]
    sdpa, flex = (ratios(found, system, "device") for system in ("sdpa", "flex"))
    return (
        f"SDPA takes {span(sdpa)} times as long, {geometric_mean(sdpa):.2f} in the geometric mean "
        f"of {len(sdpa)} shapes, and is faster at {_behind(sdpa)}; FlexAttention takes "
        f"{span(flex)} times as long, and is faster at {_behind(flex)}"
    )


def masked_decoding(rows: Rows) -> str:
    """Calls for which SDPA has no kernel of its own."""
    found = [row for row in calls(rows) if not _is_plain(row)]
    sdpa, flex = (ratios(found, system, "device") for system in ("sdpa", "flex"))
    other = f"takes {span(flex)} times as long" if flex else "has no figure"
    return f"SDPA takes {span(sdpa)} times as long ({count(sdpa)}); FlexAttention {other} there"


def scores(rows: Rows) -> str:
    """What scores and sinks cost beside the plain program of the same shape."""
    keys = ("batch", "kv_len", "heads", "kv_heads", "dim", "q_len", "ragged")
    plain = {
        tuple(row[key] for key in keys): row["attndsl_device"]
        for row in calls(rows)
        if row["program"] == PLAIN
    }
    pairs = [
        (row["attndsl_device"], plain.get(tuple(row[key] for key in keys)))
        for row in calls(rows)
        if row["program"] not in (PLAIN, "window")
    ]
    found = [time / least for time, least in pairs if time and least]
    return f"a call takes {span(found)} times as long as the plain one ({count(found)})"


def bandwidth(rows: Rows) -> str:
    """Of a copy: of rows that read much, and of the others by their time."""
    found = [row["of_copy"] for row in calls(rows) if row["live_bytes"] >= FEW_BYTES]
    shares = [share for share in found if share]
    few = [
        f"`{row['name']}`, which reads {row['live_bytes'] / 1e6:.0f} MB, "
        f"takes {row['attndsl_device']:.1f} us"
        for row in calls(rows)
        if row["live_bytes"] < FEW_BYTES and row.get("attndsl_device")
    ]
    rest = "".join(f"; {said}" for said in few)
    return f"{span(shares)} of the bandwidth of a copy ({count(shares)}){rest}"


def eager_decoding(rows: Rows) -> str:
    """With the part of the host."""
    found = [row["best_eager"] for row in calls(rows) if _is_plain(row) and row["best_eager"]]
    return (
        f"with what the host needs, the faster one of SDPA and FlexAttention takes {span(found)} "
        f"times as long ({count(found)})"
    )


def beside_dense(rows: Rows) -> str:
    """Pages beside a dense cache."""
    found = [row["of_dense"] for row in rows if row["of_dense"]]
    return f"a dense cache takes {span(found)} times as long ({count(found)})"


def beside_flashinfer(rows: Rows) -> str:
    """The kernels that read pages beside those of FlashInfer."""
    found = ratios_of(rows, "flashinfer", "pages")
    return f"FlashInfer takes {span(found)} times as long ({count(found)})"


def with_a_plan(rows: Rows) -> str:
    """What a plan saves the host, where the host is slower than the GPU."""
    few = [row for row in rows if row["live_bytes"] < FEW_BYTES]
    found = ratios_of(few, "pages", "planned", "eager")
    return f"a step without one takes {span(found)} times as long ({count(found)})"


def ratios_of(rows: Rows, system: str, beside: str, kind: str = "device") -> list[float]:
    """Times of one column over those of another."""
    pairs = [(row.get(f"{system}_{kind}"), row.get(f"{beside}_{kind}")) for row in rows]
    return [own / other for own, other in pairs if own and other]


def beside_gathered(rows: Rows) -> str:
    """Pages beside gathered keys, which are what calls get that ask for nothing."""
    found = ratios_of(rows, "gathered", "pages")
    return f"gathering keys, the default, takes {span(found)} times as long ({count(found)})"


ANSWERS: tuple[tuple[str, str, Callable[[Rows], str]], ...] = (
    ("Decoding with one query, plain scores, device time", DECODE, plain_decoding),
    ("Decoding with one query, plain scores, from Python", DECODE, eager_decoding),
    (
        "Decoding with more queries, a window, or lengths of requests, device time",
        DECODE, masked_decoding,
    ),
    ("Decoding with scores or sinks, device time", DECODE, scores),
    ("Decoding beside a copy in memory", DECODE, bandwidth),
    ("Serving over pages, device time", SERVING, beside_dense),
    ("Serving over pages, device time", SERVING, beside_gathered),
    ("Serving over pages, device time", SERVING, beside_flashinfer),
    ("A plan of steps with few keys, from Python", SERVING, with_a_plan),
)  # fmt: skip
"""A question, its result file, and what answers it, in the order of the tables."""


def points(results: Mapping[str, Any] | None) -> str:
    """The answers of a file as a list, with the machine."""
    if results is None:
        return ""
    lines = [
        f"- {question}: {answer(results['rows'])}."
        for question, file, answer in ANSWERS
        if file == results["benchmark"]
    ]
    return "\n".join([f"On one {results['machine']}, {results['date']}:", "", *lines])


def in_short(results: Mapping[str, Any] | None) -> str:
    """Two sentences for the README."""
    if results is None:
        return ""
    plain = [row for row in calls(results["rows"]) if _is_plain(row)]
    rest = [row for row in calls(results["rows"]) if not _is_plain(row)]
    sdpa, flex = (ratios(plain, system, "device") for system in ("sdpa", "flex"))
    return (
        f"Decoding on one {results['machine']}, {results['date']}, device time: with one query and "
        f"plain scores SDPA takes {span(sdpa)} times as long as attndsl and FlexAttention "
        f"{span(flex)} times ({len(plain)} shapes, SDPA is faster at {_behind(sdpa)}). SDPA takes "
        f"{span(ratios(rest, 'sdpa', 'device'))} times as long with more queries, a window, or "
        "requests of several lengths."
    )


def of_memory(decode: Mapping[str, Any] | None, serving: Mapping[str, Any] | None) -> str:
    """How near the kernels come to the memory's speed, and pages to a cache without pages."""
    if decode is None or serving is None:
        return ""
    return (
        f"On one {decode['machine']} the kernels for few rows have {bandwidth(decode['rows'])}. "
        f"On one {serving['machine']}, beside the kernels that read [pages](#pages), "
        f"{beside_dense(serving['rows'])}."
    )


def ratios(rows: Iterable[Row], system: str, kind: str) -> list[float]:
    """Times of a system over those of attndsl."""
    return ratios_of(list(rows), system, "attndsl", kind)


def span(values: Sequence[float]) -> str:
    """The least and the greatest of some numbers, in words.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no row of a result file answers a question: it has to have all rows")
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def count(found: Sequence[float]) -> str:
    """How many cases some numbers are of, in words."""
    return "1 case" if len(found) == 1 else f"{len(found)} cases"


def _is_plain(row: Row) -> bool:
    return row["program"] == PLAIN and row["q_len"] == 1 and not row["ragged"]


def _behind(found: Sequence[float]) -> int:
    return sum(ratio < 1.0 for ratio in found)


def _head(results: Mapping[str, Any]) -> str:
    return f"`{results['benchmark']}.json`: one {results['machine']}, {results['date']}."


def _table(
    rows: Rows, systems: Mapping[str, str], kind: str, last: tuple[str, Callable[[Row], str]] | None
) -> str:
    head = ["row", "shape", *(f"{name}, us" for name in systems.values())]
    if kind == "device":
        head += [f"{name}, TB/s" for name in systems.values()]
    lines = [[*head, last[0]] if last else head]
    lines.append(["---", "---", *["---:"] * (len(lines[0]) - 2)])
    for row in rows:
        cells = [_time(row, system, kind) for system in systems]
        if kind == "device":
            cells += [_number(row.get(f"{system}_tbs")) for system in systems]
        lines.append([row["name"], shape(row), *cells, *([last[1](row)] if last else [])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time(row: Row, system: str, kind: str) -> str:
    value = row.get(f"{system}_{kind}")
    return word(row, system) if value is None else _number(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
