"""The support table: what runs each feature, as the code itself answers.

``python tools/support_table.py`` prints the page, ``--write`` writes ``docs/support.md``. No GPU is
needed: families of kernels are asked for their refusals (``why_not``, ``check``) of calls that are
bound and never made, for a Hopper GPU that is not there.

The programs are in ``support_features.py``. A refusal is a note in its own words.
"""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest import mock

from support_features import BATCH, FEATURES, HEADS, KV_HEADS, PLAIN
from ways import ROOT, kernels_that_never_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from support_features import Feature

    from attndsl.backends.base import Backend, Call
    from attndsl.backends.kernels.kernel import Family, Task
    from attndsl.pipeline import Lowered

PAGE = ROOT / "docs" / "support.md"
MOST_WORDS = 700
Row = TypeVar("Row")
_YES, _PORTABLE, _TORCH, _NO, _NONE = "yes", "portable", "torch", "no", "-"
_ORDER = (_YES, _PORTABLE, _TORCH, _NO, _NONE)
"""Verdicts, the best one first."""
HEAD_DIMS = (64, 128, 192, 256)
"""Those that features are judged at, as far as the plain program runs there."""
MORE_HEAD_DIMS = (64, 96, 100, 128, 192, 256, 512)
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_HALF = ("bf16", "fp16")
_LONG, _SHORT = 1024, 16
_LENGTHS = {"short": (_SHORT, _SHORT), "decode": (1, _LONG)}
"""Rows and keys that a backend is for, where these are few."""
_LARGER_DIMS = (513, 4096)
"""The last one stands for any."""
_PAGE_SIZE = 64


class Verdict(NamedTuple):
    """An answer: what runs a task, and why nothing better does."""

    by: str
    reason: str = ""


class Asked(NamedTuple):
    """A call that is bound and never made, with the backend that would get it."""

    backend: Backend
    lowered: Lowered
    call: Call
    pushes: bool
    """True if the backend has tangents."""
    learned: frozenset[str]


class Notes:
    """Reasons by their numbers, in the order in which cells mention them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, verdicts: Iterable[Verdict]) -> str:
        """The best verdict, with the numbers of all reasons."""
        found = list(verdicts)
        if not found:
            return _NONE
        best = min((each.by for each in found), key=_ORDER.index)
        reasons = dict.fromkeys(each.reason for each in found if each.reason)
        numbers = [self._numbers.setdefault(each, len(self._numbers) + 1) for each in reasons]
        return best + (f"<sup>{','.join(map(str, numbers))}</sup>" if numbers else "")

    def lines(self) -> list[str]:
        """The notes as a numbered list."""
        return [f"{number}. {reason}" for reason, number in self._numbers.items()]


@contextmanager
def absent_hopper() -> Iterator[None]:
    """A Hopper GPU, as far as the choice of backends looks; kernels are made and not launched."""
    with kernels_that_never_run():
        from attndsl.backends.triton.family import Portable
        from attndsl.call import dispatch

        with (
            mock.patch.object(dispatch, "_target_of", return_value=dispatch.HOPPER),
            mock.patch.object(Portable, "why_no_device", return_value=None),
        ):
            yield


def tensors_of(
    feature: Feature, dtype: str, head_dim: int, q_len: int = _LONG, kv_len: int = _LONG
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Operands of a call, which hold nothing in particular, and its other arguments."""
    import torch

    own = getattr(torch, DTYPES[dtype])
    kinds = {"f": own, "s": torch.float32, "i": torch.int32, "b": torch.bool}
    sizes = {"q": q_len, "kv": kv_len, "2 kv": 2 * kv_len}
    captures = {
        name: torch.zeros([sizes.get(str(dim), dim) for dim in dims], dtype=kinds[kind])
        for name, (dims, kind) in feature.tensors.items()
    }
    meant = {
        "by entry": torch.full((BATCH,), kv_len, dtype=torch.int32),
        "by key": torch.arange(kv_len, dtype=torch.int32),
        "fp32": torch.float32,
    }
    arguments = {
        name: meant[value] if isinstance(value, str) else value
        for name, value in feature.call.items()
    }
    q = torch.empty((BATCH, HEADS, q_len, head_dim), dtype=own)
    k, v = torch.empty((2, BATCH, KV_HEADS, kv_len, head_dim), dtype=own)
    return (q, k, v), {**arguments, "captures": captures}


