"""What several ranks of one sequence do together, as jobs of a process group of 2 or 4.

A job returns what went right as nothing, or raises.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import attndsl
from attndsl.backends.tiled.step_plan import BLOCK_M
from attndsl.parallel import ContextParallel, Machine, Shape
from attndsl.parallel.side_stream import Beside

from .race_detector import Detector, detecting
from .shard_programs import Setting, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

B, H, HKV, L, D = 2, 4, 2, 512, 8
GAIN = "tensor x[heads]: float\nmask = causal(); score = x[h] * score"


def _whole(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(B, n, L, D, dtype=dtype) for n in (H, HKV, HKV)]


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def _check_rows(cp: ContextParallel, found: torch.Tensor, whole: torch.Tensor) -> None:
    """``found`` has the bits of this rank's rows of ``whole``, if its runs of rows begin on tiles.

    Otherwise sums are of other tiles, and only as close as that.
    """
    wanted, few = cp.shard(whole, 2), 8 * torch.finfo(found.dtype).eps
    if all(start % BLOCK_M == 0 for start, _ in cp.now().layout.runs(cp.rank)):
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, atol=few, rtol=few)


def _rows(cp: ContextParallel, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [cp.shard(x, 2) for x in tensors]


def checkpointing(group: ProcessGroup) -> None:
    """Recomputed forwards fetch keys again, on all ranks."""
    attention, whole = attndsl.compile("causal() and q - kv < 200"), _leaves(_whole())
    attention(*whole).square().sum().backward()
    cp = ContextParallel(group, "head_tail")
    cp.plan(L, attention)
    own = _leaves(_rows(cp, *(x.detach() for x in whole)))
    for reentrant in (False, True):
        for x in own:
            x.grad = None
        out = checkpoint(cp(attention), *own, use_reentrant=reentrant)
        out.square().sum().backward()
        for x, y in zip(own, whole, strict=True):
            torch.testing.assert_close(x.grad, cp.shard(y.grad, 2))


def second_derivatives(group: ProcessGroup) -> None:
    """A gradient penalty, of operands and a capture."""
    attention, whole = attndsl.compile(GAIN), [x[:, :, :96] for x in _whole()]
    gain = torch.linspace(0.5, 1.5, H, dtype=torch.float64)
    weight = torch.randn(B, H, 96, D, dtype=torch.float64)

    def penalty(call: Any, leaves: list[torch.Tensor], w: torch.Tensor) -> list[torch.Tensor]:
        *operands, x = leaves
        first = torch.autograd.grad((call(*operands, x=x) * w).sum(), leaves, create_graph=True)
        total = sum(g.square().sum() for g in first[:3])
        return list(torch.autograd.grad(total, leaves))

    for exchange in ("gather", "heads"):
        leaves = _leaves([*whole, gain])
        wanted = penalty(attention, leaves, weight)
        cp = ContextParallel(group, "head_tail", exchange=exchange, reduce=True)
        cp.plan(96)
        if exchange == "heads" and HKV % cp.ranks:
            continue
        found = penalty(
            cp(attention), _leaves([*_rows(cp, *whole), gain]), *_rows(cp, weight)
        )  # fmt: skip
        for x, y in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(x, cp.shard(y, 2))
        torch.testing.assert_close(found[3], wanted[3])


def second_derivatives_of_sums(group: ProcessGroup) -> None:
    """The gradient of a capture that all ranks add up has derivatives too."""
    attention, whole = attndsl.compile(GAIN), [x[:, :, :96] for x in _whole()]
    gain = torch.linspace(0.5, 1.5, H, dtype=torch.float64)

    def penalty(call: Any, leaves: list[torch.Tensor], ranks: int) -> torch.Tensor:
        *operands, x = leaves
        (first,) = torch.autograd.grad(call(*operands, x=x).square().sum(), x, create_graph=True)
        # Each rank has the whole sum: all of them together have it as often as there are ranks.
        (found,) = torch.autograd.grad(first.square().sum() / ranks, x)
        return found

    wanted = penalty(attention, _leaves([*whole, gain]), 1)
    cp = ContextParallel(group, "contiguous", reduce=True)
    cp.plan(96)
    found = penalty(cp(attention), _leaves([*_rows(cp, *whole), gain]), cp.ranks)
    torch.testing.assert_close(found, wanted)


def heads_of_dtensors(group: ProcessGroup) -> None:
    """Tensor parallel heads beside rows: DTensors over ``tp`` whose rows are the rank's own."""
    ranks = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("cp", "tp"))
    attention = attndsl.compile("mask = causal(); score = score + alibi()")
    whole = _leaves(_whole())
    wanted = attention(*whole)
    wanted.square().sum().backward()
    cp = ContextParallel(mesh["cp"], "head_tail")
    cp.plan(L, attention, shape=Shape(B, H, HKV, D, D))
    place = mesh["tp"].get_local_rank()
    own = []
    for x in whole:
        heads = x.detach().chunk(2, 1)[place]
        own.append(cp.shard(heads, 2).clone().requires_grad_())
    shards = [DTensor.from_local(x, mesh["tp"], [Shard(1)]) for x in own]
    out = cp(attention)(*shards)
    assert isinstance(out, DTensor)
    local = out.to_local()
    torch.testing.assert_close(local, cp.shard(wanted.detach(), 2).chunk(2, 1)[place])
    local.square().sum().backward()
    for x, y in zip(own, whole, strict=True):
        torch.testing.assert_close(x.grad, cp.shard(y.grad.chunk(2, 1)[place], 2))
    plain = cp(attention)(
        *[x.detach() for x in own], heads=H, kv_heads=HKV, h_offset=place * H // 2
    )
    torch.testing.assert_close(plain, local.detach())


