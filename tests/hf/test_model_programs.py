"""A user's program over a model's own attention: what it means, its captures, what is refused."""

import copy

import pytest
import torch
from support import hf_models

import attndsl
from attndsl import errors


@pytest.fixture(autouse=True)
def registered():
    attndsl.hf.register()


def eager_of(family, allowed):
    """Logits with eager attention, a mask of all pairs given."""
    least = torch.finfo(torch.float32).min
    mask = torch.where(allowed, 0.0, least)[None, None].expand(2, 1, -1, -1)
    with torch.no_grad():
        return hf_models.make(family)(**hf_models.inputs(family), attention_mask=mask).logits


def distance(length=13):
    rows = torch.arange(length)
    return rows[:, None] - rows


@torch.no_grad()
def logits(implementation, family="Llama", **more):
    model = hf_models.make(family, implementation)
    return model(**hf_models.inputs(family), **more).logits


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-5)


def test_a_program_is_composed_over_the_models_mask():
    away = distance()
    wanted = eager_of("Llama", (away >= 0) & ((away < 3) | (away == 7)))
    close(logits("attndsl:q - kv < 3 or q - kv == 7"), wanted)
    # The model's own window stays: 5 for Mistral here.
    close(logits("attndsl:q - kv < 9", "Mistral"), logits("eager", "Mistral"))
    assert (logits("attndsl:q - kv < 2", "Mistral") - logits("eager", "Mistral")).abs().max() > 0.1


def test_programs_have_names(tmp_path):
    wanted = logits("attndsl:q - kv < 3")
    near = attndsl.compile("q - kv < near", near=3)
    names = attndsl.hf.register({"text": "q - kv < 3", "compiled": near})
    assert names == ("attndsl", "attndsl:text", "attndsl:compiled")
    close(logits("attndsl:text"), wanted)
    close(logits("attndsl:compiled"), wanted)
    path = tmp_path / "model.yaml"
    path.write_text("attention:\n  of_file:\n    program: q - kv < w\n    params: {w: 3}\n")
    assert attndsl.hf.register(path, key="attention") == ("attndsl", "attndsl:of_file")
    close(logits("attndsl:of_file"), wanted)
    model = hf_models.make("Llama")
    model.set_attn_implementation("attndsl:of_file")
    with torch.no_grad():
        close(model(**hf_models.inputs("Llama")).logits, wanted)
        close(copy.deepcopy(model)(**hf_models.inputs("Llama")).logits, wanted)


def test_captures_come_from_the_call_or_from_the_module():
    text = "param w: int\nmask = q - kv < w"
    wanted = logits("attndsl:q - kv < 3")
    close(logits(f"attndsl:{text}", w=3), wanted)
    model = hf_models.make("Llama", f"attndsl:{text}")
    for layer in model.model.layers:
        layer.self_attn.w = 3
    with torch.no_grad():
        close(model(**hf_models.inputs("Llama")).logits, wanted)
        # The call goes first.
        other = model(**hf_models.inputs("Llama"), w=13).logits
    close(other, logits("attndsl"))
    with pytest.raises(errors.ArgumentError, match="captures 'w'") as caught:
        logits(f"attndsl:{text}")
    assert "model(..., w=...)" in caught.value.hint


def learned_gains(implementation="attndsl:tensor gain[heads]: float\nscore = gain[h] * score"):
    model = hf_models.make("Llama", implementation)
    for layer in model.model.layers:
        layer.self_attn.gain = torch.nn.Parameter(torch.tensor([1.0, 0.5, 2.0, 1.5]))
    return model


def test_a_parameter_of_the_module_is_learned():
    model = learned_gains()
    given = hf_models.inputs("Llama")
    found = hf_models.step(model, lambda: model(**given))
    # The same model with the gains within its queries.
    eager = hf_models.make("Llama")
    with torch.no_grad():
        for layer in eager.model.layers:
            gains = torch.tensor([1.0, 0.5, 2.0, 1.5]).repeat_interleave(8)
            layer.self_attn.q_proj.weight.mul_(gains[:, None])
    close(found[0], eager(**given).logits.detach())
    for layer in model.model.layers:
        assert layer.self_attn.gain.grad.abs().min() > 0


