"""Fourteen families of transformers' models beside eager attention: errors, tokens, graphs.

    python benchmarks/huggingface.py [--families NAME ...] [--output FILE]
    python benchmarks/huggingface.py --write

``--write`` measures nothing. It puts the table of the result file into ``docs/huggingface.md``.
The models are tiny and random, in fp32, on the CPU; ``tests/support/hf_models.py`` makes them. The
errors are the largest ones over calls without padding, with padding on either side, and with packed
sequences, as far as a family has them: of logits absolutely, of a parameter's gradient relative to
its norm (to a hundredth of the largest norm, if its own is smaller).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import attndsl

import common

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import hf_models

PAGE = Path(__file__).parents[1] / "docs" / "huggingface.md"
BEGIN = "<!-- table: begin (benchmarks/huggingface.py --write) -->"
END = "<!-- table: end -->"
CACHES = (
    {}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3},
    {"use_cache": False},
)  # fmt: skip
"""Ways of ``generate``, each with padding on the left where the family is a decoder."""


def errors_of(family: str) -> tuple[float, float, list[str]]:
    """Largest errors of logits and gradients, and the calls that were compared."""
    models = [hf_models.make(family, name) for name in ("attndsl", "eager")]
    logits = gradients = 0.0
    cases = hf_models.cases(family)
    for given, keep in cases.values():
        found, wanted = (
            hf_models.step(model, lambda model=model, given=given: model(**given), keep)
            for model in models
        )
        more = hf_models.errors(found, wanted)
        logits, gradients = max(logits, more[0]), max(gradients, more[1])
    return logits, gradients, list(cases)


def generates_alike(family: str) -> bool | None:
    """Whether all tokens are equal in all ways of ``generate``; None where there is no such way."""
    if family not in hf_models.GENERATES:
        return None
    given = hf_models.generation_inputs(family, "left" if family in hf_models.DECODERS else None)
    for options in CACHES:
        found, wanted = (
            hf_models.generate(hf_models.make(family, name), given, **options)[0]
            for name in ("attndsl", "eager")
        )
        if not torch.equal(found, wanted):
            return False
    return True


def is_one_graph(family: str) -> bool:
    """Whether ``torch.compile(fullgraph=True)`` takes forward and backward, with equal results."""
    model = hf_models.make(family, "attndsl")
    for given, keep in hf_models.cases(family).values():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        try:
            found = hf_models.step(model, lambda given=given, c=compiled: c(**given), keep)
        except torch._dynamo.exc.Unsupported:
            return False
        wanted = hf_models.step(model, lambda given=given: model(**given), keep)
        if max(hf_models.errors(found, wanted)) > 1e-4:
            return False
    return True


def measured(family: str) -> dict[str, Any]:
    """A row of the table."""
    logits, gradients, cases = errors_of(family)
    return {
        "family": family, "logits": float(f"{logits:.1e}"), "gradients": float(f"{gradients:.1e}"),
        "calls": cases, "generate": generates_alike(family), "fullgraph": is_one_graph(family),
        "transformers": metadata.version("transformers"),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    words = {True: "yes", False: "**no**", None: "-"}
    lines = [
        "| family | logits | gradients | same `generate` output |", "| --- | ---: | ---: | --- |"
    ]  # fmt: skip
    for row in rows:
        numbers = [f"{row[name]:.1e}".replace("e-0", "e-") for name in ("logits", "gradients")]
        numbers = ["0" if number.startswith("0.0") else number for number in numbers]
        if not row["fullgraph"]:
            raise ValueError(f"{row['family']} is not one graph, and the page says that all are")
        cells = [row["family"], *numbers, words[row["generate"]]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_page(page: Path = PAGE) -> None:
    """Put the table of the result file between the page's marks."""
    rows = json.loads((common.RESULTS / "huggingface.json").read_text("utf-8"))["rows"]
    before, rest = page.read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n{END}{after}", "utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(hf_models.FAMILIES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write", action="store_true", help="only write the page's table")
    options = parser.parse_args(arguments)
    if options.write:
        write_page()
        return
    attndsl.hf.register()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = []
    for family in options.families:
        rows.append(measured(family))
        common.write("huggingface", "cpu", rows, options.output)
    common.print_table(rows, ["family", "logits", "gradients", "generate", "fullgraph"])


if __name__ == "__main__":
    main()
