"""Launches of the kernels for packed requests over pages.

The call that they get says sizes alone: its q is a view of the packed rows that has as many rows a
request as one may have, and nothing is read of its k and v.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..emit.facts import (
    ADDRESS,
    FP8_TYPE,
    MAX_ROWS,
    TRITON_TYPES,
    PageFacts,
    block_widths,
    for_lists,
)
from ..kernels.arguments import capture_arguments
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Job, Task
from ..kernels.tile_lists import lists_of
from ..kernels.work_counters import Counts
from ..paged_requests import requests_of
from .append_launch import why_not_fp8
from .decode_family import tile_of
from .decode_tiles import (
    COUNTS_OF_GRAPHS,
    MOST_QUERIES,
    UnitPrograms,
    joins_parts,
    most_parts,
    programs_of,
    sharing_of,
)
from .family import Portable, facts_of_task
from .serve_kernels import KERNELS, SERVES

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call
    from ..emit.facts import KernelFacts
    from ..kernels.compile import Executable
    from ..kernels.kernel import FixedKernel, Kernel
    from ..kernels.launch_spec import LaunchSpec
    from ..paged_requests import ChunkResults, Pages
    from .decode_tiles import DecodeShape

_MOST_PROGRAMS = 65535
"""CUDA's limit for the second and the third number of a program."""


class PagesLayout(NamedTuple):
    """Launch layout that steps of one signature share."""

    layout: LaunchSpec
    kernel: Executable
    facts: KernelFacts
    """Facts of the captures that the kernel takes."""
    takes: bool
    """True if the kernel takes captures, or sizes that the program names."""
    grid: tuple[int, int, int]
    counted: int
    """Units that count the parts of their keys; 0 where all keys are one part."""
    room: int
    """Numbers that parts leave in memory."""
    row: tuple[int, int]
    """Heads and columns of a token's output."""
    strides: tuple[int, ...]
    """Arguments of the kernel, in its order."""
    sizes: tuple[int, ...]
    """The same, in front of the number of tokens."""
    more_sizes: tuple[int, ...]
    """The same, behind it."""


