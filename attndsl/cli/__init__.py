"""The command ``attndsl``. Each command imports what it needs when it runs: ``check`` stays quick.

Exit codes: 0 fine, 1 something is wrong with a program (or a result, or its output cannot be
written), 2 wrong use of the command.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from attndsl import __version__
from attndsl.errors import AttnDSLError, visible

from .usage import UsageError

app = typer.Typer(
    name="attndsl",
    help="Attention variants as text: check, format, look into, time and verify programs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="The kernel cache on disk.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")


def _file(value: str) -> str:
    if value == "-":
        return value
    if not os.path.exists(value):
        raise typer.BadParameter(f"there is no file '{visible(value)}'")
    if os.path.isdir(value):
        raise typer.BadParameter(f"'{visible(value)}' is a folder")
    return value


def _files(values: list[str]) -> list[str]:
    return [_file(value) for value in values]


def _version(value: bool) -> None:
    if value:
        print(f"attndsl {__version__}")
        raise typer.Exit


Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...",
        callback=_files,
        help="Program files (*.attn), configurations (*.yaml, *.toml, *.json), or - for stdin.",
    ),
]
File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", callback=_file, help="A program file, a configuration, or - for stdin."
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="Which program of a configuration.")]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Attention variants as text: check, format, look into, time and verify programs."""


@app.command()
def check(files: Files, param: Params = [], tensor: Tensors = [], json: Json = False) -> None:  # noqa: B006
    """Report all errors of programs."""
    from .checking import check as work
    from .inputs import read_declarations

    raise typer.Exit(work(files, read_declarations(param, tensor), json))


@app.command()
def fmt(
    files: Files,
    check: Annotated[bool, typer.Option("--check", help="Only say what would change.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Only show what would change.")] = False,
) -> None:
    """Format program files in place (stdin: to stdout)."""
    from .formatting import format_files

    raise typer.Exit(format_files(files, check, diff))


@app.command()
def explain(
    file: File,
    name: Name = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="Where it would run.")] = "cpu",
    backend: Annotated[
        str, typer.Option(help="auto, reference, cpu, triton, hopper or short.")
    ] = "auto",
    exact: Exact = False,
    q_len: Annotated[int | None, typer.Option(min=0, help="What this many queries cost.")] = None,
    kv_len: Annotated[int | None, typer.Option(min=0, help="Keys; --q-len by default.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Of q, k and v.")] = 64,
) -> None:
    """Say what the compiler makes of a program, and what it costs at given lengths."""
    from .inputs import read_declarations, read_program
    from .stages import explain_program

    program = read_program(file, name)
    length = kv_len if q_len is None else q_len
    lengths = None if length is None else (length, length if kv_len is None else kv_len)
    declared = read_declarations(param, tensor)
    print(explain_program(program, declared, device, backend, lengths, exact, head_dim))


@app.command()
def show(
    file: File,
    stage: Annotated[str, typer.Option(help="What to print; --stage list names them.")] = "split",
    name: Name = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    head_dim: Annotated[int, typer.Option(min=1, help="Of kernel sources.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of kernel sources: fp16, bf16, fp32.")] = "bf16",
    backend: Annotated[
        str, typer.Option(help="Of kernel sources: triton, hopper, short.")
    ] = "triton",
    exact: Exact = False,
) -> None:
    """Print a stage of compilation, from the surface tree to the kernels."""
    from .inputs import read_declarations, read_program
    from .stages import list_stages, show_stage

    if stage == "list":
        print(list_stages())
        return
    program = read_program(file, name)
    declared = read_declarations(param, tensor)
    print(show_stage(program, declared, stage, head_dim, dtype, exact, backend))


