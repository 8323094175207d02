"""Launches of the kernels for packed requests over pages.

The call that they get says sizes alone: its q is a view of the packed rows that has as many rows a
request as one may have, and nothing is read of its k and v.

Non-goals: what a request is, and values that are wrong (:mod:`attndsl.runtime.paged`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..emit.facts import MAX_ROWS, TRITON_TYPES, PageFacts, block_widths
from ..kernels.arguments import capture_arguments
from ..kernels.counts import Counts
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Job, Task
from ..kernels.tile_lists import lists_of
from .append import why_not_fp8
from .decode import members_of_call
from .decode_tiles import MOST_ROWS, most_parts, shape_of
from .family import Portable, facts_of_task
from .serve_kernels import KERNELS, SERVES

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Pages
    from ..kernels.kernel import FixedKernel, Kernel
    from ..kernels.layout import Layout
    from .decode_tiles import Shape

_MOST_PROGRAMS = 65535
"""CUDA's limit for the second and the third number of a program."""


class Serve(Portable):
    """Packed rows, keys in pages. Has forwards alone."""

    name = "decode"
    kernels: tuple[Kernel, ...] = KERNELS
    fixed: tuple[FixedKernel, ...] = ()

    def __init__(self) -> None:
        self._counts = Counts()

    def why_not_pages(self, lowered: Lowered, call: Call, pages: Pages) -> str | None:
        """Why these kernels do not run a call of packed requests, or None."""
        reason = why_not_fp8(pages.k)
        if reason is not None:
            return reason
        if lowered.contractions is not None:
            return "the program multiplies rows of captured tensors"
        if max(call.q.shape[0], _units(lowered, call)[0]) > _MOST_PROGRAMS:
            return f"the kernels take up to {_MOST_PROGRAMS} requests, and tiles of rows of each"
        return None

    def jobs_of_pages(self, lowered: Lowered, call: Call, pages: Pages) -> tuple[Job, ...]:
        """One: the kernel of the call's rows."""
        facts = facts_of_task(lowered, call, Task.FORWARD, None, None)
        own = page_facts(pages)
        facts = replace(
            facts, packed_heads=True, pages=own, aligned=own.q_aligned, wide_rows=own.wide_rows
        )
        return (Job(SERVES[_units(lowered, call)[1]], lowered, facts),)

    def serve(
        self, layout: Layout, lowered: Lowered, call: Call, pages: Pages
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (tokens, heads, dim) and log-sum-exp (tokens, heads)."""
        q = pages.q
        tokens, heads, _ = q.shape
        batch, _, q_len, _ = call.q.shape
        out = q.new_zeros(
            (tokens, heads, pages.v.shape[3]), dtype=torch.float32 if call.wide else q.dtype
        )
        lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
        ((name, kernel),) = layout.executables.items()
        units, shape, members = _units(lowered, call)
        # Where a request may have many rows, there are programs enough, and room would be large.
        parts = 1
        if q_len <= MOST_ROWS:
            parts = most_parts(call.k.shape[2], heads // members, kernel.config)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = lists_of(layout, lowered, call, name, stream)
            room, counts = lse, lse
            if parts > 1:
                width = block_widths(layout.facts)[1] + 2
                room = lse.new_empty(batch * units * parts * shape.lines * width)
                counts = self._counts.of(q.device, stream, batch * units)
            scales = [_scale(x) for x in (pages.k_scale, pages.v_scale)]
            kernel.launch_grid(
                (parts, units, batch),
                stream,
                [
                    q, pages.k, pages.v, out, lse, room, counts, pages.table, pages.lengths,
                    pages.starts, *(pages.v if x[0] is None else x[0] for x in scales),
                    q.stride(1), q.stride(0), out.stride(1), out.stride(0),
                    *pages.k.stride()[:3], *pages.v.stride()[:3], *scales[0][1], *scales[1][1],
                    *pages.table.stride(), pages.lengths.stride(0), pages.starts.stride(0),
                    call.scale, scales[0][2], scales[1][2], batch, heads, call.k.shape[1], q_len,
                    call.k.shape[2], tokens, pages.k.shape[0], members,
                    *capture_arguments(layout.facts, call), *lists,
                ],
            )  # fmt: skip
        return out, lse


def _units(lowered: Lowered, call: Call) -> tuple[int, Shape, int]:
    """Tiles of rows of a request, the shape of one, and how many heads it has."""
    members = members_of_call(lowered, call)
    shape = shape_of(call.q.shape[2], members)
    return call.q.shape[1] // members * -(-call.q.shape[2] // shape.queries), shape, members


def _scale(
    scale: float | torch.Tensor | None,
) -> tuple[torch.Tensor | None, tuple[int, ...], float]:
    """Scales in memory, their strides by page, row and head, and a scale that is a number."""
    if isinstance(scale, torch.Tensor):
        return scale, (*[0] * (3 - scale.dim()), *scale.stride()), 1.0
    return None, (0, 0, 0), 1.0 if scale is None else float(scale)


def _kind(scale: float | torch.Tensor | None) -> int:
    if scale is None:
        return 0
    return {0: 2, 1: 3, 3: 4}[scale.dim()] if isinstance(scale, torch.Tensor) else 1


def page_facts(pages: Pages) -> PageFacts:
    """What kernels depend on of pages."""
    bytes_of = pages.k.element_size()
    rows = pages.q.stride()[:2]
    dtype = "fp8e4nv" if bytes_of == 1 else TRITON_TYPES[pages.k.dtype]
    return PageFacts(
        pages.k.shape[1], dtype, TRITON_TYPES[pages.table.dtype],
        TRITON_TYPES[pages.lengths.dtype], TRITON_TYPES[pages.starts.dtype],
        _kind(pages.k_scale), _kind(pages.v_scale),
        _aligned(pages.k) and _aligned(pages.v), _aligned(pages.q), MAX_ROWS * max(rows) >= 1 << 31,
    )  # fmt: skip


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether its address, in bytes, and all strides but the last are multiples of 16."""
    return tensor.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in tensor.stride()[:-1])
