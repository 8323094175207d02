"""Torch's own context parallelism, timed in the processes of ``scaling.py --run``.

Two ways: a ring of SDPA calls, whose keys an all-gather brings, and FlexAttention with all keys
gathered (``torch.distributed.tensor.experimental``; torchtitan uses both). Both times count only
where output and gradients are those of one process.

Non-goals: scores that depend on positions, which torch does not rewrite for shards.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from scaling_times import device, errors_of, most, times, wrong

# Private names are looked up where they are used: a torch without one of them says so in a row.
from torch.distributed.tensor.experimental import _attention as parallel
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as shards
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""What torch's ring may call on a GPU."""
CAP, WINDOW = 50.0, 1024
PER_DOCUMENT = "refused: the length of each document must be a multiple of twice the ranks"
"""Why one of torch's load balancers has no part in this: lengths of packed documents are any."""
PAIRS = 1 << 28
"""How many pairs of positions a block mask is made of at a time."""
EVEN = 1.05
"""How much more than the least the slowest rank of a simpler layout may do."""


def scores(captures: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """FlexAttention's score functions, by program."""
    x = captures.get("x")
    return {
        "softcap": lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP),
        "gain": lambda s, b, h, q, kv: s * x[h],
    }


def mask_of(name: str, captures: dict[str, Any]) -> Callable[..., Any]:
    """FlexAttention's mask function of a program."""
    doc = captures.get("doc")
    if doc is not None:
        return lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv])
    if name == "window1024":
        return lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW)
    return lambda b, h, q, kv: q >= kv


class Flex(torch.nn.Module):
    """FlexAttention as a module, whose inputs torch's hook takes; compiled where there is a GPU."""

    def __init__(self) -> None:
        super().__init__()
        # A graph that breaks would be dense attention, without a word.
        self._call = (
            torch.compile(flex_attention, dynamic=False, fullgraph=True)
            if torch.cuda.is_available() else flex_attention
        )  # fmt: skip

    def forward(self, q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, gqa: bool) -> Any:
        """The output of this rank's rows; the hook has put all keys in place of this rank's."""
        return self._call(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa)


def flex(
    name: str, attention: Any, operands: list[torch.Tensor], captures: dict[str, Any], mesh: Any
) -> dict[str, Any]:
    """FlexAttention with all keys gathered: times, and errors; or why there are none.

    The layout is that of torch's load balancers whose slowest rank has fewest live blocks.
    """
    # Of another part: graphs are made for sizes, and torch makes few of one function.
    torch._dynamo.reset()
    gpu = torch.cuda.is_available()
    if not gpu:  # FlexAttention has no backward on CPUs.
        operands = [x.detach() for x in operands]
        captures = {name: x.detach() for name, x in captures.items()}
    q, k, v = operands
    length = q.shape[2] * mesh.size()
    mask = mask_of(name, captures)
    told, blocks, places = balanced(mask, length, mesh)
    style = parallel._ContextParallel(
        seq_dim=2, attention_type=parallel._ContextParallel.AttentionType.FLEX
    )
    module = parallelize_module(Flex(), mesh, style)
    score, gqa = scores(captures).get(name), q.shape[1] != k.shape[1]

    def call() -> Any:
        return module(q, k, v, score, blocks, gqa)

    errors = errors_of(attention, call, operands, captures, places)
    found = {"torch_flex_errors": errors, **told}
    if "doc" in captures:
        found["torch_flex_per_document"] = PER_DOCUMENT
    why = wrong(errors)
    return {**found, "why": why} if why else {**found, **times("torch_flex", call, backward=gpu)}


