"""Places to run on, and the tolerance method.

A *place* is a backend on a device. On a machine without CUDA the Triton kernels run under Triton's
interpreter, which must be chosen before the first kernel is decorated; so it is done here, first.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from support.interpreter import hasten

import attndsl
from attndsl.foundation.caches import CACHES, Reason
from attndsl.inspection.reference_check import Case
from attndsl.inspection.tolerance import largest_allowed, spreads_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    hasten()
if not torch.cuda.is_available():
    # Garbage of small tensors may wait. Compilers make so many objects that collections at Python's
    # pace take an eighth of the time of all tests.
    gc.set_threshold(20_000, 10, 10)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FACTOR = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 10.0}
GRADIENT_FACTOR = {"out": 1.0, "lse": 1.0, "q": 2.5, "k": 4.0, "v": 4.0}
RMSE_FACTOR = 1.35
TRUNCATION = 4.0
"""How much more Triton's interpreter may err in bf16, to which it truncates where GPUs round."""
FLOOR = 16 * torch.finfo(torch.float32).eps
"""Rounding of fp32 sums, which both may have where the other happens to be exact."""

_BY_ERRORS = {torch.float16: 4.0, torch.bfloat16: 4.0, torch.float32: 16.0, torch.float64: 4.0}
"""How many times the mean errors of a row and of all rows stand for a spread. Errors of a row of
few keys are few errors, which may be small by chance. On GPUs a product in fp32 is three of TF32,
whose operands have two bits less together."""

Dense = Callable[[torch.Tensor, SimpleNamespace], Any]


@dataclass(frozen=True)
class Place:
    """A backend, a device, and the sizes that are affordable there."""

    backend: str
    device: str
    length: int = 24
    """On CPUs, where interpreted tiles are 32 wide: one tile, unless a test asks for more."""

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels."""
        return self.backend == "triton" and self.device == "cpu"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, length, head dim."""
        return (4, 8, 2048, 64) if self.device == "cuda" else (2, 2, self.length, 16)


def pytest_collection_finish() -> None:
    """Spare collections the thousands of tests and what they import: all of it stays to the end.

    At the very end it goes, as libraries report leaks otherwise: pytest looks for garbage ten times
    before that.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of the larger grids of interpreted kernels, a second a test, to ``-m slow``.

    The mark ``few_when_interpreted`` names values of a test's parameters: a case stays if it has
    one of the values of each parameter that one such mark names. No case of a test stays that is
    marked ``none_when_interpreted``. What differs by dtype, length, layout or mask is covered by
    the cases that stay, and by GPUs.
    """
    for item in items:
        few = [mark.kwargs for mark in item.iter_markers("few_when_interpreted")]
        none = item.get_closest_marker("none_when_interpreted") is not None
        if few or none:
            values = item.callspec.params
            if _on_interpreter(values) and not any(_are_among(values, named) for named in few):
                item.add_marker(pytest.mark.slow)


def _on_interpreter(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Place) and value.interpreted for value in values.values())


def _are_among(values: Mapping[str, Any], named: Mapping[str, Collection[Any]]) -> bool:
    return all(values[name] in some for name, some in named.items())


