"""Answers to the page about a program: functions from a request to an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.api import Options, compile_source
from attndsl.call.options import Location
from attndsl.errors import AttnDSLError, ProgramErrors
from attndsl.frontend.format import format_source
from attndsl.inspection.example_captures import make_captures, make_for_picture
from attndsl.ir import DType, leaf_names
from attndsl.passes.print_ir import print_derivative
from attndsl.passes.tiles.plan_text import print_tiles
from attndsl.picture import Frame, picture_data, svg
from attndsl.runtime.program_store import pointing_into
from attndsl.source import Source

from .messages import (
    ABSENT,
    Answer,
    DetailsAnswer,
    HalfType,
    PageRequest,
    ParamField,
    PictureAnswer,
    RequestKind,
    TextAnswer,
    TextProblem,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.api import Attention
    from attndsl.inspection.example_captures import MadeUp
    from attndsl.ir import Program

    from .messages import Number, PictureCall

_BLOCKS = (128, 64)
"""Tiles that loops are shown for: those of ``attndsl show --stage tiles``."""
_HEAD_DIM = 64
"""Head dim of pictures and costs."""
_DTYPES = {
    HalfType.BF16: torch.bfloat16,
    HalfType.FP16: torch.float16,
    HalfType.FP32: torch.float32,
}


def answer(asked: PageRequest) -> Answer:
    """The result of ``asked``, or all that is wrong with its program or its settings.

    Raises nothing for any text: a failure of the compiler is a problem like any other.
    """
    source = Source(asked.text)
    try:
        with pointing_into(source):
            return Answer(result=_WAYS[asked.kind](asked, source))
    except AttnDSLError as error:
        found = error.errors if isinstance(error, ProgramErrors) else (error,)
        return Answer(tuple(problem(each, source) for each in found))
    except MemoryError:
        return Answer((_MEMORY,))
    except RecursionError:
        return Answer((TextProblem("the program nests too deeply", "split it into local names"),))
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            return Answer((_MEMORY,))
        said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return Answer((TextProblem(f"the compiler failed: {said}", "please report this program"),))


_MEMORY = TextProblem("this takes more memory than the page may use", "give shorter lengths")


def problem(error: AttnDSLError, source: Source) -> TextProblem:
    """``error`` for people who look at the text of ``source``."""
    span = error.span
    if span is None:
        return TextProblem(error.message, error.hint)
    place = f"line {span.line}, column {span.column}"
    if span.source.text != source.text:  # Of the prelude.
        return TextProblem(error.message, error.hint, where=f"{span.source.name}, {place}")
    start, end = (_units(source.text[:offset]) for offset in (span.start, span.end))
    return TextProblem(error.message, error.hint, start, end, place)


def _units(text: str) -> int:
    """Units of UTF-16, which browsers count."""
    return len(text) + sum(character > "\uffff" for character in text)


def _picture(asked: PageRequest, source: Source) -> PictureAnswer:
    whole = compile_source(source, {}, Options("reference"))
    attention = _present(whole, asked)
    lowered, view = attention.lowered, asked.view
    given = _given(lowered.program, asked.params)
    frame, raw_score = _frame(view), view.raw_score
    made = make_for_picture(_with_defaults(lowered.program, given), frame.sizes(), view.seed)
    params = {**made.params, **given}
    data = picture_data(
        lowered, frame, tensors=made.tensors, params=params, raw_score=raw_score, title=asked.text
    )
    data = replace(data, made_up=made.what)
    return PictureAnswer(
        svg(data),
        "; ".join([data.place, data.summary, *data.remarks]),
        "" if data.curve is None else data.curve.line,
        made.what,
        _fields(whole.lowered.program, given, made, lowered.program),
        print_derivative(lowered.derivative),
    )


def _details(asked: PageRequest, source: Source) -> DetailsAnswer:
    attention = _present(compile_source(source, {}, Options()), asked)
    lowered, view = attention.lowered, asked.view
    program, trouble, costs, made_up = lowered.program, None, "", ""
    given = _given(program, asked.params)
    try:
        explanation, made_up = _explained(attention, view, given)
        costs = explanation[explanation.rindex(f"\nat {view.cost_len} queries") + 1 :]
    except (AttnDSLError, RuntimeError, MemoryError) as error:
        # What needs no lengths is known all the same.
        explanation = attention.explain(head_dim=_HEAD_DIM)
        trouble = problem(error, source) if isinstance(error, AttnDSLError) else _MEMORY
    return DetailsAnswer(
        loops=print_tiles(lowered.sparsity, *_BLOCKS),
        cost=explanation.partition("\n")[0],
        costs=costs,
        explanation=explanation,
        made_up=made_up,
        cost_problem=trouble,
    )


def _explained(
    attention: Attention, view: PictureCall, given: Mapping[str, Number]
) -> tuple[str, str]:
    """Text of ``explain`` at the lengths of ``view``, and the captures that were made up for it."""
    n, program = view.cost_len, attention.lowered.program
    sizes = {**_frame(view).sizes(), "q_len": n, "kv_len": n}
    read = leaf_names(program.mask)
    # Their numbers alone: tensors of a picture have a few short documents.
    numbers = make_for_picture(replace(program, tensors=()), sizes).params
    known = _with_defaults(program, {**numbers, **given})
    generator = torch.Generator().manual_seed(view.seed)
    captures = make_captures(known, sizes, "cpu", generator, read)
    text = attention.explain(
        q_len=n, kv_len=n, batch=view.batch, heads=view.heads, kv_heads=view.kv_heads,
        head_dim=_HEAD_DIM, captures={**captures, **numbers, **given},
    )  # fmt: skip
    said = [f"{name} = {x!r}" for name, x in numbers.items() if name not in given and name in read]
    said += [f"{name} (random)" for name in captures if name in read]
    return text, ", ".join(said)


def _kernel(asked: PageRequest, source: Source) -> TextAnswer:
    attention = _present(compile_source(source, {}, Options()), asked)
    chosen = asked.kernel
    given = _given(attention.lowered.program, asked.params)
    dtype = _DTYPES[chosen.dtype]
    text = attention.source(
        chosen.direction, backend=chosen.family, head_dim=chosen.head_dim, dtype=dtype,
        captures=given,
    )  # fmt: skip
    return TextAnswer(text)


def _layout(asked: PageRequest, source: Source) -> TextAnswer:
    return TextAnswer(format_source(source.text))


_WAYS: dict[
    RequestKind, Callable[[PageRequest, Source], PictureAnswer | DetailsAnswer | TextAnswer]
] = {
    RequestKind.PICTURE: _picture,
    RequestKind.DETAILS: _details,
    RequestKind.KERNEL: _kernel,
    RequestKind.LAYOUT: _layout,
}


def _frame(view: PictureCall) -> Frame:
    return Frame(
        view.q_len, view.kv_len, view.block_m, view.block_n, view.batch, view.heads, view.kv_heads,
        _HEAD_DIM, view.b, view.h, Location(view.q_offset, view.kv_offset),
    )  # fmt: skip


def _present(attention: Attention, asked: PageRequest) -> Attention:
    """The program without the params that ``asked`` leaves out. All other captures are there."""
    program = attention.lowered.program
    absent = {name for name, value in asked.params.items() if value is None}
    there = [decl.name for decl in program.captures() if decl.optional and decl.name not in absent]
    return attention.variant(dict.fromkeys(there, 0))[0]


def _given(program: Program, params: Mapping[str, Number | None]) -> dict[str, Number]:
    """The ``params`` that the program has: it changes as people type."""
    values = {decl.name: params.get(decl.name) for decl in program.params}
    return {name: value for name, value in values.items() if value is not None}


def _with_defaults(program: Program, values: Mapping[str, Number]) -> Program:
    """``program`` whose params have ``values`` by default: dims of tensors may depend on them."""
    return replace(
        program,
        params=tuple(
            replace(decl, default=values[decl.name]) if decl.name in values else decl
            for decl in program.params
        ),
    )


def _fields(
    program: Program, given: Mapping[str, Number], made: MadeUp, present: Program
) -> tuple[ParamField, ...]:
    there = {decl.name for decl in present.params}
    values = {**made.params, **given}
    return tuple(
        ParamField(
            decl.name,
            decl.dtype.value,
            _written(values.get(decl.name, decl.default), decl.dtype)
            if decl.name in there
            else ABSENT,
            made_up=decl.name in made.params and decl.name not in given,
            optional=decl.optional,
        )
        for decl in program.params
    )


def _written(value: Number | None, dtype: DType) -> str:
    return str(value).lower() if dtype is DType.BOOL else f"{value}"
