"""Sums of dQ in a fixed order: work tiles take turns at each query tile.

A count for each query tile says how many work tiles have added to its sums. A work tile adds when
the count is the number of those that visit the query tile before it, in the order in which work
tiles are drawn. So a work tile waits for those alone that were drawn before it, and these never
wait for it. Some work tile always goes on, however many programs run at a time. For times see M42
in docs/dev/measured.md.

Non-goals: which loops have such numbers (``Sparsity.loop_in_turn``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...emit.device_functions import param_values
from ...emit.loops import print_turn
from .feature import Buffer, Feature, Texts

if TYPE_CHECKING:
    from ...base import Call
    from ...emit.facts import KernelFacts
    from ...emit.template import Flags
    from ...kernels.config import Config
    from ...kernels.kernel import Task
    from .feature import ModuleSpec

_TURNS = 256
"""Turns of two query tiles, and their barriers: bytes, rounded up."""


def _takes_turns(spec: ModuleSpec) -> bool:
    return spec.facts.takes_turns


def _flags(spec: ModuleSpec) -> Flags:
    taken = _takes_turns(spec)
    # The producer passes on turns of tiles whose places are free again, two tiles later. No formula
    # tells the turns of a listed loop, and so no mask's tensor is loaded for the tiles behind.
    assert not taken or (spec.config.persistent and spec.config.stages == 2)
    assert not taken or not spec.is_listed
    return {
        "REVERSED": taken and not spec.loop.descending,
        "TWO_SIDED": taken and spec.loop.two_sided,
        "FULL_FIRST": taken and not spec.loop.two_sided,
    }


def _functions(spec: ModuleSpec) -> Texts:
    """The function ``kv_pass_turn``."""
    facts = spec.facts
    values = param_values(facts, scalar=True)
    text, used = print_turn(spec.loop_name, "kv", spec.loop, values, facts.names())
    return Texts([text], frozenset(used))


def _no_turns(call: Call, config: Config) -> torch.Tensor:
    """(batch, heads, query tiles) int32: how many work tiles have added to sums of dQ."""
    batch, heads, q_len, _ = call.q.shape
    return call.q.new_zeros((batch, heads, -(-q_len // config.block_m)), dtype=torch.int32)


def _shared_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    return _TURNS * facts.takes_turns


TURNS = Feature(
    "TAKES_TURNS", _takes_turns, _flags, template="ordered_dq", functions=_functions,
    shared_bytes=_shared_bytes, sums=(Buffer("TURNS", "*i32", _no_turns),),
)  # fmt: skip
