"""A tile plan as device functions: how many tiles a program visits, and which the n-th is.

A kernel runs one flattened loop over all FULL segments and one over all PARTIAL ones, whatever
their number, so that the loop's body is printed once for each kind.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import Segment, TilePlan

_INDENT = "    "


def print_loops(plan: TilePlan, parameters: list[str]) -> list[str]:
    """``full_kv_tiles``, ``full_kv_tile`` and so on, for both directions and both kinds."""
    texts = []
    for axis, loop in (("kv", plan.kv_loop), ("q", plan.q_loop)):
        for kind, segments in (("full", loop.full), ("partial", loop.partial)):
            texts.append(_count(f"{kind}_{axis}_tiles", kind.upper(), segments, parameters))
            texts.append(_nth(f"{kind}_{axis}_tile", kind.upper(), segments, parameters))
    return texts


def _count(name: str, kind: str, segments: tuple[Segment, ...], parameters: list[str]) -> str:
    counts = [_length(segment) for segment in segments]
    return _function(
        name, "tile", parameters, f"Number of {kind} tiles.", [f"return {' + '.join(counts) or '0'}"]
    )


def _nth(name: str, kind: str, segments: tuple[Segment, ...], parameters: list[str]) -> str:
    if not segments:
        body = ["return step"]
    else:
        *before, last = segments
        body = []
        for segment in before:
            body += [f"found = {_element(segment)}", f"count = {_length(segment)}"]
            # Later segments see the steps that are left; a step within this one is decided here.
            body += ["chosen = step < count" if segment is before[0] else "here = (step < count) & ~chosen"]
            body += (
                ["result = tl.where(chosen, found, 0)"]
                if segment is before[0]
                else ["result = tl.where(here, found, result)", "chosen = chosen | here"]
            )
            body += ["step = step - count"]
        body += (
            [f"return tl.where(chosen, result, {_element(last)})"]
            if before
            else [f"return {_element(last)}"]
        )
    return _function(name, "step, tile", parameters, f"Index of {kind} tile number ``step``.", body)


def _length(segment: Segment) -> str:
    if segment.start == "0" and segment.step == 1:
        return f"tl.maximum({segment.stop}, 0)"
    span = f"({segment.stop}) - ({segment.start})"
    return f"tl.maximum({span if segment.step == 1 else f'tl.cdiv({span}, {segment.step})'}, 0)"


def _element(segment: Segment) -> str:
    step = "step" if segment.step == 1 else f"step * {segment.step}"
    return step if segment.start == "0" else f"{segment.start} + {step}"


def _function(name: str, first: str, parameters: list[str], doc: str, body: list[str]) -> str:
    arguments = [f"{first}, q_len, kv_len, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,"]
    arguments += textwrap.wrap(", ".join(parameters) + ",", 88) if parameters else []
    return "\n".join(
        [
            "@triton.jit",
            f"def {name}(",
            *(_INDENT + line for line in arguments),
            "):",
            f'{_INDENT}"""{doc}"""',
            *(_INDENT + line for line in body),
        ]
    )
