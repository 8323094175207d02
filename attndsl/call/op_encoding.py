"""A call as the arguments of torch operators, which are few: torch takes a microsecond for each.

Every operator takes ``(tensors, what, ints, floats)``. ``what`` is a string for all that is
constant: words, the backend's name, and the program's spec, with bars between them. The operator of
gradients has one part more before these, and the results before the call's tensors.

Inductor writes a graph's nodes into comments of the code that it generates. So ``what`` is one line
without quotes of Python: backslashes, single quotes, bars and percent signs are percent-encoded.

Saved graphs hold lists of one type only, and packages of AOTInductor give None for empty lists of
tensors and of ints: there are always some of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from attndsl.foundation.caches import memoised

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

SCHEMA = "Tensor[] tensors, str what, SymInt[] ints, float[] floats"
"""Arguments of every operator."""


class EncodedCall(NamedTuple):
    """Contents of a call, as :func:`packed` writes them into the operators' arguments."""

    spec: str
    """The program, see :mod:`attndsl.runtime.program_store`."""
    backend: str
    """The backend asked for."""
    checked: bool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tensors: Sequence[torch.Tensor] = ()
    given: Sequence[torch.Tensor] = ()
    """The params that are tensors."""
    is_given: Sequence[bool] = ()
    """For each param, True if it is a tensor in ``given``."""
    ints: Sequence[int] = ()
    """The other params that are ints or bools."""
    floats: Sequence[float] = ()
    """The others that are floats, and behind them the scale, if it is no default."""
    varying: torch.Tensor | None = None
    """(n,), fp64, on the CPU: replaces ``floats`` where one of them is another number in each run
    of a graph."""
    q_offset: int = 0
    kv_offset: int = 0
    q_origin: torch.Tensor | None = None
    """An index vector, or an offset; replaces ``q_offset``."""
    kv_origin: torch.Tensor | None = None
    seed: int = 0
    deterministic: bool = False
    drawn: torch.Tensor | None = None
    """A 0-d seed; replaces ``seed``, which would be one number for all runs of a graph."""
    wide: bool = False
    """True if the output is in fp32."""
    whole: Sequence[int] = ()
    """Place in a larger call: its q_len, kv_len (-1 where not given), heads, kv_heads and batch,
    h_offset, b_offset, and 1 for each origin that is an offset for each batch entry, or else 0.
    Empty for calls that are no parts."""
    kv_lengths: torch.Tensor | None = None


class OpArguments(NamedTuple):
    """The arguments of an operator."""

    tensors: list[torch.Tensor]
    what: str
    ints: list[int]
    floats: list[float]


class AskedGradients(NamedTuple):
    """Gradients requested of the operator of gradients, and their form."""

    wants: Sequence[bool]
    """True for each wanted gradient of q, k, v, captured tensors and params that are tensors."""
    wide: bool = False
    """True if dQ, dK and dV are in fp32."""
    partial: bool = False
    """True if other calls add more to them."""
    has_lse: bool = False
    """True if lse has a gradient too."""

    @property
    def results(self) -> int:
        """Tensors before the call's: out, lse, and their gradients."""
        return 4 if self.has_lse else 3


class Heading(NamedTuple):
    """Fields of a call in the operators' string argument ``what``."""

    spec: str
    backend: str
    checked: bool
    deterministic: bool
    wide: bool
    tensors: int
    """Number of captured tensors."""
    is_given: tuple[bool, ...]
    positions: tuple[str, ...]
    """Names of the tensors of positions, lengths and the seed that the call has."""
    is_part: bool

    @property
    def inputs(self) -> int:
        """Number of tensors that may have gradients: q, k, v, captured tensors, params."""
        return 3 + self.tensors + sum(self.is_given)

    @property
    def plain(self) -> bool:
        """True if no value of a tensor is looked at, so that shapes and numbers say everything."""
        return not (self.checked or self.positions or self.is_part or any(self.is_given))


_POSITIONS = ("varying", "q_origin", "kv_origin", "drawn", "kv_lengths")
"""Operands that are single tensors, beside q, k and v."""
_ENCODED = [(x, f"%{ord(x):02X}") for x in "%\\'|\n\r"]
"""Percent signs first, since the others' codes have them."""
_WHOLE = 9
"""Numbers of ``whole``."""


