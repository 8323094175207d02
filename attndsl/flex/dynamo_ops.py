"""Operators of mask and score functions that Dynamo follows.

Dynamo follows a ``score_mod`` and a ``mask_mod`` like any other code of the user's, guards what
they read, and hands what they come to over as one FX graph, with the tensors that it captures.
Where such an operator is run, that graph is traced into a program, and the program's call, which
whoever makes the operator chooses, is what remains: ``attndsl::forward``, which compilers see.

Positions are of shape (1,) while Dynamo follows the functions, since an index of no dims would be
read as a number there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.base_hop import BaseHOP

from attndsl.backends.memory_order import memory_order
from attndsl.ir import SCORE, var

from .compiled_traces import position_ranges
from .tracing import trace_graph

if TYPE_CHECKING:
    from .tracing import Mod

_PAIR = (SCORE, *(var(name) for name in ("b", "h", "q", "kv")))
_RESULTS = 3
"""The output, the log-sum-exp and the largest scores, which the query gives their device."""
_MARKS = _RESULTS + 2 + len(_PAIR)
"""Results that are there for their operands: those three, then key, value and the pair; after them
one for each other tensor of the call."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The call that a trace stands for. It takes the trace, query, key, value, a tuple of the call's
other tensors, and the operator's options. It returns output, log-sum-exp and largest scores."""


def _decompose(
    attend: Attend, graph: Any, *operands: Any, parts: tuple[str, ...], others: int, **options: Any
) -> tuple[Any, ...]:
    """Make the call that a graph of both functions stands for, and stand-ins for its results."""
    holders = [item for item in graph.graph.nodes if item.op == "placeholder"]
    results = graph.graph.output_node().args[0]
    # Dynamo orders inputs as it likes, and adds sizes to them: results say which is which.
    marks = _MARKS + others
    query_at, _, _, key_at, value_at, *places = (holders.index(x.args[0]) for x in results[:marks])
    pair_at, others_at = places[: len(_PAIR)], places[len(_PAIR) :]
    query, key, value = (operands[place] for place in (query_at, key_at, value_at))
    pruned = copy.deepcopy(graph)
    output = pruned.graph.output_node()
    marked = output.args[0][:marks]
    output.args = (tuple(output.args[0][marks:]),)
    # Not all that has no users: what changes a value in place may have none.
    for mark in reversed(marked):
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
    given_others = tuple(operands[place] for place in others_at)
    found = attend(traced, query, key, value, given_others, **options)
    rest = (x.meta["example_value"] for x in results[len(found) :])
    return *found, *(query.new_empty(x.shape, dtype=x.dtype) for x in rest)


def _attend_after_break(
    attend: Attend,
    both: Callable[..., tuple[Any, ...]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *tensors: torch.Tensor,
    parts: tuple[str, ...],
    others: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The call where Dynamo could not follow the functions and left the graph before it."""
    rest = tensors[len(_PAIR) :]

    def mods(*symbols: Any) -> Any:
        return both(query, key, value, *symbols, *rest)[_MARKS + others :]

    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    lengths = position_ranges(*sizes)
    traced = trace_graph(mods, _PAIR, parts, dtype, query.device, lengths, {}, in_graph=False)
    return attend(traced, query, key, value, rest, **options)


_ATTEND_AFTER_BREAK: Any = torch.compiler.disable(_attend_after_break)  # type: ignore[no-untyped-call]


def _own_name(holder: str) -> str:
    """The user's name for an input of a graph, as far as Dynamo's tells it."""
    return holder.removeprefix("l_").removeprefix("self_").strip("_")


class PairInGraph(BaseHOP):
    """Operator of both functions on one pair, as a graph, with all tensors of a call."""

    def __init__(self, name: str, attend: Attend) -> None:
        super().__init__(name)
        self.attend = attend

    def __call__(self, subgraph: Any, *operands: Any, **kwargs: Any) -> Any:
        """The call's results; nothing is dispatched, since they are made of operators that are."""
        if isinstance(subgraph, torch.fx.GraphModule):
            return _decompose(self.attend, subgraph, *operands, **kwargs)
        return _ATTEND_AFTER_BREAK(self.attend, subgraph, *operands, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def allow_views(name: str) -> None:
    """Let Dynamo take operands that are views of one tensor, as a packed projection gives them.

    Dynamo refuses them for operators of functions in general, whose bodies run as graphs of their
    own and may write to what they share. The operator's body is only read.

    Args:
        name: Of the operator.
    """
    from torch._dynamo.variables import higher_order_ops as dynamo

    if name not in dynamo._hop_name_to_variable_class:

        class PairVariable(dynamo.BaseHOPVariable):
            """Variable with which Dynamo follows a call of the operator."""

            supports_aliasing = True

        dynamo._hop_name_to_variable_class[name] = PairVariable


def follow(
    operator: PairInGraph,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    others: tuple[torch.Tensor, ...],
    score_mod: Mod | None,
    mask_mod: Mod | None,
    wants_maxima: bool,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """The results of ``operator``, while Dynamo follows the functions.

    The functions are arguments of their own: Dynamo reads what they close over where they are put
    into an object, and then a number that changes is no part of the operator's graph.

    Args:
        operator: What calls the program that the functions make. :func:`allow_views` knows it.
        operands: Query, key and value.
        others: Further tensors of the call.
        score_mod: Or None.
        mask_mod: Or None.
        wants_maxima: Whether the largest scores of each row are a result.
        **options: Constants for the operator's call.

    Returns:
        Its output, log-sum-exp and largest scores.
    """
    query, key, value = operands
    work = torch.float64 if query.dtype is torch.float64 else torch.float32
    kinds = (work, torch.int64, torch.int64, torch.int64, torch.int64)
    pair = [torch.empty((1,), dtype=kind, device=query.device) for kind in kinds]
    # Here, since all that is computed within is taken for a part of the program.
    order = memory_order(query, value.shape[3])

    def both(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Any, b: Any, h: Any,
        q_idx: Any, kv_idx: Any, *rest: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        shape = (query.shape[0], query.shape[1], query.shape[2])
        results = [query.new_empty_strided(order.shape, order.strides)]
        results.append(query.new_empty(shape, dtype=work))
        results.append(query.new_empty(shape if wants_maxima else (0,), dtype=work))
        # Dynamo drops inputs that nothing uses.
        results += [x.new_empty(()) for x in (key, value, score, b, h, q_idx, kv_idx, *rest)]
        # Functions may change their arguments in place, which inputs of a graph may not be.
        if score_mod is not None:
            results.append(score_mod(*(x.clone() for x in (score, b, h, q_idx, kv_idx))))
        if mask_mod is not None:
            results.append(mask_mod(*(x.clone() for x in (b, h, q_idx, kv_idx))))
        return tuple(results)

    parts = ("score",) * (score_mod is not None) + ("mask",) * (mask_mod is not None)
    found: tuple[torch.Tensor, ...] = operator(
        both, query, key, value, *pair, *others, parts=parts, others=len(others), **options
    )
    return found
