"""The rows of benchmarks/against.py: seventy that are fixed, and as many more as a seed draws.

No row has more work than a GPU of 600 TFLOP/s does in 3 ms of a forward pass, and no decoding row
has caches of more than 2 GB.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

MODES = ("eager", "device", "graph", "compiled")
ON_CPUS = ("eager", "compiled")
OURS = "attndsl"
SDPA = ("cudnn", "fa2", "efficient")
FLEX = ("flex", "flex_flash")
COLUMNS = (OURS, *SDPA, "fa4", "fa4_varlen", "flashinfer", *FLEX)
CAP, BUCKETS, LONGEST = 50.0, 32, 100
"""Numbers of the soft cap, and of the buckets of T5. No distance is at the border of two buckets,
where the last bit of a logarithm decides: 8 * 12.5 ** (n / 8) is an integer for n = 0 alone."""
MOST_WORK, MOST_CACHE, MOST_TOKENS = 1.8e12, 2e9, 1 << 16
"""Floating point operations of a forward pass; bytes of keys and values; rows of a batch."""
DRAWN = 30
_TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window({size})",
    "prefix": "prefix_lm({size})",
    "documents": "tensor doc[kv_len]: int\nmask = q >= kv and doc[q] == doc[kv]",
    "padding": "tensor lengths[batch]: int\nmask = valid_keys(lengths)",
    "soft cap": f"mask = causal()\nscore = softcap(score, {CAP})",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "t5": f"tensor table[heads, {BUCKETS}]: float\n"
    f"score = score + table[h, t5_bucket(q - kv, {BUCKETS}, {LONGEST})]",
    "sink": "tensor logit[heads]: float\nmask = causal()\nsink = logit[h]",
    "sink window": "tensor logit[heads]: float\nmask = sliding_window({size})\nsink = logit[h]",
}
PROGRAMS = tuple(_TEXTS)
_OF_SDPA = ("full", "causal", "padding")
_OF_FA4 = ("full", "causal", "window", "soft cap", "sink", "sink window")
_OF_FLASHINFER = ("causal", "window", "soft cap")
_DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 192, 256)
_CROSS = 0.15
"""Number of drawn rows without a mask that have another number of keys."""


@dataclass(frozen=True)
class Row:
    """One shape and program."""

    label: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    program: str = "causal"
    size: int = 0
    """Keys of a window or a prefix, rows of a document."""
    v_dim: int = 0
    """Head dim of v where it is another one."""
    dtype: str = "bf16"
    decodes: bool = False
    """True if the queries are the last ones of a cache; such rows have no backward pass."""

    @property
    def name(self) -> str:
        """Its label, program and shape."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        dims = f"D{self.dim}" if self.v_dim in (0, self.dim) else f"D{self.dim}/{self.v_dim}"
        program = f"{self.program} {self.size}" if self.size else self.program
        dtype = "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"{self.label}: {program} B{self.batch} H{heads} S{lengths} {dims}{dtype}"

    @property
    def value_dim(self) -> int:
        """Head dim of v and of the output."""
        return self.v_dim or self.dim

    @property
    def text(self) -> str:
        """Its program for attndsl."""
        return _TEXTS[self.program].format(size=self.size)

    @property
    def shift(self) -> int:
        """Position of the first query."""
        return self.kv_len - self.q_len if self.decodes else 0

    @property
    def directions(self) -> tuple[str, ...]:
        """Passes that are measured."""
        return ("forward",) if self.decodes else ("forward", "backward")

    @property
    def live_bytes(self) -> int:
        """Bytes of 16-bit queries, keys, values and output."""
        queries, keys = self.heads * self.q_len, self.kv_heads * self.kv_len
        return 2 * self.batch * (self.dim + self.value_dim) * (queries + keys)

    @property
    def work(self) -> float:
        """Operations of the matrix products of a forward pass."""
        return 2.0 * (self.dim + self.value_dim) * self.batch * self.heads * _pairs(self)


