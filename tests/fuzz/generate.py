"""Random cases: programs of the whole language, and calls that exercise their arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .expressions import FLOAT, SCORE, Expressions, apply, as_float
from .operations import PROMOTE, operation
from .oracle import Oracle, Unfit
from .program import (
    Apply,
    Case,
    Given,
    Invoke,
    Kind,
    Layout,
    Line,
    Literal,
    Load,
    Local,
    Masked,
    Name,
    Positions,
    Sizes,
    Target,
    Values,
    everything,
    walk,
)

if TYPE_CHECKING:
    import random

    from .program import Expr, Param, Tensor


_ATTEMPTS = 6
_ANY = 0.07
"""Share of cases that are taken as they are drawn."""
_CHANGED = 1e-3
_DROPOUT = 0.06
"""Share of cases with dropout."""
_MOST_KEYS = 256
"""As many as V has columns where it is the identity, which shows what dropout keeps."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large calls are."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    most: int
    """The most pairs, of all heads and batch entries."""
    backward: float = 0.9
    """Share of calls that have gradients."""


SMALL = Scale((0, 1, 1, 2, 3, 5, 7, 8, 9, 12, 16, 19), (1, 2, 4, 8, 16), 3000)
"""For torch operations on CPUs."""
TILED = Scale((1, 2, 3, 5, 7, 9, 16, 19, 33), (2, 4, 8, 16), 1500, 0.35)
"""For kernels under the interpreter, whose tiles have 32 rows: one or two."""
SHARED_KEYS = Scale((1, 2, 3, 5, 9, 16, 33, 70, 130), (2, 4, 8, 16), 2500, 0.1)
"""For interpreted kernels of few rows, which share out more than 32 keys."""
PIECES = Scale((1, 2, 5, 9, 16, 19, 33, 70, 80, 91, 130), (2, 4, 8, 16), 6000, 0.7)
"""For interpreted kernels that hold all keys, in one to three pieces."""
DEVICE = Scale((1, 7, 16, 33, 64, 65, 100, 108, 128, 130, 200, 257), (16, 32, 64, 64, 128), 300000)
"""For GPUs."""


def generate(rng: random.Random, scale: Scale = SMALL) -> Case:
    """A case; the same for the same state of ``rng``.

    Most programs whose mask or score does nothing, or whose scores are not finite, are drawn again.
    """
    for _ in range(_ATTEMPTS):
        case = drawn(rng, scale)
        if rng.random() < _ANY or useful(case):
            break
    return case


def useful(case: Case) -> bool:
    try:
        result = Oracle(case).run(backward=False)
    except Unfit:
        return False
    masks = any(x.target is Target.MASK or isinstance(x.value, Masked) for x in case.lines)
    share = float(result.live.double().mean()) if result.live.numel() else 1.0
    if masks:
        return 0 < share < 1
    return share == 1 and bool(((result.score - result.raw).abs() > _CHANGED).any())


def drawn(rng: random.Random, scale: Scale) -> Case:
    sizes = _sizes(rng, scale)
    draw = Expressions(rng, sizes)
    lines = _lines(rng, draw)
    own = any(line.target is Target.WEIGHTS for line in lines)
    drops = sizes.kv_len <= _MOST_KEYS and rng.random() < _DROPOUT
    case = Case(
        lines=tuple(lines),
        sizes=sizes,
        inputs=tuple(_operand(rng) for _ in range(3)),
        params=tuple(draw.names.params),
        tensors=tuple(draw.names.tensors),
        functions=tuple(draw.names.functions),
        dims=tuple(draw.names.dims.items()),
        positions=positions(rng, sizes),
        scale=rng.choice((None, None, None, 0.5, 0.3, 1.0, -0.4, 0.0)),
        lse=not own and rng.random() < 0.5,
        dropout=rng.choice((0.0, 0.1, 0.5, 0.9)) if drops else None,
        seed=rng.randrange(1 << 20),
    )
    return trimmed(case if rng.random() < scale.backward else _forward_only(case))


def _forward_only(case: Case) -> Case:
    """Without gradients, which take most of the time in interpreted kernels."""
    return replace(
        case,
        inputs=tuple(replace(values, learned=False) for values in case.inputs),
        tensors=tuple(
            replace(tensor, values=replace(tensor.values, learned=False)) for tensor in case.tensors
        ),
        params=tuple(
            replace(param, given=Given.TENSOR) if param.given is Given.LEARNED else param
            for param in case.params
        ),
    )


