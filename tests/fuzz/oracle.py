"""What a case must give, by plain torch in fp64: every pair by itself, nothing fused.

Pairs are one long list. A program is interpreted on the pairs that are live, a branch of ``where``
on the pairs that take it, so that no value or derivative exists that the language does not speak
of. Derivatives are autograd's.

The same interpretation with random relative errors after each operation tells how far a result of
limited precision may lie off, and whether a comparison, a kink or a rounding to an int could fall
otherwise (stochastic arithmetic: J. Vignes, A stochastic arithmetic for reliable scientific
computation, Mathematics and Computers in Simulation 35, 1993).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .inputs import arriving, python_call, shapes, value_of
from .operations import Rounding
from .program import (
    Apply,
    Dot,
    Invoke,
    Kind,
    Literal,
    Load,
    Local,
    Masked,
    Member,
    Name,
    Target,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .program import Case, Expr

MOST_ELEMENTS = 1 << 27
"""Of an operand or a captured tensor: 1 GiB in fp64, and several processes have one each."""
_LARGE = float(1 << 62)


@dataclass(frozen=True, slots=True)
class Precision:
    """Relative errors of one operation."""

    score: float
    """Of what the program computes, and of the raw score."""
    function: float
    """Of exponentials, sines and so on in the score; masks have exact ones."""
    weight: float
    """Of weights, their sums, and gradients of the score: the dtype of q, k and v."""


EXACT = Precision(0.0, 0.0, 0.0)
PRECISIONS = {
    "float64": Precision(2.0**-50, 2.0**-48, 2.0**-50),
    "float32": Precision(2.0**-22, 2.0**-20, 2.0**-22),
    "float16": Precision(2.0**-22, 2.0**-10, 2.0**-10),
    "bfloat16": Precision(2.0**-22, 2.0**-10, 2.0**-7),
}


_TURN = 4.0
"""Operands beyond err by what is left of them after whole turns, or not at all."""


class Unfit(Exception):
    """A case that no backend can be held to, and why."""


class _Err(torch.autograd.Function):
    """``x`` with a relative error, and its gradient with another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor, back: torch.Tensor) -> Any:
        ctx.save_for_backward(back)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad * back, None, None


