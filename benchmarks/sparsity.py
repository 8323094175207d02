"""What it costs to know the tiles of a mask, beside FlexAttention's ``create_block_mask``.

    python benchmarks/sparsity.py [--device cuda] [--length 1048576] [--output FILE]

``plan_ms`` is the closed form of all three loops, from the checked program, in a process that has
planned nothing yet; ``plan_bytes`` the memory that it takes (Python's), and ``device_bytes`` what
lies on the device. Masks without a closed form have ``find_ms``: the kernels that find the tiles
and write the lists. ``flex_ms`` and ``flex_bytes`` are ``create_block_mask``'s, eager and compiled
(after its first call), at ``flex_length``, the longest up to ``--length`` that it has memory for.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Call
from attndsl.passes.tiles.closed_form import closed_segments
from attndsl.passes.tiles.tile_plan import DIRECTIONS
from attndsl.pipeline import lower
from attndsl.source import Source

import common

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.pipeline import Lowered

DOCUMENT = 1000
CASES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "causal": ("causal()", lambda b, h, q, k: q >= k),
    "window1024": ("sliding_window(1024)", lambda b, h, q, k: (q >= k) & (q - k < 1024)),
    "prefix1024": ("prefix_lm(1024)", lambda b, h, q, k: (q >= k) | (k < 1024)),
    "neighbourhood128x6": (
        "abs(q // 128 - kv // 128) <= 6 and abs(q % 128 - kv % 128) <= 6",
        lambda b, h, q, k: ((q // 128 - k // 128).abs() <= 6) & ((q % 128 - k % 128).abs() <= 6),
    ),
    "strided512": (
        "strided(512, 512)",
        lambda b, h, q, k: (q >= k) & ((q - k < 512) | ((q - k) % 512 == 0)),
    ),
}
DOCUMENTS = "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]"


def plan(lowered: Lowered) -> None:
    """All loops of a program at the tile sizes of a head dim of 128."""
    for direction in DIRECTIONS.values():
        loop = lowered.sparsity.loop(direction, 128, 64, shifted=False, indexed=False)
        assert loop.listed is None, loop.listed


def closed_form(text: str) -> dict[str, Any]:
    """Time and Python memory of a plan; isl's own memory ends with the plan."""
    import islpy

    islpy.Context()
    lowered = lower(Source(f"mask = {text}"), {})
    begin = time.perf_counter()
    plan(lowered)
    cold = (time.perf_counter() - begin) * 1e3
    closed_segments.cache_clear()
    tracemalloc.start()
    plan(lowered)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"plan_ms": cold, "plan_bytes": used, "device_bytes": 0}


def call_of(tensors: dict[str, torch.Tensor], length: int, device: str) -> Call:
    """A call whose q, k and v take no memory."""
    q = torch.empty((), device=device).expand(1, 1, length, 1)
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
    return Call(q, q, q, 1.0, sizes | {"q_len": length, "kv_len": length}, tensors)


def documents(length: int, device: str) -> dict[str, Any]:
    """Time and memory of the kernels that list the tiles of packed documents."""
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.kernels.config import Config
    from attndsl.backends.kernels.kernel import Job
    from attndsl.backends.kernels.modules import Modules
    from attndsl.backends.kernels.tile_lists import list_arguments
    from attndsl.backends.triton.kernels import KERNELS
    from attndsl.runtime.program_store import default_cache

    lowered = lower(Source(DOCUMENTS), {})
    ids = (torch.arange(length, device=device) // DOCUMENT).to(torch.int32)
    call = call_of({"doc": ids}, length, device)
    facts = facts_of(lowered.program, call)
    (forward, *_) = KERNELS
    job = Job(forward, lowered, facts)
    kernels = Modules(default_cache()).tile_lists(job, Config(128, 128, 4, 1), ids.device)
    stream = torch.cuda.current_stream().cuda_stream

    def find() -> None:
        list_arguments(kernels, lowered.sparsity, facts, call, stream)

    return {"find_ms": gpu_ms(find), "device_bytes": peak_bytes(find)}


def flex(mask: Callable[..., torch.Tensor], length: int, compiled: bool) -> dict[str, Any]:
    """``create_block_mask``'s time and memory, at the longest length that fits."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    make = torch.compile(create_block_mask) if compiled else create_block_mask
    while length >= 1024:
        try:
            begin = time.perf_counter()
            make(mask, None, None, length, length, device="cuda")
            torch.cuda.synchronize()
            first = (time.perf_counter() - begin) * 1e3

            def again(length: int = length) -> None:
                make(mask, None, None, length, length, device="cuda")

            kind = "compiled" if compiled else "eager"
            return {
                f"flex_{kind}_length": length,
                f"flex_{kind}_first_ms": first,
                f"flex_{kind}_ms": gpu_ms(again),
                f"flex_{kind}_bytes": peak_bytes(again),
            }
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            length //= 2
    raise RuntimeError("create_block_mask has no memory for 1024 positions")


def gpu_ms(call: Callable[[], None]) -> float:
    """Median wall time of a call that is waited for."""
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[2:])


def peak_bytes(call: Callable[[], None]) -> int:
    """Memory on the device that a call takes at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--length", type=int, default=1 << 20)
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (text, mask) in CASES.items():
        row = {"case": name, "length": options.length, **closed_form(text)}
        if options.device == "cuda":
            row |= flex(mask, options.length, compiled=False)
            row |= flex(mask, options.length, compiled=True)
        rows.append(row)
        print(row, flush=True)
    if options.device == "cuda":
        row = {"case": f"documents{DOCUMENT}", "length": options.length}
        row |= documents(options.length, options.device)
        ids = torch.arange(options.length, device="cuda") // DOCUMENT
        for compiled in (False, True):
            row |= flex(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), options.length, compiled)
        rows.append(row)
    common.write("sparsity", "cuda" if options.device == "cuda" else "cpu", rows, options.output)
    common.print_table(rows, ["case", "plan_ms", "plan_bytes", "find_ms", "device_bytes"])


if __name__ == "__main__":
    main()
