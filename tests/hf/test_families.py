"""Fourteen families of models, tiny and random in fp32, are what they are with eager attention."""

import pytest
import torch
from support import hf_models
from transformers import CompileConfig

import attndsl

SAMPLE = ("Gemma 2", "GPT-OSS")
"""Windows, a soft cap, sinks. All others are slow tests."""


def families(names, sample=SAMPLE):
    return [
        name if name in sample else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


@pytest.fixture(autouse=True)
def registered():
    attndsl.hf.register()


@pytest.mark.parametrize("family", families(hf_models.FAMILIES))
def test_logits_and_gradients_are_those_of_eager_attention(family):
    mine, eager = hf_models.make(family, "attndsl"), hf_models.make(family)
    for name, (given, keep) in hf_models.cases(family).items():
        found, wanted = (
            hf_models.step(model, lambda model=model, given=given: model(**given), keep)
            for model in (mine, eager)
        )
        logits, gradients = hf_models.errors(found, wanted)
        assert logits < 3e-5, name
        assert gradients < 3e-5, name


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", families(hf_models.GENERATES))
def test_generate_gives_the_tokens_of_eager_attention(family, cache):
    for side in (None, "left") if family in hf_models.DECODERS else (None,):
        given = hf_models.generation_inputs(family, side)
        hf_models.assert_generate_alike(
            family, given, cache_implementation=cache, disable_compile=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", hf_models.GENERATES)
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}])
def test_generate_with_beams_and_without_a_cache(family, options):
    given = hf_models.generation_inputs(family, "left" if family in hf_models.DECODERS else None)
    hf_models.assert_generate_alike(family, given, **options)


@pytest.mark.parametrize("family", families(hf_models.FAMILIES, ["GPT-OSS"]))
def test_one_graph_holds_the_model_with_its_masks(family):
    model = hf_models.make(family, "attndsl")
    for name, (given, keep) in hf_models.cases(family).items():
        if family in SAMPLE and name != "padded left":
            continue
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found, wanted = (
            hf_models.step(model, lambda call=call, given=given: call(**given), keep)
            for call in (compiled, model)
        )
        logits, gradients = hf_models.errors(found, wanted)
        assert logits < 3e-5, name
        assert gradients < 3e-5, name


@pytest.mark.parametrize("family", families(hf_models.DECODERS, ["Gemma 2"]))
@pytest.mark.parametrize("side", [pytest.param(None, marks=pytest.mark.slow), "left"])
def test_a_step_with_a_static_cache_is_one_graph(family, side):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    given = hf_models.generation_inputs(family, side)
    wanted = hf_models.generate(hf_models.make(family), given)
    model = hf_models.make(family, "attndsl")
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # generate() compiles on GPUs alone by itself.
    model.generation_config.compile_config = config
    found = hf_models.generate(model, given, cache_implementation="static")
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], atol=5e-5, rtol=1e-5)
    # generate() compiles no Llama 4. A cache of a window makes a second graph once it is full.
    least, most = (0, 0) if family == "Llama 4" else (1, 2)
    assert least <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most
