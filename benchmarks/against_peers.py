"""The worker of benchmarks/against.py: attndsl and its peers by turns in one process, row by row.

A row with few bytes has several caches, so that the calls of a CUDA graph find none in the L2
cache (see columns.py); this holds for decoding. Every figure goes with the distance of the very
results of its mode, those of a replayed graph too, from those of attndsl in the first mode.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from against_rows import (
    BUCKETS,
    CAP,
    COLUMNS,
    LONGEST,
    MODES,
    OURS,
    add_options,
    columns_of,
    every_row,
    lengths_of,
    named_of,
)
from lists import by_turns
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import attndsl

import worker
from columns import QUICK_ROUNDS, ROUNDS, apart, copies_for
from turns import Run, graph_of, said_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from against_rows import Row

    Call = Callable[[], Any]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_CALLS_OF_GRAPH = 10
_FA4_UNIT = 32
_NO_GRADIENTS = "its gradients are wrong at head dims that are no multiples of 32"
"""FlashAttention-4 (4.0.0b36) at head dims 40, 72 and 80 on an H200: 50 to 150% from attndsl's in
six rows. In the three of them that cuDNN and FlashAttention-2 can run these agree with attndsl."""
_ROOM = 1 << 28
"""Bytes that FlashInfer has for parts of results."""


class Fault(Exception):
    """A kernel's fault, after which this process can run none."""


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Side:
    """One column's call of a row: a function of q, k and v as the column wants them."""

    function: Callable[..., Any]
    inputs: Sequence[tuple[torch.Tensor, ...]]
    """q, k and v for each cache."""
    grad: torch.Tensor
    """The output's gradient, in the column's layout."""
    shown: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    """From the column's layout to (batch, heads, rows, dim)."""
    within: Callable[[], Any] = nullcontext
    traced: Callable[..., Any] | None = None
    """For torch.compile where it is another function."""
    is_compiled: bool = False
    """True if ``function`` is one of torch.compile already."""
    why_no_backward: str = ""
    """Reason why its gradients are left out; empty where they are not."""


@dataclass(frozen=True)
class Prepared:
    """The timed calls of one column in one mode."""

    run: Run
    calls: int
    """Number of calls of the column in a call of ``run``."""
    results: list[torch.Tensor]


