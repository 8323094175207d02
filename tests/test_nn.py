"""MultiheadAttention beside torch's, alone and in torch's transformer layers."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product

import pytest
import torch
from torch import nn

import attndsl
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError

WIDTH, HEADS, BATCH, Q_LEN, KV_LEN = 12, 3, 2, 5, 7
DOUBLE = torch.float64


def _pair(heads=HEADS, **options):
    """torch's module and attndsl's, of one state."""
    torchs = nn.MultiheadAttention(WIDTH, heads, dtype=DOUBLE, **options)
    mine = attndsl.nn.MultiheadAttention(WIDTH, heads, dtype=DOUBLE, **options)
    with torch.no_grad():
        for parameter in torchs.parameters():  # Biases start as zeros.
            parameter.normal_()
    mine.load_state_dict(torchs.state_dict())
    assert list(mine.state_dict()) == list(torchs.state_dict())
    return torchs, mine


def _inputs(module, q_len=Q_LEN, kv_len=KV_LEN):
    query = torch.randn(BATCH, q_len, WIDTH, dtype=DOUBLE)
    key = torch.randn(BATCH, kv_len, module.kdim, dtype=DOUBLE)
    value = torch.randn(BATCH, kv_len, module.vdim, dtype=DOUBLE)
    inputs = (query, key, value)
    return [x if module.batch_first else x.transpose(0, 1) for x in inputs]


def _same(torchs, mine, inputs, **options):
    """Outputs, weights, and gradients of the inputs and of every parameter."""
    found = []
    for module in (torchs, mine):
        leaves = [x.detach().requires_grad_() for x in inputs]
        leaves += [m for m in options.values() if isinstance(m, torch.Tensor) and m.requires_grad]
        out, weights = module(*leaves[:3], **options)
        total = out.square().sum() + (0 if weights is None else weights.square().sum())
        grads = torch.autograd.grad(total, [*leaves, *module.parameters()])
        found.append((out, weights, grads))
    torch.testing.assert_close(found[1], found[0])


PADDING = torch.tensor([[False] * KV_LEN, [False] * 4 + [True] * 3])
PAIRS = torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None] > 2
MASKS = {
    "none": {},
    "pairs": {"attn_mask": PAIRS},
    "padding": {"key_padding_mask": PADDING},
    "both": {"attn_mask": PAIRS, "key_padding_mask": PADDING},
    "floats": {
        "attn_mask": torch.randn(Q_LEN, KV_LEN, dtype=DOUBLE),
        "key_padding_mask": torch.zeros(BATCH, KV_LEN).double().masked_fill(PADDING, -torch.inf),
    },
    "heads": {"attn_mask": torch.randn(BATCH * HEADS, Q_LEN, KV_LEN, dtype=DOUBLE)},
    "learned": {
        "attn_mask": torch.randn(BATCH * HEADS, Q_LEN, KV_LEN, dtype=DOUBLE, requires_grad=True),
        "key_padding_mask": torch.randn(BATCH, KV_LEN, dtype=DOUBLE, requires_grad=True),
    },
}
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 5, "vdim": 9, "batch_first": True},
    "other widths, no bias": {"kdim": 5, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True, "batch_first": True},
    "bias_kv and zero": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_as_torchs(options, masks, need_weights):
    torchs, mine = _pair(**OPTIONS[options])
    _same(torchs, mine, _inputs(torchs), need_weights=need_weights, **MASKS[masks])


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_weights_by_head_and_inputs_without_a_batch(average, batched):
    torchs, mine = _pair(batch_first=True)
    inputs = _inputs(torchs)
    masks = {"attn_mask": PAIRS, "key_padding_mask": PADDING}
    if not batched:
        inputs, masks["key_padding_mask"] = [x[1] for x in inputs], PADDING[1]
    _same(torchs, mine, inputs, average_attn_weights=average, **masks)


@pytest.mark.parametrize("which", ["self", "key is value", "apart"])
def test_one_product_for_inputs_that_are_one(which):
    torchs, mine = _pair()
    x, y = torch.randn(2, Q_LEN, BATCH, WIDTH, dtype=DOUBLE).unbind()
    inputs = {"self": (x, x, x), "key is value": (x, y, y), "apart": (x, y, x)}[which]
    torch.testing.assert_close(mine(*inputs), torchs(*inputs))
    if which == "self":
        q, k, v = mine._project(*inputs)
        assert q.data_ptr() + q.shape[-1] * q.itemsize == k.data_ptr()
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_is_causal_is_a_hint(need_weights, padded):
    torchs, mine = _pair(batch_first=True)
    x = torch.randn(BATCH, KV_LEN, WIDTH, dtype=DOUBLE)
    mask = nn.Transformer.generate_square_subsequent_mask(KV_LEN, dtype=DOUBLE)
    padding = torch.zeros(BATCH, KV_LEN).double().masked_fill(PADDING, -torch.inf)
    options = {"need_weights": need_weights, "key_padding_mask": padding if padded else None}
    found = mine(x, x, x, attn_mask=mask, is_causal=True, **options)
    torch.testing.assert_close(found, torchs(x, x, x, attn_mask=mask, **options))
    # With keys that every query sees the mask is read: they are not behind the others.
    torchs, mine = _pair(batch_first=True, add_bias_kv=True)
    found = mine(x, x, x, attn_mask=mask, is_causal=True, **options)
    torch.testing.assert_close(found, torchs(x, x, x, attn_mask=mask, **options))


def test_a_learned_mask_is_read_whatever_the_hint():
    torchs, mine = _pair(batch_first=True)
    x = torch.randn(BATCH, KV_LEN, WIDTH, dtype=DOUBLE)
    mask = nn.Transformer.generate_square_subsequent_mask(KV_LEN, dtype=DOUBLE).requires_grad_()
    found, expected = (
        torch.autograd.grad(
            module(x, x, x, attn_mask=mask, need_weights=False, is_causal=hint)[0].sum(), mask
        )
        for module, hint in ((mine, True), (torchs, False))
    )
    torch.testing.assert_close(found, expected)


def test_rows_that_see_nothing_have_weights_of_zero():
    _, mine = _pair(batch_first=True)
    mask = torch.zeros(Q_LEN, KV_LEN, dtype=torch.bool)
    mask[2] = True
    out, weights = mine(*_inputs(mine), attn_mask=mask)
    assert (weights[:, 2] == 0).all()
    torch.testing.assert_close(out[:, 2], mine.out_proj.bias.expand(BATCH, -1))


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_nan_in_a_float_mask_is_no_mask(name):
    module = attndsl.nn.MultiheadAttention(16, 2)
    x = torch.randn(8, 1, 16)
    mask = torch.full((8, 8) if name == "attn_mask" else (1, 8), torch.nan)
    out, weights = module(x, x, x, **{name: mask})
    assert out.isnan().all()
    assert weights.isnan().all()


def test_the_weights_are_those_of_the_output():
    """With dropout too: the same pairs are dropped from both."""
    _, mine = _pair(dropout=0.4, batch_first=True)
    inputs = _inputs(mine)
    out, weights = mine(*inputs, average_attn_weights=False, key_padding_mask=PADDING)
    assert 0.3 < float((weights[0] == 0).double().mean()) < 0.5
    assert (weights[1, :, :, 4:] == 0).all()
    value = mine._split(mine._project(*inputs)[2])
    expected = mine.out_proj((weights @ value).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, expected)
    mine.eval()
    assert (mine(*inputs)[1] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    mine = attndsl.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 9, 16, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out, weights = mine(x, x, x)
    assert out.dtype is dtype
    full, full_weights = mine(x, x, x)
    torch.testing.assert_close(out.float(), full, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(weights.float(), full_weights, atol=3e-2, rtol=3e-2)
    (grad,) = torch.autograd.grad(out.sum(), mine.in_proj_weight)
    assert grad.dtype is torch.float32


def _layer(kind, norm_first=False, heads=2, batch_first=True):
    """torch's layer, and a copy whose attention is attndsl's."""
    torchs = kind(
        WIDTH, heads, 24, dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=DOUBLE
    )
    mine = copy.deepcopy(torchs)
    for name in ("self_attn", "multihead_attn"):
        if hasattr(mine, name):
            module = attndsl.nn.MultiheadAttention(
                WIDTH, heads, batch_first=batch_first, dtype=DOUBLE
            )
            setattr(mine, name, module)
    mine.load_state_dict(torchs.state_dict())
    return torchs, mine


def _calls(module, counts):
    for part in module.modules():
        if isinstance(part, attndsl.nn.MultiheadAttention):
            part.register_forward_hook(lambda *_: counts.append(1))


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_encoders(batch_first, training, grad):
    """Batch size == length; padding with a column that is padding in every entry; both masks."""
    layers = _layer(nn.TransformerEncoderLayer, batch_first=batch_first)
    torchs, mine = (nn.TransformerEncoder(layer, 2).train(training) for layer in layers)
    mine.load_state_dict(torchs.state_dict())
    counts = []
    _calls(mine, counts)
    x = torch.randn(6, 6, WIDTH, dtype=DOUBLE)
    padding = torch.zeros(6, 6, dtype=torch.bool)
    padding[:, 5] = padding[1, 3:] = padding[4, 1:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=DOUBLE)
    floats = torch.zeros(6, 6, dtype=DOUBLE).masked_fill(padding, -torch.inf)
    runs = [{}, {"mask": mask}, {"src_key_padding_mask": padding}]
    runs += [{"mask": mask, "src_key_padding_mask": floats}]
    runs += [{"mask": mask < 0, "src_key_padding_mask": padding}]
    kept = padding.logical_not() if batch_first else padding.T.logical_not()
    for run in runs:
        with torch.set_grad_enabled(grad):
            found, expected = mine(x, **run), torchs(x, **run)
        if "src_key_padding_mask" in run:
            found, expected = found[kept], expected[kept]
        torch.testing.assert_close(found, expected)
    assert len(counts) == 2 * len(runs), "a fused kernel went round the module"


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning")
def test_training_with_padding_equals_evaluation():
    _, layer = _layer(nn.TransformerEncoderLayer)
    encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(4, 6, WIDTH, dtype=DOUBLE)
    padding = torch.arange(6) >= torch.tensor([6, 4, 1, 5])[:, None]
    trained = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            evaluated = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(evaluated[~padding], trained[~padding], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoders(norm_first):
    layers = _layer(nn.TransformerDecoderLayer, norm_first)
    torchs, mine = (nn.TransformerDecoder(layer, 2) for layer in layers)
    mine.load_state_dict(torchs.state_dict())
    counts = []
    _calls(mine, counts)
    x, memory = (torch.randn(3, length, WIDTH, dtype=DOUBLE) for length in (5, 7))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=DOUBLE)
    padding = torch.arange(7) >= torch.tensor([7, 4, 1])[:, None]
    runs = [{}, {"tgt_mask": mask, "tgt_is_causal": True}, {"memory_key_padding_mask": padding}]
    for run in runs:
        torch.testing.assert_close(mine(x, memory, **run), torchs(x, memory, **run))
    assert len(counts) == 2 * 2 * len(runs)


@pytest.mark.parametrize("vocabulary", [30522, 30523])
def test_training_with_an_odd_vocabulary_and_length(vocabulary):
    """The same loss curve as with torch's attention."""
    curves = []
    for kind in (nn.MultiheadAttention, attndsl.nn.MultiheadAttention):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
        module = kind(WIDTH, 2, batch_first=True)
        module.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = module
        model = nn.Sequential(embedding, layer, head)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        tokens = torch.randint(vocabulary, (2, 14))
        losses = []
        for _ in range(6):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 1
    torch.testing.assert_close(*map(torch.tensor, curves), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_jagged_inputs(training):
    torchs, mine = _pair(batch_first=True)
    mine.train(training)
    parts = [torch.randn(length, WIDTH, dtype=DOUBLE) for length in (4, 0, 1, 6)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out, weights = mine(x, x, x, need_weights=False)
    assert weights is None
    for part, found in zip(parts, out.unbind(), strict=True):
        if len(part):
            torch.testing.assert_close(found, torchs(part, part, part)[0])
    (grad,) = torch.autograd.grad(out.values().sum(), x)
    assert grad.values().abs().max() > 0


def test_hooks_copies_and_pickles():
    _, mine = _pair(batch_first=True)
    seen = []
    mine.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    mine.register_forward_hook(lambda module, args, out: seen.append("post"))
    mine.out_proj.register_forward_hook(lambda module, args, out: seen.append("projection"))
    inputs = _inputs(mine)
    mine(*inputs, need_weights=False)
    assert seen == ["pre", "projection", "post"]
    _, plain = _pair()
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        x = torch.randn(3, 2, WIDTH, dtype=DOUBLE)
        torch.testing.assert_close(other(x, x, x), plain(x, x, x))
        assert other._forward_pre_hooks


def test_states_go_both_ways():
    for bias, kdim, extra in product((True, False), (None, 5), (True, False)):
        options = {"bias": bias, "kdim": kdim, "add_bias_kv": extra}
        torchs, mine = _pair(**options)
        torchs.load_state_dict(mine.state_dict())


X = torch.randn(BATCH, Q_LEN, WIDTH, dtype=DOUBLE)
REFUSALS = {
    "features": ({"key": X[..., :5]}, ShapeError, "key has 5 features", "12"),
    "dims": ({"value": X[0]}, ShapeError, "value has 2 dims (5, 12)", "all batched"),
    "no tensor": ({"query": None}, ArgumentError, "query is a NoneType", "pass a tensor"),
    "batch": (
        {"key": X[:1], "value": X[:1]}, ShapeError, "key has batch 1 and query has batch 2",
        "batch_first",
    ),
    "lengths": (
        {"value": X[:, :3]}, ShapeError, "key has length 5 and value has length 3",
        "make them equal",
    ),
    "hint": ({"is_causal": True}, ArgumentError, "is_causal is True and attn_mask is None", "hint"),
    "mask": (
        {"attn_mask": torch.ones(3, 3) > 0}, ShapeError,
        "attn_mask has shape (3, 3)", "(L, S) = (5, 5)",
    ),
    "mask of one dim": (
        {"attn_mask": torch.ones(5) > 0}, ShapeError, "attn_mask has shape (5,)", "(6, 5, 5)",
    ),
    "mask of four dims": (
        {"attn_mask": torch.ones(2, 3, 5, 5) > 0}, ShapeError,
        "attn_mask has shape (2, 3, 5, 5)", "(6, 5, 5)",
    ),
    "mask that broadcasts": (
        {"attn_mask": torch.ones(5, 1)}, ShapeError, "attn_mask has shape (5, 1)", "(5, 5)",
    ),
    "no mask": ({"attn_mask": "causal"}, ArgumentError, "attn_mask is a str", "bool or float"),
    "no padding mask": (
        {"key_padding_mask": [5, 3]}, ArgumentError, "key_padding_mask is a list", "bool or float",
    ),
    "heads": (
        {"attn_mask": torch.ones(5, 5, 5) > 0}, ShapeError, "attn_mask has shape (5, 5, 5)",
        "(N * num_heads, L, S) = (6, 5, 5)",
    ),
    "padding": (
        {"key_padding_mask": torch.ones(5, 2) > 0}, ShapeError,
        "key_padding_mask has shape (5, 2)", "(2, 5)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changes, kind, message, hint = REFUSALS[name]
    _, mine = _pair(batch_first=True)
    arguments = {"query": X, "key": X, "value": X} | changes
    with pytest.raises(kind) as caught:
        mine(**arguments)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_nested_inputs_refuse_masks_and_mixtures():
    _, mine = _pair(batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="need_weights"):
        mine(x, x, x)
    with pytest.raises(ArgumentError, match="key is not nested"):
        mine(x, X, X, need_weights=False)
