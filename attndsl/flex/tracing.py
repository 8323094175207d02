"""Python ``score_mod`` and ``mask_mod`` functions as programs of the language."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attndsl.attention import Attention
from attndsl.errors import counted
from attndsl.frontend.builtin_functions import NAMES
from attndsl.frontend.prelude import prelude_names
from attndsl.frontend.reserved_names import ALWAYS
from attndsl.ir import SCORE, DType, ParamDecl, Program, TensorDecl, param, size, var
from attndsl.passes.print_ir import print_program

from . import arithmetic as ar
from .closures import ClosureReach, reach, replaced
from .python_spans import refusal_at
from .traced_values import Symbol
from .tracer import Tracer, dim_name, dtype_of

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.int_ranges import Range

Mod = Callable[..., Any]
_KEYWORDS = {
    name
    for method in (Attention.__call__, Attention.tiles, Attention.explain, Attention.plot,
                   Attention.source, Attention.warmup, Attention.to_flex)
    for name in inspect.signature(method).parameters
}  # fmt: skip
"""Names of arguments of calls, which captures, being keywords too, cannot have."""
_WORDS = {"mask", "sink", "weights", "softmax", "dropout", "param", "tensor"}
_RESERVED = ALWAYS | NAMES | _WORDS | _KEYWORDS
_PAIR = tuple(var(name) for name in ("b", "h", "q", "kv"))


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced function; ``str`` of it is the program."""

    text: str
    """The program, which declares all that it captures."""
    captures: Mapping[str, torch.Tensor | int | float]
    """Values of its tensors and params: keywords of a call of the compiled program."""
    stable: bool = field(default=True, repr=False)
    """True if an equal closure with other tensors would give this text again."""
    lengths_used: bool = field(default=False, repr=False)
    """True if the text depends on the lengths that it was traced for."""
    numbers: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Params that were numbers: their places in what the functions reach."""
    makes: bool = field(default=False, repr=False)
    """True if the functions make tensors of numbers, which depends on torch's settings."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """The program, with its captures as a comment."""
        shown = (f"{name} {_described(value)}" for name, value in self.captures.items())
        more = f"# captures: {', '.join(shown)}\n" if self.captures else ""
        return (self.text + more).rstrip("\n")

    def _repr_html_(self) -> str:
        from attndsl import picture  # It takes long to import, and few draw.

        return picture.highlighted(repr(self))


