"""The calls whose kernels ``kernel_diff.py`` compares: programs, captures, options, settings.

A case is one program with the values of its captures and the options of its call. A setting is a
family of kernels, a dtype, a head dim and a target. Each case runs at each setting of the families
for long rows: forward, backward with all gradients, and tangents where the case asks for these.
Families for few rows run some cases: ``short`` forward and backward, ``decode`` forward, and
``serve`` a step of packed requests over pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BATCH, HEADS, KV_HEADS, LENGTH = 2, 6, 3, 1024


@dataclass(frozen=True)
class Case:
    """One program and one kind of call.

    ``tensors``: name -> (dims, kind), where a dim is a number and a kind ``f`` (the dtype of q),
    ``s`` (fp32), ``i`` or ``b``. ``learned``: names whose gradients are wanted. ``tangents``: names
    that have tangents, with ``qkv`` for the operands. ``call``: further arguments of the call.
    """

    name: str
    text: str
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    tangents: tuple[str, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """Where a case's kernels run."""

    family: str
    dtype: str
    dim: int
    target: str

    @property
    def name(self) -> str:
        """One word for tables and files."""
        return f"{self.family}-{self.dtype}-{self.dim}-{self.target.replace(':', '')}"


HOPPER = tuple(
    Setting("hopper", dtype, dim, "cuda:90") for dtype in ("bf16", "fp16") for dim in (64, 128, 256)
)
PORTABLE = (
    *(Setting("triton", "bf16", dim, "cuda:90") for dim in (64, 128, 256)),
    Setting("triton", "fp16", 64, "cuda:90"),
    Setting("triton", "fp32", 64, "cuda:90"),
    Setting("triton", "bf16", 64, "cuda:80"),
    Setting("triton", "fp32", 80, "cuda:80"),
)
FEW = (
    Setting("decode", "bf16", 128, "cuda:90"),
    Setting("decode", "fp16", 64, "cuda:80"),
    Setting("serve", "bf16", 128, "cuda:90"),
    Setting("short", "bf16", 64, "cuda:90"),
    Setting("short", "fp32", 64, "cuda:80"),
)
SETTINGS = (*HOPPER, *PORTABLE, *FEW)
ROWS = {"decode": 4, "serve": 4, "short": 100}
"""Rows of a call, or of a request, where a family is for few."""
_OF_FEW = {
    "decode": (
        "full", "causal", "window", "alibi", "soft cap", "relative bias", "learned slopes", "sink",
        "sigmoid", "offsets of entries", "value dim", "heads apart",
    ),
    "serve": ("causal", "window", "alibi", "soft cap", "learned slopes", "sink", "sigmoid",
              "heads apart"),
    "short": (
        "full", "causal", "window", "alibi", "soft cap", "factor", "learned slopes", "sink",
        "learned weights", "deterministic", "negative scale", "value dim",
    ),
}  # fmt: skip
"""Cases without tensors that have an element a row or a key of the usual length."""

