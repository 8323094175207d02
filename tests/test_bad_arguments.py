"""Bad values of every argument of the public functions: taken, or an error of the package's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attndsl
from attndsl import PagedCache
from attndsl.compat import (
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMaskWithTensorBias,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    memory_efficient_attention,
)
from attndsl.errors import AttnDSLError
from attndsl.flex import create_block_mask, flex_attention

PROGRAM = attndsl.compile(
    "tensor gain[heads]: float; tensor doc[kv_len]: int; param near: int; param soft: float; "
    "mask = causal() and q - kv < near and doc[kv] >= 0; score = score * gain[h] * soft"
)
DROPPED = attndsl.compile("param p: float; weights = dropout(softmax(score), p)")
SUNK = attndsl.compile("tensor s[heads]: float; sink = s[h]")
MODULE = attndsl.nn.MultiheadAttention(8, 2, batch_first=True)
GENERIC = {
    "None": None,
    "a text": "3",
    "an empty text": "",
    "bytes": b"3",
    "a list of floats": [0.5, 0.25],
    "a list of ints": [1, 2],
    "a ragged list": [1, [2, 3]],
    "an empty tuple": (),
    "a pair of None": (None, None),
    "a pair of texts": ("1", "2"),
    "a pair of floats": (1.5, 2.5),
    "a dict": {"a": 1},
    "an object": object(),
    "a class": int,
    "a function": lambda *given: None,
    "True": True,
    "an int": 7,
    "a negative int": -3,
    "an int of 70 bits": 1 << 70,
    "a whole float": 2.0,
    "a float": 2.5,
    "a negative float": -0.5,
    "NaN": float("nan"),
    "inf": float("inf"),
    "complex": 1j,
    "an int of numpy": np.int64(2),
    "a float of numpy": np.float32(0.5),
    "an array of numpy": np.array([1.0, 2.0]),
    "an array of objects": np.array([None, "a"]),
    "a dtype": torch.float32,
    "an int dtype": torch.int64,
    "a device": torch.device("cpu"),
    "a 0-d int tensor": torch.tensor(2),
    "a 0-d float tensor": torch.tensor(0.5),
    "a 0-d bool tensor": torch.tensor(True),
    "a tensor of ints": torch.tensor([1, 0, 2]),
    "a tensor of large ints": torch.tensor([1 << 40, -(1 << 40)]),
    "a tensor of floats": torch.tensor([0.5, 0.25]),
    "a tensor of bools": torch.tensor([True, False]),
    "a complex tensor": torch.ones(2, dtype=torch.complex64),
    "an empty tensor": torch.empty(0),
    "an empty matrix": torch.empty(0, 3, dtype=torch.int64),
    "a tensor of five dims": torch.ones(1, 2, 1, 2, 1),
}


def _like(x):
    """Tensors that are unlike ``x`` in one way each."""
    return {
        "ints": x.to(torch.int64),
        "bytes": x.to(torch.uint8),
        "bools": x.to(torch.bool),
        "fp16": x.to(torch.float16),
        "fp64": x.to(torch.float64),
        "complex": x.to(torch.complex64),
        "fp8": x.to(torch.float8_e4m3fn),
        "without data": x.to("meta"),
        "one dim more": x[None],
        "one dim less": x.sum(0),
        "no dim": x.sum(),
        "no entry": x[:0],
        "one entry": x[:1],
        "no column": x[..., :0],
        "one column": x[..., :1],
        "negative": -x - 1,
        "large": x.to(torch.float64) * 1e9 if x.is_floating_point() else x * (1 << 30),
        "twice as long": torch.cat([x, x]) if x.dim() else x,
        "of strides 0": x.sum().expand(x.shape),
        "learned": x.clone().requires_grad_() if x.is_floating_point() else x,
    }


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _heads(*shape):
    return torch.randn(*shape)


def _pages():
    return {
        "k_pages": _heads(6, 4, 2, 8), "v_pages": _heads(6, 4, 2, 8),
        "table": torch.arange(4).reshape(2, 2), "lengths": torch.tensor([5, 6]),
    }  # fmt: skip


def _serve(**given):
    program = attndsl.compile("causal()")
    with torch.no_grad():
        return program.serve(**given)


def _append(k, v, starts, backend):
    PagedCache(**_pages()).append(k, v, starts, backend=backend)


def _backward(**given):
    x = _heads(2, 2, 5, 8)
    out, lse = PROGRAM(x, x, x, return_lse=True, **NAMED)
    whole = {"q": x, "k": x, "v": x, "out": out, "lse": lse, "grad_out": out, **NAMED}
    return PROGRAM.backward(**{**whole, **given})


NAMED = {
    "gain": torch.ones(2), "doc": torch.zeros(5, dtype=torch.int64), "near": 9, "soft": 0.5,
}  # fmt: skip


def _operands(*shape):
    return {"q": _heads(*shape), "k": _heads(*shape), "v": _heads(*shape)}


def _calls():
    """By name: what is called, and its arguments as they should be; None where it has none."""
    rows = _operands(2, 5, 2, 8)
    rest = dict.fromkeys(
        ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
         "deterministic", "return_attn_probs")
    )  # fmt: skip
    rest |= {"dropout_p": 0.0, "causal": True, "window_size": (-1, -1), "softcap": 0.0,
             "alibi_slopes": torch.ones(2)}  # fmt: skip
    cached = {name: rest[name] for name in
              ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")}  # fmt: skip
    new = _heads(2, 2, 2, 8)
    yield "flash_attn_func", flash_attn_func, {**rows, **rest}
    yield "flash_attn_varlen_func", flash_attn_varlen_func, {
        **_operands(9, 2, 8), "cu_seqlens_q": _ints(0, 4, 9), "cu_seqlens_k": _ints(0, 4, 9),
        "max_seqlen_q": 5, "max_seqlen_k": 5, **rest, "block_table": None,
    }  # fmt: skip
    yield "flash_attn_with_kvcache", flash_attn_with_kvcache, {
        "q": _heads(2, 1, 2, 8), "k_cache": _heads(2, 9, 2, 8), "v_cache": _heads(2, 9, 2, 8),
        "k": new, "v": new, "rotary_cos": None, "rotary_sin": None,
        "cache_seqlens": _ints(5, 6), "cache_batch_idx": _ints(1, 0), "cache_leftpad": _ints(1, 0),
        "block_table": None, **cached, "rotary_interleaved": True, "num_splits": 0,
        "return_softmax_lse": False,
    }  # fmt: skip
    yield "memory_efficient_attention", memory_efficient_attention, {
        "query": rows["q"], "key": rows["k"], "value": rows["v"],
        "attn_bias": _heads(2, 2, 5, 5), "p": 0.0, "scale": None, "op": None, "output_dtype": None,
    }  # fmt: skip
    yield "LowerTriangularMaskWithTensorBias", lambda bias: memory_efficient_attention(
        rows["q"], rows["k"], rows["v"], LowerTriangularMaskWithTensorBias(bias)
    ), {"bias": _heads(2, 2, 5, 5)}  # fmt: skip
    yield "LocalAttentionFromBottomRightMask", lambda window_left, window_right: (
        memory_efficient_attention(
            rows["q"], rows["k"], rows["v"],
            LocalAttentionFromBottomRightMask(window_left, window_right),
        )
    ), {"window_left": 2, "window_right": 1}  # fmt: skip
    packed = _heads(1, 9, 2, 8)
    yield "BlockDiagonalMask", lambda q_seqlen, kv_seqlen: memory_efficient_attention(
        packed, packed, packed, BlockDiagonalMask.from_seqlens(q_seqlen, kv_seqlen)
    ), {"q_seqlen": [4, 5], "kv_seqlen": [5, 4]}  # fmt: skip
    made = BlockDiagonalMask.from_seqlens([4, 5])
    yield "make_local_attention", lambda window_size: memory_efficient_attention(
        packed, packed, packed, made.make_local_attention(window_size)
    ), {"window_size": 2}  # fmt: skip
    yield "make_local_attention_from_bottomright", (
        made.make_local_attention_from_bottomright
    ), {"window_size": 2}  # fmt: skip
    yield "LowerTriangular make_local_attention", (
        LowerTriangularFromBottomRightMask().make_local_attention
    ), {"window_size": 2}  # fmt: skip
    yield "from_tensor_list", BlockDiagonalMask.from_tensor_list, {"tensors": [packed, packed]}
    yield "split", made.split, {"tensor": packed}
    yield "BlockDiagonalPaddedKeysMask", BlockDiagonalPaddedKeysMask.from_seqlens, {
        "q_seqlen": [4, 5], "kv_padding": 9, "kv_seqlen": [5, 4],
    }  # fmt: skip
    features = _heads(2, 5, 8)
    yield "MultiheadAttention", MODULE, {
        "query": features, "key": features, "value": features,
        "key_padding_mask": torch.zeros(2, 5), "need_weights": True,
        "attn_mask": torch.zeros(5, 5), "average_attn_weights": True, "is_causal": False,
    }  # fmt: skip
    heads = _operands(2, 2, 5, 8)
    of_torch = {"query": heads["q"], "key": heads["k"], "value": heads["v"]}
    yield "scaled_dot_product_attention", attndsl.scaled_dot_product_attention, {
        **of_torch, "attn_mask": _heads(5, 5), "dropout_p": 0.0, "is_causal": False, "scale": None,
        "enable_gqa": False,
    }  # fmt: skip
    blocks = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, "cpu", BLOCK_SIZE=4)
    yield "flex_attention", flex_attention, {
        **of_torch, "score_mod": None, "block_mask": blocks, "scale": None, "enable_gqa": False,
        "return_lse": False, "kernel_options": None, "return_aux": None,
    }  # fmt: skip
    yield "create_block_mask", create_block_mask, {
        "mask_mod": lambda b, h, i, j: i >= j, "B": 1, "H": 1, "Q_LEN": 5, "KV_LEN": 5,
        "device": "cpu", "BLOCK_SIZE": 4, "_compile": False, "separate_full_blocks": True,
        "compute_dq_write_order": False, "dq_kv_order": True,
    }  # fmt: skip
    yield "PagedCache", PagedCache, {**_pages(), "k_scale": None, "v_scale": None}
    tokens, starts = _heads(3, 2, 8), torch.tensor([0, 1, 3])
    step = {"cache": PagedCache(**_pages()), "starts": starts}
    capacities = {"q_index": torch.tensor([4, 4, 5]), "most_queries": None, "most_chunks": None}
    yield "append", _append, {"k": tokens, "v": tokens, "starts": starts, "backend": "auto"}
    yield "validate", step["cache"].validate, {"starts": starts, "tokens": 3}
    yield "serve", _serve, {
        "q": tokens, **step, **capacities, "plan": None, "scale": None, "return_lse": False,
        "out_dtype": None, "heads": 2, "kv_heads": 2, "h_offset": 0, "captures": None,
    }  # fmt: skip
    yield "plan", attndsl.compile("causal()").plan, {**step, "tokens": 3, **capacities}
    out, lse = attndsl.compile("causal()")(**heads, return_lse=True)
    sums = lse.clone()
    yield "merge", attndsl.merge, {"parts": [(out, lse)], "sink": torch.ones(2), "dtype": None}
    yield "merge of two", lambda out, lse: attndsl.merge([(heads["q"], sums), (out, lse)]), {
        "out": out, "lse": lse,
    }  # fmt: skip
    yield "join", lambda program, **rest: attndsl.join("causal()", program, **rest), {
        "program": "score", "prefixes": ["a_", "b_"], "share": (), "backend": None, "exact": None,
        "checked": None,
    }  # fmt: skip
    located = {
        "q_offset": 0, "kv_offset": 0, "q_index": torch.arange(5), "kv_index": torch.arange(5),
        "q_len": 9, "kv_len": None, "heads": 2, "kv_heads": None, "batch": 4, "h_offset": 0,
        "b_offset": 0, "kv_lengths": None,
    }  # fmt: skip
    asked = {"scale": None, "return_lse": False, "deterministic": None, "seed": None,
             "tiles": None, "out_dtype": None, "captures": None}  # fmt: skip
    yield "a call", PROGRAM, {**heads, **located, **asked, **NAMED}
    yield "a call of lengths", PROGRAM, {**heads, **NAMED, "kv_lengths": torch.tensor([4, 5])}
    yield "a call with dropout", DROPPED, {**heads, "p": 0.5, "seed": 5}
    yield "backward", _backward, {
        **heads, "out": heads["q"], "lse": torch.zeros(2, 2, 5), "grad_out": heads["q"],
        "grad_lse": torch.zeros(2, 2, 5), "wants": ("q", "k"), "wants_captures": ("gain",),
        "grad_dtype": None, "tiles": None, "room": _heads(2, 2, 5, 8), **located,
        "scale": None, "seed": None, "deterministic": None,
    }  # fmt: skip
    yield "a call with out", PROGRAM, {**heads, "out": _heads(2, 2, 5, 8), **NAMED, "q_offset": 0}
    yield "sink_logits", SUNK.sink_logits, {"q": heads["q"], "k": heads["k"], "s": torch.ones(2)}
    yield "weights", PROGRAM.weights, {"q": heads["q"], "k": heads["k"], **NAMED}
    yield "compile", attndsl.compile, {
        "text": "causal()", "backend": "auto", "checked": False, "exact": False, "name": None,
    }  # fmt: skip


FLAGS = {
    "causal", "deterministic", "return_attn_probs", "return_softmax_lse", "rotary_interleaved",
    "need_weights", "average_attn_weights", "is_causal", "enable_gqa", "return_lse",
    "separate_full_blocks", "compute_dq_write_order",
}  # fmt: skip
"""Arguments of which the truth is asked alone: what has none says so itself."""
CALLS = {name: (function, arguments) for name, function, arguments in _calls()}
CASES = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]


@pytest.mark.parametrize(("name", "argument"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_taken_or_refused_in_words(name, argument):
    function, arguments = CALLS[name]
    usual = arguments[argument]
    bad = dict(GENERIC)
    if argument in FLAGS:
        bad = {kind: x for kind, x in bad.items() if not isinstance(x, torch.Tensor | np.ndarray)}
    if isinstance(usual, torch.Tensor):
        bad |= _like(usual)
    if argument in ("soft", "softcap"):  # An int that is no float is a matter of all params.
        del bad["an int of 70 bits"]
    found = {}
    for kind, value in bad.items():
        fresh = {
            n: x.clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for n, x in arguments.items()
        }
        try:
            function(**{**fresh, argument: value})
        except AttnDSLError:
            continue
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}".splitlines()[0]
    assert not found, "\n".join(
        [f"{name}({argument}=...)", *(f"{k}: {x}" for k, x in found.items())]
    )
