"""Tokens a second of ``generate`` with a random Llama, beside torch's attention.

    python benchmarks/huggingface_speed.py [--tiny] [--output FILE]

The shape is that of Llama 3.2 1B, in bf16, with a static cache and compiled steps, greedy. A figure
is that of the steps alone: the time of a whole ``generate`` less that of one with a single token,
the median of several turns. All implementations run in one process, turn by turn. ``eager`` runs at
the first context only, since its prompt takes memory for all pairs. ``difference`` is the largest
distance of the prompt's last logits from those of sdpa. ``--missing`` goes on with the file of a
run that was cut, on the same kind of GPU; each row says its commit. ``--tiny`` is for tests, on
CPUs too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import attndsl

import common

LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    **LLAMA_1B, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
COLUMNS = ["implementation", "batch", "context", "tokens_per_s", "ms_per_step", "difference"]


def model_with(implementation: str, options: argparse.Namespace) -> Any:
    """The model, with the same weights for every implementation."""
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if options.tiny else LLAMA_1B))
    config._attn_implementation = implementation
    dtype = torch.float32 if options.tiny else torch.bfloat16
    with torch.device(options.device):
        return LlamaForCausalLM(config).to(dtype).eval()


def seconds(model: Any, ids: torch.Tensor, tokens: int, options: argparse.Namespace) -> float:
    """Time of one ``generate``, with a static cache of the same room for any number of tokens."""
    config = CompileConfig(fullgraph=True, backend=options.backend)
    config._compile_all_devices = True
    model.generation_config.compile_config = config
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, cache_implementation="static", max_cache_len=options.room,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(batch: int, context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each implementation."""
    names = [n for n in options.implementations if n != "eager" or context == options.contexts[0]]
    models = {name: model_with(name, options) for name in names}
    vocabulary = next(iter(models.values())).config.vocab_size
    ids = torch.randint(3, vocabulary, (batch, context), device=options.device)
    options.room = context + options.tokens
    last = {}
    for name, model in models.items():
        with torch.inference_mode():
            last[name] = model(ids, logits_to_keep=1).logits.float()
        for tokens in (options.tokens, 1):
            seconds(model, ids, tokens, options)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name, model in models.items():
            whole = seconds(model, ids, options.tokens, options)
            times[name].append(whole - seconds(model, ids, 1, options))
    rows = []
    for name in names:
        step = statistics.median(times[name]) / (options.tokens - 1)
        rows.append({
            "implementation": name, "batch": batch, "context": context,
            "tokens_per_s": batch / step, "ms_per_step": 1e3 * step,
            "difference": float((last[name] - last["sdpa"]).abs().max()),
            "transformers": metadata.version("transformers"), "commit": common.commit(),
        })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--contexts", nargs="*", type=int, default=[4096, 32768])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--implementations", nargs="*", default=["attndsl", "sdpa", "eager"])
    parser.add_argument("--missing", action="store_true", help="go on with the file of --output")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    attndsl.hf.register()
    rows = common.rows_with_figures("huggingface_speed", options.output) if options.missing else []
    known = {(row["context"], row["batch"]) for row in rows}
    for context in options.contexts:
        for batch in options.batches:
            if (context, batch) in known:
                continue
            rows += measure(batch, context, options)
            common.write("huggingface_speed", options.device, rows, options.output)
            torch._dynamo.reset()
    common.print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