@app.command()
def run(
    file: File,
    name: Name = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="As --heads.")] = None,
    q_len: Annotated[int, typer.Option(min=1)] = 256,
    kv_len: Annotated[int | None, typer.Option(min=1, help="As --q-len.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    value_dim: Annotated[int | None, typer.Option(min=1, help="As --head-dim.")] = None,
    dim: Annotated[
        list[str],
        typer.Option(metavar="NAME=SIZE", help="Size of a tensor's own dim; kv_len if not given."),
    ] = [],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    backend: Annotated[str, typer.Option(help="auto, or a name that doctor lists.")] = "auto",
    exact: Exact = False,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients too.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the reference.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Json = False,
) -> None:
    """Time a program on random inputs and hold it to the reference."""
    from .inputs import read_declarations, read_program, read_sizes
    from .running import Shapes
    from .running import run as work

    program = read_program(file, name)
    shapes = Shapes(
        batch, heads, kv_heads or heads, q_len, kv_len or q_len, head_dim, value_dim or head_dim,
        dtype, device,
    )  # fmt: skip
    dims = read_sizes(dim)
    raise typer.Exit(
        work(
            program,
            read_declarations(param, tensor),
            shapes,
            dims,
            backend=backend,
            exact=exact,
            backward=backward,
            check=check,
            seed=seed,
            as_json=json,
        )
    )


@app.command()
def plot(
    file: File,
    name: Name = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    q_len: Annotated[int, typer.Option(min=1, max=4096)] = 64,
    kv_len: Annotated[int | None, typer.Option(min=1, max=4096, help="As --q-len.")] = None,
    block_m: Annotated[int, typer.Option(min=1, help="Queries of a tile.")] = 16,
    block_n: Annotated[int, typer.Option(min=1, help="Keys of a tile.")] = 16,
    batch: Annotated[int | None, typer.Option(min=1, help="--batch-entry + 1.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="As --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dim: Annotated[
        list[str],
        typer.Option(metavar="NAME=SIZE", help="Size of a tensor's own dim; kv_len if not given."),
    ] = [],  # noqa: B006
    batch_entry: Annotated[int, typer.Option(min=0, help="Which to show.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="Which to show.")] = 0,
    q_offset: Annotated[int, typer.Option(help="Position of the first query.")] = 0,
    kv_offset: Annotated[int, typer.Option(help="Position of the first key.")] = 0,
    raw_score: Annotated[float, typer.Option(help="What scale * (q . k) is taken to be.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of made-up tensors.")] = 0,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help=".svg, .png, .html or .txt."),
    ] = None,
) -> None:
    """Show which pairs and tiles a program keeps, and its scores."""
    from .inputs import read_declarations, read_program, read_sizes
    from .plotting import plot as work

    program = read_program(file, name)
    dims = read_sizes(dim)
    work(
        program,
        read_declarations(param, tensor),
        dims,
        sizes={
            "batch": batch or batch_entry + 1,
            "heads": heads,
            "kv_heads": kv_heads or heads,
            "q_len": q_len,
            "kv_len": kv_len or q_len,
            "head_dim": head_dim,
        },
        blocks=(block_m, block_n),
        place=(batch_entry, head),
        offsets=(q_offset, kv_offset),
        raw_score=raw_score,
        seed=seed,
        output=output,
    )


@app.command()
def schema() -> None:
    """Print the JSON schema of configuration files."""
    from importlib import resources

    text = resources.files("attndsl.grammar").joinpath("config.schema.json").read_text("utf-8")
    print(text.rstrip("\n"))


@app.command()
def doctor(json: Json = False) -> None:
    """Say which backends work here, and why others do not."""
    from .diagnosis import doctor as work

    raise typer.Exit(work(json))


@cache_app.command("list")
def cache_list() -> None:
    """One line an entry."""
    from .caching import list_entries

    list_entries()


@cache_app.command("stats")
def cache_stats() -> None:
    """Entries and bytes by kind."""
    from .caching import print_stats

    print_stats()


@cache_app.command("path")
def cache_path() -> None:
    """The folder."""
    from .caching import print_path

    print_path()


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    from .caching import clear

    clear()


@cache_app.command("prune")
def cache_prune(
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="MB", help="ATTNDSL_CACHE_MB if not given.")
    ] = None,
) -> None:
    """Remove the least recently used entries beyond a size."""
    from .caching import prune

    prune(limit)


def main() -> None:
    """Entry point; exits with the command's code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An error about a letter that the terminal lacks is to be shown all the same.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            # Python's own flush at exit would end in a traceback.
            if sys.stdout is not None:
                sys.stdout.flush()
    except AttnDSLError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.filename is not None:  # Of a file, not of writing to what is open.
            raise
        # Nothing more may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # There the reader (head, a pager) has gone.
            print(f"cannot write the output: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
