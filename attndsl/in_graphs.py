"""Calls of a compiled program while Dynamo makes a graph of ``torch.compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.compiled import Compiled, is_deterministic
from attndsl.errors import AttnDSLError
from attndsl.runtime.bind import CallOptions, bind
from attndsl.runtime.location import Location
from attndsl.runtime.variants import sizes_of_operands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from attndsl.compiled import Captures

    Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    Results = tuple[torch.Tensor, torch.Tensor]


class InGraphs(Compiled):
    """The part of :class:`~attndsl.Attention` that Dynamo sees.

    Dynamo leaves a guard for each name and function that it meets, and each call of the graph looks
    at all guards. So it sees as little as can be: see M53 in docs/measured.md.
    """

    __slots__ = ()

    def _at_once(
        self, operands: Operands, captures: Mapping[str, Any], numbers: tuple[Any, ...],
        output: tuple[torch.dtype | None, bool],
    ) -> torch.Tensor | Results | None:  # fmt: skip
        """A call whose checks are made while Dynamo looks away; None of one that it has to follow.

        That is a call of which all but the elements of tensors is known while the graph is made.

        Args:
            operands: q, k and v.
            captures: The call's.
            numbers: The scale, the seed, whether to be deterministic, and where the call lies in a
                larger one, as of :class:`Location`.
            output: The dtype of the output, and whether lse is asked for.
        """
        from attndsl.runtime.graph import FORWARD, constant_kinds  # Imports torch.compile.

        given = {}
        for name, x in captures.items():
            if x is not None:
                given[name] = x
            elif name not in self._optional:
                return None  # It is refused where it is followed.
        kinds = constant_kinds([*operands, *given.values()], numbers)
        if kinds is None:
            return None
        request = self._spec, self._backend, self._checked
        found = self._constants(request, kinds, [*given], numbers, output)
        if found is None:
            return None
        dtypes, names, what, ints, floats = found
        cast = [
            x if x.dtype is dtype else x.to(dtype)
            for x, dtype in zip(operands, dtypes, strict=True)
        ]
        made: Results = FORWARD([*cast, *[given[name] for name in names]], what, [*ints], [*floats])
        return made if output[1] else made[0]

    def _constants(
        self, request: tuple[Any, ...], kinds: Sequence[tuple[Any, ...]], names: Sequence[str],
        numbers: tuple[Any, ...], output: tuple[torch.dtype | None, bool],
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """What :func:`attndsl.runtime.graph.arguments_of` finds while a graph is made.

        This runs while a graph is made, and no graph holds it. ``request`` is what this program
        depends on: Dynamo guards what it reads for an argument.
        """
        from attndsl.runtime.graph import Constants, arguments_of, stand_ins

        scale, seed, deterministic, *place = numbers
        seed = 0 if seed is None else seed
        options = CallOptions(scale, seed, is_deterministic(deterministic), output[0])
        known = Constants(kinds, names, Location(*place), options, output[1])
        made = stand_ins(known)
        if made is None:
            return None
        captures = dict(zip(names, made[3:], strict=True))
        try:
            own, _ = self.variant(captures, sizes_of_operands(made[0], made[1]), known.location)
            return arguments_of(own._request, own._lowered.program, made, known)
        except AttnDSLError:  # Dynamo follows the call to where it is raised.
            return None

    # torch.compiler.assume_constant_result does the same, and takes seconds to import.
    _constants._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _followed(
        self, operands: Operands, captures: Captures, location: Location, options: CallOptions,
        return_lse: bool,
    ) -> torch.Tensor | Results:  # fmt: skip
        """A call that is checked by operations which a graph, or a tracer, may follow.

        Args:
            operands: q, k and v.
            captures: All captures.
            location: Where the call lies in a larger one.
            options: The rest.
            return_lse: Whether lse is asked for.
        """
        from attndsl.runtime.graph import attend_in_graph  # Imports torch.compile.

        own, captures = self.variant(captures, sizes_of_operands(*operands[:2]), location)
        call = bind(own._lowered.program, operands, captures, location, options)
        found = attend_in_graph(own._request, call, options.scale)
        return found if return_lse else found[0]