def lengths_of(row: Row) -> list[int]:
    """Valid keys of each batch entry of a padded row: from half of the keys to all."""
    return [row.kv_len - entry * 37 % (row.kv_len // 2 + 1) for entry in range(row.batch)]


def _pairs(row: Row) -> float:
    """Live pairs of one head of one batch entry; of a decoding row all pairs."""
    triangle = row.q_len * (row.q_len + 1) / 2
    if row.decodes or row.program in ("full", "t5"):
        return float(row.q_len * row.kv_len)
    if row.program == "padding":
        return row.q_len * sum(lengths_of(row)) / row.batch
    if row.program in ("window", "sink window"):
        outside = max(0, row.q_len - row.size)
        return triangle - outside * (outside + 1) / 2
    if row.program == "prefix":
        return triangle + min(row.size, row.kv_len) * (min(row.size, row.kv_len) - 1) / 2
    if row.program == "documents":
        whole, rest = divmod(row.q_len, row.size)
        return whole * row.size * (row.size + 1) / 2 + rest * (rest + 1) / 2
    return triangle


def columns_of(row: Row, peers: Sequence[str] | None) -> tuple[str, ...]:
    """Ours and the peers of a row.

    Args:
        row: The shape and program.
        peers: Those that were asked for; None for those that have such a call. FlexAttention is
            compiled for each row, and is one only where SDPA has no such score or mask.
    """
    if peers is not None:
        return (OURS, *(column for column in COLUMNS if column in peers))
    usual: tuple[str, ...] = SDPA if row.program in _OF_SDPA else FLEX
    if row.program in ("sink", "sink window"):
        usual = ()
    able = [
        ("fa4", row.program in _OF_FA4),
        ("fa4_varlen", row.program == "documents" and not row.decodes),
        ("flashinfer", row.decodes and row.program in _OF_FLASHINFER),
    ]
    return (OURS, *usual, *(column for column, is_able in able if is_able))


def _square(
    label: str, batch: int, heads: int, length: int, dim: int, program: str = "causal",
    kv_heads: int = 0, size: int = 0,
) -> Row:  # fmt: skip
    """A row with as many keys as queries."""
    return Row(label, batch, heads, kv_heads or heads, length, length, dim, program, size)


def _dense() -> Iterable[Row]:
    """Plain attention at lengths of 1k to 16k, 16k tokens each."""
    for length in (1024, 2048, 4096, 8192, 16384):
        for dim, heads in ((64, 32), (128, 16)):
            for program in ("causal", "full"):
                # The longest of these have more work than a row may have.
                half = 2 if program == "full" and length == 16384 else 1
                yield _square("dense", 16384 // length, heads // half, length, dim, program)
    for length in (1024, 2048, 4096, 8192):
        yield _square("grouped", 8192 // length, 32, length, 128, "causal", 8)


def _decoding(
    label: str, batch: int, keys: int, heads: int, dim: int = 128, queries: int = 1
) -> Row:
    """The last queries of caches with 8 kv heads."""
    return Row(label, batch, heads, 8, queries, keys, dim, decodes=True)


FIXED = (
    *_dense(),
    _square("window", 2, 16, 8192, 128, "window", size=1024),
    _square("window", 4, 32, 4096, 64, "window", size=1024),
    _square("window", 4, 32, 4096, 128, "window", 8, size=128),
    _square("packed", 1, 16, 8192, 128, "documents", size=1000),
    _square("packed", 1, 16, 16384, 128, "documents", size=1000),
    _square("packed", 1, 32, 8192, 64, "documents", size=300),
    _square("soft cap", 2, 16, 8192, 128, "soft cap"),
    _square("soft cap", 4, 32, 2048, 128, "soft cap", 8),
    _square("ALiBi", 2, 16, 8192, 128, "alibi"),
    _square("ALiBi", 8, 16, 2048, 64, "alibi"),
    Row("two head dims", 2, 16, 16, 4096, 4096, 192, v_dim=128),
    Row("two head dims", 8, 16, 16, 1024, 1024, 192, v_dim=128),
    Row("two head dims", 4, 16, 16, 2048, 2048, 192, "full", v_dim=128),
    _square("wide", 1, 8, 8192, 256, "causal", 4),
    _square("wide", 4, 8, 2048, 256, "full"),
    _square("ViT-H", 32, 16, 257, 80, "full"),
    _square("CLIP text", 64, 12, 77, 64),
    _square("BERT", 16, 12, 384, 64, "full"),
    _square("BERT", 32, 12, 128, 64, "full"),
    _square("audio", 16, 16, 750, 64, "full"),
    _square("SD3", 4, 24, 1178, 64, "full"),
    Row("cross", 8, 16, 16, 1024, 300, 72, "full"),
    _square("windows of an image", 256, 8, 144, 32, "full"),
    _square("GPT", 8, 16, 300, 128),
    _square("Llama", 4, 32, 700, 128, "causal", 8),
    _square("pairs", 256, 4, 256, 32, "full"),
    Row("latents", 4, 16, 16, 512, 4096, 64, "full"),
    _square("wide", 4, 8, 500, 256, "full"),
    _square("narrow", 32, 8, 64, 16, "full"),
    _square("GPT", 8, 12, 1536, 64),
    _square("D112", 2, 32, 2000, 112),
    _square("T5", 8, 12, 512, 64, "t5"),
    _square("sink", 1, 64, 4096, 64, "sink", 8),
    _square("sink", 1, 64, 4096, 64, "sink window", 8, size=128),
    _square("padded", 32, 12, 512, 64, "padding"),
    Row("cross", 8, 8, 8, 4096, 77, 64, "full"),
    _decoding("decoding", 16, 10000, 32),
    _decoding("decoding", 4, 50000, 64),
    _decoding("decoding", 128, 2048, 32),
    _decoding("decoding", 8, 32768, 32),
    _decoding("decoding", 1, 1024, 32),
    _decoding("decoding", 1, 500, 32),
    _decoding("decoding", 32, 8192, 32, 64),
    _decoding("decoding", 8, 16384, 32, 256),
    _decoding("drafts", 16, 10000, 32, queries=8),
    _decoding("drafts", 4, 16384, 32, queries=64),
)
TINY = (
    Row("tiny", 2, 4, 2, 40, 40, 16, "causal", dtype="fp32"),
    Row("tiny", 2, 2, 2, 30, 50, 16, "full", dtype="fp32"),
    Row("tiny", 2, 4, 2, 40, 50, 16, "padding", dtype="fp32"),
    Row("tiny", 2, 4, 2, 1, 60, 16, dtype="fp32", decodes=True),
)
"""For CPUs."""


def drawn(seed: int) -> tuple[Row, ...]:
    """Rows that nobody has tuned for; the same for the same seed."""
    rng = random.Random(seed)
    return tuple(
        (_drawn_decoding if number % 4 == 3 else _drawn_training)(rng, f"drawn {seed}.{number}")
        for number in range(DRAWN)
    )


def every_row(seed: int) -> dict[str, Row]:
    """All rows by their names."""
    return {row.name: row for row in (*TINY, *FIXED, *drawn(seed))}


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _odd(length: int) -> int:
    """No multiple of anything that a tile is."""
    return length | 1


def _heads(rng: random.Random) -> tuple[int, int]:
    """Query and kv heads: 4 to 64, one to eight on each kv head."""
    group = rng.randint(1, 8)
    kv_heads = rng.randint(-(-4 // group), 64 // group)
    return group * kv_heads, kv_heads


def _drawn_training(rng: random.Random, label: str) -> Row:
    heads, kv_heads = _heads(rng)
    length = _odd(_log_uniform(rng, 64, 16383))
    batch = _log_uniform(rng, 1, max(1, MOST_TOKENS // length))
    program = rng.choices(PROGRAMS, [5, 6, 4, 1, 2, 2, 2, 2, 1, 1, 1])[0]
    row = _square(label, batch, heads, length, rng.choice(_DIMS), program, kv_heads)
    if program in ("window", "prefix", "documents", "sink window"):
        row = replace(row, size=_log_uniform(rng, min(16, length - 1), length - 1))
    if program == "full" and rng.random() < _CROSS:
        row = replace(row, kv_len=_odd(_log_uniform(rng, 16, 16383)))
    return _capped(replace(row, dtype="fp16" if rng.random() < 0.2 else "bf16"))


def _drawn_decoding(rng: random.Random, label: str) -> Row:
    heads, kv_heads = _heads(rng)
    keys = _odd(_log_uniform(rng, 64, 16383))
    queries = rng.choice((1, 1, 1, 1, 3, 8, 17, 64))
    program = rng.choice(("causal", "causal", "causal", "window", "soft cap", "alibi"))
    row = Row(label, _log_uniform(rng, 1, 128), heads, kv_heads, min(queries, keys), keys,
              rng.choice(_DIMS), program, decodes=True)  # fmt: skip
    if program == "window":
        row = replace(row, size=_log_uniform(rng, 16, keys))
    return _capped(replace(row, dtype="fp16" if rng.random() < 0.2 else "bf16"))


def _capped(row: Row) -> Row:
    """Fewer batch entries, then fewer heads, until a row has no more work than it may have."""
    while row.work > MOST_WORK or (row.decodes and row.live_bytes > MOST_CACHE):
        group = row.heads // row.kv_heads
        if row.batch > 1:
            row = replace(row, batch=row.batch - max(1, row.batch // 8))
        elif row.kv_heads > 1 and group * (row.kv_heads - 1) >= 4:
            row = replace(row, heads=group * (row.kv_heads - 1), kv_heads=row.kv_heads - 1)
        else:
            length = _odd(row.kv_len * 3 // 4)
            row = replace(row, kv_len=length, q_len=min(row.q_len, length))
    return replace(row, size=min(row.size, row.kv_len - 1)) if row.size else row


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command line and of its workers."""
    parser.add_argument("--seed", type=int, default=0, help="of the rows that are drawn")
    parser.add_argument("--modes", help=f"names, by commas, of {', '.join(MODES)}")
    parser.add_argument("--peers", help=f"names, by commas, of {', '.join(COLUMNS[1:])}; by "
                        "default those that have such a call")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def named_of(
    parser: argparse.ArgumentParser, written: str | None, known: Sequence[str]
) -> tuple[str, ...] | None:
    """The names that an option has, in the order of ``known``; None where it has none.

    Ends with an error where one is unknown.
    """
    if written is None:
        return None
    names = written.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {unknown[0]!r}; there are: {', '.join(known)}")
    return tuple(name for name in known if name in names)
