"""The public face: ``compile``, ``load``, ``verify`` and ``Attention``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.attention import Attention
from attndsl.config import read_config
from attndsl.errors import ArgumentError
from attndsl.frontend.declare import Bound, ParamSpec, TensorSpec
from attndsl.runtime.arguments import joined
from attndsl.runtime.dispatch import check_backend_name
from attndsl.runtime.location import Location, sizes_of_whole
from attndsl.runtime.parts import localised
from attndsl.runtime.programs import lowered_at, make_spec
from attndsl.runtime.tiles import Verification, verify_call
from attndsl.settings import read_settings
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from attndsl.backends.base import Scalar
    from attndsl.frontend.declare import Declared

__all__ = ["Attention", "compile", "load", "verify"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile programs; as the arguments of :func:`compile`."""

    backend: str = "auto"
    checked: bool | None = None
    exact: bool = False


def compile(  # noqa: A001
    text: str,
    *,
    backend: str = "auto",
    name: str = "<program>",
    checked: bool | None = None,
    exact: bool = False,
    first_line: int = 1,
    **names: Scalar | torch.Tensor | TensorSpec,
) -> Attention:
    """Compile an attention program.

    Args:
        text: The program, in the language of ``docs/language.md``.
        backend: ``auto`` (``hopper`` or ``triton`` on GPUs, ``cpu`` on CPUs), one of these,
            ``short`` or ``reference``.
        name: Name of the text in errors, such as a file's name.
        checked: Whether out-of-range lookups of live pairs are errors (reference backend only);
            by default what ``ATTNDSL_CHECKED`` says.
        exact: Whether functions such as tanh keep their exact forms in half precision on NVIDIA
            GPUs, where hardware has faster ones; ``explain`` lists these and their errors.
        first_line: Line number of the text's first line within ``name``.
        **names: Names that count as declared: a number is a param bound to that value; a tensor is
            a captured tensor (0-d: a param), and its value unless a call gives another;
            ``attndsl.tensor("heads")`` declares one without a value. A param called ``backend``,
            ``name``, ``checked``, ``exact`` or ``first_line`` gets its value in the text
            (``param name: int = 4``), at the call or in a configuration.

    Returns:
        A callable; nothing is compiled for a device before its first call.

    Raises:
        AttnDSLError: All that is wrong with the program; :class:`~attndsl.errors.ProgramErrors`
            where there is more than one error.

    Example:
        >>> import torch, attndsl
        >>> attn = attndsl.compile("causal() and q - kv < window", window=1024)
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> attn(q, k, v).shape
        torch.Size([1, 2, 16, 8])
    """
    if not isinstance(text, str):
        raise ArgumentError(
            f"the program is a {type(text).__name__}", hint="pass the program's text"
        )
    for key, value, kind in (("name", name, str), ("exact", exact, bool)):
        if not isinstance(value, kind):
            raise _no_param(key, value)
    if not (checked is None or isinstance(checked, bool)):
        raise _no_param("checked", checked)
    return compile_source(Source(text, name, first_line), names, Options(backend, checked, exact))


def compile_source(
    source: Source, names: Mapping[str, Scalar | torch.Tensor | Declared], options: Options
) -> Attention:
    """Compile the program of ``source``; ``names`` may be any, those of :func:`compile` included.

    Raises:
        AttnDSLError: All that is wrong with the program, as in :func:`compile`.
    """
    check_backend_name(options.backend)
    declared = {key: _declared(key, value) for key, value in names.items()}
    defaults = {key: value for key, value in names.items() if isinstance(value, torch.Tensor)}
    spec = make_spec(source.text, declared, options.exact)
    lowered_at(spec, source, declared)  # All its errors, at their places.
    checked = read_settings().checked if options.checked is None else options.checked
    return Attention(spec, source, options.backend, checked, defaults)


def load(
    path: str | PathLike[str],
    *,
    backend: str = "auto",
    checked: bool | None = None,
    exact: bool = False,
) -> dict[str, Attention]:
    """Compile all programs of a YAML, TOML or JSON file.

    Args:
        path: The file: a mapping from names to programs, or to ``{program: ..., params: {...}}``.
        backend: As for :func:`compile`.
        checked: As for :func:`compile`.
        exact: As for :func:`compile`.

    Returns:
        The compiled programs by name, in the order of the file.

    Raises:
        ConfigError: The file does not hold programs in that form.
        AttnDSLError: A program has errors; they name the file and the line in it.
    """
    options = Options(backend, checked, exact)
    return {
        entry.name: compile_source(
            Source(entry.text, entry.source_name, entry.first_line), entry.params, options
        )
        for entry in read_config(path)
    }


def verify(
    program: str | Attention,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
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
        batch: Batch entries.
        heads: Query heads.
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
        captures: The program's tensors and params.
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
    call = attention.call_of_lengths(
        given, q_len, kv_len, batch, heads, kv_heads, head_dim, None, location
    )
    lowered, call = localised(attention.lowered, call)
    found = [verify_call(lowered, call, block_m, block_n, d) for d in directions]
    return Verification(
        sum(f.tiles for f in found), sum(f.live for f in found), sum(f.surplus for f in found)
    )


def _no_param(key: str, value: object) -> ArgumentError:
    return ArgumentError(
        f"{key}= is an argument of compile() and no {type(value).__name__}",
        hint=f"give a param '{key}' its value in the text (param {key}: int = 4) or at the call",
    )


def _declared(name: str, value: object) -> Declared:
    if isinstance(value, Bound | TensorSpec):
        return value
    if isinstance(value, bool | int | float):
        return Bound(value)
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