def trace(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Trace:
    """The program that a ``score_mod``, a ``mask_mod`` or both of FlexAttention make.

    Args:
        score_mod: A function of ``(score, b, h, q_idx, kv_idx)``; one of ``(b, h, q_idx, kv_idx)``
            is taken for a ``mask_mod``.
        mask_mod: A function of ``(b, h, q_idx, kv_idx)``.
        dtype: What ``score.dtype`` is to the functions.
        device: What ``score.device`` is to them.

    Returns:
        The program, with the tensors and 0-d tensors that the functions capture. A graph of
        ``torch.compile`` keeps it, and the numbers of closures in it.

    Raises:
        TraceError: What a function does cannot be said of one pair; names its file and line. Or, in
            a graph, a function captures a tensor.

    Example:
        >>> import attndsl
        >>> print(attndsl.trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx), end="")
        mask = kv <= q
    """
    if torch.compiler.is_dynamo_compiling():
        from attndsl.call.compile_graphs import KEPT, keep  # Imports torch.compile.

        given = {"score_mod": score_mod, "mask_mod": mask_mod, "dtype": dtype, "device": device}
        found: Trace = getattr(KEPT, keep(_trace_in_graph, given))
        for mod in (score_mod, mask_mod):
            if mod is not None:
                _followed(mod, dtype, device)
        return found
    if score_mod is not None and mask_mod is None and arguments_of(score_mod) == 4:
        score_mod, mask_mod = None, score_mod
    return trace_mods(score_mod, mask_mod, dtype, torch.device(device), {}, (), None)


def _trace_in_graph(
    score_mod: Mod | None, mask_mod: Mod | None, dtype: torch.dtype, device: torch.device | str
) -> Trace:
    """The trace of functions that are the same in each run of a graph of ``torch.compile``.

    Raises:
        TraceError: A function reads what may change from run to run, which no guard would see.
    """
    for mod in (score_mod, mask_mod):
        if mod is None:
            continue
        found = reach(mod)
        own = [cell.cell_contents for cell in getattr(mod, "__closure__", None) or ()]
        numbers = sum(isinstance(x, int | float) and not isinstance(x, bool) for x in own)
        changing = "a tensor" if found.tensors else "an object or a setting" if found.opaque else ""
        if len(found.numbers) > numbers:
            changing = changing or "a number of a module, a default or another function"
        if changing:
            raise refusal_at(
                getattr(mod, "__code__", None),
                f"within a graph of torch.compile, trace got a function that reads {changing}, "
                "which the graph would keep",
                "trace it before the graph, or give it to attndsl.flex.flex_attention, which "
                "graphs follow",
            )
    return trace(score_mod, mask_mod, dtype=dtype, device=device)


def arguments_of(function: Mod) -> int:
    """Number of positional arguments without a default that ``function`` takes.

    Raises:
        TraceError: It is no function, or takes neither 4 nor 5.
    """
    if not callable(function):
        raise refusal_at(
            None, f"{function!r} is no function", "pass a function of (score, b, h, q_idx, kv_idx)"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise refusal_at(
            None, f"{function!r} does not say what it takes", "wrap it: lambda b, h, q, kv: ..."
        ) from None
    given = [
        p for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    flexible = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(given) not in (4, 5) and not flexible:
        raise refusal_at(
            getattr(function, "__code__", None),
            f"the function takes {counted(len(given), 'argument')}",
            "a score_mod takes (score, b, h, q_idx, kv_idx), a mask_mod (b, h, q_idx, kv_idx)",
        )
    return len(given)


_arguments_in_graph: Any = torch.compiler.assume_constant_result(arguments_of)  # type: ignore[no-untyped-call]


def _followed(mod: Mod, dtype: torch.dtype, device: torch.device | str) -> None:
    """Have Dynamo follow a function, which guards all that it reads: flags, names, other functions.

    Compilers drop what it gives.
    """
    pair = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    if _arguments_in_graph(mod) == 5:
        mod(torch.zeros((), dtype=dtype, device=device), *pair)
    else:
        mod(*pair)


def trace_mods(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Mapping[str, Range],
    varying: tuple[int, ...],
    found: ClosureReach | None,
) -> Trace:
    """Trace both functions into one program.

    Args:
        score_mod: Of five arguments.
        mask_mod: Of four.
        dtype: Of scores.
        device: Of the call.
        lengths: Ranges of the positions, as far as they are known.
        varying: Which of the numbers that the functions reach are to be params.
        found: What they reach, where that is known.

    Raises:
        TraceError: A function cannot be traced.
    """
    mods = (score_mod, mask_mod)
    found = reach(mods) if found is None else found
    names = _CaptureNames(found)
    tracer = Tracer(dtype, device, lengths, names.of_tensor)
    params: dict[int, ParamDecl] = {}
    for place in varying:
        kind = DType.INT if isinstance(found.numbers[place], int) else DType.FLOAT
        params[place] = ParamDecl(names.free(found.number_names[place] or "number"), kind)
    if params:
        mods = replaced(
            mods, {n: Symbol(tracer, param(p.name, p.dtype), None) for n, p in params.items()}
        )
    score, mask = SCORE, None
    if mods[1] is not None:
        mask = _mask(_result(tracer, mods[1], _PAIR, "mask_mod"), mods[1])
    if mods[0] is not None:
        score = _score(_result(tracer, mods[0], (SCORE, *_PAIR), "score_mod"), mods[0])
    return _program(tracer, score, mask, params, found)


def trace_graph(
    mods: Mod,
    pair: Sequence[Node],
    parts: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    lengths: Mapping[str, Range],
    names: Mapping[int, str],
    in_graph: bool = True,
) -> Trace:
    """Trace a function that gives several parts of a program at once.

    Args:
        mods: Takes ``pair``, gives ``parts``.
        pair: What it is called with.
        parts: ``score``, ``mask`` or both, in this order.
        dtype: Of scores.
        device: Of the call.
        lengths: Ranges of the positions, as far as they are known.
        names: What captured tensors are to be called, by id.
        in_graph: Whether the function is a graph of Dynamo's.

    Raises:
        TraceError: The function cannot be traced.
    """
    found = ClosureReach(names=dict(names))
    tracer = Tracer(dtype, device, lengths, _CaptureNames(found).of_tensor, in_graph=in_graph)
    results = tracer.run(mods, pair)
    given = {part: tracer.node(x) for part, x in zip(parts, results, strict=True)}
    score = _score(given["score"], mods) if "score" in given else SCORE
    mask = _mask(given["mask"], mods) if "mask" in given else None
    return _program(tracer, score, mask, {}, found)


def _described(value: torch.Tensor | int | float) -> str:
    """A capture in few words."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _score(node: Node, mod: Mod) -> Node:
    if node.dtype is DType.BOOL:
        raise _wrong(
            mod,
            "the score_mod gives a bool",
            "write torch.where(condition, score, -float('inf')), or pass it as a mask_mod",
        )
    return ar.floating(node)


def _mask(node: Node, mod: Mod) -> Node:
    if node.dtype is not DType.BOOL:
        raise _wrong(mod, f"the mask_mod gives a {node.dtype.value}", "compare it: x != 0")
    return node


def _program(
    tracer: Tracer,
    score: Node,
    mask: Node | None,
    params: Mapping[int, ParamDecl],
    found: ClosureReach,
) -> Trace:
    captures: dict[str, torch.Tensor | int | float] = {}
    declared, tensors = list(params.values()), []
    for place, decl in params.items():
        captures[decl.name] = found.numbers[place]
    for capture in tracer.captures.values():
        captures[capture.name] = capture.tensor
        kind = dtype_of(capture.tensor.dtype)
        if capture.tensor.dim() == 0:
            declared.append(ParamDecl(capture.name, kind))
            continue
        dims = tuple(size(dim_name(capture.name, n)) for n in range(capture.tensor.dim()))
        tensors.append(TensorDecl(capture.name, kind, dims))
    program = Program(
        score=score,
        mask=None if mask is ar.TRUE else mask,
        params=tuple(declared),
        tensors=tuple(tensors),
    )
    known = {id(tensor) for tensor in found.tensors}
    stable = not found.opaque and all(
        capture.made or id(capture.tensor) in known for capture in tracer.captures.values()
    )
    numbers = {decl.name: place for place, decl in params.items()}
    return Trace(
        print_program(program), captures, stable, tracer.lengths_used, numbers, bool(tracer.made)
    )


def _result(tracer: Tracer, mod: Mod, arguments: tuple[Node, ...], what: str) -> Node:
    if arguments_of(mod) not in (len(arguments), 0):
        raise _wrong(mod, f"the {what} takes other arguments", f"it takes {len(arguments)}")
    result = tracer.run(mod, arguments)
    if result is None:
        raise _wrong(mod, f"the {what} gives nothing", "return the new value")
    return tracer.node(result)


def _wrong(mod: Mod, message: str, hint: str) -> Exception:
    return refusal_at(getattr(mod, "__code__", None), message, hint)


class _CaptureNames:
    """Names for captures: the user's own, as far as the language leaves them free."""

    def __init__(self, found: ClosureReach) -> None:
        self.given = found.names
        self.taken: set[str] = set()

    def of_tensor(self, tensor: torch.Tensor) -> str:
        """A name for ``tensor``; its dims' names are taken too."""
        return self.free(self.given.get(id(tensor), "capture"), tensor.dim())

    def free(self, wanted: str, dims: int = 0) -> str:
        """A name like ``wanted`` that nothing has, nor what its ``dims`` are called."""
        stem = re.sub(r"\W", "_", wanted, flags=re.ASCII)
        if not stem or stem[0].isdigit():
            stem = f"capture{stem}"
        # Locals of printed programs are t0, t1, ...
        reserved = stem in _RESERVED or stem in prelude_names() or keyword.iskeyword(stem)
        name = stem = f"{stem}_" if reserved or re.fullmatch(r"t\d+", stem) else stem
        number = 1
        while not self.taken.isdisjoint(own := {name, *(dim_name(name, n) for n in range(dims))}):
            number += 1
            name = f"{stem}{number}"
        self.taken |= own
        return name