@dataclass(slots=True)
class Errors:
    """Draws errors and notes decisions."""

    precision: Precision = EXACT
    generator: torch.Generator = field(default_factory=torch.Generator)
    decisions: list[torch.Tensor] = field(default_factory=list)
    masking: bool = False
    """Whether a mask is computed, by exact functions."""

    def factor(self, x: torch.Tensor, size: float) -> torch.Tensor:
        drawn = torch.rand(x.shape, generator=self.generator, dtype=torch.float64)
        return (1 + size * (2 * drawn - 1)).to(x.device)

    def rounded(self, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        if self.precision is EXACT:
            return x
        return _Err.apply(x, self.factor(x, forward), self.factor(x, backward))

    def operated(
        self, x: torch.Tensor, rounding: Rounding, operand: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` as the result of an operation on ``operand``."""
        if self.precision is EXACT or rounding is Rounding.NEVER:
            return x
        size = self.precision.score
        if rounding is not Rounding.INEXACT:
            size = size if self.masking else self.precision.function
            if rounding is Rounding.OPERAND and operand is not None:
                large = operand.detach().abs()
                most = size * large.clamp(max=_TURN) + self.precision.score * large
                x = x + most * (self.factor(large, 1.0) - 1)
            return self.rounded(x, size, size)
        inexact = x.detach().float().double() != x.detach()
        factors = [torch.where(inexact, self.factor(x, size), 1.0) for _ in range(2)]
        return _Err.apply(x, *factors)

    def sloped(self, found: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
        """``found`` with an absolute error of its derivative by ``operand``."""
        if self.precision is EXACT or self.masking:
            return found
        slope = self.factor(operand.detach(), self.precision.function) - 1
        finite = torch.where(operand.isfinite(), operand, 0.0)
        return found + (finite - finite.detach()) * slope

    def decide(self, found: torch.Tensor) -> None:
        found = found.detach()
        if found.is_floating_point() and bool(found.isnan().any()):
            raise Unfit("a decision on no number")
        self.decisions.append(found)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Some pairs: rows of tensors, and what programs call them."""

    row: torch.Tensor
    """Place among all pairs."""
    variables: Mapping[str, torch.Tensor]
    raw: torch.Tensor
    cache: dict[tuple[int, int], tuple[torch.Tensor, Expr, Frame]] = field(default_factory=dict)

    def select(self, where: torch.Tensor) -> Pairs:
        names = {name: value[where] for name, value in self.variables.items()}
        return Pairs(self.row[where], names, self.raw[where])


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What names stand for: the lines before, and arguments of a function."""

    score: tuple[Expr, Frame] | None = None
    """The last score line, and what it saw; None for the raw score."""
    locals: Mapping[str, tuple[Expr, Frame]] = field(default_factory=dict)
    arguments: Mapping[str, tuple[Expr, Frame]] = field(default_factory=dict)


def _epsilons(case: Case) -> dict[str, float]:
    """Relative errors of the dtypes of float captures."""
    found = {param.name: "float32" for param in case.params}
    found |= {t.name: t.values.dtype for t in case.tensors if t.kind is Kind.FLOAT}
    return {name: torch.finfo(getattr(torch, dtype)).eps for name, dtype in found.items()}


class Interpreter:
    """Values of expressions at pairs."""

    def __init__(self, case: Case, tensors: Mapping[str, torch.Tensor], errors: Errors) -> None:
        self.tensors = tensors
        self.errors = errors
        self.numbers: dict[str, Any] = {**case.sizes.named(), **dict(case.dims)}
        self.numbers |= {param.name: param.value for param in case.params}
        self.epsilons = _epsilons(case)

    def value(self, item: Expr, pairs: Pairs, frame: Frame) -> torch.Tensor:
        """One value a pair."""
        key = (id(item), id(frame))
        if key not in pairs.cache:
            # What the key names is kept, so that no other object gets its place in memory.
            pairs.cache[key] = self._value(item, pairs, frame), item, frame
        return pairs.cache[key][0]

    def _value(self, item: Expr, pairs: Pairs, frame: Frame) -> torch.Tensor:
        if isinstance(item, Literal):
            return self._constant(item.value, pairs)
        if isinstance(item, Name):
            return self._name(item, pairs, frame)
        if isinstance(item, Local):
            return self.value(*self._seen(frame.locals[item.name], pairs))
        if isinstance(item, Invoke):
            given = {
                parameter.name: (arg, frame)
                for parameter, arg in zip(item.function.parameters, item.args, strict=True)
            }
            return self.value(item.function.body, pairs, Frame(frame.score, {}, given))
        if isinstance(item, Masked):
            return self._masked(item, pairs, frame)
        if isinstance(item, Apply) and item.operation.lazy:
            return self._choice(item, pairs, frame)
        args = [self.value(arg, pairs, frame) for arg in item.args]
        if isinstance(item, Load):
            return self._load(item.tensor, args, pairs)
        if isinstance(item, Dot):
            rows = (self._load(item.left, args[: item.split], pairs),
                    self._load(item.right, args[item.split :], pairs))  # fmt: skip
            return self.errors.operated((rows[0] * rows[1]).sum(-1), Rounding.ALWAYS)
        if isinstance(item, Member):
            listed = self._load(item.tensor, args[1:], pairs)
            return (listed == args[0][:, None]).any(-1) != item.turned
        return self._apply(item, args)

    @staticmethod
    def _seen(bound: tuple[Expr, Frame], pairs: Pairs) -> tuple[Expr, Pairs, Frame]:
        return bound[0], pairs, bound[1]

    def _constant(self, value: bool | int | float, pairs: Pairs) -> torch.Tensor:
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
        found = torch.full(pairs.row.shape, value, dtype=dtype, device=pairs.row.device)
        return self.errors.operated(found, Rounding.INEXACT) if dtype is torch.float64 else found

    def _name(self, item: Name, pairs: Pairs, frame: Frame) -> torch.Tensor:
        name = item.name
        if name in frame.arguments:
            return self.value(*self._seen(frame.arguments[name], pairs))
        if name == "score":
            return pairs.raw if frame.score is None else self.value(*self._seen(frame.score, pairs))
        if name in pairs.variables:
            return pairs.variables[name]
        if name in self.tensors:
            found = self.tensors[name].expand(pairs.row.shape)
            if item.kind is not Kind.FLOAT:
                return found
            return self.errors.operated(self._learning(name, found), Rounding.INEXACT)
        return self._constant(self.numbers[name], pairs)

    def _masked(self, item: Masked, pairs: Pairs, frame: Frame) -> torch.Tensor:
        """The score where the condition holds, -inf elsewhere."""
        condition = self.value(item.args[0], pairs, frame)
        live = pairs.select(condition)
        found = torch.full_like(pairs.raw.detach(), -torch.inf)
        return found.index_put((condition.nonzero()[:, 0],), self.value(item.args[1], live, frame))

    def _choice(self, item: Apply, pairs: Pairs, frame: Frame) -> torch.Tensor:
        condition = self.value(item.args[0], pairs, frame)
        parts, places = [], []
        for taken, branch in ((condition, item.args[1]), (~condition, item.args[2])):
            places.append(taken.nonzero()[:, 0])
            parts.append(self.value(branch, pairs.select(taken), frame))
        return torch.cat(parts)[torch.argsort(torch.cat(places))]

    def _learning(self, name: str, found: torch.Tensor) -> torch.Tensor:
        """Elements of a capture, of which each pair's gradient may be rounded to its dtype."""
        return self.errors.rounded(found, 0.0, self.epsilons.get(name, 0.0))

    def _load(self, name: str, places: list[torch.Tensor], pairs: Pairs) -> torch.Tensor:
        """Elements, or rows where there is an index less than dims."""
        tensor = self.tensors[name]
        wide = {torch.bool: torch.bool}.get(
            tensor.dtype, torch.float64 if tensor.is_floating_point() else torch.int64
        )
        sizes = tensor.shape[: len(places)]
        if 0 in sizes:
            shape = (*pairs.row.shape, *tensor.shape[len(places) :])
            return torch.zeros(shape, dtype=wide, device=tensor.device)
        if not places:
            return tensor.to(wide).expand(*pairs.row.shape, *tensor.shape)
        index = [at.clamp(0, size - 1) for at, size in zip(places, sizes, strict=True)]
        found = tensor.to(wide)[tuple(index)]
        return self._learning(name, found) if tensor.requires_grad else found

    def _apply(self, item: Apply, args: list[torch.Tensor]) -> torch.Tensor:
        operation = item.operation
        if operation.decides is not None:
            self.errors.decide(operation.decides(*(arg.detach() for arg in args)))
        if operation.gives is Kind.INT and operation.takes == (Kind.FLOAT,):
            inside = args[0].detach().abs() < _LARGE
            if not bool(inside.all()):
                raise Unfit("an int of a float that does not fit")
        found = operation.rule(*args)
        if operation.rough:
            found = self.errors.sloped(found, args[0])
        return self.errors.operated(found, operation.rounding, args[0])


@dataclass(frozen=True, slots=True)
class Result:
    """What a case gives."""

    values: dict[str, torch.Tensor]
    """``out``, ``lse`` and gradients by name, fp64."""
    live: torch.Tensor
    """Bool (batch, heads, q_len, kv_len)."""
    score: torch.Tensor
    """Final scores of live pairs."""
    raw: torch.Tensor
    """Raw scores of these."""
    weights: torch.Tensor
    """Weights before dropout (batch, heads, q_len, kv_len)."""
    decisions: list[torch.Tensor]


class Oracle:
    """Interprets one case."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case = case
        found = list(shapes(case).values())
        if any(size < 0 for shape in found for size in shape):
            raise Unfit("a tensor that would have fewer than no elements")
        if any(math.prod(shape) > MOST_ELEMENTS for shape in found):
            raise Unfit("a tensor that is too large")
        call = python_call(case, "float64", device)
        given = {**call.operands, **call.captures}
        self.given = {name: self._leaf(value_of(source)) for name, source in given.items()}
        self.learned = call.learned
        self.device = device
        self.arriving = [x.double().to(device) for x in arriving(case)]

    @staticmethod
    def _leaf(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floating else value

    def run(
        self, errors: Errors | None = None, kept: torch.Tensor | None = None, backward: bool = True
    ) -> Result:
        """The results, by arithmetic that errs as ``errors`` draws.

        Args:
            errors: None for none.
            kept: Bool (batch, heads, q_len, kv_len): what dropout keeps.
            backward: Whether gradients are wanted.

        Raises:
            Unfit: A value that the language does not define, or that no dtype holds.
        """
        errors = errors or Errors()
        leaves = {
            name: value.detach().clone().requires_grad_(name in self.learned)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in self.given.items()
        }
        tensors = {n: x for n, x in leaves.items() if isinstance(x, torch.Tensor)}
        interpreter = Interpreter(self.case, tensors, errors)
        pairs = self._pairs(tensors, errors)
        with torch.no_grad():
            live, _ = self._liveness(interpreter, pairs)
        alive = pairs.select(live)
        score, own, sink = self._scores(interpreter, alive)
        if not bool(score.isfinite().all()):
            raise Unfit("a score that is not finite")
        weights, values = self._weights(_Parts(alive, score, own, sink), errors)
        left = weights if kept is None else weights * kept / (1 - (self.case.dropout or 0.0))
        values["out"] = self._out(left, tensors["v"], errors)
        sizes = self.case.sizes
        shape = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
        if backward:
            values |= self._gradients(values, tensors)
        return Result(
            {name: value.detach() for name, value in values.items()},
            live.reshape(shape),
            score.detach(),
            alive.raw.detach(),
            weights.detach(),
            errors.decisions,
        )

    def _pairs(self, tensors: Mapping[str, torch.Tensor], errors: Errors) -> Pairs:
        s, at = self.case.sizes, self.case.positions
        group = s.heads // s.kv_heads
        heads = torch.arange(s.heads, device=self.device)
        q_at = torch.tensor(at.q_index or range(s.q_len), dtype=torch.int64, device=self.device)
        kv_at = torch.tensor(at.kv_index or range(s.kv_len), dtype=torch.int64, device=self.device)
        if at.q_index is None:
            q_at = q_at + at.q_offset
        firsts = torch.tensor(at.q_starts or [0] * s.batch, dtype=torch.int64, device=self.device)
        if at.kv_index is None:
            kv_at = kv_at + at.kv_offset
        axes = (
            torch.arange(s.batch, device=self.device), heads,
            torch.arange(s.q_len, device=self.device), torch.arange(s.kv_len, device=self.device),
        )  # fmt: skip
        b, h, i, j = (x.flatten() for x in torch.meshgrid(*axes, indexing="ij"))
        scale = s.head_dim**-0.5 if self.case.scale is None else self.case.scale
        products = tensors["q"] @ tensors["k"][:, heads // group].mT * scale
        size = 4 * errors.precision.score
        # Terms that cancel leave an error of their own size.
        cancelled = tensors["q"].detach().abs() @ tensors["k"].detach().abs()[:, heads // group].mT
        most = size * abs(scale) * cancelled.nan_to_num(0.0, 0.0).flatten()
        raw = errors.rounded(products.flatten(), size, size) + most * (errors.factor(most, 1.0) - 1)
        names = {"b": b, "h": h, "hkv": h // group, "q": q_at[i] + firsts[b],
                 "kv": kv_at[j]}  # fmt: skip
        if at.kv_lengths is not None:
            lengths = torch.tensor(at.kv_lengths, dtype=torch.int64, device=self.device)
            names["kv_len"] = lengths[b]
        if at.counts is not None:
            counts = torch.tensor(at.counts, dtype=torch.int64, device=self.device)
            names["q_len"] = names["kv_len"]
            names["token"] = (counts.cumsum(0) - s.q_len)[b] + i
        return Pairs(torch.arange(len(b), device=self.device), names, raw)

    def _liveness(self, interpreter: Interpreter, pairs: Pairs) -> tuple[torch.Tensor, Frame]:
        """Which pairs take part, and what names stand for after the last line."""
        live = torch.ones(pairs.row.shape, dtype=torch.bool, device=self.device)
        if self.case.positions.kv_lengths is not None:
            live = pairs.variables["kv"] < pairs.variables["kv_len"]
        frame = Frame()
        interpreter.errors.masking = True
        for line in self.case.lines:
            if line.target is Target.MASK:
                live = live & interpreter.value(line.value, pairs, frame)
            elif line.target is Target.SCORE:
                if isinstance(line.value, Masked):
                    live = live & interpreter.value(line.value.args[0], pairs, frame)
                frame = Frame((line.value, frame), frame.locals)
            elif line.target is Target.LOCAL:
                frame = Frame(frame.score, {**frame.locals, line.name: (line.value, frame)})
        interpreter.errors.masking = False
        return live, frame

    def _scores(
        self, interpreter: Interpreter, alive: Pairs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Final scores, own weights and sinks of live pairs."""
        frame, weights, sink = Frame(), None, None
        late = []
        for line in self.case.lines:
            if line.target is Target.SCORE:
                frame = Frame((line.value, frame), frame.locals)
            elif line.target is Target.LOCAL:
                frame = Frame(frame.score, {**frame.locals, line.name: (line.value, frame)})
            elif line.target is not Target.MASK:
                late.append((line, frame))
        score = alive.raw if frame.score is None else interpreter.value(
            frame.score[0], alive, frame.score[1]
        )  # fmt: skip
        for line, seen in late:
            if line.target is Target.WEIGHTS:
                weights = interpreter.value(line.value, alive, Frame(frame.score, seen.locals))
            else:
                sink = interpreter.value(line.value, alive, seen)
        size = interpreter.errors.precision
        return interpreter.errors.rounded(score, size.score, size.weight), weights, sink

    def _weights(
        self, parts: _Parts, errors: Errors
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights of all pairs, and the log-sum-exp where there is one."""
        s, size = self.case.sizes, errors.precision.weight
        rows, found = s.batch * s.heads * s.q_len, {}
        if parts.weights is None:
            weights, lse = parts.softmax(rows, s.kv_len, errors)
            found["lse"] = lse.reshape(s.batch, s.heads, s.q_len)
        else:
            weights = errors.rounded(parts.weights, size, size)
        dense = weights.new_zeros(rows * s.kv_len).index_put((parts.pairs.row,), weights)
        return dense.reshape(s.batch, s.heads, s.q_len, s.kv_len), found

    def _out(self, weights: torch.Tensor, v: torch.Tensor, errors: Errors) -> torch.Tensor:
        s, size = self.case.sizes, errors.precision.weight
        heads = torch.arange(s.heads, device=self.device) // (s.heads // s.kv_heads)
        return errors.rounded(weights @ v[:, heads], size, size)

    def _gradients(
        self, values: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if not self.learned:
            return {}
        total = (values["out"] * self.arriving[0]).sum()
        if self.case.lse and "lse" in values:
            some = values["lse"].isfinite()
            total = total + (values["lse"][some] * self.arriving[1][some]).sum()
        leaves = [tensors[name] for name in self.learned]
        if not total.requires_grad:
            return {f"d{name}": torch.zeros_like(x) for name, x in tensors.items()
                    if name in self.learned}  # fmt: skip
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return {
            f"d{name}": torch.zeros_like(leaf) if grad is None else grad
            for name, leaf, grad in zip(self.learned, leaves, found, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Parts:
    """What live pairs bring to their rows."""

    pairs: Pairs
    score: torch.Tensor
    weights: torch.Tensor | None
    sink: torch.Tensor | None

    def softmax(self, rows: int, kv_len: int, errors: Errors) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of pairs, and the log-sum-exp of each row."""
        size = errors.precision
        row = self.pairs.row // max(1, kv_len)
        lowest = self.score.new_full((rows,), -torch.inf)
        top = lowest.scatter_reduce(0, row, self.score.detach(), "amax")
        some = top > -torch.inf
        top = torch.where(some, top, 0.0)
        powers = errors.rounded(torch.exp(self.score - top[row]), size.weight, size.score)
        total = self.score.new_zeros(rows).index_add(0, row, powers)
        if self.sink is not None:
            # One pair of each row speaks for it: a sink does not depend on the key.
            first = torch.full((rows,), len(row), device=row.device).scatter_reduce(
                0, row, torch.arange(len(row), device=row.device), "amin"
            )
            place = first[some]
            total = total.index_add(0, row[place], torch.exp(self.sink[place] - top[row[place]]))
        total = torch.where(some, total, 1.0)
        # A logarithm near 0 has the absolute error of a sum near 1.
        lse = top + torch.log(errors.rounded(total, size.score, size.score))
        lse = torch.where(some, errors.rounded(lse, size.score, size.score), -torch.inf)
        return powers / errors.rounded(total, size.weight, size.weight)[row], lse
