"""Kernels for packed requests over pages: their results, their bits, what they read."""

from __future__ import annotations

import contextlib
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.fork_server import compiling, run_python
from support.serving import Shape, make_step

import attndsl
from attndsl.backends.engine.backend import GeneratedBackend
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.paged_requests import Pages
from attndsl.backends.triton.decode_tiles import Sharing, most_parts
from attndsl.backends.triton.serve_kernels import arguments
from attndsl.backends.triton.serve_launch import Serve, page_facts

LENGTHS, COUNTS = (37, 1, 53, 5, 70, 2), (1, 1, 6, 0, 3, 2)
SHAPE = Shape(dtype=torch.float32, dim=16, value_dim=16)
FP8 = torch.float8_e4m3fn
PROGRAMS = {
    "window": "mask = causal_lower_right() and (q - kv < 25 or kv < 2)\nscore = softcap(score, 9)",
    "sizes": "mask = causal(); score = score + alibi() + kv_len / 7 - q_len / 9 + 0.1 * b / batch",
    "heads": "mask = causal() and q - kv < 9 * (h + 1); score = score + hkv / kv_heads",
    "sink": "mask = causal(); sink = 0.5 * h",
    "sigmoid": "mask = causal(); weights = sigmoid(score)",
    "none": "q - kv < -100",
    "by score": "mask = causal() and score > 0",
}


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """How many steps the kernels have run."""
    found = []
    real = Serve.serve

    def seen(self, *args):
        found.append(args)
        return real(self, *args)

    monkeypatch.setattr(Serve, "serve", seen)
    return found


def on(device, step):
    """The step with its tensors on a device."""
    c = step.cache
    tensors = (c.k_pages, c.v_pages, c.table, c.lengths)
    cache = attndsl.PagedCache(*(x.to(device) for x in tensors), c.k_scale, c.v_scale)
    return step.q.to(device), cache, step.starts.to(device)


def both(text, step, device, most=6, **captures):
    """Results of kernels, and of gathered keys on a CPU in the same dtype."""
    lse = "weights" not in text
    given = {"return_lse": lse, "out_dtype": torch.float32}
    there = {name: x.to(device) for name, x in captures.items()}
    own = attndsl.compile(text, backend="decode").serve(
        *on(device, step), most_queries=most, **given, **there
    )
    wanted = attndsl.compile(text).serve(step.q, step.cache, step.starts, **given, **captures)
    return [x if lse else (x,) for x in (own, wanted)]


def close(found, wanted, tolerance=1e-5):
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.cpu(), other, atol=tolerance, rtol=tolerance)


SLOW = {"sizes", "none", "by score", "numbers", "tensors"}


def some(names):
    """Names, of which some are for the heavy grids."""
    return [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in names]


@pytest.mark.parametrize("name", some(PROGRAMS))
def test_programs(device, ran, name):
    step = make_step(LENGTHS, COUNTS, SHAPE)
    close(*both(PROGRAMS[name], step, device))
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("page", "most"),
    [pytest.param(1, 6, marks=pytest.mark.slow), (3, 17), (4, 6), (16, 6), (48, 6)],
)
def test_pages_of_any_size(device, page, most):
    """Pages that are parts of tiles, tiles that are parts of pages, and others."""
    step = make_step(LENGTHS, COUNTS, SHAPE._replace(page=page))
    close(*both("mask = causal() and q - kv < 40", step, device, most))


@pytest.mark.parametrize(
    "sizes", [(3, 1, 9, 21), pytest.param((6, 6, 40, 8), marks=pytest.mark.slow)]
)
def test_heads_and_dims(device, sizes):
    heads, kv_heads, dim, value_dim = sizes
    step = make_step((19, 40), (1, 5), Shape(heads, kv_heads, dim, value_dim, 4, torch.float32))
    close(*both("causal()", step, device, most=5))


def test_chunks_of_prompts(device):
    step = make_step((90, 33), (80, 1), SHAPE)
    close(*both("mask = causal() and q - kv < 30", step, device, most=81))


def test_layouts(device):
    """Heads behind rows or before them, of keys, of values or of both."""
    step = make_step(LENGTHS, COUNTS, SHAPE)
    c = step.cache
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.k_pages, c.v_pages))
    wanted = both("causal()", step, device)[0]
    for pools in ((k, v), (k, c.v_pages), (c.k_pages, v)):
        other = step._replace(cache=attndsl.PagedCache(*pools, c.table.long(), c.lengths.int()))
        for own, same in zip(both("causal()", other, device)[0], wanted, strict=True):
            assert torch.equal(own, same)


