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
from attndsl.errors import AttnDSLError

from .error_formats import Format
from .shared_options import (
    Backend,
    Count,
    Decode,
    Device,
    Dims,
    DType,
    Exact,
    File,
    Json,
    Key,
    KvHeads,
    KvLen,
    Lengths,
    Name,
    Params,
    Paths,
    ProgramPaths,
    Rows,
    Tensors,
    ValueDim,
    files,
    names_of_stages,
    optional_file,
)
from .usage_errors import UsageError

app = typer.Typer(
    name="attndsl",
    help="Attention variants as text: check, format, explain, plot and run programs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="The kernel cache on disk.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")


def _version(value: bool) -> None:
    if value:
        print(f"attndsl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Attention variants as text: check, format, explain, plot and run programs."""


@app.command()
def check(
    paths: Paths,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    form: Annotated[
        Format | None, typer.Option("--format", help="What to print; text if not given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
) -> None:
    """Report errors and likely mistakes in programs."""
    from .check_command import check as work
    from .program_inputs import read_declarations

    if json and form not in (None, Format.JSON):
        raise UsageError(f"--json and --format {form} are both given", hint="keep one of them")
    chosen = Format.JSON if json else form or Format.TEXT
    raise typer.Exit(work(paths, read_declarations(param, tensor), chosen, key, strict))


@app.command()
def fmt(
    paths: ProgramPaths,
    check: Annotated[bool, typer.Option("--check", help="Only say what would change.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Only show what would change.")] = False,
    upgrade: Annotated[
        bool,
        typer.Option("--upgrade", help="Rewrite calls of version 0.1, in YAML, TOML and JSON too."),
    ] = False,
) -> None:
    """Format program files in place (stdin: to stdout)."""
    from .fmt_command import format_files
    from .fmt_upgrade import upgrade_files

    raise typer.Exit((upgrade_files if upgrade else format_files)(paths, check, diff))


@app.command()
def explain(
    file: File,
    name: Name = None,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="Where it would run.")] = "cpu",
    backend: Backend = "auto",
    exact: Exact = False,
    q_len: Annotated[int | None, typer.Option(min=0, help="What this many queries cost.")] = None,
    kv_len: Annotated[int | None, typer.Option(min=0, help="Keys; --q-len by default.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Of q, k and v.")] = 64,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how functions and tiles are computed too.")
    ] = False,
) -> None:
    """Say what a program saves, what runs it, and what it costs at given lengths."""
    from .program_inputs import read_declarations, read_program
    from .show_command import explain_program

    program = read_program(file, name, key)
    length = kv_len if q_len is None else q_len
    lengths = None if length is None else (length, length if kv_len is None else kv_len)
    declared = read_declarations(param, tensor)
    print(explain_program(program, declared, device, backend, lengths, exact, head_dim, verbose))


@app.command()
def show(
    file: File,
    stage: Annotated[
        str,
        typer.Option(
            help="What to print; --stage list names them.", autocompletion=names_of_stages
        ),
    ] = "split",
    name: Name = None,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    head_dim: Annotated[int, typer.Option(min=1, help="Of kernel sources.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of kernel sources: fp16, bf16, fp32.")] = "bf16",
    backend: Annotated[
        str, typer.Option(help="Of kernel sources: triton, hopper, short, decode.")
    ] = "triton",
    exact: Exact = False,
) -> None:
    """Print a stage of compilation, from the surface tree to the kernels."""
    from .program_inputs import read_declarations, read_program
    from .show_command import list_stages, show_stage

    if stage == "list":
        print(list_stages())
        return
    program = read_program(file, name, key)
    declared = read_declarations(param, tensor)
    print(show_stage(program, declared, stage, head_dim, dtype, exact, backend))


@app.command()
def run(
    file: File,
    name: Name = None,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    batch: Count = 1,
    heads: Count = 4,
    kv_heads: KvHeads = None,
    q_len: Rows = None,
    kv_len: KvLen = None,
    head_dim: Count = 64,
    value_dim: ValueDim = None,
    dim: Dims = [],  # noqa: B006
    dtype: DType = "fp32",
    device: Device = "cpu",
    backend: Backend = "auto",
    exact: Exact = False,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients too.")] = False,
    decode: Decode = False,
    lengths: Lengths = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the reference.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Json = False,
) -> None:
    """Time a program on random inputs and hold it to the reference."""
    from .program_inputs import read_declarations, read_program, read_sizes
    from .run_command import CallKind, Shapes
    from .run_command import run as work
    from .run_decode import shapes_of

    program = read_program(file, name, key)
    rows = q_len or (1 if decode else 256)
    shapes = Shapes(
        batch, heads, kv_heads or heads, rows, kv_len or rows, head_dim, value_dim or head_dim,
        dtype, device,
    )  # fmt: skip
    if decode or lengths is not None:
        shapes = shapes_of(shapes, kv_len, lengths if decode else "", backward)
    dims = read_sizes(dim)
    declared, kind = read_declarations(param, tensor), CallKind(backend, exact, backward)
    raise typer.Exit(
        work(program, declared, shapes, dims, kind, check=check, seed=seed, as_json=json)
    )


@app.command()
def warmup(
    file: File,
    name: Name = None,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    batch: Count = 1,
    heads: Count = 4,
    kv_heads: KvHeads = None,
    q_len: Count = 2048,
    kv_len: KvLen = None,
    head_dim: Count = 64,
    value_dim: ValueDim = None,
    dim: Dims = [],  # noqa: B006
    dtype: DType = "bf16",
    device: Device = "cuda",
    backend: Backend = "auto",
    exact: Exact = False,
    backward: Annotated[bool, typer.Option("--backward", help="Kernels of gradients too.")] = False,
    json: Json = False,
) -> None:
    """Compile the kernels of all programs of a file, side by side, into the cache."""
    from .program_inputs import (
        check_key,
        read_declarations,
        read_program,
        read_programs,
        read_sizes,
    )
    from .run_command import CallKind, Shapes
    from .warmup_command import warm_up as work

    check_key(file, key)
    programs = read_programs(file, key) if name is None else [read_program(file, name, key)]
    shapes = Shapes(
        batch, heads, kv_heads or heads, q_len, kv_len or q_len, head_dim, value_dim or head_dim,
        dtype, device,
    )  # fmt: skip
    declared, dims = read_declarations(param, tensor), read_sizes(dim)
    kind = CallKind(backend, exact, backward)
    raise typer.Exit(work(programs, declared, shapes, dims, kind, json))


@app.command()
def build(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", callback=files, help="Program files and configurations."),
    ],
    target: Annotated[str, typer.Option(help="The GPU: cuda:90, cuda:80 ...")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FOLDER", help="The bundle.")],
    name: Name = None,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="fp16, bf16, fp32; bf16 if not given.")] = [],  # noqa: B006
    head_dim: Annotated[
        list[str], typer.Option(metavar="N", help="Of q and k; 64 if not given.")
    ] = [],  # noqa: B006
    value_dim: ValueDim = None,
    heads: Annotated[
        list[str], typer.Option(metavar="N/N", help="Heads/key heads; 8/8 and 8/2 if not given.")
    ] = [],  # noqa: B006
    lengths: Annotated[
        list[str], typer.Option(metavar="N, NxN", help="Rows x keys; 1024 and 1007 if not given.")
    ] = [],  # noqa: B006
    positions: Annotated[
        list[str],
        typer.Option(help="Of the rows: whole, chunk (behind others), entries (serving)."),
    ] = [],  # noqa: B006
    backward: Annotated[bool, typer.Option("--backward", help="Kernels of gradients too.")] = False,
    learned: Annotated[
        list[str], typer.Option(metavar="NAME", help="Exactly these captures have gradients.")
    ] = [],  # noqa: B006
    capture: Annotated[
        list[str], typer.Option(metavar="NAME=DTYPE", help="dtype of a captured tensor.")
    ] = [],  # noqa: B006
    dim: Dims = [],  # noqa: B006
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As calls with deterministic=True.")
    ] = False,
    backend: Backend = "auto",
    exact: Exact = False,
    json: Json = False,
) -> None:
    """Compile kernels for a GPU that need not be here, into a bundle.

    Options of several values take them with commas: --dtype bf16,fp16.
    """
    from .build_command import What, build_bundle, read_asked
    from .program_inputs import read_declarations, read_sizes

    asked = read_asked({
        "dtype": dtype, "head_dim": head_dim, "value_dim": value_dim, "heads": heads,
        "lengths": lengths, "positions": positions, "backward": backward, "learned": learned,
        "capture": capture, "dims": read_sizes(dim), "deterministic": deterministic,
    })  # fmt: skip
    what = What(files, name, key, read_declarations(param, tensor), exact, backend, target)
    raise typer.Exit(build_bundle(what, asked, output, json))


