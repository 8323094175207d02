"""Runs of torchtitan's own trainer, by processes that share sequences.

Its tokenizer and its data are no part of its package: a loader of random documents stands in, and a
tokenizer that does nothing. Packages that it imports for data sets and for TensorBoard need not be
there. torchtitan is for GPUs. So :class:`Processor` stands where it looks for one on a CPU, and
what torch's releases have under another name, or lack, gets its name.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, fsdp

LENGTH, BATCH, ROWS, STEPS = 256, 4, 8, 3
HAS_SPMD_TYPES = hasattr(dist, "set_timeout")
"""torch 2.13 has neither, and FSDP of it takes no weights of ``spmd_types``."""
CHUNKS_FAIL = not hasattr(fsdp, "DataParallelMeshDims")
"""With torch 2.11 a loss of torchtitan's in chunks ends the process, with any attention."""


@dataclass(frozen=True)
class Run:
    """A configuration."""

    cp: int = 1
    local_batch: int = BATCH
    balancer: str | None = "auto"
    checkpoint: str = ""
    compiled: bool = False
    chunked: bool = False
    validated: bool = False
    backend: str = "partial_dtensor"


RUNS: dict[int, dict[str, Run]] = {
    1: {"alone": Run(validated=True)},
    2: {
        "eager": Run(
            2,
            local_batch=2,
            balancer="balanced",
            checkpoint="SelectiveAC",
            chunked=not CHUNKS_FAIL,
            validated=True,
        ),
        "compiled": Run(2, balancer="headtail", checkpoint="FullAC", compiled=True, validated=True),
    },
    4: {"compiled": Run(2, local_batch=2, compiled=True)},
}
"""By number of processes. All of them have the same global batches."""
if HAS_SPMD_TYPES:
    RUNS[2]["spmd_types"] = replace(RUNS[2]["compiled"], backend="spmd_types")
    RUNS[4]["spmd_types"] = replace(RUNS[4]["compiled"], backend="spmd_types", compiled=False)


class Processor(types.ModuleType):
    """``torch.cpu`` with what torchtitan asks of a module for GPUs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        assert torch.device(device).type == "cpu"

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """It counts nothing."""

    empty_cache = reset_peak_memory_stats


NEVER_USED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}
"""Modules that torchtitan's trainer imports, and what of them; nothing here uses it."""


def stand_in(device: str) -> None:
    """Before anything else of torchtitan is imported by a process of these runs."""
    leave_out()
    if device == "cpu":
        from torchtitan.tools import utils

        utils.device_type, utils.device_module = "cpu", Processor("processor")


def leave_out() -> ExitStack:
    """Have names of what is never used, and of what this torch has by another name or not.

    Returns:
        What takes them away again where it is closed.
    """
    made = ExitStack()
    for name, members in NEVER_USED.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            for member in members:
                setattr(module, member, None)
            sys.modules[name] = module
            made.callback(sys.modules.pop, name)
    for owner, name, value in (
        (dist, "set_timeout", distributed_c10d._set_pg_timeout),
        # Of torch 2.12; for spmd_types alone.
        (fsdp, "DataParallelMeshDims", type("DataParallelMeshDims", (), {})),
    ):
        if not hasattr(owner, name):
            setattr(owner, name, value)
            made.callback(delattr, owner, name)
    return made


def config_of(run: Run, kind: str = "float32", compiler: str = "aot_eager") -> Any:
    """The trainer's: torchtitan's Llama debug model, whose layers have three programs.

    Args:
        run: The rest.
        kind: dtype that the model computes in.
        compiler: What compiles where something is compiled.
    """
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.llama3 import model_registry

    from attndsl.torchtitan import Attention, Trainer

    from .titan_parts import Loader, Losses, Nothing

    spec = model_registry("debugmodel", attn_backend="varlen")
    for number, layer in enumerate(spec.model.layers):
        program = "q - kv < 40" if number % 2 else "score = softcap(score, 20.0)"
        window = (60, 0) if number == 3 else (-1, 0)
        layer.attention.inner_attention = Attention.Config(program=program, window_size=window)
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=2048)
    if run.chunked:
        loss = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=loss)
    checkpoint = getattr(activation_checkpoint, run.checkpoint).Config() if run.checkpoint else None
    config = Trainer.Config(
        model_spec=spec, tokenizer=Nothing.Config(), dataloader=Loader.Config(),
        metrics=Losses.Config(log_freq=1), loss=loss, optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=run.local_batch, global_batch_size=BATCH, seq_len=LENGTH, steps=STEPS,
            disable_cuda_graphs=True, mixed_precision_param=kind,
        ),
        parallelism=ParallelismConfig(
            context_parallel_degree=run.cp, context_parallel_load_balancer=run.balancer,
            spmd_backend=run.backend,
        ),
        activation_checkpoint=checkpoint,
        compile=CompileConfig(enable=run.compiled, components=["model"], backend=compiler),
        validator=Validator.Config(
            enable=run.validated, freq=STEPS, steps=BATCH // run.local_batch,
            dataloader=Loader.Config(),
        ),
    )  # fmt: skip
    config.debug.enable_structured_logging = False
    return config


def start_alike(model: torch.nn.Module) -> None:
    """Weights that do not depend on how many processes there are, for gloo to add up gradients."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():
        for name, x in model.named_parameters():
            for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
                name = name.replace(wrapper, "")
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(x.shape, generator=drawn) * 0.05 if x.dim() > 1 else 1 + 0 * x
            if isinstance(x, DTensor) and not isinstance(whole, DTensor):
                whole = distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
            x.copy_(whole)


def work(rank: int, world: int, folder: str, device: str = "cpu") -> None:
    """Write what each run of this many processes tells: losses, and what is wrong with a batch."""
    torch.set_num_threads(1)
    # As torchtitan does where it starts the process group.
    torch.autograd.set_multithreading_enabled(False)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    how: tuple[str, ...] = ()
    if device == "cuda":
        torch.cuda.set_device(rank)
        how = ("bfloat16", "inductor")
    store = dist.FileStore(os.path.join(folder, f"store{world}"), world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    stand_in(device)
    found: dict[str, Any] = {}
    for name, run in RUNS[world].items():
        torch._dynamo.reset()
        trainer = config_of(run, *how).build()
        start_alike(trainer.model_parts[0])
        trainer.train()
        found[name] = {
            "losses": trainer.metrics_processor.losses,
            "validated": trainer.metrics_processor.validated,
            "tokens": trainer.ntokens_seen, "explained": trainer.explain(),
        }  # fmt: skip
        if run.cp > 1:
            found[name]["refused"] = refused(trainer)
        trainer.close()
    Path(folder, f"told{world}.{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def refused(trainer: Any) -> list[str]:
    """What the trainer says of batches that it cannot share."""
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    told = []
    for more in ({}, {"positions": ids, "pixel_values": ids}):
        try:
            trainer.post_dataloading_process({"input": ids, **more}, ids)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