def test_steps_from_page_to_page():
    """Those of values may be those of keys, and all fit 32 bits or none needs to."""

    def strided(*steps, sizes=None, dtype=torch.int32):
        sizes = (1,) * len(steps) if sizes is None else sizes
        return torch.empty_strided(sizes, steps, dtype=dtype, device="meta")

    def facts(*steps, size=4, table=(8, 1), lengths=1, starts=1, scale=None):
        k, v = (strided(*x, 16, 1, sizes=(1, size, 1, 16), dtype=torch.float16) for x in steps)
        if scale is not None:
            scale = strided(*scale, sizes=(1, size, 1), dtype=torch.float32)
        q, numbers = strided(16, 16, 1, dtype=torch.float16), (strided(starts), strided(lengths))
        return page_facts(Pages(q, numbers[0], k, v, strided(*table), numbers[1], scale, scale))

    small, far = (64, 16), 1 << 31
    assert facts(small, small).same_steps
    assert not facts(small, small).wide_steps
    assert facts((far, 16), small).wide_steps
    assert facts(small, (far, 16)).wide_steps
    assert not facts(small, (far, 16)).same_steps
    for row, wide in ((far // 4 - 1, False), (far // 4, True)):
        assert facts((64, row), (64, row)).wide_steps == wide
        assert facts(small, small, scale=(64, row, 1)).wide_steps == wide
    assert facts(small, small, table=(far, 1)).wide_steps
    assert facts(small, small, table=(8, far)).wide_steps
    assert facts(small, small, lengths=far).wide_steps
    assert facts(small, small, starts=far).wide_steps
    assert facts(small, small, scale=(64, 1, far)).wide_steps


def test_steps_are_passed_as_kernels_have_them():
    """The interpreter tells numbers by their value, GPUs by these types."""
    step = make_step((9, 7), (2, 1), SHAPE)
    taken = []
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(TypeError):
        patch.setattr(GeneratedBackend, "bound_serve", lambda self, *given: taken.append(given))
        attndsl.compile("causal()", backend="decode").serve(
            step.q, step.cache, step.starts, most_queries=2
        )
    (job,) = Serve().jobs_of_pages(*taken[0][:3])
    names = ("STARTS", "step_kp", "step_kn", "step_tb", "step_s")
    function = SimpleNamespace(arg_names=names)
    for wide, kind in ((False, "i32"), (True, "i64")):
        pages = replace(job.facts.pages, wide_steps=wide)
        found = arguments(function, replace(job.facts, pages=pages), None)
        assert [x.type for x in found if x.name.startswith("step_")] == [kind] * 4


@pytest.mark.parametrize("text", ["causal()", "mask = causal(); weights = sigmoid(score) / {root}"])
def test_many_parts_of_many_rows(device, text):
    """22 parts of a tile of 128 rows, merged in groups of 8.

    Sums of weights that are their own grow with the root of the number of keys, and so do errors.
    """
    keys = (28 if device == "cuda" else 1) * 1400
    kind = torch.bfloat16 if device == "cuda" else torch.float16
    step = make_step((keys, 70), (64, 3), Shape(2, 1, 16, 16, 16, kind))
    if device == "cpu":
        assert most_parts(keys, 1, Config(64, 16, 8, 1), Sharing(128, 8)) == 22
    text = text.format(root=round(keys**0.5))
    close(*both(text, step, device, most=64), tolerance=2e-2)


def test_a_tree_of_drafts(device, ran):
    """Tiles of looked-up masks are listed; tokens are packed rows."""
    text = """
tensor context[batch]: int
tensor ancestor[tokens, n]: bool
mask = kv < context[b] or ancestor[token, max(kv - context[b], 0)]
score = score - 0.1 * (q - min(kv, context[b]))
"""
    counts = (5, 1, 3)
    step = make_step((41, 38, 23), counts, SHAPE)
    ancestor = torch.rand(len(step.q), 5) < 0.5
    ancestor[:, 0] = True
    context = torch.tensor((41, 38, 23)) - torch.tensor(counts)
    close(*both(text, step, device, most=5, context=context, ancestor=ancestor))
    index = torch.arange(len(step.q)) + 17
    attention = attndsl.compile(text, backend="decode")
    q, cache, starts = on(device, step)
    captures = {"context": context.to(device), "ancestor": ancestor.to(device)}
    found = attention.serve(q, cache, starts, most_queries=5, q_index=index.to(device), **captures)
    wanted = attndsl.compile(text).serve(
        step.q, step.cache, step.starts, q_index=index, context=context, ancestor=ancestor
    )
    close((found,), (wanted,))
    assert len(ran) == 2


SCALES = {
    "none": (None, None),
    "numbers": (0.5, 0.25),
    "tensors": (torch.tensor(0.5), torch.tensor(0.25)),
    "heads": (torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.0])),
    "positions": (None, None),
}