@app.command()
def plot(
    file: File,
    name: Name = None,
    key: Key = None,
    param: Params = [],  # noqa: B006
    tensor: Tensors = [],  # noqa: B006
    q_len: Annotated[int, typer.Option(min=1, max=4096)] = 64,
    kv_len: Annotated[int | None, typer.Option(min=1, max=4096, help="As --q-len.")] = None,
    block_m: Annotated[int, typer.Option(min=1, help="Queries of a tile.")] = 16,
    block_n: Annotated[int, typer.Option(min=1, help="Keys of a tile.")] = 16,
    batch: Annotated[int | None, typer.Option(min=1, help="--batch-entry + 1.")] = None,
    heads: Count = 4,
    kv_heads: KvHeads = None,
    head_dim: Count = 64,
    dim: Dims = [],  # noqa: B006
    batch_entry: Annotated[int, typer.Option(min=0, help="Which to show.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="Which to show.")] = 0,
    q_offset: Annotated[int, typer.Option(help="Position of the first query.")] = 0,
    kv_offset: Annotated[int, typer.Option(help="Position of the first key.")] = 0,
    raw_score: Annotated[float, typer.Option(help="What scale * (q . k) is taken to be.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of made-up tensors.")] = 0,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help=".svg, .png, .pdf, .html or .txt."),
    ] = None,
) -> None:
    """Show which pairs and tiles a program keeps, and its scores."""
    from attndsl.call.options import Location
    from attndsl.picture import Frame

    from .plot_command import plot as work
    from .program_inputs import read_declarations, read_program, read_sizes

    program = read_program(file, name, key)
    dims = read_sizes(dim)
    counts = batch or batch_entry + 1, heads, kv_heads, head_dim
    place = batch_entry, head, Location(q_offset, kv_offset)
    frame = Frame(q_len, kv_len or q_len, block_m, block_n, *counts, *place)
    declared = read_declarations(param, tensor)
    work(program, declared, dims, frame, raw_score=raw_score, seed=seed, output=output)


