"""``join``: several programs as one, with their names kept apart.

Non-goals: joining within a graph of torch.compile; programs that each have a sink or weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from attndsl.api import Options, compile_source
from attndsl.attention import Attention
from attndsl.call.dispatch import check_backend_name
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.frontend.declare import Absent
from attndsl.frontend.joined_text import JoinPart, join_texts, some_prefixes
from attndsl.runtime.program_store import lowered_at, make_spec, read_spec
from attndsl.settings import read_settings
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.call.attention_base import Made
    from attndsl.runtime.program_store import SpecParts

_Option = TypeVar("_Option", str, bool)


def join(
    *programs: Attention | str,
    prefixes: Sequence[str] | None = None,
    share: Collection[str] = (),
    backend: str | None = None,
    exact: bool | None = None,
    checked: bool | None = None,
) -> Attention:
    """One program that does what all ``programs`` do, in the order given.

    A pair takes part if all masks keep it. Each score line reads the score that the lines before
    it made, those of other programs included. An expression without a name counts as the mask or
    the score that it is. At most one program has a sink, and at most one has weights.

    The result's ``text`` is all of it: declarations made in Python are lines of it, and values of
    bound params stand in it. Tensors given to :func:`attndsl.compile` stay values of the captures.

    Args:
        *programs: Compiled programs, or texts.
        prefixes: One for each program: it is put before the names of the program's params, its
            tensors and the dims that they introduce. Local names and functions get other names by
            themselves, where two programs use one name.
        share: Names of params and tensors that are one capture in all programs that declare them;
            these declare it alike. They get no prefix.
        backend: As for :func:`attndsl.compile`; by default that of the compiled programs.
        exact: The same.
        checked: The same.

    Returns:
        An ordinary compiled program, equal to that of its text.

    Raises:
        ArgumentError: Two programs have a param or tensor of one name that is not shared, or a
            sink or weights each; their options differ; arguments of the wrong kind.
        AttnDSLError: A text has errors, or the programs have some together: a score line of one
            that replaces what another has masked, for instance.
        UnsupportedError: In a graph of ``torch.compile``.

    Example:
        >>> import attndsl
        >>> print(attndsl.join("causal()", "score = softcap(score, 30.0)").text, end="")
        mask = causal()
        <BLANKLINE>
        score = softcap(score, 30.0)
    """
    if torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            "graphs of torch.compile compile no programs",
            hint="call join() outside of the graph, once",
        )
    made = [_made(number, program) for number, program in enumerate(programs, start=1)]
    before = _prefixes(len(programs), prefixes)
    if isinstance(share, str | torch.Tensor) or not (
        isinstance(share, Collection) and all(isinstance(name, str) for name in share)
    ):
        raise ArgumentError("share is no list of names", hint='write share=("doc",)')
    # Texts have no options of their own.
    given = [x for x, program in zip(made, programs, strict=True) if not isinstance(program, str)]
    specs = [read_spec(x.spec) for x in made]
    options = Options(
        _option("backend", backend, [x.backend for x in given], "auto"),
        _option("checked", checked, [x.checked for x in given], read_settings().checked),
        _option("exact", exact, [read_spec(x.spec).exact for x in given], False),
    )
    check_backend_name(options.backend)
    _check_whole(specs)
    pairs = zip(specs, before, strict=True)
    joined = join_texts([JoinPart(x.text, x.declared, x.variant.sink, p) for x, p in pairs], share)
    source = Source(joined.text, "<joined>")
    spec = make_spec(source.text, {}, options.exact)
    lowered_at(spec, source, {})
    values = _values(made, joined.names)
    return Attention(spec, source, options.backend, bool(options.checked), values, True)


def _made(number: int, program: object) -> Made:
    """The parts of one of the programs."""
    if isinstance(program, str):
        program = compile_source(Source(program, f"<program {number}>"), {}, Options())
    if isinstance(program, Attention):
        return program.made_of
    raise ArgumentError(
        f"program {number} is a {type(program).__name__}",
        hint="pass a compiled program or a text; of what trace() found, "
        "attndsl.compile(found.text, **found.captures)",
    )


def _check_whole(specs: Sequence[SpecParts]) -> None:
    """Refuse programs that say by themselves what calls of the joined one could not say."""
    for number, spec in enumerate(specs, start=1):
        absent = [name for name, x in spec.declared.items() if isinstance(x, Absent)]
        if absent or spec.variant.absent or spec.variant.ones:
            name = next(iter(absent or spec.variant.absent), None)
            which = "has tensors of size 1" if name is None else f"leaves out '{name}' for good"
            raise ArgumentError(
                f"program {number} {which}",
                hint="join the program in which all is there, and leave it out at the call",
            )


def _prefixes(count: int, given: object) -> Sequence[str]:
    """A prefix for each of ``count`` programs."""
    if count == 0:
        raise ArgumentError("there is no program to join", hint="pass compiled programs or texts")
    if given is None:
        return [""] * count
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != count:
        raise ArgumentError(
            f"prefixes is no list of {count} prefixes, one for each program",
            hint=f"write prefixes={some_prefixes(count)}",
        )
    for prefix in given:
        if not isinstance(prefix, str) or not f"{prefix}a".isidentifier() or not prefix.isascii():
            raise ArgumentError(
                f"the prefix {prefix!r} begins no name", hint="use letters, digits and '_'"
            )
    return given


def _option(
    name: str, given: _Option | None, found: Sequence[_Option], default: _Option
) -> _Option:
    """The option ``name`` of the result: as given, or that on which all programs agree."""
    if given is not None:
        if not isinstance(given, type(default)):
            raise ArgumentError(
                f"{name} is a {type(given).__name__}", hint=f"pass {name}={default!r}"
            )
        return given
    values = sorted(set(found))
    if len(values) > 1:
        told = " and ".join(map(repr, values))
        raise ArgumentError(
            f"the programs were compiled with {name}={told}",
            hint=f"say which: {name}={values[0]!r}",
        )
    return values[0] if values else default


def _values(made: Sequence[Made], names: Sequence[Mapping[str, str]]) -> dict[str, torch.Tensor]:
    """The tensors that captures have without a call's, by their names in the joined program."""
    found: dict[str, torch.Tensor] = {}
    for each, called in zip(made, names, strict=True):
        for name, value in each.defaults.items():
            if found.setdefault(called[name], value) is not value:
                raise ArgumentError(
                    f"'{name}' is shared, and two programs were compiled with a tensor each for it",
                    hint="compile them with one tensor, or with none and pass it at calls",
                )
    return found
