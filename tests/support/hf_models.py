"""Fourteen families of transformers' models, tiny and random, with inputs for each."""

from __future__ import annotations

import torch
import transformers as tf

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _llama():
    return tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES)


def _mistral():
    return tf.MistralForCausalLM, tf.MistralConfig(**SIZES, sliding_window=5)


def _qwen3():
    return tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, head_dim=8)


def _qwen2():
    config = tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    return tf.Qwen2ForCausalLM, config


def _gemma2():
    config = tf.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=5, attn_logit_softcapping=0.4, query_pre_attn_scalar=1,
    )  # fmt: skip
    return tf.Gemma2ForCausalLM, config


def _gemma3():
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5, layer_types=kinds)
    return tf.Gemma3ForCausalLM, config


def _gpt_oss():
    kinds = ["sliding_attention", "full_attention"]
    config = tf.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=kinds, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    return tf.GptOssForCausalLM, config


def _llama4():
    kinds = ["chunked_attention", "full_attention"]
    config = tf.Llama4TextConfig(
        **SIZES, head_dim=8, intermediate_size_mlp=48, layer_types=kinds, attention_chunk_size=4,
        num_local_experts=2, no_rope_layers=[1, 0], moe_layers=[],
    )  # fmt: skip
    return tf.Llama4ForCausalLM, config


def _deepseek_v3():
    sizes = {**SIZES, "num_key_value_heads": 4}
    config = tf.DeepseekV3Config(
        **sizes, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8, first_k_dense_replace=2, n_routed_experts=4, moe_intermediate_size=16,
    )  # fmt: skip
    return tf.DeepseekV3ForCausalLM, config


def _t5():
    config = tf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        relative_attention_max_distance=16,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration, config


def _bert():
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    config = tf.BertConfig(**sizes, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    return tf.BertForMaskedLM, config


def _modernbert():
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads",)}
    config = tf.ModernBertConfig(
        **sizes, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return tf.ModernBertForMaskedLM, config


def _vit():
    config = tf.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=24, patch_size=6, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
        num_labels=5,
    )  # fmt: skip
    return tf.ViTForImageClassification, config


def _whisper():
    config = tf.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=20, max_target_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, dropout=0.0, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration, config


def _gemma4():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = tf.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4}, head_dim=8, global_head_dim=8, sliding_window=5,
        layer_types=kinds, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2,
    )  # fmt: skip
    return tf.Gemma4ForCausalLM, config


LATENT = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_topk": 4, "index_n_heads": 2,
    "index_head_dim": 8,
}  # fmt: skip
"""Sizes of models with latent attention and an indexer."""
DENSE = {"mlp_layer_types": ["dense"] * 2}


def _with_indexer(kind, config, **more):
    return kind, config(**{**LATENT, **(more or {"first_k_dense_replace": 2})})


def _deepseek_v32():
    return _with_indexer(tf.DeepseekV32ForCausalLM, tf.DeepseekV32Config)


def _ax_k2():
    return _with_indexer(tf.AXK2ForCausalLM, tf.AXK2Config, **DENSE)


def _dots3_note():
    kind, config = tf.Dots3NoteForCausalLM, tf.Dots3NoteTextConfig
    return _with_indexer(kind, config, **DENSE, n_group=1, topk_group=1)


