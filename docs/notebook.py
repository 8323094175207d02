"""Write docs/tutorial.ipynb and docs/tutorial.svg from docs/tutorial.md.

python docs/notebook.py

Python becomes cells of code. A configuration becomes a cell that writes its file. Everything else
stays text. The picture is the one that the cells draw.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from dark import themed

DOCS = Path(__file__).parent
PAGE, NOTEBOOK, PICTURE = (DOCS / f"tutorial.{kind}" for kind in ("md", "ipynb", "svg"))
DRAWN = "variant.svg"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
HERE = re.compile(r"This page is also a notebook[^\n]*\n\n")


def cells(page: str) -> list[tuple[str, str]]:
    """The page in parts: ``markdown`` or ``code``, and the text of each."""
    found: list[tuple[str, str]] = []
    text, place = HERE.sub("", page), 0
    for fence in FENCE.finditer(text):
        kind, inside = fence[1], fence[2].rstrip()
        if kind not in ("python", "yaml"):
            continue
        found.append(("markdown", text[place : fence.start()].strip()))
        found.append(("code", _written(inside) if kind == "yaml" else inside))
        place = fence.end()
    found.append(("markdown", text[place:].strip()))
    return [cell for cell in found if cell[1]]


def notebook(page: str) -> str:
    """The page as a notebook (nbformat 4.5), without outputs."""
    parts: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        lines = text.splitlines(keepends=True)
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        parts.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": parts,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def run(text: str, folder: Path) -> str:
    """Run all code of a notebook in ``folder``, and give what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before, out = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out):
            for cell in json.loads(text)["cells"]:
                if cell["cell_type"] == "code":
                    exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    finally:
        os.chdir(before)
    return out.getvalue()


def main() -> None:
    """Write the notebook and the picture."""
    text = notebook(PAGE.read_text("utf-8"))
    NOTEBOOK.write_text(text, "utf-8")
    with tempfile.TemporaryDirectory() as folder:
        print(run(text, Path(folder)))
        drawn = (Path(folder) / DRAWN).read_text("utf-8")
    PICTURE.write_text(themed(drawn), "utf-8")


def _written(text: str) -> str:
    quoted = f'"""{text}\n"""'
    return f'from pathlib import Path\n\nPath("model.yaml").write_text({quoted})'


if __name__ == "__main__":
    main()
