"""Models that take their masks apart, prompts in static caches, and programs of a changed name."""

import warnings

import pytest
import torch
from support import hf_models
from transformers import StaticCache

import attndsl
from attndsl import errors


@pytest.fixture(autouse=True)
def registered():
    attndsl.hf.register()


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-5)


@torch.no_grad()
def test_a_model_may_take_some_rows_of_its_mask():
    # Gemma 4 runs its last layers for the rows whose logits are asked for.
    mine, eager = hf_models.make("Gemma 4", "attndsl"), hf_models.make("Gemma 4")
    for side in ("left", "right"):
        given, keep = hf_models.padded("Gemma 4", side)
        close(mine(**given).logits[keep], eager(**given).logits[keep])
        some = {**given, "logits_to_keep": 3, "use_cache": False}
        close(mine(**some).logits[keep[:, -3:]], eager(**some).logits[keep[:, -3:]])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    given = hf_models.generation_inputs("Gemma 4", "left")
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        tokens = mine.generate(**given, **options, **more)
        assert torch.equal(tokens, eager.generate(**given, **options, **more))


@torch.no_grad()
def test_some_rows_within_a_graph():
    mine, eager = hf_models.make("Gemma 4", "attndsl"), hf_models.make("Gemma 4")
    given = {**hf_models.inputs("Gemma 4"), "use_cache": False, "logits_to_keep": 2}
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    close(compiled(**given).logits, eager(**given).logits)


def test_keys_that_an_indexer_chose_are_refused():
    model = hf_models.make("DeepSeek V3.2", "attndsl")
    given = hf_models.inputs("DeepSeek V3.2")
    with pytest.raises(errors.UnsupportedError, match="a part of its mask"):
        model(**given)
    pairs = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    with pytest.raises(errors.UnsupportedError, match="indexer chose keys") as caught:
        model(**given, attention_mask=pairs)
    assert "sdpa" in caught.value.hint


@torch.no_grad()
def test_a_prompt_in_a_static_cache_warns_of_nothing():
    given = hf_models.inputs("Llama")
    wanted = hf_models.make("Llama")(**given).logits
    for name in ("attndsl", "attndsl:q - kv < 99"):
        model = hf_models.make("Llama", name)
        with warnings.catch_warnings():
            warnings.simplefilter("error", errors.ProgramWarning)
            cache = StaticCache(config=model.config, max_cache_len=20)
            first = model(given["input_ids"][:, :9], cache=cache).logits
            close(first, wanted[:, :9])
            close(model(given["input_ids"][:, 9:], cache=cache).logits, wanted[:, 9:])


@torch.no_grad()
def test_graphs_follow_a_name_that_gets_another_program():
    given = {**hf_models.inputs("Llama"), "use_cache": False}
    attndsl.hf.register({"changed": "q - kv < 3"})
    model = hf_models.make("Llama", "attndsl:changed")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = compiled(**given).logits
    attndsl.hf.register({"changed": "q - kv < 5"})
    after = compiled(**given).logits
    assert (after - before).abs().max() > 0.1
    close(after, hf_models.make("Llama", "attndsl:q - kv < 5")(**given).logits)


def test_lengths_have_no_meaning_across_sequences():
    model = hf_models.make("T5", "attndsl:score = score / q_len")
    with pytest.raises(errors.UnsupportedError, match="cross-attention"):
        model(**hf_models.inputs("T5"))


@torch.no_grad()
def test_packed_rows_see_their_own_sequence():
    model = hf_models.make("Llama", "attndsl")
    ids = hf_models.inputs("Llama")["input_ids"]
    packed = model(ids, position_ids=hf_models.PACKED, use_cache=False).logits
    close(packed[:, :5], model(ids[:, :5]).logits)
    close(packed[:, 5:], model(ids[:, 5:]).logits)
