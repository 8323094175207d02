"""Gradients from dS that attention kernels have stored: what is read of it, and where sums go."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.fork_server import compiling, run_python
from support.jobs import shares_of

import attndsl
from attndsl.backends.base import CallGradients, StoredDS, Wants
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.triton.captures import pair_gradients, run_extra
from attndsl.backends.triton.captures.kind import BackwardState
from attndsl.backends.triton.tiles import Widths
from attndsl.runtime.program_store import default_cache

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
BLOCK_M, BLOCK_N = 32, 64
"""A backward's tile: whole ones of the kernel, which has 32 x 32 where it is interpreted."""
DIMS = {"b": "batch", "h": "heads", "hkv": "kv_heads", "q": "q_len", "kv": "kv_len"}
MASKS = {
    "none": "",
    "causal": "mask = causal(); ",
    "window": "mask = sliding_window(9); ",
    "documents": "tensor doc[batch, kv_len]: int; mask = doc[b, q] == doc[b, kv]; ",
    "by head": "mask = kv <= q + 30 * h; ",
    "nothing": "mask = q < 0; ",
    "by score": "mask = kv <= q and score < 100; ",
}


@dataclass(frozen=True)
class Sizes:
    """Of a call."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 70
    kv_len: int = 100

    def of(self, indices: tuple[str, ...]) -> list[int]:
        """A tensor's, of which ``indices`` look up each element."""
        return [getattr(self, DIMS[index]) for index in indices]


def live_of(mask: str, sizes: Sizes, offset: int) -> torch.Tensor:
    """(batch, heads, keys, queries)."""
    q = torch.arange(sizes.q_len)[None, :] + offset
    kv = torch.arange(sizes.kv_len)[:, None]
    head = torch.arange(sizes.heads)[:, None, None]
    found = {
        "none": kv >= 0,
        "causal": kv <= q,
        "window": (kv <= q) & (q - kv < 9),
        "documents": q // 40 == kv // 40,
        "by head": kv <= q + 30 * head,
        "nothing": kv < 0,
        "by score": kv <= q,
    }[mask]
    return found.expand(sizes.batch, sizes.heads, sizes.kv_len, sizes.q_len)