def _places() -> list[Any]:
    on_gpu = pytest.param(Place("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu)
    hopper = pytest.param(Place("hopper", "cuda"), id="hopper-cuda", marks=pytest.mark.gpu)
    places = [pytest.param(Place("reference", "cpu"), id="reference"), on_gpu, hopper]
    places.append(pytest.param(Place("cpu", "cpu"), id="cpu"))
    if INTERPRETED:
        places.append(pytest.param(Place("triton", "cpu"), id="triton-interpreted"))
    return places


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    """Every place."""
    return request.param


@pytest.fixture(params=[p for p in _places() if p.values[0].backend != "reference"])
def kernels(request: pytest.FixtureRequest) -> Place:
    """Every place but the reference."""
    return request.param


@pytest.fixture(params=["cpu"] * INTERPRETED + [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that kernels run on."""
    return request.param


@pytest.fixture(params=list(DTYPES))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """fp16, bf16, fp32."""
    return DTYPES[request.param]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # That of torch notes down for a GPU to come, with the stack, each time that it is called.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _memory_for_others(request: pytest.FixtureRequest) -> Any:
    """Processes of one run share a GPU: none keeps memory that it does not use."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kernel cache that starts empty and is no user's; with ATTNDSL_TESTS_CACHE, that folder.

    On GPUs the processes of a run share one: to compile a kernel takes longer than to test it.
    Kernels in attndsl/shipped, which a release makes, are none of theirs.
    """
    with pytest.MonkeyPatch.context() as patch:
        shared = os.environ.get("ATTNDSL_TESTS_CACHE")
        folder = shared or str(tmp_path_factory.mktemp("cache"))
        patch.setenv("ATTNDSL_CACHE_DIR", folder)
        patch.setenv("ATTNDSL_SHIPPED", "0")
        yield


@dataclass
class Inputs:
    """Leaves of a call, and the gradients that come back to it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None = None
    captures: Mapping[str, Any] = field(default_factory=dict)
    """Tensors and numbers by name; those that require grad are compared."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the call."""

    def learned(self) -> list[str]:
        """Names of the captures whose gradients are compared."""
        return [
            name
            for name, value in self.captures.items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]

    def to(self, dtype: torch.dtype) -> Inputs:
        """Copies of the leaves: q, k, v and float captures in fp64 if that is asked for."""

        def leaf(x: torch.Tensor) -> torch.Tensor:
            # Keeps strides, which a clone of an expanded tensor would lose.
            return x.detach().to(dtype).requires_grad_()

        captures = {}
        for name, value in self.captures.items():
            if not isinstance(value, torch.Tensor):
                captures[name] = value
                continue
            wide = value.is_floating_point() and dtype is torch.float64
            copy = value.detach().to(torch.float64) if wide else value.detach().clone()
            captures[name] = copy.requires_grad_(value.requires_grad)
        return Inputs(
            leaf(self.q),
            leaf(self.k),
            leaf(self.v),
            self.grad_out.to(dtype),
            None if self.grad_lse is None else self.grad_lse.to(dtype),
            captures,
            self.options,
        )


def make_inputs(
    place: Place,
    dtype: torch.dtype,
    *,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    dim: int | None = None,
    value_dim: int | None = None,
    with_lse: bool = False,
    captures: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Inputs:
    """Random inputs; sizes that are not given are the place's."""
    default_batch, default_heads, length, default_dim = place.shape
    batch, heads = batch or default_batch, heads or default_heads
    q_len = length if q_len is None else q_len
    kv_len = q_len if kv_len is None else kv_len
    dim, kv_heads = dim or default_dim, kv_heads or heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device).to(dtype)

    return Inputs(
        draw(batch, heads, q_len, dim),
        draw(batch, kv_heads, kv_len, dim),
        draw(batch, kv_heads, kv_len, value_dim or dim),
        draw(batch, heads, q_len, value_dim or dim),
        torch.randn((batch, heads, q_len), device=place.device) if with_lse else None,
        captures or {},
        options or {},
    )


def run(attention: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Output, lse and gradients by name: ``out``, ``lse``, ``q``, ``k``, ``v``, captures."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    leaves |= {name: inputs.captures[name] for name in inputs.learned()}
    found = {}
    if inputs.grad_lse is None:
        found["out"] = attention(inputs.q, inputs.k, inputs.v, **inputs.captures, **inputs.options)
        outputs, grads = [found["out"]], [inputs.grad_out]
    else:
        found["out"], found["lse"] = attention(
            inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures, **inputs.options
        )
        outputs, grads = [found["out"], found["lse"]], [inputs.grad_out, inputs.grad_lse]
        grads[1] = grads[1].to(found["lse"].dtype)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads)
    found |= dict(zip(leaves, gradients, strict=True))
    return {name: value.detach() for name, value in found.items()}


def plain(dense: Dense, inputs: Inputs, scale: float | None = None) -> dict[str, torch.Tensor]:
    """What ``run`` should find, by a formula written with torch alone.

    Args:
        dense: Of the scaled scores and the pair's ``b``, ``h``, ``q``, ``kv`` and captures by
            name: the final scores, or those and which pairs are live.
        inputs: In fp64.
        scale: Factor of q . k; None for 1 / sqrt(head_dim).
    """
    group = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    raw = inputs.q @ k.mT * (inputs.q.shape[-1] ** -0.5 if scale is None else scale)
    steps = [torch.arange(size, device=raw.device) for size in raw.shape]
    b, h, q, kv = (
        step.reshape([-1 if dim == place else 1 for dim in range(4)])
        for place, step in enumerate(steps)
    )
    result = dense(raw, SimpleNamespace(b=b, h=h, q=q, kv=kv, **inputs.captures))
    score, live = result if isinstance(result, tuple) else (result, torch.tensor(True))
    live = live.to(raw.device).expand(raw.shape)
    score = torch.where(live, score.expand(raw.shape), -torch.inf)
    some = live.any(-1, keepdim=True)
    weights = torch.where(some, torch.softmax(torch.where(some, score, 0.0), -1), 0.0)
    lse = torch.where(some, torch.logsumexp(torch.where(some, score, 0.0), -1, True), -torch.inf)
    return run(
        lambda *_, return_lse=False, **__: (
            (weights @ v, lse[..., 0]) if return_lse else weights @ v
        ),
        inputs,
    )


def close(
    golden: Mapping[str, torch.Tensor],
    ref: Mapping[str, torch.Tensor],
    out: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    slack: float = 1.0,
    spread: Mapping[str, torch.Tensor] | None = None,
    more: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fail unless ``out`` is about as near to ``golden`` as ``ref`` is, ``slack`` times.

    No element may be further off than rounding explains in its row: ``spread`` is that of
    :func:`spread_of`. Where the formulas are not those of a program, errors of ``ref`` tell it, and
    ``more`` has what these do not show.
    """
    assert golden.keys() == ref.keys() == out.keys()
    for name, exact in golden.items():
        assert out[name].shape == exact.shape, name
        assert out[name].dtype is ref[name].dtype, name
        if exact.numel() == 0:
            continue
        kept = ~(exact.isinf() & (out[name] == exact))
        assert not (out[name].isnan() & ~ref[name].isnan()).any(), f"{name} has NaN"
        error, usual = (torch.where(kept, exact - x[name].to(exact.dtype), 0.0) for x in (out, ref))
        # The ratio of two RMSEs of n independent errors has a standard deviation of n ** -0.5, and
        # that of two mean errors has 1.07 times as much. Four of them: the tests compare some
        # 30,000 results, and 3 are exceeded by one of 700.
        chance = 1 + 4 * number_of(usual) ** -0.5
        if name in GRADIENT_FACTOR:
            factor = max(FACTOR[dtype] * GRADIENT_FACTOR[name], chance)
            allowed = slack * factor * usual.abs().mean() + FLOOR
            found = error.abs().mean()
        else:
            # Sums over many pairs: both errors grow with the sums themselves.
            floor = FLOOR * (1 + exact.square().mean().sqrt())
            allowed = slack * RMSE_FACTOR * chance * usual.square().mean().sqrt() + floor
            found = error.square().mean().sqrt()
        assert found <= allowed, f"{name}: error {found:.3e}, allowed {allowed:.3e}"
        own = _spread_by_errors(usual, dtype) if spread is None else spread[name]
        if more is not None and name in more:
            own = torch.hypot(own, more[name])
        exact = torch.where(kept, exact, 0.0)
        rows = name in ("out", "q", "k", "v")
        largest = largest_allowed(exact, usual.abs(), own, out[name].dtype, rows) + FLOOR
        share = torch.where(error.isnan(), 0.0, error.abs() / largest)  # NaN of the reference.
        if share.max() > 1:
            place = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
            raise AssertionError(
                f"{name}{[*place]} is off by {error[place]:.3g}, {share.max():.3g} times what "
                f"rounding does to an element; it is {exact[place]:.6g}, and others err by "
                f"{usual[place[:-1]].abs().amax():.3g} in its row, {usual.abs().amax():.3g} at all"
            )


def _spread_by_errors(errors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """About the spread of each element, from the errors of a result of the same dtype."""
    squares = torch.where(errors.isfinite(), errors, 0.0).double().square()
    row = squares.mean(-1, keepdim=True) if squares.dim() else squares
    return _BY_ERRORS[dtype] * (row + squares.mean()).sqrt().expand(errors.shape)


def spread_of(text: str, inputs: Inputs, dtype: torch.dtype, **declared: Any) -> dict[str, Any]:
    """The spread of each element of what ``run`` finds of a program in ``dtype``."""
    attention = attndsl.compile(text, backend="reference", **declared)
    grad_lse = inputs.grad_lse
    case = Case(
        (inputs.q, inputs.k, inputs.v), inputs.captures, inputs.options, tuple(inputs.learned()),
        grad_out=inputs.grad_out, grad_lse=grad_lse,
    )  # fmt: skip
    found = spreads_of(attention, case, dtype)
    names = {"dq": "q", "dk": "k", "dv": "v"} | {f"d{name}": name for name in inputs.learned()}
    return {names.get(name, name): value for name, value in found.items()}


def number_of(errors: torch.Tensor) -> float:
    """How many normal errors of one size would add up to a mean square as uncertain, 1 or more.

    Few large ones among many count as few, and those of elements that no pair looks up not at all.
    """
    squares = errors.double().square()
    number = 3 * squares.sum() ** 2 / squares.square().sum().clamp(min=1e-300)
    return max(1.0, min(float(number), int((squares != 0).sum())))


def pooled(draws: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Results of several inputs as of one: a few numbers do not tell how large errors are."""
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


class Checker:
    """Runs one program at a place and holds it to the tolerance method."""

    inputs = staticmethod(make_inputs)
    run = staticmethod(run)
    plain = staticmethod(plain)
    close = staticmethod(close)
    pooled = staticmethod(pooled)
    number_of = staticmethod(number_of)
    spread_of = staticmethod(spread_of)

    def __call__(
        self,
        place: Place,
        text: str,
        inputs: Inputs,
        dense: Dense | None = None,
        attention: Any = None,
        **declared: Any,
    ) -> None:
        """Compare ``text`` at ``place``.

        The reference itself is held to ``dense`` in fp64 instead (1e-9), where that is given.

        Args:
            place: Where.
            text: The program.
            inputs: In the tested dtype.
            dense: See :func:`plain`.
            attention: The compiled program, if it is not to be compiled here.
            **declared: Given to ``compile``.
        """
        dtype = inputs.q.dtype
        oracle = attndsl.compile(text, backend="reference", **declared)
        golden = run(oracle, inputs.to(torch.float64))
        if place.backend == "reference":
            if dense is not None:
                expected = plain(dense, inputs.to(torch.float64), inputs.options.get("scale"))
                for name, value in expected.items():
                    torch.testing.assert_close(golden[name], value, atol=1e-9, rtol=1e-9)
            found = run(oracle, inputs.to(dtype))
            loose = 2e-5 if dtype is torch.float32 else 0.1
            for name, value in golden.items():
                finite = value[value.isfinite()].abs()
                scale = 1 + float(finite.max()) if finite.numel() else 1.0
                torch.testing.assert_close(
                    found[name].to(value.dtype), value, atol=loose * scale, rtol=loose
                )
            return
        ref = run(oracle, inputs.to(dtype))
        if attention is None:
            attention = attndsl.compile(text, backend=place.backend, **declared)
        found = run(attention, inputs.to(dtype))
        spread = spread_of(text, inputs, dtype, **declared)
        close(golden, ref, found, dtype, _slack(place, dtype), spread)

    def draws(self, place: Place, text: str, several: Sequence[Inputs]) -> None:
        """Compare ``text`` at ``place``, the errors at all of the inputs taken together."""
        dtype = several[0].q.dtype
        oracle = attndsl.compile(text, backend="reference")
        attention = attndsl.compile(text, backend=place.backend)
        golden = pooled([run(oracle, one.to(torch.float64)) for one in several])
        ref, out = (
            pooled([run(program, one.to(dtype)) for one in several])
            for program in (oracle, attention)
        )
        spread = pooled([spread_of(text, one, dtype) for one in several])
        close(golden, ref, out, dtype, _slack(place, dtype), spread)


def _slack(place: Place, dtype: torch.dtype) -> float:
    return TRUNCATION if place.device == "cpu" and dtype is torch.bfloat16 else 1.0


@pytest.fixture
def check() -> Checker:
    """``check(place, text, check.inputs(place, dtype), ...)``."""
    return Checker()


@pytest.fixture
def quickest() -> Callable[[Callable[[], object]], float]:
    """Seconds of CPU time that an action takes: the least of three runs, collector of garbage off.

    A loaded machine, or a collection over everything that the tests before left behind, can double
    the time of one run; an action that is slow by itself is slow each time. Nothing is collected
    before either: that takes over a second late in a run of all tests.
    """

    def least(action: Callable[[], object]) -> float:
        found = []
        for _ in range(3):
            gc.disable()
            try:
                begin = time.process_time()
                action()
                found.append(time.process_time() - begin)
            finally:
                gc.enable()
        return min(found)

    return least


@pytest.fixture
def counted(tmp_path: Any) -> Any:
    """A Triton backend of its own, whose ``kernels_built`` starts at 0 and finds no cache."""
    from attndsl.backends.cache_entries import Entry
    from attndsl.backends.engine.backend import generated_backend

    class Folder:
        """A store in a folder."""

        def load(self, key: str) -> Entry | None:
            return None

        def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
            path = tmp_path / f"{key}.py"
            path.write_text(source, "utf-8")
            return Entry(path, source, meta)

    return generated_backend(("triton",), Folder())


@pytest.fixture
def without_gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Triton without Gluon; gives the module that cannot be imported then."""
    from attndsl.backends.engine.families import families_of, why_not_loaded

    def forget() -> None:
        families_of.cache_clear()
        why_not_loaded.cache_clear()

    name = "attndsl.backends.hopper.family"
    monkeypatch.setitem(sys.modules, name, None)
    forget()
    yield name
    forget()


@pytest.fixture
def own_cache(request: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache folder and backends of the test's own; the module's CONFIGS for the interpreter."""
    from attndsl.backends.triton import tiles

    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "INTERPRETED", request.module.CONFIGS)
    CACHES.invalidate(Reason.BACKENDS)
    yield tmp_path
    CACHES.invalidate(Reason.BACKENDS)


@pytest.fixture
def graphs() -> Any:
    """``graphs(function, dynamic=...)`` compiles without breaks; ``graphs.counter`` has them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def make(function: Any, backend: Any = counter, **options: Any) -> Any:
        return torch.compile(function, backend=backend, fullgraph=True, **options)

    make.counter = counter  # type: ignore[attr-defined]
    yield make
    torch._dynamo.reset()
