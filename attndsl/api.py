"""The public functions ``compile``, ``load`` and ``verify``, which make and check programs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from attndsl.attention import Attention
from attndsl.building.warmup import warm_up_programs
from attndsl.call.argument_checks import joined
from attndsl.call.call_slice import sizes_of_whole
from attndsl.call.call_warnings import tell
from attndsl.call.dispatch import check_backend_name
from attndsl.call.meta_call import AskedSizes
from attndsl.call.options import Location
from attndsl.call.sub_calls import localised
from attndsl.config import read_config
from attndsl.errors import ArgumentError, AttnDSLError, ProgramErrors, UnsupportedError, flatten
from attndsl.foundation.scalars import as_number
from attndsl.frontend.declare import Absent, Bound, ParamSpec, TensorSpec
from attndsl.frontend.program_imports import expand
from attndsl.inspection.tile_search import Verification, verify_call
from attndsl.runtime.program_store import lowered_at, make_spec, warnings_at
from attndsl.settings import read_settings
from attndsl.source import NAME_LENGTH, Source, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from attndsl.backends.base import Scalar
    from attndsl.frontend.declare import Declared

__all__ = ["Attention", "compile", "load", "verify"]


_PATH = re.compile(r"\s*[^\s()=<>#\[\]]+\.(ya?ml|toml|json|attn)\s*")
"""Matches a file path passed where program text is expected."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of compiling programs, as in the arguments of :func:`compile`."""

    backend: str = "auto"
    checked: bool | None = None
    exact: bool = False
    warns: bool = False
    """True to warn about probably unintended programs and calls: a person wrote the program."""


class Programs(dict[str, Attention]):
    """Programs by name: a dict that notebooks show as a table."""

    def _repr_html_(self) -> str:
        from attndsl import picture  # It takes long to import, and few draw.

        return picture.table_html({name: program._described for name, program in self.items()})


def compile(  # noqa: A001
    text: str,
    *,
    backend: str = "auto",
    name: str = "<program>",
    checked: bool | None = None,
    exact: bool = False,
    first_line: int = 1,
    params: Mapping[str, Scalar | torch.Tensor | None] | None = None,
    tensors: Mapping[str, torch.Tensor | TensorSpec | None] | None = None,
    **names: Scalar | torch.Tensor | TensorSpec | None,
) -> Attention:
    """Compile an attention program.

    Args:
        text: The program, in the language of ``docs/language.md``.
        backend: ``auto`` (the best kernels for the device), ``hopper``, ``triton``, ``short``,
            ``decode``, ``cpu`` or ``reference``.
        name: Name of the text in errors, such as a file's name. If it is not that of a file, it is
            the program's name in profiles and logs too.
        checked: Whether out-of-range lookups of live pairs are errors (reference backend only);
            by default what ``ATTNDSL_CHECKED`` says.
        exact: Whether functions such as tanh keep their exact forms in half precision on NVIDIA
            GPUs, where hardware has faster ones; ``explain`` lists these and their errors.
        first_line: Line number of the text's first line within ``name``.
        params: Params by name, which count as declared. A number is bound to the param: folded into
            the program. For an int param a whole float is an int. A 0-d tensor is the param's
            value unless a call gives another. None leaves out what the program declares with
            ``= none``, for good.
        tensors: Captured tensors by name, which count as declared. A tensor is also the value
            unless a call gives another; ``attndsl.tensor("heads")`` declares one without a value.
        **names: Params and tensors by keyword. Those called like an argument of this function
            stand in the mappings.

    Returns:
        A callable; nothing is compiled for a device before its first call.

    Raises:
        AttnDSLError: All that is wrong with the program; :class:`~attndsl.errors.ProgramErrors`
            where there is more than one error.

    Warns:
        ProgramWarning: A name that nothing reads, a mask that is the same for all pairs, an empty
            text, a score line that does not read the score. Later calls warn of a shape that looks
            like (batch, length, heads, dim), and of ``causal()`` with lengths that differ and no
            offset.

    Example:
        >>> import torch, attndsl
        >>> attn = attndsl.compile("causal() and q - kv < window", window=1024)
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> attn(q, k, v).shape
        torch.Size([1, 2, 16, 8])
    """
    if torch.compiler.is_dynamo_compiling():
        return _compiled_in_graph(
            {"text": text, "backend": backend, "name": name, "checked": checked, "exact": exact,
             "first_line": first_line, "params": params, "tensors": tensors, "names": names}
        )  # fmt: skip
    if not isinstance(text, str) or _PATH.fullmatch(text):
        raise _no_program(text)
    for key, value, kind in (("name", name, str), ("exact", exact, bool)):
        if not isinstance(value, kind):
            raise _no_param(key, value)
    if not (checked is None or isinstance(checked, bool)):
        raise _no_param("checked", checked)
    given = _names(params, tensors, names)
    return compile_source(
        Source(text, name, first_line), given, Options(backend, checked, exact, True)
    )


