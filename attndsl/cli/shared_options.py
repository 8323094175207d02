"""Arguments and options that several commands have, with their checks and completions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from attndsl.config import key_parts
from attndsl.errors import AttnDSLError, visible

from .file_arguments import is_pattern

if TYPE_CHECKING:
    from collections.abc import Callable


def _file(value: str) -> str:
    if value == "-":
        return value
    if not os.path.exists(value):
        raise typer.BadParameter(f"there is no file '{visible(value)}'")
    if os.path.isdir(value):
        raise typer.BadParameter(f"'{visible(value)}' is a folder")
    return value


def optional_file(value: str | None) -> str | None:
    """Refuse a path that is given and is no file."""
    return None if value is None else _file(value)


def _paths(values: list[str]) -> list[str]:
    return [v if os.path.isdir(v) or is_pattern(v) else _file(v) for v in values]


def files(values: list[str]) -> list[str]:
    """Refuse paths that are no files."""
    return [_file(value) for value in values]


def _key(value: str | None) -> str | None:
    try:
        if value is not None:
            key_parts(value)
    except AttnDSLError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from None
    return value


DTYPES = ("fp16", "bf16", "fp32", "fp64")
BACKENDS = ("auto", "reference", "cpu", "triton", "hopper", "short", "decode")


def _among(*names: str) -> Callable[[str], list[str]]:
    """Completions of a word that is one of ``names``."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def names_of_stages(incomplete: str) -> list[str]:
    """Completions of a stage."""
    from .show_command import STAGES

    return [name for name in ("list", *STAGES) if name.startswith(incomplete)]


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        callback=_paths,
        help="Program files (*.attn), configurations (*.yaml, *.toml, *.json), folders, patterns, "
        "or - for stdin.",
    ),
]
ProgramPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        callback=_paths,
        help="Program files (*.attn), folders and patterns of them, or - for stdin.",
    ),
]
File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", callback=_file, help="A program file, a configuration, or - for stdin."
    ),
]
Rows = Annotated[int | None, typer.Option(min=1, help="256 by default; 1 with --decode.")]
Decode = Annotated[
    bool, typer.Option("--decode", help="The rows are the last ones of a cache with kv_len keys.")
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...", help="Keys of each batch entry, with --decode; kv_len is the room."
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="Which program of a configuration.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        callback=_key,
        help="Where the programs stand in a larger configuration, such as model.attention.",
    ),
]
Params = Annotated[
    list[str], typer.Option("-p", "--param", metavar="NAME=VALUE", help="Bind a param.")
]
Tensors = Annotated[
    list[str],
    typer.Option("-t", "--tensor", metavar="'NAME[DIM, ...]: TYPE'", help="Declare a tensor."),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="No fast forms of functions; explain says which there are.")
]
Count = Annotated[int, typer.Option(min=1)]
KvHeads = Annotated[int | None, typer.Option(min=1, help="As --heads.")]
KvLen = Annotated[int | None, typer.Option(min=1, help="As --q-len.")]
ValueDim = Annotated[int | None, typer.Option(min=1, help="As --head-dim.")]
Dims = Annotated[
    list[str],
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of a tensor's own dim; by default 64 for rows of dot, kv_len for others.",
    ),
]
DType = Annotated[
    str, typer.Option(help="fp16, bf16, fp32 or fp64.", autocompletion=_among(*DTYPES))
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Backend = Annotated[
    str, typer.Option(help="auto, or a name that doctor lists.", autocompletion=_among(*BACKENDS))
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
