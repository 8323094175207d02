"""torchtitan's own trainer with long documents that several GPUs share: its Llama 3 8B.

    PYTHONPATH=examples/long torchrun --nproc-per-node 8 -m torchtitan.train \
        --module titan --config llama3_8b_long \
        --parallelism.context_parallel_degree 4

The function below is all that torchtitan needs. Three of four layers see the last 4096 tokens of
their document, and the fourth one sees its whole document. Groups of four GPUs hold the rows of the
same sequences: who holds which is decided for each batch, by its documents. FSDP shards the weights
over all eight.
"""

from __future__ import annotations

from dataclasses import fields

from torchtitan.models.llama3.config_registry import llama3_8b

from attndsl.torchtitan import Attention, Trainer

WINDOW = "q - kv < 4096"


def llama3_8b_long() -> Trainer.Config:
    """The configuration of this model, with other attention and longer sequences."""
    given = llama3_8b()
    config = Trainer.Config(**{x.name: getattr(given, x.name) for x in fields(given)})
    for number, layer in enumerate(config.model_spec.model.layers):
        program = "" if number % 4 == 3 else WINDOW
        layer.attention.inner_attention = Attention.Config(program=program)
    config.training.seq_len = 131072
    config.training.local_batch_size = 1
    # A graph would replay the plan of one batch's documents.
    config.training.disable_cuda_graphs = True
    config.parallelism.context_parallel_degree = 8
    config.parallelism.context_parallel_load_balancer = "auto"
    return config
