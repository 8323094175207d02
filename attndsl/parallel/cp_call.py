"""Calls of one rank's rows: their arguments, checked, and what the plan adds to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from attndsl.call.argument_checks import autocast, check_operands, joined
from attndsl.call.distributed_checks import is_dtensor
from attndsl.call.options import OPTIONS, WHOLE
from attndsl.call.prepared import check_has_lse
from attndsl.errors import ArgumentError, ShapeError
from attndsl.foundation.caches import BoundedCache
from attndsl.foundation.scalars import number_key
from attndsl.ir import Op

from .cp_attention import ShardedJob, attend, everywhere, gradients
from .cp_plan import CallShape, mask_names
from .eager_exchange import is_eager
from .plan_costs import Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from weakref import ReferenceType

    from .context_parallel import ContextParallel
    from .cp_attention import ShardedProgram
    from .cp_plan import Plan, PlanKey

_WHOLE_SIZES = ("batch", "heads", "kv_heads")
_PLACES = ("h_offset", "b_offset")
_OPTIONS = ("scale", "deterministic", "seed", "out_dtype")
_TAKEN = (*_OPTIONS, "return_lse", *_WHOLE_SIZES, *_PLACES)
"""Options that a caller gives."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype)
"""Types of arguments that are told apart by their values."""
_MAX_KNOWN = 64
_FOLLOWS = tuple(name for name in OPTIONS if name not in _TAKEN)
"""Arguments of calls that the plan says."""


