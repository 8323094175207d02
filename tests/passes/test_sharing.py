"""Programs whose locals stand for more terms than could ever be written out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attndsl.pipeline import lower, stages
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

DECLARED = (
    "tensor gain[heads]: float; tensor u[q_len, 4]: float; tensor w[kv_len, 4]: float;"
    "param p: float = 1.5; param n: int = 3\n"
)


def _doubled(start: str, step: str = "{0} + {0}", times: int = 60) -> str:
    lines = [f"x0 = {start}"]
    lines += [f"x{i + 1} = " + step.format(f"x{i}", i) for i in range(times)]
    return "\n".join(lines) + "\n"


PROGRAMS = {
    "score by head": _doubled("gain[h] * 1.5") + "score = score + x60",
    "score by pair": _doubled("float(q - kv) * p") + "score = score + x60",
    "score of ints": _doubled("q - kv") + "score = score + x60",
    "score of products": _doubled("n", "{0} * {0}") + "score = score + x60 * (q - kv)",
    "functions of the score": _doubled("score", "tanh({0}) * {0}") + "score = x60",
    "contractions": _doubled("dot(u[q, :], w[kv, :])") + "score = score + x60",
    "mask of ints": _doubled("q - kv") + "mask = x60 > 0",
    "mask of floats": _doubled("float(q)") + "mask = x60 > 0.0",
    "mask of bools": _doubled("q > kv", "({0} and q > {1}) or ({0} and kv > {1})") + "mask = x60",
    "mask of comparisons": _doubled("q > kv", "{0} != ({0} and kv > {1})") + "mask = x60",
    "weights": _doubled("sigmoid(score)") + "weights = x60",
    "sink": _doubled("gain[h]") + "sink = x60",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shared_terms_are_not_written_out(
    name: str, quickest: Callable[[Callable[[], object]], float]
) -> None:
    source = Source(DECLARED + PROGRAMS[name], "p.attn")
    assert quickest(lambda: lower(source, {})) < 2.0
    texts = stages(source, {})
    assert max(map(len, texts.values())) < 100_000
    assert lower(Source(texts["simplified"], "again"), {}).digest == lower(source, {}).digest
