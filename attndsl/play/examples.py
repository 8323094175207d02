"""Programs that the page offers to begin with, and the words that it highlights."""

from __future__ import annotations

import re
from importlib import resources
from typing import NamedTuple

from attndsl.frontend.builtin_functions import NAMES
from attndsl.frontend.prelude import prelude_names
from attndsl.frontend.reserved_names import ALWAYS

_OF_PRELUDE = {
    "causal": "mask = causal()",
    "causal_lower_right": "mask = causal_lower_right()",
    "sliding_window": "param w: int = 16\nmask = sliding_window(w)",
    "local_window": "param w: int = 8\nmask = local_window(w)",
    "prefix_lm": "param n: int = 20\nmask = prefix_lm(n)",
    "same": "tensor ids[batch, kv_len]: int\nmask = same(ids, q, kv)",
    "same_1d": "tensor ids[kv_len]: int\nmask = same_1d(ids, q, kv)",
    "document_causal": "tensor ids[batch, kv_len]: int\nmask = document_causal(ids)",
    "dilated": "param w: int = 32\nparam d: int = 4\nmask = dilated(w, d)",
    "strided": "param w: int = 8\nparam s: int = 8\nmask = strided(w, s)",
    "block_diagonal": "param n: int = 16\nmask = block_diagonal(n)",
    "block_causal": "param n: int = 16\nmask = block_causal(n)",
    "global_tokens": "param n: int = 4\nparam w: int = 8\n"
    "mask = global_tokens(n) or local_window(w)",
    "valid_keys": "tensor lengths[batch]: int\nmask = causal() and valid_keys(lengths)",
    "block_diffusion": "param n: int = 32\nparam w: int = 8\nmask = block_diffusion(n, w)",
    "window_start": "param side: int = 13\nmask = window_start(q, kv_len, side) <= kv",
    "in_window": "param side: int = 13\nmask = in_window(q, kv, kv_len, side)",
    "natten2d": "param width: int = 8\nparam side: int = 5\n"
    "mask = natten2d(width, q_len // width, kw=side, kh=side)",
    "sta2d": "param across: int = 4\nparam tile: int = 4\nmask = sta2d(across, tile, 2, 2)",
    "sta3d": "param across: int = 2\nparam down: int = 4\nparam tile: int = 4\n"
    "mask = sta3d(across, down, tile, 2, 2, 2)",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "softcap": "param cap: float = 50.0\nmask = causal()\nscore = softcap(score, cap)",
    "rel_bias": (
        "tensor table[heads, 2 * kv_len]: float\nmask = causal()\nscore = score + rel_bias(table)"
    ),
    "t5_bucket_causal": "param buckets: int = 16\nparam longest: int = 64\n"
    "tensor table[heads, buckets]: float\nmask = causal()\n"
    "score = score + table[h, t5_bucket_causal(q - kv, buckets, longest)]",
    "t5_bucket": "param buckets: int = 16\nparam longest: int = 64\n"
    "tensor table[heads, buckets]: float\n"
    "score = score + table[h, t5_bucket(kv - q, buckets, longest)]",
}
"""A program for each function of the prelude, whose comments say where it is from."""

