"""Kernels side by side: attndsl, FlexAttention, and what SDPA and FlashAttention-4 can run.

    python benchmarks/attention.py [--cases causal,alibi] [--shapes 1x16x16384x128] [--quick]
    python benchmarks/attention.py --grid     # every case at every length, head dim and grouping

A shape is batch x heads x length x head dim; 32/8 heads are 32 query heads on 8 kv heads.

Rows are measured in one worker process, one thing after the other; a worker that dies or hangs
costs the cell that it was at, and another one goes on with the rest. Every figure is the median of
CUDA events over at least 300 ms after at least 100 ms of warm-up. ``difference`` is the relative
distance |a - b| / |b| of attndsl's output (its gradients) to FlexAttention's, so that no figure is
that of a wrong result.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import worker

if TYPE_CHECKING:
    from collections.abc import Callable

Shape = tuple[int, int, int, int, int]
"""Batch, heads, kv heads, length, head dim."""
SHAPES: tuple[Shape, ...] = (
    (1, 16, 16, 16384, 128), (1, 32, 32, 16384, 64), (4, 16, 16, 4096, 128),
)  # fmt: skip
QUICK_SHAPES: tuple[Shape, ...] = ((1, 16, 16, 4096, 128),)
GRID_TOKENS, GRID_WIDTH = 16384, 2048
"""Batch times length, and heads times head dim, of every shape of the grid (a length above the
tokens has batch 1)."""
COLUMNS = ("attndsl", "deterministic", "portable", "cudnn", "fa2", "fa4", "flex")
"""``deterministic``: attndsl with gradients equal bit for bit; ``portable``: its kernels for every
GPU, where it has others for this one."""
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One program, and the same for FlexAttention and SDPA."""

    program: str
    flex: str
    """Name of the function in ``flex_functions`` that gives its score and mask functions."""
    is_causal: bool | None = None
    """For SDPA and FlashAttention; None where they have no such mask or score."""
    softcap: float = 0.0
    """With a causal mask, which FlashAttention-4 has."""


CASES = {
    "full": Case("score", "full", False),
    "causal": Case("causal()", "causal", True),
    "causal_where": Case("score = where(q >= kv, score, -inf)", "causal", True),
    "window1024": Case("sliding_window(1024)", "window"),
    "prefix1024": Case("prefix_lm(1024)", "prefix"),
    "documents1000": Case(
        "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]", "documents"
    ),
    "neighbourhood128x6": Case(
        "abs(q // 128 - kv // 128) <= 6 and abs(q % 128 - kv % 128) <= 6", "neighbourhood"
    ),
    "alibi": Case("mask = causal()\nscore = score + alibi()", "alibi"),
    "softcap": Case("mask = causal()\nscore = softcap(score, 20.0)", "softcap", softcap=20.0),
    "head_gain": Case(
        "tensor gain[heads]: float\nmask = causal()\nscore = gain[h] * score", "head_gain"
    ),
    "pair_bias": Case(
        "tensor bias[heads, q_len, kv_len]: float\nmask = causal()\nscore = score + bias[h, q, kv]",
        "pair_bias",
    ),
    "pair_mask": Case("tensor allowed[q_len, kv_len]: bool\nmask = allowed[q, kv]", "pair_mask"),
}


def work(cells: list[dict[str, Any]], quick: bool) -> None:
    """Measure ``cells`` in their order and say what was found."""
    import torch

    # Flex compiles once for each case and shape, more often than the limit expects.
    torch._dynamo.config.cache_size_limit = 512
    bench = Bench(quick)
    worker.serve(cells, lambda cell: bench.measure(**cell))


