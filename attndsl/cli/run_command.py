"""``attndsl run``: time a program and hold it to the reference."""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.call.dispatch import choose_backend
from attndsl.errors import visible
from attndsl.inspection.reference_check import Case, held_to_reference, results
from attndsl.inspection.reference_check import table as table_of
from attndsl.ir import DType, reads_score

from .example_options import check_dim_names, make_captures
from .show_command import compile_program
from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.progress import Progress

    from attndsl.api import Attention
    from attndsl.frontend.declare import Declared
    from attndsl.inspection.reference_check import Check
    from attndsl.ir import ParamDecl, TensorDecl

    from .program_inputs import NamedProgram

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_CHECK_BYTES = 8 << 30
_CPU_SECONDS = 1.0
_CPU_RUNS = 3


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes, dtype and device of the calls to run."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    lengths: tuple[int, ...] = ()
    """Keys of each batch entry, where the call decodes: its rows are the last ones, and ``kv_len``
    is the room. Otherwise empty."""

    def positions(self) -> dict[str, Any]:
        """Arguments of a call that decodes, on its device."""
        if not self.lengths:
            return {}
        keys = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        return {"q_offset": keys - self.q_len, "kv_lengths": keys}

    def sizes(self) -> dict[str, int]:
        """The sizes that programs know."""
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        return {name: getattr(self, name) for name in names}


class CallKind(NamedTuple):
    """Kind of the calls to run, or to compile kernels for."""

    backend: str
    exact: bool
    """True without fast forms of functions."""
    backward: bool
    """True if gradients are computed too."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One direction, over all pairs of positions whether or not they are masked out."""

    direction: str
    ms: float
    """Median milliseconds."""
    tflops: float
    live_gbs: float | None = None
    """Gigabytes a second of a call that decodes: q, the output, and the keys and values that some
    query sees."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that a run found."""

    program: str
    backend: str
    shapes: Shapes
    timings: tuple[Timing, ...]
    checks: tuple[Check, ...]


def run(
    program: NamedProgram,
    declared: Mapping[str, Declared],
    shapes: Shapes,
    dims: Mapping[str, int],
    kind: CallKind,
    *,
    check: bool,
    seed: int,
    as_json: bool,
) -> int:
    """Time ``program``, check it, and print both; 1 if the check fails, otherwise 0.

    Raises:
        AttnDSLError: The program has errors, or cannot run on these shapes.
    """
    check_shapes(shapes, check)
    attention = compile_program(program, declared, kind.backend, kind.exact)
    device = torch.device(shapes.device)
    chosen, _ = choose_backend(kind.backend, device, False, DTYPES[shapes.dtype])
    check_dim_names([attention.lowered.program], dims)
    generator = torch.Generator().manual_seed(seed)
    inputs = random_inputs(shapes, generator)
    sizes = {**shapes.sizes(), **dims}
    captures = make_captures(attention.lowered.program, sizes, shapes.device, generator)
    # Both must drop the same weights.
    drawn = None if attention.lowered.program.dropout is None else seed
    positions = shapes.positions()
    case = _case(attention, inputs, captures, {"seed": drawn, **positions}, kind.backward)
    progress = _progress() if sys.stderr.isatty() else None
    with progress or nullcontext():
        step = _stepper(progress, 2 + 3 * check + kind.backward)
        step(f"first call on {chosen.name}")
        found = results(attention, case)
        checks = held_to_reference(attention, case, found, step) if check else ()
        del found
        timings = []
        for direction in ("forward", "backward")[: 1 + kind.backward]:
            step(f"timing {direction}")
            timed = _direction(attention, inputs, captures, case.options, direction)
            ms = median_ms(timed, shapes.device)
            rate = live_bytes(attention, shapes, captures) / ms / 1e6 if shapes.lengths else None
            timings.append(Timing(direction, ms, _flops(shapes, direction) / ms / 1e9, rate))
    report = Report(program.name, chosen.name, shapes, tuple(timings), checks)
    failed = not all(each.ok for each in checks)
    if as_json:
        print(json.dumps({"ok": None if not check else not failed, **asdict(report)}, indent=1))
    else:
        _print(report)
    return 1 if failed else 0