def _no_program(given: object) -> ArgumentError:
    """Error for a value passed in place of a program's text."""
    what, hint = f"a {type(given).__name__}", "pass the program's text"
    if isinstance(given, FunctionType):
        hint = "attndsl.trace(function) makes a program of a score_mod or mask_mod"
    elif isinstance(given, str | os.PathLike):
        hint = "attndsl.load(path) reads files; compile() takes the text itself"
        what = f"{shorten(str(given), NAME_LENGTH)!r}, which looks like a file"
    return ArgumentError(f"the program is {what}", hint=hint)


def _compiled_in_graph(arguments: dict[str, Any]) -> Attention:
    """Compile a program from constants of a graph of ``torch.compile``, and keep it for the graph.

    Raises:
        UnsupportedError: A tensor is among them.
    """
    from attndsl.call.compile_graphs import KEPT, constant, keep  # Imports torch.compile.

    constants = dict(arguments)
    for argument in ("names", "params", "tensors"):
        given = arguments[argument] or {}
        for key, value in given.items():
            if isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"graphs of torch.compile compile no program that keeps a tensor, and {key} is "
                    "one",
                    hint=f"declare it in the text, as 'tensor {key}[...]: float', and give it to "
                    "the call",
                )
        constants[argument] = {key: constant(value) for key, value in given.items()}
    found: Attention = getattr(KEPT, keep(_compile, constants))
    return found


def _compile(names: Mapping[str, Any], **arguments: Any) -> Attention:
    """:func:`compile`, whose keywords may be called like its arguments."""
    return compile(**arguments, **names)


def compile_source(
    source: Source, names: Mapping[str, Scalar | torch.Tensor | Declared | None], options: Options
) -> Attention:
    """Compile the program of ``source``; ``names`` may be any, those of :func:`compile` included.

    Raises:
        AttnDSLError: All that is wrong with the program, as in :func:`compile`.
    """
    check_backend_name(options.backend)
    source = expand(source)
    declared = {key: _declared(key, value) for key, value in names.items()}
    defaults = {key: value for key, value in names.items() if isinstance(value, torch.Tensor)}
    spec = make_spec(source.text, declared, options.exact)
    lowered_at(spec, source, declared)  # All its errors, at their places.
    if options.warns:
        tell(warnings_at(spec, source))
    checked = read_settings().checked if options.checked is None else options.checked
    return Attention(spec, source, options.backend, checked, defaults, options.warns)


def load(
    path: str | PathLike[str] | Mapping[str, Any],
    *,
    key: str | None = None,
    backend: str = "auto",
    checked: bool | None = None,
    exact: bool = False,
    warmup: Mapping[str, Any] | None = None,
) -> dict[str, Attention]:
    """Compile all programs of a YAML, TOML or JSON file or of a mapping, or that of a program file.

    Args:
        path: The file, or what it would hold: a mapping from names to programs, or to
            ``{program: ..., params: {...}, description: ...}``. Any Mapping will do, such as a
            config of OmegaConf, whose interpolations are resolved. A program file (``local.attn``)
            holds one program, which has its name (``local``). Programs may import program files in
            the folder of the file, or below it.
        key: Where in it the programs stand, if they stand in a larger configuration:
            ``model.attention``. The rest may be anything. A name with a dot in it stands in quotes.
        backend: As for :func:`compile`.
        checked: As for :func:`compile`.
        exact: As for :func:`compile`.
        warmup: The arguments of a call, ``{"q": q, "k": k, "v": v}`` and more, for which all
            programs have their kernels when this returns. They are compiled side by side, those of
            the backward too if an input requires a gradient. ``"captures"`` may hold the captures
            of all programs: each takes its own.

    Returns:
        The compiled programs by name, in the order of the file.

    Raises:
        ConfigError: The file does not hold programs in that form, or nothing stands at ``key``.
        ArgumentError: ``path`` or ``key`` is of another type; ``warmup`` does not hold a call's
            arguments.
        AttnDSLError: Programs have errors, all of which come at once
            (:class:`~attndsl.errors.ProgramErrors`); they name the file and the line in it. Or a
            program refuses the call of ``warmup``.
    """
    check_backend_name(backend)
    options = Options(backend, checked, exact, True)
    programs = Programs()
    errors: list[AttnDSLError] = []
    for entry in read_config(path, key):
        try:
            programs[entry.name] = compile_source(entry.source, entry.params, options)
        except AttnDSLError as error:
            errors += flatten(error)
    if errors:
        raise ProgramErrors(errors) if len(errors) > 1 else errors[0]
    if warmup is not None:
        warm_up_programs(programs, warmup)
    return programs