@pytest.mark.parametrize("kind", some(SCALES))
def test_pages_of_fp8(device, kind):
    step = make_step(LENGTHS, COUNTS, SHAPE)
    c = step.cache
    pools = [torch.nan_to_num(x).to(FP8) for x in (c.k_pages, c.v_pages)]
    scales = SCALES[kind]
    if kind == "positions":
        scales = torch.rand(2, *pools[0].shape[:3]).unbind()
    cache = attndsl.PagedCache(*pools, c.table, c.lengths, *scales)
    own = [x.to(device) if isinstance(x, torch.Tensor) else x for x in scales]
    there = attndsl.PagedCache(*(x.to(device) for x in (*pools, c.table, c.lengths)), *own)
    text = "mask = causal() and q - kv < 40; score = softcap(score, 2.0)"
    found = attndsl.compile(text, backend="decode").serve(
        step.q.to(device), there, step.starts.to(device), most_queries=6
    )
    close((found,), (attndsl.compile(text).serve(step.q, cache, step.starts),))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["numbers", pytest.param("positions", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("text", "tolerance"), [("causal()", 1e-3), (PROGRAMS["sigmoid"], 3e-2)])
def test_queries_of_bf16_over_pages_of_fp8(device, text, tolerance, kind):
    """Of any size, with large and small elements in a row, and with no numbers."""
    step = make_step(LENGTHS, COUNTS, SHAPE)
    c = step.cache
    pools = [torch.nan_to_num(x).to(FP8) for x in (c.k_pages, c.v_pages)]
    scales = (0.5, 0.25)
    if kind == "positions":
        scales, tolerance = torch.rand(2, *pools[0].shape[:3]).unbind(), 3e-2
    q = step.q.bfloat16()
    q[:, :, 5] *= 1e-5
    q[0] *= 1e-38
    # A GPU multiplies and subtracts at once: the largest score of a row keeps the rounding error of
    # its product, and 2 ** x holds no error of more than about 100.
    q[1] *= 1e30 if torch.device(device).type == "cpu" else 1e4
    q[3, 1, 2], q[4, 2, 3] = torch.inf, torch.nan
    step = step._replace(q=q, cache=attndsl.PagedCache(*pools, c.table, c.lengths, *scales))
    own = [x.to(device) if isinstance(x, torch.Tensor) else x for x in scales]
    there = attndsl.PagedCache(*(x.to(device) for x in (*pools, c.table, c.lengths)), *own)
    given = {"most_queries": 6, "out_dtype": torch.float32}
    found = attndsl.compile(text, backend="decode").serve(
        q.to(device), there, step.starts.to(device), **given
    )
    wanted = attndsl.compile(text).serve(q, step.cache, step.starts, out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_numbers_of_fp8_are_exact(device, dtype):
    """A request of one key has its value, and a score that is one number of the key."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    pages = every.view(16, 1, 1, 16).to(device)
    table = torch.arange(16, device=device)[:, None]
    cache = attndsl.PagedCache(pages, pages, table, torch.ones_like(table[:, 0]))
    starts = torch.arange(17, device=device)
    attention = attndsl.compile("causal()", backend="decode")
    q = torch.zeros(16, 1, 16, dtype=dtype, device=device)
    q[:, :, 3] = 1
    out, lse = attention.serve(q, cache, starts, most_queries=1, scale=1.0, return_lse=True)
    finite = [b for b in range(16) if b not in (7, 15)]  # Whose last numbers are NaN.
    exact = every.float().view(16, 16)
    # A GPU divides a weight by itself with one fp32 rounding.
    own = 2.0**-22 if dtype is torch.float32 else 0.0
    torch.testing.assert_close(out[finite, 0].float().cpu(), exact[finite], atol=0, rtol=own)
    torch.testing.assert_close(lse[finite, 0].cpu(), exact[finite, 3], atol=0, rtol=1e-6)
    if out.device.type == "cuda":  # Triton's interpreter makes 480 of NaN.
        assert out[[7, 15]].isnan().any(-1).all()


TREE = """
tensor context[batch]: int
tensor ancestor[tokens, n]: bool
mask = kv < context[b] or ancestor[token, max(kv - context[b], 0)]
score = score + alibi()
"""


@pytest.mark.parametrize("text", ["mask = causal(); score = score + alibi()", TREE])
def test_bits_of_a_request_do_not_depend_on_the_others(device, text):
    """Alone, in batches, behind other tokens, with more room: for one number of most queries."""
    attention = attndsl.compile(text, backend="decode")
    step = make_step((150, 3, 90), (2, 1, 4), SHAPE)
    q, cache, starts = on(device, step)
    context, seen = cache.lengths - starts.diff(), torch.rand(len(q), 4, device=q.device) < 0.5

    def captures(requests, tokens):
        if text != TREE:
            return {}
        return {"context": context[requests], "ancestor": seen[tokens]}

    whole = attention.serve(q, cache, starts, most_queries=4, **captures(slice(None), slice(None)))
    for b in range(3):
        first, last = int(starts[b]), int(starts[b + 1])
        table = torch.cat((cache.table[b : b + 1], cache.table[:1]), 1)
        alone = attndsl.PagedCache(cache.k_pages, cache.v_pages, table, cache.lengths[b : b + 1])
        found = attention.serve(
            q[first:last].contiguous(),
            alone,
            starts[b : b + 2] - first,
            most_queries=4,
            **captures(slice(b, b + 1), slice(first, last)),
        )
        assert torch.equal(found, whole[first:last])


def test_tokens_of_nobody_and_wrong_values(device, monkeypatch):
    """Where nobody looks, others are right and nothing outside of the pool is read."""
    step = make_step(LENGTHS, COUNTS, SHAPE)
    wanted = attndsl.compile("causal()").serve(step.q, step.cache, step.starts)
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    step.cache.table[2] = 1 << 30
    step.cache.table[2, 1:] = -7
    step.cache.lengths[4] = 1000
    q, cache, starts = on(device, step)
    attention = attndsl.compile("causal()", backend="decode")
    found = attention.serve(q, cache, starts, most_queries=6)
    good = [0, 1, 11, 12, 13, 14]
    close((found[good],), (wanted[good],))
    assert (found[13:] == 0).all()
    starts[3], starts[6] = 1 << 40, 2
    attention.serve(q, cache, starts, most_queries=6)


@pytest.mark.parametrize("text", ["causal()", "mask = causal(); weights = sigmoid(score)"])
def test_a_pool_without_pages_and_steps_without_queries(device, monkeypatch, text):
    """No page number is right where there are none, so no key is read."""
    attention = attndsl.compile(text, backend="decode")
    step = make_step((3, 2), (0, 0), SHAPE)
    q, cache, starts = on(device, step)
    assert (attention.serve(q, cache, starts, most_queries=0) == 0).all()
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    # Before the first of no pages lie numbers that a kernel may not read.
    pools = [torch.full((1, 4, 2, 16), torch.nan, device=device)[1:] for _ in range(2)]
    empty = attndsl.PagedCache(*pools, cache.table, cache.lengths)
    starts = torch.tensor([0, 1, 2], device=device)
    assert (attention.serve(q, empty, starts, most_queries=1) == 0).all()


def test_what_kernels_do_not_run_is_gathered(device, ran):
    text = """
tensor u[tokens, r]: float
tensor w[batch, kv_len, r]: float
mask = causal()
score = score + dot(u[token, :], w[b, kv, :])
"""
    step = make_step((9, 7), (2, 1), SHAPE)
    u, w = torch.randn(len(step.q), 4), torch.randn(2, step.cache.room, 4)
    close(*both(text, step, device, most=2, u=u, w=w), tolerance=1e-4)
    assert not ran


COMPILE = textwrap.dedent("""
    import re
    import subprocess
    import tempfile
    import torch
    import triton
    import attndsl
    from attndsl.backends.engine.backend import GeneratedBackend
    from support.cross import compile_jobs
    from attndsl.backends.triton.serve_launch import Serve

    class Caught(Exception):
        pass

    def catch(self, *given):
        raise Caught(*given)

    GeneratedBackend.why_not = lambda self, device: None
    GeneratedBackend.bound_serve = catch
    rich = "mask = causal() and q - kv < 1024; score = softcap(score, 9.0) + h; sink = 0.5 * h"
    for text, fp8, heads, most in (
        ("causal()", False, 8, 1), (rich, True, 8, 1), ("causal()", True, 2, 16)
    ):
        pool = torch.zeros(8, 16, 2, 128, dtype=torch.bfloat16)
        scales = (None, None)
        if fp8:
            pool, scales = pool.to(torch.float8_e4m3fn), torch.ones(2, 8, 16, 2).unbind()
        table, lengths = torch.arange(8).view(2, 4).int(), torch.tensor([60, 33])
        cache = attndsl.PagedCache(pool, pool, table, lengths, *scales)
        q = torch.zeros(2 * most, heads, 128, dtype=torch.bfloat16)
        try:
            attndsl.compile(text, backend="decode").serve(
                q, cache, torch.tensor([0, most, 2 * most]), most_queries=most
            )
        except Caught as found:
            jobs = Serve().jobs_of_pages(*found.args[:3])
        for kernel in compile_jobs(jobs, "cuda:90"):
            text = kernel.kernel.asm["ttgir"]
            # Where each load ends: wide ones are 16 bytes of a thread.
            wide = text.count("contiguity = 16" if fp8 else "contiguity = 8")
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.kernel.asm["cubin"])
                file.flush()
                command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
                told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            (stack,) = re.findall(r"STACK:(\\d+)", told)
            print(kernel.name, kernel.shared, wide, stack)
""")


def test_they_compile_for_hopper():
    done = run_python(COMPILE, env=compiling())
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in rows] == ["serve_4x1", "serve_4x1", "serve_1x16"]
    # Four programs of a processor, each with room for a tile of 32 KB, and elsewhere two.
    assert 32768 < int(rows[0][1]) <= 56 * 1024, rows
    assert all(65536 < int(shared) <= 113 * 1024 for _, shared, *_ in rows[1:]), rows
    # Keys and values of the first tile or of the two first ones, and of each step of the loop.
    assert [int(wide) for _, _, wide, _ in rows] == [4, 6, 6], rows
    # No registers spill.
    assert [int(stack) for *_, stack in rows] == [0, 0, 0], rows


LOOKED_UP = "tensor bias[heads, kv_len]: float\nmask = causal()\nscore = score + bias[h, kv]"


@pytest.mark.parametrize(
    ("text", "dim", "stages", "warps"),
    [("causal()", 128, 3, 2), ("causal()", 64, 5, 4), ("causal()", 256, 5, 4), (TREE, 128, 3, 4),
     (LOOKED_UP, 128, 5, 4)],
)  # fmt: skip
def test_stages_and_warps(monkeypatch, text, dim, stages, warps):
    """Narrow kernels are for what has no more to load than keys."""
    taken = []
    monkeypatch.setattr(GeneratedBackend, "why_not", lambda self, device: None)
    monkeypatch.setattr(GeneratedBackend, "bound_serve", lambda self, *given: taken.append(given))
    step = make_step((90, 33), (2, 1), SHAPE._replace(dtype=torch.bfloat16, dim=dim, value_dim=dim))
    q, cache, starts = step.q, step.cache, step.starts
    captures = {
        TREE: {"context": cache.lengths - starts.diff(), "ancestor": torch.ones(len(q), 2).bool()},
        LOOKED_UP: {"bias": torch.zeros(q.shape[1], cache.room)},
    }
    with contextlib.suppress(TypeError):  # Nothing has been computed.
        attndsl.compile(text, backend="decode").serve(
            q, cache, starts, most_queries=2, captures=captures.get(text, {})
        )
    (job,) = Serve().jobs_of_pages(*taken[0][:3])
    config = job.kernel.configs(job, machine_of("cuda:90"))[0]
    assert (config.stages, config.warps) == (stages, warps)