_WHOLE = {
    "Gemma 2: soft cap and window": """\
# Gemma 2, local layers (arXiv 2408.00118): soft-capped scores, a causal sliding window.
# The model's own window is 4096.
param window: int = 24
param cap: float = 50.0
mask = causal() and q - kv < window
score = cap * tanh(score / cap)
""",
    "Packed documents": """\
# Documents packed into one sequence, with causal attention inside each document.
tensor doc[batch, kv_len]: int
mask = q >= kv and doc[b, q] == doc[b, kv]
""",
    "Lengths of batch entries": """\
# Sequences of different lengths: no padding mask, a length for each entry.
tensor lengths[batch]: int
mask = causal() and kv < lengths[b] and q < lengths[b]
""",
    "Another dilation in each half of the heads": """\
# Every fourth key of a long window in half of the heads (Longformer, arXiv 2004.05150).
step = 1 if h < heads // 2 else 4
mask = 0 <= q - kv < 6 * step and (q - kv) % step == 0
""",
    "ALiBi, written out": """\
# A penalty that grows with distance, at another rate in each head (arXiv 2108.12409).
mask = causal()
score = score - exp2(-8 * (h + 1) / heads) * (q - kv)
""",
    "ALiBi with learned slopes": """\
# Each head finds out how far back it should look.
tensor slope[heads]: float
mask = causal()
score = score - exp(slope[h]) * (q - kv)
""",
    "Learned bias of distance": """\
# A learned bias for each head and distance. The call makes its gradient too.
tensor table[heads, 2 * kv_len]: float
mask = causal()
score = score + table[h, q - kv + kv_len]
""",
    "T5's relative bias": """\
# One learned number for each head and bucket of distances (arXiv 1910.10683).
param buckets: int = 16
param longest: int = 32
tensor table[heads, buckets]: float
mask = causal()
score = score + table[h, t5_bucket_causal(q - kv, buckets, longest)]
""",
    "Learned sink": """\
# A head that finds nothing gives zero (GPT-OSS; arXiv 2309.17453).
tensor logit[heads]: float
param heat: float = 1.0
mask = kv < q
score = heat * score
sink = logit[h]
""",
    "Sigmoid attention": """\
# Weights that need not sum to one, so that they can count (arXiv 2409.04431).
tensor bias[heads]: float
param heat: float = 1.0
mask = kv < q
score = heat * score + bias[h]
weights = sigmoid(score)
""",
    "Dropout": """\
# Drops weights with probability p; the seed of a call decides which.
param p: float = 0.1
mask = causal()
weights = dropout(softmax(score), p)
""",
    "Latent attention": """\
# Decoupled rotary keys of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
param heat: float = 1.0
tensor q_rope[batch, heads, q_len, r]: float
tensor k_rope[batch, kv_len, r]: float
mask = causal()
score = score + heat * dot(q_rope[b, h, q, :], k_rope[b, kv, :])
""",
    "Neighbourhoods on a grid": """\
# A pixel sees a square of pixels around it, always whole (NATTEN, arXiv 2204.07143).
param width: int = 8
param height: int = 8
param side: int = 5
mask = natten2d(width, height, side, side)
""",
    "Block diffusion, written out": """\
# Noised positions first, clean ones after (BD3-LM, arXiv 2503.09573).
param n: int = 32
param block: int = 8
q_block = (q if q < n else q - n) // block
kv_block = (kv if kv < n else kv - n) // block
noised = q < n and kv < n and q_block == kv_block
crossing = q < n and kv >= n and q_block > kv_block
clean = q >= n and kv >= n and q_block >= kv_block
mask = noised or crossing or clean
""",
}

_STATEMENTS = ("param", "tensor", "def", "import", "and", "or", "not", "in", "if", "else")
_PARTS = ("mask", "sink", "weights", "softmax", "dropout", "dot")
_DEFINITION = re.compile(r"((?:^#[^\n]*\n)*)^def (\w+)", re.MULTILINE)


class Example(NamedTuple):
    """A program to begin with."""

    name: str
    text: str


class ExampleGroup(NamedTuple):
    """Examples of one kind."""

    name: str
    examples: tuple[Example, ...]


def examples() -> tuple[ExampleGroup, ...]:
    """All examples: whole programs first, then one for each function of the prelude."""
    prelude = resources.files("attndsl.grammar").joinpath("prelude.attn").read_text("utf-8")
    said = {name: comment for comment, name in _DEFINITION.findall(prelude)}
    functions = (Example(name, f"{said[name]}{text}\n") for name, text in _OF_PRELUDE.items())
    return (
        ExampleGroup("Programs", tuple(Example(*pair) for pair in _WHOLE.items())),
        ExampleGroup("Functions of the prelude", tuple(functions)),
    )


def words() -> dict[str, tuple[str, ...]]:
    """Words that the page highlights: those of statements, and names of the language."""
    names = {*ALWAYS, *NAMES, *prelude_names(), *_PARTS}
    return {"statement": _STATEMENTS, "name": tuple(sorted(names))}