class Sides:
    """Calls of each column for a row, on the same numbers; column ``name`` is method ``_name``."""

    def __init__(self, row: Row, device: str, copies: int | None = None) -> None:
        """Make the inputs.

        Args:
            row: The shape and program.
            device: Where to.
            copies: How many caches there are; by default one, and for decoding on a GPU as many
                as leave none in the L2 cache.
        """
        torch.manual_seed(0)
        self._row, self._device = row, device
        dtype = _DTYPES[row.dtype]
        if copies is None:
            copies = copies_for(row.live_bytes) if row.decodes and device == "cuda" else 1

        def draw(heads: int, length: int, dim: int) -> torch.Tensor:
            x = torch.randn(row.batch, heads, length, dim, device=device, dtype=dtype)
            return x.requires_grad_(not row.decodes)

        q = draw(row.heads, row.q_len, row.dim)
        keys = (row.kv_heads, row.kv_len)
        self._inputs = [
            (q, draw(*keys, row.dim), draw(*keys, row.value_dim)) for _ in range(copies)
        ]
        self._grad = draw(row.heads, row.q_len, row.value_dim).detach()
        self._captures = captures_of(row, device)

    def of(self, column: str) -> Side:
        """A column's call.

        Raises:
            Exception: Whatever the column says of a call that it has not.
        """
        return getattr(self, f"_{column}")()  # type: ignore[no-any-return]

    def _attndsl(self) -> Side:
        attention = attndsl.compile(
            self._row.text, backend="cpu" if self._device == "cpu" else "auto"
        )
        given: dict[str, Any] = {**self._captures}
        if self._row.decodes:
            given["q_offset"] = self._row.shift
        return self._side(lambda q, k, v: attention(q, k, v, **given))

    def _cudnn(self) -> Side:
        return self._sdpa("cudnn")

    def _fa2(self) -> Side:
        return self._sdpa("fa2")

    def _efficient(self) -> Side:
        return self._sdpa("efficient")

    def _sdpa(self, name: str) -> Side:
        row, mask = self._row, None
        if row.program not in ("full", "causal", "padding"):
            raise ValueError("it has no such score or mask")
        if row.program == "padding":
            keys = torch.arange(row.kv_len, device=self._device)
            mask = (keys < self._captures["lengths"][:, None])[:, None, None, :]
            mask = mask.expand(-1, 1, row.q_len, -1).contiguous()
        elif row.decodes and row.q_len > 1:
            mask = causal_lower_right(row.q_len, row.kv_len)
        causal = row.program == "causal" and not row.decodes
        grouped = row.heads != row.kv_heads
        function = partial(
            scaled_dot_product_attention, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        within = partial(sdpa_kernel, [_KERNELS[name]])

        def traced(*x: torch.Tensor) -> torch.Tensor:
            # Neither guards nor caches of torch.compile look at the kernels that are allowed
            # outside: all three columns would run what was compiled first.
            with within():
                return function(*x)

        return replace(self._side(function), within=within, traced=traced)

    def _flex(self) -> Side:
        return self._flexible(None)

    def _flex_flash(self) -> Side:
        importlib.import_module("flash_attn.cute")
        return self._flexible({"BACKEND": "FLASH"})

    def _flexible(self, options: dict[str, str] | None) -> Side:
        row = self._row
        score, mask = flex_functions(row, self._captures)
        batch = row.batch if row.program == "padding" else None
        blocks = mask and create_block_mask(
            mask, batch, None, row.q_len, row.kv_len, device=self._device,
            _compile=self._device == "cuda",
        )  # fmt: skip
        function = partial(
            torch.compile(flex_attention, dynamic=False), score_mod=score, block_mask=blocks,
            enable_gqa=row.heads != row.kv_heads, kernel_options=options,
        )  # fmt: skip
        return replace(self._side(function), is_compiled=True)

    def _fa4(self) -> Side:
        given = fa4_options(self._row, self._captures)
        run = importlib.import_module("flash_attn.cute").flash_attn_func
        side = self._turned(
            lambda *x: _output(run(*x, **given)), lambda x: x.transpose(1, 2),
            lambda x: x.transpose(1, 2),
        )  # fmt: skip
        return self._of_fa4(side)

    def _fa4_varlen(self) -> Side:
        row = self._row
        if row.program != "documents":
            raise ValueError("it is for packed documents")
        run = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        starts = [
            entry * row.q_len + start
            for entry in range(row.batch) for start in range(0, row.q_len, row.size)
        ]  # fmt: skip
        ends = torch.tensor([*starts, row.batch * row.q_len], device=self._device).int()
        longest = min(row.size, row.q_len)
        given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest,
                 "max_seqlen_k": longest, "causal": True}  # fmt: skip
        side = self._turned(
            lambda *x: _output(run(*x, **given)), lambda x: x.transpose(1, 2).flatten(0, 1),
            lambda x: x.unflatten(0, (row.batch, row.q_len)).transpose(1, 2),
        )  # fmt: skip
        return self._of_fa4(side)

    def _flashinfer(self) -> Side:
        row = self._row
        if not row.decodes or row.program not in ("causal", "window", "soft cap"):
            raise ValueError("it is for decoding, and has no such score")
        flashinfer = importlib.import_module("flashinfer")
        room = torch.empty(_ROOM, dtype=torch.uint8, device=self._device)
        # Every cache is one page of its batch entry.
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "HND", backend="fa2")
        entries = torch.arange(row.batch + 1, device=self._device).int()
        wrapper.plan(
            entries * row.q_len, entries, entries[:-1], torch.full_like(entries[1:], row.kv_len),
            row.heads, row.kv_heads, row.dim, row.kv_len, causal=True,
            q_data_type=_DTYPES[row.dtype], kv_data_type=_DTYPES[row.dtype],
            window_left=row.size - 1 if row.program == "window" else -1,
            logits_soft_cap=CAP if row.program == "soft cap" else None,
        )  # fmt: skip
        q = self._inputs[0][0].transpose(1, 2).flatten(0, 1).contiguous()
        side = self._side(lambda q, k, v: wrapper.run(q, (k, v)))
        return replace(
            side, inputs=[(q, k, v) for _, k, v in side.inputs],
            shown=lambda x: x.unflatten(0, (row.batch, row.q_len)).transpose(1, 2),
        )  # fmt: skip

    def _side(self, function: Callable[..., Any]) -> Side:
        return Side(function, self._inputs, self._grad)

    def _turned(
        self, function: Callable[..., Any], own: Callable[[torch.Tensor], torch.Tensor],
        shown: Callable[[torch.Tensor], torch.Tensor],
    ) -> Side:  # fmt: skip
        """A column with inputs of its own: contiguous ones in another layout."""
        trains = not self._row.decodes

        def taken(x: torch.Tensor) -> torch.Tensor:
            return own(x.detach()).contiguous().requires_grad_(trains)

        q = taken(self._inputs[0][0])
        inputs = [(q, taken(k), taken(v)) for _, k, v in self._inputs]
        return Side(function, inputs, own(self._grad).contiguous(), shown)

    def _of_fa4(self, side: Side) -> Side:
        """``side`` without gradients where those of FlashAttention-4 are wrong."""
        uneven = self._row.dim % _FA4_UNIT or self._row.value_dim % _FA4_UNIT
        return replace(side, why_no_backward=_NO_GRADIENTS if uneven else "")