def packed(given: EncodedCall) -> OpArguments:
    """The operator's arguments for a call."""
    given_bits = "".join(["1" if x else "0" for x in given.is_given])
    flags = [("checked", given.checked), ("deterministic", given.deterministic)]
    flags += [("wide", given.wide), ("part", len(given.whole) > 0)]
    tensors = (given.varying, given.q_origin, given.kv_origin, given.drawn, given.kv_lengths)
    positions = [(name, x) for name, x in zip(_POSITIONS, tensors, strict=True) if x is not None]
    words = [f"tensors={len(given.tensors)}", f"given={given_bits}"]
    words += [name for name, is_on in flags if is_on] + [name for name, _ in positions]
    return OpArguments(
        [given.q, given.k, given.v, *given.tensors, *given.given, *[x for _, x in positions]],
        "|".join([" ".join(words), _encoded(given.backend), _encoded(given.spec)]),
        [given.q_offset, given.kv_offset, given.seed, *given.whole, *given.ints],
        [*given.floats],
    )


def _encoded(text: str) -> str:
    """Encode ASCII text for :func:`urllib.parse.unquote` to read. Dynamo follows it."""
    for character, code in _ENCODED:
        text = text.replace(character, code)
    return text


def unpacked(tensors: Any, what: str, ints: Any, floats: Any) -> EncodedCall:
    """The call that :func:`packed` made arguments of."""
    head = heading(what)
    q, k, v, *rest = tensors
    second = head.inputs - 3
    q_offset, kv_offset, seed, *numbers = ints
    after = _WHOLE if head.is_part else 0
    return EncodedCall(
        head.spec, head.backend, head.checked, q, k, v, rest[: head.tensors],
        rest[head.tensors : second], head.is_given, numbers[after:], floats,
        q_offset=q_offset, kv_offset=kv_offset, seed=seed, deterministic=head.deterministic,
        wide=head.wide, whole=numbers[:after],
        **dict(zip(head.positions, rest[second:], strict=True)),
    )  # fmt: skip


def of_gradients(
    given: OpArguments, results: Sequence[torch.Tensor], asked: AskedGradients
) -> OpArguments:
    """The arguments for a call's gradients.

    Args:
        given: Those for the call.
        results: out, lse, the gradient of out, and that of lse where it has one.
        asked: What is asked.
    """
    wants = "".join(["1" if want else "0" for want in asked.wants])
    flags = ("wide", asked.wide), ("partial", asked.partial), ("lse", asked.has_lse)
    line = " ".join([f"wants={wants}", *[name for name, is_on in flags if is_on]])
    return given._replace(tensors=[*results, *given.tensors], what=f"{line}|{given.what}")


def parts_of_gradients(
    tensors: list[torch.Tensor], what: str
) -> tuple[list[torch.Tensor], AskedGradients, list[torch.Tensor], str]:
    """The results, the requested gradients, and the call's tensors and ``what``."""
    asked, rest = asked_of(what)
    return tensors[: asked.results], asked, tensors[asked.results :], rest


@memoised("gradients that strings ask for", 4096)
def asked_of(what: str) -> tuple[AskedGradients, str]:
    """Split the string of a gradient call into the gradients asked for and the call's ``what``."""
    line, rest = what.split("|", 1)
    (wants, *flags) = line.split(" ")
    chosen = [bit == "1" for bit in wants.removeprefix("wants=")]
    return AskedGradients(chosen, "wide" in flags, "partial" in flags, "lse" in flags), rest


@memoised("headings of calls", 4096)
def heading(what: str) -> Heading:
    """Parse the string argument ``what`` of a call."""
    line, backend, spec = what.split("|")
    words = line.split(" ")
    values = dict(word.split("=") for word in words if "=" in word)
    return Heading(
        unquote(spec), unquote(backend), "checked" in words, "deterministic" in words,
        "wide" in words,
        int(values["tensors"]), tuple([bit == "1" for bit in values["given"]]),
        tuple([name for name in _POSITIONS if name in words]), "part" in words,
    )  # fmt: skip
