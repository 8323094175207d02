"""How long diagnostics of `attndsl lsp` take after a change: `.venv/bin/python tools/latency.py`.

A client changes a file and waits for the diagnostics of that version, over standard input and
output of a server of its own. Four files: a program, one as long as programs may be, one of
hundreds of score lines, and a configuration of 50 programs. Every other text has an error, which
ends a check early.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

CHANGES = 20
_LONGEST = 1 << 14


def texts() -> dict[str, tuple[str, list[str]]]:
    """For each case the name of its file, and its text after each change."""
    program = "param window: int = 4096\nmask = causal() and q - kv < window + {0}\nscore = {1}\n"
    line = "score = softcap(score, 50.0 + {}) - 0.5 * (q - kv)\n"
    scores = "".join(line.format(n) for n in range(_LONGEST // 56))
    local = "# Blocks of {0} positions.\nnear_{0} = q - kv < 4 * {0} and q // {0} == kv // {0}\n"
    locals_ = "".join(local.format(n) for n in range(100, 270))
    any_of = " or ".join(f"near_{n}" for n in range(100, 270))
    entry = "layer{}:\n  program: |\n    mask = causal() and q - kv < {}\n    score = tanh(score)\n"
    numbers = range(CHANGES)
    return {
        "a program": (
            "a.attn",
            [program.format(n, "tanh(score)" if n % 2 else "tanhh(5)") for n in numbers],
        ),
        "a program of 16,000 characters": (
            "b.attn",
            [f"{locals_}mask = {any_of} or q - kv < {n}{'' if n % 2 else ' +'}\n" for n in numbers],
        ),
        "a program of 341 score lines": (
            "d.attn",
            [scores + f"mask = q - kv < {n}{'' if n % 2 else ' +'}\n" for n in numbers],
        ),
        "50 programs in YAML": (
            "c.yaml",
            [
                "".join(entry.format(each, n if each == 25 else 8) for each in range(50))
                + ("" if n % 2 else "last: q >= kvv\n")
                for n in numbers
            ],
        ),
    }


def measure(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each change, by case."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.editor import Editor, uri_of

    found: dict[str, list[float]] = {}
    with Editor() as editor:
        for case, (name, versions) in texts().items():
            uri = uri_of(folder / name)
            # Another text than those that follow, which would be remembered.
            first = f"{versions[-1]}# Opened.\n"
            editor.open(uri, first, "yaml" if name.endswith("yaml") else "attn")
            found[case] = []
            for number, text in enumerate(versions):
                start = time.perf_counter()
                diagnostics = editor.change(uri, text)
                found[case].append(1000 * (time.perf_counter() - start))
                assert bool(diagnostics) is (number % 2 == 0), (case, number, diagnostics)
        editor.end()
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"milliseconds from a change to its diagnostics, {CHANGES} changes")
    for case, times in measure(Path.cwd()).items():
        wrong, right = statistics.median(times[::2]), statistics.median(times[1::2])
        print(f"{case:32} median {right:6.1f}, with an error {wrong:6.1f}  max {max(times):6.1f}")


if __name__ == "__main__":
    main()
