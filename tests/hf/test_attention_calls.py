"""Masks of all pairs, weights, dropout, checkpointing, and what the adapter refuses."""

import pytest
import torch
from support import hf_models
from transformers import DynamicCache, LlamaConfig, PreTrainedModel, T5Config, WhisperConfig

import attndsl
from attndsl import errors
from attndsl.hf.attention_calls import runs_eager_alone
from attndsl.hf.registration import AttentionInterface


@pytest.fixture(autouse=True)
def registered():
    attndsl.hf.register()


def both(family, **changes):
    return hf_models.make(family, "attndsl", **changes), hf_models.make(family, **changes)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-5)


def pairs(dtype):
    rows = torch.arange(13)
    allowed = (rows[:, None] >= rows) & ((rows[:, None] - rows) % 3 != 1)
    allowed = allowed[None, None].expand(2, 1, -1, -1)
    return allowed if dtype is torch.bool else torch.where(allowed, 0.0, torch.finfo(dtype).min)


class OfTexts(PreTrainedModel):
    config_class = LlamaConfig
    _supports_sdpa = True


class OfSounds(PreTrainedModel):
    config_class = WhisperConfig


class Layer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.mark.parametrize(
    ("config", "alone"), [(LlamaConfig, False), (WhisperConfig, True), (T5Config, False)]
)
def test_of_models_in_one_file_the_one_of_its_config_says_what_an_attention_may_run(config, alone):
    assert runs_eager_alone(Layer(config())) == alone


@torch.no_grad()
def test_masks_of_all_pairs():
    mine, eager = both("Llama")
    given = hf_models.inputs("Llama")
    wanted = eager(**given, attention_mask=pairs(torch.float32)).logits
    close(mine(**given, attention_mask=pairs(torch.float32)).logits, wanted)
    # True takes part, as with sdpa; eager attention would add it to the score as 1.
    close(mine(**given, attention_mask=pairs(torch.bool)).logits, wanted)
    with pytest.raises(errors.ArgumentError, match=r"shape \(2, 1, 13, 12\)"):
        mine(**given, attention_mask=pairs(torch.bool)[..., :-1])


@torch.no_grad()
def test_a_mask_of_all_pairs_tells_no_positions():
    model = hf_models.make("Llama", "attndsl:q - kv < 3")
    given, cache = hf_models.inputs("Llama")["input_ids"], DynamicCache(config=model.config)
    model(given[:, :9], cache=cache)
    mask = torch.ones(2, 1, 4, 13, dtype=torch.bool)
    with pytest.raises(errors.UnsupportedError, match="compares positions"):
        model(given[:, 9:], cache=cache, attention_mask=mask)


@pytest.mark.parametrize("family", ["GPT-OSS", "Gemma 2"])
@torch.no_grad()
def test_weights_on_demand(family):
    mine, eager = both(family)
    given, keep = hf_models.padded(family, "left")
    found, wanted = (model(**given, output_attentions=True).attentions for model in (mine, eager))
    assert len(found) == len(wanted) == 2
    for own, other in zip(found, wanted, strict=True):
        close(own.transpose(1, 2)[keep], other.transpose(1, 2)[keep])


@pytest.mark.slow
def test_graphs_have_no_weights():
    model = hf_models.make("Llama", "attndsl")
    given = {**hf_models.inputs("Llama"), "output_attentions": True}
    model(**given)  # transformers puts hooks on modules, which graphs cannot do.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # Dynamo tells of errors in an error of its own.
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no weights of attention"):
        compiled(**given)


def test_dropout_is_drawn_anew_and_keeps_the_mean():
    model = hf_models.make("Llama", "attndsl", attention_dropout=0.3).train()
    given = hf_models.inputs("Llama")
    with torch.no_grad():
        torch.manual_seed(0)
        first = model(**given).logits
        second = model(**given).logits
        torch.manual_seed(0)
        assert torch.equal(model(**given).logits, first)
    assert (first - second).abs().max() > 0.1
    assert (
        model.eval()(**given).logits - hf_models.make("Llama")(**given).logits
    ).abs().max() < 3e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    mine, eager = both("Gemma 2")
    mine.activation_checkpointing_enable({"use_reentrant": reentrant})
    mine.train(), eager.train()
    given, keep = hf_models.padded("Gemma 2", "right")
    found, wanted = (
        hf_models.step(model, lambda model=model: model(**given), keep) for model in (mine, eager)
    )
    assert max(hf_models.errors(found, wanted)) < 3e-5


@torch.no_grad()
def test_half_precision_and_autocast():
    given = hf_models.inputs("Llama")
    exact = hf_models.make("Llama")(**given).logits
    mine, eager = (model.bfloat16()(**given).logits.float() for model in both("Llama"))
    assert (mine - exact).abs().mean() < 1.2 * (eager - exact).abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        found = hf_models.make("Llama", "attndsl")(**given).logits.float()
    assert (found - exact).abs().mean() < 1.2 * (eager - exact).abs().mean()


@torch.no_grad()
def test_a_prompt_in_chunks_and_a_quantized_cache():
    mine, eager = both("Llama")
    given = hf_models.generation_inputs("Llama", "left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for more in (
        {"prefill_chunk_size": 5},
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    ):
        found, wanted = (model.generate(**given, **options, **more) for model in (mine, eager))
        assert torch.equal(found, wanted), more


def test_export():
    model = hf_models.make("Llama", "attndsl")
    given = hf_models.inputs("Llama")
    exported = torch.export.export(model, (), {**given, "use_cache": False}, strict=False)
    with torch.no_grad():
        close(exported.module()(**given, use_cache=False).logits, model(**given).logits)


def test_positions_of_flat_sequences_are_told_by_position_ids():
    model = hf_models.make("Llama", "attndsl")
    with pytest.raises(errors.UnsupportedError, match="cu_seq_lens_q") as caught:
        model(**hf_models.inputs("Llama"), cu_seq_lens_q=torch.tensor([0, 5, 13]))
    assert "position_ids" in caught.value.hint


def test_continuous_batching_is_refused_by_transformers():
    model = hf_models.make("Llama", "attndsl")
    with pytest.raises(ValueError, match="attndsl is not supported for continuous batching"):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)


def test_registering_twice_changes_nothing():
    attndsl.hf.register()
    from transformers import PreTrainedModel

    before = PreTrainedModel.get_correct_attn_implementation
    attndsl.hf.register()
    assert PreTrainedModel.get_correct_attn_implementation is before
    assert AttentionInterface()["attndsl"].__self__.own is None


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    import importlib

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(__import__("sys").modules, "attndsl.hf")
    with pytest.raises(errors.UnsupportedError, match="transformers") as caught:
        importlib.import_module("attndsl.hf")
    assert "attndsl[hf]" in caught.value.hint