def _with_pictures(kind, config, text, **sizes):
    """A model of texts and pictures, which gets texts alone."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4, **sizes}
    return kind, config(text_config=text.to_dict(), vision_config=vision)


def _glm5_next():
    text = tf.Glm5NextTextConfig(
        **{**LATENT, **DENSE, "qk_rope_head_dim": 0}, linear_head_dim=8, linear_num_heads=4,
        hc_mult=2, index_kpool=4, layer_types=["linear_attention", "indexed_attention"],
        indexer_types=["full"] * 2,
    )  # fmt: skip
    return _with_pictures(
        tf.Glm5NextForConditionalGeneration, tf.Glm5NextConfig, text, depth=1, num_heads=2,
        out_hidden_size=32, projection_intermediate_size=32, image_size=16,
    )  # fmt: skip


def _hy_v4_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    text = tf.HYV4VLTextConfig(**LATENT, **DENSE, hc_mult=2, rope_parameters=rope)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "out_hidden_size": 32}
    return _with_pictures(tf.HYV4VLForConditionalGeneration, tf.HYV4VLConfig, text, **sizes)


def _mistral_large4():
    text = tf.MistralLarge4TextConfig(**LATENT, first_k_dense_replace=2, head_dim=4)
    return _with_pictures(
        tf.MistralLarge4ForConditionalGeneration, tf.MistralLarge4Config, text,
        num_hidden_layers=1, num_attention_heads=2, image_size=16, head_dim=16,
    )  # fmt: skip


def _glm_dsa():
    return _with_indexer(tf.GlmMoeDsaForCausalLM, tf.GlmMoeDsaConfig)


def _qwen4_exp():
    config = tf.Qwen4ExpTextConfig(
        **SIZES, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts_per_tok=2, num_experts=4, hc_count=2,
        hc_lowrank=8, layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=2,
        indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=4,
        ple_layer_ids=[],
    )  # fmt: skip
    return tf.Qwen4ExpForCausalLM, config


def _hy_v4():
    return _with_indexer(tf.HYV4ForCausalLM, tf.HYV4Config)


def _minimax_m3():
    config = tf.MiniMaxM3VLConfig().text_config.__class__(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, moe_intermediate_size=16,
        dense_intermediate_size=32, shared_intermediate_size=16, rotary_dim=8, index_n_heads=2,
        index_head_dim=8, index_topk_blocks=2, index_block_size=4, index_local_blocks=1,
        layer_types=["minimax_m3_sparse"] * 2,
    )  # fmt: skip
    return tf.MiniMaxM3VLForCausalLM, config


def _deepseek_v4():
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1}
    config = tf.DeepseekV4Config(
        **sizes, moe_intermediate_size=16, head_dim=16, q_lora_rank=16, n_routed_experts=4,
        num_experts_per_tok=2, layer_types=kinds, mlp_layer_types=["moe"] * 3, sliding_window=8,
        compress_rates={kinds[1]: 4, kinds[2]: 8}, o_groups=2, o_lora_rank=8, index_n_heads=2,
        index_head_dim=16, index_topk=4, partial_rotary_factor=0.5,
    )  # fmt: skip
    return tf.DeepseekV4ForCausalLM, config


def _bridgetower():
    config = tf.BridgeTowerConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
        text_config={
            "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
        },
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 3, "image_size": 24, "patch_size": 8,
        },
    )  # fmt: skip
    return tf.BridgeTowerForImageAndTextRetrieval, config


def _doge():
    return tf.DogeForCausalLM, tf.DogeConfig(**SIZES, keep_window_size=8)


def _bigbird_pegasus():
    config = tf.BigBirdPegasusConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64, attention_type="original_full",
    )  # fmt: skip
    return tf.BigBirdPegasusForConditionalGeneration, config


def _siglip2():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = tf.Siglip2Config(
        text_config={**sizes, "num_attention_heads": 4, "vocab_size": VOCAB},
        vision_config={**sizes, "num_attention_heads": 4, "patch_size": 4, "num_patches": 9},
    )
    return tf.Siglip2Model, config


DECODERS = {
    "Llama": _llama, "Mistral": _mistral, "Qwen3": _qwen3, "Qwen2": _qwen2, "Gemma 2": _gemma2,
    "Gemma 3": _gemma3, "GPT-OSS": _gpt_oss, "Llama 4": _llama4, "DeepSeek V3": _deepseek_v3,
}  # fmt: skip
"""Decoders of text."""
OTHERS = {"T5": _t5, "BERT": _bert, "ModernBERT": _modernbert, "ViT": _vit, "Whisper": _whisper}
FAMILIES = {**DECODERS, **OTHERS}
APART = {
    "Gemma 4": _gemma4, "DeepSeek V3.2": _deepseek_v32, "DeepSeek V4": _deepseek_v4,
    "BridgeTower": _bridgetower, "Doge": _doge, "BigBird-Pegasus": _bigbird_pegasus,
    "SigLIP 2": _siglip2, "GLM DSA": _glm_dsa, "HY V4": _hy_v4, "MiniMax M3": _minimax_m3,
    "A.X K2": _ax_k2, "dots3.note": _dots3_note, "GLM-5 Next": _glm5_next, "HY V4 VL": _hy_v4_vl,
    "Mistral Large 4": _mistral_large4, "Qwen 4 Exp": _qwen4_exp,
}  # fmt: skip
"""Models that treat masks in ways of their own, for tests of just that."""
GENERATES = (*DECODERS, "T5", "Whisper")


def make(family, implementation="eager", **changes):
    """The family's model in evaluation, with the same weights for every implementation."""
    kind, config = {**FAMILIES, **APART}[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    # Tied heads repeat the last token for ever.
    config.tie_word_embeddings = False
    config._attn_implementation = implementation
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # What attention does has to show: larger weights, and sinks and biases that differ.
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def inputs(family, length=13):
    """What the model is called with: two sequences, without padding."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, length))
    if family == "ViT":
        return {"pixel_values": torch.randn(2, 3, 24, 24)}
    if family == "BridgeTower":
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 24, 24)}
    if family == "Whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
    if family == "T5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    return {"input_ids": ids}


def padded(family, side, length=13):
    """The same with padding, and which positions of the output count."""
    given = inputs(family, length)
    keep = torch.arange(length) < torch.tensor([length, length - 4])[:, None]
    keep = keep.flip(1) if side == "left" else keep
    given["attention_mask"] = keep.long()
    if family == "T5":
        return given, torch.ones(2, 7, dtype=torch.bool)
    return given, keep


PACKED = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]).expand(2, -1)
"""position_ids of two sequences in each row."""


def cases(family):
    """Calls of the family by name, each with what of the output counts."""
    found = {"plain": (inputs(family), None)}
    if family not in ("ViT", "Whisper"):
        found["padded right"] = padded(family, "right")
        found["padded left"] = padded(family, "left")
    if family in DECODERS:
        # With a cache, transformers takes the rows for one sequence.
        packed = {**inputs(family), "position_ids": PACKED, "use_cache": False}
        found["packed"] = (packed, None)
    return found


def step(model, call, keep=None):
    """Logits that count, and gradients of a random sum of them by parameter."""
    model.zero_grad()
    found = call().logits
    found = found if keep is None else found[keep]
    torch.manual_seed(3)
    (found * torch.randn_like(found)).sum().backward()
    return found.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def errors(found, wanted):
    """Largest error of the logits, and that of a parameter's gradient relative to its norm.

    Gradients that are 0 but for rounding, as of a bias of all keys, count relative to a hundredth
    of the largest norm.
    """
    assert found[1].keys() == wanted[1].keys()
    logits = float((found[0] - wanted[0]).abs().max())
    norms = {name: float(grad.norm()) for name, grad in wanted[1].items()}
    least = 1e-2 * max(norms.values())
    gradients = max(
        float((found[1][name] - grad).norm()) / max(norms[name], least)
        for name, grad in wanted[1].items()
    )
    return logits, gradients


def generation_inputs(family, side=None):
    """What ``generate`` is called with; decoders' prompts may be padded on the left."""
    given = padded(family, side)[0] if side else inputs(family)
    return {name: x for name, x in given.items() if not name.startswith("decoder")}


def generate(model, given, **options):
    """Tokens of ten steps, which differ from one another, and the logits of each."""
    found = model.generate(
        **given, max_new_tokens=10, min_new_tokens=10, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


def assert_generate_alike(family, given, **options):
    """Tokens and logits of both implementations are the same."""
    found, wanted = (
        generate(make(family, name), given, **options) for name in ("attndsl", "eager")
    )
    # Random models with an encoder say one thing again and again; logits tell more there.
    assert family in OTHERS or len(wanted[0][0].unique()) > 4
    assert torch.equal(found[0], wanted[0])
    # transformers masks logits of its own with -inf.
    torch.testing.assert_close(found[1], wanted[1], atol=5e-5, rtol=1e-5)
