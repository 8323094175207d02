"""The programs of the support table: each exercises one feature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BATCH, HEADS, KV_HEADS = 2, 4, 2


@dataclass(frozen=True)
class Feature:
    """A row of the table: a program, and a kind of call of it.

    A tensor has dims, which are numbers, ``q``, ``kv`` or ``2 kv``, and a kind: ``f`` is the dtype
    of q, ``s`` is fp32, ``i`` int32 and ``b`` bool.
    """

    name: str
    """Markdown."""
    text: str
    tensors: dict[str, tuple[tuple[int | str, ...], str]] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    """Captures that get gradients."""
    call: dict[str, Any] = field(default_factory=dict)
    """Further arguments. ``by entry`` is an int for each batch entry, ``by key`` one for each
    key, and ``fp32`` a dtype."""
    checked: bool = False

    @property
    def serves(self) -> bool:
        """True for programs that packed requests may have: ``serve`` takes no such arguments."""
        return not self.checked and set(self.call) <= {"seed"}


PLAIN = Feature("plain attention", "causal()")
"""The program by which head dims and dtypes are judged."""
_DOCUMENTS = "tensor ids[batch, kv_len]: int; mask = document_causal(ids)"
_IDS: dict[str, tuple[tuple[int | str, ...], str]] = {"ids": ((BATCH, "kv"), "i")}
FEATURES = (
    Feature("formula mask", "sliding_window(256)"),
    Feature("document mask", _DOCUMENTS, _IDS),
    Feature("block bitmap",
            "tensor live[16, 16]: bool; mask = live[q // 64, kv // 64] and q >= kv",
            {"live": ((16, 16), "b")}),
    Feature("ALiBi with soft cap",
            "mask = causal(); score = softcap(score - 0.1 * (q - kv), 30.0)"),
    Feature("long score expression",
            "score = score + sin(0.01 * (q - kv)) * cos(score) + log(1 + score ** 2) ** 3"),
    Feature("learned pair bias",
            "tensor bias[heads, q_len, kv_len]: float; score = score + bias[h, q, kv]",
            {"bias": ((HEADS, "q", "kv"), "f")}, ("bias",)),
    Feature("learned distance bias",
            "tensor t[heads, n]: float; mask = causal(); score = score + rel_bias(t)",
            {"t": ((HEADS, "2 kv"), "s")}, ("t",)),
    Feature("learned head factor",
            "tensor t[heads]: float; mask = causal(); score = score * t[h]",
            {"t": ((HEADS,), "s")}, ("t",)),
    Feature("learned table by key ids",
            "tensor t[heads, 64]: float; tensor ids[kv_len]: int; score = score * t[h, ids[kv]]",
            {"t": ((HEADS, 64), "s"), "ids": (("kv",), "i")}, ("t",)),
    Feature("`dot` of captured rows",
            "tensor a[kv_heads, kv_len, 16]: float; tensor c[heads, q_len, 16]: float; "
            "score = score + dot(c[h, q, :], a[hkv, kv, :])",
            {"a": ((KV_HEADS, "kv", 16), "f"), "c": ((HEADS, "q", 16), "f")}),
    Feature("learned sink", "tensor s[heads]: float; mask = causal(); sink = s[h]",
            {"s": ((HEADS,), "s")}, ("s",)),
    Feature("custom `weights`", "mask = causal(); weights = sigmoid(score - log(q + 1.0))"),
    Feature("learned `weights`",
            "tensor t[heads]: float; weights = relu(score - t[h]) ** 2",
            {"t": ((HEADS,), "s")}, ("t",)),
    Feature("dropout", "mask = causal(); weights = dropout(softmax(score), 0.1)",
            call={"seed": 7}),
    Feature("`kv_lengths`", "causal()", call={"kv_lengths": "by entry"}),
    Feature("`kv_index`", "causal()", call={"kv_index": "by key"}),
    Feature("`deterministic=True`", "causal()", call={"deterministic": True}),
    Feature("`deterministic=True` with document mask", _DOCUMENTS, _IDS,
            call={"deterministic": True}),
    Feature("`out_dtype=torch.float32`", "causal()", call={"out_dtype": "fp32"}),
    Feature("`checked=True`", "causal()", checked=True),
)  # fmt: skip