@pytest.mark.slow
def test_programs_are_in_one_graph():
    given = hf_models.inputs("Llama")
    for model in (learned_gains(), hf_models.make("Llama", "attndsl:q - kv < 3")):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found, wanted = (
            hf_models.step(model, lambda call=call: call(**given)) for call in (compiled, model)
        )
        assert max(hf_models.errors(found, wanted)) < 3e-5


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_positions_go_on_in_a_cache(family, cache):
    text = "attndsl:q - kv < 3 or kv < 2 or (q - kv) % 4 == 1"
    given = hf_models.generation_inputs(family, "left")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    model = hf_models.make(family, text)
    wanted = model.generate(**given, **options, use_cache=False)
    found = model.generate(**given, **options, cache_implementation=cache, disable_compile=True)
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted, hf_models.make(family, "attndsl").generate(**given, **options))


def test_lengths_are_those_of_the_whole_sequence():
    text = "attndsl:causal_lower_right() and 2 * kv < kv_len + q"
    given = hf_models.generation_inputs("Llama")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    model = hf_models.make("Llama", text)
    wanted = model.generate(**given, **options, use_cache=False)
    assert torch.equal(model.generate(**given, **options), wanted)
    with pytest.raises(errors.UnsupportedError, match="static cache knows no length"):
        model.generate(**given, **options, cache_implementation="static", disable_compile=True)


def test_a_program_may_have_the_sink_and_the_weights():
    sink = "tensor logit[heads]: float\nsink = logit[h]"
    named = {"logit": torch.zeros(4)}
    assert (logits(f"attndsl:{sink}", **named) - logits("attndsl")).abs().max() > 1e-3
    assert (logits("attndsl:weights = sigmoid(score)") - logits("attndsl")).abs().max() > 1e-3
    with pytest.raises(errors.UnsupportedError, match="attention sinks"):
        logits(f"attndsl:{sink}", "GPT-OSS", **named)
    model = hf_models.make("Llama", "attndsl:weights = sigmoid(score)", attention_dropout=0.1)
    model.train()
    with pytest.raises(errors.UnsupportedError, match="attention dropout"):
        model(**hf_models.inputs("Llama"))


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("attndsl:", errors.ArgumentError, "has no program"),
        ("attndsl:unheard", errors.ArgumentError, "no program 'unheard'"),
        ("attndsl:causl()", errors.NameResolutionError, "no function 'causl'"),
        ("attndsl:param hf_pad: float\nscore = hf_pad * score", errors.ArgumentError, "hf_pad"),
    ],
)  # fmt: skip
def test_names_that_cannot_be(name, error, match):
    with pytest.raises(error, match=match) as caught:
        hf_models.make("Llama", name)
    assert caught.value.hint


@pytest.mark.parametrize("programs", [3, {"": "causal()"}, {"a": 3}, {"a": "causl()"}])
def test_what_cannot_be_registered(programs):
    with pytest.raises(errors.AttnDSLError):
        attndsl.hf.register(programs)


def test_positions_have_no_meaning_across_sequences():
    for family in ("T5", "Whisper"):
        with pytest.raises(errors.UnsupportedError, match="cross-attention"):
            logits("attndsl:q - kv < 3", family)
    close(logits("attndsl:score = 1.0 * score", "T5"), logits("eager", "T5"))


def test_generate_takes_captures_from_attributes_and_compile():
    text = "param w: int\nq - kv < w"
    model = hf_models.make("Llama", f"attndsl:{text}")
    given = {**hf_models.inputs("Llama"), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match="are not used by the model"):
        model.generate(**given, w=4)
    for layer in model.model.layers:
        layer.self_attn.w = 4
    found = model.generate(**given)
    attndsl.hf.register({"four": attndsl.compile(text, w=4)})
    assert torch.equal(found, hf_models.make("Llama", "attndsl:four").generate(**given))
    assert torch.equal(found, hf_models.make("Llama", "attndsl:q - kv < 4").generate(**given))