def _sizes(rng: random.Random, scale: Scale) -> Sizes:
    while True:
        kv_heads = rng.choice((1, 1, 2, 3))
        heads = kv_heads * rng.choice((1, 1, 2, 2, 3, 4))
        batch = rng.choice((1, 1, 2, 2, 3)) if rng.random() < 0.98 else 0
        q_len, kv_len = rng.choice(scale.lengths), rng.choice(scale.lengths)
        if not q_len * kv_len and rng.random() < 0.8:
            continue
        head_dim, value_dim = rng.choice(scale.head_dims), rng.choice(scale.head_dims)
        if rng.random() < 0.6:
            value_dim = head_dim
        if batch * heads * q_len * kv_len <= scale.most:
            return Sizes(batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim)


def _operand(rng: random.Random) -> Values:
    layouts = (Layout.PLAIN, Layout.PLAIN, Layout.SWAPPED, *Layout)
    # Multiples of 1/64 below 2 have as many bits as bf16 holds, so all dtypes get the same.
    return Values("", -127, 127, 64, rng.randrange(1 << 20), rng.choice(layouts),
                  rng.random() < 0.75)  # fmt: skip


def positions(rng: random.Random, sizes: Sizes) -> Positions:
    if rng.random() < 0.55:
        return Positions()
    offsets = (0, 0, 1, 3, 7, 16, -2, -5, 100)
    found = Positions(rng.choice(offsets), rng.choice(offsets), rng.random() < 0.3)
    if rng.random() < 0.2:
        found = replace(found, q_index=_index(rng, sizes.q_len))
    if rng.random() < 0.2:
        found = replace(found, kv_index=_index(rng, sizes.kv_len))
    return found


def ragged(rng: random.Random, case: Case) -> Case:
    """The same with rooms of keys that batch entries fill to different lengths.

    Their queries are the last ones, as in decoding, or lie anywhere.
    """
    sizes = case.sizes
    lengths = tuple(rng.randint(0, sizes.kv_len) for _ in range(sizes.batch))
    if rng.random() < 0.6:
        starts = tuple(length - sizes.q_len for length in lengths)
    else:
        starts = tuple(rng.randint(-3, sizes.kv_len + 3) for _ in lengths)
    return replace(case, positions=Positions(q_starts=starts, kv_lengths=lengths))


def _index(rng: random.Random, length: int) -> tuple[int, ...]:
    start = rng.choice((0, 0, -3, 10))
    index = [start + rng.randrange(2 * length) for _ in range(length)]
    return tuple(sorted(index) if rng.random() < 0.5 else index)


def _lines(rng: random.Random, draw: Expressions) -> list[Line]:
    """Lines of a program: mostly a mask and a score, now and then a sink or weights."""
    targets = []
    if rng.random() < 0.75:
        targets.append(Target.MASK)
    targets += [Target.SCORE] * rng.choice((0, 1, 1, 1, 2, 2, 3))
    targets += [Target.LOCAL] * rng.choice((0, 0, 0, 1, 1, 2))
    some = rng.random()
    if some < 0.15:
        targets.append(Target.SINK)
    elif some < 0.27:
        targets.append(Target.WEIGHTS)
    rng.shuffle(targets)
    return [_line(target, rng, draw) for target in targets or [Target.SCORE]]


def _line(target: Target, rng: random.Random, draw: Expressions) -> Line:
    names = draw.names
    names.score = target is not Target.SINK and (target is not Target.MASK or rng.random() < 0.2)
    names.row = target is Target.SINK
    depth = rng.choice((1, 2, 2, 3))
    if target is Target.MASK:
        value = draw.bool(depth + 1)
    elif target is Target.SCORE:
        value = _score(rng, draw, depth)
    elif target is Target.SINK:
        value = draw.tame(depth)
    elif target is Target.WEIGHTS:
        value = _weights(rng, draw, depth)
    else:
        value = draw.of(rng.choice(tuple(Kind)), depth)
    names.row = False
    if target is not Target.LOCAL:
        return Line(target, value)
    while isinstance(value, Apply) and value.operation is PROMOTE:
        value = Apply(operation("float", Kind.INT), value.args)
    name = f"a{len(names.locals)}"
    names.locals.append(Local(name, value.kind))
    if _reads_score(value, names.scored):
        names.scored.add(name)
    return Line(target, value, name)