def median_ms(function: Callable[[], object], device: str) -> float:
    """Median milliseconds of ``function``, after a warm-up."""
    if device.startswith("cuda"):
        from triton.testing import do_bench

        return float(do_bench(function, warmup=100, rep=300, return_mode="median"))
    function()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _CPU_RUNS or time.perf_counter() - begin < _CPU_SECONDS:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def check_shapes(shapes: Shapes, check: bool) -> None:
    """Refuse shapes that cannot be run, or that the reference has no memory for if it is to check.

    Raises:
        UsageError: Says what to give instead.
    """
    if shapes.dtype not in DTYPES:
        raise UsageError(f"there is no dtype '{shapes.dtype}'", hint=f"use {', '.join(DTYPES)}")
    for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"):
        if getattr(shapes, name) < 1:
            raise UsageError(f"{name} is {getattr(shapes, name)}", hint="give at least 1")
    short = [n for n in shapes.lengths if not shapes.q_len <= n <= shapes.kv_len]
    if short:
        raise UsageError(
            f"an entry has {short[0]} keys, with {shapes.q_len} rows and room for {shapes.kv_len}",
            hint="the rows are the last positions: give at least as many keys as rows, and as "
            "much room",
        )
    try:
        torch.empty(0, device=shapes.device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(
            f"device '{shapes.device}' cannot be used: {first}", hint="use --device cpu"
        ) from error
    needed = 8 * shapes.batch * shapes.heads * shapes.q_len * shapes.kv_len
    if check and needed > _CHECK_BYTES:
        raise UsageError(
            f"the dense reference would take {needed / 2**30:.0f} GiB for each matrix of scores",
            hint="time these shapes with --no-check, and check smaller ones",
        )


def random_inputs(shapes: Shapes, generator: torch.Generator) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    s = shapes
    wanted = (
        (s.heads, s.q_len, s.head_dim),
        (s.kv_heads, s.kv_len, s.head_dim),
        (s.kv_heads, s.kv_len, s.value_dim),
        (s.heads, s.q_len, s.value_dim),
    )
    return [
        torch.randn((s.batch, *shape), generator=generator).to(s.device, DTYPES[s.dtype])
        for shape in wanted
    ]


def _case(
    attention: Attention,
    inputs: list[torch.Tensor],
    captures: Mapping[str, Any],
    options: Mapping[str, Any],
    backward: bool,
) -> Case:
    """The call, and with ``backward`` the gradients of q, k, v and the float captures."""
    *operands, grad = inputs
    q, k, v = operands
    _, learned = leaves_of(attention, operands, captures) if backward else ([], {})
    return Case(
        (q, k, v),
        {**captures, **learned},
        options,
        tuple(learned),
        grad_out=grad if backward else None,
    )


def leaves_of(
    attention: Attention, operands: list[torch.Tensor], captures: Mapping[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """q, k and v, and float tensors and run-time params by name, as leaves that require grad."""
    program = attention.lowered.program
    learned = {decl.name: captures[decl.name] for decl in program.tensors if _is_float(decl)}
    for param in program.params:
        if _is_float(param) and param.default is not None:
            learned[param.name] = torch.tensor(float(param.default), device=operands[0].device)
    return (
        [x.detach().requires_grad_() for x in operands],
        {name: x.detach().requires_grad_() for name, x in learned.items()},
    )


def _is_float(decl: TensorDecl | ParamDecl) -> bool:
    return decl.dtype is DType.FLOAT


def _direction(
    attention: Attention,
    inputs: list[torch.Tensor],
    captures: Mapping[str, Any],
    options: Mapping[str, Any],
    direction: str,
) -> Callable[[], object]:
    *operands, grad = inputs
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return attention(*operands, captures=captures, **options)

        return forward
    leaves, learned = leaves_of(attention, operands, captures)
    out = attention(*leaves, captures={**captures, **learned}, **options)
    wanted = [*leaves, *learned.values()]
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)


def live_bytes(attention: Attention, shapes: Shapes, captures: Mapping[str, Any]) -> int:
    """Bytes of q, the output, and the keys and values that some query of the call sees.

    Where the mask depends on the score, a query sees all keys of its entry.
    """
    s = shapes
    mask = attention.lowered.program.mask
    if mask is not None and reads_score(mask):
        keys = sum(s.lengths) * s.kv_heads
    else:
        keys = sum(_live_keys(attention, s, captures, entry) for entry in range(s.batch))
    rows = s.batch * s.heads * s.q_len
    return (rows + keys) * (s.head_dim + s.value_dim) * DTYPES[s.dtype].itemsize


def _live_keys(
    attention: Attention, shapes: Shapes, captures: Mapping[str, Any], entry: int
) -> int:
    """Keys of all heads of one batch entry that some query sees."""
    s = shapes
    seen = attention.mask(
        s.q_len, s.kv_len, s.batch, s.heads, b=entry, kv_heads=s.kv_heads, head_dim=s.head_dim,
        device=s.device, captures=captures, max_bytes=_CHECK_BYTES, **s.positions(),
    )  # fmt: skip
    return int(seen.reshape(s.kv_heads, -1, s.kv_len).any(1).sum())


def _flops(shapes: Shapes, direction: str) -> int:
    """FLOPs of the products alone: two in the forward pass, five in the backward one."""
    s = shapes
    pairs = s.batch * s.heads * s.q_len * s.kv_len
    if direction == "forward":
        return 2 * pairs * (s.head_dim + s.value_dim)
    return 2 * pairs * (3 * s.head_dim + 2 * s.value_dim)


def _few(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) == 1:
        return str(lengths[0])
    return f"{min(lengths)} to {max(lengths)}"


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _stepper(progress: Progress | None, total: int) -> Callable[[str], None]:
    if progress is None:
        return lambda label: None
    task = progress.add_task("", total=total)
    started = iter([0, *[1] * total])
    return lambda label: progress.update(task, description=label, advance=next(started))


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    s = report.shapes
    title = (
        f"{visible(report.program)}: {report.backend} on {s.device}, {s.dtype}, B {s.batch}, "
        f"H {s.heads}/{s.kv_heads}, L {s.q_len}x{s.kv_len}, D {s.head_dim}/{s.value_dim}"
    )
    if s.lengths:
        title += f", {_few(s.lengths)} keys"
    console = Console(width=None if sys.stdout.isatty() else 100)
    # Not Console.print's markup: a program's name may hold brackets.
    console.print(title, markup=False, highlight=False)
    last = "GB/s, live keys" if s.lengths else "TFLOP/s, all pairs"
    table = Table("direction", "median ms", last, box=None)
    for timing in report.timings:
        rate = timing.tflops if timing.live_gbs is None else timing.live_gbs
        table.add_row(timing.direction, f"{timing.ms:.4g}", f"{rate:.4g}")
    console.print(table)
    if not report.checks:
        console.print("not checked")
        return
    for line in table_of(report.checks):
        failed = line.rpartition("  ")[2].startswith("FAILED")
        console.print(
            line,
            style="bold red" if failed else None,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