@app.command()
def play(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]", callback=optional_file, help="What to begin with, as for show."
        ),
    ] = None,
    name: Name = None,
    key: Key = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Where to listen; any by default.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Open a page to type programs and see tiles, scores and errors."""
    from .play_command import play as work
    from .program_inputs import read_program

    work(None if file is None else read_program(file, name, key), port, browser)


@app.command()
def lsp() -> None:
    """Serve an editor over standard input and output: errors, hovers, completion, layout."""
    from .lsp_command import serve

    serve()


@app.command()
def schema() -> None:
    """Print the JSON schema of configuration files."""
    from importlib import resources

    text = resources.files("attndsl.grammar").joinpath("config.schema.json").read_text("utf-8")
    print(text.rstrip("\n"))


@app.command()
def doctor(json: Json = False) -> None:
    """Say which backends work here, and why others do not."""
    from .doctor_command import doctor as work

    raise typer.Exit(work(json))


@cache_app.command("list")
def cache_list(json: Json = False) -> None:
    """One line an entry: its program, what it is for, and when it was last used."""
    from .cache_command import list_entries

    list_entries(json)


@cache_app.command("import")
def cache_import(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="A folder of attndsl build.")],
    digest: Annotated[
        str | None, typer.Option(metavar="SHA256", help="The digest that it has to have.")
    ] = None,
) -> None:
    """Copy a bundle of compiled kernels into the cache. A bundle is code."""
    from .cache_command import import_from

    import_from(bundle, digest)


@cache_app.command("stats")
def cache_stats(
    memory: Annotated[bool, typer.Option("--memory", help="Caches of a process instead.")] = False,
    program: Annotated[
        str, typer.Option(metavar="TEXT", help="With --memory: what the process has run.")
    ] = "causal()",
) -> None:
    """Entries and bytes by kind."""
    if memory:
        from .process_caches import print_memory

        print_memory(program)
    else:
        from .cache_command import print_stats

        print_stats()


@cache_app.command("path")
def cache_path() -> None:
    """The folder."""
    from .cache_command import print_path

    print_path()


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    from .cache_command import clear

    clear()


@cache_app.command("prune")
def cache_prune(
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="MB", help="ATTNDSL_CACHE_MB if not given.")
    ] = None,
) -> None:
    """Remove the least recently used entries beyond a size."""
    from .cache_command import prune

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