class Serve(Portable):
    """Packed rows, keys in pages. Has forwards alone."""

    name = "decode"
    kernels: tuple[Kernel, ...] = KERNELS
    fixed: tuple[FixedKernel, ...] = ()

    def __init__(self) -> None:
        self._counts = Counts(COUNTS_OF_GRAPHS)

    def why_not_pages(self, lowered: Lowered, call: Call, pages: Pages) -> str | None:
        """Reason why these kernels do not run a call of packed requests, or None."""
        reason = why_not_fp8(pages.k)
        if reason is not None:
            return reason
        held = (pages.k, pages.v, pages.k_scale, pages.v_scale)
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in held):
            return "torch has yet to change the signs of pages"
        if lowered.contractions is not None:
            return "the program multiplies rows of captured tensors"
        if max(call.q.shape[0] + 1, _units(lowered, call, pages)[0]) > _MOST_PROGRAMS:
            most = _MOST_PROGRAMS - 1
            return f"the kernels take up to {most} requests, and tiles of rows of each"
        return None

    def jobs_of_pages(self, lowered: Lowered, call: Call, pages: Pages) -> tuple[Job, ...]:
        """One: the kernel of the call's rows."""
        facts = facts_of_task(lowered, call, Task.FORWARD, None, None)
        own = page_facts(pages)
        facts = replace(
            facts, packed_heads=True, pages=own, divisor=ADDRESS if own.q_aligned else 1,
            wide_rows=own.wide_rows,
            reach=None,  # Later steps of the signature may have more rows.
        )  # fmt: skip
        units, shape, _ = _units(lowered, call, pages)
        sharing = sharing_of(shape, lowered.program, facts)
        facts = replace(facts, joined_parts=joins_parts(sharing, call.q.shape[0], units))
        return (Job(SERVES[shape], lowered, facts),)

    def layout_of_pages(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, pages: Pages
    ) -> PagesLayout:
        """Launch layout that steps of one signature share.

        Args:
            layout: With the kernel of :meth:`jobs_of_pages`.
            lowered: The program.
            call: A call of the signature.
            pages: What it reads.
        """
        q = pages.q
        batch, heads, q_len, _ = call.q.shape
        (kernel,) = layout.executables.values()
        width, block_width = pages.v.shape[3], block_widths(layout.facts)[1]
        tiles = -(-call.k.shape[2] // kernel.config.block_n)
        units, shape, members = _units(lowered, call, pages)
        # Where a request may have many rows, there are programs enough, and room would be large.
        parts, sharing = 1, sharing_of(shape, lowered.program, layout.facts)
        if q_len <= MOST_QUERIES:
            parts = most_parts(call.k.shape[2], heads // members, kernel.config, sharing)
        numbers = batch * units * parts * shape.lines * (block_width + 2)
        programs = UnitPrograms(parts, 1)
        if layout.facts.joined_parts:
            programs = programs_of(sharing, parts, batch * units, tiles)
        facts = layout.facts.without_made()
        return PagesLayout(
            layout,
            kernel,
            facts,
            bool(facts.captures or facts.params or facts.dim_names),
            # One request more: its programs clear tokens of nobody.
            (programs.number, units, batch + 1),
            batch * units * sharing.counts_of(parts),
            numbers,
            (heads, width),
            (q.stride(1), q.stride(0), width, heads * width, *_steps(pages)),
            (batch, heads, call.k.shape[1], q_len, call.k.shape[2]),
            (pages.k.shape[0], members, parts, programs.least_tiles),
        )

    def serve(
        self, launch: PagesLayout, lowered: Lowered, call: Call, pages: Pages,
        chunks: ChunkResults | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Output (tokens, heads, dim) and log-sum-exp (tokens, heads)."""
        q, layout = pages.q, launch.layout
        tokens = q.shape[0]
        if chunks is None:
            kind = torch.float32 if call.wide else q.dtype
            out = torch.empty((tokens, *launch.row), dtype=kind, device=q.device)
            lse = torch.empty((tokens, launch.row[0]), dtype=torch.float32, device=q.device)
        else:
            out, lse = chunks.out, chunks.lse
        stream = stream_of(q.device)
        with on_device(q.device):
            lists: list[object] = []
            if layout.lists:
                lists = _lists(layout, lowered, call, pages, stream)
            room = counts = lse
            if launch.counted:
                room = torch.empty(launch.room, dtype=torch.float32, device=q.device)
                counts = self._counts.of(q.device, stream, launch.counted)
            k_scale, v_scale = pages.k_scale, pages.v_scale
            of_k, of_v = isinstance(k_scale, torch.Tensor), isinstance(v_scale, torch.Tensor)
            launch.kernel.launch_grid(
                launch.grid,
                stream,
                [
                    q, pages.k, pages.v, out, lse, room, counts, pages.table, pages.lengths,
                    pages.starts, k_scale if of_k else pages.v, v_scale if of_v else pages.v,
                    *launch.strides, call.scale,
                    1.0 if of_k or k_scale is None else float(k_scale),
                    1.0 if of_v or v_scale is None else float(v_scale),
                    *launch.sizes, tokens, 0 if chunks is None else chunks.most,
                    *launch.more_sizes,
                    *(capture_arguments(launch.facts, call) if launch.takes else ()), *lists,
                ],
            )  # fmt: skip
        return out, lse


def _units(lowered: Lowered, call: Call, pages: Pages) -> tuple[int, DecodeShape, int]:
    """Tiles of rows of a request, the shape of one, and how many heads it has."""
    members, shape = tile_of(lowered, call, pages.k, pages.v)
    return call.q.shape[1] // members * -(-call.q.shape[2] // shape.queries), shape, members


def _lists(
    layout: LaunchSpec, lowered: Lowered, call: Call, pages: Pages, stream: int
) -> list[object]:
    """Tiles that no formulas tell, found by kernels that read all captures from memory."""
    found = requests_of(pages.starts, pages.lengths, pages.q.shape[0], call.k.shape[2])
    made = {name: getattr(found, what).to(torch.int32) for name, what in pages.made}
    call = call._replace(tensors={**call.tensors, **made})
    layout = replace(layout, facts=for_lists(layout.facts))
    (name,) = layout.executables
    return lists_of(layout, lowered, call, name, stream)


def _scale_strides(scale: float | torch.Tensor | None) -> tuple[int, ...]:
    """Steps of scales in memory by page, row and head."""
    if isinstance(scale, torch.Tensor):
        return (*[0] * (3 - scale.dim()), *scale.stride())
    return (0, 0, 0)


def _kind(scale: float | torch.Tensor | None) -> int:
    if scale is None:
        return 0
    return {0: 2, 1: 3, 3: 4}[scale.dim()] if isinstance(scale, torch.Tensor) else 1


def page_facts(pages: Pages) -> PageFacts:
    """Facts of pages that kernels depend on."""
    bytes_of = pages.k.element_size()
    rows = pages.q.stride()[:2]
    dtype = FP8_TYPE if bytes_of == 1 else TRITON_TYPES[pages.k.dtype]
    return PageFacts(
        pages.k.shape[1], dtype, TRITON_TYPES[pages.table.dtype],
        TRITON_TYPES[pages.lengths.dtype], TRITON_TYPES[pages.starts.dtype],
        _kind(pages.k_scale), _kind(pages.v_scale),
        _aligned(pages.k) and _aligned(pages.v), _aligned(pages.q), MAX_ROWS * max(rows) >= 1 << 31,
        _are_wide(pages), pages.k.stride()[:2] == pages.v.stride()[:2], made=pages.made,
    )  # fmt: skip


def _are_wide(pages: Pages) -> bool:
    """Return True if a step, or a row's offset from its page, does not fit 32 bits."""
    of_scales = (_scale_strides(scale)[1] for scale in (pages.k_scale, pages.v_scale))
    most = max(pages.k.stride(1), pages.v.stride(1), *of_scales)
    return max(*_steps(pages), pages.k.shape[1] * most) >= 1 << 31


def _steps(pages: Pages) -> tuple[int, ...]:
    """Steps in memory of pages, their scales, the table, lengths and starts: the kernel's i32."""
    return (
        *pages.k.stride()[:3], *pages.v.stride()[:3], *_scale_strides(pages.k_scale),
        *_scale_strides(pages.v_scale), *pages.table.stride(), pages.lengths.stride(0),
        pages.starts.stride(0),
    )  # fmt: skip


def bits_of_pages(pages: Pages) -> tuple[bool, bool]:
    """Alignment of pages and of q, by which :func:`page_facts` varies in steps of one signature."""
    return (pages.k.data_ptr() | pages.v.data_ptr()) % 16 == 0, pages.q.data_ptr() % 16 == 0


def kinds_of_pages(pages: Pages) -> tuple[object, ...]:
    """Further facts that :class:`PagesLayout` depends on, in steps whose signature nobody knows."""
    return (pages.made, *((x.shape, x.stride()) for x in pages if isinstance(x, torch.Tensor)))


def _aligned(tensor: torch.Tensor) -> bool:
    """Return True if the address, in bytes, and all strides but the last are multiples of 16."""
    return tensor.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in tensor.stride()[:-1])
