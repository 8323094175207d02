"""``attndsl warmup``: compile the kernels of all programs of a file, side by side.

Non-goals: captures of other dtypes than those that ``attndsl run`` makes up.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from attndsl.building.warmup import Warmed, errors_of
from attndsl.building.warmup import warm_up as warm_up_calls
from attndsl.call.dispatch import choose_backend
from attndsl.errors import AttnDSLError, flatten, render, visible

from .check_command import describe
from .example_options import check_dim_names, make_captures
from .run_command import DTYPES, check_shapes, leaves_of, random_inputs
from .show_command import compile_program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.api import Attention
    from attndsl.frontend.declare import Declared

    from .program_inputs import NamedProgram
    from .run_command import CallKind, Shapes


def warm_up(
    programs: Sequence[NamedProgram],
    declared: Mapping[str, Declared],
    shapes: Shapes,
    dims: Mapping[str, int],
    kind: CallKind,
    as_json: bool,
) -> int:
    """Print a line for each program when its kernels are there; 1 if one has none, otherwise 0.

    Raises:
        UsageError: Shapes, dims or a device that cannot be used.
    """
    check_shapes(shapes, check=False)
    device = torch.device(shapes.device)
    backend = choose_backend(kind.backend, device, False, DTYPES[shapes.dtype])[0].name
    begin = time.perf_counter()
    found, compiled = _compiled(programs, declared, kind)
    if compiled:
        check_dim_names((each.lowered.program for each in compiled.values()), dims)
    calls = {name: _call(each, shapes, dims, kind.backward) for name, each in compiled.items()}
    width = max((len(visible(program.name)) for program in programs), default=0)

    def done(warmed: Warmed) -> None:
        if not as_json and warmed.error is None:
            if sys.stderr.isatty():  # What it says of compilations stands in this line.
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            print(f"{visible(warmed.name):<{width}}  {warmed.seconds:6.1f} s", flush=True)

    found += warm_up_calls(calls, device, done)
    seconds = time.perf_counter() - begin
    if as_json:
        whole = {"backend": backend, "seconds": round(seconds, 3)}
        print(json.dumps(whole | _as_json(found, programs), indent=1))
    else:
        _print(found, backend, seconds)
    return 1 if any(each.error is not None for each in found) else 0


def _compiled(
    programs: Sequence[NamedProgram], declared: Mapping[str, Declared], kind: CallKind
) -> tuple[list[Warmed], dict[str, Attention]]:
    """Programs with errors, and the others compiled."""
    wrong, right = [], {}
    for program in programs:
        try:
            right[program.name] = compile_program(program, declared, kind.backend, kind.exact)
        except AttnDSLError as error:
            wrong.append(Warmed(program.name, 0.0, error))
    return wrong, right


def _call(
    attention: Attention, shapes: Shapes, dims: Mapping[str, int], backward: bool
) -> Callable[[], object]:
    """A call on random inputs, and its backward."""

    def call() -> None:
        generator = torch.Generator().manual_seed(0)
        *operands, _ = random_inputs(shapes, generator)
        sizes = {**shapes.sizes(), **dims}
        captures = make_captures(attention.lowered.program, sizes, shapes.device, generator)
        learned: dict[str, torch.Tensor] = {}
        if backward:
            operands, learned = leaves_of(attention, operands, captures)
        attention.warmup(*operands, captures={**captures, **learned})

    return call


def _as_json(found: Sequence[Warmed], programs: Sequence[NamedProgram]) -> dict[str, Any]:
    sources = {program.name: program.source.name for program in programs}
    return {
        "ok": all(each.error is None for each in found),
        "programs": [
            {
                "name": each.name,
                "seconds": round(each.seconds, 3),
                "errors": []
                if each.error is None
                else [describe(sources[each.name], error) for error in flatten(each.error)],
            }
            for each in found
        ],
    }


def _print(found: Sequence[Warmed], backend: str, seconds: float) -> None:
    wrong = [each for each in found if each.error is not None]
    for error in errors_of(wrong):
        print(render(error) + "\n", file=sys.stderr)
    count = len(found) - len(wrong)
    failed = f", {len(wrong)} failed" if wrong else ""
    print(f"{count} program{'s' * (count != 1)} on {backend} in {seconds:.1f} s{failed}")