class Sharded:
    """A program whose calls take this rank's rows; made by :meth:`ContextParallel.__call__`."""

    def __init__(self, cp: ContextParallel, attention: ShardedProgram) -> None:
        self._cp = cp
        self.attention = attention
        """The compiled program."""
        self._known: BoundedCache[_PlannedCall] = BoundedCache(
            "context-parallel calls by arguments, tensors", _MAX_KNOWN
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        captures: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Any:
        """Attention of this rank's rows over all keys that they see.

        Args:
            q: (B, Hq, rows of this rank, D), or a DTensor of these with shards of heads or batch
                entries, like k and v.
            k: (B, Hkv, rows, D).
            v: (B, Hkv, rows, Dv).
            captures: As of :meth:`attndsl.Attention.__call__`. Tensors are those of the whole
                sequence; one declared along ``q_len`` that the mask does not read may have this
                rank's rows alone.
            **named: Captures, and ``scale``, ``return_lse``, ``deterministic``, ``seed``,
                ``out_dtype``, ``heads``, ``kv_heads``, ``batch``, ``h_offset``, ``b_offset``.

        Returns:
            ``out`` (B, Hq, rows, Dv), or ``(out, lse)``, as of such a call.

        Raises:
            ShapeError: Operands that are not this rank's rows.
            ArgumentError: Arguments that follow from the plan; ranks that do not call alike.
            AttnDSLError: As of such a call.
        """
        given_key = _given_key(q, k, v, captures, named)
        known = None if given_key is None else self._known.get(given_key)
        if known is not None and known.fits(self._cp):
            return _run(self._cp, known.job, (q, k, v), known.captures())
        try:
            options = _options_of(self.attention, named)
            defaults = self.attention.made_of.defaults
            given = {**defaults, **joined(captures or {}, named)}
            attention, given = self.attention.variant(given)
            if not is_dtensor(q):
                check_operands(q, k, v)
        except Exception as error:
            self._cp.refuse(self.attention, error)
        if is_dtensor(q):
            from .dtensor import attend_shards  # Imports torch.distributed.tensor.

            options = {
                name: x for name, x in options.items() if name not in (*_WHOLE_SIZES, *_PLACES)
            }

            def of_shards(*operands: Any, captures: Any, **rest: Any) -> Any:
                return self._of_shards(attention, operands, captures, rest)

            program = attention.lowered.program
            return attend_shards(of_shards, program, (q, k, v), given, WHOLE, options)
        job, key, plan = _planned(self._cp, attention, (q, k, v), given, options)
        if given_key is not None:
            tensors = {name: ref(given[name]) for name in job.names}
            self._known.put(given_key, _PlannedCall(job, key, plan, tensors))
        return _run(self._cp, job, (q, k, v), given)

    def gradients(
        self,
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        *,
        captures: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v, for operators with a backward of their own.

        Args:
            operands: q, k and v of the call; plain tensors, of the dtype that it computed in.
            results: ``(out, lse)`` of it, or ``(out,)`` of programs with weights of their own.
            grads: Of the results; None for zeros.
            captures: As of the call.
            **named: The same.

        Returns:
            As ``operands``.

        Raises:
            AttnDSLError: As of the call.
        """
        options = _options_of(self.attention, named)
        given = {**self.attention.made_of.defaults, **joined(captures or {}, named)}
        attention, given = self.attention.variant(given)
        job, *_ = _planned(self._cp, attention, operands, given, options)
        tensors = [given[name] for name in job.names]
        return tuple(gradients(job, (*operands, *tensors), results, grads))

    def _of_shards(
        self, attention: ShardedProgram, operands: Any, captures: Any, rest: Mapping[str, Any]
    ) -> Any:
        """A process's part of a call of DTensors."""
        own = {name: rest.get(name) for name in (*_OPTIONS, "return_lse", *_WHOLE_SIZES)}
        own |= {name: rest.get(name, 0) for name in _PLACES}
        return _call(self._cp, attention, operands, captures, own)


class _PlannedCall(NamedTuple):
    """A call that was checked and planned. Another one of the same arguments is like it."""

    job: ShardedJob
    key: PlanKey
    plan: Plan
    tensors: Mapping[str, ReferenceType[torch.Tensor]]
    """Captured ones by name: they live as long as others want them."""

    def captures(self) -> dict[str, Any]:
        """The tensors, or None in place of one that is gone."""
        return {name: known() for name, known in self.tensors.items()}

    def fits(self, cp: ContextParallel) -> bool:
        """Return True if the plan still holds for such calls."""
        captures = self.captures()
        gone = any(x is None for x in captures.values())
        return not gone and cp.is_planned(self.key, self.plan, captures)


def _given_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Mapping[str, Any] | None,
    named: Mapping[str, Any],
) -> tuple[object, ...] | None:  # fmt: skip
    """Key that tells calls apart; None for a call that has to be checked each time.

    A tensor is told by its identity: one that has it by chance, since the other is gone, is not
    known, as :class:`_PlannedCall` looks at the other.
    """
    if not is_eager(q, k, v) or torch._C._is_any_autocast_enabled():
        return None
    found: list[object] = [y for x in (q, k, v) for y in (x.shape, x.dtype, x.device)]
    for name, x in (*(captures or {}).items(), *named.items()):
        if isinstance(x, torch.Tensor):
            found += (name, id(x))
        elif type(x) in _PLAIN:
            found += (name, number_key(x))
        else:
            return None
    return tuple(found)


def _call(
    cp: ContextParallel,
    attention: ShardedProgram,
    operands: Sequence[torch.Tensor],
    captures: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """A call of plain tensors."""
    job, *_ = _planned(cp, attention, operands, captures, options)
    return _run(cp, job, operands, captures)


def _run(
    cp: ContextParallel,
    job: ShardedJob,
    operands: Sequence[torch.Tensor],
    captures: Mapping[str, Any],
) -> Any:
    """A call that was checked and planned."""
    q, k, v = (autocast(x) for x in operands)
    tensors = [captures[name] for name in job.names]
    if cp.reduces:
        tensors = [
            everywhere(x, cp.group) if x.requires_grad and name not in job.shares else x
            for name, x in zip(job.names, tensors, strict=True)
        ]
    found = attend(job, q, k, v, tensors)
    return (found[0], found[1]) if job.returns_lse else found[0]


def _planned(
    cp: ContextParallel,
    attention: ShardedProgram,
    operands: Sequence[torch.Tensor],
    captures: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[ShardedJob, PlanKey, Plan]:
    """Job, plan key and plan of a call of plain tensors."""
    q, k, v = (autocast(x) for x in operands)
    batch = cp.now()
    has_lse = attention.lowered.program.weights is None
    try:
        shares = _shares(attention, captures, batch.rows, batch.length)
        if shares and not torch.compiler.is_compiling():
            _check_shares(attention, shares)
        key = cp.key_of(attention, captures, _asked(cp, q, k, v, options, bool(shares)))
        _check_options(attention, options)
    except Exception as error:
        cp.refuse(attention, error)
    plan = cp.plan_for(attention, captures, key, options["seed"])
    names = tuple(n for n, x in captures.items() if isinstance(x, torch.Tensor))
    plain = {name: x for name, x in captures.items() if name not in names}
    sizes = {name: options[name] for name in (*_WHOLE_SIZES, *_PLACES)}
    if plan.table.group > 1 and sizes["heads"] is None:
        sizes |= {"heads": q.shape[1], "kv_heads": k.shape[1]}
    own = {name: options[name] for name in _OPTIONS}
    job = ShardedJob(
        attention, plan.table, cp.group, {**own, **sizes}, (q.shape[1], k.shape[1]),
        plain, names, shares, has_lse, options["return_lse"],
    )  # fmt: skip
    return job, key, plan


def _check_options(attention: ShardedProgram, options: Mapping[str, Any]) -> None:
    """Refuse options that the program has no meaning for.

    Raises:
        UnsupportedError: A log-sum-exp of weights that are no softmax.
        ArgumentError: Dropout without a seed.
    """
    program = attention.lowered.program
    if options["return_lse"]:
        check_has_lse(program)
    if program.dropout is not None and options["seed"] is None:
        raise ArgumentError(
            "the program has dropout, and each rank would draw a seed of its own",
            hint="pass shard(..., seed=...), and seed=cp.seed(layer) here",
        )


def _asked(
    cp: ContextParallel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Mapping[str, Any],
    shares: bool,
) -> CallShape:
    """Shape and exchange of a call with these operands, for which it is planned.

    Raises:
        ShapeError: They are not this rank's rows.
    """
    rows = cp.now().rows
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[2] != rows:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, and this rank holds {rows} of the "
                f"{cp.now().length} rows of the sequence",
                hint="pass (batch, heads, rows, head dim) of this rank's shard; call shard "
                "for a sequence of another length",
            )
    shape = Shape(
        options["batch"] or q.shape[0], options["heads"] or q.shape[1],
        options["kv_heads"] or k.shape[1], q.shape[3], v.shape[3], q.element_size(),
    )  # fmt: skip
    if options["heads"] is not None or options["batch"] is not None:
        # Costs are those of the part; the mask is that of the whole.
        return CallShape(shape, "gather", shares)
    return CallShape(shape, cp.exchange, shares)


def _options_of(attention: ShardedProgram, named: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of ``named``; the rest of it are captures.

    Raises:
        ArgumentError: One that the plan says.
    """
    for name in _FOLLOWS:
        if name in named:
            raise ArgumentError(
                f"{name} is given to a call of a rank's rows",
                hint=f"drop {name}: the plan says where the rows lie",
            )
    found = {name: named.pop(name, None) for name in (*_OPTIONS, *_WHOLE_SIZES)}
    found |= {name: named.pop(name, 0) for name in _PLACES}
    found["return_lse"] = bool(named.pop("return_lse", False))
    return found


def _shares(
    attention: ShardedProgram, captures: Mapping[str, Any], rows: int, length: int
) -> dict[str, int]:
    """Captured tensors that have this rank's rows alone, and the dim that these lie along."""
    found = {}
    for decl in attention.lowered.program.tensors:
        value = captures.get(decl.name)
        # A size of 1 is that of a tensor that says the same of all rows.
        if not isinstance(value, torch.Tensor) or rows in (1, length):
            continue
        for dim, size in enumerate(decl.dims[: value.dim()]):
            if size.op is Op.SIZE and size.value == "q_len" and value.shape[dim] == rows:
                found[decl.name] = dim
    return found


def _check_shares(attention: ShardedProgram, shares: Mapping[str, int]) -> None:
    """Raise if the mask reads one of ``shares``: all ranks plan from the whole mask.

    Raises:
        ShapeError: It does.
    """
    for name in mask_names(attention):
        if name in shares:
            raise ShapeError(
                f"{name} has this rank's rows alone along dim {shares[name]}, and the mask reads "
                "it",
                hint=f"pass the whole {name}: all ranks plan from the same mask",
            )
