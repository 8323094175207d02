"""The kernel that writes new keys into pages gives what torch operations give."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
import torch
from support.fork_server import compiling, run_python

import attndsl
from attndsl import errors
from attndsl.backends.triton.append_launch import launch_append, why_not_fp8

FP8 = torch.float8_e4m3fn
SCALES = {
    "none": lambda: (None, None),
    "numbers": lambda: (0.5, 0.25),
    "tensors": lambda: (torch.tensor(0.5), torch.tensor(0.25)),
    "heads": lambda: (torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.0])),
    "positions": lambda: (torch.zeros(17, 3, 2), torch.zeros(17, 3, 2)),
}


def cache_of(dtype, scales, device):
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(17, generator=generator)[:15].view(3, 5).int()
    pools = [torch.zeros(17, 3, 2, width).to(dtype) for width in (8, 6)]
    scales = [x.to(device) if isinstance(x, torch.Tensor) else x for x in scales]
    lengths = torch.tensor([7, 1, 12])
    return attndsl.PagedCache(
        *(x.to(device) for x in pools), table.to(device), lengths.to(device), *scales
    )


def both(dtype, scales, device, k, v, starts):
    """The cache that torch's operations write on a CPU, and the one that the kernel writes."""
    wanted, found = (cache_of(dtype, scales(), where) for where in ("cpu", device))
    wanted.append(k, v, starts)
    places = (found.table, found.lengths, starts.to(device))
    for rows, pages, scale in (
        (k, found.k_pages, found.k_scale),
        (v, found.v_pages, found.v_scale),
    ):
        launch_append(rows.to(device), pages, scale, places)
    return wanted, found


def held(cache):
    parts = (cache.k_pages, cache.v_pages, cache.k_scale, cache.v_scale)
    return [x.float().cpu() for x in parts if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_the_rows_dtype(device, dtype):
    torch.manual_seed(0)
    k, v = torch.randn(12, 2, 8).to(dtype), torch.randn(2, 12, 6).to(dtype).transpose(0, 1)
    for found, wanted in zip(
        *map(held, both(dtype, SCALES["none"], device, k, v, torch.tensor([1, 3, 3, 10]))),
        strict=True,
    ):
        assert torch.equal(found, wanted)
        assert found.any()


@pytest.mark.parametrize("kind", SCALES)
def test_pages_of_fp8(device, kind):
    """The interpreter rounds some numbers to the other neighbour: these need no rounding."""
    torch.manual_seed(0)
    k, v = (torch.randint(-7, 8, (12, 2, width)).float() for width in (8, 6))
    k[..., 0], v[..., 0] = 7.0, -3.5
    k[2, 0, 1] = 7.0 if kind == "positions" else 1e6
    for found, wanted in zip(
        *map(held, both(FP8, SCALES[kind], device, k, v, torch.tensor([0, 3, 3, 10]))), strict=True
    ):
        rtol = 0.13 if kind == "positions" else 0.0
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=0.0)
        assert found.any()


def test_wrong_places_are_left_alone(device):
    cache = cache_of(torch.float32, (None, None), device)
    cache.table[0] = torch.tensor([99, -1, 1 << 30, 5, 6])
    cache.lengths[2] = 1000
    starts = torch.tensor([0, 7, 8, 10], device=device)
    rows = torch.ones(12, 2, 8, device=device)
    launch_append(rows, cache.k_pages, None, (cache.table, cache.lengths, starts))
    # Of request 0 all pages are wrong, and request 2 ends behind its table.
    assert int((cache.k_pages == 1).sum()) == 2 * 8
    empty = (cache.table[:0], cache.lengths[:0], starts[:1])
    launch_append(rows, cache.k_pages, None, empty)
    launch_append(rows[:0], cache.k_pages, None, (cache.table, cache.lengths, starts))


def test_kernels_of_pages_are_asked_for(device, monkeypatch):
    """Torch operations write unless a call names the backend."""
    launched = []

    def launch(rows, pages, scale, places):
        launched.append(rows)
        launch_append(rows, pages, scale, places)

    monkeypatch.setattr("attndsl.backends.triton.append_launch.launch_append", launch)
    caches = [cache_of(torch.float32, (None, None), device) for _ in range(2)]
    k, v = (torch.randn(10, 2, width, device=device) for width in (8, 6))
    starts = torch.tensor([0, 3, 3, 10], device=device)
    caches[0].append(k, v, starts)
    assert not launched
    caches[1].append(k, v, starts, backend="decode")
    assert len(launched) == 2
    for name in ("k_pages", "v_pages"):
        found, wanted = (getattr(cache, name) for cache in caches)
        assert torch.equal(found, wanted)
        assert found.any()


def test_gpus_without_fp8_are_told(monkeypatch):
    pages = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, told in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, x=capability: x)
        assert (why_not_fp8(pages) is not None) == told
    monkeypatch.setattr(
        "attndsl.backends.triton.append_launch.why_not_fp8", lambda pages: "no 8 bits"
    )
    cache = cache_of(FP8, (None, None), "cpu")
    rows = torch.ones(10, 2, 8)
    with pytest.raises(errors.BackendError, match="no 8 bits"):
        launch_append(rows, cache.k_pages, None, (cache.table, cache.lengths, cache.lengths))


SCRIPT = textwrap.dedent("""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from attndsl.backends.device.append import attention_append

    names = attention_append.arg_names
    for page, scales, fp8 in (("bf16", 0, False), ("fp8e4nv", 2, True), ("fp8e4nv", 3, True)):
        known = dict(SIZE=16, D=128, BLOCK_D=128, BLOCK_B=128, SCALES=scales, FP8=fp8, MOST=448.0)
        types = {name: "i32" for name in names if name not in known}
        types |= dict(ROWS="*bf16", PAGES=f"*{page}", SCALE="*fp32", TABLE="*i32", LENGTHS="*i32",
                      STARTS="*i32", scale="fp32")
        types |= dict.fromkeys(known, "constexpr")
        values = {(names.index(name),): value for name, value in known.items()}
        source = ASTSource(attention_append, types, values)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert "st.global" in found.asm["ptx"]
    print("compiled")
""")


def test_it_compiles_for_hopper():
    done = run_python(SCRIPT, env=compiling())
    assert done.stdout == "compiled\n", done.stderr