def _reads_score(value: Expr, scored: set[str]) -> bool:
    return any(
        item == SCORE or (isinstance(item, Local) and item.name in scored) for item in walk(value)
    )


def _score(rng: random.Random, draw: Expressions, depth: int) -> Expr:
    """A score line that keeps the score small, and mostly depends on the score before."""
    return draw.pick(
        (6, lambda: apply(rng.choice("+-"), SCORE, draw.tame(depth))),
        (3, lambda: apply("*", SCORE, draw.tame(depth))),
        (2, lambda: apply("*", Literal(3.0), apply("tanh", apply("/", SCORE, Literal(3.0))))),
        (2, lambda: draw.prelude_score()),
        (3, lambda: _chosen(draw, depth)),
        (3, lambda: _masked(rng, draw, depth)),
        (2, lambda: apply("clamp", as_float(draw.float(depth + 1)), Literal(-8), Literal(9.0))),
        (4 if len(draw.names.tensors) < 4 else 0, lambda: apply("+", SCORE, draw.dot())),
        (2, lambda: apply("+", SCORE, apply("sin", as_float(draw.float(depth + 1))))),
        (1, lambda: draw.float(depth)),
    )


def _chosen(draw: Expressions, depth: int) -> Expr:
    args = draw.bool(depth), SCORE, apply("+", SCORE, draw.tame(depth))
    return Apply(operation("where", Kind.BOOL, FLOAT, FLOAT), args)


def _masked(rng: random.Random, draw: Expressions, depth: int) -> Expr:
    inner: Expr = SCORE
    if rng.random() < 0.4:
        inner = apply("+", SCORE, draw.tame(depth - 1))
    scored, draw.names.score = draw.names.score, rng.random() < 0.15
    condition = draw.bool(depth)
    draw.names.score = scored
    return Masked((condition, inner), rng.random() < 0.3)


def _weights(rng: random.Random, draw: Expressions, depth: int) -> Expr:
    # A local that reads the score is refused where the score changes later.
    known = draw.names.locals
    draw.names.locals = [x for x in known if x.name not in draw.names.scored]
    plain = apply(rng.choice(("sigmoid", "relu", "tanh", "softplus", "sin")), SCORE)
    found = draw.pick(
        (3, lambda: plain),
        (2, lambda: apply("*", plain, draw.tame(depth))),
        (2, lambda: apply("exp", apply("clamp", SCORE, Literal(-4), Literal(2)))),
        (1, lambda: apply("clamp", as_float(draw.float(depth)), Literal(-1.0), Literal(2.0))),
    )
    draw.names.locals = known
    return found


def trimmed(case: Case) -> Case:
    """``case`` without declarations that nothing uses; own dims have a tensor that binds them."""
    functions = {
        item.function.name: item.function
        for item in everything(case) if isinstance(item, Invoke) and not item.function.prelude
    }  # fmt: skip
    used = {
        item.name if isinstance(item, Name) else getattr(item, "tensor", None)
        for item in everything(case)
    }
    for item in everything(case):
        if not isinstance(item, Name | Load) and hasattr(item, "left"):
            used |= {item.left, item.right}
    tensors = tuple(tensor for tensor in case.tensors if tensor.name in used)
    case = replace(case, tensors=tensors)
    named = {item.name for item in everything(case) if isinstance(item, Name)}
    return replace(
        case,
        params=tuple(_fitting(param, tensors) for param in case.params if param.name in named),
        functions=tuple(f for f in case.functions if f.name in functions),
        dims=tuple((name, size) for name, size in case.dims if name in named),
    )


def _fitting(param: Param, tensors: tuple[Tensor, ...]) -> Param:
    """A param of a dim is a number."""
    dims = {
        item.name for t in tensors for d in t.dims for item in walk(d) if isinstance(item, Name)
    }
    if param.name in dims and param.given in (Given.TENSOR, Given.LEARNED):
        return replace(param, given=Given.NUMBER)
    return param
