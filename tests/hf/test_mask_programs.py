"""Models that take their masks apart, prompts in static caches, and programs of a changed name."""

import copy
import operator
import warnings

import pytest
import torch
from support import hf_models
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

import attndsl
from attndsl import errors
from attndsl.hf import model_programs


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


INDEXERS = (
    "DeepSeek V3.2", "GLM DSA", "HY V4", "MiniMax M3", "A.X K2", "dots3.note", "GLM-5 Next",
    "HY V4 VL", "Mistral Large 4",
)  # fmt: skip


@pytest.mark.parametrize("family", INDEXERS)
def test_keys_that_an_indexer_chose_alone_take_part(family):
    eager, model = hf_models.make(family), hf_models.make(family, "attndsl")
    given = hf_models.inputs(family, 29)
    with torch.no_grad():
        close(model(**given).logits, eager(**given).logits)
        for side in ("left", "right"):
            if (family, side) == ("MiniMax M3", "left"):
                continue  # Its indexer reads rows of padding too, and these have no output here.
            more, keep = hf_models.padded(family, side, 29)
            close(model(**more).logits[keep], eager(**more).logits[keep])
        pairs = torch.ones(29, 29, dtype=torch.bool).tril().expand(2, 1, -1, -1)
        masks = [model(**given, attention_mask=pairs).logits, eager(**given).logits]
        close(*masks)
        options = {"max_new_tokens": 9, "do_sample": False}
        wanted = eager.generate(given["input_ids"], **options)
        assert torch.equal(model.generate(given["input_ids"], **options), wanted)
    grads = []
    for each in (model, eager):
        each.zero_grad()
        each(**given).logits.square().mean().backward()
        grads.append([x.grad for x in each.parameters() if x.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_an_own_program_and_an_indexer_both_hide_keys():
    given = hf_models.inputs("DeepSeek V3.2", 29)
    near = hf_models.make("DeepSeek V3.2", "attndsl:q - kv < 3")
    far = hf_models.make("DeepSeek V3.2", "attndsl:q - kv < 99")
    with torch.no_grad():
        close(far(**given).logits, hf_models.make("DeepSeek V3.2")(**given).logits)
        assert (near(**given).logits - far(**given).logits).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("size", [16, 24])
def test_blocks_of_usual_and_other_sizes(size):
    changes = {"index_block_size": size}
    eager = hf_models.make("MiniMax M3", **changes)
    model = hf_models.make("MiniMax M3", "attndsl", **changes)
    given = hf_models.inputs("MiniMax M3", 61)
    close(model(**given).logits, eager(**given).logits)
    few = hf_models.make("MiniMax M3", index_topk_blocks=4, **changes)
    assert (few(**given).logits - eager(**given).logits).abs().max() > 0.1
    wanted = eager.generate(given["input_ids"], max_new_tokens=5, do_sample=False)
    found = model.generate(given["input_ids"], max_new_tokens=5, do_sample=False)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", model_programs.USUAL_BLOCKS)
def test_usual_blocks_are_constants(size):
    """Kernels find their tiles a block at a time, from 64 pairs a block on."""
    lists = {f"hf_blocks{size}": torch.zeros(1, 2, 61, 2).long()}
    program, _ = model_programs.composed(None, model_programs.CAUSAL).variant(lists)
    ways = [atom.way for atom in program.lowered.sparsity.atoms]
    assert ("cells" in ways) == (size >= 64)


def test_blocks_of_no_size_are_refused():
    model = hf_models.make("MiniMax M3", "attndsl")
    for layer in model.model.layers:
        layer.self_attn.indexer.block_size = None
        layer.self_attn.indexer.forward = lambda *x: torch.zeros(2, 2, 13, 1, dtype=torch.long)
    with pytest.raises(errors.UnsupportedError, match="how many keys they have"):
        model(**hf_models.inputs("MiniMax M3"))


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


def made(rows, keys, function=lambda b, h, q, kv: kv <= q, **options):
    return AttentionMaskInterface()["attndsl"](
        batch_size=2, q_length=rows, kv_length=keys, mask_function=function, **options
    )


def attend(mask, rows, keys, name="attndsl", batch=2):
    torch.manual_seed(4)
    query, key, value = (torch.randn(batch, 2, length, 8) for length in (rows, keys, keys))
    found, _ = AttentionInterface()[name](torch.nn.Module(), query, key, value, mask)
    return found.transpose(1, 2), (query, key, value)


@torch.no_grad()
def test_keys_that_a_model_adds_behind_its_mask_are_refused():
    # DeepSeek V4 adds compressed keys, and extends masks that are tensors.
    model, given = hf_models.make("DeepSeek V4", "attndsl"), hf_models.inputs("DeepSeek V4")
    with pytest.raises(
        errors.UnsupportedError, match=r"13 keys of 2 .* 13 queries and 16"
    ) as caught:
        model(**given)
    assert "'eager'" in caught.value.hint  # transformers refuses sdpa.
    few = {"input_ids": given["input_ids"][:, :3], "use_cache": False}
    close(model(**few).logits, hf_models.make("DeepSeek V4")(**few).logits)


@pytest.mark.parametrize(("rows", "keys", "batch"), [(6, 7, 2), (5, 8, 2), (1, 8, 2), (6, 8, 3)])
def test_a_mask_holds_for_its_own_numbers_of_queries_and_keys(rows, keys, batch):
    attend(made(6, 8), 6, 8)
    with pytest.raises(errors.UnsupportedError, match="made its mask for 6 queries and 8 keys"):
        attend(made(6, 8), rows, keys, batch=batch)


@pytest.mark.parametrize("name", ["attndsl", "attndsl:near"])
def test_a_mask_of_one_row_is_that_of_all_rows(name):
    attndsl.hf.register({"near": "q - kv < 3"})
    table = torch.arange(8) % 3 != 0
    padding = torch.arange(8) != torch.tensor([[1], [2]])
    for shift in (2, 4):
        mask = AttentionMaskInterface()[name](
            batch_size=2, q_length=1, kv_length=8, q_offset=shift, attention_mask=padding,
            mask_function=lambda b, h, q, kv: (kv <= q + 2) & table[kv],
        )  # fmt: skip
        found, given = attend(mask, 5, 8, name)
        keep = (torch.arange(8) <= shift + 2) & table & padding[:, None, None]
        if name != "attndsl":
            keep = keep & (shift + torch.arange(5)[:, None] - torch.arange(8) < 3)
        wanted = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=keep)
        close(found, wanted.nan_to_num())


@torch.no_grad()
def test_eager_attention_without_a_mask_is_bidirectional_whatever_a_module_says():
    # transformers allows BridgeTower eager attention alone. Its mask of text has one row.
    mine, eager = hf_models.make("BridgeTower", "attndsl"), hf_models.make("BridgeTower")
    assert any(getattr(x, "is_causal", False) for x in mine.modules())
    for side in ("left", "right"):
        given, _ = hf_models.padded("BridgeTower", side)
        close(mine(**given).logits, eager(**given).logits)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    close(compiled(**given).logits, eager(**given).logits)


def test_modules_of_other_models_are_causal_where_they_say_so():
    # sdpa and FlashAttention listen to them.
    layer = hf_models.make("Llama").model.layers[0].self_attn
    query = torch.randn(1, 4, 5, 8)
    call = AttentionInterface()["attndsl"]
    found = call(layer, query, query, query, None)[0].transpose(1, 2)
    close(
        found, torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    )


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("Doge", "reads 'dtype'"),
        ("BigBird-Pegasus", "calls 'add'"),
        ("Qwen 4 Exp", "reads 'dtype'"),
    ],
)
def test_models_that_take_their_mask_for_an_array_are_refused(family, match):
    with pytest.raises(errors.UnsupportedError, match=match) as caught:
        hf_models.make(family, "attndsl")(**hf_models.inputs(family))
    assert "'sdpa'" in caught.value.hint
    assert "'eager'" in caught.value.hint