def stored_slopes(live: torch.Tensor) -> tuple[torch.Tensor, StoredDS]:
    """dS of pairs, and as a backward leaves it: NaN where nothing was stored."""
    *leading, keys, queries = live.shape
    slopes = torch.randn(live.shape).bfloat16().masked_fill(~live, 0.0)
    counts = [-(-n // block) for n, block in ((keys, BLOCK_N), (queries, BLOCK_M))]
    whole = slopes.new_zeros(*leading, counts[0] * BLOCK_N, counts[1] * BLOCK_M)
    whole[:, :, :keys, :queries] = live
    some = whole.unflatten(3, (-1, BLOCK_M)).unflatten(2, (-1, BLOCK_N)).amax((3, 5), keepdim=True)
    whole[:, :, :keys, :queries] = slopes
    empty = (some == 0).expand(-1, -1, -1, BLOCK_N, -1, BLOCK_M).flatten(4).flatten(2, 3)
    return slopes, StoredDS(whole.masked_fill(empty, torch.nan), some[:, :, :, 0, :, 0].char())


def expected_of(slopes: torch.Tensor, indices: tuple[str, ...], sizes: Sizes) -> torch.Tensor:
    """The gradient of what ``indices`` look up, fp64."""
    group = sizes.heads // sizes.kv_heads
    whole = slopes.double().unflatten(1, (sizes.kv_heads, group))
    letters = {"b": "b", "h": "kg", "hkv": "k", "q": "i", "kv": "j"}
    found = torch.einsum("bkgji->" + "".join(letters[index] for index in indices), whole)
    return found.reshape(sizes.of(indices))


def run(text: str, tensors: dict[str, torch.Tensor], names: str, sizes: Sizes, **more: Any) -> Any:
    """Gradients of the tensors ``names`` of a call, and what was stored for it, from ``more``."""
    lowered = attndsl.compile(text).lowered
    call = example_call(lowered, 16, 16, torch.bfloat16, tensors)
    q = torch.randn(sizes.batch, sizes.heads, sizes.q_len, 16).bfloat16()
    k = torch.randn(sizes.batch, sizes.kv_heads, sizes.kv_len, 16).bfloat16()
    slopes = more.pop("slopes")
    call = call._replace(q=q, k=k, v=k, **more)
    shares = shares_of(lowered, call, Wants(tensors=frozenset(names)))
    assert frozenset().union(*(own.names for own in shares.of_kind("stored"))) == frozenset(names)
    backend = generated_backend(("triton",), default_cache())
    lse = torch.zeros(2, *q.shape[:3])
    again = BackwardState(lowered, call, lse, lse[0], q, backend._layout)
    found = run_extra(again, shares, CallGradients(None, None, None, stored_ds=slopes))
    assert found.stored_ds is None
    return found.tensors


def check_sums(
    mask: str, indices: tuple[str, ...], sizes: Sizes, dtype: torch.dtype, turned: bool = False
) -> None:
    text = f"tensor t[{', '.join(DIMS[index] for index in indices)}]: float; {MASKS[mask]}"
    text += f"score = score + t[{', '.join(indices)}]"
    t = torch.zeros(sizes.of(indices), dtype=dtype)
    if turned:
        t = torch.zeros(sizes.of(indices)[::-1], dtype=dtype).permute(*reversed(range(t.dim())))
    tensors = {"t": t}
    if mask == "documents":
        tensors["doc"] = (torch.arange(200) // 40).expand(sizes.batch, 200).int()
    slopes, stored = stored_slopes(live_of(mask, sizes, 0))
    found = run(text, tensors, "t", sizes, slopes=stored)["t"]
    assert found.dtype is dtype
    assert found.stride() == t.stride() or not turned
    expected = expected_of(slopes, indices, sizes)
    torch.testing.assert_close(found, expected.to(dtype), atol=1e-5, rtol=2.0**-7)


INDICES = [
    ("h", "q", "kv"), ("b", "h", "q", "kv"), ("b", "q", "kv"), ("b", "hkv", "q", "kv"),
    ("hkv", "q", "kv"), ("h", "kv", "q"), ("q", "h", "kv"),
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    check_sums(mask, ("h", "q", "kv"), Sizes(), torch.float32)


@interpreted
@pytest.mark.parametrize("indices", INDICES, ids="-".join)
def test_what_is_told_apart(indices):
    check_sums("causal", indices, Sizes(), torch.float32)
    check_sums("by head", indices, Sizes(q_len=40, kv_len=40), torch.bfloat16)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_dtypes_and_any_number_that_share(dtype, batch):
    check_sums("causal", ("h", "q", "kv"), Sizes(batch, 2, 1, 64, 64), dtype)


@interpreted
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_one_program_goes_through_all(monkeypatch, mask):
    """As on GPUs where tiles are many; else they are added up in parts."""
    monkeypatch.setattr(pair_gradients, "PROGRAMS", 1)
    check_sums(mask, ("q", "kv"), Sizes(3, 2, 1, 40, 50), torch.float32)
    check_sums(mask, ("h", "q", "kv"), Sizes(3, 2, 2, 40, 50), torch.float32)


@interpreted
def test_parts_of_which_the_last_has_nothing(monkeypatch):
    """Five in four parts of two."""
    monkeypatch.setattr(pair_gradients, "PROGRAMS", 8)
    sizes = Sizes(5, 2, 2, 40, 50)
    check_sums("causal", ("h", "q", "kv"), sizes, torch.float32)


@interpreted
def test_strides(monkeypatch):
    """What is not added up in parts lies as the tensor does."""
    monkeypatch.setattr(pair_gradients, "PROGRAMS", 1)
    check_sums("causal", ("h", "q", "kv"), Sizes(), torch.float32, turned=True)


@interpreted
def test_a_part_of_a_tensor():
    """Positions beyond those of the call get zeros."""
    sizes = Sizes()
    text = "tensor t[heads, m, n]: float; mask = causal(); score = score + t[h, q, kv]"
    slopes, stored = stored_slopes(live_of("causal", sizes, 5))
    t = torch.zeros(sizes.heads, sizes.q_len + 9, sizes.kv_len + 4)
    found = run(text, {"t": t}, "t", sizes, slopes=stored, q_offset=5)["t"]
    expected = torch.zeros_like(t).double()
    expected[:, 5 : 5 + sizes.q_len, : sizes.kv_len] = expected_of(slopes, ("h", "q", "kv"), sizes)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@interpreted
def test_tensors_that_tell_others_apart():
    """Two launches, the first of which stores two gradients."""
    sizes = Sizes()
    text = """
        tensor t[heads, q_len, kv_len]: float
        tensor u[heads, kv_len, q_len]: float
        tensor w[batch, q_len, kv_len]: float
        score = score + t[h, q, kv] - 0.0 + u[h, kv, q] + w[b, q, kv]
    """
    wanted = {"t": ("h", "q", "kv"), "u": ("h", "kv", "q"), "w": ("b", "q", "kv")}
    slopes, stored = stored_slopes(live_of("none", sizes, 0))
    tensors = {name: torch.zeros(sizes.of(indices)) for name, indices in wanted.items()}
    found = run(text, tensors, "tuw", sizes, slopes=stored)
    for name, indices in wanted.items():
        expected = expected_of(slopes, indices, sizes)
        torch.testing.assert_close(found[name].double(), expected, atol=1e-5, rtol=1e-5)


def test_whole_tiles_make_those_of_backwards():
    from attndsl.backends.hopper.tile_sizes import CANDIDATES

    for backward in (config for row in CANDIDATES[Task.BACKWARD].values() for config in row):
        for own in pair_gradients.STORED_TILES.candidates(Widths(128, 128, 2), 232448):
            assert backward.block_m % own.block_m == backward.block_n % own.block_n == 0


COMPILED = textwrap.dedent(
    """
    import torch
    from attndsl.backends.base import Wants
    from support.cross import cross_compile
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.emit.facts import facts_of, with_gradients
    from attndsl.pipeline import lower
    from attndsl.source import Source

    text = "tensor t[heads, q_len, kv_len]: float; mask = causal(); score = score + t[h, q, kv]"
    lowered = lower(Source(text), {})
    for dtype in (torch.float32, torch.bfloat16):
        t = torch.zeros(2, 2, 2, dtype=dtype)
        call = example_call(lowered, 128, 128, torch.bfloat16, {"t": t})
        facts = with_gradients(facts_of(lowered.program, call), Wants(tensors=frozenset("t")))
        (built,) = cross_compile(lowered, facts, "cuda:90", None, ["stored"])
        ptx = built.kernel.asm["ptx"]
        print(ptx.count("ld.global.v4.b32"), ptx.count("st.global.v4.b32"), "ld.global.b16" in ptx)
    """
)


def test_sixteen_bytes_at_a_time():
    """Of each of two tiles and of a last one, and of sums that are turned: 64 x 64, 128 threads."""
    done = run_python(COMPILED, env=compiling())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:2] == ["12 8 False", "12 4 False"]
