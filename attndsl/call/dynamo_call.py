"""Calls of a compiled program while Dynamo makes a graph of ``torch.compile``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.log_sum import public_lse
from attndsl.errors import AttnDSLError, UnsupportedError

from .argument_checks import autocast
from .attention_base import Compiled
from .bind import bind
from .dropout_seed import draw_seed
from .optional_captures import sizes_of_operands
from .options import CALL_ARGUMENTS, options_in
from .prepared import check_has_lse
from .torch_ops import tell_counters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    Results = tuple[torch.Tensor, torch.Tensor]


class InGraphs(Compiled):
    """The part of :class:`~attndsl.Attention` that Dynamo sees.

    Dynamo leaves a guard for each name and function that it meets, and each call of the graph looks
    at all guards. So it sees as little as can be: see M53 in docs/dev/measured.md.
    """

    __slots__ = ()

    def _at_once(
        self, operands: Operands, given: Mapping[str, Any]
    ) -> torch.Tensor | Results | None:
        """A call whose checks are made while Dynamo looks away; None of one that it has to follow.

        That is a call of which all but the elements of tensors is known while the graph is made.

        Args:
            operands: q, k and v.
            given: The call's keywords.
        """
        from .compile_graphs import FORWARD, constant_kinds  # Imports torch.compile.

        tensors, numbers, absent = {}, {}, []
        for name, x in given.items():
            if name != "captures":
                if x is None or isinstance(x, (int, float, torch.dtype)):
                    numbers[name] = x
                else:
                    tensors[name] = x
        by_keyword = [*tensors]
        captures = given.get("captures")
        if captures is not None and not isinstance(captures, dict):
            return None
        for name, x in () if captures is None else captures.items():
            if name in given:
                return None  # It is refused where it is followed.
            if x is None:
                absent.append(name)
            else:
                tensors[name] = x
        kinds = constant_kinds([*operands, *tensors.values()], numbers.values())
        if kinds is None:
            return None
        found = self._constants(self._in_graphs, kinds, ([*tensors], by_keyword, absent), numbers)
        if found is None:
            return None
        (of_q, of_k, of_v), names, what, ints, floats, has_lse = found
        q, k, v = operands
        made: Results = FORWARD(
            [
                q if q.dtype is of_q else q.to(of_q),
                k if k.dtype is of_k else k.to(of_k),
                v if v.dtype is of_v else v.to(of_v),
                *[tensors[name] for name in names],
            ],
            what, [*ints], [*floats],
        )  # fmt: skip
        out, lse = made
        return (out, public_lse(lse)) if has_lse else out

    def _constants(
        self, own: str, kinds: Sequence[tuple[Any, ...]], names: tuple[Sequence[str], ...],
        numbers: Mapping[str, Any],
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """Result of :func:`.compile_graphs.arguments_of`, and True if the call returns lse.

        This runs while a graph is made, and no graph holds it.

        Args:
            own: What this program depends on: Dynamo guards what it reads for an argument.
            kinds: See :func:`.compile_graphs.constant_kinds`.
            names: Of the tensors among keywords and captures, of those that are keywords, and of
                captures that are None.
            numbers: All other keywords.
        """
        from .compile_graphs import Constants, arguments_of, stand_ins

        captured, by_keyword, absent = names
        options = {name: x for name, x in numbers.items() if name in CALL_ARGUMENTS}
        others = {name: x for name, x in numbers.items() if name not in CALL_ARGUMENTS}
        if (
            not CALL_ARGUMENTS.isdisjoint(by_keyword) or options.get("tiles") is not None
            or any(x is not None for x in others.values())
            or not {*absent, *others}.issubset(self._optional)
        ):  # fmt: skip
            return None  # Params, tiles, positions in tensors, or what the call refuses.
        how, location = options_in(options)
        has_lse = bool(how.return_lse)
        known = Constants(kinds, captured, location, how, has_lse)
        made = stand_ins(known)
        if made is None:
            return None
        tensors = dict(zip(captured, made[3:], strict=True))
        try:
            variant, _ = self.variant(tensors, sizes_of_operands(made[0], made[1]), known.location)
            found = arguments_of(variant._request, variant._lowered.program, made, known)
        except AttnDSLError:  # Dynamo follows the call to where it is raised.
            return None
        return None if found is None else (*found, has_lse)

    # torch.compiler.assume_constant_result does the same, and takes seconds to import.
    _constants._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _followed(self, operands: Operands, given: dict[str, Any]) -> torch.Tensor | Results:
        """A call that is checked by operations which a graph, or a tracer, may follow.

        Args:
            operands: q, k and v.
            given: The call's keywords.

        Raises:
            UnsupportedError: It has ``out``: graphs write nothing in place.
        """
        from .compile_graphs import attend_in_graph  # Imports torch.compile.

        how, location = options_in(given)
        if how.out is not None:
            raise UnsupportedError(
                "graphs of torch.compile have no out", hint="copy the result: out.copy_(...)"
            )
        if how.return_lse:
            check_has_lse(self._lowered.program)
        if not torch.compiler.is_compiling():  # Counters see the operator before it runs.
            tell_counters()
        q, k, v = operands
        operands = autocast(q), autocast(k), autocast(v)
        own, captures = self.variant(
            self._captures_of(given), sizes_of_operands(*operands[:2]), location
        )
        if how.seed is None and own._lowered.program.dropout is not None:
            how = replace(how, seed=draw_seed(q.device))
        elif isinstance(how.seed, torch.Tensor):
            how = replace(how, seed=how.seed.clone())  # The backward reads it again.
        call = bind(own._lowered.program, operands, captures, location, how)
        found = attend_in_graph(own._request, call, how.scale)
        return found if how.return_lse else found[0]
