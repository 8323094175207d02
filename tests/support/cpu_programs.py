"""Programs that the CPU backend is held to the reference with."""

from __future__ import annotations

# Text, captures, options of the call, and sizes where they are not PLACE's.
PROGRAMS = {
    "identity": ("score", {}, {}, {}),
    "causal": ("causal()", {}, {}, {}),
    "inverse causal": ("where(q <= kv, score, -inf)", {}, {}, {}),
    "window": ("causal() and q - kv < 9", {}, {}, {}),
    "dilated": ("dilated(20, 3)", {}, {}, {}),
    "prefix": ("prefix_lm(11)", {}, {}, {}),
    "neighbourhood": ("natten2d(6, 6, 3, 3)", {}, {}, {"q_len": 36}),
    "dead rows": ("kv < q - 3", {}, {}, {}),
    "no live pair": ("q < 0", {}, {}, {}),
    "holes": ("mask = kv % 13 == 0 or abs(q - kv) < 2", {}, {}, {}),
    "mask by raw score": ("mask = score > 0.1; score = 3 * score", {}, {}, {}),
    "mask by batch and head": ("mask = q - kv < 5 * (h + 1) and kv < 11 + 9 * b", {}, {}, {}),
    "mask by head": ("mask = 0 <= q - kv < 3 + 7 * h", {}, {}, {"heads": 6, "kv_heads": 2}),
    "relative": ("score + (q - kv)", {}, {}, {}),
    "alibi": ("mask = causal(); score = score + alibi()", {}, {}, {}),
    "softcap": ("mask = causal(); score = softcap(score, 2.0)", {}, {}, {}),
    "square": ("score * score", {}, {}, {}),
    "trigonometry": ("sin(cos(score)) + tan(b)", {}, {}, {}),
    "silu": ("silu(score) + gelu(score) - erf(score)", {}, {}, {}),
    "score of positions": ("mask = causal(); score = 0.3 * (q - kv)", {}, {}, {}),
    "constant": ("score = 1.0", {}, {}, {}),
    "bias": (
        "tensor t[q_len, kv_len]: float; mask = causal(); score = score + t[q, kv]",
        {"t": (37, 37)}, {}, {},
    ),
    "bias of all": (
        "tensor t[batch, heads, q_len, kv_len]: float; score = score * t[b, h, q, kv]",
        {"t": (2, 4, 37, 37)}, {}, {},
    ),
    "transposed bias": (
        "tensor t[kv_len, heads, q_len]: float; score = score + t[kv, h, q]",
        {"t": (37, 4, 37)}, {}, {},
    ),
    "bias of kv heads": (
        "tensor t[kv_heads, kv_len]: float; score = score + t[hkv, kv]",
        {"t": (2, 37)}, {}, {"kv_heads": 2},
    ),
    "bias by offset": (
        "tensor t[q_len, kv_len]: float; score = score + t[q, kv]",
        {"t": (37, 37)}, {"q_offset": -4, "kv_offset": 3}, {},
    ),
    "diagonal": (
        "tensor t[q_len + kv_len]: float; mask = causal(); score = score + t[q - kv] * t[kv]",
        {"t": (74,)}, {}, {},
    ),
    "twice the diagonal": (
        "tensor t[kv_len, kv_len]: float; score = score + t[kv, kv] + t[q, 2]",
        {"t": (37, 37)}, {}, {},
    ),
    "heads": (
        "tensor g[heads]: float; tensor s[batch]: float; score = tanh(score * g[h]) + s[b]",
        {"g": (4,), "s": (2,)}, {}, {},
    ),
    "params": (
        "param a: float; param c: float; mask = causal(); score = c * tanh(score / c) * a",
        {"a": (), "c": ()}, {}, {},
    ),
    "sink": (
        "tensor s[heads]: float; param a: float; mask = kv < q; score = score * a; "
        "sink = s[h] * s[h] + a",
        {"s": (4,), "a": ()}, {}, {},
    ),
    "a far larger sink": ("sink = 5000.0", {}, {}, {}),
    "dropout": (
        "tensor t[heads]: float; mask = kv < q; score = score * t[h]; "
        "weights = dropout(softmax(score), 0.4)",
        {"t": (4,)}, {"seed": 77}, {},
    ),
    "learned dropout": (
        "param p: float; weights = dropout(softmax(score), 0.5 + 0.1 * sin(p))",
        {"p": ()}, {"seed": (1 << 40) + 5}, {},
    ),
    "dropout of everything": (
        "param p: float; weights = dropout(softmax(score), p)", {}, {"p": 1.0}, {},
    ),
    "sink and dropout": (
        "tensor s[heads]: float; sink = s[h]; weights = dropout(softmax(score), 0.25)",
        {"s": (4,)}, {}, {},
    ),
    "grouped": ("causal()", {}, {}, {"heads": 6, "kv_heads": 2}),
    "one kv head": ("mask = causal(); score = score - q + kv", {}, {}, {"kv_heads": 1}),
    "more queries": ("causal_lower_right()", {}, {}, {"q_len": 45, "kv_len": 19}),
    "more keys": ("causal_lower_right()", {}, {}, {"q_len": 19, "kv_len": 45}),
    "one query": ("causal()", {}, {"q_offset": 40}, {"q_len": 1, "kv_len": 61}),
    "one key": ("causal()", {}, {}, {"q_len": 23, "kv_len": 1}),
    "value dim": ("causal()", {}, {}, {"dim": 5, "value_dim": 11}),
    "offsets": (
        "mask = causal(); score = score + alibi()", {}, {"q_offset": 20, "kv_offset": 5}, {},
    ),
    "scale": ("causal()", {}, {"scale": -0.7}, {}),
}  # fmt: skip

OWN_WEIGHTS = {
    "sigmoid": (
        "tensor t[heads]: float; param a: float; mask = kv < q - 2; score = a * score; "
        "weights = sigmoid(score - t[h]) ** 2 * a",
        {"t": (4,), "a": ()}, {}, {},
    ),
    "relu": ("mask = causal(); weights = relu(score) ** 2 / kv_len", {}, {}, {}),
    "linear": ("weights = score", {}, {}, {}),
    "sigmoid and dropout": (
        "param a: float; mask = kv < q; weights = dropout(sigmoid(score * a), 0.25)",
        {"a": ()}, {}, {},
    ),
}  # fmt: skip
