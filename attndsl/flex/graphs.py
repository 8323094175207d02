"""Calls within graphs of ``torch.compile``.

Dynamo follows a ``score_mod`` and a ``mask_mod`` like any other code of the user's, guards what
they read, and hands what they come to over as one FX graph, with the tensors that it captures.
Where the operator below is run, that graph is traced into a program, and the program's call is what
remains: ``attndsl::forward``, which compilers see.

Positions are of shape (1,) while Dynamo follows the functions, since an index of no dims would be
read as a number there.

Non-goals: tile maps, which graphs do not take.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.base_hop import BaseHOP

from attndsl.ir import SCORE, var

from .compiled import compiled, near, position_ranges
from .tracing import trace_graph

if TYPE_CHECKING:
    from .tracing import Mod

_PAIR = (SCORE, *(var(name) for name in ("b", "h", "q", "kv")))
_MARKS = 2 + 2 + len(_PAIR)
"""Results that are there for their operands: the output, the log-sum-exp, key, value, the pair."""


def _decompose(
    graph: Any, *operands: Any, backend: str, scale: float | None, parts: tuple[str, ...]
) -> tuple[Any, ...]:
    """The call that a graph of both functions comes to, and stand-ins for the graph's results."""
    holders = [item for item in graph.graph.nodes if item.op == "placeholder"]
    results = graph.graph.output_node().args[0]
    # Dynamo orders inputs as it likes, and adds sizes to them: results say which is which.
    query_at, _, key_at, value_at, *pair_at = (holders.index(x.args[0]) for x in results[:_MARKS])
    query, key, value = (operands[place] for place in (query_at, key_at, value_at))
    pruned = copy.deepcopy(graph)
    output = pruned.graph.output_node()
    marks = output.args[0][:_MARKS]
    output.args = (tuple(output.args[0][_MARKS:]),)
    # Not all that has no users: what changes a value in place may have none.
    for mark in reversed(marks):
        pruned.graph.erase_node(mark)
    pruned.recompile()
    used = [bool(item.users) for item in pruned.graph.nodes if item.op == "placeholder"]
    # A number of the program is guarded; a size that only stood in for shapes is not.
    given = [
        int(x) if isinstance(x, torch.SymInt) and needed else x
        for x, needed in zip(operands, used, strict=True)
    ]
    names = {id(x): _own_name(item.name) for x, item in zip(given, holders, strict=True)}
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    lengths = position_ranges(*sizes) if all(type(size) is int for size in sizes) else {}
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32

    def mods(*pair: Any) -> Any:
        symbols = dict(zip(pair_at, pair, strict=True))
        return pruned(*(symbols.get(place, x) for place, x in enumerate(given)))

    traced = trace_graph(mods, _PAIR, parts, dtype, query.device, lengths, names)
    named = near(traced.captures, query.device)
    out, lse = compiled(traced.text, backend)(
        query, key, value, scale=scale, return_lse=True, **named
    )
    rest = (x.meta["example_value"] for x in results[2:])
    return out, lse, *(query.new_empty(x.shape, dtype=x.dtype) for x in rest)


def _own_name(holder: str) -> str:
    """The user's name for an input of a graph, as far as Dynamo's tells it."""
    return holder.removeprefix("l_").removeprefix("self_").strip("_")


class FlexInGraph(BaseHOP):
    """Both functions on one pair, as a graph, with query, key and value."""

    def __init__(self) -> None:
        super().__init__("attndsl_flex")

    def __call__(self, subgraph: Any, *operands: Any, **kwargs: Any) -> Any:
        """The call's results; nothing is dispatched, since they are made of operators that are."""
        return _decompose(subgraph, *operands, **kwargs)


OPERATOR = FlexInGraph()


def attend_in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    scale: float | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of a call that Dynamo is following."""
    work = torch.float64 if query.dtype is torch.float64 else torch.float32
    kinds = (work, torch.int64, torch.int64, torch.int64, torch.int64)
    pair = [torch.empty((1,), dtype=kind, device=query.device) for kind in kinds]

    def both(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Any, b: Any, h: Any,
        q_idx: Any, kv_idx: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        shape = (query.shape[0], query.shape[1], query.shape[2])
        results = [query.new_empty((*shape, value.shape[3])), query.new_empty(shape, dtype=work)]
        # Dynamo drops inputs that nothing uses.
        results += [x.new_empty(()) for x in (key, value, score, b, h, q_idx, kv_idx)]
        # Functions may change their arguments in place, which inputs of a graph may not be.
        if score_mod is not None:
            results.append(score_mod(*(x.clone() for x in (score, b, h, q_idx, kv_idx))))
        if mask_mod is not None:
            results.append(mask_mod(*(x.clone() for x in (b, h, q_idx, kv_idx))))
        return tuple(results)

    parts = ("score",) * (score_mod is not None) + ("mask",) * (mask_mod is not None)
    found = OPERATOR(both, query, key, value, *pair, backend=backend, scale=scale, parts=parts)
    return found[0], found[1]
