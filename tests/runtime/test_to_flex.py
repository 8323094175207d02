"""Programs as functions of torch's own ``flex_attention``."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import attndsl
from attndsl.errors import UnsupportedError

B, H, L, D = 2, 4, 40, 8
DOC = torch.arange(L).repeat(B, 1) // torch.tensor([[9], [15]])
CAPTURES = {
    "doc": DOC,
    "slopes": torch.linspace(0.1, 1, H),
    "order": torch.arange(L).flip(0),
    "n": 3,
    "gain": torch.tensor(1.5),
}
DECLARED = {
    "doc": "tensor doc[batch, kv_len]: int",
    "slopes": "tensor slopes[heads]: float",
    "order": "tensor order[kv_len]: int",
    "n": "param n: int",
    "gain": "param gain: float",
}
PROGRAMS = [
    "causal() and q - kv < 10",
    "mask = q >= kv and doc[b, q] == doc[b, kv]; score = softcap(score, 2) + slopes[h] * (q - kv)",
    "score + alibi()",
    "natten2d(8, 5, 3, 3)",
    "score = where(q >= kv, min(score, 1.0) + max(0.5, score) + silu(score) * n, -inf)",
    "score = score + t5_bucket(q - kv, 8, 20) * 0.1 + softplus(score) + gelu(score) ** 2",
    "score = gain * score + order[order[kv] // 2] % 5 + order[q + 1000] // n - sign(score) * h",
    "mask = ((q ^ kv) & 3) != 1 or not (kv >> (h % n) > 2); score = (1 << h) + ~q % (kv + 1)",
    "mask = score > 0 or q == kv",
    "mask = hkv == 0 or q >= kv + n",
    "mask = kv < kv_len - q_len + 30 and true; score = score + (q // (kv % 3)) + float(q > kv)",
    "mask = true",
    "score = 1.0",
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """torch's own implementation, without its compiler."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("text", PROGRAMS)
def test_torch_gives_the_same(text):
    used = {name: value for name, value in CAPTURES.items() if name in text}
    attention = attndsl.compile("\n".join([*(DECLARED[name] for name in used), text]))
    q, k, v = random(B, H, L, D), random(B, 2, L, D, seed=1), random(B, 2, L, D, seed=2)
    score_mod, block_mask = attention.to_flex(L, L, B, H, 16, kv_heads=2, **used)
    found = torch_flex.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)
    torch.testing.assert_close(found, attention(q, k, v, **used), atol=1e-5, rtol=1e-5)


def test_what_a_program_does_not_say_is_none():
    assert attndsl.compile("score + alibi()").to_flex(8, 8)[1] is None
    assert attndsl.compile("causal()").to_flex(8, 8)[0] is None


@pytest.mark.parametrize(
    "positions",
    [
        {"q_offset": 32},
        {"q_offset": torch.tensor(32), "kv_offset": 2},
        {"q_index": torch.arange(8) * 4, "kv_index": torch.arange(L).flip(0)},
    ],
)
def test_positions(positions):
    attention = attndsl.compile("mask = q >= kv; score = score - 0.1 * (q - kv)")
    q, k, v = random(B, H, 8, D), random(B, H, L, D, seed=1), random(B, H, L, D, seed=2)
    mods = attention.to_flex(8, L, B, H, **positions)
    found = torch_flex.flex_attention(q, k, v, *mods)
    torch.testing.assert_close(found, attention(q, k, v, **positions))


def test_torch_s_compiler_reads_the_functions(monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    slopes = CAPTURES["slopes"]
    attention = attndsl.compile("mask = q >= kv; score = score + slopes[h] * kv", slopes=slopes)
    mods = attention.to_flex(L, L, B, H)
    q, k, v = random(B, H, L, D), random(B, H, L, D, seed=1), random(B, H, L, D, seed=2)
    function = torch.compile(torch_flex.flex_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(function(q, k, v, *mods), attention(q, k, v))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sink = 0.5", "sink"),
        ("weights = sigmoid(score)", "weights"),
        ("weights = dropout(softmax(score), 0.1)", "dropout"),
    ],
)
def test_what_flex_attention_has_not(text, what):
    with pytest.raises(UnsupportedError, match=f"no {what}"):
        attndsl.compile(text).to_flex(8, 8)


def test_a_round_trip():
    text = "mask = q >= kv and q - kv < 9; score = 3.0 * tanh(score / 3.0)"
    attention = attndsl.compile(text)
    score_mod, block_mask = attention.to_flex(L, L)
    again = attndsl.compile(str(attndsl.trace(score_mod, block_mask.mask_mod)))
    q = random(B, H, L, D)
    torch.testing.assert_close(again(q, q, q), attention(q, q, q))


@pytest.mark.parametrize("name", ["torch", "lambda", "q_idx", "t0_", "score_mod"])
def test_captures_by_names_that_the_functions_have_use_for(name):
    attention = attndsl.compile(f"tensor {name}[heads]: float; score = score * 2 + {name}[h] * kv")
    q, k, v = random(B, H, L, D), random(B, H, L, D, seed=1), random(B, H, L, D, seed=2)
    captures = {name: CAPTURES["slopes"]}
    found = torch_flex.flex_attention(q, k, v, *attention.to_flex(L, L, B, H, **captures))
    torch.testing.assert_close(found, attention(q, k, v, **captures))


@pytest.mark.parametrize("index", ["9", "0 - 1", "n"])
def test_indices_that_are_numbers_out_of_range_are_clamped(index):
    text = f"param n: int = 7; tensor gain[heads]: float; score = score * gain[{index}]"
    attention = attndsl.compile(text)
    q, k, v = random(B, H, L, D), random(B, H, L, D, seed=1), random(B, H, L, D, seed=2)
    captures = {"gain": torch.arange(1.0, H + 1)}
    found = torch_flex.flex_attention(q, k, v, *attention.to_flex(L, L, B, H, **captures))
    torch.testing.assert_close(found, attention(q, k, v, **captures))


@pytest.mark.parametrize("entries", [False, True])
def test_parts_of_calls(entries):
    attention = attndsl.compile("mask = causal_lower_right(); score = score + alibi()")
    q, k, v = torch.randn(B, H, 6, D), torch.randn(B, H, 10, D), torch.randn(B, H, 10, D)
    sizes = {"q_len": 10, "heads": 8}
    options = {"q_offset": 4, "h_offset": 4}
    if entries:
        options = {"q_offset": torch.tensor([0, 3]), "kv_lengths": torch.tensor([9, 4])}
        options["h_offset"], sizes = 1, {"heads": 8}
    functions = attention.to_flex(6, 10, B, H, 2, whole_sizes=sizes, **options)
    found = torch_flex.flex_attention(q, k, v, *functions)
    torch.testing.assert_close(found, attention(q, k, v, **sizes, **options))