@torch.no_grad()
def test_a_dict_leaves_the_part_that_is_refused_to_eager_attention():
    model = hf_models.make("SigLIP 2")
    torch.manual_seed(1)
    given = {
        "input_ids": torch.randint(3, hf_models.VOCAB, (2, 13)),
        "pixel_values": torch.randn(2, 9, 3 * 4 * 4),
        "pixel_attention_mask": (torch.arange(9) < torch.tensor([[9], [6]])).long(),
        "spatial_shapes": torch.tensor([[3, 3], [2, 3]]),
    }
    wanted = model(**given)
    model.set_attn_implementation("attndsl")
    with pytest.raises(errors.UnsupportedError, match="reads 'repeat' of its mask"):
        model(**given)
    model.set_attn_implementation({"text_config": "attndsl", "vision_config": "eager"})
    assert model.text_model.config._attn_implementation == "attndsl"
    found = model(**given)
    close(found.text_embeds, wanted.text_embeds)
    close(found.image_embeds, wanted.image_embeds)


USES = {
    "dtype": lambda mask: mask.dtype,
    "device": lambda mask: mask.device,
    "size": lambda mask: mask.size(),
    "reshape": lambda mask: mask.reshape(-1, 8),
    "repeat": lambda mask: mask.repeat(1, 2, 1, 1),
    "cat": lambda mask: torch.cat([mask, torch.zeros(2, 1, 6, 2)], dim=-1),
    "where": lambda mask: torch.where(mask, 0.0, 1.0),
    "full_like": lambda mask: torch.full_like(mask, 1.0),
    "pad": lambda mask: torch.nn.functional.pad(mask, (0, 2)),
    "masked_fill": lambda mask: torch.zeros(2, 1, 6, 8).masked_fill(mask, 1.0),
    "in place": lambda mask: torch.zeros(2, 1, 6, 8).add_(mask),
    "scores +": lambda mask: torch.zeros(2, 1, 6, 8) + mask,
    "+ scores": lambda mask: mask + torch.zeros(2, 1, 6, 8),
    "1 -": lambda mask: 1.0 - mask,
    "* -1e9": lambda mask: mask * -1e9,
    "== 0": lambda mask: mask == 0,
    "!= 0": lambda mask: mask != 0,
    "< 0": lambda mask: mask < 0,
    "scores ==": lambda mask: torch.zeros(2, 1, 6, 8) == mask,
    "~": operator.invert,
    "-": operator.neg,
    "&": lambda mask: mask & torch.ones(2, 1, 6, 8, dtype=torch.bool),
    "index": lambda mask: torch.zeros(6, 8)[mask],
    "None index": lambda mask: mask[:, None],
    "set": lambda mask: operator.setitem(mask, 0, 1.0),
    "len": len,
    "iter": list,
    "bool": bool,
    "float": float,
}


@pytest.mark.parametrize("use", USES)
def test_whatever_treats_a_mask_as_an_array_is_told_what_to_do(use):
    with pytest.raises(errors.UnsupportedError, match="as if it were an array") as caught:
        USES[use](made(6, 8))
    assert "attn_implementation='sdpa'" in caught.value.hint


def test_libraries_may_ask_what_a_mask_has():
    mask = made(6, 8)
    # accelerate moves what has 'to', and keeps all else.
    assert not hasattr(mask, "to")
    assert getattr(mask, "device", None) is None
    assert mask.shape == (2, 1, 6, 8)
    assert mask.ndim == 4
    assert {mask: 1}[mask] == 1
    assert "Mask(" in repr(mask)
    for other in (copy.copy(mask), copy.deepcopy(mask)):
        close(attend(other, 6, 8)[0], attend(mask, 6, 8)[0])


def test_sinks_of_each_query_are_refused():
    query = torch.randn(2, 4, 6, 8)
    with pytest.raises(errors.UnsupportedError, match=r"sinks have shape \(2, 4, 6, 1\)"):
        AttentionInterface()["attndsl"](
            torch.nn.Module(), query, query, query, made(6, 6), sinks=query[..., :1]
        )
