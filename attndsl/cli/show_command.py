"""``attndsl show`` and ``attndsl explain``: a program stage by stage."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from attndsl.ir import leaf_names
from attndsl.pipeline import lower, stages
from attndsl.serialise import lowered_to_json

from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.api import Attention
    from attndsl.frontend.declare import Declared

    from .program_inputs import NamedProgram

STAGES = {
    "tree": "the statements as parsed, with the places of all parts",
    "ir": "checked: functions inlined, bound params folded in",
    "simplified": "after simplification",
    "split": "after -inf branches of the score have moved into the mask: what backends get",
    "derivative": "derivatives of the score by the raw score and by each capture",
    "tiles": "loops over tiles, as formulas of the tile that owns the loop",
    "json": "all of that as the cache keeps it",
    "source": "the generated forward kernel",
    "source-backward": "the generated backward kernels",
    "source-tangent": "the generated kernel of forward mode",
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def list_stages() -> str:
    """A line for each stage."""
    return "\n".join(f"{name:<16} {what}" for name, what in STAGES.items())


def check_stage(stage: str) -> None:
    """Refuse a name that is no stage.

    Raises:
        UsageError: Names the nearest.
    """
    if stage not in STAGES:
        close = difflib.get_close_matches(stage, STAGES, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"use {', '.join(STAGES)}"
        raise UsageError(f"there is no stage '{stage}'", hint=hint)


def show_stage(
    program: NamedProgram,
    declared: Mapping[str, Declared],
    stage: str,
    head_dim: int,
    dtype: str,
    exact: bool = False,
    backend: str = "triton",
) -> str:
    """The text of one stage; only kernel sources need torch.

    Raises:
        AttnDSLError: The program has errors, ``stage``, ``dtype`` or ``backend`` is unknown, or the
            backend has no kernels for such calls.
    """
    check_stage(stage)
    names = program.declared(declared)
    if stage == "json":
        return json.dumps(lowered_to_json(lower(program.source, names)), indent=1)
    if not stage.startswith("source"):
        return stages(program.source, names)[stage].rstrip("\n")
    if dtype not in _DTYPES:
        raise UsageError(f"kernels have no dtype '{dtype}'", hint=f"use {', '.join(_DTYPES)}")
    import torch

    from attndsl.backends.engine.families import GENERATED

    if backend not in GENERATED:
        raise UsageError(
            f"no kernels are generated for backend '{backend}'", hint=f"use {', '.join(GENERATED)}"
        )
    direction = stage.partition("-")[2] or "forward"
    attention = compile_program(program, declared, "auto", exact)
    return attention.source(
        direction, head_dim=head_dim, dtype=getattr(torch, _DTYPES[dtype]), backend=backend
    )


def explain_program(
    program: NamedProgram,
    declared: Mapping[str, Declared],
    device: str,
    backend: str,
    lengths: tuple[int, int] | None,
    exact: bool = False,
    head_dim: int = 64,
    verbose: bool = False,
) -> str:
    """The compiler's decisions about ``program``, in words; with lengths also what it costs.

    Raises:
        AttnDSLError: The program has errors.
    """
    attention = compile_program(program, declared, backend, exact)
    if lengths is None:
        return attention.explain(device, head_dim=head_dim, verbose=verbose)
    q_len, kv_len = lengths
    import torch

    from .example_options import make_captures

    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": head_dim}
    sizes |= {"q_len": q_len, "kv_len": kv_len}
    generator = torch.Generator().manual_seed(0)
    compiled = attention.lowered.program
    read = leaf_names(compiled.mask)
    captures: dict[str, Any] = make_captures(compiled, sizes, "cpu", generator, read)
    text = attention.explain(
        device, q_len=q_len, kv_len=kv_len, head_dim=head_dim, captures=captures, verbose=verbose
    )
    made_up = ", ".join(name for name in captures if name in read)
    if made_up:
        text += f"\n  made up    {made_up}: random, documents of about 100 positions"
    return text


def compile_program(
    program: NamedProgram, declared: Mapping[str, Declared], backend: str, exact: bool = False
) -> Attention:
    """``program`` compiled, with what its configuration and the command line declare.

    Raises:
        AttnDSLError: The program has errors.
    """
    from attndsl.api import Options, compile_source

    return compile_source(program.source, program.declared(declared), Options(backend, exact=exact))
