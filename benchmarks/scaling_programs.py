"""What ``scaling.py`` simulates and measures: programs, documents, sizes and speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attndsl.inspection.key_ranges import Reach

TILE = 128
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
TOKENS = 8192
"""Of each rank."""
RANKS = (2, 8, 64, 256, 1024)
HOST, NETWORK = 300e9, 50e9
"""Bytes a second that a GPU receives: over NVLink within a host of 8, otherwise 400 Gbit/s."""
LATENCY = 20e-6
DOCUMENTS = "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]"
MEDIANS = {"documents2000": 2000, "documents12000": 12000}
SPREAD = 1.2
"""Of the logarithms of documents' lengths."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and the case whose measured time of a tile it has."""

    text: str
    case: str


PROGRAMS = {
    "causal": Program("causal()", "causal"),
    "window1024": Program("causal() and q - kv < 1024", "window1024"),
    "softcap": Program("mask = causal(); score = softcap(score, 50.0)", "softcap"),
    "documents2000": Program(DOCUMENTS, "documents1000"),
    "documents12000": Program(DOCUMENTS, "documents1000"),
    "block_diffusion": Program("param n: int\nmask = block_diffusion(n, 1024)", "causal"),
}


TEXTS = {
    name: program.text for name, program in PROGRAMS.items() if name != "block_diffusion"
} | {
    "alibi": "mask = causal(); score = score + alibi()",
    "gain": "tensor x[heads]: float\nmask = causal(); score = x[h] * score",
}  # fmt: skip
"""What is measured."""


def document_ids(length: int, median: int) -> np.ndarray[Any, Any]:
    """Which document each row is of: lengths are log-normal, and at most a quarter of all rows."""
    rng = np.random.default_rng(0)
    number = 16 + 8 * length // median
    lengths = np.clip(np.exp(rng.normal(0.0, SPREAD, number)) * median, 64, max(64, length // 4))
    return np.searchsorted(np.cumsum(lengths.astype(np.int64)), np.arange(length), side="right")


def reach_of_documents(length: int, median: int) -> Reach:
    """Of causal documents, as tiles have it: from the first row's document to the diagonal."""
    ids = document_ids(length, median)
    first = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1])
    rows = length // TILE
    starts = first[ids[::TILE] - ids[0]] // TILE
    stops = np.arange(rows) + 1
    return Reach(
        starts[:, None], stops[:, None], stops - starts, 1, length, length, TILE, TILE
    )  # fmt: skip