def ask(
    feature: Feature, dtype: str, head_dim: int, backend: str = "auto", device: str = "cuda",
    lengths: tuple[int, int] = (_LONG, _LONG),
) -> Asked | Verdict:  # fmt: skip
    """The backend and the call that it would get, or a refusal."""
    import torch

    import attndsl
    from attndsl.backends.base import ForwardMode
    from attndsl.call.attention_base import located_call
    from attndsl.call.dispatch import backend_of

    operands, arguments = tensors_of(feature, dtype, head_dim, *lengths)
    try:
        lowered, call = located_call(attndsl.compile(feature.text), operands, arguments)
        where = torch.device(device)
        chosen, _ = backend_of(lowered, backend, where, feature.checked, call.q.dtype)
        chosen.check(lowered, call)
    except attndsl.AttnDSLError as refusal:
        return Verdict(_NO, refusal.message)
    runner, lowered, call = chosen.runner(lowered, call, "forward")
    learned = frozenset(feature.learned) & call.tensors.keys()
    return Asked(runner, lowered, call, isinstance(chosen, ForwardMode), learned)


def judge(asked: Asked | Verdict, task: Task) -> Verdict:
    """The first family of kernels that runs a task, and what the best one objects."""
    from attndsl.backends.base import Wants
    from attndsl.backends.engine.backend import GeneratedBackend
    from attndsl.backends.kernels.kernel import Task, kernels_of, plan_of

    if isinstance(asked, Verdict):
        return asked
    backend, lowered, call, pushes, learned = asked
    if task is Task.FORWARD_TANGENT and not pushes:
        return Verdict(_TORCH)
    if not isinstance(backend, GeneratedBackend):
        return Verdict(_TORCH, _why_torch(asked))
    wants = Wants(tensors=learned)
    own = wants if task is Task.FORWARD_TANGENT else None
    if task is Task.BACKWARD:
        own = plan_of(backend.families, lowered, call, wants).lines
    for family in backend.families:
        # Those before are for few keys or rows alone, and their limits are in a table of their own.
        if family.name == "hopper" and kernels_of(family, task):
            reason = family.why_not(lowered, call, task, None, own)
            return Verdict(_YES) if reason is None else Verdict(_PORTABLE, reason)
    return Verdict(_PORTABLE)


def _why_torch(asked: Asked) -> str:
    """The reason why torch operations run a program with contractions; empty for others."""
    from attndsl.backends.tiled.contractions import WidenedBackend, why_tiles

    if isinstance(asked.backend, WidenedBackend):
        return why_tiles(asked.lowered, asked.call) or ""
    return ""


def tasks() -> tuple[Task, ...]:
    """The tasks that are columns."""
    from attndsl.backends.kernels.kernel import Task

    return Task.FORWARD, Task.BACKWARD, Task.FORWARD_TANGENT


def page() -> str:
    """The page, as the code answers now."""
    with absent_hopper():
        notes = Notes()
        parts = {
            "shapes": _shapes(notes),
            "features": _features(notes),
            "pages": _pages(),
            "backends": _backends(),
            "transforms": _transforms(),
            "notes": notes.lines(),
        }
    return _PAGE.format(**{name: "\n".join(lines) for name, lines in parts.items()})


def _shapes(notes: Notes) -> list[str]:
    """Rows of head dims and dtypes, for the plain program."""
    by_dim = {str(dim): _verdicts(PLAIN, "bf16", dim) for dim in MORE_HEAD_DIMS}
    others = (dtype for dtype in DTYPES if dtype not in _HALF)
    by_dtype = {dtype: _verdicts(PLAIN, dtype, 128) for dtype in others}
    lines = list(_head("Head dim in bf16, or dtype"))
    for name, verdicts in (*_grouped(by_dim), *_grouped(by_dtype)):
        lines.append(_line(name, *(notes.cell([each]) for each in verdicts)))
    return lines


def _features(notes: Notes) -> list[str]:
    """Rows of features. A cell counts the settings at which the plain program has Hopper's."""
    settings = [(dtype, dim) for dtype in _HALF for dim in HEAD_DIMS]
    plain = {setting: _verdicts(PLAIN, *setting) for setting in settings}
    rows = {}
    for feature in FEATURES:
        found = {setting: _verdicts(feature, *setting) for setting in settings}
        rows[feature.name] = tuple(
            tuple(found[x][place] for x in settings if plain[x][place].by == _YES)
            for place in range(len(tasks()))
        )
    lines = list(_head("Feature"))
    for names, cells in _grouped(rows):
        lines.append(_line(names, *map(notes.cell, cells)))
    return lines


def _grouped(rows: Mapping[str, Row]) -> Iterator[tuple[str, Row]]:
    """Names of equal rows together, and the row."""
    found: dict[Row, list[str]] = {}
    for name, row in rows.items():
        found.setdefault(row, []).append(name)
    return ((", ".join(names), row) for row, names in found.items())