def compiled(group: ProcessGroup) -> None:
    """One graph, forward and backward, with functional collectives."""
    attention, whole = attndsl.compile("mask = causal(); score = softcap(score, 3.0)"), _whole()
    cp = ContextParallel(group, "head_tail")
    cp.plan(L, attention)
    call = cp(attention)
    eager = _leaves(_rows(cp, *whole))
    wanted = call(*eager)
    wanted.square().sum().backward()

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return call(2 * q, k, v) * 3

    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    own = _leaves(_rows(cp, *whole))
    found = graph(own[0] / 2, own[1], own[2])
    torch.testing.assert_close(found, wanted.detach() * 3)
    (found / 3).square().sum().backward()
    for x, y in zip(own, eager, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    cp.plan(L // 2)  # Another layout: the graph is made anew, or refuses.
    half = [cp.shard(x[:, :, : L // 2], 2) for x in whole]
    with pytest.raises(Exception, match="not planned"):
        graph(*half)
    torch.testing.assert_close(
        call(*half), cp.shard(attention(*[x[:, :, : L // 2] for x in whole]), 2)
    )
    graph(*half)


def compiled_looks_nothing_up(group: ProcessGroup) -> None:
    """A graph cannot know whether the tensors of a mask have changed."""
    text = "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]"
    attention, doc = attndsl.compile(text), torch.arange(L) // 100
    cp = ContextParallel(group, "contiguous")
    cp.plan(L)
    call = cp(attention)
    own = _rows(cp, *_whole())
    call(*own, doc=doc)
    with pytest.raises(Exception, match="looks tensors up"):
        torch.compile(lambda *x: call(*x, doc=doc), fullgraph=True, backend="aot_eager")(*own)


class _Layer(torch.nn.Module):
    """One attention layer with a learned capture."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.qkv = torch.nn.Linear(16, 3 * H * D, dtype=torch.float64)
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, H, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )  # fmt: skip
        out: torch.Tensor = self.attention(q, k, v, x=self.gain)
        return x + out.transpose(1, 2).flatten(2)[..., :16]


def fsdp(group: ProcessGroup) -> None:
    """FSDP2 over dp x cp adds up the gradients of captures with all others."""
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    attention = attndsl.compile(GAIN)
    torch.manual_seed(9)
    alone = _Layer(attention)
    samples = torch.randn(ranks // 2, 1, L, 16, dtype=torch.float64)
    sum(alone(x).square().mean() for x in samples).backward()
    cp = ContextParallel(mesh["cp"], "head_tail")
    model = _Layer(cp(attention))
    model.load_state_dict(alone.state_dict())
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    fully_shard(model, mesh=flat)
    x = cp.shard(samples[mesh["dp"].get_local_rank()], 1, attention)
    # FSDP2 divides by all ranks, and each has a part of the rows: so the sum over all rows is
    # that of the ranks, weighed by how many there are.
    loss = model(x).square().sum() / samples[0].numel() * ranks
    loss.backward()
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)


def positions_and_unshard(group: ProcessGroup) -> None:
    cp = ContextParallel(group, "head_tail")
    for length in (L, 509, 37):
        whole = torch.randn(2, length, 3)
        cp.plan(length)
        own = cp.shard(whole, 1)
        assert torch.equal(own, whole[:, cp.positions()])
        dist.broadcast(whole, 0)
        own = cp.shard(whole, 1)
        assert torch.equal(cp.unshard(own, 1), whole)
    labels = torch.arange(L).expand(2, -1)
    both = cp.shard({"ids": labels, "mask": None, "x": labels.T}, {"ids": 1, "x": 0})
    assert both["mask"] is None
    assert torch.equal(both["ids"][0], both["x"][:, 0])


def autocast(group: ProcessGroup) -> None:
    attention, whole = attndsl.compile("causal()"), _whole(torch.float32)
    cp = ContextParallel(group, "contiguous")
    cp.plan(L, attention)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = attention(*whole), cp(attention)(*_rows(cp, *whole))
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, cp.shard(wanted, 2))


def declared_captures(group: ProcessGroup) -> None:
    """Tensors given to ``compile``, optional ones, and a params' gradient."""
    text = """tensor x[heads]: float = none
param cap: float
mask = causal()
score = cap * tanh(score * (x[h] if given(x) else 1.0) / cap)"""
    gain = torch.linspace(0.5, 1.5, H, dtype=torch.float64, requires_grad=True)
    cap = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    whole = _whole()
    cp = ContextParallel(group, "contiguous", reduce=True)
    cp.plan(L)
    for attention, given in (
        (attndsl.compile(text), {"cap": cap}),
        (attndsl.compile(text), {"cap": cap, "x": gain}),
        (attndsl.compile(GAIN, x=gain), {}),
    ):
        grads = []
        for call, operands in ((attention, whole), (cp(attention), _rows(cp, *whole))):
            gain.grad = cap.grad = None
            call(*operands, **given).square().sum().backward()
            grads.append((gain.grad, cap.grad))
        torch.testing.assert_close(*grads)


def mixed_exchange(group: ProcessGroup) -> None:
    """Groups of two of four ranks exchange heads, and fetch keys of the other group."""
    if dist.get_world_size(group) != 4:
        return
    from attndsl.parallel import cp_plan

    chosen = cp_plan._groups
    cp_plan._groups = lambda ranks, asked: (2,)
    try:
        for name in ("alibi", "sink", "gain", "dropout"):
            outcome = run(Setting(name, "head_tail", "auto", torch.float64), group)
            assert all(outcome.same), outcome
            assert outcome.error < 1e-13
    finally:
        cp_plan._groups = chosen


def _told(call: Callable[[], Any], words: str) -> None:
    """``call`` raises an error with ``words`` on this rank, as on all."""
    with pytest.raises(attndsl.AttnDSLError) as caught:
        call()
    assert re.search(words, str(caught.value)), (words, str(caught.value))


def faults(group: ProcessGroup) -> None:
    """A rank that does otherwise is told of on all ranks, and none waits."""
    rank = dist.get_rank(group)
    odd = rank == 1
    whole = _whole()
    cp = ContextParallel(group, "head_tail")
    _told(lambda: cp.plan(L - 128 if odd else L), "rank 1 has another length")
    _told(lambda: cp.plan(L, seed=rank), "has another seed")
    _told(lambda: cp.plan(1 if odd else L), "rank 1 could not plan|1 rows for")
    cp.plan(L, seed=4)
    own = _rows(cp, *whole)
    text = "causal() and q - kv < 7" if odd else "causal()"
    _told(lambda: cp(attndsl.compile(text))(*own), "rank 1 has another program")
    window = attndsl.compile("param n: int\nmask = causal() and q - kv < n")
    _told(lambda: cp(window)(*own, n=9 if odd else 8), "rank 1 has another set of params")
    doc = attndsl.compile("tensor doc[kv_len]: int\nmask = doc[q] == doc[kv]")
    _told(lambda: cp(doc)(*own, doc=torch.arange(L) // (9 + odd)), "rank 1 has another mask")
    dropped = attndsl.compile("weights = dropout(softmax(score), 0.1)")
    _told(lambda: cp(dropped)(*own, seed=rank), "has another seed")
    _told(lambda: cp(dropped)(*own), "seed=cp.seed")
    both = cp.seed(0), cp.seed(1)
    assert both[0] != both[1]
    cp(dropped)(*own, seed=both[0])
    unfit = (*own[:2], own[2][..., :4]) if odd else own
    _told(lambda: cp(attndsl.compile("q - kv < 3"))(*unfit), "rank 1 has another shape")
    careful = ContextParallel(group, "head_tail", check="calls")
    careful.plan(L)
    call = careful(window)
    call(*own, n=8)
    call(*own, n=9)
    _told(lambda: call(*own, n=9 if odd else 8), "rank 1 has another set of params")


def arguments_of_one_rank(group: ProcessGroup) -> None:
    """What one rank alone gives wrongly is told of on all ranks, be it of the wrong type."""
    odd, window = dist.get_rank(group) == 1, attndsl.compile("causal() and q - kv < 9")
    cp, whole = ContextParallel(group), _whole()

    def told(words: str, wrong: Callable[[], Any], right: Callable[[], Any]) -> None:
        _told(wrong if odd else right, f"rank 1 could not plan|{words}")

    def good() -> None:
        cp.plan(L, window)

    for words, arguments in (
        ("a str is given for a program: 'causal", (L, "causal()")),
        ("a NoneType is given for a program", (L, [window, None])),
        ("a type is given for a program", (L, type(window))),
        ("has 'many' rows", ("many", window)),
        ("has 1.5 rows", (1.5, window)),
    ):
        told(words, lambda arguments=arguments: cp.plan(*arguments), good)
    told("shape is 3", lambda: cp.plan(L, window, shape=3), good)
    told("shape is Shape.batch=0", lambda: cp.plan(L, window, shape=Shape(0)), good)
    told("seed is a str", lambda: cp.plan(L, window, seed="1"), good)
    told("captures is a list", lambda: cp.plan(L, window, captures=[1]), good)
    told(
        "along dim 9", lambda: cp.shard(whole[0], 9, window), lambda: cp.shard(whole[0], 2, window)
    )
    told("dims name 'b'", lambda: cp.shard({"a": whole[0]}, {"b": 2}, window), good)
    doc = attndsl.compile("tensor doc[kv_len]: int\nmask = doc[q] == doc[kv]")
    ids = torch.arange(L) // (100 + odd)
    _told(lambda: cp.plan(L, doc, doc=ids), "rank 1 has another set of masks")
    _told(lambda: cp.plan(L, doc, doc=ids[:9] if odd else ids), "rank 1 could not plan|doc")
    good()
    own = _rows(cp, *whole)
    told("this rank holds", lambda: cp(window)(*whole), lambda: cp(window)(*own))
    told("nonsense", lambda: cp(window)(*own, nonsense=1), lambda: cp(window)(*own))
    _told(lambda: good() if odd else cp(window)(*own), "rank 1 has another step")
    cp(window)(*own)


def early_shards(group: ProcessGroup) -> None:
    """Rows of a shard are never taken for those of the next one's layout."""
    text = "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]"
    attention, whole = attndsl.compile(text), _whole()
    cp = ContextParallel(group, "balanced")
    first, second = (torch.arange(L) // size for size in (L, 64))  # Head-tail, and contiguous.

    def shard(doc: torch.Tensor) -> list[torch.Tensor]:
        return [cp.shard(x, 2, attention, doc=doc) for x in whole]

    own = shard(first)
    _told(lambda: shard(second), "no call has taken the rows")
    found = cp(attention)(*own, doc=first)
    _check_rows(cp, found, attention(*whole, doc=first))
    shard(second)
    cp.plan(L, attention, doc=first)  # Says that those rows are not wanted.
    own = _leaves(shard(first))
    for reentrant in (False, True):
        out = checkpoint(
            lambda *x: cp(attention)(*x, doc=first), *own, use_reentrant=reentrant
        ).sum()  # fmt: skip
        shard(second)
        _told(out.backward, "makes a call again whose rows are of an earlier shard")
        cp.plan(L, attention, doc=first)
        shard(first)
    # Another batch of the same layout changes nothing, but what is drawn.
    window = attndsl.compile("mask = q - kv < 9; weights = dropout(softmax(score), 0.1)")
    cp = ContextParallel(group)
    own = _leaves([cp.shard(x, 2, window, seed=3) for x in whole])
    cp.shard(whole[0], 2, window, seed=4)
    out = checkpoint(lambda *x: cp(window)(*x, seed=cp.seed(0)), *own, use_reentrant=False).sum()
    out.backward(retain_graph=True)
    cp.shard(whole[0], 2, window, seed=5)
    _told(out.backward, "whose seed was 4, and the seed is 5")


def refusals(group: ProcessGroup) -> None:
    attention = attndsl.compile("causal()")
    own = _whole()
    _told(lambda: ContextParallel(group, "zigzag"), "layout is 'zigzag'")
    _told(lambda: ContextParallel(group, exchange="ring"), "exchange is 'ring'")
    _told(lambda: ContextParallel(3), "mesh is a int")
    _told(lambda: Machine(flops=0), "flops is 0")
    cp = ContextParallel(group, "auto")
    _told(lambda: cp(attention)(*own), "call shard or plan first")
    _told(lambda: cp.plan(L), "no programs are given")
    cp.plan(L, [attention, cp(attention)])
    _told(lambda: cp(attention)(*own), "this rank holds")
    shards = _rows(cp, *own)
    for name, value in (("q_offset", 3), ("kv_len", 9), ("tiles", None)):
        _told(lambda name=name, value=value: cp(attention)(*shards, **{name: value}), name)
    _told(lambda: cp.shard({"a": own[0], "b": own[0]}, {"a": 2, "b": 3}), "different|lengths")
    _told(lambda: cp.unshard(own[0], 2), "this rank holds")
    _told(lambda: cp.seed(0), "has no seed")
    _told(lambda: cp(attndsl.compile("weights = sigmoid(score)"))(*shards, return_lse=True),
          "drop return_lse")  # fmt: skip
    _told(lambda: cp(attention)(*shards, captures={"nonsense": 1}), "nonsense")
    rows = attndsl.compile("tensor last[q_len]: int\nmask = kv <= last[q]")
    last = torch.arange(L)
    _told(lambda: cp(rows)(*shards, last=cp.shard(last, 0)), "the mask reads it")
    cp(rows)(*shards, last=last)
    three = [x[:, :1] for x in shards]
    heads = ContextParallel(group, "contiguous", exchange="heads")
    heads.plan(L)
    _told(lambda: heads(attention)(*[x[:, :1] for x in _rows(heads, *own)]), "cannot share")
    assert three[0].shape[1] == 1


def documents_by_batch(group: ProcessGroup) -> None:
    """Other documents are planned again, and the same ones are not."""
    text = "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]"
    attention, whole = attndsl.compile(text), _whole()
    cp = ContextParallel(group, "balanced")
    for size in (100, 37, 100):
        doc = torch.arange(L) // size
        own = [cp.shard(x, 2, attention, doc=doc) for x in whole]
        for _ in range(2):
            found = cp(attention)(*own, doc=doc)
            _check_rows(cp, found, attention(*whole, doc=doc))
        doc += (torch.arange(L) > 60).int()  # In place: the plan of before is no more.
        found = cp(attention)(*own, doc=doc)
        _check_rows(cp, found, attention(*whole, doc=doc))


def changed_masks(group: ProcessGroup) -> None:
    """No call has another mask's plan, be changes uncounted or numbers those of NumPy."""
    whole, rank = _whole(), dist.get_rank(group)

    def same(**captures: Any) -> None:
        found = call(*_rows(cp, *whole), **captures)
        _check_rows(cp, found, attention(*whole, **captures))

    attention = attndsl.compile("param n: int\nmask = causal() and q - kv < n")
    cp = ContextParallel(group, "contiguous")
    cp.plan(L, attention, n=np.int64(9))
    call = cp(attention)
    for size in (np.int64(20), np.int64(300), 20, np.float64(400)):
        same(n=size)
    text = "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]"
    attention = attndsl.compile(text)
    for layout in ("contiguous", "balanced"):
        cp = ContextParallel(group, layout)
        call, doc = cp(attention), torch.zeros(L, dtype=torch.int64)
        for size in (20, 300, 50):
            if rank == 0:
                doc.numpy()[:] = np.arange(L) // size
            dist.broadcast(doc, 0, group=group)  # Torch counts no change of the others' buffer.
            cp.plan(L, attention, doc=doc)
            same(doc=doc)
        with torch.inference_mode():
            doc = torch.arange(L) // 20
            cp.plan(L, attention, doc=doc)
            same(doc=doc)
            doc //= 10
            same(doc=doc)


def one_row(group: ProcessGroup) -> None:
    """A tensor that says the same of all rows is no rank's share, though the rank has one row."""
    attention = attndsl.compile(
        "tensor x[heads, q_len, kv_len]: float\nmask = causal(); score = score + x[h, q, kv]"
    )
    length = dist.get_world_size(group) + 1
    whole = [x[:, :, :length] for x in _whole()]
    bias = torch.linspace(-1, 1, H * length, dtype=torch.float64).view(H, 1, length)
    cp = ContextParallel(group, "contiguous", reduce=True)
    cp.plan(length)
    grads = []
    for call, operands in ((attention, whole), (cp(attention), _rows(cp, *whole))):
        x = bias.clone().requires_grad_()
        call(*operands, x=x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def few_rows(group: ProcessGroup) -> None:
    """Lengths that leave ranks without tiles of their own, and ranks that see nothing."""
    for text in ("causal()", "kv > q + 1000", "kv < 3"):
        attention = attndsl.compile(text)
        for length in (4, 7, 33, 130):
            whole = [x[:, :, :length] for x in _leaves(_whole())]
            cp = ContextParallel(group, "contiguous")
            cp.plan(length)
            own = _leaves([x.detach() for x in _rows(cp, *whole)])
            out, lse = attention(*whole, return_lse=True)
            found, found_lse = cp(attention)(*own, return_lse=True)
            torch.testing.assert_close(found, cp.shard(out, 2))
            torch.testing.assert_close(found_lse, cp.shard(lse, 2))
            grads = torch.autograd.grad(out.square().sum(), whole)
            found.square().sum().backward()
            for x, y in zip(own, grads, strict=True):
                torch.testing.assert_close(x.grad, cp.shard(y, 2))


def calls_again(group: ProcessGroup) -> None:
    """Calls like others before, of other tensors; those of one rank begin at no word of 8 bytes."""
    attention, rank = attndsl.compile("causal() and q - kv < 100"), dist.get_rank(group)
    for layout in ("contiguous", "head_tail"):
        cp = ContextParallel(group, layout, exchange="gather")
        cp.plan(L, attention)
        call = cp(attention)
        for number in range(5):
            whole = [(x + number).requires_grad_() for x in _whole(torch.float32)]
            own = _rows(cp, *(x.detach() for x in whole))
            if rank == 0:
                own = [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in own]
            own = _leaves(own) if rank else [x.requires_grad_() for x in own]
            out, found = attention(*whole), call(*own)
            _check_rows(cp, found, out)
            grads = torch.autograd.grad(out.square().sum(), whole)
            found.square().sum().backward()
            for x, y in zip(own, grads, strict=True):
                torch.testing.assert_close(x.grad, cp.shard(y, 2), atol=1e-4, rtol=1e-4)


def words(group: ProcessGroup) -> str:
    """What ``explain`` says, the same on all ranks."""
    attention = attndsl.compile("causal() and q - kv < 100", name="local")
    cp = ContextParallel(group)
    cp.plan(L, attention, shape=Shape(B, H, HKV, D, D))
    before = cp.explain()
    assert "no program is planned yet" in before
    cp(attention)(*_rows(cp, *_whole(torch.bfloat16)))
    return cp.explain()


def bytes_sent(group: ProcessGroup) -> list[int]:
    """What travels in a forward and a backward, counted; the plan's; an all-gather's."""
    sent, real = [], dist.all_to_all_single

    def counting(found: torch.Tensor, *given: Any, **named: Any) -> Any:
        sent.append(found.nbytes)
        return real(found, *given, **named)

    attention = attndsl.compile("causal() and q - kv < 100")
    cp = ContextParallel(group, "contiguous", exchange="gather")
    cp.plan(L, attention)
    own = _leaves(_rows(cp, *_whole(torch.bfloat16)))
    with contextlib.ExitStack() as stack:
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        patch.setattr(dist, "all_to_all_single", counting)
        cp(attention)(*own).sum().backward()
    (plan,) = cp._plans.values()
    return [sum(sent), int(plan.figures.received[cp.rank]), plan.figures.gathered]


def captured(group: ProcessGroup) -> None:
    """A CUDA graph keeps a plan, so it has no calls whose plan follows from tensors."""
    attention = attndsl.compile("causal()")
    dropping = attndsl.compile("mask = causal(); weights = dropout(softmax(score), 0.3)")
    documents = attndsl.compile("tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]")
    cp = ContextParallel(group, "head_tail")
    doc = torch.arange(L) // 90
    own = _rows(cp.plan(L, attention, seed=7) or cp, *_whole())
    # A model holds these, and calls like one before are not planned again.
    call, look_up = cp(attention), cp(documents)
    for _ in range(3):
        out, looked_up = call(*own), look_up(*own, doc=doc)
    seed = cp.seed(0)
    dropped = cp(dropping)(*own, seed=seed)
    with mock.patch.object(ContextParallel, "_is_captured", return_value=True):
        for _ in range(2):
            assert torch.equal(call(*own), out)
            _told(lambda: look_up(*own, doc=doc), "looks tensors up: replays")
        _told(lambda: cp(attndsl.compile("kv <= q + 1"))(*own), "which is not planned")
        _told(lambda: cp.seed(0), "at each replay")
        assert torch.equal(cp(dropping)(*own, seed=torch.tensor(seed)), dropped)
    assert torch.equal(look_up(*own, doc=doc), looked_up)


def streams(group: ProcessGroup) -> list[Any]:
    """What a second stream computes is read by none too early, nor written; the operations of each.

    And what the detector of races says of ways that are wrong.
    """
    attention = attndsl.compile(
        "tensor x[heads]: float\nmask = sliding_window(700)\nscore = x[h] * score"
    )
    rows, machine = 8192, Machine(call=1e-12)
    cp = ContextParallel(group, "contiguous", machine=machine, reduce=True)
    cp.plan(rows * cp.ranks, attention)
    leaves = [torch.randn(1, n, rows, 4, requires_grad=True) for n in (2, 1, 1)]
    gain = torch.linspace(0.5, 1.0, 2).requires_grad_()

    def races(arriving: bool = True) -> Detector:
        with detecting(arriving) as found:
            for _ in range(3):
                out = cp(attention)(*leaves, x=gain)
                torch.autograd.grad(out, (*leaves, gain), torch.ones_like(out))
        return found

    right = races()
    told = [sorted(right.races), right.operations, bool(races(arriving=False).races)]
    for name, wrong in (("__enter__", lambda own: own), ("__exit__", lambda *given: None)):
        with mock.patch.object(Beside, name, wrong):
            told.append(bool(races().races))
    return told


CASES = (
    checkpointing, second_derivatives, second_derivatives_of_sums, heads_of_dtensors, compiled,
    compiled_looks_nothing_up, fsdp, positions_and_unshard, autocast, declared_captures,
    mixed_exchange, faults, arguments_of_one_rank, early_shards, refusals, documents_by_batch,
    changed_masks, one_row, few_rows, calls_again, captured,
)  # fmt: skip
JOBS: dict[str, Any] = {job.__name__: job for job in (*CASES, words, bytes_sent, streams)}
