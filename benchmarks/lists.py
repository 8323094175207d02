"""What lists of tiles cost that each call makes, beside lists that are kept, and FlexAttention.

    python benchmarks/lists.py [--layers 4] [--shape 2x16x8192x128] [--tiny] [--output FILE]

Masks compare captured tensors, so that their tiles have no closed form. ``step`` is the forward and
the backward of layers of attention alone that share their documents; ``forward`` and ``backward``
are those of one call of a mask of documents or images. All columns of a row take turns in one
process, in bf16, and nothing is captured in a CUDA graph. Times are milliseconds.

``kept`` has the same documents in each call, and makes lists once. ``new`` writes the documents
anew before each step, and makes lists once a step. ``anew`` makes them in each call. ``flex`` is
FlexAttention, compiled, with a block mask that is made outside the timing. ``cost`` is ``anew``
over ``kept``, and ``ahead`` is ``flex`` over ``kept``. Results of ``kept`` and ``anew`` have to be
the same bits where the kernels give the same bits twice. ``difference`` is the largest relative
distance to FlexAttention's. ``made`` says how many lists each column makes in a call.

``--tiny`` is for tests: few rows, the interpreter's kernels, and torch's own FlexAttention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCUMENTS = "tensor doc[kv_len]: int\nmask = q >= kv and doc[q] == doc[kv]"
EITHER = """
tensor doc[kv_len]: int
tensor image[kv_len]: int
mask = q >= kv and doc[q] == doc[kv] or image[q] >= 0 and image[q] == image[kv]
"""
ROUNDS = 15
COLUMNS = [
    "what", "kept_ms", "new_ms", "anew_ms", "flex_ms", "cost", "ahead", "difference", "made",
]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is measured, and on what."""

    layers: int
    batch: int
    heads: int
    length: int
    head_dim: int
    document: int = 1000
    """Mean length of a document; an image has a third of one."""
    device: str = "cuda"

    @property
    def backend(self) -> str:
        """Which kernels run; those of CPUs read no lists."""
        return "auto" if self.device == "cuda" else "triton"


TINY = Sizes(2, 1, 1, 48, 16, 20, "cpu")


