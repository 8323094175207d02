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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.base_hop import BaseHOP

from attndsl.backends.memory_order import memory_order
from attndsl.ir import SCORE, var

from .compiled import compiled, near, position_ranges
from .maxima import find_maxima
from .tracing import trace_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from .tracing import Mod, Trace

_NAME = "attndsl_flex"
_PAIR = (SCORE, *(var(name) for name in ("b", "h", "q", "kv")))
_RESULTS = 3
"""The output, the log-sum-exp and the largest scores, which the query gives their device."""
_MARKS = _RESULTS + 2 + len(_PAIR)
"""Results that are there for their operands: those three, then key, value and the pair."""


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """What a call in a graph is asked for, beside its tensors and functions."""

    scale: float | None
    backend: str
    max_scores: bool


def _decompose(
    graph: Any,
    *operands: Any,
    backend: str,
    scale: float | None,
    max_scores: bool,
    parts: tuple[str, ...],
) -> tuple[Any, ...]:
    """The call that a graph of both functions comes to, and stand-ins for the graph's results."""
    holders = [item for item in graph.graph.nodes if item.op == "placeholder"]
    results = graph.graph.output_node().args[0]
    # Dynamo orders inputs as it likes, and adds sizes to them: results say which is which.
    query_at, _, _, key_at, value_at, *pair_at = (
        holders.index(x.args[0]) for x in results[:_MARKS]
    )
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
    found = _attend(traced, query, key, value, GraphOptions(scale, backend, max_scores))
    rest = (x.meta["example_value"] for x in results[len(found) :])
    return *found, *(query.new_empty(x.shape, dtype=x.dtype) for x in rest)


def _attend(
    traced: Trace,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: GraphOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, the log-sum-exp and the largest scores, empty where they are not asked for."""
    attention, scale = compiled(traced.text, options.backend), options.scale
    named = near(traced.captures, query.device)
    out, lse = attention(query, key, value, scale=scale, return_lse=True, **named)
    if options.max_scores:
        return out, lse, find_maxima(attention, query, key, scale, named)
    return out, lse, lse.new_empty(0)


def _attend_after_break(
    both: Callable[..., tuple[Any, ...]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *pair: torch.Tensor,
    backend: str,
    scale: float | None,
    max_scores: bool,
    parts: tuple[str, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The call where Dynamo could not follow the functions and left the graph before it."""

    def mods(*symbols: Any) -> Any:
        return both(query, key, value, *symbols)[_MARKS:]

    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    lengths = position_ranges(*sizes)
    traced = trace_graph(mods, _PAIR, parts, dtype, query.device, lengths, {}, in_graph=False)
    return _attend(traced, query, key, value, GraphOptions(scale, backend, max_scores))


_ATTEND_AFTER_BREAK: Any = torch.compiler.disable(_attend_after_break)  # type: ignore[no-untyped-call]


def _own_name(holder: str) -> str:
    """The user's name for an input of a graph, as far as Dynamo's tells it."""
    return holder.removeprefix("l_").removeprefix("self_").strip("_")


class FlexInGraph(BaseHOP):
    """Both functions on one pair, as a graph, with query, key and value."""

    def __init__(self) -> None:
        super().__init__(_NAME)

    def __call__(self, subgraph: Any, *operands: Any, **kwargs: Any) -> Any:
        """The call's results; nothing is dispatched, since they are made of operators that are."""
        if isinstance(subgraph, torch.fx.GraphModule):
            return _decompose(subgraph, *operands, **kwargs)
        return _ATTEND_AFTER_BREAK(subgraph, *operands, **kwargs)


OPERATOR = FlexInGraph()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _allow_views() -> None:
    """Let Dynamo take operands that are views of one tensor, as a packed projection gives them.

    Dynamo refuses them for operators of functions in general, whose bodies run as graphs of their
    own and may write to what they share. The operator's body is only read.
    """
    from torch._dynamo.variables import higher_order_ops as dynamo

    if _NAME not in dynamo._hop_name_to_variable_class:

        class FlexVariable(dynamo.BaseHOPVariable):
            """How Dynamo follows a call of the operator."""

            supports_aliasing = True

        dynamo._hop_name_to_variable_class[_NAME] = FlexVariable


def attend_in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    options: GraphOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The output, the log-sum-exp and the largest scores of a call that Dynamo is following."""
    # Dynamo asks how to follow the operator where it first sees it.
    _allow_views()
    work = torch.float64 if query.dtype is torch.float64 else torch.float32
    kinds = (work, torch.int64, torch.int64, torch.int64, torch.int64)
    pair = [torch.empty((1,), dtype=kind, device=query.device) for kind in kinds]
    # Here, since all that is computed within is taken for a part of the program.
    order = memory_order(query, value.shape[3])

    def both(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Any, b: Any, h: Any,
        q_idx: Any, kv_idx: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        shape = (query.shape[0], query.shape[1], query.shape[2])
        results = [query.new_empty_strided(order.shape, order.strides)]
        results.append(query.new_empty(shape, dtype=work))
        results.append(query.new_empty(shape if options.max_scores else (0,), dtype=work))
        # Dynamo drops inputs that nothing uses.
        results += [x.new_empty(()) for x in (key, value, score, b, h, q_idx, kv_idx)]
        # Functions may change their arguments in place, which inputs of a graph may not be.
        if score_mod is not None:
            results.append(score_mod(*(x.clone() for x in (score, b, h, q_idx, kv_idx))))
        if mask_mod is not None:
            results.append(mask_mod(*(x.clone() for x in (b, h, q_idx, kv_idx))))
        return tuple(results)

    parts = ("score",) * (score_mod is not None) + ("mask",) * (mask_mod is not None)
    found = OPERATOR(
        both, query, key, value, *pair, backend=options.backend, scale=options.scale,
        max_scores=options.max_scores, parts=parts,
    )  # fmt: skip
    return found[0], found[1], found[2] if options.max_scores else None
