"""How far attention over pages of fp8 lies off, beside pages of bf16.

    python benchmarks/fp8.py [--lengths 4096,32768,131072] [--device cuda] [--output FILE]

Four queries of one request, the last ones, over keys that are normal numbers with four channels
eight times as large, as keys of models are known to have. Keys and values of the second head are
1024 times smaller. Inputs are rounded to bf16 before, and outputs are in fp32. ``error`` is the
root mean square of the output's distance to fp64, over that of the output, on average over heads.
``flat`` rows have scores of a standard deviation of 1. In ``needle`` rows each query is made from
one key of the context, which takes nearly all of the weight. ``found`` is the share of the queries
whose output is closest to the value of that key, among all values.

On a CPU products are made in fp32. On a GPU the kernels that read pages run, and their products
take bf16: their results have a file of their own, ``fp8_cuda.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import attndsl

import common

HEADS, KV_HEADS, DIM, PAGE, QUERIES, LARGE, FACTOR = 4, 2, 128, 16, 4, 4, 8.0
QUIETER = 1 / 1024
"""Size of the keys and values of the second head, as a part of those of the first."""
NEEDLE = 20.0
"""Score of the key that a query looks for."""
TEXTS = {"causal": "causal()", "soft cap": "mask = causal()\nscore = softcap(score, 15.0)"}
BACKENDS = {"cpu": "cpu", "cuda": "decode"}
"""What runs on a device."""
RESULTS = {"cpu": "fp8", "cuda": "fp8_cuda"}
KINDS = ("bf16", "fp8, one scale", "fp8, heads", "fp8, positions")


def inputs(length: int, data: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q (tokens, heads, dim), k and v (length, kv_heads, dim) in bf16, and each query's key."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(QUERIES, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, length, KV_HEADS, DIM, generator=generator)
    k[..., :LARGE] *= FACTOR
    k[:, 1] *= QUIETER
    v[:, 1] *= QUIETER
    looked_for = torch.randint(0, length - QUERIES, (QUERIES, HEADS), generator=generator)
    if data == "needle":
        key = k[looked_for, torch.arange(HEADS) // (HEADS // KV_HEADS)]
        # Channels that all keys have in common find none of them.
        key = torch.cat((torch.zeros_like(key[..., :LARGE]), key[..., LARGE:]), -1)
        q = key * (NEEDLE * DIM**0.5) / key.square().sum(-1, keepdim=True)
    else:
        scores = torch.einsum("qhd,nhd->hqn", q, k[:256].repeat_interleave(HEADS // KV_HEADS, 1))
        q = q / scores.flatten(1).std(1)[:, None] * DIM**0.5
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), looked_for


def cache_of(kind: str, k: torch.Tensor, v: torch.Tensor) -> attndsl.PagedCache:
    """Pages of a kind that hold k and v of one request."""
    length = len(k)
    pages = -(-length // PAGE)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    pool = torch.zeros(2, pages, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16).to(dtype)
    scales: list[Any] = [None, None]
    if kind == "fp8, one scale":
        scales = [float(x.abs().max()) / 448 for x in (k, v)]
    elif kind == "fp8, heads":
        scales = [x.float().abs().amax((0, 2)) / 448 for x in (k, v)]
    elif kind == "fp8, positions":
        scales = list(torch.ones(2, pages, PAGE, KV_HEADS))
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[None].int()
    scales = [x.to(k.device) if torch.is_tensor(x) else x for x in scales]
    lengths, starts = torch.tensor([length]), torch.tensor([0, length])
    cache = attndsl.PagedCache(
        *pool.to(k.device), table.to(k.device), lengths.to(k.device), *scales
    )
    cache.append(k, v, starts.to(k.device))
    return cache


def relative(out: torch.Tensor, golden: torch.Tensor) -> float:
    """Root mean square of the distance over that of ``golden``, on average over heads."""
    distance, size = ((x * x).mean((0, 2)).sqrt() for x in (out - golden, golden))
    return float((distance / size).mean())


def measure(length: int, program: str, data: str, device: str) -> list[dict[str, Any]]:
    """A row for each kind of pages."""
    q, k, v, looked_for = inputs(length, data)
    own = [x.to(device) for x in (q, k, v)]
    # The tiled backend runs in fp64 on any device.
    whole = [x.double().transpose(0, 1)[None] for x in own]
    exact = attndsl.compile(TEXTS[program], backend="cpu")
    golden = exact(*whole, q_offset=length - QUERIES)[0].transpose(0, 1)
    attention = attndsl.compile(TEXTS[program], backend=BACKENDS[device])
    starts = torch.tensor([0, QUERIES], device=device)
    found = []
    for kind in KINDS:
        cache = cache_of(kind, *own[1:])
        out = attention.serve(own[0], cache, starts, out_dtype=torch.float32).double()
        error = relative(out, golden)
        row = {"length": length, "program": program, "data": data, "pages": kind, "error": error}
        if data == "needle":
            values = own[2].double().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)
            nearest = torch.cdist(out.transpose(0, 1), values).argmin(-1)
            row["found"] = float((nearest == looked_for.T.to(device)).double().mean())
        found.append(row)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints rows and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,32768,131072")
    parser.add_argument("--device", choices=tuple(BACKENDS), default="cpu")
    parser.add_argument("--output", type=Path, help="result file")
    given = parser.parse_args(arguments)
    rows = []
    for length in map(int, given.lengths.split(",")):
        for program, data in (("causal", "flat"), ("soft cap", "flat"), ("causal", "needle")):
            for row in measure(length, program, data, given.device):
                rows.append(row)
                print(
                    "  ".join(f"{x:.2e}" if isinstance(x, float) else str(x) for x in row.values())
                )
        common.write(RESULTS[given.device], given.device, rows, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