def _output(found: Any) -> Any:
    """The output of a function that may return more."""
    return found[0] if isinstance(found, tuple) else found


def captures_of(row: Row, device: str) -> dict[str, torch.Tensor]:
    """Tensors that a program reads; none has a gradient."""
    if row.program == "documents":
        return {"doc": (torch.arange(row.kv_len, device=device) // row.size).int()}
    if row.program == "padding":
        return {"lengths": torch.tensor(lengths_of(row), device=device, dtype=torch.int32)}
    if row.program == "t5":
        return {"table": torch.randn(row.heads, BUCKETS, device=device)}
    if row.program in ("sink", "sink window"):
        return {"logit": torch.randn(row.heads, device=device)}
    return {}


def fa4_options(row: Row, captures: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of FlashAttention-4's plain function; causal means the last query there.

    Raises:
        ValueError: It has no such score or mask.
    """
    window = {"window_size": (row.size - 1, 0)}
    sink = {"learnable_sink": captures.get("logit")}
    known: dict[str, dict[str, Any]] = {
        "full": {}, "causal": {"causal": True}, "window": window,
        "soft cap": {"causal": True, "softcap": CAP}, "sink": {"causal": True, **sink},
        "sink window": {**window, **sink},
    }  # fmt: skip
    if row.program not in known:
        raise ValueError("it has no such score or mask")
    return known[row.program]


def flex_functions(row: Row, captures: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """FlexAttention's score and mask functions of a row; None for neither.

    Raises:
        ValueError: It has no such program.
    """
    if row.program in ("sink", "sink window"):
        raise ValueError("it has no sinks")
    shift, size, heads = row.shift, row.size, row.heads
    doc, lengths, table = (captures.get(name) for name in ("doc", "lengths", "table"))

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q + shift >= kv

    def bucket(back: Any) -> Any:
        half, exact = BUCKETS // 2, BUCKETS // 4
        far = back.abs()
        steps = torch.log(far.clamp(min=1) / exact) / math.log(LONGEST / exact) * (half - exact)
        own = torch.where(far < exact, far, (exact + steps.int()).clamp(max=half - 1))
        return own + torch.where(back < 0, half, 0)

    scores = {
        "alibi": lambda s, b, h, q, kv: (
            s - torch.exp2(-8.0 * (h + 1) / heads) * (q + shift - kv).abs()
        ),
        "soft cap": lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP),
        "t5": lambda s, b, h, q, kv: s + table[h, bucket(q - kv)],  # type: ignore[index]
    }
    masks = {
        "full": None,
        "t5": None,
        "window": lambda b, h, q, kv: (q + shift >= kv) & (q + shift - kv < size),
        "prefix": lambda b, h, q, kv: (q >= kv) | (kv < size),
        "documents": lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),  # type: ignore[index]
        "padding": lambda b, h, q, kv: kv < lengths[b],  # type: ignore[index]
    }
    return scores.get(row.program), masks.get(row.program, causal)


@contextmanager
def stream_of(device: str) -> Iterator[Any]:
    """A stream on which graphs are made, behind all that has been asked for; None on a CPU."""
    if device == "cpu":
        yield None
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream


@contextmanager
def _without_grad(within: Callable[[], Any]) -> Iterator[None]:
    with within(), torch.no_grad():
        yield


def _by_turns(calls: Sequence[Call]) -> Call:
    """A call that makes the next one of ``calls`` each time, from the first on."""
    if len(calls) == 1:
        return calls[0]
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def prepared(side: Side, direction: str, mode: str, stream: Any) -> Prepared:
    """The timed calls, and the results of the last cache in that mode.

    Raises:
        Exception: Whatever the column says of it.
    """
    if mode == "compiled" and not side.is_compiled:
        own = torch.compile(side.traced or side.function, dynamic=False)
        side = replace(side, function=own)
    within = side.within
    if direction == "forward":
        within = partial(_without_grad, side.within)
        calls: list[Call] = [partial(side.function, *inputs) for inputs in side.inputs]
    elif side.why_no_backward:
        raise ValueError(side.why_no_backward)
    else:
        with within():
            out = side.function(*side.inputs[0])
        calls = [partial(torch.autograd.grad, out, side.inputs[0], side.grad, retain_graph=True)]
    with within():
        found = calls[-1]()
    number, run = 1, Run(_by_turns(calls), within)
    if mode in ("device", "graph"):
        number, run, found = _in_graphs(calls, mode, within, stream)
    results = found if isinstance(found, tuple) else (found,)
    return Prepared(run, number, [side.shown(x) for x in results])


def _in_graphs(
    calls: Sequence[Call], mode: str, within: Callable[[], Any], stream: Any
) -> tuple[int, Run, Any]:
    """Calls of a replay, replays, and the results of the last call."""
    last: dict[str, Any] = {}

    def kept(call: Call) -> Run:
        def run() -> None:
            last["found"] = call()

        return Run(run, within)

    if mode == "device":
        # Whole turns of the caches: the last call has the last cache.
        number = -(-_CALLS_OF_GRAPH // len(calls)) * len(calls)
        graphs = [graph_of(kept(_by_turns(calls)), stream, number)]
    else:
        number = 1
        graphs = [graph_of(kept(call), stream, 1) for call in calls]
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    return number, Run(_by_turns([graph.replay for graph in graphs])), last["found"]


def differences(ours: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float | None:
    """The largest distance of our results from others, as a share of these; None for no number."""
    worst = [apart(x, y) for x, y in zip(ours, found, strict=True)]
    return max(worst) if all(map(math.isfinite, worst)) else None


class Bench:
    """Measures one row after the other."""

    def __init__(self, options: argparse.Namespace, modes: Sequence[str]) -> None:
        """Nothing is made before the first row."""
        # FlexAttention and torch.compile compile once for each row; a backward runs many times.
        torch._dynamo.config.cache_size_limit = 512
        torch._functorch.config.donated_buffer = False
        self._rows = every_row(options.seed)
        self._device, self._modes = options.device, modes
        self._peers = named_of(argparse.ArgumentParser(), options.peers, COLUMNS)
        self._rounds = QUICK_ROUNDS if options.quick else ROUNDS

    def warm(self, cell: worker.Cell) -> worker.Found:
        """Run one column of a row once in all directions, so that its kernels are cached."""
        row = self._rows[cell["row"]]
        modes = [mode for mode in ("eager", "compiled") if mode in self._modes] or ["eager"]
        try:
            with stream_of(self._device) as stream:
                side = Sides(row, self._device, copies=1).of(cell["column"])
                for direction, mode in itertools.product(row.directions, modes):
                    prepared(side, direction, mode, stream)
        except Exception as error:
            return {"why": said_by(error)}
        finally:
            self._clear()
        return {}

    def measure(self, cell: worker.Cell) -> worker.Found:
        """Times, differences, and reasons of all columns of a row, by direction.

        Raises:
            Fault: A kernel's fault, with the column that had it.
        """
        self._clear()
        row = self._rows[cell["row"]]
        sides: dict[str, Side] = {}
        why: dict[str, str] = {}
        with stream_of(self._device) as stream:
            made = Sides(row, self._device)
            for column in columns_of(row, self._peers):
                try:
                    sides[column] = made.of(column)
                except Exception as error:
                    why[column] = said_by(error)
                    self._check(column)
            return {
                direction: self._of_direction(sides, why, direction, stream)
                for direction in row.directions
            }

    def _of_direction(
        self, sides: Mapping[str, Side], why: Mapping[str, str], direction: str, stream: Any
    ) -> worker.Found:
        found: worker.Found = {"us": {}, "why": {}, "difference": {}}
        ours: list[torch.Tensor] = []
        for mode in self._modes:
            ready: dict[str, Prepared] = {}
            reasons, apart_by = dict(why), {}
            for column, side in sides.items():
                try:
                    ready[column] = prepared(side, direction, mode, stream)
                    if column == OURS and not ours:
                        ours = [x.clone() for x in ready[column].results]
                    elif ours:
                        apart_by[column] = differences(ours, ready[column].results)
                except Exception as error:
                    ready.pop(column, None)
                    reasons[column] = said_by(error)
                self._check(f"{column}, {direction}, {mode}")
            found["us"][mode] = self._times(ready, reasons)
            found["why"][mode], found["difference"][mode] = reasons, apart_by
        return found

    def _times(self, ready: Mapping[str, Prepared], reasons: dict[str, str]) -> dict[str, float]:
        """Microseconds of a call of each column; ``reasons`` gets one of each that has none."""
        runs = {column: one.run for column, one in ready.items()}
        try:
            times = by_turns(runs, self._rounds, self._device)
        except Exception as error:
            reasons.update(dict.fromkeys(runs, said_by(error)))
            return {}
        return {column: 1e3 * ms / ready[column].calls for column, ms in times.items()}

    def _check(self, what: str) -> None:
        if self._device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise Fault(f"{what}: {said_by(error)}") from error

    def _clear(self) -> None:
        """Forget what was compiled for the row before, and its memory."""
        torch._dynamo.reset()
        if self._device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Answer the cells of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--worker", required=True)
    options = parser.parse_args()
    bench = Bench(options, named_of(parser, options.modes, MODES) or MODES)
    worker.serve(json.loads(options.worker), bench.warm if options.warm else bench.measure)


if __name__ == "__main__":
    main()
