"""Texts within the language's limits that are hard on some stage of the compiler, and the stages.

``python tests/support/hostile.py`` measures all of them and prints the worst.

Non-goals: texts that the parser refuses for their length alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch

import attndsl
from attndsl import AttnDSLError, pipeline
from attndsl.editors import (
    completion,
    diagnostics,
    document_symbols,
    embedded_programs,
    formatting,
    hover,
    semantic_tokens,
)
from attndsl.editors.text_positions import lines_of
from attndsl.frontend import parsed
from attndsl.frontend.format import format_source
from attndsl.inspection.example_captures import make_captures
from attndsl.play.answers import answer
from attndsl.play.messages import PageRequest, PictureCall, RequestKind
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS, MEGABYTES = 2.0, 300
"""Of processor time and of memory beside the imports that a stage may take. The time is that of a
machine that does 100 million additions a second."""
P = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73]


def chain(first: str, line: str, count: int, end: str) -> str:
    """Lines of which each reads the one before."""
    return "\n".join([first, *(line.format(i=i, p=i - 1) for i in range(1, count)), end])


TEXTS: dict[str, str] = {}
TEXTS["nested mods"] = (
    "mask = "
    + "(" * 8
    + "q - kv"
    + "".join(f") % {1000 - i * 7} + q // {i + 2}" for i in range(8))
    + " > 5"
)
TEXTS["mods of mods"] = (
    "mask = "
    + "(" * 17
    + "q - kv"
    + "".join(f") * {i} + q) % {4101 - i}" for i in range(2, 10))
    + ") > 7"
)
TEXTS["and of mods"] = "mask = " + " and ".join(
    f"(q + {i}) % {p} <= (kv * {i + 1}) % {p}" for i, p in enumerate(P[:8])
)
TEXTS["or of mods"] = "mask = " + " or ".join(f"(q - kv) % {p} == 0" for p in P[:10])
TEXTS["sums"] = chain("a0 = score", "a{i} = a{p} + a{p}", 150, "score = a149 * 0.0 + score")
TEXTS["squares"] = chain("a0 = score * 0.001", "a{i} = a{p} * a{p}", 600, "score = score + a599")
TEXTS["chain"] = chain("a0 = score", "a{i} = tanh(a{p}) * a{p}", 200, "score = a199")
TEXTS["long name"] = f"param {'w' * 90}: float\nscore = score * {'w' * 90}"
TEXTS["longer name"] = (
    f"param {'w' * 4000}: float\ntensor {'t' * 4000}[heads]: float\n"
    f"score = score * {'w' * 4000} + {'t' * 4000}[h]"
)
TEXTS["min int"] = "q >= 1 << 63"
TEXTS["70 dims"] = (
    "tensor t["
    + ", ".join(["2"] * 70)
    + "]: float\nscore = score + t["
    + ", ".join(["0"] * 70)
    + "]"
)
TEXTS["product of mods"] = (
    "mask = (q % 7 - kv % 7) * 3 + (q % 11 - kv % 11) * 5 + (q % 13 - kv % 13) * 7"
    " + (q % 17 - kv % 17) > 4"
)
TEXTS["deep where"] = (
    "mask = "
    + "".join(f"(q % {p} if q // {i + 2} < kv % {p} else " for i, p in enumerate(P[:12]))
    + "kv"
    + ")" * 12
    + " > 3"
)
TEXTS["deep where flat"] = (
    "mask = "
    + "".join(f"where(q > kv * {i + 1} + {i}, q + {i}, " for i in range(40))
    + "kv"
    + ")" * 40
    + " > 3"
)
TEXTS["many min max"] = (
    "mask = "
    + "".join(f"min(q + {i * 3}, max(kv * {i + 1}, " for i in range(20))
    + "q - kv"
    + "))" * 20
    + " > 3"
)
TEXTS["sum of abs"] = (
    "mask = " + " + ".join(f"abs(q - kv * {i} - {i * i})" for i in range(1, 25)) + " < 1000"
)
TEXTS["sum of max"] = (
    "mask = " + " + ".join(f"max(q - kv * {i}, {i * i})" for i in range(1, 16)) + " < 1000"
)
TEXTS["equalities of bools"] = (
    "mask = "
    + " == ".join(f"(q > kv + {i})" for i in range(1, 2))
    + "".join(f" and ((q > kv * {i}) == (q < kv + {i * 7}))" for i in range(1, 20))
)
TEXTS["xor chain"] = (
    "a0 = q > kv\n"
    + "\n".join(f"a{i} = a{i - 1} != (q % {P[i % 20]} > kv // {i + 1})" for i in range(1, 18))
    + "\nmask = a17"
)
TEXTS["xor chain flat"] = (
    "a0 = q > kv\n"
    + "\n".join(f"a{i} = a{i - 1} != (q > kv * {i + 1} + {i})" for i in range(1, 40))
    + "\nmask = a39"
)
TEXTS["cnf"] = "mask = " + " and ".join(
    f"(q > kv + {i} or q < {i * i} or kv > {i * 5})" for i in range(1, 30)
)
TEXTS["dnf"] = "mask = " + " or ".join(
    f"(q > kv + {i} and q < {i * i + 50} and kv > {i * 5})" for i in range(1, 60)
)
TEXTS["points"] = "mask = " + " or ".join(
    f"(q == {i * 37 % 1009} and kv == {i * 91 % 1013})" for i in range(1, 300)
)
TEXTS["not of points"] = (
    "mask = not ("
    + " or ".join(f"(q == {i * 37 % 1009} and kv == {i * 91 % 1013})" for i in range(1, 300))
    + ")"
)
TEXTS["stripes"] = "mask = " + " and ".join(f"q - kv != {i * 7}" for i in range(1, 700))
TEXTS["big constants"] = (
    "mask = (q * 1048573 + kv * 1048571) % 1048559 < (q * 1048549 - kv * 1048517) % 1048507"
)
TEXTS["big constants nested"] = (
    "mask = ((q * 1048573) % 1048559 * 1048571 + kv) % 1048549 < kv % 1048517 * 3"
)
TEXTS["divisions"] = "mask = " + "q" + "".join(f" // {2} * {3}" for i in range(14)) + " < kv"
TEXTS["divisions of both"] = (
    "mask = " + "(" * 12 + "q + kv" + "".join(f") // {i + 2} + kv" for i in range(12)) + " < 50"
)
TEXTS["bits"] = "mask = ((q ^ 5) & 119) + ((kv | 17) ^ 13056) - (q & 455) > (kv & 3855)"
TEXTS["shifts"] = "mask = " + " and ".join(
    f"((q << {i}) - (kv >> {i})) % {1 << (i + 1)} < {i + 1}" for i in range(1, 14)
)
TEXTS["chinese"] = "mask = " + " and ".join(f"(q - kv) % {p} != {p // 2}" for p in P)
TEXTS["tiles of tiles"] = "mask = " + " and ".join(
    f"(q // {2**i} + kv // {2**i}) % 3 != 1" for i in range(1, 12)
)
TEXTS["fractal"] = "mask = " + " and ".join(
    f"(q // {2**i} % 2 == 0 or kv // {2**i} % 2 == 0)" for i in range(14)
)
TEXTS["cantor"] = "mask = " + " and ".join(f"((q - kv) // {3**i}) % 3 != 1" for i in range(12))
TEXTS["hash"] = "mask = ((q * 7919 + kv * 104729) % 65536) * 31 % 101 < 10"
TEXTS["params"] = (
    "\n".join(f"param p{i}: int" for i in range(60))
    + "\nmask = "
    + " and ".join(f"q - kv < p{i}" for i in range(60))
)
TEXTS["params or"] = (
    "\n".join(f"param p{i}: int" for i in range(24))
    + "\nmask = "
    + " or ".join(f"(q - kv == p{i} and q > p{(i * 7) % 24})" for i in range(24))
)
TEXTS["params max"] = (
    "\n".join(f"param p{i}: int" for i in range(14))
    + "\nmask = q - kv < "
    + "max(" * 13
    + "p0"
    + "".join(f", p{i})" for i in range(1, 14))
)
TEXTS["params mods"] = (
    "param a: int\nparam c: int\n"
    "mask = (q + a) % 48 // 3 - (kv - c) % 36 // 2 < (a + c + q) % 10 + (kv + c) // 5 % 9"
)
TEXTS["lookups"] = "tensor t[batch, heads, 4]: int\nmask = " + " and ".join(
    f"q - kv < t[b, h, {i % 4}] * {i + 1} + {i}" for i in range(40)
)
TEXTS["lookups by pair"] = "tensor t[kv_len]: int\nmask = " + " or ".join(
    f"t[kv] % {p} == t[(kv + {p}) % kv_len] % 3" for p in P
)
TEXTS["many tensors"] = (
    "\n".join(f"tensor t{i}[heads, kv_len]: float" for i in range(300))
    + "\nscore = score + "
    + " + ".join(f"t{i}[h, kv]" for i in range(300))
)
TEXTS["many params"] = (
    "\n".join(f"param p{i}: float = 1.0" for i in range(400))
    + "\nscore = score * "
    + " * ".join(f"p{i}" for i in range(400))
)
TEXTS["many dims"] = (
    "\n".join(f"tensor t{i}[" + ", ".join(["heads"] * 30) + "]: float" for i in range(30))
    + "\nscore = score + "
    + " + ".join(f"t{i}[" + ", ".join(["h"] * 30) + "]" for i in range(30))
)
TEXTS["named dims"] = (
    "tensor t["
    + ", ".join(f"n{i}" for i in range(60))
    + "]: float\nscore = score + t["
    + ", ".join(["0"] * 60)
    + "]"
)
TEXTS["dots"] = (
    "\n".join(
        f"tensor u{i}[heads, q_len, 8]: float\ntensor w{i}[heads, kv_len, 8]: float"
        for i in range(90)
    )
    + "\nscore = score + "
    + " + ".join(f"dot(u{i}[h, q, :], w{i}[h, kv, :])" for i in range(90))
)
TEXTS["dots tanh"] = (
    "\n".join(
        f"tensor u{i}[heads, q_len, 8]: float\ntensor w{i}[heads, kv_len, 8]: float"
        for i in range(60)
    )
    + "\nscore = score"
    + "".join(f" + tanh(dot(u{i}[h, q, :], w{i}[h, kv, :]))" for i in range(60))
)
TEXTS["defs"] = (
    "def f0(x) = x + 1\n"
    + "\n".join(f"def f{i}(x) = f{i - 1}(x) + f{i - 1}(x)" for i in range(1, 40))
    + "\nscore = f39(score)"
)
TEXTS["defs mask"] = (
    "def f0(x) = x % 3 > 1\n"
    + "\n".join(f"def f{i}(x) = f{i - 1}(x + {i}) and f{i - 1}(x * 2 - {i})" for i in range(1, 9))
    + "\nmask = f8(q - kv)"
)
TEXTS["defs score"] = (
    "def f0(x) = tanh(x)\n"
    + "\n".join(f"def f{i}(x) = f{i - 1}(x * 0.5) * f{i - 1}(x + {i}.0)" for i in range(1, 10))
    + "\nscore = f9(score)"
)
TEXTS["huge ints"] = "score = score * " + "9" * 16000
TEXTS["huge int sum"] = (
    "mask = q * 9223372036854775807 + kv * 9223372036854775806 - 9223372036854775805"
    " > 9223372036854775804"
)
TEXTS["huge int power"] = "mask = 3 ** 1000000000 > q and 2 ** 62 ** 2 ** 9 > kv"
TEXTS["huge floats"] = "score = score * 1e308 * 1e308 + " + "1e-320 * " * 600 + "1.0"
TEXTS["powers"] = "score = " + "score ** 1000000 + score ** 0.5" + " ** 2.0" * 60
TEXTS["unicode"] = (
    "score = score * \U0001d538\U0001d539 + " + "é" * 3000 + "\n# " + "\U0001d538" * 5000
)
TEXTS["long comments"] = "\n".join("# " + "x" * 60 for i in range(250)) + "\nscore = score"
TEXTS["long comment line"] = "score = score # " + "( [ { \\ \" ' " * 1200
TEXTS["blank lines"] = "\n" * 15000 + "score = score"
TEXTS["parentheses"] = "score = " + "(" * 8000 + "score" + ")" * 8000
TEXTS["64 parentheses"] = (
    "mask = " + "(" * 60 + "q" + ")" * 60 + " >= " + "(" * 60 + "kv" + ")" * 60
)
TEXTS["long sum"] = "score = score" + " + q" * 3500
TEXTS["long sum of ints"] = "mask = q" + " + kv - q" * 1600 + " > 0"
TEXTS["long int sum flat"] = "mask = kv > " + " + ".join(f"q * {i}" for i in range(1, 1500))
TEXTS["long and"] = "mask = " + " and ".join(f"q > kv - {i}" for i in range(900))
TEXTS["long or"] = "mask = " + " or ".join(f"q * {i + 1} > kv" for i in range(900))
TEXTS["long product"] = "score = score" + " * 1.0001" * 1600
TEXTS["long product of rows"] = "tensor t[q_len]: float\nscore = " + " * ".join(
    f"(score + t[q] * {i}.0)" for i in range(500)
)
TEXTS["product of sums"] = "score = " + " * ".join(f"(score + q * {i}.0 - kv)" for i in range(12))
TEXTS["locals"] = (
    "\n".join(f"a{i} = q * {i} - kv" for i in range(600))
    + "\nscore = score + "
    + " + ".join(f"a{i}" for i in range(600))
)
TEXTS["shared ladder"] = (
    "a0 = q - kv\n"
    + "\n".join(f"a{i} = a{i - 1} + a{i - 1}" for i in range(1, 500))
    + "\nmask = a499 > 0"
)
TEXTS["shared mods"] = (
    "a0 = q - kv\n"
    + "\n".join(f"a{i} = (a{i - 1} * 3 + a{i - 1} // 5) % {P[i % 20] * 7}" for i in range(1, 300))
    + "\nmask = a299 > 0"
)
TEXTS["shared ladder min"] = (
    "a0 = q - kv\n"
    + "\n".join(f"a{i} = min(a{i - 1} + {i}, max(a{i - 1} - q, kv))" for i in range(1, 300))
    + "\nmask = a299 > 0"
)
TEXTS["fibonacci"] = (
    "a0 = score\na1 = score * 0.5\n"
    + "\n".join(f"a{i} = a{i - 1} + a{i - 2}" for i in range(2, 600))
    + "\nscore = score + a599 * 0.0"
)
TEXTS["exp chain"] = chain("a0 = score", "a{i} = exp(-a{p} * a{p}) + a{p}", 400, "score = a399")
TEXTS["silu gelu chain"] = chain(
    "a0 = score", "a{i} = gelu(a{p}) + silu(a{p}) * a{p}", 300, "score = a299"
)
TEXTS["where chain"] = chain(
    "a0 = score", "a{i} = where(a{p} > {i}.0, a{p} * 0.5, a{p} + 1.0)", 300, "score = a299"
)
TEXTS["where inf chain"] = chain(
    "a0 = score", "a{i} = where(q - kv > {i}, a{p}, -inf)", 400, "score = a399"
)
TEXTS["where inf mods"] = chain(
    "a0 = score", "a{i} = where((q - kv) % {i} == 1, -inf, a{p})", 100, "score = a99"
)
TEXTS["score lines"] = "\n".join(f"score = score * 0.99 + {i}.0" for i in range(550))
TEXTS["mask lines"] = "\n".join(f"mask = q - kv != {i}" for i in range(500))
TEXTS["compare chain"] = "mask = " + " <= ".join(f"(q + {i})" for i in range(800))
TEXTS["sin chain"] = chain("a0 = score", "a{i} = sin(a{p}) + cos(a{p})", 300, "score = a299")
TEXTS["optional"] = (
    "\n".join(f"param p{i}: float = none" for i in range(17))
    + "\nscore = score"
    + "".join(f" + (p{i} if present(p{i}) else 0.0)" for i in range(17))
)
TEXTS["optional 14"] = (
    "\n".join(f"tensor t{i}[heads]: float = none" for i in range(14))
    + "\nscore = score"
    + "".join(f" + t{i}[h]" for i in range(14))
)
TEXTS["dropouts"] = "weights = " + "dropout(" * 50 + "softmax(score)" + ", 0.1)" * 50
TEXTS["sink chain"] = "tensor s[heads]: float\n" + chain(
    "a0 = s[h]", "a{i} = tanh(a{p}) * a{p}", 300, "sink = a299"
)
TEXTS["weights chain"] = chain("a0 = score", "a{i} = tanh(a{p}) * a{p}", 200, "weights = a199")
TEXTS["nested lookups"] = "tensor t[kv_len]: int\nmask = q > " + "t[" * 60 + "kv" + "]" * 60
TEXTS["nested lookups chain"] = (
    "tensor t[kv_len]: int\na0 = kv\n"
    + "\n".join(f"a{i} = t[a{i - 1}]" for i in range(1, 400))
    + "\nmask = q > a399"
)
TEXTS["imports"] = "\n".join(f'import "a{i}.attn"' for i in range(300))
TEXTS["errors"] = "\n".join(f"score = score + nothing{i}" for i in range(600))
TEXTS["errors of defs"] = (
    "\n".join(f"def f{i}(x) = y{i}" for i in range(500))
    + "\nscore = "
    + " + ".join(f"f{i}(1)" for i in range(500))
)
TEXTS["bad characters"] = "$" * 16000
TEXTS["strings"] = '"' * 16000
TEXTS["backslashes"] = "score = score \\\n" * 900 + "+ 1"
TEXTS["t5 of everything"] = "tensor t[heads, 32]: float\nscore = score" + "".join(
    f" + t[h, t5_bucket(q - kv * {i + 1}, 32, 128)]" for i in range(60)
)
TEXTS["natten of natten"] = "mask = " + " and ".join(
    f"natten2d({p}, {p + 4}, 5, 7)" for p in P[4:12]
)
TEXTS["block diffusions"] = "mask = " + " or ".join(
    f"block_diffusion({p * 16}, {p})" for p in P[:8]
)
TEXTS["tokens"] = "tensor t[tokens]: int\nmask = " + " and ".join(
    f"t[token] % {p} != kv % {p}" for p in P
)
TEXTS["sta3d"] = "mask = " + " and ".join(f"sta3d({p}, {p + 2}, 8, 1, 2, 3)" for p in P[:6])


def _given(attention: attndsl.Attention, length: int) -> dict[str, Any]:
    program = attention.lowered.program
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 16}
    sizes |= {"q_len": length, "kv_len": length}
    numbers = {"int": 3, "float": 0.5, "bool": True}
    found: dict[str, Any] = {
        decl.name: numbers[decl.dtype.value] for decl in program.params if decl.default is None
    }
    return found | make_captures(program, sizes, "cpu", torch.Generator().manual_seed(0))


def _call(attention: attndsl.Attention, backward: bool) -> None:
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=backward) for _ in range(3))
    out = attention(q, k, v, captures=_given(attention, 64))
    if backward:
        out.sum().backward()


def _play(text: str, kind: RequestKind) -> None:
    found = answer(PageRequest(kind, text, view=PictureCall(q_len=32, kv_len=32, cost_len=512)))
    assert not any("report" in (each.hint or "") for each in found.problems), found.problems


def _at(text: str) -> Any:
    return embedded_programs.program_at(
        embedded_programs.programs_in(text, "a.attn"), len(text) - 1
    )


OF_TEXTS: dict[str, Callable[[str], object]] = {
    "parse": lambda text: parsed(Source(text)),
    "check": lambda text: pipeline.warnings_of(Source(text), {}),
    "lower": lambda text: pipeline.lower(Source(text), {}),
    "compile": attndsl.compile,
    "fmt": format_source,
    "show": lambda text: pipeline.stages(Source(text), {}),
    "names": lambda text: pipeline.names_of(Source(text), {}),
    "picture": lambda text: _play(text, RequestKind.PICTURE),
    "problems": lambda text: diagnostics.problems_in(text, "a.attn"),
    "hover": lambda text: (at := _at(text)) and hover.note_at(*at),
    "completion": lambda text: (at := _at(text)) and completion.proposals_at(*at),
    "definition": lambda text: (at := _at(text)) and hover.definition_at(*at),
    "colours": lambda text: semantic_tokens.colours_in(
        embedded_programs.programs_in(text, "a.attn"), lines_of(text, "utf-16")
    ),
    "outline": lambda text: document_symbols.symbols_in(
        embedded_programs.programs_in(text, "a.attn")
    ),
    "layout": lambda text: formatting.edits_of(text, "a.attn"),
}
"""Stages that begin with the text."""
OF_PROGRAMS: dict[str, Callable[[attndsl.Attention], object]] = {
    "explain": lambda a: a.explain(),
    # Lengths of a few tiles: where pairs are evaluated, the time is that of the lengths asked for.
    "explain at lengths": lambda a: a.explain(q_len=384, kv_len=384, captures=_given(a, 384)),
    "tiles": lambda a: a.tiles(512, 512, captures=_given(a, 512)),
    "cpu forward": lambda a: _call(a, False),
    "cpu backward": lambda a: _call(a, True),
    "triton forward": lambda a: a.source("forward", backend="triton"),
    "triton backward": lambda a: a.source("backward", backend="triton"),
    "triton tangent": lambda a: a.source("tangent", backend="triton"),
    "hopper forward": lambda a: a.source("forward", backend="hopper"),
    "hopper backward": lambda a: a.source("backward", backend="hopper"),
    "decode forward": lambda a: a.source("forward", backend="decode"),
    "short backward": lambda a: a.source("backward", backend="short"),
}
"""Stages that begin with what was compiled."""
STAGES = (*OF_TEXTS, *OF_PROGRAMS)
WARM = """
tensor u[heads]: float
param w: int = 5
mask = q - kv < w + 1 + w + 1
score = tanh(u[h] * score)
"""


def warm_up() -> None:
    """Have everything imported that a stage needs, with one thread: forks have no others."""
    torch.set_num_threads(1)
    for stage in STAGES:
        run(stage, WARM)


def run(stage: str, text: str) -> tuple[float, int, str]:
    """Processor time in seconds, peak of memory in megabytes, and how it ended."""
    work: Callable[[], object]
    told = "result"
    begin, before = time.process_time(), _resident()
    try:
        if stage in OF_TEXTS:
            work = lambda: OF_TEXTS[stage](text)  # noqa: E731
        else:
            attention = attndsl.compile(text)
            work = lambda: OF_PROGRAMS[stage](attention)  # noqa: E731
            begin = time.process_time()
        work()
    except AttnDSLError as error:
        told = f"refused: {error.message}"[:80] if hasattr(error, "message") else "refused"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        told = f"RAW {type(error).__name__} at {os.path.basename(frame.filename)}:{frame.lineno}"
    return time.process_time() - begin, max(0, _peak() - before) >> 20, told


def _resident() -> int:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return _peak()


def _peak() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def run_alone(stage: str, text: str, most: int = 8) -> tuple[float, int, str]:
    """The same in a process of its own, which is stopped after ``most`` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        os.write(writing, json.dumps(run(stage, text)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        found = file.read()
    os.waitpid(child, 0)
    return tuple(json.loads(found)) if found else (float(most), 0, "STOPPED")


def slowness() -> float:
    """How many times as long an addition takes here and now, 1 or more."""
    begin = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number
    return max(1.0, 100 * (time.process_time() - begin))


def is_bounded(found: tuple[float, int, str]) -> bool:
    """Whether a stage kept its bounds, and ended in a result or in a refusal."""
    seconds, megabytes, told = found
    ended = told == "result" or told.startswith("refused")
    return seconds <= SECONDS * slowness() and megabytes <= MEGABYTES and ended


def main() -> None:
    """Print what breaks the bounds, and the worst of all texts and stages."""
    print(f"additions take {slowness():.1f} times as long as on the machine of the bounds")
    warm_up()
    rows = []
    for name in sys.argv[1:] or TEXTS:
        for stage in STAGES:
            found = run_alone(stage, TEXTS[name])
            rows.append((*found, name, stage))
            if not is_bounded(found):
                print("BEYOND", *rows[-1], flush=True)
    for place, what in ((0, "seconds"), (1, "megabytes")):
        print(f"\n{what}")
        for row in sorted(rows, key=lambda row: -row[place])[:12]:
            print(f"{row[0]:6.2f} s {row[1]:5d} MB  {row[3]:24} {row[4]:20} {row[2]}")


if __name__ == "__main__":
    main()