class Bench:
    """Inputs of the current row, and how each column is run on them."""

    def __init__(self, quick: bool) -> None:
        """Nothing is made before the first cell."""
        self._quick = quick
        self._row: tuple[str, tuple[int, ...]] | None = None
        self._results: dict[tuple[str, str], list[Any]] = {}

    def measure(self, column: str, case: str, shape: list[int], direction: str) -> dict[str, Any]:
        """One cell: ``ms``, or ``why`` there is none."""
        import torch
        from triton.testing import do_bench

        row = (case, tuple(shape))
        if row != self._row:
            self._results.clear()
            torch.cuda.empty_cache()
            self._row = row
            self._inputs(*shape)
            self._of_pairs(case)
        refusal = self._why_not(column, case, direction)
        if refusal:
            return {"why": refusal}
        forward = getattr(self, f"_{column}")(case)
        leaves = [*self._leaves]
        if case == "head_gain":
            leaves.append(self._gain)
        if column == "fa4":
            leaves = self._fa4_leaves
        if direction == "forward":

            def timed() -> Any:
                with torch.no_grad():
                    return forward()

            result = [timed()]
        else:
            out = forward()
            grad = self._grad.transpose(1, 2) if column == "fa4" else self._grad

            def timed() -> Any:
                return torch.autograd.grad(out, leaves, grad, retain_graph=True)

            result = list(timed())
        warmup, rep = (25, 50) if self._quick else (100, 300)
        found = {"ms": do_bench(timed, warmup=warmup, rep=rep, return_mode="median")}
        if column in ("attndsl", "flex"):
            found.update(self._difference(column, direction, result))
        if column == "attndsl":
            found["backend"] = self._backend
        return found

    def _difference(self, column: str, direction: str, result: list[Any]) -> dict[str, float]:
        self._results[column, direction] = result
        other = self._results.get(("attndsl" if column == "flex" else "flex", direction))
        if other is None:
            return {}
        ours, theirs = (result, other) if column == "attndsl" else (other, result)
        worst = max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(ours, theirs, strict=True)
        )
        return {"difference": worst}

    def _inputs(self, batch: int, heads: int, kv_heads: int, length: int, dim: int) -> None:
        import torch

        torch.manual_seed(0)
        q, k, v, self._grad = (
            torch.randn((batch, each, length, dim), device="cuda", dtype=torch.bfloat16)
            for each in (heads, kv_heads, kv_heads, heads)
        )
        self._grouped = heads != kv_heads
        self._leaves = [x.requires_grad_() for x in (q, k, v)]
        self._fa4_leaves: list[Any] = []
        doc = (torch.arange(length, device="cuda") // 1000).int()
        self._gain = (1 + 0.1 * torch.randn(heads, device="cuda")).requires_grad_()
        self._captures: dict[str, dict[str, Any]] = {
            "documents1000": {"doc": doc}, "head_gain": {"gain": self._gain}
        }  # fmt: skip

    def _of_pairs(self, case: str) -> None:
        """What has an element a pair: bf16 (heads, length, length), and bool (length, length)."""
        import torch

        q = self._leaves[0]
        _, heads, length, _ = q.shape
        if case == "pair_bias":
            bias = torch.randn((heads, length, length), device=q.device, dtype=q.dtype)
            self._captures[case] = {"bias": bias}
        if case == "pair_mask":
            kept = torch.rand((length, length), device=q.device) < 0.9
            self._captures[case] = {"allowed": kept.tril_()}

    def _why_not(self, column: str, case: str, direction: str = "backward") -> str | None:
        capped = column == "fa4" and CASES[case].softcap
        if column in ("cudnn", "fa2", "fa4") and CASES[case].is_causal is None and not capped:
            return "it has no such mask or score without a bias of length x length"
        if column == "deterministic" and direction == "forward":
            return "every forward is deterministic"
        if column == "fa4":
            try:
                import flash_attn.cute  # noqa: F401
            except ImportError:
                return "flash_attn.cute is not installed"
        return None

    def _attndsl(self, case: str) -> Callable[[], Any]:
        import torch

        try:
            from attndsl.call.dispatch import choose_backend
        except ModuleNotFoundError:  # Of trees from before the modules had these names.
            from attndsl.runtime.dispatch import choose_backend

        self._backend = choose_backend("auto", torch.device("cuda"), False, torch.bfloat16)[0].name
        return self._program(case, "auto")

    def _portable(self, case: str) -> Callable[[], Any]:
        return self._program(case, "triton")

    def _deterministic(self, case: str) -> Callable[[], Any]:
        return self._program(case, "auto", deterministic=True)

    def _program(self, case: str, backend: str, deterministic: bool = False) -> Callable[[], Any]:
        import attndsl

        attention = attndsl.compile(CASES[case].program, backend=backend)
        given = self._captures.get(case, {})
        return lambda: attention(*self._leaves, deterministic=deterministic, **given)

    def _cudnn(self, case: str) -> Callable[[], Any]:
        return self._sdpa("CUDNN_ATTENTION", case)

    def _fa2(self, case: str) -> Callable[[], Any]:
        return self._sdpa("FLASH_ATTENTION", case)

    def _sdpa(self, kernel: str, case: str) -> Callable[[], Any]:
        import torch.nn.functional as functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        causal = bool(CASES[case].is_causal)

        def forward() -> Any:
            with sdpa_kernel([getattr(SDPBackend, kernel)]):
                return functional.scaled_dot_product_attention(
                    *self._leaves, is_causal=causal, enable_gqa=self._grouped
                )

        return forward

    def _fa4(self, case: str) -> Callable[[], Any]:
        from flash_attn.cute import flash_attn_func

        # It takes (batch, length, heads, dim).
        self._fa4_leaves = [
            x.detach().transpose(1, 2).contiguous().requires_grad_() for x in self._leaves
        ]

        def forward() -> Any:
            cap = CASES[case].softcap
            causal = bool(cap or CASES[case].is_causal)
            out = flash_attn_func(*self._fa4_leaves, causal=causal, softcap=cap)
            return out[0] if isinstance(out, tuple) else out

        return forward

    def _flex(self, case: str) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q = self._leaves[0]
        score, mask = flex_functions(CASES[case].flex, q.shape[1], self._captures.get(case, {}))
        blocks = mask and create_block_mask(
            mask, None, None, q.shape[2], q.shape[2], device="cuda", _compile=True
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(
            *self._leaves, score_mod=score, block_mask=blocks, enable_gqa=self._grouped
        )


def flex_functions(name: str, heads: int, captures: dict[str, Any]) -> tuple[Any, Any]:
    """FlexAttention's score and mask functions of a case; None for neither."""
    import torch

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    doc, gain, bias, allowed = (captures.get(each) for each in ("doc", "gain", "bias", "allowed"))
    scores = {
        "alibi": lambda s, b, h, q, kv: s - torch.exp2(-8.0 * (h + 1) / heads) * (q - kv),
        "softcap": lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0),
        "head_gain": lambda s, b, h, q, kv: s * gain[h],
        "pair_bias": lambda s, b, h, q, kv: s + bias[h, q, kv],
    }
    masks = {
        "full": None,
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 1024),
        "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 1024),
        "documents": lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
        "pair_mask": lambda b, h, q, kv: allowed[q, kv],
        "neighbourhood": lambda b, h, q, kv: (
            (torch.abs(q // 128 - kv // 128) <= 6) & (torch.abs(q % 128 - kv % 128) <= 6)
        ),
    }
    return scores.get(name), masks.get(name, causal)


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--shapes", help="BxHxSxD, comma-separated")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="what to run side by side")
    parser.add_argument("--grid", action="store_true", help="the whole table: hours")
    parser.add_argument("--quick", action="store_true", help="one shape, short timings")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker), options.quick)
        return 0
    cases, columns = options.cases.split(","), options.columns.split(",")
    for kind, chosen, known in (("case", cases, CASES), ("column", columns, COLUMNS)):
        unknown = [each for each in chosen if each not in known]
        if unknown:
            parser.error(f"there is no {kind} {unknown[0]}; there are: {', '.join(known)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    shapes = grid() if options.grid else QUICK_SHAPES if options.quick else SHAPES
    if options.shapes:
        try:
            shapes = tuple(map(parse_shape, options.shapes.split(",")))
        except ValueError as error:
            parser.error(str(error))
    rows = {
        (case, shape, direction): _row(case, shape, direction, columns)
        for shape in shapes
        for case in cases
        for direction in DIRECTIONS
    }
    cells = [
        {"column": column, "case": case, "shape": list(shape), "direction": direction}
        for case, shape, direction in rows
        for column in columns
    ]
    output = options.output
    answers = worker.measured(Path(__file__), cells, ["--quick"] * options.quick)
    for number, (cell, found) in enumerate(answers, 1):
        row = rows[cell["case"], tuple(cell["shape"]), cell["direction"]]
        _enter(row, cell["column"], found)
        batch, heads, kv_heads, length, dim = cell["shape"]
        grouping = f"{heads}/{kv_heads}" if heads != kv_heads else f"{heads}"
        label = f"{cell['case']} {batch}x{grouping}x{length}x{dim} {cell['direction']}"
        print(
            f"[{number}/{len(cells)}] {label:<48} {cell['column']:<13} "
            f"{found.get('ms', found.get('why'))}",
            flush=True,
        )
        common.write("attention", "cuda", list(rows.values()), output)
    times = [f"{c}_ms" for c in columns]
    names = ["case", "direction", "B", "H", "Hkv", "S", "D", *times, "difference"]
    common.print_table(list(rows.values()), names)
    return 0


def parse_shape(text: str) -> Shape:
    """``BxHxSxD`` or ``BxH/HKVxSxD``.

    Raises:
        ValueError: It is neither.
    """
    try:
        batch, heads, length, dim = text.split("x")
        query, _, kv = heads.partition("/")
        found = (int(batch), int(query), int(kv or query), int(length), int(dim))
    except ValueError:
        raise ValueError(f"{text!r} is no shape; write 1x16x4096x128 or 2x32/8x8192x128") from None
    if min(found) < 1 or found[1] % found[2]:
        raise ValueError(f"{text!r}: sizes are 1 or more, and kv heads divide heads")
    return found


def grid() -> tuple[Shape, ...]:
    """Lengths 1k to 32k, head dims 64, 128 and 256, one and four query heads on a kv head."""
    return tuple(
        (max(1, GRID_TOKENS // length), heads, heads // group, length, dim)
        for dim in (64, 128, 256)
        for group in (1, 4)
        for length in (1024, 2048, 4096, 8192, 16384, 32768)
        for heads in (GRID_WIDTH // dim,)
    )


def _row(case: str, shape: Shape, direction: str, columns: list[str]) -> dict[str, Any]:
    batch, heads, kv_heads, length, dim = shape
    row: dict[str, Any] = {"case": case, "direction": direction, "dtype": "bf16"}
    row |= {"B": batch, "H": heads, "Hkv": kv_heads, "S": length, "D": dim}
    row |= {f"{column}_ms": None for column in columns}
    return row | {"backend": None, "difference": None, "why": {}}


def _enter(row: dict[str, Any], column: str, found: dict[str, Any]) -> None:
    row[f"{column}_ms"] = found.get("ms")
    if "why" in found:
        row["why"][column] = found["why"]
    for name in ("backend", "difference"):
        if name in found:
            row[name] = found[name]


if __name__ == "__main__":
    sys.exit(main())
