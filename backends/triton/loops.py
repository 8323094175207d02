"""A tile plan as device functions: how many tiles a program visits, and which the n-th is.

A kernel runs one flattened loop over all FULL segments and one over all PARTIAL ones, whatever
their number, so that the loop's body is printed once for each kind.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import LoopPlan, Segment

_INDENT = "    "


def print_loop(name: str, loop: LoopPlan, parameters: list[str]) -> list[str]:
    """``NAME_full_count``, ``NAME_full_tile``, ``NAME_partial_count`` and ``NAME_partial_tile``."""
    texts = []
    for kind, segments in (("full", loop.full), ("partial", loop.partial)):
        if segments:
            texts.append(_count(f"{name}_{kind}_count", kind.upper(), segments, parameters))
            texts.append(_nth(f"{name}_{kind}_tile", kind.upper(), segments, parameters))
    return texts


def _count(name: str, kind: str, segments: tuple[Segment, ...], parameters: list[str]) -> str:
    counts = [_length(segment) for segment in segments]
    return _function(
        name, "tile", parameters, f"Number of {kind} tiles.", [f"return {' + '.join(counts)}"]
    )


def _nth(name: str, kind: str, segments: tuple[Segment, ...], parameters: list[str]) -> str:
    *before, last = segments
    body = []
    for number, segment in enumerate(before):
        # Later segments see the steps that are left; the first segment with room is the one.
        body += [f"count = {_length(segment)}", "here = (step >= 0) & (step < count)"]
        found = "step" if number == 0 else "found"
        body += [f"found = tl.where(here, {_element(segment)}, {found})", "step = step - count"]
    body.append(
        f"return tl.where(step >= 0, {_element(last)}, found)"
        if before
        else f"return {_element(last)}"
    )
    return _function(name, "step, tile", parameters, f"Index of {kind} tile number ``step``.", body)


def _length(segment: Segment) -> str:
    if segment.start == "0" and segment.step == 1:
        return f"{segment.stop}"
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