L, H = LENGTH, HEADS
CASES = (
    Case("full", "score", tangents=("qkv",)),
    Case("causal", "causal()", tangents=("qkv",)),
    Case("lower right", "causal_lower_right()", sizes={"kv_len": 1536}),
    Case("ragged", "causal()", sizes={"length": 1000, "kv_len": 1100}),
    Case("window", "sliding_window(300)", tangents=("qkv",)),
    Case("local window", "local_window(200)"),
    Case("prefix", "prefix_lm(100)"),
    Case(
        "documents", "tensor ids[batch, kv_len]: int; mask = document_causal(ids)",
        {"ids": ((BATCH, L), "i")}, tangents=("qkv",),
    ),
    Case(
        "shared documents", "tensor ids[kv_len]: int; mask = same_1d(ids, q, kv)",
        {"ids": ((L,), "i")},
    ),
    Case("dilated", "dilated(300, 3)"),
    Case("strided", "strided(128, 64)"),
    Case("block diagonal", "block_diagonal(256)"),
    Case("block causal", "block_causal(256)"),
    Case("global tokens", "mask = global_tokens(64) or local_window(128)"),
    Case(
        "valid keys", "tensor lengths[batch]: int; mask = valid_keys(lengths)",
        {"lengths": ((BATCH,), "i")},
    ),
    Case("block diffusion", "block_diffusion(512, 64)"),
    Case("neighbourhood", "natten2d(32, 32, 7, 7)"),
    Case("tiles 2d", "sta2d(4, 64, 2, 2)"),
    Case("tiles 3d", "sta3d(2, 2, 64, 2, 2, 1)"),
    Case("alibi", "mask = causal(); score = score + alibi()", tangents=("qkv",)),
    Case("soft cap", "mask = causal(); score = softcap(score, 30.0)", tangents=("qkv",)),
    Case("large soft cap", "score = softcap(score, 300.0)"),
    Case("gemma", "mask = sliding_window(256); score = softcap(score, 50.0)"),
    Case(
        "relative bias",
        "tensor t[heads, n]: float; mask = causal(); score = score + rel_bias(t)",
        {"t": ((H, 2 * L), "f")}, learned=("t",), tangents=("qkv", "t"),
    ),
    Case(
        "t5", "tensor t[heads, 32]: float; score = score + t[h, t5_bucket(q - kv, 32, 128)]",
        {"t": ((H, 32), "f")}, learned=("t",),
    ),
    Case(
        "bias", "tensor t[heads, q_len, kv_len]: float; score = score + t[h, q, kv]",
        {"t": ((H, L, L), "f")}, learned=("t",), tangents=("t",),
    ),
    Case(
        "fp32 bias", "tensor t[q_len, kv_len]: float; mask = causal(); score = score + t[q, kv]",
        {"t": ((L, L), "s")}, learned=("t",),
    ),
    Case(
        "constant bias", "tensor t[q_len, kv_len]: float; score = score + t[q, kv]",
        {"t": ((L, L), "f")},
    ),
    Case(
        "padded bias", "tensor t[heads, q_len, kv_len]: float; score = score + t[h, q, kv]",
        {"t": ((H, 1023, 1023), "f")}, sizes={"length": 1023, "kv_len": 1023},
    ),
    Case(
        "two biases",
        "tensor s[q_len, kv_len]: float; tensor t[batch, kv_len]: float; "
        "score = score + s[q, kv] + t[b, kv]",
        {"s": ((L, L), "f"), "t": ((BATCH, L), "s")}, learned=("s", "t"),
    ),
    Case(
        "factor", "tensor t[heads]: float; mask = causal(); score = score * t[h]",
        {"t": ((H,), "s")}, learned=("t",), tangents=("qkv", "t"),
    ),
    Case(
        "row and column",
        "tensor r[q_len]: float; tensor c[heads, kv_len]: float; "
        "score = score + r[q] * 2 + c[h, kv]",
        {"r": ((L,), "s"), "c": ((H, L), "s")}, learned=("r", "c"),
    ),
    Case(
        "learned slopes",
        "tensor t[heads]: float; mask = causal(); score = score - t[h] * (q - kv)",
        {"t": ((H,), "s")}, learned=("t",), tangents=("qkv", "t"),
    ),
    Case(
        "gathered",
        "tensor t[heads, 64]: float; tensor i[kv_len]: int; score = score + t[h, i[kv]]",
        {"t": ((H, 64), "s"), "i": ((L,), "i")}, learned=("t",),
    ),
    Case(
        "gathered twice",
        "tensor t[64, 64]: float; tensor i[q_len]: int; score = score * t[i[q], i[kv]]",
        {"t": ((64, 64), "s"), "i": ((L,), "i")}, learned=("t",),
    ),
    Case(
        "data mask", "tensor m[q_len, kv_len]: bool; mask = m[q, kv]", {"m": ((L, L), "b")},
    ),
    Case(
        "block map", "tensor m[16, 16]: bool; mask = m[q // 64, kv // 64] and q >= kv",
        {"m": ((16, 16), "b")},
    ),
    Case("score mask", "mask = score > 0.1; score = 3 * score"),
    Case(
        "run-time param", "param w: int; param c: float; mask = 0 <= q - kv < w; score = score * c",
        params={"w": 300, "c": 0.5}, learned=("c",), tangents=("qkv", "c"),
    ),
    Case(
        "sink", "tensor s[heads]: float; mask = causal(); sink = s[h]",
        {"s": ((H,), "s")}, learned=("s",), tangents=("qkv", "s"),
    ),
    Case("sigmoid", "mask = causal(); weights = sigmoid(score - log(q + 1.0))", tangents=("qkv",)),
    Case(
        "learned weights", "tensor t[heads]: float; weights = relu(score - t[h]) ** 2",
        {"t": ((H,), "s")}, learned=("t",),
    ),
    Case("dropout", "mask = causal(); weights = dropout(softmax(score), 0.1)", call={"seed": 7}),
    Case(
        "learned dropout", "param p: float; weights = dropout(softmax(score), 0.2 + 0.1 * p)",
        params={"p": 0.5}, learned=("p",), call={"seed": 7},
    ),
    Case("dropout of a part", "weights = dropout(softmax(score), 0.1)", sizes={"length": 512},
         call={"seed": 7, "q_offset": 512, "q_len": 1024}),
    Case("dropout within a block", "weights = dropout(softmax(score), 0.1)",
         sizes={"length": 512}, call={"seed": 7, "q_offset": 100, "q_len": 1024}),
    Case("dropped sigmoid", "weights = dropout(sigmoid(score), 0.1)", call={"seed": 7}),
    Case(
        "contraction", "tensor a[kv_heads, kv_len, 16]: float; tensor c[heads, q_len, 16]: float; "
        "score = score + dot(c[h, q, :], a[hkv, kv, :])",
        {"a": ((KV_HEADS, L, 16), "f"), "c": ((H, L, 16), "f")}, learned=("a", "c"),
    ),
    Case("offset", "causal()", call={"q_offset": 512}, sizes={"length": 512}),
    Case("alibi at offsets", "mask = causal(); score = score + alibi()",
         call={"q_offset": 512, "kv_offset": 128}, sizes={"length": 512}),
    Case("tensor offset", "causal()", call={"q_offset": "tensor"}, sizes={"length": 512}),
    Case("offsets of entries", "sliding_window(256)", call={"q_offset": "entries"},
         sizes={"length": 512}),
    Case("indices", "mask = causal(); score = score + alibi()",
         call={"q_index": True, "kv_index": True}),
    Case(
        "bias at offset", "tensor t[heads, n, m]: float; score = score + t[h, q, kv]",
        {"t": ((H, L, L), "f")}, call={"q_offset": 512}, sizes={"length": 512},
    ),
    Case("part of the heads", "mask = causal(); score = score + alibi()",
         call={"heads": 12, "kv_heads": 6, "h_offset": 6}),
    Case("deterministic", "causal()", call={"deterministic": True}),
    Case(
        "deterministic slopes", "tensor t[heads]: float; score = score * t[h]",
        {"t": ((H,), "s")}, learned=("t",), call={"deterministic": True},
    ),
    Case("negative scale", "causal()", call={"scale": -0.3}),
    Case("results in fp32", "causal()", call={"out_dtype": "fp32"}),
    Case("odd head dim", "causal()", sizes={"less": 4}),
    Case("value dim", "causal()", sizes={"value": 64}),
    Case("one query", "causal()", call={"q_offset": 1000}, sizes={"length": 1}),
    Case("square", "score = score * score + 0.1 * score"),
    Case("powers", "score = score ** 3 + log(1 + score * score)"),
    Case("waves", "score = score + sin(0.01 * (q - kv)) * cos(score)"),
    Case(
        "constants of ints",
        "tensor t[heads, 7]: float; tensor i[8]: int; tensor f[8]: bool; "
        "d = q - kv; mask = (d // 5 + d % 3 != min(d, 7)) and 3 < h + 4 * b "
        "and 100 // (kv + 1) < d "
        "and max(d, -(d << 2)) >= (1 << (kv % 9)) and (f[3] or i[2] < d); "
        "score = score * t[h, 2] + 3 * q * kv + where(d < 9, 2, d) + 1000 % (q + 1) + t[2, h + 9]",
        {"t": ((H, 7), "s"), "i": ((8,), "i"), "f": ((8,), "b")}, learned=("t",),
    ),
    Case(
        "constants of floats",
        "param c: float; r = score + 2.0; "
        "score = max(r, 0.5) + min(-1.5, score) + (r // 3.0) % 0.75 + 7.5 // (r * r + 1.0) "
        "+ where(q < 4, 1.0, -2.0) + abs(r) ** 1.5 + r ** 17.0 + 1.5 ** c + 2.5 * r ** 6.0 "
        "+ c * 0.5",
        params={"c": 0.5}, learned=("c",), tangents=("qkv", "c"),
    ),
    Case("constant score", "mask = causal(); score = 2.5"),
    Case("heads apart", "mask = q - kv < 64 * (h + 1) and q >= kv; score = score + h * 0.1"),
)  # fmt: skip


def cases_of(setting: Setting) -> tuple[Case, ...]:
    """What runs at a setting."""
    names = _OF_FEW.get(setting.family)
    return CASES if names is None else tuple(case for case in CASES if case.name in names)