def _verdicts(feature: Feature, dtype: str, dim: int) -> tuple[Verdict, ...]:
    """A verdict for each task."""
    asked = ask(feature, dtype, dim)
    return tuple(judge(asked, task) for task in tasks())


def _pages() -> list[str]:
    """Features that steps of packed requests read no pages with, and why."""
    served = {feature.name: serve_verdict(feature) for feature in FEATURES}
    return [
        f"- {name}: {_of_row(name, verdict.reason)}"
        for name, verdict in served.items()
        if verdict is not None and verdict.by != _YES
    ]


def _of_row(name: str, reason: str) -> str:
    """A refusal of ``serve`` as Markdown, next to the name of its feature."""
    return reason.replace("serve does", "`serve` does").replace(f" {name}", " it")


class _Answer(Exception):
    """Ends a step of packed requests where its backend has been chosen. It carries a verdict."""


def serve_verdict(feature: Feature) -> Verdict | None:
    """What runs a step of packed requests over pages; None where a step has no such arguments."""
    import torch

    import attndsl
    from attndsl.backends.engine.backend import GeneratedBackend
    from attndsl.serving.serve_call import Serving

    if not feature.serves:
        return None
    why_not_pages = GeneratedBackend.why_not_pages

    def answer(*given: Any) -> None:
        reason = why_not_pages(*given)
        raise _Answer(Verdict(_YES) if reason is None else Verdict(_PORTABLE, reason))

    def gather(*_: object) -> None:
        raise _Answer(Verdict(_PORTABLE, "`serve` gathers the keys first"))

    _, arguments = tensors_of(feature, "bf16", 128)
    pages = torch.zeros((BATCH * _LONG // _PAGE_SIZE, _PAGE_SIZE, KV_HEADS, 128)).bfloat16()
    table = torch.arange(len(pages), dtype=torch.int32).view(BATCH, -1)
    cache = attndsl.PagedCache(pages, pages, table, torch.tensor([20, 30], dtype=torch.int32))
    starts = torch.arange(BATCH + 1, dtype=torch.int32)
    attention = attndsl.compile(feature.text, backend="decode")
    with (
        mock.patch.object(GeneratedBackend, "why_not_pages", answer),
        mock.patch.object(Serving, "_attend_step", gather),
    ):
        try:
            q = torch.zeros((BATCH, HEADS, 128)).bfloat16()
            attention.serve(q, cache, starts, captures=arguments["captures"], most_queries=1)
        except _Answer as found:
            (verdict,) = found.args
            assert isinstance(verdict, Verdict)
            return verdict
        except attndsl.AttnDSLError as refusal:
            return Verdict(_NO, refusal.message)
    raise AssertionError("a step asks for pages, gathers keys, or is refused")


def _backends() -> list[str]:
    """The backends by name: dtypes, head dims, and features that they leave to others."""
    from attndsl.call.dispatch import BACKENDS

    rows: dict[str, str] = {}
    for name in BACKENDS:
        lengths = _LENGTHS.get(name, (_LONG, _LONG))

        def refusals(
            feature: Feature, dtype: str = "bf16", dim: int = 128, name: str = name,
            lengths: tuple[int, int] = lengths,
        ) -> tuple[Verdict, ...]:  # fmt: skip
            return refusals_by(name, ask(feature, dtype, dim, name, "cuda", lengths))

        dtypes = [dtype for dtype in DTYPES if not refusals(PLAIN, dtype)]
        dims = [dim for dim in (*MORE_HEAD_DIMS, *_LARGER_DIMS) if not refusals(PLAIN, dim=dim)]
        most = "any head dim" if dims[-1] == _LARGER_DIMS[-1] else f"head dims up to {dims[-1]}"
        line = f"{', '.join(dtypes)}; {most}"
        if name in _LENGTHS:
            line += _limits(name)
            named = {x.name: found for x in FEATURES if not x.checked and (found := refusals(x))}
            refused = [
                f"{' or '.join(names.rsplit(', ', 1))} ({found[0].reason})"
                for names, found in _grouped(named)
            ]
            line += f"; no {', '.join(refused)}" if refused else ""
        rows[f"`{name}`"] = line
    return [f"- {names}: {line}" for names, line in _grouped(rows)]


def _limits(name: str) -> str:
    """The most keys or rows of queries that a backend's own family takes."""
    from attndsl.backends.kernels.kernel import Task

    asked = ask(PLAIN, "bf16", 128, name, "cuda", _LENGTHS[name])
    assert isinstance(asked, Asked)
    family = _own_family(name, asked)
    keys, rows = family.most_keys(Task.FORWARD, 128), family.most_queries(Task.FORWARD)
    told = "" if keys is None else f"; up to {keys} keys at head dim 128"
    return told if rows is None else f"{told}; up to {rows} queries; forward only"


def _own_family(name: str, asked: Asked) -> Family:
    from attndsl.backends.engine.backend import GeneratedBackend

    assert isinstance(asked.backend, GeneratedBackend)
    (family,) = (x for x in asked.backend.families if x.name == name)
    return family


def refusals_by(name: str, asked: Asked | Verdict) -> tuple[Verdict, ...]:
    """What the backend called ``name``, or its own family, objects to a forward and a backward."""
    from attndsl.backends.base import Wants
    from attndsl.backends.engine.backend import GeneratedBackend
    from attndsl.backends.kernels.kernel import kernels_of

    if isinstance(asked, Verdict):
        return (asked,)
    if not isinstance(asked.backend, GeneratedBackend):
        return ()
    family = _own_family(name, asked)
    found = []
    for task in tasks()[:2]:
        if kernels_of(family, task):
            wants = Wants(tensors=asked.learned) if task.name == "backward" else None
            own = wants and family.plan_gradients(asked.lowered, asked.call, wants).lines
            found.append(family.why_not(asked.lowered, asked.call, task, None, own))
    reasons = dict.fromkeys(reason for reason in found if reason is not None)
    return tuple(Verdict(_PORTABLE, reason) for reason in reasons)


def _transforms() -> list[str]:
    """Derivatives and transforms of a call, by what runs them."""
    import torch

    import attndsl
    from attndsl.call import chunked_autograd

    attention = attndsl.compile(PLAIN.text, backend="hopper")
    found: dict[str, list[str]] = {}
    for name, transform in TRANSFORMS.items():
        x = torch.zeros((1, 1, 16, 64), dtype=torch.bfloat16, requires_grad=True)
        chunks = mock.Mock(wraps=chunked_autograd._chunks)
        with mock.patch.object(chunked_autograd, "_chunks", chunks):
            transform(lambda q: attention(q, q, q).sum(), x)
        by = "torch operations" if chunks.called else "kernels"
        found.setdefault(by, []).append(name)
    return [f"- With {by}: {', '.join(names)}." for by, names in found.items()]


def _gradient(function: Callable[[Any], Any], x: Any) -> Any:
    import torch

    (found,) = torch.autograd.grad(function(x), x, create_graph=True)
    return found


def _func(name: str) -> Callable[[Callable[[Any], Any], Any], Any]:
    """A transform of ``torch.func``."""

    def transform(function: Callable[[Any], Any], x: Any) -> Any:
        import torch

        return getattr(torch.func, name)(function)(x.detach()[None] if name == "vmap" else x)

    return transform


def _jvp(function: Callable[[Any], Any], x: Any) -> Any:
    import torch

    return torch.func.jvp(function, (x.detach(),), (x.detach(),))


TRANSFORMS: Mapping[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "`backward`": _gradient,
    "`torch.func.jvp`": _jvp,
    "double backward": lambda function, x: _gradient(lambda y: _gradient(function, y).sum(), x),
    "`torch.func.grad`": _func("grad"),
    "`torch.func.vmap`": _func("vmap"),
}
"""Takes a function of one tensor, and that tensor."""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(first: str) -> tuple[str, str]:
    return _line(first, "Forward", "Backward", "JVP"), "|---|---|---|---|"


_PAGE = """\
# Support

`python tools/support_table.py --write` generates this page from the checks in the code. Each cell
shows what runs a call with `backend="auto"` on a Hopper GPU:

- **yes**: Hopper kernels
- **portable**: Triton kernels, as on all other GPUs
- **torch**: torch operations, as on CPUs
- **no**: an error

Superscripts refer to the [notes](#notes).

## Head dims and dtypes

{shapes}

## Features

For fp16 and bf16 at the head dims above. A *learned* tensor receives a gradient.

{features}

With `backend="decode"`, `serve` reads pages directly, with these exceptions:

{pages}

## Backends

{backends}

## Derivatives

{transforms}

## Notes

{notes}
"""


def main(arguments: Sequence[str] | None = None, echo: Callable[[str], object] = print) -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="Make the support table from the code's refusals.")
    parser.add_argument("--write", action="store_true", help="write docs/support.md")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(page(), "utf-8")
    else:
        echo(page())


if __name__ == "__main__":
    main()