def block_mask(
    mask: Callable[..., Any], batch: Any, heads: Any, q_len: int, kv_len: int, device: str,
    BLOCK_SIZE: tuple[int, int] = (128, 128),
) -> BlockMask:  # fmt: skip
    """``create_block_mask``, which has all pairs in memory, of some rows after others.

    A mask of 262,144 rows and keys would otherwise be 69 GB, several times.
    """
    step = max(1, PAIRS // kv_len // BLOCK_SIZE[0]) * BLOCK_SIZE[0]
    made = [
        create_block_mask(
            # Positions of rows are those of the whole mask.
            lambda b, h, q, kv, first=first: mask(b, h, q + first, kv),
            batch, heads, min(step, q_len - first), kv_len, device, BLOCK_SIZE,
        )
        for first in range(0, q_len, step)
    ]  # fmt: skip
    parts = [
        torch.cat([getattr(each, name) for each in made], 2)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    ]
    return BlockMask.from_kv_blocks(
        *parts, BLOCK_SIZE=BLOCK_SIZE, mask_mod=mask, seq_lengths=(q_len, kv_len)
    )


@contextmanager
def masks_by_operations() -> Iterator[None]:
    """Have torch make block masks of shards by operations on tensors, instead of compiling that.

    Inductor's kernel of a balanced mask was more than 80 s in ptxas, for each layout on each rank
    (torch 2.11). The masks are equal, and their making is not timed.
    """
    compiled = shards._compiled_create_block_mask
    shards._compiled_create_block_mask = block_mask
    try:
        yield
    finally:
        shards._compiled_create_block_mask = compiled


def balanced(
    mask: Callable[..., Any], length: int, mesh: Any
) -> tuple[dict[str, Any], Any, torch.Tensor]:
    """The layout of torch's with the least to do for the slowest rank; of equals the simplest.

    Returns:
        What was chosen and among what, the blocks of this rank's rows, and their positions.
    """
    whole = block_mask(mask, None, None, length, length, device())
    ranks = mesh.size()
    balancers = {
        "contiguous": None,
        "head_tail": parallel._HeadTailLoadBalancer(length, ranks, device()),
        "processing_time": parallel._PTRRLoadBalancer(whole, ranks),
    }
    made, work = {}, {}
    for name, balancer in balancers.items():
        with masks_by_operations():
            (shard,) = parallel._context_parallel_shard(mesh, [whole], [2], balancer)
        live = shard.kv_num_blocks.sum()
        if shard.full_kv_num_blocks is not None:
            live = live + shard.full_kv_num_blocks.sum()
        made[name], work[name] = shard, int(most([float(live)])[0])
    least = min(work.values())
    name = next(x for x in balancers if work[x] <= EVEN * least)
    places = torch.arange(length, device=device())
    chosen = balancers[name]
    if chosen is not None:
        places = chosen._generate_indices()[0].long()
    rows = length // ranks
    first = mesh.get_local_rank() * rows
    told = {"torch_flex_layout": name, "torch_flex_blocks": work}
    return told, made[name], places[first : first + rows]


def sdpa(attention: Any, operands: list[torch.Tensor], mesh: Any) -> dict[str, Any]:
    """The ring of SDPA for causal attention: times, and errors; or why there are none.

    Of its kernels the one whose step is fastest. Keys have heads of their own where the ring takes
    that; otherwise one for each query head.
    """
    if not torch.cuda.is_available():
        return {"why": "torch's ring of SDPA has no kernel for CPUs"}
    tried: dict[str, Any] = {}
    for copies in dict.fromkeys((1, operands[0].shape[1] // operands[1].shape[1])):
        found = {
            name: ring(attention, operands, mesh, kernel, copies)
            for name, kernel in KERNELS.items()
        }
        tried |= {f"{name}, {copies} of each key head": x for name, x in found.items()}
        good = {name: x for name, x in found.items() if "why" not in x}
        if good:
            best = min(good, key=lambda name: good[name]["torch_sdpa_step_ms"])
            told = {n: x.get("why", x.get("torch_sdpa_step_ms")) for n, x in tried.items()}
            return {**good[best], "torch_sdpa_kernel": best, "torch_sdpa_tried": told}
    return {"why": "; ".join(f"{name}: {x['why']}" for name, x in tried.items())}


def beside_the_ring(attention: Any) -> Callable[..., Any]:
    """``attention`` for calls that have all keys while torch's function is another one.

    The package refuses all calls then, since most would have the keys of one rank.
    """
    of_torch = functional.scaled_dot_product_attention

    def call(*operands: torch.Tensor, **given: Any) -> Any:
        replaced = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = of_torch
        try:
            return attention(*operands, **given)
        finally:
            functional.scaled_dot_product_attention = replaced

    return call


def ring(
    attention: Any, operands: list[torch.Tensor], mesh: Any, kernel: SDPBackend, copies: int
) -> dict[str, Any]:
    """The ring with one kernel, and ``copies`` of each head of keys.

    Where torch does not see the calls, each rank attends to its own rows alone, and is fast: so
    errors are looked at first. What one rank cannot do no rank can.
    """
    q, *keys = operands
    places = torch.arange(q.shape[2] * mesh.size(), device=q.device)
    own = [q.detach().requires_grad_(), *(
        x.detach().repeat_interleave(copies, 1).requires_grad_() for x in keys
    )]  # fmt: skip
    grouped = own[0].shape[1] != own[1].shape[1]

    def call() -> torch.Tensor:
        # Torch replaces the function by its name.
        return functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=grouped)

    whole = beside_the_ring(attention)

    def held() -> dict[str, Any]:
        try:
            errors = errors_of(whole, call, own, {}, places)
            why = wrong(errors)
            if why:
                return {"why": why}
            return {"torch_sdpa_errors": errors, **times("torch_sdpa", call)}
        except Exception as error:
            return {"why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"}

    # Its own default, which other parts of torch's may have changed since.
    parallel._cp_options.enable_load_balance = True
    # Buffers are sharded in place: these rows become the positions of this rank's. Some versions of
    # the context leave SDPA replaced where an error goes through it.
    with (
        sdpa_kernel(kernel),
        context_parallel(mesh, buffers=[places], buffer_seq_dims=[0], no_restore_buffers={places}),
    ):
        return held()
