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
MEANINGS = "TB/s counts live bytes: queries, output, and the keys and values that any query can see"
ABSENT = (
    "`cannot`: the system does not support the score or sinks. `failed`: the row did not run in "
    "this benchmark."
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
    of_copy = f" A copy reaches {copy:.2f} TB/s, counting reads and writes." if copy else ""
    device = _table(rows, SYSTEMS, "device", ("of the copy", lambda row: _number(row["of_copy"])))
    best = ("best peer / attndsl", lambda row: _number(row["best_eager"]))
    eager = _table(rows, SYSTEMS, "eager", best)
    return "\n\n".join([
        f"{_head(results)} Device time of one call in a CUDA graph. {MEANINGS}.{of_copy} {ABSENT}",
        device, "The same calls from Python, including host time:", eager,
    ])  # fmt: skip


def serving_tables(results: Mapping[str, Any] | None) -> str:
    """Times over pages, over gathered keys and over dense caches."""
    if results is None:
        return ""
    rows = calls(results["rows"])
    quotient = ("dense / pages", lambda row: _number(row["of_dense"]))
    return "\n\n".join([
        f"{_head(results)} Device time of one step in a CUDA graph. `pages` reads keys through the "
        "page table, `planned` also uses a plan made in advance, `gathered` is the default mode of "
        "`serve`, and `dense` runs the decode kernels on a bf16 cache without pages. FlashInfer "
        f"runs its paged FA2 kernels with a plan made in advance. {MEANINGS}, in the page dtype: "
        "in the row `fp8`, `dense` reads twice as many bytes.",
        _table(rows, WAYS, "device", quotient),
        "The same steps from Python, including host time:",
        _table(rows, WAYS, "eager", None),
    ])  # fmt: skip


def plain_decoding(rows: Rows) -> str:
    """Plain scores and one query, beside both peers."""
    found = [row for row in calls(rows) if is_plain(row)]
    sdpa, flex = (ratios(found, system, "device") for system in ("sdpa", "flex"))
    return (
        f"{versus(sdpa, 'SDPA')}, geometric mean {geometric_mean(sdpa):.2f}x over "
        f"{len(sdpa)} shapes (SDPA is faster in {_behind(sdpa)}); {versus(flex, 'FlexAttention')} "
        f"(FlexAttention is faster in {_behind(flex)})"
    )


def masked_decoding(rows: Rows) -> str:
    """Calls for which SDPA has no kernel of its own."""
    found = [row for row in calls(rows) if not is_plain(row)]
    sdpa, flex = (ratios(found, system, "device") for system in ("sdpa", "flex"))
    other = versus(flex, "FlexAttention") if flex else "no figure for FlexAttention"
    return f"{versus(sdpa, 'SDPA')} ({count(sdpa)}); {other}"


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
    found = [least / time for time, least in pairs if time and least]
    return f"{versus(found, 'the plain program')} ({count(found)})"


def bandwidth(rows: Rows) -> str:
    """Of a copy: of rows that read much, and of the others by their time."""
    found = [row["of_copy"] for row in calls(rows) if row["live_bytes"] >= FEW_BYTES]
    shares = [share for share in found if share]
    few = [
        f"`{row['name']}` reads {row['live_bytes'] / 1e6:.0f} MB in {row['attndsl_device']:.1f} us"
        for row in calls(rows)
        if row["live_bytes"] < FEW_BYTES and row.get("attndsl_device")
    ]
    rest = "".join(f"; {said}" for said in few)
    return f"{span(shares)} the bandwidth of a copy ({count(shares)}){rest}"


def eager_decoding(rows: Rows) -> str:
    """With the part of the host."""
    found = [row["best_eager"] for row in calls(rows) if is_plain(row) and row["best_eager"]]
    return f"{versus(found, 'the faster of SDPA and FlexAttention')} ({count(found)})"


def beside_dense(rows: Rows) -> str:
    """Pages beside a dense cache."""
    found = [row["of_dense"] for row in rows if row["of_dense"]]
    return f"{versus(found, 'a dense cache')} ({count(found)})"


def beside_flashinfer(rows: Rows) -> str:
    """The kernels that read pages beside those of FlashInfer."""
    found = ratios_of(rows, "flashinfer", "pages")
    return f"{versus(found, 'FlashInfer')} ({count(found)})"


def with_a_plan(rows: Rows) -> str:
    """What a plan saves the host, where the host is slower than the GPU."""
    few = [row for row in rows if row["live_bytes"] < FEW_BYTES]
    found = ratios_of(few, "pages", "planned", "eager")
    return f"{versus(found, 'a step without a plan')} ({count(found)})"


def ratios_of(rows: Rows, system: str, beside: str, kind: str = "device") -> list[float]:
    """Times of one column over those of another."""
    pairs = [(row.get(f"{system}_{kind}"), row.get(f"{beside}_{kind}")) for row in rows]
    return [own / other for own, other in pairs if own and other]


def beside_gathered(rows: Rows) -> str:
    """Pages beside gathered keys, which are what calls get that ask for nothing."""
    found = ratios_of(rows, "gathered", "pages")
    return f"{versus(found, 'gathering keys, the default')} ({count(found)})"


ANSWERS: tuple[tuple[str, str, Callable[[Rows], str]], ...] = (
    ("Decoding with one query, plain scores, device time", DECODE, plain_decoding),
    ("Decoding with one query, plain scores, from Python", DECODE, eager_decoding),
    (
        "Decoding with more queries, a window, custom scores, or mixed lengths, device time",
        DECODE, masked_decoding,
    ),
    ("Decoding with custom scores or sinks, device time", DECODE, scores),
    ("Decoding, bandwidth", DECODE, bandwidth),
    ("Serving over pages, device time", SERVING, beside_dense),
    ("Serving over pages, device time", SERVING, beside_gathered),
    ("Serving over pages, device time", SERVING, beside_flashinfer),
    ("Serving with a plan, few keys, from Python", SERVING, with_a_plan),
)  # fmt: skip
"""A question, its result file, and what answers it, in the order of the tables."""


def points(*files: Mapping[str, Any] | None) -> str:
    """The answers of files as a list, with the machine: how fast attndsl is.

    Raises:
        ValueError: The files are of several machines.
    """
    found = [results for results in files if results is not None]
    if not found:
        return ""
    machines = {results["machine"] for results in found}
    if len(machines) != 1:
        raise ValueError(f"the files are of several machines: {sorted(machines)}")
    answers: dict[str, list[str]] = {}
    for results in found:
        for question, file, answer in ANSWERS:
            if file == results["benchmark"]:
                answers.setdefault(question, []).append(answer(results["rows"]))
    lines = [f"- {question}: {'; '.join(said)}." for question, said in answers.items()]
    return "\n".join([f"attndsl on one {machines.pop()}:", "", *lines])


def of_memory(decode: Mapping[str, Any] | None, serving: Mapping[str, Any] | None) -> str:
    """How near the kernels come to the memory's speed, and pages to a cache without pages."""
    if decode is None or serving is None:
        return ""
    return (
        f"On one {decode['machine']} the kernels for few rows reach {bandwidth(decode['rows'])}. "
        f"On one {serving['machine']} the kernels that read [pages](#pages) run at "
        f"{beside_dense(serving['rows'])}."
    )


def is_plain(row: Row) -> bool:
    """True for plain scores, one query, and one length for all requests."""
    return row["program"] == PLAIN and row["q_len"] == 1 and not row["ragged"]


def ratios(rows: Iterable[Row], system: str, kind: str) -> list[float]:
    """Times of a system over those of attndsl."""
    return ratios_of(list(rows), system, "attndsl", kind)


def span(values: Sequence[float]) -> str:
    """The least and the greatest of some factors, in words.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no row of a result file answers a question: it has to have all rows")
    low, high = f"{min(values):.2f}x", f"{max(values):.2f}x"
    return low if low == high else f"{low} to {high}"


def versus(speeds: Sequence[float], other: str) -> str:
    """Speeds relative to those of something else, in words.

    Args:
        speeds: 2 where it takes twice as long as attndsl.
        other: What it is.

    Raises:
        ValueError: There are none.
    """
    return f"{span(speeds)} the speed of {other}"


def conditions(results: Mapping[str, Any]) -> str:
    """Machine, versions and commit of a result file."""
    versions = results["versions"]
    software = [f"torch {versions['torch']}", f"Triton {versions['triton']}"]
    if versions["cudnn"] is not None:
        software.append(f"cuDNN {versions['cudnn'] // 10000}.{versions['cudnn'] // 100 % 100}")
    return f"{results['machine']}; {', '.join(software)}; commit {versions['commit'][:7]}."


def count(found: Sequence[float]) -> str:
    """How many cases some numbers are of, in words."""
    return "1 case" if len(found) == 1 else f"{len(found)} cases"


def _behind(found: Sequence[float]) -> int:
    return sum(ratio < 1.0 for ratio in found)


def _head(results: Mapping[str, Any]) -> str:
    return f"`{results['benchmark']}.json`: one {conditions(results)}"


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
