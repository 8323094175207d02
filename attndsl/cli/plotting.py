"""``attndsl plot``: which pairs and tiles a program keeps, as text or as a picture."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import torch

from attndsl.errors import ArgumentError
from attndsl.ir import DType, Op
from attndsl.picture import check_path, picture_data, text, write
from attndsl.runtime.location import Location

from .captures import check_dim_names, make_captures
from .stages import compile_program
from .usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.frontend.declare import Declared
    from attndsl.ir import Program, TensorDecl

    from .inputs import NamedProgram

_IDS = re.compile(r"doc|seg|ids", re.IGNORECASE)
_RUNS = 4
"""Documents that made-up ids have, so that small pictures show several."""


def plot(
    program: NamedProgram,
    declared: Mapping[str, Declared],
    dims: Mapping[str, int],
    *,
    sizes: Mapping[str, int],
    blocks: tuple[int, int],
    place: tuple[int, int],
    offsets: tuple[int, int],
    raw_score: float,
    seed: int,
    output: str | None,
) -> None:
    """Print the tiles of ``program``, or write a picture to ``output``.

    Args:
        program: The program.
        declared: What the command line declares.
        dims: Sizes of tensors' own dims.
        sizes: Every size of :data:`attndsl.ir.SIZES`.
        blocks: Queries and keys of a tile.
        place: Batch entry and query head.
        offsets: Logical positions of the first query and of the first key.
        raw_score: What raw scores are taken to be.
        seed: Of values that are made up.
        output: File to write; None for text on stdout.

    Raises:
        UsageError: A size, an index or the file's name is of no use.
        AttnDSLError: The program has errors.
    """
    try:
        if output is not None:
            check_path(output)
        # What would run it is of no matter here, and the reference is always there.
        attention = compile_program(program, declared, "reference")
        lowered = attention.lowered
        check_dim_names(lowered.program, dims)
        _check_params(lowered.program)
        tensors = _make_up(lowered.program, {**sizes, **dims}, seed)
        data = picture_data(
            lowered,
            q_len=sizes["q_len"],
            kv_len=sizes["kv_len"],
            batch=sizes["batch"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes["head_dim"],
            block_m=blocks[0],
            block_n=blocks[1],
            b=place[0],
            h=place[1],
            location=Location(*offsets),
            tensors=tensors,
            raw_score=raw_score,
            title=attention.text,
        )
        if output is None:
            print(text(data), end="")
        else:
            write(data, output)
            print(f"wrote {output}")
    except ArgumentError as error:
        raise UsageError(error.message, error.span, error.hint) from error


def _check_params(program: Program) -> None:
    lacking = [param.name for param in program.params if param.default is None]
    if lacking:
        raise UsageError(
            f"no value is given for {', '.join(lacking)}",
            hint="add " + " ".join(f"-p {name}=..." for name in lacking),
        )


def _make_up(program: Program, sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Values for the program's tensors, those of ``attndsl run`` but for ids; says so on stderr."""
    generator = torch.Generator().manual_seed(seed)
    tensors = make_captures(program, sizes, "cpu", generator)
    said = []
    for decl in program.tensors:
        value = tensors[decl.name]
        if _are_ids(decl):
            drawn = torch.randint(0, _RUNS, value.shape, generator=generator, dtype=torch.int32)
            tensors[decl.name] = drawn.sort(-1).values
            said.append(f"{decl.name} (sorted ids)")
        elif decl.dtype is DType.FLOAT:
            said.append(f"{decl.name} (normal numbers)")
        elif decl.dtype is DType.BOOL:
            said.append(f"{decl.name} (fair coins)")
        elif value.numel():
            said.append(f"{decl.name} (ints from {int(value.min())} to {int(value.max())})")
    if said:
        print(f"made up, seed {seed}: {', '.join(said)}", file=sys.stderr)
    return tensors


def _are_ids(decl: TensorDecl) -> bool:
    """Whether ``decl`` numbers documents, by its name or by running along positions."""
    if decl.dtype is not DType.INT or not decl.dims:
        return False
    last = decl.dims[-1]
    by_position = last.op is Op.SIZE and last.value in ("q_len", "kv_len")
    return by_position or _IDS.search(decl.name) is not None