def verify(
    program: str | Attention,
    q_len: int,
    kv_len: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 64,
    block_m: int = 128,
    block_n: int = 64,
    directions: Sequence[str] = ("forward", "backward_q", "backward_kv"),
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    q_index: torch.Tensor | None = None,
    kv_index: torch.Tensor | None = None,
    whole_sizes: Mapping[str, int] | None = None,
    h_offset: int = 0,
    b_offset: int = 0,
    kv_lengths: torch.Tensor | None = None,
    captures: Mapping[str, Scalar | torch.Tensor] | None = None,
    **names: Scalar | torch.Tensor,
) -> Verification:
    """Check a program's tiles against its mask, pair by pair, at given lengths.

    Args:
        program: The text, or a compiled program.
        q_len: Number of queries.
        kv_len: Number of keys.
        batch: Batch entries; those of the captures by default, or 1.
        heads: Query heads, likewise.
        kv_heads: Key-value heads; ``heads`` by default.
        head_dim: For masks that mention it.
        block_m: Query rows of a tile.
        block_n: Key rows of a tile.
        directions: Which loops: ``forward``, ``backward_q``, ``backward_kv``.
        q_offset: As for a call, like the three that follow.
        kv_offset: Logical position of the first key.
        q_index: (q_len,) logical positions of the queries.
        kv_index: (kv_len,) logical positions of the keys.
        whole_sizes: As for :meth:`Attention.tiles`, like the three that follow.
        h_offset: Number in the whole of the first query head.
        b_offset: Number in the whole of the first batch entry.
        kv_lengths: (batch,) numbers of keys.
        captures: The program's tensors and params; those that the mask does not mention may be
            left out.
        **names: The same, by keywords.

    Returns:
        How much was compared, over all directions; ``print`` shows it.

    Raises:
        PlanError: The kind of a tile contradicts the mask.
        UnsupportedError: The mask depends on the score.
    """
    given = joined(captures, names)
    if isinstance(program, Attention):
        attention = program
    else:
        attention = compile_source(Source(program, "<program>"), given, Options())
        given = {}
    location = Location(
        q_offset, kv_offset, q_index, kv_index, h_offset=h_offset, b_offset=b_offset,
        kv_lengths=kv_lengths, **sizes_of_whole(whole_sizes),
    )  # fmt: skip
    sizes = AskedSizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
    lowered, call = localised(*attention.call_of_mask(given, sizes, location))
    found = [verify_call(lowered, call, block_m, block_n, d) for d in directions]
    return Verification(
        sum(f.tiles for f in found), sum(f.live for f in found), sum(f.surplus for f in found)
    )


def _names(
    params: Mapping[str, object] | None,
    tensors: Mapping[str, object] | None,
    named: Mapping[str, object],
) -> dict[str, Any]:
    """The names that :func:`compile` got, in whichever way.

    Raises:
        ArgumentError: ``params`` or ``tensors`` is no mapping from names, or holds what the other
            one is for; a name is given twice.
    """
    for argument, given in (("params", params), ("tensors", tensors)):
        if given is None:
            continue
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ArgumentError(
                f"{argument} is a {type(given).__name__} that is no mapping from names",
                hint=f'pass {argument}={{"name": ...}}; one called {argument} stands in it too',
            )
        for name, value in given.items():
            if value is None:
                continue
            has_dims = isinstance(value, TensorSpec) or (
                isinstance(value, torch.Tensor) and value.dim() > 0
            )
            if has_dims is not (argument == "tensors"):
                raise ArgumentError(
                    f"{name} in {argument} is a {type(value).__name__}"
                    + (" with dims" if has_dims else ""),
                    hint="pass numbers and 0-d tensors in params, and tensors with dims and "
                    "attndsl.tensor(...) in tensors",
                )
    params, tensors = params or {}, tensors or {}
    found = {**params, **tensors, **named}
    twice = [n for n in found if (n in params) + (n in tensors) + (n in named) > 1]
    if twice:
        raise ArgumentError(
            f"{', '.join(twice)} is given twice: by keyword, in params or in tensors",
            hint="keep one of them",
        )
    return found


def _no_param(key: str, value: object) -> ArgumentError:
    return ArgumentError(
        f"{key}= is an argument of compile() and no {type(value).__name__}",
        hint=f"give a param '{key}' its value by params={{'{key}': ...}}",
    )


def _declared(name: str, value: object) -> Declared:
    if isinstance(value, Bound | Absent | TensorSpec):
        return value
    if value is None:
        return Absent()
    number = as_number(value)
    if type(number) is int:
        # One that does not fit 64 bits is refused at its place; Python writes no longer ones.
        return Bound(max(-1 << 64, min(number, 1 << 64)))
    if number is not None:
        return Bound(number)
    if isinstance(value, torch.Tensor):
        kind = (
            "float" if value.is_floating_point() else "bool" if value.dtype is torch.bool else "int"
        )
        if value.dim() == 0:
            return ParamSpec(kind)
        return TensorSpec(tuple(f"{name}_dim{dim}" for dim in range(value.dim())), kind)
    raise ArgumentError(
        f"{name} is a {type(value).__name__}",
        hint="pass a number, a tensor or attndsl.tensor('heads')",
    )