class Bench:
    """The operands, the masks' tensors, and what is timed."""

    def __init__(self, sizes: Sizes) -> None:
        import torch

        import attndsl

        torch.manual_seed(0)
        self.sizes = sizes
        self.layer = attndsl.compile(DOCUMENTS, backend=sizes.backend)
        self.either = attndsl.compile(EITHER, backend=sizes.backend)
        shape = (sizes.batch, sizes.heads, sizes.length, sizes.head_dim)
        kind = torch.bfloat16 if sizes.device == "cuda" else torch.float32
        self.leaves = [
            torch.randn(shape, device=sizes.device, dtype=kind).requires_grad_() for _ in range(3)
        ]
        self.grad = torch.randn(shape, device=sizes.device, dtype=kind)
        self.doc, self.moving = self.documents(), self.documents()
        self.others = [self.documents() for _ in range(4)]
        place = torch.arange(sizes.length, device=sizes.device) % sizes.document
        # The first third of what would be a document of the mean length.
        self.image = torch.where(place < sizes.document // 3, self.doc, -1)
        self.turn = 0

    def documents(self) -> Any:
        """Ids (length,) of documents of random lengths."""
        import torch

        numbers = max(1, self.sizes.length // self.sizes.document)
        ends = torch.randint(self.sizes.length, (numbers,), device=self.sizes.device)
        rows = torch.arange(self.sizes.length, device=self.sizes.device)
        return (rows[:, None] >= ends).sum(1)

    def step(self) -> list[Any]:
        """Gradients of what layers of attention give."""
        return self._step(self.doc)

    def new_step(self) -> list[Any]:
        """The same, of other documents than before."""
        self.turn += 1
        self.moving.copy_(self.others[self.turn % len(self.others)])
        return self._step(self.moving)

    def _step(self, doc: Any) -> list[Any]:
        import torch

        q, k, v = self.leaves
        out = q
        for _ in range(self.sizes.layers):
            out = out + self.layer(out, k, v, doc=doc)
        return [out, *torch.autograd.grad(out, self.leaves, self.grad)]

    def forward(self) -> list[Any]:
        """A call of the mask of documents or images."""
        import torch

        with torch.no_grad():
            return [self.either(*self.leaves, doc=self.doc, image=self.image)]

    def backward_of(self, out: Any) -> Callable[[], list[Any]]:
        """The gradients of ``out``, again and again."""
        import torch

        return lambda: list(torch.autograd.grad(out, self.leaves, self.grad, retain_graph=True))

    def flex(self) -> Callable[..., Any]:
        """FlexAttention of q, k and v with the mask of documents or images."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        doc, image, length = self.doc, self.image, self.sizes.length

        def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
            documents = (q >= kv) & (doc[q] == doc[kv])
            return documents | ((image[q] >= 0) & (image[q] == image[kv]))

        blocks = create_block_mask(mask, None, None, length, length, device=self.sizes.device)
        attend = flex_attention
        if self.sizes.device == "cuda":
            torch._functorch.config.donated_buffer = False  # Backwards run many times.
            attend = torch.compile(flex_attention, dynamic=False)
        return lambda *qkv: attend(*qkv, block_mask=blocks)


@contextmanager
def making_anew() -> Iterator[None]:
    """Each call within makes its own lists."""
    from attndsl.backends.kernels.tile_list_cache import KeptLists

    usual = KeptLists.of
    KeptLists.of = lambda self, place, tensors, device, make: self.anew(make)  # type: ignore[method-assign]
    try:
        yield
    finally:
        KeptLists.of = usual  # type: ignore[method-assign]


def rows(sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """A row for each thing that is timed."""
    import torch

    bench = Bench(sizes)
    found = [row("step", bench.step, sizes, rounds, {"new": turns.Run(bench.new_step)})]
    flex = bench.flex()

    def flex_forward() -> list[Any]:
        with torch.no_grad():
            return [flex(*(x.detach() for x in bench.leaves))]

    peers = {"flex": turns.Run(flex_forward)}
    found.append(row("forward", bench.forward, sizes, rounds, peers))
    out = bench.either(*bench.leaves, doc=bench.doc, image=bench.image)
    # torch's own FlexAttention has no gradients on CPUs.
    peers = (
        {"flex": turns.Run(bench.backward_of(flex(*bench.leaves)))}
        if sizes.device == "cuda"
        else {}
    )
    found.append(row("backward", bench.backward_of(out), sizes, rounds, peers))
    return found


def row(
    what: str, call: Callable[[], list[Any]], sizes: Sizes, rounds: int,
    more: dict[str, turns.Run],
) -> dict[str, Any]:  # fmt: skip
    """Times, and whether results agree."""
    runs = {"kept": turns.Run(call), "anew": turns.Run(call, making_anew), **more}
    made = {name: made_by(run, sizes) for name, run in runs.items() if name != "flex"}
    results = {}
    for name, run in runs.items():
        with run.within():
            results[name] = run.call()
    if what == "forward" and not all(map(_same, results["kept"], results["anew"])):
        raise AssertionError("lists that are kept change results")
    times = by_turns(runs, rounds, sizes.device)
    found = {f"{name}_ms": ms for name, ms in times.items()}
    found["cost"] = times["anew"] / times["kept"]
    if "flex" in times:
        found["ahead"] = times["flex"] / times["kept"]
        found["difference"] = max(map(_distance, results["kept"], results["flex"]))
    return {"what": what, **vars(sizes), **found, "made": made}


def made_by(run: turns.Run, sizes: Sizes) -> int:
    """How many lists a call makes, once it has been made."""
    import torch

    from attndsl.call.dispatch import choose_backend

    kind = torch.bfloat16 if sizes.device == "cuda" else torch.float32
    backend, _ = choose_backend(sizes.backend, torch.device(sizes.device), False, kind)
    kept = backend.modules.kept_lists  # type: ignore[attr-defined]
    with run.within():
        run.call()
        before = kept.made
        run.call()
    return int(kept.made - before)


def by_turns(runs: dict[str, turns.Run], rounds: int, device: str) -> dict[str, float]:
    """Milliseconds of a call of each."""
    if device == "cuda":
        return {name: us / 1e3 for name, us in turns.by_turns(runs, rounds).items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            with run.within():
                begin = time.perf_counter()
                run.call()
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(own) for name, own in times.items()}


def _same(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one, other)


def _distance(one: Any, other: Any) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="4")
    parser.add_argument("--shape", default="2x16x8192x128", help="2x16x8192x128")
    parser.add_argument("--tiny", action="store_true", help="few rows, on any machine")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    import torch

    if options.tiny:
        sizes = TINY
    elif not torch.cuda.is_available():
        print("this benchmark needs a GPU, or --tiny", file=sys.stderr)
        return 1
    else:
        sizes = Sizes(options.layers, *map(int, options.shape.split("x")))
    found = rows(sizes, 1 if options.tiny else ROUNDS)
    for each in found:
        print(json.dumps(each), file=sys.stderr, flush=True)
    common.print_table(found, COLUMNS)
    if not options.tiny or options.output:
        path = common.write("lists", sizes.device, found, options.output)
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
